"""Bigram languages whose every probability is known, and a small learner that is fitted to their counts.

The learner is that of MixCE's synthetic experiment (embedding, one hidden layer, softmax), for many runs at
once: a leading dimension S of independent runs. A bigram sample is its counts, so every step sees the whole
sample: the gradient is exact and no batch order adds noise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from emo.experiments.known_truth.expected import Costs, expected_gradient
from emo.pipeline.loss import Objective

ENTROPY_SHARE = 0.5  # of log V: how uncertain the next token is in a truth with geometry
HIDDEN = 50
CHECK_EVERY = 20  # steps between looks at the development sample


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


def dirichlet(n: int, V: int, concentration: float, generator: torch.Generator) -> Tensor:
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


def sample_counts(truth: Truth, tokens: int, seeds: list[int]) -> Tensor:
    """Return bigram counts [S, V, V] of samples of `tokens` tokens, one for each seed."""
    samples = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        joint = (truth.contexts[:, None] * truth.rows).flatten()
        drawn = torch.multinomial(joint, tokens, replacement=True, generator=generator)
        samples.append(torch.bincount(drawn, minlength=len(joint)).view_as(truth.rows))
    return torch.stack(samples)


class Learner(nn.Module):
    """S independent networks: embedding -> ReLU layer -> logits [S, V, V].

    head [S, V, H]: output matrices that are given and not trained; the ReLU layer is then projected onto H.
    """

    def __init__(self, V: int, seeds: list[int], head: Tensor | None = None) -> None:
        super().__init__()

        def start(*shape: int) -> nn.Parameter:
            each = [torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in seeds]
            return nn.Parameter(torch.stack(each) / shape[0] ** 0.5)

        self.embedding = nn.Parameter(start(V, HIDDEN) * V**0.5)
        self.head = head
        self.hidden, self.out = start(HIDDEN, HIDDEN), start(HIDDEN, V if head is None else head.shape[-1])
        self.shift = nn.Parameter(torch.zeros(len(seeds), 1, HIDDEN))

    def forward(self) -> Tensor:
        out = torch.relu(self.embedding @ self.hidden + self.shift) @ self.out
        return out if self.head is None else out @ self.head.mT


class Fitted(NamedTuple):
    """Learners as they were when the development sample liked them best."""

    logits: Tensor  # [S, V, V]
    nll: Tensor  # [S], nats per token of the development sample


def fit(
    train: Tensor,
    dev: Tensor,
    objective: Objective,
    costs: Costs,
    seeds: list[int],
    lr: float,
    steps: int = 2000,
    head: Tensor | None = None,
) -> Fitted:
    """Fit learners to counts [S, V, V] by Adam on the expected gradient, each stopped early on its `dev`.

    head: see `Learner`.
    """
    learner = Learner(train.shape[-1], seeds, head)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=lr, weight_decay=1e-4)
    total = train.sum(-1, keepdim=True)
    rows = (train / total.clamp_min(1)).float()
    share = (total / total.sum(1, keepdim=True)).float()
    best = Fitted(torch.full_like(rows, torch.nan), torch.full((len(seeds),), torch.inf))
    for step in range(1, steps + 1):
        logits = learner()
        q = torch.softmax(logits.detach(), -1)
        optimizer.zero_grad()
        logits.backward(share * expected_gradient(q, rows, objective, costs))
        optimizer.step()
        if step % CHECK_EVERY == 0:
            logits = learner().detach()
            nll = nats_per_token(logits, dev).nan_to_num(torch.inf)  # a run that diverged is never better
            ahead = nll < best.nll
            best = Fitted(
                torch.where(ahead[:, None, None], logits, best.logits), torch.where(ahead, nll, best.nll)
            )
    return best


def nats_per_token(logits: Tensor, counts: Tensor) -> Tensor:
    """Return the mean negative log-likelihood [S] of counts [S, V, V] under logits [S, V, V]."""
    logq = torch.log_softmax(logits.double(), -1)
    return -(counts * logq).sum((-2, -1)) / counts.sum((-2, -1))
