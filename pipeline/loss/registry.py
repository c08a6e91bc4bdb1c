"""Objectives by name: built in, from a user's file or package, or a weighted sum of several."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from common.errors import UserError, nearest, one_line
from pipeline.loss.checking import check_objective
from pipeline.loss.objectives import BUILT_IN, Coefficients, ObjectiveFunction, Scalars, Traits

ENTRY_POINTS = "emo_pipeline.objectives"  # the group in which a package registers its objectives
OTHER_NAMES = {  # objectives in other programs
    **dict.fromkeys(("cross_entropy", "crossentropy", "cross-entropy", "ce", "nll", "clm", "xent"), "mle"),
    **dict.fromkeys(("focal_loss", "focalloss"), "focal"),
    **dict.fromkeys(("entropy", "entropy_minimization"), "neg_entropy"),
}
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
    dense: bool = False  # compares with a teacher's whole distribution instead of one target
    schedule: Callable[[int], Objective] | None = (
        None  # the objective at an optimizer step; None: always this
    )

    @property
    def cap(self) -> float | None:
        """Return the limit of the weights, or None where they have none."""
        return dict(self.params).get("ratio_cap")

    @property
    def needs_cost(self) -> bool:
        """Return True where it cannot be computed without transport costs."""
        return "D" in self.needs

    def at(self, step: int) -> Objective:
        """Return the objective of an optimizer step, counted from 0."""
        return self if self.schedule is None else self.schedule(step)

    def fixed(self) -> Objective:
        """Return the objective itself. Raises UserError for a schedule, whose step is not known."""
        if self.schedule is not None:
            raise UserError(
                f"objective {self.name} changes from step to step, and here the step is not known: give "
                "objective.at(step), anew before every step, or train with FusedLossMixin or a recipe",
                code="schedule-without-step",
            )
        return self

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value:g}" for key, value in self.params if value is not None)
        return f"{self.name}({options})" if options else self.name


def get_objective(name: str, **params: float | None) -> Objective:
    """Return the objective called `name` with the options `params` bound.

    `name` is one of `OBJECTIVES`, one that an installed package registers in the entry point group
    `emo_pipeline.objectives`, or FILE.py:FUNCTION or MODULE:FUNCTION. Objectives that are not built in are
    checked here (`checking.py`). Raises UserError for an unknown name or option, naming the nearest one.
    """
    if name in BUILT_IN:
        objective = _bind(name, BUILT_IN[name], params)
        objective.coefficients(_ANY)  # refuses options out of range
        return objective
    if ":" in name:
        function = _imported(name)
    else:
        points = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}
        if name not in points:
            raise UserError(
                f"unknown objective {name!r}; {nearest(name, [*BUILT_IN, *points], OTHER_NAMES)}",
                code="unknown-objective",
            )
        try:
            function = points[name].load()
        except Exception as error:  # whatever a package does when it is imported
            raise UserError(
                f"objective {name}: {points[name].value}: {one_line(error)}", code="objective-import"
            ) from error
    objective = _bind(name, function, params)
    check_objective(name, objective.coefficients, objective.logit_scale)
    return objective


def _bind(name: str, function: ObjectiveFunction, params: Mapping[str, float | None]) -> Objective:
    """Return an objective whose scalars are chosen by the names of the function's parameters."""
    signature = inspect.signature(function).parameters
    scalars = tuple(key for key, p in signature.items() if p.kind is not p.KEYWORD_ONLY)
    options = {key: p.default for key, p in signature.items() if p.kind is p.KEYWORD_ONLY}
    for key in scalars:
        if key not in Scalars._fields:
            raise UserError(
                f"objective {name} asks for {key}, which is no scalar of a token; known: "
                f"{', '.join(Scalars._fields)}; make it keyword-only (after *) if it is an option",
                code="objective-signature",
            )
    for key in params:
        if key not in options:
            hint = nearest(key, options) if options else "it has no parameters"
            raise UserError(
                f"unknown parameter {key!r} of objective {name}; {hint}", code="unknown-parameter"
            )
    bound = {key: params.get(key, default) for key, default in options.items()}
    for key, value in bound.items():
        if value is inspect.Parameter.empty:
            raise UserError(
                f"objective {name} needs a value for {key}; set objective.params", code="needs-parameter"
            )
        if value is None and options[key] is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(
                f"objective {name}: {key} must be a finite number (given: {value!r})", code="option-range"
            )
    declared: Traits = getattr(function, "traits", Traits())
    if declared.warning:
        warnings.warn(declared.warning, stacklevel=3)

    def coefficients(token: Scalars) -> Coefficients:
        result = function(*(getattr(token, key) for key in scalars), **bound)
        if isinstance(result, Coefficients):
            for coefficient, scalar in (("B", "D"), ("C", "H")):
                if getattr(result, coefficient) is not None and scalar not in scalars:
                    raise UserError(
                        f"objective {name} returns {coefficient}, whose gradient needs {scalar}; "
                        f"name {scalar} among its parameters",
                        code="objective-signature",
                    )
            return result
        if not isinstance(result, Tensor):
            kind = type(result).__name__
            raise UserError(
                f"objective {name} must return a weight per token or Coefficients (got: {kind})",
                code="objective-shape",
            )
        weight = result.detach()
        return Coefficients(weight * token.m, A=weight, weight=weight)

    if declared.logit_scale is not None:
        coefficients(_ANY)  # refuses options out of range before they are divided by
    return Objective(
        name,
        frozenset(scalars),
        coefficients,
        tuple(bound.items()),
        logit_scale=1.0 if declared.logit_scale is None else declared.logit_scale(**bound),
        normalised=declared.normalised,
        dense=name == "demd_dense",
    )


def _imported(name: str) -> ObjectiveFunction:
    """Return the function that FILE.py:FUNCTION or MODULE:FUNCTION names."""
    source, _, attribute = name.rpartition(":")
    if not attribute:
        raise UserError(f"objective {name} names no function; give FILE.py:FUNCTION", code="objective-import")
    if source.endswith(".py") and not Path(source).is_file():
        raise UserError(f"objective {name}: {source} does not exist", code="objective-import")
    try:
        if source.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(source).stem, Path(source))
            assert spec is not None and spec.loader is not None, source
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
    except (Exception, SystemExit) as error:  # whatever a user's file does when it is executed
        raise UserError(
            f"objective {name}: {source} cannot be imported: {one_line(error)}", code="objective-import"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(
            f"objective {name}: {source} has no function {attribute}; {nearest(attribute, functions)}",
            code="objective-import",
        )
    return function


class Ramp(NamedTuple):
    """A number that moves linearly from `first` to `last` over the first `steps` optimizer steps."""

    first: float
    last: float
    steps: int

    def at(self, step: float) -> float:
        """Return its value at an optimizer step, counted from 0, or between two."""
        return self.first + (self.last - self.first) * min(max(step, 0) / self.steps, 1.0)

    def __str__(self) -> str:
        return f"{self.first:g}..{self.last:g} over {self.steps}"


def weighted_sum(parts: Sequence[tuple[Objective, float | Ramp]]) -> Objective:
    """Return the objective L = sum_j weight_j L_j, with the exact gradient, in one pass over the logits.

    A Ramp among the weights makes it a schedule (`Objective.at`). Raises UserError for parts that cannot
    share a pass: `demd_dense`, normalised weights, and logits at two scales.
    """
    objectives = [objective for objective, _ in parts]
    if not parts:
        raise UserError("a sum of objectives needs parts", code="empty-sum")
    if all(weight == 0 for _, weight in parts):
        raise UserError("the weights of a sum are all 0: nothing would be learned", code="empty-sum")
    for objective, weight in parts:
        if not isinstance(objective, Objective):
            raise UserError(
                f"a sum is made of what get_objective returns (given: {objective!r})", code="sum-part"
            )
        numbers = (weight.first, weight.last) if isinstance(weight, Ramp) else (weight,)
        if not all(map(math.isfinite, numbers)):
            raise UserError(
                f"objective {objective.name}: its weight must be finite (given: {weight})",
                code="option-range",
            )
        if isinstance(weight, Ramp) and weight.steps < 1:
            raise UserError(
                f"objective {objective.name}: a ramp takes 1 step or more (given: {weight.steps})",
                code="option-range",
            )
    for objective in objectives:
        if objective.dense or objective.normalised:
            reason = "compares with a teacher" if objective.dense else "divides its weights by their mean"
            raise UserError(
                f"objective {objective.name} {reason} and cannot be part of a sum", code="sum-part"
            )
    scales = {objective.logit_scale for objective in objectives}
    if len(scales) > 1:
        names = ", ".join(f"{o.name} at {o.logit_scale:g}" for o in objectives)
        raise UserError(f"the parts of a sum must see the logits at one scale ({names})", code="sum-scales")
    total = _sum(parts, 0)
    if any(isinstance(weight, Ramp) or objective.schedule for objective, weight in parts):
        return Objective(
            total.name,
            total.needs,
            total.coefficients,
            total.params,
            total.logit_scale,
            schedule=lambda step: _sum(parts, step),
        )
    return total


def _sum(parts: Sequence[tuple[Objective, float | Ramp]], step: int) -> Objective:
    """Return the sum at an optimizer step."""
    weights = [weight.at(step) if isinstance(weight, Ramp) else weight for _, weight in parts]
    objectives = [objective.at(step) for objective, _ in parts]

    def total(values: Sequence[Tensor | None]) -> Tensor | None:
        terms = [weight * value for weight, value in zip(weights, values, strict=True) if value is not None]
        return functools.reduce(operator.add, terms) if terms else None

    def coefficients(token: Scalars) -> Coefficients:
        loss, A, B, C = map(total, zip(*(o.coefficients(token)[:4] for o in objectives), strict=True))
        assert loss is not None and A is not None  # every part has them
        return Coefficients(loss, A, B, C)

    labels = [(f"({o})" if " + " in o.name else str(o), w) for o, w in parts]
    name = " + ".join(f"({w}) {o}" if isinstance(w, Ramp) else f"{w:g} {o}" for o, w in labels)
    needs = frozenset[str]().union(*(o.needs for o in objectives))
    return Objective(name, needs, coefficients, logit_scale=objectives[0].logit_scale)
