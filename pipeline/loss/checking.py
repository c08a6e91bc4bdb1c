"""A check of a new objective against autograd, on random rows, before anything is trained with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from common.errors import UserError, one_line
from pipeline.loss.objectives import Coefficients, Scalars

ROWS, TOKENS = 64, 9  # rows of logits, and columns
TOLERANCE = 1e-6  # of a row's largest entry
EXTREMES = (0.0, 1e-9, 30.0, 1e4)  # nats of the target: solved to hopeless


class Rows(NamedTuple):
    """Random rows of logits z [n, V] with targets y [n] and costs [n, V]."""

    z: Tensor
    y: Tensor
    costs: Tensor
    stored: Tensor


Function = Callable[[Scalars], Coefficients]


def check_objective(name: str, function: Function, logit_scale: float = 1.0) -> None:
    """Check the objective called `name`. Raises UserError, with the row, where a claim does not hold.

    Every result has one number per token, which follows from that token's scalars alone; these are not
    changed in place; the gradient that its coefficients claim is that of its loss (detached factors are
    constants); nothing is NaN or infinite where the target's probability is 0 or 1.
    """
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64}
    logits = 3 * torch.randn(ROWS, TOKENS, **options)  # type: ignore[call-overload]
    logits[ROWS // 2 :] *= 20  # targets from certain to hopeless
    y = torch.randint(TOKENS, (ROWS,), generator=generator)
    costs = torch.rand(ROWS, TOKENS, **options).scatter(1, y[:, None], 0)  # type: ignore[call-overload]
    stored = -3 * torch.rand(ROWS, **options)  # type: ignore[call-overload]
    stored[::3] *= 30
    rows = Rows(logits, y, costs, stored)
    z = rows.z.clone().requires_grad_()
    scalars = scalars_of(z, rows, logit_scale)
    result = _call(name, function, scalars)
    for key, value in result._asdict().items():
        if value is None and key not in ("loss", "A"):
            continue
        if not isinstance(value, Tensor) or value.shape != (len(y),):
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UserError(
                f"objective {name}: {key} must have one number per token (got: {shape})",
                code="objective-shape",
            )
    _check_independence(name, function, scalars_of(rows.z, rows, logit_scale))
    _check_finite(name, result, scalars)
    if result.loss.grad_fn is None:
        raise UserError(
            f"objective {name}: its loss depends on none of its scalars", code="objective-gradient"
        )
    (want,) = torch.autograd.grad(result.loss.sum(), z)
    with torch.no_grad():
        claimed = gradient(result, scalars, rows, logit_scale)
    # the loss of a weight is sg[weight] m, and autograd sees it so
    off = (claimed - want).abs().amax(1)
    # autograd's own rounding: 1 - p_y, times whatever the objective makes of it
    rounding = 1e-14 * result.A.detach().abs()
    allowed = TOLERANCE * torch.maximum(want.abs().amax(1), claimed.abs().amax(1)).clamp_min(1e-3) + rounding
    if bool((off > allowed).any()):
        worst = int((off - allowed).argmax())
        claims, slopes = (
            "[" + ", ".join(f"{value:.3g}" for value in row[worst].tolist()) + "]" for row in (claimed, want)
        )
        raise UserError(
            f"objective {name}: its coefficients claim another gradient than its loss has at the "
            f"row with {_row(scalars, worst)}: {claims} against {slopes} by autograd; detach() what shall "
            "only scale",
            code="objective-gradient",
        )
    for dtype in (torch.float64, torch.float32):
        # targets from solved to hopeless, whose mistakes cost nothing, or as much as they can
        m = torch.tensor(EXTREMES, dtype=dtype).repeat(2)
        p, others, zero = torch.exp(-m), -torch.expm1(-m), torch.zeros_like(m)
        price = torch.tensor([0.0, 1.0], dtype=dtype).repeat_interleave(len(EXTREMES))
        squares = p * p + others * others
        extreme = Scalars(m, p, others * price, zero, squares, torch.maximum(p, others), -5 * price)
        with torch.no_grad():
            _check_finite(name, _call(name, function, extreme), extreme)


def _check_independence(name: str, function: Function, scalars: Scalars) -> None:
    """Check that a token's numbers depend neither on the tokens beside it, nor on chance or earlier calls."""
    present = {key: value for key, value in scalars._asdict().items() if value is not None}
    before = {key: value.clone() for key, value in present.items()}
    whole = _call(name, function, scalars)
    for key, value in present.items():
        if not torch.equal(value, before[key]):
            raise UserError(
                f"objective {name} changes {key} in place, which others read; work on a copy",
                code="objective-in-place",
            )
    odd = slice(1, None, 2)
    part = _call(name, function, Scalars(**{key: value[odd] for key, value in before.items()}))
    for key, half, full in zip(Coefficients._fields, part, whole, strict=True):
        if half is None or full is None:
            continue
        if not torch.allclose(half, full[odd], rtol=1e-9, atol=1e-12):
            raise UserError(
                f"objective {name}: {key} of a token changes with the tokens beside it, or by chance; it "
                "must follow from its own scalars alone (batches are taken in chunks of any size)",
                code="objective-batch",
            )


def scalars_of(z: Tensor, rows: Rows, logit_scale: float = 1.0) -> Scalars:
    """Return all scalars of rows of logits z [n, V], each [n], differentiable, at the scale `logit_scale`."""
    log_p = (logit_scale * z).log_softmax(-1)
    p = log_p.exp()
    m = -log_p.gather(1, rows.y[:, None])[:, 0]
    return Scalars(
        m=m,
        p=torch.exp(-m),
        D=(p * rows.costs).sum(1),
        H=-(p * log_p).sum(1),
        S=p.square().sum(1),
        top=p.amax(1),
        stored=rows.stored,
    )


def gradient(result: Coefficients, scalars: Scalars, rows: Rows, logit_scale: float = 1.0) -> Tensor:
    """Return the gradient dL/dz [n, V] that coefficients claim, float64.

    dL/dz_i = s (p_i (A + B c_i + C log p_i) - K [i = y]),    K = A + B D - C H    (`objectives.py`)
    """
    log_p = (logit_scale * rows.z).log_softmax(-1)
    zero = torch.zeros_like(result.A)
    B = zero if result.B is None else result.B
    C = zero if result.C is None else result.C
    row = log_p.exp() * (result.A[:, None] + B[:, None] * rows.costs + C[:, None] * log_p)
    assert scalars.D is not None and scalars.H is not None  # `scalars_of` computes them all
    K = result.A + B * scalars.D - C * scalars.H
    return logit_scale * row.scatter_add(1, rows.y[:, None], -K[:, None])


def _call(name: str, function: Function, scalars: Scalars) -> Coefficients:
    try:
        return function(scalars)
    except UserError:
        raise
    except Exception as error:  # whatever a user's function does
        raise UserError(
            f"objective {name}: {type(error).__name__}: {one_line(error)}", code="objective-fails"
        ) from error


def _check_finite(name: str, result: Coefficients, scalars: Scalars) -> None:
    for key, value in result._asdict().items():
        if value is not None and not bool(torch.isfinite(value).all()):
            worst = int((~torch.isfinite(value)).nonzero()[0, 0])
            raise UserError(
                f"objective {name}: {key} is {float(value[worst].detach())} at the row with "
                f"{_row(scalars, worst)}",
                code="objective-finite",
            )


def _row(scalars: Scalars, i: int) -> str:
    """Return the scalars of row i as text."""
    present = {name: value for name, value in scalars._asdict().items() if value is not None}
    return ", ".join(f"{name}={float(value[i].detach()):.4g}" for name, value in present.items())
