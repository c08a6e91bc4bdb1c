"""Training objectives as pure mathematics: a handful of scalars per token.

Notation, for one token with target y: p = softmax(z), m = -log p_y (nats), c = row of transport
costs from y to every token (c_y = 0), D = sum_i p_i c_i (the token's DEMD). The gradient of every
objective with respect to the logits has the form

    dL/dz_i = omega * (p_i (A + B c_i) - K [i = y])

so an objective only has to say how (loss, A, B, K, omega) follow from (m, D, p_y). Adding a constant
to all logits changes no loss, hence the row sums to zero and K = A + B D. The kernels use that
identity: written out as A - K, the difference would vanish in rounding on well-predicted tokens.

Weights such as m / D are *detached*: they scale the gradient and are not differentiated.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from common.errors import UserError, nearest

EPS = 1e-10  # keeps the detached ratios finite; float32 and float64 only, it would vanish in float16


class Coefficients(NamedTuple):
    """Per token, each [n], float32 (float64 when the inputs are): the loss and its gradient row."""

    loss: Tensor
    A: Tensor
    B: Tensor | None  # None: the objective has no transport part
    K: Tensor
    omega: Tensor


CoefficientFunction = Callable[[Tensor, Tensor, Tensor], Coefficients]


@dataclass(frozen=True)
class Objective:
    """A named objective with its parameters bound."""

    name: str
    needs_cost: bool  # cannot be computed without a cost embedding
    coefficients: CoefficientFunction  # (m, D, p_y), each [n] -> Coefficients
    params: tuple[tuple[str, float | None], ...] = ()  # as given or by default, for logs and cards
    dense: bool = False  # compares with a teacher's whole distribution instead of one target

    def __str__(self) -> str:
        given = ", ".join(f"{key}={value:g}" for key, value in self.params if value is not None)
        return f"{self.name}({given})" if given else self.name


def _weighted_nll(m: Tensor, weight: Tensor) -> Coefficients:
    """`sg[weight] * m`: the form of MLE, TaiLr, MixCE and DFT."""
    one = torch.ones_like(m)
    return Coefficients(loss=weight * m, A=one, B=None, K=one, omega=weight)


def mle() -> CoefficientFunction:
    """Maximum likelihood (eq. 4): L = m."""
    return lambda m, D, p_y: _weighted_nll(m, torch.ones_like(m))


def emo(*, ratio_cap: float | None = None) -> CoefficientFunction:
    """EMO (eq. 19): L = (m + sg[w] D) / 2 with w = m / (D + eps) per token, at most `ratio_cap`."""
    if ratio_cap is not None and ratio_cap <= 0:
        raise UserError(f"objective emo: ratio_cap must be above 0 (given: {ratio_cap:g})")

    def coefficients(m: Tensor, D: Tensor, p_y: Tensor) -> Coefficients:
        w = m / (D + EPS)
        if ratio_cap is not None:
            w = w.clamp(max=ratio_cap)
        half = torch.full_like(m, 0.5)
        return Coefficients(0.5 * (m + w * D), A=1 - w * D, B=w, K=torch.ones_like(m), omega=half)

    return coefficients


def emo2() -> CoefficientFunction:
    """EMO with the weight on the other term: L = sg[u] m + D with u = D / (m + eps)."""

    def coefficients(m: Tensor, D: Tensor, p_y: Tensor) -> Coefficients:
        u, one = D / (m + EPS), torch.ones_like(m)
        return Coefficients(u * m + D, A=u - D, B=one, K=u, omega=one)

    return coefficients


def demd() -> CoefficientFunction:
    """The differentiable earth mover distance alone (eq. 14): L = D."""

    def coefficients(m: Tensor, D: Tensor, p_y: Tensor) -> Coefficients:
        one = torch.ones_like(m)
        return Coefficients(loss=D, A=-D, B=one, K=torch.zeros_like(m), omega=one)

    return coefficients


def tailr(*, gamma: float = 0.8, w_min: float = 0.0) -> CoefficientFunction:
    """TaiLr (eq. 17): L = sg[w] m with w = p_y / (gamma + (1 - gamma) p_y), clamped to [w_min, 1]."""
    _check_unit("tailr", gamma=gamma, w_min=w_min)

    def coefficients(m: Tensor, D: Tensor, p_y: Tensor) -> Coefficients:
        floor = torch.finfo(p_y.dtype).tiny  # gamma = 0 and p_y = 0: the weight is 1, not 0 / 0
        weight = (p_y + floor) / (gamma + (1 - gamma) * p_y + floor)
        return _weighted_nll(m, weight.clamp(w_min, 1.0))

    return coefficients


def mixce(*, gamma: float = 0.8) -> CoefficientFunction:
    """MixCE (eq. 18): L = sg[gamma + (1 - gamma) p_y] m."""
    _check_unit("mixce", gamma=gamma)
    return lambda m, D, p_y: _weighted_nll(m, gamma + (1 - gamma) * p_y)


def dft() -> CoefficientFunction:
    """Dynamic fine-tuning: L = sg[p_y] m, which is MixCE at gamma = 0."""
    return lambda m, D, p_y: _weighted_nll(m, p_y)


def emo_compat() -> CoefficientFunction:
    """EMO as the released model classes compute it: weights and values from D' = D + p_y."""

    def coefficients(m: Tensor, D: Tensor, p_y: Tensor) -> Coefficients:
        shifted = D + p_y
        w, half = m / (shifted + EPS), torch.full_like(m, 0.5)
        loss = 0.5 * (m + w * shifted)
        return Coefficients(loss, A=1 - w * D, B=w, K=torch.ones_like(m), omega=half)

    return coefficients


def emo2_compat() -> CoefficientFunction:
    """`emo2` as the released classes compute it: u = D' / (m + eps) with D' = D + p_y."""
    warnings.warn(
        "objective emo2_compat keeps a gradient of about 1 on solved tokens; "
        "it exists to reproduce released scripts, emo2 is the sound form",
        stacklevel=2,
    )

    def coefficients(m: Tensor, D: Tensor, p_y: Tensor) -> Coefficients:
        shifted, one = D + p_y, torch.ones_like(m)
        u = shifted / (m + EPS)
        return Coefficients(u * m + shifted, A=u - D, B=one, K=u, omega=one)

    return coefficients


def _check_unit(objective: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise UserError(f"objective {objective}: {name} must lie in [0, 1] (given: {value:g})")


_FACTORIES: dict[str, tuple[Callable[..., CoefficientFunction], bool]] = {  # name: (make, needs cost)
    "mle": (mle, False),
    "emo": (emo, True),
    "emo2": (emo2, True),
    "demd": (demd, True),
    "tailr": (tailr, False),
    "mixce": (mixce, False),
    "dft": (dft, False),
    "emo_compat": (emo_compat, True),
    "emo2_compat": (emo2_compat, True),
    "demd_dense": (demd, True),  # `dense.py`; for a one-hot teacher the same as demd
}
OBJECTIVES = tuple(_FACTORIES)


def get_objective(name: str, **params: float | None) -> Objective:
    """The objective called `name` with `params` bound.

    Raises UserError for an unknown name or parameter, naming the nearest known one.
    """
    if name not in _FACTORIES:
        raise UserError(f"unknown objective {name!r}; {nearest(name, _FACTORIES)}")
    make, needs_cost = _FACTORIES[name]
    known = inspect.signature(make).parameters
    for key in params:
        if key not in known:
            hint = nearest(key, known) if known else "it has no parameters"
            raise UserError(f"unknown parameter {key!r} of objective {name}; {hint}")
        value = params[key]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f"objective {name}: {key} must be a number (given: {value!r})")
    bound = tuple((key, params.get(key, known[key].default)) for key in known)
    return Objective(name, needs_cost, make(**params), bound, dense=name == "demd_dense")
