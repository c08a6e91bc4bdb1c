"""Which model was trained from which: every model finds its base, and rows stand in the paper's order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eval.results import Model

NEW = "new"  # what an export of a model trained from scratch calls its origin
OBJECTIVES = {"mle": "MLE", "tailr": "TaiLr", "mixce": "MixCE", "emo": "EMO"}  # the paper's, in its order
_WEIGHTS = ("export", "hf")  # directories of weights that say nothing about the model


class Family(NamedTuple):
    """Models that were trained from one, by one stage of training or several."""

    title: str  # of the base; empty where nothing is known
    base: Model | None  # None: it was not evaluated
    members: list[Model]  # the base is the first


def parents(models: Sequence[Model]) -> dict[str, Model]:
    """Return by name the evaluated model that each was trained from; models without one are left out.

    The best match counts: the same path, the run that left the origin, a path that ends alike (results and
    runs are moved), the last checkpoint of that run, and the same name of a model that was trained elsewhere.
    """
    above: dict[str, Model] = {}
    for model in models:
        origin = str(model.facts.get("origin") or NEW)
        if origin == NEW:
            continue
        others = [m for m in models if m is not model and not _descends(m, model, above)]
        ranked = [(rank, _step(m), m.name, m) for m in others if (rank := _match(m, origin))]
        if ranked:
            above[model.name] = max(ranked, key=lambda r: r[:3])[3]
    return above


def families(models: Sequence[Model], first: Sequence[str], baseline: str | None) -> list[Family]:
    """Return all models by base; the family of `baseline`, and in it the baseline, come first.

    Models named in `first` precede others of their family.
    """
    above = parents(models)

    def root(model: Model) -> str:
        while model.name in above:
            model = above[model.name]
        origin = str(model.facts.get("origin") or NEW)
        is_base = any(parent is model for parent in above.values())
        return f"model {model.name}" if is_base else "" if origin == NEW else f"path {origin}"

    def sort_key(model: Model) -> tuple[Any, ...]:
        objective = str(model.facts.get("objective") or "")
        rank = list(OBJECTIVES).index(objective) if objective in OBJECTIVES else len(OBJECTIVES)
        order = first.index(model.name) if model.name in first else len(first)
        depth = 0 if model.name not in above else 1
        natural = [(int(p), "") if p.isdecimal() else (-1, p) for p in re.split(r"(\d+)", model.name)]
        return (model.name != baseline, depth, order, bool(objective), rank, _step(model), natural)

    grouped: dict[str, list[Model]] = {}
    for model in sorted(models, key=sort_key):
        grouped.setdefault(root(model), []).append(model)
    result = []
    for key, members in grouped.items():
        base = next((m for m in members if key == f"model {m.name}"), None)
        members = sorted(members, key=lambda m: (m.name != baseline, m is not base))
        result.append(Family(base.name if base else _short(key.removeprefix("path ")), base, members))
    return result


def baselines(family: Family) -> list[tuple[Model, list[Model]]]:
    """Return what members are compared with by default, and which: with every model that others were trained
    from, and with MLE on the same data from the same origin; without either with the first."""
    above = parents(family.members)
    pairs = []
    for model in family.members:
        below = [m for m in family.members if _descends(m, model, above)]
        if below:
            pairs.append((model, below))
    stages: dict[str, list[Model]] = {}
    for model in family.members:
        if model.facts.get("objective") and not any(model is parent for parent, _ in pairs[:1]):
            start = f"{model.facts.get('origin')} {model.facts.get('data_fingerprint')}"
            stages.setdefault(start, []).append(model)
    for members in stages.values():
        mle = max((m for m in members if m.facts["objective"] == "mle"), key=_step, default=None)
        others = [m for m in members if m.facts["objective"] != "mle"]
        if mle is not None and others:
            pairs.append((mle, others))
    return pairs or ([(family.members[0], family.members[1:])] if len(family.members) > 1 else [])


def _descends(model: Model, other: Model, above: dict[str, Model]) -> bool:
    while model.name in above:
        model = above[model.name]
        if model is other:
            return True
    return False


def _match(model: Model, origin: str) -> int:
    """Return how surely a model is the one that `origin` names; 0: it is not."""
    path, run = str(model.description["path"]), model.facts.get("run")
    if path == origin or (Path(path).exists() and Path(path).resolve() == Path(origin).resolve()):
        return 5
    if run and origin in (f"{run}/{name}" for name in _WEIGHTS):
        return 4
    short, long = sorted((Path(path).parts, Path(origin).parts), key=len)
    if len(short) > 1 and long[-len(short) :] == short:
        return 3
    return int(not model.facts.get("objective") and _short(path) == _short(origin))


def _step(model: Model) -> int:
    step = model.facts.get("step")
    return step if isinstance(step, int) else 0


def _short(path: str) -> str:
    """Return models/llama-7b as llama-7b, and runs/a/export as a."""
    parts = [p for p in Path(path).parts if p != "/"]
    while len(parts) > 1 and parts[-1] in _WEIGHTS:
        parts.pop()
    return parts[-1] if parts else path
