"""Bigram languages with known probabilities, and a small learner that is fitted to their counts.

The learner is the model of MixCE's synthetic experiment (embedding, one hidden layer, softmax). A leading
dimension S holds independent runs. Each step uses all counts of a sample, so that the gradient is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from emo.pipeline.loss.expected import Gradient

ENTROPY_SHARE = 0.5  # entropy of the next token in a geometric truth, as a share of log V
HIDDEN = 50
GROWTH = 1.12  # ratio between the steps of two evaluations, from FIRST on
FIRST = 5
PATIENCE = 8  # evaluations without an improvement (2.5 times as many steps), after which training ends
PART = 2**17  # matrix entries of a group of runs; larger matrices do not fit into the cache


class Truth(NamedTuple):
    """A bigram language."""

    rows: Tensor  # [V, V] next-token probabilities by context
    contexts: Tensor  # [V] frequency of each token as a context
    embedding: Tensor  # [V, H] embedding of the true costs


def geometric_truth(V: int, share: float, generator: torch.Generator, width: int = 16) -> Truth:
    """Draw a truth whose next tokens are close in an embedding to a `share` in [0, 1], and else random.

    logits_x = b (sqrt(share) h_x . e_i + sqrt(1 - share) noise), where b sets each row's entropy to
    ENTROPY_SHARE log V nats. At share 1 tokens with similar contexts are close. At 0 costs are unrelated.
    """
    draw = {"generator": generator, "dtype": torch.float64}
    embedding = nn.functional.normalize(torch.randn(V, width, **draw), dim=-1)  # type: ignore[call-overload]
    directions = torch.randn(V, width, **draw)  # type: ignore[call-overload]
    noise = torch.randn(V, V, **draw)  # type: ignore[call-overload]
    logits = share**0.5 * directions @ embedding.T + (1 - share) ** 0.5 * noise
    low = torch.zeros(V, 1, dtype=torch.float64)
    high = torch.full((V, 1), 1e3, dtype=torch.float64)
    target = ENTROPY_SHARE * torch.log(torch.tensor(V, dtype=torch.float64))
    for _ in range(60):
        b = (low + high) / 2
        rows = torch.softmax(b * logits, -1)
        entropy = -torch.special.xlogy(rows, rows).sum(-1, keepdim=True)
        low = torch.where(entropy > target, b, low)
        high = torch.where(entropy > target, high, b)
    return Truth(rows, _stationary(rows), embedding)


def draw_dirichlet(n: int, V: int, concentration: float, generator: torch.Generator) -> Tensor:
    """Draw n distributions over V tokens, float64, without exact zeros."""
    alphas = torch.full((V,), concentration, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        rows = torch.distributions.Dirichlet(alphas).sample((n,)).clamp_min(1e-12)
    return rows / rows.sum(-1, keepdim=True)


def _stationary(rows: Tensor) -> Tensor:
    """Return the stationary distribution of a bigram language."""
    share = torch.full_like(rows[0], 1 / len(rows))
    for _ in range(200):
        share = 0.5 * (share + share @ rows)  # averaging makes periodic chains converge too
    return share / share.sum()


def sample_counts(truth: Truth, tokens: int, generator: torch.Generator) -> Tensor:
    """Draw the bigram counts [V, V] of a sample."""
    joint = (truth.contexts[:, None] * truth.rows).flatten()
    drawn = torch.multinomial(joint, tokens, replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=len(joint)).view_as(truth.rows)


class BigramSample(NamedTuple):
    """Bigram counts of S truths, one run each, and the truths' embeddings."""

    train: Tensor  # [S, V, V]
    dev: Tensor  # [S, V, V]
    embedding: Tensor  # [S, V, H]
    seeds: list[int]  # of the learners' initial weights, [S]

    def parts(self, entries: int = PART) -> Iterator[BigramSample]:
        """Yield the runs in groups with at most `entries` matrix entries."""
        size = max(1, entries // self.train[0].numel())
        for i in range(0, len(self.seeds), size):
            part = slice(i, i + size)
            yield BigramSample(self.train[part], self.dev[part], self.embedding[part], self.seeds[part])


class Learner(nn.Module):
    """S independent networks: embedding -> ReLU layer -> logits [S, V, V].

    head [S, V, H]: initial output matrices, onto whose dimension H the ReLU layer is projected.
    """

    def __init__(self, V: int, seeds: list[int], head: Tensor | None = None) -> None:
        super().__init__()

        def start(*shape: int) -> nn.Parameter:
            each = [torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in seeds]
            return nn.Parameter(torch.stack(each) / shape[0] ** 0.5)

        self.embedding = nn.Parameter(start(V, HIDDEN) * V**0.5)
        self.head = None if head is None else nn.Parameter(head.clone())
        self.hidden = start(HIDDEN, HIDDEN)
        self.out = start(HIDDEN, V if head is None else head.shape[-1])
        self.shift = nn.Parameter(torch.zeros(len(seeds), 1, HIDDEN))

    def forward(self) -> Tensor:
        out = torch.relu(self.embedding @ self.hidden + self.shift) @ self.out
        return out if self.head is None else out @ self.head.mT


class Fitted(NamedTuple):
    """Learners after the last step, and at their best evaluation on the development sample."""

    logits: Tensor  # [S, V, V]
    stopped: Tensor  # [S, V, V]
    nll: Tensor  # [S] nats per token of `stopped` on the development sample


Look = Callable[
    ["BigramSample", int, Tensor], None
]  # of the sample, the step, and the learners' logits [S, V, V]


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
    """Fit learners with Adam.

    Args:
        sample: Counts, which weight the contexts.
        rows: Target distributions [S, V, V].
        gradient: Expected gradient of the objective.
        lr: Learning rate.
        steps: Maximum number of steps.
        head: Initial output matrices, see `Learner`.
        head_rate: Learning rate of the head relative to `lr`. A head with rate 0 is frozen.
        look: Called at each evaluation.
        patient: Train for all `steps`, instead of ending after PATIENCE evaluations without an improvement.
    """
    learner = Learner(rows.shape[-1], sample.seeds, head)
    others = [p for name, p in learner.named_parameters() if name != "head"]
    groups: list[dict[str, object]] = [{"params": others}]
    if learner.head is not None and head_rate:
        groups.append({"params": [learner.head], "lr": head_rate * lr})
    optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=1e-4, fused=True)
    contexts = sample.train.sum(-1, keepdim=True)
    share = (contexts / contexts.sum(1, keepdim=True)).float()
    stopped = torch.full_like(rows, torch.nan)
    least = torch.full((len(rows),), torch.inf)
    looks = looks_until(steps)
    improved = 0  # number of the last evaluation with an improvement
    for step in range(1, steps + 1):
        logits = learner()
        q = torch.softmax(logits.detach(), -1)
        optimizer.zero_grad()
        logits.backward(share * gradient(q, rows))
        optimizer.step()
        if step not in looks:
            continue
        logits = learner().detach()
        # a diverged run is never better
        nll = nats_per_token(logits, sample.dev).nan_to_num(torch.inf)
        ahead = nll < least
        stopped = torch.where(ahead[:, None, None], logits, stopped)
        least = torch.where(ahead, nll, least)
        improved = looks[step] if ahead.any() else improved
        if look is not None:
            look(sample, step, logits)
        if not patient and looks[step] - improved >= PATIENCE:
            break
    return Fitted(logits, stopped, least)


def looks_until(steps: int) -> dict[int, int]:
    """Return the number of each evaluation by its step. The last step has one."""
    every = {steps}
    step = float(FIRST)
    while step < steps:
        every.add(round(step))
        step *= GROWTH
    return {step: number for number, step in enumerate(sorted(every))}


def nats_per_token(logits: Tensor, counts: Tensor) -> Tensor:
    """Return the mean negative log-likelihood [S] of counts [S, V, V] under logits [S, V, V]."""
    logq = torch.log_softmax(logits.double(), -1)
    return -(counts * logq).sum((-2, -1)) / counts.sum((-2, -1))
