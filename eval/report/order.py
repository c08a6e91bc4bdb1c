"""Rows as in the paper's tables: a base model, then the objectives it was trained with, then the next."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from eval.results import Model

NEW = "new"  # what an export of a model trained from scratch calls its origin
FROM_SCRATCH = "Trained from scratch"
PRE_TRAINED = "Pre-trained"
OBJECTIVES = {"mle": "MLE", "tailr": "TaiLr", "mixce": "MixCE", "emo": "EMO"}  # the paper's, in its order
_WEIGHTS = ("export", "hf")  # directories of weights that say nothing about the model


def arrange(models: list[Model], first: list[str], baseline: str | None) -> list[tuple[str, list[Model]]]:
    """(base model, models made from it); the baseline's group and in it the baseline come first.

    Without a baseline it is the first row. Models named in `first` precede others of their group. The base
    model is empty where it is not known.
    """
    order = {name: i for i, name in enumerate(first)}
    bases = {m.name: base_of(m, models) for m in models}
    objectives = list(OBJECTIVES)

    def place(model: Model) -> tuple[Any, ...]:
        objective = str(model.facts.get("objective") or "")
        known = objectives.index(objective) if objective in objectives else len(objectives)
        step = model.facts.get("step")
        return (
            model.name != baseline,
            order.get(model.name, len(order)),
            bool(objective),
            known,
            step if isinstance(step, int) else 0,
            _natural(model.name),
        )

    groups: dict[str, list[Model]] = {}
    for model in sorted(models, key=place):
        groups.setdefault(bases[model.name], []).append(model)
    titles = [_short(origin) for origin in groups]
    return [
        (title if titles.count(title) == 1 else origin, members)
        for title, (origin, members) in zip(titles, groups.items(), strict=True)
    ]


def base_of(model: Model, models: list[Model]) -> str:
    """Path or id of the model that this one was trained from; its own if others were trained from it."""
    origin = model.facts.get("origin")
    if origin:
        return FROM_SCRATCH if origin == NEW else str(origin)
    own = str(model.description["path"])
    origins = sorted({str(m.facts["origin"]) for m in models if m.facts.get("origin")})
    return next((other for other in origins if _same(other, own)), "")


def method(model: Model, base: str) -> str:
    """How the paper's tables call a row of the group `base`: its objective, or that there was none."""
    objective = model.facts.get("objective")
    if objective:
        return OBJECTIVES.get(str(objective), str(objective))
    return PRE_TRAINED if base else model.name


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts 7b before 13b."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _same(a: str, b: str) -> bool:
    return a == b or (Path(a).exists() and Path(a).resolve() == Path(b).resolve())


def _short(path: str) -> str:
    """models/llama-7b -> llama-7b, runs/a/export -> a."""
    parts = [p for p in Path(path).parts if p != "/"]
    while len(parts) > 1 and parts[-1] in _WEIGHTS:
        parts.pop()
    return parts[-1] if parts else path
