"""Token-level objectives, found by name and checked: scalars per token in, loss and gradient out.

Notation, for one token with target y: p_i = softmax(z)_i, c = row of transport costs from y to every token
(c_y = 0). The numbers in `Scalars` follow from one pass over the row. An objective is a function whose
positional parameters name some of them and whose keyword-only parameters are its options. It returns either

- a weight [n]: the loss is sg[weight] m, cross-entropy with that weight on the token; or
- `Coefficients`: the loss, and (A, B, C) such that its gradient with respect to the logits is

      dL/dz_i = p_i (A + B c_i + C log p_i) - K [i = y],    K = A + B D - C H

  K follows from the others: adding a constant to all logits changes no loss, so the row sums to zero. The
  kernels use that. The difference p_y (A + ...) - K would vanish in rounding on well-predicted tokens.

The derivatives are dm/dz_i = p_i - [i = y], dD/dz_i = p_i (c_i - D), dH/dz_i = -p_i (log p_i + H). Weights
such as m / D are detached (sg[.]): they scale the gradient and are not differentiated.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emo.common.config.objective_names import objective_hint, registered_objectives
from emo.common.errors import UserError, nearest, one_line

from .divergences import DIVERGENCES, BoundDivergence, Distributions
from .schedule import Ramp, Spaced, Weight, weight_at

LIKELIEST = 20  # tokens whose entropy `eaft` reads
EPS = 1e-10  # keeps the detached ratios finite in float32 and float64; it would vanish in float16


class Scalars(NamedTuple):
    """The numbers of a token that one pass over its row gives, each [n], float32 (float64); None: unused."""

    m: Tensor  # -log p_y, nats
    p: Tensor  # p_y
    D: Tensor | None = None  # sum_i p_i c_i: the earth mover distance to the target (DEMD, eq. 14)
    H: Tensor | None = None  # -sum_i p_i log p_i: the entropy, nats
    S: Tensor | None = None  # sum_i p_i^2
    top: Tensor | None = None  # max_i p_i
    H_top: Tensor | None = None  # entropy of the 20 most likely tokens, renormalised, divided by ln 20
    H_max: Tensor | None = None  # ln V: the largest entropy, nats
    stored: Tensor | None = None  # a stored log-probability of the target


class Coefficients(NamedTuple):
    """The loss of each token and its gradient row, each [n]."""

    loss: Tensor
    A: Tensor
    B: Tensor | None = None  # None: 0, no transport part
    C: Tensor | None = None  # None: 0, no entropy part
    weight: Tensor | None = None  # the token's weight, for reports; None: A


ObjectiveFunction = Callable[..., Tensor | Coefficients]
Options = Mapping[str, float | None]


class CostSmoothing(NamedTuple):
    """Targets smoothed by the transport costs c of a token: q = (1 - weight) onehot + weight k.

    k_i is proportional to exp(-c_i^2 / (2 width^2)). The loss gains weight (sum_i k_i (-log p_i) - m), and
    its gradient weight ([i = y] - k_i).
    """

    weight: float
    width: float

    def kernel(self, costs: Tensor) -> Tensor:
        """Return k of each row of costs, up to its norm."""
        return torch.exp(costs.square() * (-0.5 / self.width**2))


class _Traits(NamedTuple):
    logit_scale: Callable[..., float] | None = None
    normalised: bool = False
    warning: str | None = None
    smoothing: Callable[..., CostSmoothing] | None = None


def traits(
    logit_scale: Callable[..., float] | None = None,
    normalised: bool = False,
    warning: str | None = None,
    smoothing: Callable[..., CostSmoothing] | None = None,
) -> Callable[[ObjectiveFunction], ObjectiveFunction]:
    """Return a decorator that declares properties of an objective that its function cannot express.

    Args:
        logit_scale: Maps the options to the scale of softmax(scale z) from which the scalars are computed.
        normalised: Divide the weights by their mean over the batch.
        warning: Warning to issue when the objective is chosen.
        smoothing: Maps the options to the smoothing of the targets.
    """

    def attach(function: ObjectiveFunction) -> ObjectiveFunction:
        function.traits = _Traits(logit_scale, normalised, warning, smoothing)  # type: ignore[attr-defined]
        return function

    return attach


def mle(m: Tensor) -> Tensor:
    """Cross-entropy, or maximum likelihood (EMO's eq. 4): L = m, w = 1."""
    return torch.ones_like(m)


def emo(m: Tensor, D: Tensor, *, ratio_cap: float | None = None) -> Coefficients:
    """EMO (arXiv 2310.04691, eq. 19): L = (m + sg[w] D) / 2 with w = m / (D + eps), at most `ratio_cap`.

    A = (1 - w D) / 2, B = w / 2.
    """
    w = (m / (D + EPS)).detach()
    if ratio_cap is not None:
        _require("above 0", ratio_cap=ratio_cap)
        w = w.clamp(max=ratio_cap)
    return Coefficients(0.5 * (m + w * D), A=0.5 * (1 - w * D), B=0.5 * w, weight=w)


def emo2(m: Tensor, D: Tensor) -> Coefficients:
    """EMO with the weight on the other term: L = sg[u] m + D with u = D / (m + eps); A = u - D, B = 1."""
    u = (D / (m + EPS)).detach()
    return Coefficients(u * m + D, A=u - D, B=torch.ones_like(m), weight=u)


def demd(D: Tensor) -> Coefficients:
    """The differentiable earth mover distance alone (EMO's eq. 14): L = D; A = -D, B = 1."""
    ones = torch.ones_like(D)
    return Coefficients(D, A=-D, B=ones, weight=ones)


def tailr(m: Tensor, p: Tensor, *, gamma: float = 0.8, w_min: float = 0.0) -> Tensor:
    """TaiLr (EMO's eq. 17; arXiv 2302.13344): w = p_y / (gamma + (1 - gamma) p_y), clamped to [w_min, 1]."""
    _require("in [0, 1]", gamma=gamma, w_min=w_min)
    floor = torch.finfo(p.dtype).tiny  # gamma = 0 and p_y = 0: the weight is 1, not 0 / 0
    return ((p + floor) / (gamma + (1 - gamma) * p + floor)).clamp(w_min, 1.0)


def mixce(m: Tensor, p: Tensor, *, gamma: float = 0.8) -> Tensor:
    """MixCE (EMO's eq. 18; arXiv 2305.16958): w = gamma + (1 - gamma) p_y."""
    _require("in [0, 1]", gamma=gamma)
    return gamma + (1 - gamma) * p


def dft(p: Tensor) -> Tensor:
    """Dynamic fine-tuning (arXiv 2508.05629): w = p_y, which is MixCE at gamma = 0."""
    return p


def emo_compat(m: Tensor, D: Tensor, p: Tensor) -> Coefficients:
    """EMO as the released model classes compute it: L = (m + sg[w] D') / 2, w = m / (D' + eps).

    D' = D + sg[p_y]. It exists to reproduce released scripts.
    """
    shifted = D + p.detach()
    w = (m / (shifted + EPS)).detach()
    return Coefficients(0.5 * (m + w * shifted), A=0.5 * (1 - w * D), B=0.5 * w, weight=w)


@traits(
    warning="objective emo2_compat keeps a gradient of about 1 on solved tokens; "
    "it exists to reproduce released scripts; use emo2 otherwise"
)
def emo2_compat(m: Tensor, D: Tensor, p: Tensor) -> Coefficients:
    """`emo2` as the released classes compute it: u = D' / (m + eps) with D' = D + p_y."""
    shifted = D + p.detach()
    u = (shifted / (m + EPS)).detach()
    return Coefficients(u * m + shifted, A=u - D, B=torch.ones_like(m), weight=u)


def focal(m: Tensor, p: Tensor, *, gamma: float = 2.0) -> Coefficients:
    """Focal loss (arXiv 1708.02002): L = (1 - p_y)^gamma m, without detached factors, as in the paper.

    A = (1 - p)^gamma + gamma p m (1 - p)^(gamma - 1). Implementations that detach the factor omit
    the second term.
    """
    _require("above 0", gamma=gamma)
    others = -torch.expm1(-m)  # 1 - p without cancellation
    factor = others.pow(gamma)
    ratio = torch.where(others > 0, m / others.clamp_min(torch.finfo(m.dtype).tiny), 1.0)
    return Coefficients(factor * m, A=factor * (1 + gamma * p * ratio))


def power(m: Tensor, *, alpha: float = 0.5) -> Coefficients:
    """Power family (arXiv 2510.00526): L = (1 - p_y^alpha) / alpha; A = p_y^alpha.

    alpha = 1 has the gradient of `dft`, alpha -> 0 the gradient of `mle`.
    """
    _require("above 0", alpha=alpha)
    return Coefficients(-torch.expm1(-alpha * m) / alpha, A=torch.exp(-alpha * m))


def threshold(p: Tensor, *, least: float = 0.1) -> Tensor:
    """Cross-entropy of tokens that are likely enough (arXiv 2510.00526): w = 1[p_y >= least]."""
    _require("in [0, 1]", least=least)
    return (p >= least).to(p.dtype)


def chord(p: Tensor) -> Tensor:
    """CHORD's token weight (arXiv 2508.11408): w = p_y (1 - p_y), largest at p_y = 1/2."""
    return p * (1 - p)


@traits(normalised=True)
def mile(H: Tensor, *, gamma: float = 1.0) -> Tensor:
    """MiLe (arXiv 2310.19531): w = (1 + H)^gamma divided by its mean over the batch of all ranks."""
    return (1 + H).pow(gamma)


def eaft(H_top: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Entropy-adaptive fine-tuning (arXiv 2601.02151): w = H_top^alpha.

    H_top is the entropy of the 20 most likely tokens, renormalised and divided by ln 20. Tokens on which the
    model is certain have little weight, whether it is right or wrong.
    """
    _require("above 0", alpha=alpha)
    return H_top.pow(alpha)


def eaft_full(H: Tensor, H_max: Tensor, *, alpha: float = 1.0) -> Tensor:
    """`eaft` with the entropy of the full vocabulary: w = (H / ln V)^alpha."""
    _require("above 0", alpha=alpha)
    return (H / H_max).clamp(0.0, 1.0).pow(alpha)


@traits(smoothing=CostSmoothing)
def smoothed(m: Tensor, D: Tensor, *, weight: float = 0.1, width: float = 0.3) -> Tensor:
    """Cross-entropy with targets smoothed by the costs: L = (1 - weight) m - weight sum_i k_i log p_i.

    k_i is proportional to exp(-c_i^2 / (2 width^2)), a Gaussian prior over costs like the data-dependent one
    of D2GPo (Li et al., ICLR 2020). The target has a share of k. The returned weight is that of m in the sum
    without smoothing, see `CostSmoothing`.
    """
    _require("in [0, 1]", weight=weight)
    _require("above 0", width=width)
    return torch.ones_like(m)


def deft(m: Tensor, S: Tensor) -> Coefficients:
    """DEFT (arXiv 2602.11424): the power family with alpha = sg[sum_i p_i^2], the model's certainty."""
    alpha = S.detach()
    return Coefficients(-torch.expm1(-alpha * m) / alpha, A=torch.exp(-alpha * m))


def neg_entropy(H: Tensor) -> Coefficients:
    """Entropy bonus: L = -H. Use it in weighted sums. Alone it makes every distribution uniform."""
    return Coefficients(-H, A=H, C=torch.ones_like(H))


@traits(logit_scale=lambda beta: 1 / beta)
def gem(m: Tensor, *, beta: float = 0.7) -> Tensor:
    """GEM with its linear function (arXiv 2408.16673): dL/dz_i = softmax(z / beta)_i - [i = y].

    That is beta times the cross-entropy m at logits z / beta. The authors' default, with log-sigmoids, is
    another objective.
    """
    _require("above 0", beta=beta)
    return torch.full_like(m, beta)


def psft(m: Tensor, stored: Tensor, *, clip: float = 0.2) -> Coefficients:
    """Proximal SFT (arXiv 2508.17784): L = -min(rho, 1 + clip) with rho = p_y / p_old.

    `stored` holds log p_old, the log-probability under the policy before this round of training. Tokens
    above 1 + clip have no gradient: A = rho 1[rho <= 1 + clip].
    """
    _require("above 0", clip=clip)
    most = 1 + clip
    rho = torch.exp((-m - stored).clamp(max=20.0))
    return Coefficients(-rho.clamp(max=most), A=torch.where(rho <= most, rho, 0.0))


def excess(m: Tensor, stored: Tensor, *, least: float = 0.0) -> Tensor:
    """Selective language modelling, similar to Rho-1 (arXiv 2404.07965): w = 1[m - m_ref >= least].

    `stored` holds -m_ref, the log-probability under a reference model. Rho-1 keeps a fixed share of each
    batch instead. A fixed excess, in nats, needs no second pass and does not depend on the batch.
    """
    return (m + stored >= least).to(m.dtype)


BUILT_IN: dict[str, ObjectiveFunction] = {
    f.__name__: f
    for f in (
        mle, emo, emo2, demd, tailr, mixce, dft, focal, power, threshold, chord, mile, eaft, eaft_full, deft,
        smoothed, neg_entropy, gem, psft, excess, emo_compat, emo2_compat,
    )
}  # fmt: skip
OBJECTIVES = (*BUILT_IN, *DIVERGENCES)


def _require(condition: str, **options: float) -> None:
    """Raise UserError for an option that violates `condition`: "above 0" or "in [0, 1]"."""
    for name, value in options.items():
        if not (value > 0 if condition == "above 0" else 0 <= value <= 1):
            problem = f"{name} must be {condition} (got: {value:g})"
            raise UserError(f"objective.params: {problem}", code="option-range")


_SAMPLE = Scalars(
    *torch.tensor([[1.0], [0.4], [0.5], [1.0], [0.3], [0.5], [0.6], [2.0], [-1.0]])
)  # arbitrary


@dataclass(frozen=True)
class Objective:
    """A named objective with its options bound."""

    name: str
    needs: frozenset[str]  # the fields of Scalars that it reads
    coefficients: Callable[[Scalars], Coefficients]
    params: tuple[tuple[str, float | None], ...] = ()  # option values, for logs and cards
    logit_scale: float = 1.0  # scalars and gradient are those of softmax(logit_scale z)
    normalised: bool = False  # weights are divided by their mean over the batch
    uses_target: bool = True  # False if it consists of divergences only
    divergences: tuple[tuple[float, BoundDivergence], ...] = ()  # from a teacher, with their weights
    smoothing: CostSmoothing | None = None  # of the targets, by the costs
    schedule: Callable[[int, bool], Objective] | None = None  # see `at`; None: always this objective

    @property
    def weight_cap(self) -> float | None:
        """Return the upper limit of the weights, if there is one."""
        return dict(self.params).get("ratio_cap")

    @property
    def needs_cost(self) -> bool:
        """Return whether it needs transport costs."""
        return "D" in self.needs

    @property
    def needs_transport(self) -> bool:
        """Return whether one of its divergences needs the transport costs of a teacher's mass (C p)."""
        return any(divergence.needs_costs for _, divergence in self.divergences)

    def at(self, step: int, spaced: bool = True) -> Objective:
        """Return the objective of an optimizer step, counted from 0.

        spaced: parts that apply in a share of the steps have their weight or 0, not the mean of these steps.
        """
        return self if self.schedule is None else self.schedule(step, spaced)

    def require_fixed(self) -> Objective:
        """Return the objective. Raises UserError for a schedule, since the step is not known."""
        if self.schedule is not None:
            cure = "pass objective.at(step) before every step, or train with FusedLossMixin or a recipe"
            problem = f"objective {self.name} changes from step to step; {cure}"
            raise UserError(problem, code="schedule-without-step")
        return self

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value:g}" for key, value in self.params if value is not None)
        return f"{self.name}({options})" if options else self.name


def get_objective(name: str, **params: float | None) -> Objective:
    """Return the objective called `name` with the options `params` bound.

    `name` is one of `OBJECTIVES`, an entry point of an installed package in the group
    `emo_pipeline.objectives`, FILE.py:FUNCTION or MODULE:FUNCTION. Objectives that are not built in are
    checked first (`check_objective`). Raises UserError for an unknown name or option.
    """
    if name in DIVERGENCES:
        return _bind_divergence(name, params)
    function = BUILT_IN[name] if name in BUILT_IN else _import_function(name)
    objective = _bind(name, function, params)
    if name in BUILT_IN:
        objective.coefficients(_SAMPLE)  # raises for options out of range
    else:
        check_objective(name, objective.coefficients, objective.logit_scale)
    return objective


def _bind(name: str, function: ObjectiveFunction, params: Options) -> Objective:
    """Bind options to a function, whose positional parameters name the scalars that it needs."""
    scalars, defaults = _split_parameters(function)
    for key in scalars:
        if key not in Scalars._fields:
            problem = f"{key} must be one of {', '.join(Scalars._fields)}, or an option after *"
            raise UserError(f"objective {name}: {problem}", code="objective-signature")
    options = _resolve_options(name, defaults, params)
    scale, normalised, warning, smoothing = getattr(function, "traits", _Traits())
    if warning:
        warnings.warn(warning, stacklevel=3)

    def coefficients(token: Scalars) -> Coefficients:
        result = function(*(getattr(token, key) for key in scalars), **options)
        if isinstance(result, Coefficients):
            for coefficient, scalar in (("B", "D"), ("C", "H")):
                if getattr(result, coefficient) is not None and scalar not in scalars:
                    problem = f"objective {name} returns {coefficient}, so it must also take {scalar}"
                    raise UserError(problem, code="objective-signature")
            return result
        if not isinstance(result, Tensor):
            problem = f"must return a weight per token or Coefficients (got: {type(result).__name__})"
            raise UserError(f"objective {name} {problem}", code="objective-shape")
        weight = result.detach()
        return Coefficients(weight * token.m, A=weight, weight=weight)

    if scale is not None:
        coefficients(_SAMPLE)  # raises for options out of range before dividing by them
    return Objective(
        name,
        frozenset(scalars),
        coefficients,
        tuple(options.items()),
        logit_scale=1.0 if scale is None else scale(**options),
        normalised=normalised,
        smoothing=None if smoothing is None else smoothing(**options),
    )


def _split_parameters(function: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, object]]:
    """Return the names of a function's positional parameters, and its options with their defaults."""
    parameters = inspect.signature(function).parameters
    positional = tuple(key for key, p in parameters.items() if p.kind is not p.KEYWORD_ONLY)
    return positional, {key: p.default for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def _resolve_options(name: str, defaults: Mapping[str, Any], params: Options) -> dict[str, float | None]:
    """Return the options of an objective: `params`, and defaults for the others."""
    for key in params:
        if key not in defaults:
            hint = nearest(key, defaults) if defaults else "it has no parameters"
            problem = f"unknown parameter {key!r} of objective {name}; {hint}"
            raise UserError(problem, code="unknown-parameter")
    options = {key: params.get(key, default) for key, default in defaults.items()}
    for key, value in options.items():
        if value is inspect.Parameter.empty:
            raise UserError(f"objective {name}: set objective.params.{key}", code="needs-parameter")
        if value is None and defaults[key] is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            problem = f"objective {name}: {key} must be a finite number (got: {value!r})"
            raise UserError(problem, code="option-range")
    return options


def _bind_divergence(name: str, params: Options) -> Objective:
    """Bind options to a divergence from a teacher. `temperature` divides the student's logits."""
    fields, defaults = _split_parameters(DIVERGENCES[name])
    options = _resolve_options(name, {**defaults, "temperature": 1.0}, params)
    numbers = {key: value for key, value in options.items() if value is not None}
    temperature = numbers.pop("temperature")
    _require("above 0", temperature=temperature)
    divergence = BoundDivergence(name, fields, numbers)
    half = torch.full((1, 2), 0.5)
    divergence.compute(Distributions(half.log(), half.log(), half, half, half))  # raises for bad options

    def zero_coefficients(token: Scalars) -> Coefficients:
        zero = torch.zeros_like(token.m)
        return Coefficients(zero, A=zero, weight=zero + 1)

    return Objective(
        name,
        frozenset({"D"} if divergence.needs_costs else ()),
        zero_coefficients,
        tuple(options.items()),
        logit_scale=1 / temperature,
        uses_target=False,
        divergences=((1.0, divergence),),
    )


def _import_function(name: str) -> ObjectiveFunction:
    """Import the function that FILE.py:FUNCTION, MODULE:FUNCTION or an entry point names."""
    source, _, attribute = registered_objectives().get(name, name).rpartition(":")
    if not source:
        hint = objective_hint(name, OBJECTIVES)
        raise UserError(f"unknown objective {name!r}; {hint}", code="unknown-objective")
    try:
        if source.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(source).stem, Path(source))
            assert spec is not None and spec.loader is not None, source
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        problem = f"objective {name}: {source} cannot be imported: {one_line(error)}"
        raise UserError(problem, code="objective-import") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        hint = nearest(attribute, [key for key, value in vars(module).items() if inspect.isfunction(value)])
        problem = f"objective {name}: {source} has no function {attribute}; {hint}"
        raise UserError(problem, code="objective-import")
    return function


def weighted_sum(parts: Sequence[tuple[Objective, Weight]]) -> Objective:
    """Return the objective L = sum_j weight_j L_j, with the exact gradient, in one pass over the logits.

    A Ramp or Spaced among the weights makes it a schedule (`Objective.at`). Raises UserError for parts that
    cannot share a pass: normalised weights, and logits at two scales.
    """
    if all(weight == 0 for _, weight in parts):
        raise UserError("a weighted sum needs a part with a weight other than 0", code="empty-sum")
    for objective, weight in parts:
        if not isinstance(objective, Objective):
            problem = f"the parts of a weighted sum must come from get_objective (got: {objective!r})"
            raise UserError(problem, code="sum-part")
        weight, share = weight if isinstance(weight, Spaced) else (weight, Ramp(1.0, 1.0, 1))
        first, last, steps = weight if isinstance(weight, Ramp) else (weight, weight, 1)
        _require("in [0, 1]", share=share.first, last_share=share.last)
        if not (math.isfinite(first) and math.isfinite(last) and min(steps, share.steps) >= 1):
            problem = f"needs a finite weight, and a ramp of at least one step (got: {weight})"
            raise UserError(f"objective {objective.name} {problem}", code="option-range")
        if objective.normalised:
            problem = "divides its weights by their mean and cannot be part of a sum"
            raise UserError(f"objective {objective.name} {problem}", code="sum-part")
    if len({objective.logit_scale for objective, _ in parts}) > 1:
        names = ", ".join(f"{o.name}: {o.logit_scale:g}" for o, _ in parts)
        raise UserError(f"the parts of a weighted sum need one logit scale ({names})", code="sum-scales")
    if len({objective.smoothing.width for objective, _ in parts if objective.smoothing}) > 1:
        raise UserError("the parts of a weighted sum need one width of smoothed targets", code="sum-part")
    total = _sum_at_step(parts, 0)
    if any(isinstance(weight, Ramp | Spaced) or objective.schedule for objective, weight in parts):
        return replace(total, schedule=lambda step, spaced: _sum_at_step(parts, step, spaced))
    return total


def _sum_at_step(parts: Sequence[tuple[Objective, Weight]], step: int, spaced: bool = True) -> Objective:
    """Return the weighted sum at an optimizer step. See `Objective.at`."""
    weights = [weight_at(weight, step, spaced) for _, weight in parts]
    objectives = [objective.at(step, spaced) for objective, _ in parts]

    def add(values: Sequence[Tensor | None]) -> Tensor | None:
        terms = [weight * value for weight, value in zip(weights, values, strict=True) if value is not None]
        return functools.reduce(operator.add, terms) if terms else None

    def coefficients(token: Scalars) -> Coefficients:
        loss, A, B, C = map(add, zip(*(o.coefficients(token)[:4] for o in objectives), strict=True))
        assert loss is not None and A is not None  # every part has them
        return Coefficients(loss, A, B, C)

    def describe(objective: Objective, weight: Weight) -> str:
        name = f"({objective})" if " + " in objective.name else str(objective)
        return f"({weight}) {name}" if isinstance(weight, Ramp | Spaced) else f"{weight:g} {name}"

    weighted = list(zip(objectives, weights, strict=True))
    widths = [o.smoothing.width for o in objectives if o.smoothing]
    share = sum(w * o.smoothing.weight for o, w in weighted if o.smoothing)
    return Objective(
        " + ".join(describe(objective, weight) for objective, weight in parts),
        frozenset[str]().union(*(o.needs for o in objectives)),
        coefficients,
        logit_scale=objectives[0].logit_scale,
        uses_target=any(o.uses_target for o in objectives),
        divergences=tuple((w * part, d) for o, w in weighted for part, d in o.divergences),
        smoothing=CostSmoothing(share, widths[0]) if widths else None,
    )


def top_entropy(z: Tensor) -> Tensor:
    """Return the entropy of the most likely tokens of logits z [..., V], relative to its maximum, [...].

    The 20 largest probabilities are renormalised. Their entropy is divided by ln 20 (arXiv 2601.02151).
    """
    k = min(LIKELIEST, z.shape[-1])
    log_p = z.topk(k, -1).values.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1) / math.log(max(k, 2))


class LogitRows(NamedTuple):
    """Rows of logits z [n, V] with targets y [n], costs [n, V] and stored log-probabilities [n]."""

    z: Tensor
    y: Tensor
    costs: Tensor
    stored: Tensor


def check_objective(name: str, function: Callable[[Scalars], Coefficients], logit_scale: float = 1.0) -> None:
    """Check the objective called `name`. Raises UserError, with the offending row, if a requirement fails.

    Every result has one number per token, which depends on the scalars of that token alone. The scalars are
    not changed in place. The coefficients give the gradient of the loss, with detached factors constant.
    No result is NaN or infinite if the target's probability is 0 or 1.
    """

    def call(scalars: Scalars) -> Coefficients:
        try:
            return function(scalars)
        except UserError:
            raise
        except Exception as error:  # a user's function may raise anything
            problem = f"objective {name}: {type(error).__name__}: {one_line(error)}"
            raise UserError(problem, code="objective-fails") from error

    rows = _random_rows()
    z = rows.z.clone().requires_grad_()
    scalars = compute_scalars(z, rows, logit_scale)
    result = call(scalars)
    _check_shapes(name, result, len(z))
    _check_independence(name, call, compute_scalars(rows.z, rows, logit_scale))
    _check_finite(name, result, scalars)
    if result.loss.grad_fn is None:
        problem = f"objective {name}: its loss does not depend on any of its scalars"
        raise UserError(problem, code="objective-gradient")
    (expected,) = torch.autograd.grad(result.loss.sum(), z)
    with torch.no_grad():
        claimed = claimed_gradient(result, scalars, rows, logit_scale)
    _check_gradient(name, claimed, expected, result, scalars)
    for dtype in (torch.float64, torch.float32):
        # probabilities of the target from 1 to 0, and wrong tokens that cost nothing or the maximum
        m = torch.tensor((0.0, 1e-9, 30.0, 1e4), dtype=dtype).repeat(2)
        p = torch.exp(-m)
        others = -torch.expm1(-m)
        zero = torch.zeros_like(m)
        price = torch.tensor([0.0, 1.0], dtype=dtype).repeat_interleave(4)
        squares = p * p + others * others
        largest = torch.maximum(p, others)
        extreme = Scalars(m, p, others * price, zero, squares, largest, zero, zero + 1, -5 * price)
        with torch.no_grad():
            _check_finite(name, call(extreme), extreme)


def _random_rows() -> LogitRows:
    """Return 64 rows of nine logits, half of which predict the target almost certainly or hardly at all."""
    n = 64
    V = 9
    generator = torch.Generator().manual_seed(0)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    logits = 3 * torch.randn(n, V, generator=generator, dtype=torch.float64)
    logits[n // 2 :] *= 20
    y = torch.randint(V, (n,), generator=generator)
    costs = uniform(n, V).scatter(1, y[:, None], 0)
    stored = -3 * uniform(n)
    stored[::3] *= 30
    return LogitRows(logits, y, costs, stored)


def _check_shapes(name: str, result: Coefficients, n: int) -> None:
    for key, value in result._asdict().items():
        if value is None and key not in ("loss", "A"):
            continue
        if not isinstance(value, Tensor) or value.shape != (n,):
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            problem = f"objective {name}: {key} must have one number per token (got: {shape})"
            raise UserError(problem, code="objective-shape")


def _check_independence(name: str, call: Callable[[Scalars], Coefficients], scalars: Scalars) -> None:
    """Check that a token's results depend neither on other tokens nor on chance or earlier calls."""
    present = {key: value for key, value in scalars._asdict().items() if value is not None}
    before = {key: value.clone() for key, value in present.items()}
    together = call(Scalars(**present))
    if changed := [key for key, value in present.items() if not torch.equal(value, before[key])]:
        problem = f"objective {name} changes {changed[0]} in place; work on a copy"
        raise UserError(problem, code="objective-in-place")
    half = call(Scalars(**{key: value[1::2] for key, value in before.items()}))
    for key, part, full in zip(Coefficients._fields, half, together, strict=True):
        if part is None or full is None:
            continue
        if not torch.allclose(part, full[1::2], rtol=1e-9, atol=1e-12):
            problem = f"{key} of a token changes with the other tokens or by chance"
            cure = "compute it from the token's scalars alone, since batches are split into chunks"
            raise UserError(f"objective {name}: {problem}; {cure}", code="objective-batch")


def _check_gradient(
    name: str, claimed: Tensor, expected: Tensor, result: Coefficients, scalars: Scalars
) -> None:
    """Compare the claimed gradient [n, V] with autograd's."""
    error = (claimed - expected).abs().amax(1)
    rounding = 1e-14 * result.A.detach().abs()  # autograd's own: 1 - p_y, times the objective's factor
    size = torch.maximum(expected.abs().amax(1), claimed.abs().amax(1))
    allowed = 1e-6 * size.clamp_min(1e-3) + rounding
    if bool((error > allowed).any()):
        worst = int((error - allowed).argmax())
        got, want = ([float(f"{x:.3g}") for x in row[worst].tolist()] for row in (claimed, expected))
        raise UserError(
            f"objective {name}: its coefficients do not give the gradient of its loss at the row with "
            f"{_describe_row(scalars, worst)}: {got}, but autograd finds {want}; detach() factors that only "
            "scale the loss",
            code="objective-gradient",
        )


def _check_finite(name: str, result: Coefficients, scalars: Scalars) -> None:
    for key, value in result._asdict().items():
        if value is not None and not bool(torch.isfinite(value).all()):
            worst = int((~torch.isfinite(value)).nonzero()[0, 0])
            row = _describe_row(scalars, worst)
            problem = f"{key} is {float(value[worst].detach())} at the row with {row}"
            raise UserError(f"objective {name}: {problem}", code="objective-finite")


def _describe_row(scalars: Scalars, i: int) -> str:
    present = {name: value for name, value in scalars._asdict().items() if value is not None}
    return ", ".join(f"{name}={float(value[i].detach()):.4g}" for name, value in present.items())


def compute_scalars(z: Tensor, rows: LogitRows, logit_scale: float = 1.0) -> Scalars:
    """Return all scalars, each [n], of softmax(logit_scale z) for logits z [n, V], differentiable."""
    log_p = (logit_scale * z).log_softmax(-1)
    p = log_p.exp()
    m = -log_p.gather(1, rows.y[:, None])[:, 0]
    D = (p * rows.costs).sum(1)
    H = -(p * log_p).sum(1)
    H_max = torch.full_like(m, math.log(z.shape[1]))
    return Scalars(
        m, torch.exp(-m), D, H, p.square().sum(1), p.amax(1), top_entropy(log_p), H_max, rows.stored
    )


def claimed_gradient(
    result: Coefficients,
    scalars: Scalars,
    rows: LogitRows,
    logit_scale: float = 1.0,
    smoothing: CostSmoothing | None = None,
) -> Tensor:
    """Return the gradient dL/dz [n, V] of the coefficients, float64, with s = logit_scale.

    dL/dz_i = s (p_i (A + B c_i + C log p_i) - K [i = y]),    K = A + B D - C H    (module docstring)
    """
    log_p = (logit_scale * rows.z).log_softmax(-1)
    zero = torch.zeros_like(result.A)
    B = zero if result.B is None else result.B
    C = zero if result.C is None else result.C
    row = log_p.exp() * (result.A[:, None] + B[:, None] * rows.costs + C[:, None] * log_p)
    assert scalars.D is not None and scalars.H is not None  # `compute_scalars` returns them all
    K = result.A + B * scalars.D - C * scalars.H
    row = row.scatter_add(1, rows.y[:, None], -K[:, None])
    if smoothing is not None:
        k = smoothing.kernel(rows.costs)
        row = row - smoothing.weight * k / k.sum(1, keepdim=True)
        row = row.scatter_add(1, rows.y[:, None], torch.full_like(row[:, :1], smoothing.weight))
    return logit_scale * row
