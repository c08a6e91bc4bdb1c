"""Token-level objectives: from a handful of scalars per token to loss and gradient; found by name, checked.

Notation, for one token with target y: p_i = softmax(z)_i, c = row of transport costs from y to every token
(c_y = 0). The numbers in `Scalars` follow from one pass over the row; an objective is a function of those
that its parameters name, and of its options as keyword-only parameters. It returns either

- a weight [n]: the loss is sg[weight] m, maximum likelihood with that weight on the token; or
- `Coefficients`: the loss, and (A, B, C) such that its gradient with respect to the logits is

      dL/dz_i = p_i (A + B c_i + C log p_i) - K [i = y],    K = A + B D - C H

  K needs no saying: adding a constant to all logits changes no loss, so the row sums to zero. The kernels use
  that: written out as p_y (A + ...) - K, the difference would vanish in rounding on well-predicted tokens.

The building blocks: dm/dz_i = p_i - [i = y], dD/dz_i = p_i (c_i - D), dH/dz_i = -p_i (log p_i + H). Weights
such as m / D are *detached* (sg[.]): they scale the gradient and are not differentiated.
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

from .divergences import DIVERGENCES, Comparison, Pair
from .schedule import Ramp, Spaced, Weight, weight_at

EPS = 1e-10  # keeps the detached ratios finite; float32 and float64 only, it would vanish in float16


class Scalars(NamedTuple):
    """The numbers of a token that one pass over its row gives, each [n], float32 (float64); None: unused."""

    m: Tensor  # -log p_y, nats
    p: Tensor  # p_y
    D: Tensor | None = None  # sum_i p_i c_i: the earth mover distance to the target (DEMD, eq. 14)
    H: Tensor | None = None  # -sum_i p_i log p_i: the entropy, nats
    S: Tensor | None = None  # sum_i p_i^2
    top: Tensor | None = None  # max_i p_i
    stored: Tensor | None = None  # a log-probability of the target, from a column beside the tokens


class Coefficients(NamedTuple):
    """Per token, each [n]: the loss and its gradient row."""

    loss: Tensor
    A: Tensor
    B: Tensor | None = None  # None: 0, no transport part
    C: Tensor | None = None  # None: 0, no entropy part
    weight: Tensor | None = None  # the token's weight, for reports; None: A


ObjectiveFunction = Callable[..., Tensor | Coefficients]


def traits(
    logit_scale: Callable[..., float] | None = None, normalised: bool = False, warning: str | None = None
) -> Callable[[ObjectiveFunction], ObjectiveFunction]:
    """Return a decorator for an objective's function, for properties that the function cannot express.

    logit_scale: of its options, the scale of softmax(scale z) that its scalars are of. normalised: weights
    are divided by their mean over the batch. warning: issued when the objective is chosen.
    """

    def attach(function: ObjectiveFunction) -> ObjectiveFunction:
        function.traits = (logit_scale, normalised, warning)  # type: ignore[attr-defined]
        return function

    return attach


def mle(m: Tensor) -> Tensor:
    """Maximum likelihood (EMO's eq. 4): L = m, w = 1."""
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

    D' = D + sg[p_y]. For the reproduction of released scripts.
    """
    shifted = D + p.detach()
    w = (m / (shifted + EPS)).detach()
    return Coefficients(0.5 * (m + w * shifted), A=0.5 * (1 - w * D), B=0.5 * w, weight=w)


@traits(
    warning="objective emo2_compat keeps a gradient of about 1 on solved tokens; "
    "it exists to reproduce released scripts, emo2 is the sound form"
)
def emo2_compat(m: Tensor, D: Tensor, p: Tensor) -> Coefficients:
    """`emo2` as the released classes compute it: u = D' / (m + eps) with D' = D + p_y."""
    shifted = D + p.detach()
    u = (shifted / (m + EPS)).detach()
    return Coefficients(u * m + shifted, A=u - D, B=torch.ones_like(m), weight=u)


def focal(m: Tensor, p: Tensor, *, gamma: float = 2.0) -> Coefficients:
    """Focal loss (arXiv 1708.02002): L = (1 - p_y)^gamma m, differentiated whole, as its authors do.

    A = (1 - p)^gamma + gamma p m (1 - p)^(gamma - 1). Implementations that detach the factor drop the second
    term.
    """
    _require("above 0", gamma=gamma)
    others = -torch.expm1(-m)  # 1 - p without cancellation
    factor = others.pow(gamma)
    ratio = torch.where(others > 0, m / others.clamp_min(torch.finfo(m.dtype).tiny), 1.0)
    return Coefficients(factor * m, A=factor * (1 + gamma * p * ratio))


def power(m: Tensor, *, alpha: float = 0.5) -> Coefficients:
    """Power family (arXiv 2510.00526): L = (1 - p_y^alpha) / alpha; A = p_y^alpha.

    alpha = 1 has the gradient of `dft`, alpha -> 0 that of `mle`.
    """
    _require("above 0", alpha=alpha)
    return Coefficients(-torch.expm1(-alpha * m) / alpha, A=torch.exp(-alpha * m))


def threshold(p: Tensor, *, least: float = 0.1) -> Tensor:
    """Likelihood of the tokens that the model finds likely enough (arXiv 2510.00526): w = 1[p_y >= least]."""
    _require("in [0, 1]", least=least)
    return (p >= least).to(p.dtype)


def chord(p: Tensor) -> Tensor:
    """CHORD's token weight (arXiv 2508.11408): w = p_y (1 - p_y), largest where the model is undecided."""
    return p * (1 - p)


@traits(normalised=True)
def mile(H: Tensor, *, gamma: float = 1.0) -> Tensor:
    """MiLe (arXiv 2310.19531): w = (1 + H)^gamma divided by its mean over the batch, all ranks together."""
    return (1 + H).pow(gamma)


def deft(m: Tensor, S: Tensor) -> Coefficients:
    """DEFT (arXiv 2602.11424): the power family with alpha = sg[sum_i p_i^2], the model's own certainty."""
    alpha = S.detach()
    return Coefficients(-torch.expm1(-alpha * m) / alpha, A=torch.exp(-alpha * m))


def neg_entropy(H: Tensor) -> Coefficients:
    """L = -H: an entropy bonus. For weighted sums: alone it makes every distribution uniform."""
    return Coefficients(-H, A=H, C=torch.ones_like(H))


@traits(logit_scale=lambda beta: 1 / beta)
def gem(m: Tensor, *, beta: float = 0.7) -> Tensor:
    """GEM with its linear function (arXiv 2408.16673): dL/dz_i = softmax(z / beta)_i - [i = y].

    That is beta times maximum likelihood at logits z / beta, which m here belongs to. The authors' default,
    with log-sigmoids, is another objective.
    """
    _require("above 0", beta=beta)
    return torch.full_like(m, beta)


def psft(m: Tensor, stored: Tensor, *, clip: float = 0.2) -> Coefficients:
    """Proximal SFT (arXiv 2508.17784): L = -min(rho, 1 + clip) with rho = p_y / p_old.

    `stored` holds log p_old, the log-probability under the policy before this round of training. A token
    that has gained enough has no gradient any more: A = rho 1[rho <= 1 + clip].
    """
    _require("above 0", clip=clip)
    most = 1 + clip
    rho = torch.exp((-m - stored).clamp(max=20.0))
    return Coefficients(-rho.clamp(max=most), A=torch.where(rho <= most, rho, 0.0))


def excess(m: Tensor, stored: Tensor, *, least: float = 0.0) -> Tensor:
    """Selective language modelling in the manner of Rho-1 (arXiv 2404.07965): w = 1[m - m_ref >= least].

    `stored` holds -m_ref, the log-probability under a reference model. Rho-1 keeps a fixed share of each
    batch instead; a fixed excess, in nats, needs no second pass and does not depend on the batch.
    """
    return (m + stored >= least).to(m.dtype)


BUILT_IN: dict[str, ObjectiveFunction] = {
    f.__name__: f
    for f in (
        mle, emo, emo2, demd, tailr, mixce, dft, focal, power, threshold, chord, mile, deft, neg_entropy,
        gem, psft, excess, emo_compat, emo2_compat,
    )
}  # fmt: skip
OBJECTIVES = (*BUILT_IN, *DIVERGENCES)


def _require(wanted: str, **options: float) -> None:
    """Raise UserError for an option that is not "above 0", or not "in [0, 1]"."""
    for name, value in options.items():
        if not (value > 0 if wanted == "above 0" else 0 <= value <= 1):
            raise UserError(
                f"objective.params: {name} must be {wanted} (given: {value:g})", code="option-range"
            )


_ANY = Scalars(*torch.tensor([[1.0], [0.4], [0.5], [1.0], [0.3], [0.5], [-1.0]]))  # an arbitrary token


@dataclass(frozen=True)
class Objective:
    """A named objective with its options bound."""

    name: str
    needs: frozenset[str]  # the fields of Scalars that it reads
    coefficients: Callable[[Scalars], Coefficients]
    params: tuple[tuple[str, float | None], ...] = ()  # given or default values, for logs and cards
    logit_scale: float = 1.0  # its scalars, and its gradient, are those of softmax(logit_scale z)
    normalised: bool = False  # weights are divided by their mean over the batch
    by_target: bool = True  # whether any part of it looks at the target
    # divergences from a teacher's distribution that it adds, and their weights
    against: tuple[tuple[float, Comparison], ...] = ()
    schedule: Callable[[int], Objective] | None = None  # the objective at a step; None: always this

    @property
    def cap(self) -> float | None:
        """Return the limit of the weights, or None where they have none."""
        return dict(self.params).get("ratio_cap")

    @property
    def needs_cost(self) -> bool:
        """Return True where it cannot be computed without transport costs."""
        return "D" in self.needs

    @property
    def transports(self) -> bool:
        """Return True where a divergence of it brings a teacher's mass to every entry (C p)."""
        return any(comparison.needs_costs for _, comparison in self.against)

    def at(self, step: int) -> Objective:
        """Return the objective of an optimizer step, counted from 0."""
        return self if self.schedule is None else self.schedule(step)

    def fixed(self) -> Objective:
        """Return the objective itself. Raises UserError for a schedule, whose step is not known."""
        if self.schedule is not None:
            cure = "give objective.at(step) before every step, or train with FusedLossMixin or a recipe"
            problem = f"objective {self.name} changes from step to step; {cure}"
            raise UserError(problem, code="schedule-without-step")
        return self

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value:g}" for key, value in self.params if value is not None)
        return f"{self.name}({options})" if options else self.name


def get_objective(name: str, **params: float | None) -> Objective:
    """Return the objective called `name` with the options `params` bound.

    `name` is one of `OBJECTIVES`, one that an installed package registers in the entry point group
    `emo_pipeline.objectives`, or FILE.py:FUNCTION or MODULE:FUNCTION. Objectives that are not built in are
    checked here (`check_objective`). Raises UserError for an unknown name or option, naming the nearest one.
    """
    if name in DIVERGENCES:
        return _bind_divergence(name, params)
    function = BUILT_IN[name] if name in BUILT_IN else _imported(name)
    objective = _bind(name, function, params)
    if name in BUILT_IN:
        objective.coefficients(_ANY)  # refuses options out of range
    else:
        check_objective(name, objective.coefficients, objective.logit_scale)
    return objective


def _bind(name: str, function: ObjectiveFunction, params: Mapping[str, float | None]) -> Objective:
    """Return an objective whose scalars are chosen by the names of the function's parameters."""
    signature = inspect.signature(function).parameters
    scalars = tuple(key for key, p in signature.items() if p.kind is not p.KEYWORD_ONLY)
    options = {key: p.default for key, p in signature.items() if p.kind is p.KEYWORD_ONLY}
    for key in scalars:
        if key not in Scalars._fields:
            problem = f"{key} is no scalar of a token ({', '.join(Scalars._fields)}); options stand after *"
            raise UserError(f"objective {name}: {problem}", code="objective-signature")
    bound = _bound(name, options, params)
    scale, normalised, warning = getattr(function, "traits", (None, False, None))
    if warning:
        warnings.warn(warning, stacklevel=3)

    def coefficients(token: Scalars) -> Coefficients:
        result = function(*(getattr(token, key) for key in scalars), **bound)
        if isinstance(result, Coefficients):
            for coefficient, scalar in (("B", "D"), ("C", "H")):
                if getattr(result, coefficient) is not None and scalar not in scalars:
                    problem = f"objective {name} returns {coefficient} and must take {scalar} as well"
                    raise UserError(problem, code="objective-signature")
            return result
        if not isinstance(result, Tensor):
            problem = f"a weight per token or Coefficients (got: {type(result).__name__})"
            raise UserError(f"objective {name} must return {problem}", code="objective-shape")
        weight = result.detach()
        return Coefficients(weight * token.m, A=weight, weight=weight)

    if scale is not None:
        coefficients(_ANY)  # refuses options out of range before they are divided by
    return Objective(
        name,
        frozenset(scalars),
        coefficients,
        tuple(bound.items()),
        logit_scale=1.0 if scale is None else scale(**bound),
        normalised=normalised,
    )


def _bound(name: str, options: Mapping[str, Any], params: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the values of an objective's options: `params`, and the defaults of the others."""
    for key in params:
        if key not in options:
            hint = nearest(key, options) if options else "it has no parameters"
            raise UserError(
                f"unknown parameter {key!r} of objective {name}; {hint}", code="unknown-parameter"
            )
    bound = {key: params.get(key, default) for key, default in options.items()}
    for key, value in bound.items():
        if value is inspect.Parameter.empty:
            raise UserError(f"objective {name}: set objective.params.{key}", code="needs-parameter")
        if value is None and options[key] is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            problem = f"objective {name}: {key} must be a finite number (given: {value!r})"
            raise UserError(problem, code="option-range")
    return bound


def _bind_divergence(name: str, params: Mapping[str, float | None]) -> Objective:
    """Return a divergence from a teacher; `temperature` divides the student's logits."""
    signature = inspect.signature(DIVERGENCES[name]).parameters
    takes = tuple(key for key, p in signature.items() if p.kind is not p.KEYWORD_ONLY)
    options = {key: p.default for key, p in signature.items() if p.kind is p.KEYWORD_ONLY}
    bound = _bound(name, options | {"temperature": 1.0}, params)
    _require("above 0", temperature=bound["temperature"])
    comparison = Comparison(DIVERGENCES[name], takes, {key: bound[key] for key in options})
    even = torch.full((1, 2), 0.5)
    comparison.of(Pair(even.log(), even.log(), even, even, even))  # refuses options out of range

    def nothing(token: Scalars) -> Coefficients:
        zero = torch.zeros_like(token.m)
        return Coefficients(zero, A=zero, weight=zero + 1)

    return Objective(
        name,
        frozenset({"D"} if comparison.needs_costs else ()),
        nothing,
        tuple(bound.items()),
        logit_scale=1 / bound["temperature"],
        by_target=False,
        against=((1.0, comparison),),
    )


def _imported(name: str) -> ObjectiveFunction:
    """Return the function that FILE.py:FUNCTION, MODULE:FUNCTION or a package's entry point names."""
    points = registered_objectives()
    source, _, attribute = points.get(name, name).rpartition(":")
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
    except (Exception, SystemExit) as error:  # whatever a user's file does when it is executed
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
    objectives = [objective for objective, _ in parts]
    if all(weight == 0 for _, weight in parts):
        raise UserError("a sum of objectives needs a part with a weight other than 0", code="empty-sum")
    for objective, weight in parts:
        if not isinstance(objective, Objective):
            given = f"a sum is made of what get_objective returns (given: {objective!r})"
            raise UserError(given, code="sum-part")
        weight, share = weight if isinstance(weight, Spaced) else (weight, Ramp(1.0, 1.0, 1))
        first, last, steps = weight if isinstance(weight, Ramp) else (weight, weight, 1)
        _require("in [0, 1]", share=share.first, last_share=share.last)
        if not (math.isfinite(first) and math.isfinite(last) and min(steps, share.steps) >= 1):
            problem = f"needs a finite weight, and a ramp a step (given: {weight})"
            raise UserError(f"objective {objective.name} {problem}", code="option-range")
        if objective.normalised:
            problem = "divides its weights by their mean and cannot be part of a sum"
            raise UserError(f"objective {objective.name} {problem}", code="sum-part")
    if len({objective.logit_scale for objective in objectives}) > 1:
        names = ", ".join(f"{o.name} at {o.logit_scale:g}" for o in objectives)
        raise UserError(f"the parts of a sum must see the logits at one scale ({names})", code="sum-scales")
    total = _sum(parts, 0)
    if any(isinstance(weight, Ramp | Spaced) or objective.schedule for objective, weight in parts):
        return replace(total, schedule=lambda step: _sum(parts, step))
    return total


def _sum(parts: Sequence[tuple[Objective, Weight]], step: int) -> Objective:
    """Return the sum at an optimizer step."""
    weights = [weight_at(weight, step) for _, weight in parts]
    objectives = [objective.at(step) for objective, _ in parts]

    def total(values: Sequence[Tensor | None]) -> Tensor | None:
        terms = [weight * value for weight, value in zip(weights, values, strict=True) if value is not None]
        return functools.reduce(operator.add, terms) if terms else None

    def coefficients(token: Scalars) -> Coefficients:
        loss, A, B, C = map(total, zip(*(o.coefficients(token)[:4] for o in objectives), strict=True))
        assert loss is not None and A is not None  # every part has them
        return Coefficients(loss, A, B, C)

    labels = [(f"({o})" if " + " in o.name else str(o), w) for o, w in parts]
    name = " + ".join(f"({w}) {o}" if isinstance(w, Ramp | Spaced) else f"{w:g} {o}" for o, w in labels)
    needs = frozenset[str]().union(*(o.needs for o in objectives))
    return Objective(
        name,
        needs,
        coefficients,
        logit_scale=objectives[0].logit_scale,
        by_target=any(o.by_target for o in objectives),
        against=tuple(
            (w * share, c) for o, w in zip(objectives, weights, strict=True) for share, c in o.against
        ),
    )


class Rows(NamedTuple):
    """Random rows of logits z [n, V] with targets y [n] and costs [n, V]."""

    z: Tensor
    y: Tensor
    costs: Tensor
    stored: Tensor


def check_objective(name: str, function: Callable[[Scalars], Coefficients], logit_scale: float = 1.0) -> None:
    """Check the objective called `name`. Raises UserError, with the row, where a claim does not hold.

    Every result has one number per token, which follows from that token's scalars alone; these are not
    changed in place; the gradient that its coefficients claim is that of its loss (detached factors are
    constants); nothing is NaN or infinite where the target's probability is 0 or 1.
    """

    def called(scalars: Scalars) -> Coefficients:
        try:
            return function(scalars)
        except UserError:
            raise
        except Exception as error:  # whatever a user's function does
            problem = f"objective {name}: {type(error).__name__}: {one_line(error)}"
            raise UserError(problem, code="objective-fails") from error

    n, V, generator = 64, 9, torch.Generator().manual_seed(0)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    logits = 3 * torch.randn(n, V, generator=generator, dtype=torch.float64)
    logits[n // 2 :] *= 20  # targets from certain to hopeless
    y = torch.randint(V, (n,), generator=generator)
    costs, stored = uniform(n, V).scatter(1, y[:, None], 0), -3 * uniform(n)
    stored[::3] *= 30
    rows = Rows(logits, y, costs, stored)
    z = rows.z.clone().requires_grad_()
    scalars = scalars_of(z, rows, logit_scale)
    result = called(scalars)
    for key, value in result._asdict().items():
        if value is None and key not in ("loss", "A"):
            continue
        if not isinstance(value, Tensor) or value.shape != (n,):
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            problem = f"objective {name}: {key} must have one number per token (got: {shape})"
            raise UserError(problem, code="objective-shape")

    # a token's numbers depend neither on the tokens beside it, nor on chance or earlier calls
    present = {k: v for k, v in scalars_of(rows.z, rows, logit_scale)._asdict().items() if v is not None}
    before = {key: value.clone() for key, value in present.items()}
    together = called(Scalars(**present))
    if changed := [key for key, value in present.items() if not torch.equal(value, before[key])]:
        problem = f"objective {name} changes {changed[0]} in place, which others read; work on a copy"
        raise UserError(problem, code="objective-in-place")
    odd = called(Scalars(**{key: value[1::2] for key, value in before.items()}))
    for key, half, full in zip(Coefficients._fields, odd, together, strict=True):
        if half is None or full is None:
            continue
        if not torch.allclose(half, full[1::2], rtol=1e-9, atol=1e-12):
            reason = (
                "changes with the tokens beside it, or by chance: batches are taken in chunks of any size"
            )
            raise UserError(f"objective {name}: {key} of a token {reason}", code="objective-batch")

    _check_finite(name, result, scalars)
    if result.loss.grad_fn is None:
        problem = f"objective {name}: its loss depends on none of its scalars"
        raise UserError(problem, code="objective-gradient")
    (want,) = torch.autograd.grad(result.loss.sum(), z)
    with torch.no_grad():
        claimed = gradient(result, scalars, rows, logit_scale)
    # the loss of a weight is sg[weight] m, and autograd sees it so
    off = (claimed - want).abs().amax(1)
    # autograd's own rounding: 1 - p_y, times whatever the objective makes of it
    rounding = 1e-14 * result.A.detach().abs()
    allowed = 1e-6 * torch.maximum(want.abs().amax(1), claimed.abs().amax(1)).clamp_min(1e-3) + rounding
    if bool((off > allowed).any()):
        worst = int((off - allowed).argmax())
        claims, slopes = ([float(f"{x:.3g}") for x in row[worst].tolist()] for row in (claimed, want))
        raise UserError(
            f"objective {name}: its coefficients claim another gradient than its loss has at the row with "
            f"{_row(scalars, worst)}: {claims}, not {slopes} as autograd; detach() what shall only scale",
            code="objective-gradient",
        )
    for dtype in (torch.float64, torch.float32):
        # targets from solved to hopeless, whose mistakes cost nothing, or as much as they can
        m = torch.tensor((0.0, 1e-9, 30.0, 1e4), dtype=dtype).repeat(2)
        p, others, zero = torch.exp(-m), -torch.expm1(-m), torch.zeros_like(m)
        price = torch.tensor([0.0, 1.0], dtype=dtype).repeat_interleave(4)
        squares = p * p + others * others
        extreme = Scalars(m, p, others * price, zero, squares, torch.maximum(p, others), -5 * price)
        with torch.no_grad():
            _check_finite(name, called(extreme), extreme)


def _check_finite(name: str, result: Coefficients, scalars: Scalars) -> None:
    for key, value in result._asdict().items():
        if value is not None and not bool(torch.isfinite(value).all()):
            worst = int((~torch.isfinite(value)).nonzero()[0, 0])
            problem = f"{key} is {float(value[worst].detach())} at the row with {_row(scalars, worst)}"
            raise UserError(f"objective {name}: {problem}", code="objective-finite")


def _row(scalars: Scalars, i: int) -> str:
    """Return the scalars of row i as text."""
    present = {name: value for name, value in scalars._asdict().items() if value is not None}
    return ", ".join(f"{name}={float(value[i].detach()):.4g}" for name, value in present.items())


def scalars_of(z: Tensor, rows: Rows, logit_scale: float = 1.0) -> Scalars:
    """Return all scalars of rows of logits z [n, V], each [n], differentiable, at the scale `logit_scale`."""
    log_p = (logit_scale * z).log_softmax(-1)
    p = log_p.exp()
    m = -log_p.gather(1, rows.y[:, None])[:, 0]
    D, H = (p * rows.costs).sum(1), -(p * log_p).sum(1)
    return Scalars(m, torch.exp(-m), D, H, p.square().sum(1), p.amax(1), rows.stored)


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
