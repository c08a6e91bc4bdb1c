"""Naive references of all objectives in float64 with autograd, for comparison with the fused kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from emo.pipeline.loss.cost import CostEmbedding
from emo.pipeline.loss.fused import fused_linear_loss
from emo.pipeline.loss.teacher import TopK

EPS = 1e-10


def stored_for(labels: Tensor) -> Tensor:
    """Return a log-probability for every label, as if stored from another model."""
    return -0.3 - (labels % 7).double() / 3


def inputs(
    n: int = 70, vocab: int = 53, hidden: int = 12, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, weight, labels (every fifth ignored) and a cost embedding of another width."""
    generator = torch.Generator().manual_seed(n + vocab)
    h = (torch.randn(n, hidden, generator=generator) * scale).to(dtype).requires_grad_()
    w = torch.randn(vocab, hidden, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (n,), generator=generator)
    labels[::5] = -100
    return h, w, labels, torch.randn(vocab, hidden + 3, generator=generator)


def token_losses(
    name: str, m: Tensor, D: Tensor, log_p: Tensor, H: Tensor, S: Tensor, stored: Tensor, *,
    gamma: float | None = None, w_min: float = 0.0, ratio_cap: float | None = None,
) -> Tensor:  # fmt: skip
    """Return the loss per token as in papers and released code, with detached weights."""
    p = (-m).exp()
    likeliest = log_p.sort(-1, descending=True).values[:, :20].softmax(-1).detach()
    gate = -torch.xlogy(likeliest, likeliest).sum(-1) / likeliest.new_tensor(likeliest.shape[1]).log()
    shifted = D + p.detach()  # D' of the released code has the gradient of D
    mixing = 0.8 if gamma is None else gamma
    ratio = (m / (D + EPS)).detach()
    weight = (1 + H.detach()) ** (1.0 if gamma is None else gamma)
    a = S.detach()
    losses: dict[str, Callable[[], Tensor]] = {
        "mle": lambda: m,
        "emo": lambda: 0.5 * (m + (ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)) * D),
        "emo2": lambda: (D / (m + EPS)).detach() * m + D,
        "demd": lambda: D,
        "tailr": lambda: (p / (mixing + (1 - mixing) * p)).detach().clamp(w_min, 1) * m,
        "mixce": lambda: (mixing + (1 - mixing) * p).detach() * m,
        "dft": lambda: p.detach() * m,
        "emo_compat": lambda: 0.5 * (m + (m / (shifted + EPS)).detach() * shifted),
        "emo2_compat": lambda: (shifted / (m + EPS)).detach() * m + shifted,
        "focal": lambda: (1 - p) ** 2 * m,
        "power": lambda: (1 - torch.exp(-0.5 * m)) / 0.5,
        "threshold": lambda: torch.where(p >= 0.1, m, 0.0),
        "chord": lambda: (p * (1 - p)).detach() * m,
        "mile": lambda: weight / weight.mean() * m,
        "smoothed": lambda: m,
        "eaft": lambda: gate * m,
        "eaft_full": lambda: H.detach() / log_p.new_tensor(log_p.shape[1]).log() * m,
        "deft": lambda: (1 - torch.exp(-a * m)) / a,
        "neg_entropy": lambda: -H,
        "gem": lambda: 0.7 * m,
        "psft": lambda: -torch.minimum(p / stored.exp(), torch.tensor(1.2, dtype=p.dtype)),
        "excess": lambda: torch.where(m + stored >= 0, m, 0.0),
    }
    return losses[name]()


def unit_rows(E: Tensor) -> Tensor:
    """Scale rows to length one. Zero rows stay zero."""
    norm = E.norm(dim=1, keepdim=True)
    return E / torch.where(norm == 0, torch.ones_like(norm), norm)


class LazyCostMatrix:
    """The cost matrix. Its rows are computed on access."""

    def __init__(self, E: Tensor) -> None:
        self.unit = unit_rows(E.double())

    def __getitem__(self, y: Tensor) -> Tensor:
        rows = (1 - self.unit[y] @ self.unit.T).clamp(min=0)
        return rows.scatter(1, y[:, None], 0.0)


def cost_matrix(E: Tensor) -> Tensor:
    """Return C [V, V] with a zero diagonal."""
    return LazyCostMatrix(E)[torch.arange(len(E), device=E.device)]


def losses_from_logits(
    z: Tensor, labels: Tensor, C: Tensor | LazyCostMatrix, name: str, *, z_loss: float = 0.0,
    label_smoothing: float = 0.0, **params: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the loss, nll and demd of each valid token in float64."""
    valid = labels != -100
    z, y = z[valid], labels[valid]
    scaled = z / 0.7 if name == "gem" else z
    log_p = scaled.log_softmax(-1)
    others = scaled.scatter(1, y[:, None], -torch.inf).logsumexp(-1)
    # -log p of the target, accurate even if the target is almost certain
    m = -torch.nn.functional.logsigmoid(scaled.gather(1, y[:, None])[:, 0] - others)
    D = (log_p.exp() * C[y]).sum(-1)
    H, S = -(log_p.exp() * log_p).sum(-1), log_p.exp().square().sum(-1)
    loss = token_losses(name, m, D, log_p, H, S, stored_for(y), **params)
    if name == "smoothed":
        k = torch.softmax(-(C[y] ** 2) / (2 * 0.3**2), -1)
        loss = 0.9 * m - 0.1 * (k * log_p).sum(-1)
    if name == "gem":  # reported with unscaled logits
        m = z.logsumexp(-1) - z.gather(1, y[:, None])[:, 0]
        D = (z.softmax(-1) * C[y]).sum(-1)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * log_p.mean(-1)
    if z_loss:
        loss = loss + z_loss * z.logsumexp(-1) ** 2
    return loss, m, D


def logits_of(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, logit_scale: float
) -> Tensor:
    z = logit_scale * (hidden.double() @ weight.double().T)
    if bias is not None:
        z = z + bias.double()
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, E: Tensor, name: str, *,
    bias: Tensor | None = None, softcap: float | None = None, logit_scale: float = 1.0,
    **params: float,
) -> dict[str, Tensor]:  # fmt: skip
    """Return sums of loss, nll and demd and the gradients of the loss, in float64 from any dtype."""
    h, W = (x.detach().double().requires_grad_() for x in (hidden, weight))
    b = None if bias is None else bias.detach().double().requires_grad_()
    z = logits_of(h, W, b, softcap, logit_scale)
    options: dict[str, Any] = dict(params)
    loss, m, D = losses_from_logits(z, labels, LazyCostMatrix(E), name, **options)
    total = loss.sum()
    total.backward()
    out = {"loss": total.detach(), "nll": m.sum().detach(), "demd": D.sum().detach()}
    out |= {"d_hidden": h.grad, "d_weight": W.grad}
    if b is not None:
        out["d_bias"] = b.grad
    return out


def divergence(name: str, p: Tensor, q: Tensor, Cp: Tensor, **options: float) -> Tensor:
    """Return the divergence of each row by its definition."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a.log() - b.log())).sum(-1)

    def mix(share: float) -> Tensor:
        return share * p + (1 - share) * q

    beta, alpha = options.get("beta", 0.5), options.get("alpha", 0.1)
    D = ((q - p).abs() * Cp).sum(-1) if name.endswith("_dense") else p
    return {
        "kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: beta * kl(p, mix(beta)) + (1 - beta) * kl(q, mix(beta)),
        "skew_kl": lambda: kl(p, mix(alpha)),
        "tv": lambda: (q - p).abs().sum(-1) / 2,
        "demd_dense": lambda: D,
        "emo_dense": lambda: (kl(p, q) + (kl(p, q) / (D + 1e-10)).detach() * D) / 2,
    }[name]()


def top(log_p: Tensor, k: int) -> TopK:
    """Return the k most likely entries, and the log-probability of the rest."""
    values, ids = log_p.topk(k)
    return TopK(ids, torch.cat((values, log_p.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)), 1))


def divergence_reference(
    h: Tensor, w: Tensor, labels: Tensor, log_p: Tensor, transport: Callable[[Tensor], Tensor], name: str,
    params: dict[str, float], *, bias: Tensor | None = None, softcap: float | None = None,
    logit_scale: float = 1.0, weight: float = 1.0, mle: float = 0.0, smoothing: float = 0.0,
    temperature: float = 1.0, k: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """Return sums and gradients of mle * MLE + weight * divergence with label smoothing, in float64.

    log_p [N, V]: the teacher's log-probabilities. k: number of entries stored next to the rest, 0 for all.
    transport: returns C p of rows p.
    """
    leaves = {"d_hidden": h, "d_weight": w} | ({} if bias is None else {"d_bias": bias})
    wide = {key: leaf.detach().double().requires_grad_() for key, leaf in leaves.items()}
    z = logits_of(wide["d_hidden"], wide["d_weight"], wide.get("d_bias"), softcap, logit_scale)
    used = labels != -100
    q, p = (z[used] / temperature).softmax(-1), log_p[used].exp()
    Cp = p if k else transport(p)  # stored entries have no costs
    if k:
        ids = p.topk(k).indices
        p, q = (torch.cat((x.gather(1, ids), x.scatter(1, ids, 0.0).sum(1, keepdim=True)), 1) for x in (p, q))
    gap = divergence(name, p, q, Cp, **params)
    nll = torch.nn.functional.cross_entropy(z[used], labels[used], reduction="none")
    loss = (1 - smoothing) * (weight * gap + mle * nll) - smoothing * z[used].log_softmax(-1).mean(-1)
    loss.sum().backward()
    out = {"loss": loss.sum().detach(), "divergence": gap.sum().detach(), "nll": nll.sum().detach()}
    return out | {key: leaf.grad for key, leaf in wide.items() if leaf.grad is not None}


def fused_step(
    hidden: Tensor, weight: Tensor, labels: Tensor, objective: Any, cost: CostEmbedding | None = None, *,
    bias: Tensor | None = None, **options: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the sums and gradients of the fused loss under the names of `reference`, and `tokens`."""
    leaves = {"d_hidden": hidden, "d_weight": weight} | ({} if bias is None else {"d_bias": bias})
    for leaf in leaves.values():
        leaf.grad = None
    sums = fused_linear_loss(hidden, weight, labels, objective, cost, bias=bias, **options)
    sums.loss.backward()
    out = {"loss": sums.loss.detach(), "nll": sums.nll, "demd": sums.demd, "tokens": sums.tokens}
    if not bool(sums.divergence.isnan()):
        out["divergence"] = sums.divergence
    return out | {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}


def assert_agree(got: dict[str, Tensor], want: dict[str, Tensor], bound: float) -> None:
    """Assert that `got` equals every value of `want` up to the relative error `bound`."""
    for key, value in want.items():
        assert relative_error(got[key], value) <= bound, key


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the Euclidean norm of the difference, relative to the norm of `want`."""
    size = want.double().norm()
    return float((got.double() - want.double()).norm() / (size if size > 0 else 1.0))
