"""Bigram languages whose every probability is known, and a small learner that is fitted to their counts.

The learner is that of MixCE's synthetic experiment (embedding, one hidden layer, softmax), for many runs at
once: a leading dimension S of independent runs. A bigram sample is its counts, so every step sees the whole
sample: the gradient is exact and no batch order adds noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emo.pipeline.loss.expected import Gradient

ENTROPY_SHARE = 0.5  # of log V: how uncertain the next token is in a truth with geometry
HIDDEN = 50
GROWTH = 1.12  # of the steps from one look at the learners to the next, from FIRST on
FIRST = 5
PATIENCE = 8  # looks without a better run, after which training ends: two and a half times as many steps
PART = 2**17  # entries: beyond them a matrix leaves the cache, and runs together are slower than one by one


class Truth(NamedTuple):
    """A bigram language."""

    rows: Tensor  # [V, V] next-token probabilities by context
    contexts: Tensor  # [V] how often each token is a context
    embedding: Tensor  # [V, H] what true costs are made from


def geometric_truth(V: int, share: float, generator: torch.Generator, width: int = 16) -> Truth:
    """Return a truth whose next tokens are neighbours in an embedding, to a `share` in [0, 1], else chance.

    logits_x = b (sqrt(share) h_x . e_i + sqrt(1 - share) noise), where b gives each row ENTROPY_SHARE log V
    nats. At share 1 tokens that are plausible together lie close together, at 0 costs say nothing about P.
    """
    draw = {"generator": generator, "dtype": torch.float64}
    embedding = nn.functional.normalize(torch.randn(V, width, **draw), dim=-1)  # type: ignore[call-overload]
    directions = torch.randn(V, width, **draw)  # type: ignore[call-overload]
    noise = torch.randn(V, V, **draw)  # type: ignore[call-overload]
    logits = share**0.5 * directions @ embedding.T + (1 - share) ** 0.5 * noise
    low, high = torch.zeros(V, 1, dtype=torch.float64), torch.full((V, 1), 1e3, dtype=torch.float64)
    target = ENTROPY_SHARE * torch.log(torch.tensor(V, dtype=torch.float64))
    for _ in range(60):
        b = (low + high) / 2
        rows = torch.softmax(b * logits, -1)
        entropy = -torch.special.xlogy(rows, rows).sum(-1, keepdim=True)
        low, high = torch.where(entropy > target, b, low), torch.where(entropy > target, high, b)
    return Truth(rows, _stationary(rows), embedding)


def draw_dirichlet(n: int, V: int, concentration: float, generator: torch.Generator) -> Tensor:
    """Return n rows of probabilities over V tokens, float64; none is exactly zero."""
    alphas = torch.full((V,), concentration, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        rows = torch.distributions.Dirichlet(alphas).sample((n,)).clamp_min(1e-12)
    return rows / rows.sum(-1, keepdim=True)


def _stationary(rows: Tensor) -> Tensor:
    """Return how often each token is met in a long text."""
    share = torch.full_like(rows[0], 1 / len(rows))
    for _ in range(200):
        share = 0.5 * (share + share @ rows)  # halved: a periodic chain settles, too
    return share / share.sum()


def sample_counts(truth: Truth, tokens: int, generator: torch.Generator) -> Tensor:
    """Return the bigram counts [V, V] of a sample of so many tokens."""
    joint = (truth.contexts[:, None] * truth.rows).flatten()
    drawn = torch.multinomial(joint, tokens, replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=len(joint)).view_as(truth.rows)


class BigramSample(NamedTuple):
    """Bigram counts of S truths, one run each, and the embeddings that those truths were made with."""

    train: Tensor  # [S, V, V]
    dev: Tensor  # [S, V, V]
    embedding: Tensor  # [S, V, H]
    seeds: list[int]  # of the learners' first weights, [S]

    def parts(self, entries: int = PART) -> Iterator[BigramSample]:
        """Yield the runs in groups whose matrices have at most so many entries together."""
        size = max(1, entries // self.train[0].numel())
        for i in range(0, len(self.seeds), size):
            part = slice(i, i + size)
            yield BigramSample(self.train[part], self.dev[part], self.embedding[part], self.seeds[part])


class Learner(nn.Module):
    """S independent networks: embedding -> ReLU layer -> logits [S, V, V].

    head [S, V, H]: what the output matrices begin at; the ReLU layer is then projected onto H.
    """

    def __init__(self, V: int, seeds: list[int], head: Tensor | None = None) -> None:
        super().__init__()

        def start(*shape: int) -> nn.Parameter:
            each = [torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in seeds]
            return nn.Parameter(torch.stack(each) / shape[0] ** 0.5)

        self.embedding = nn.Parameter(start(V, HIDDEN) * V**0.5)
        self.head = None if head is None else nn.Parameter(head.clone())
        self.hidden, self.out = start(HIDDEN, HIDDEN), start(HIDDEN, V if head is None else head.shape[-1])
        self.shift = nn.Parameter(torch.zeros(len(seeds), 1, HIDDEN))

    def forward(self) -> Tensor:
        out = torch.relu(self.embedding @ self.hidden + self.shift) @ self.out
        return out if self.head is None else out @ self.head.mT


class Fitted(NamedTuple):
    """Learners after their last step, and as they were when the development sample liked them best."""

    logits: Tensor  # [S, V, V]
    stopped: Tensor  # [S, V, V]
    nll: Tensor  # [S], nats per token of the development sample, of `stopped`


Look = Callable[
    ["BigramSample", int, Tensor], None
]  # given samples, a step, and the learners' logits [S, V, V]


def fit_learners(
    sample: BigramSample,
    rows: Tensor,
    gradient: Gradient,
    lr: float,
    steps: int,
    head: Tensor | None = None,
    head_rate: float = 0.0,
    look: Look | None = None,
    patient: bool = True,
) -> Fitted:
    """Fit learners by Adam to rows [S, V, V], the distributions that targets are drawn from.

    Contexts count as often as the sample has them. Unless `patient`, training ends before `steps` once the
    development sample has liked no run better for PATIENCE looks. head: see `Learner`; its learning rate is
    `head_rate` times the others', and where that is 0 it stays as it is given. look: called at every look.
    """
    learner = Learner(rows.shape[-1], sample.seeds, head)
    others = [p for name, p in learner.named_parameters() if name != "head"]
    groups: list[dict[str, Any]] = [{"params": others}]
    if learner.head is not None and head_rate:
        groups.append({"params": [learner.head], "lr": head_rate * lr})
    optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=1e-4, fused=True)
    contexts = sample.train.sum(-1, keepdim=True)
    share = (contexts / contexts.sum(1, keepdim=True)).float()
    stopped, least = torch.full_like(rows, torch.nan), torch.full((len(rows),), torch.inf)
    looks = looks_until(steps)
    improved = 0  # the last look at which a run did
    for step in range(1, steps + 1):
        logits = learner()
        q = torch.softmax(logits.detach(), -1)
        optimizer.zero_grad()
        logits.backward(share * gradient(q, rows))
        optimizer.step()
        if step not in looks:
            continue
        logits = learner().detach()
        # a run that diverged is never better
        nll = nats_per_token(logits, sample.dev).nan_to_num(torch.inf)
        ahead = nll < least
        stopped, least = torch.where(ahead[:, None, None], logits, stopped), torch.where(ahead, nll, least)
        improved = looks[step] if ahead.any() else improved
        if look is not None:
            look(sample, step, logits)
        if not patient and looks[step] - improved >= PATIENCE:
            break
    return Fitted(logits, stopped, least)


def looks_until(steps: int) -> dict[int, int]:
    """Return the steps after which learners are looked at, numbered; the last is among them."""
    every, step = {steps}, float(FIRST)
    while step < steps:
        every.add(round(step))
        step *= GROWTH
    return {step: number for number, step in enumerate(sorted(every))}


def nats_per_token(logits: Tensor, counts: Tensor) -> Tensor:
    """Return the mean negative log-likelihood [S] of counts [S, V, V] under logits [S, V, V]."""
    logq = torch.log_softmax(logits.double(), -1)
    return -(counts * logq).sum((-2, -1)) / counts.sum((-2, -1))
