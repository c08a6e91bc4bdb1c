"""Objectives by name: built in, from a file or a package of one's own, or a weighted sum of several."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from common.errors import UserError, nearest, one_line
from pipeline.loss.checking import check_objective
from pipeline.loss.objectives import BUILT_IN, Coefficients, ObjectiveFunction, Scalars, Traits

ENTRY_POINTS = "emo_pipeline.objectives"  # the group in which a package registers objectives of its own
ELSEWHERE = {  # what other programs call an objective
    **dict.fromkeys(("cross_entropy", "crossentropy", "cross-entropy", "ce", "nll", "clm", "xent"), "mle"),
    **dict.fromkeys(("focal_loss", "focalloss"), "focal"),
    **dict.fromkeys(("entropy", "entropy_minimization"), "neg_entropy"),
}
_ANY = Scalars(*torch.tensor([[1.0], [0.4], [0.5], [1.0], [0.3], [0.5], [-1.0]]))  # some token


@dataclass(frozen=True)
class Objective:
    """A named objective with its options bound."""

    name: str
    needs: frozenset[str]  # the fields of Scalars that it reads
    coefficients: Callable[[Scalars], Coefficients]
    params: tuple[tuple[str, float | None], ...] = ()  # as given or by default, for logs and cards
    logit_scale: float = 1.0  # its scalars, and its gradient, are those of softmax(logit_scale z)
    normalised: bool = False  # weights are divided by their mean over the batch
    dense: bool = False  # compares with a teacher's whole distribution instead of one target
    schedule: Callable[[int], Objective] | None = None  # what it is at an optimizer step; None: always this

    @property
    def cap(self) -> float | None:
        """The largest weight that it gives, where it has a limit."""
        return dict(self.params).get("ratio_cap")

    @property
    def needs_cost(self) -> bool:
        """Whether it cannot be computed without transport costs."""
        return "D" in self.needs

    def at(self, step: int) -> Objective:
        """The objective as it is at an optimizer step, from 0."""
        return self if self.schedule is None else self.schedule(step)

    def fixed(self) -> Objective:
        """Return the objective itself. Raises UserError for a schedule, where nobody tells the step."""
        if self.schedule is not None:
            raise UserError(
                f"objective {self.name} changes from step to step, and here the step is not known: give "
                "objective.at(step), anew before every step, or train with FusedLossMixin or a recipe",
                code="schedule-without-step",
            )
        return self

    def __str__(self) -> str:
        given = ", ".join(f"{key}={value:g}" for key, value in self.params if value is not None)
        return f"{self.name}({given})" if given else self.name


def get_objective(name: str, **params: float | None) -> Objective:
    """The objective called `name` with the options `params` bound.

    `name` is one of `OBJECTIVES`, one that an installed package registers in the entry point group
    `emo_pipeline.objectives`, or FILE.py:FUNCTION or MODULE:FUNCTION. Objectives that are not built in are
    checked here (`checking.py`). Raises UserError for an unknown name or option, naming the nearest one.
    """
    if name in BUILT_IN:
        found = _bind(name, BUILT_IN[name], params)
        found.coefficients(_ANY)  # refuses options out of range
        return found
    function = _imported(name) if ":" in name else _registered(name)
    found = _bind(name, function, params)
    check_objective(name, found.coefficients, found.logit_scale)
    return found


def _bind(name: str, function: ObjectiveFunction, params: Mapping[str, float | None]) -> Objective:
    """An objective whose scalars are chosen by the names of the function's parameters."""
    signature = inspect.signature(function).parameters
    scalars = tuple(key for key, p in signature.items() if p.kind is not p.KEYWORD_ONLY)
    options = {key: p.default for key, p in signature.items() if p.kind is p.KEYWORD_ONLY}
    for key in scalars:
        if key not in Scalars._fields:
            raise UserError(
                f"objective {name} asks for {key}, which is no scalar of a token; known: "
                f"{', '.join(Scalars._fields)}; make it keyword-only (after *) if it is an option"
            )
    for key in params:
        if key not in options:
            hint = nearest(key, options) if options else "it has no parameters"
            raise UserError(f"unknown parameter {key!r} of objective {name}; {hint}")
    bound = {key: params.get(key, default) for key, default in options.items()}
    for key, value in bound.items():
        if value is inspect.Parameter.empty:
            raise UserError(f"objective {name} needs a value for {key}; set objective.params")
        if value is None and options[key] is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"objective {name}: {key} must be a finite number (given: {value!r})")
    own: Traits = getattr(function, "traits", Traits())
    if own.warning:
        warnings.warn(own.warning, stacklevel=3)

    def coefficients(given: Scalars) -> Coefficients:
        found = function(*(getattr(given, key) for key in scalars), **bound)
        if isinstance(found, Coefficients):
            for coefficient, scalar in (("B", "D"), ("C", "H")):
                if getattr(found, coefficient) is not None and scalar not in scalars:
                    raise UserError(
                        f"objective {name} returns {coefficient}, whose gradient needs {scalar}; "
                        f"name {scalar} among its parameters"
                    )
            return found
        if not isinstance(found, Tensor):
            kind = type(found).__name__
            raise UserError(f"objective {name} must return a weight per token or Coefficients (got: {kind})")
        weight = found.detach()
        return Coefficients(weight * given.m, A=weight, weight=weight)

    if own.logit_scale is not None:
        coefficients(_ANY)  # refuses options out of range before they are divided by
    return Objective(
        name,
        frozenset(scalars),
        coefficients,
        tuple(bound.items()),
        logit_scale=1.0 if own.logit_scale is None else own.logit_scale(**bound),
        normalised=own.normalised,
        dense=name == "demd_dense",
    )


def _imported(name: str) -> ObjectiveFunction:
    """FILE.py:FUNCTION or MODULE:FUNCTION."""
    where, _, attribute = name.rpartition(":")
    if not attribute:
        raise UserError(f"objective {name} names no function; give FILE.py:FUNCTION")
    if where.endswith(".py") and not Path(where).is_file():
        raise UserError(f"objective {name}: {where} does not exist")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except (Exception, SystemExit) as error:  # whatever a user's file does when it is executed
        raise UserError(f"objective {name}: {where} cannot be imported: {one_line(error)}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(f"objective {name}: {where} has no function {attribute}; {nearest(attribute, known)}")
    return function


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _registered(name: str) -> ObjectiveFunction:
    """An objective of an installed package."""
    found = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if name not in found:
        raise UserError(f"unknown objective {name!r}; {nearest(name, [*BUILT_IN, *found], ELSEWHERE)}")
    try:
        return found[name].load()
    except Exception as error:  # whatever somebody's package does when it is imported
        raise UserError(f"objective {name}: {found[name].value}: {one_line(error)}") from error


class Ramp(NamedTuple):
    """A number that moves in a straight line from `first` to `last` over the first `steps` steps."""

    first: float
    last: float
    steps: int

    def at(self, step: float) -> float:
        """Its value at an optimizer step, from 0, or between two."""
        return self.first + (self.last - self.first) * min(max(step, 0) / self.steps, 1.0)

    def __str__(self) -> str:
        return f"{self.first:g}..{self.last:g} over {self.steps}"


def weighted_sum(parts: Sequence[tuple[Objective, float | Ramp]]) -> Objective:
    """L = sum_j weight_j L_j, one pass over the logits; its gradient is that of the sum, exactly.

    Raises UserError for parts that cannot share a pass.
    """
    objectives = [objective for objective, _ in parts]
    if not parts:
        raise UserError("a sum of objectives needs parts")
    if all(weight == 0 for _, weight in parts):
        raise UserError("the weights of a sum are all 0: nothing would be learned")
    for objective, weight in parts:
        if not isinstance(objective, Objective):
            raise UserError(f"a sum is made of what get_objective returns (given: {objective!r})")
        numbers = (weight.first, weight.last) if isinstance(weight, Ramp) else (weight,)
        if not all(map(math.isfinite, numbers)):
            raise UserError(f"objective {objective.name}: its weight must be finite (given: {weight})")
        if isinstance(weight, Ramp) and weight.steps < 1:
            raise UserError(
                f"objective {objective.name}: a ramp takes 1 step or more (given: {weight.steps})"
            )
    for objective in objectives:
        if objective.dense or objective.normalised:
            why = "compares with a teacher" if objective.dense else "divides its weights by their mean"
            raise UserError(f"objective {objective.name} {why} and cannot be part of a sum")
    scales = {objective.logit_scale for objective in objectives}
    if len(scales) > 1:
        names = ", ".join(f"{o.name} at {o.logit_scale:g}" for o in objectives)
        raise UserError(f"the parts of a sum must see the logits at one scale ({names})")
    found = _sum(parts, 0)
    if any(isinstance(weight, Ramp) or objective.schedule for objective, weight in parts):
        return Objective(
            found.name,
            found.needs,
            found.coefficients,
            found.params,
            found.logit_scale,
            schedule=lambda step: _sum(parts, step),
        )
    return found


def _sum(parts: Sequence[tuple[Objective, float | Ramp]], step: int) -> Objective:
    """The sum as it is at a step."""
    weights = [weight.at(step) if isinstance(weight, Ramp) else weight for _, weight in parts]
    objectives = [objective.at(step) for objective, _ in parts]

    def coefficients(given: Scalars) -> Coefficients:
        found = [objective.coefficients(given) for objective in objectives]
        return Coefficients(
            loss=_total(weights, [c.loss for c in found]),
            A=_total(weights, [c.A for c in found]),
            B=_optional(weights, [c.B for c in found]),
            C=_optional(weights, [c.C for c in found]),
        )

    named = [(f"({o})" if " + " in o.name else str(o), w) for o, w in parts]
    name = " + ".join(f"({w}) {o}" if isinstance(w, Ramp) else f"{w:g} {o}" for o, w in named)
    needs = frozenset[str]().union(*(o.needs for o in objectives))
    return Objective(name, needs, coefficients, logit_scale=objectives[0].logit_scale)


def _total(weights: Sequence[float], values: Sequence[Tensor]) -> Tensor:
    total = weights[0] * values[0]
    for weight, value in zip(weights[1:], values[1:], strict=True):
        total = total + weight * value
    return total


def _optional(weights: Sequence[float], values: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of those that are there; None where none is."""
    there = [(weight, value) for weight, value in zip(weights, values, strict=True) if value is not None]
    return _total(*zip(*there, strict=True)) if there else None
