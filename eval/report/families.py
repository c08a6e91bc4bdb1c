"""Families of models: which model was trained from which, and what each is compared with by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..results.directory import Model, natural_key

NEW = "new"  # the origin that exports record for a model trained from scratch
OBJECTIVES = {"mle": "MLE", "tailr": "TaiLr", "mixce": "MixCE", "emo": "EMO"}  # the paper's, in its order
WEIGHTS = ("export", "hf")  # names of weight directories, which do not identify a model


class Family(NamedTuple):
    """Models that were trained from the same base, in one or several stages."""

    title: str  # of the base, or "" if it is unknown
    base: Model | None  # None: it was not evaluated
    members: list[Model]  # the base is the first


def find_ancestors(models: Sequence[Model]) -> dict[str, list[Model]]:
    """Return the evaluated models that each model was trained from, by name, the nearest first.

    The best match counts: the same path, the run that exported the origin, a path with the same end (results
    and runs are moved), the last checkpoint of that run, and the same name for a model that was trained
    elsewhere.
    """
    parents: dict[str, Model] = {}

    def chain(model: Model) -> list[Model]:
        return [parents[model.name], *chain(parents[model.name])] if model.name in parents else []

    for model in (m for m in models if _origin(m)):
        origin = Path(_origin(model))
        ranked = list[tuple[int, int, str, Model]]()
        for other in (m for m in models if model not in (m, *chain(m))):
            matches = _origin_matches(other, origin)
            if any(matches):
                ranked.append((-matches.index(True), _step(other), other.name, other))
        if ranked:
            parents[model.name] = max(ranked)[-1]
    return {model.name: chain(model) for model in models}


def _origin_matches(model: Model, origin: Path) -> list[bool]:
    """Return the criteria by which a model is the origin, best first."""
    path = Path(model.description["path"])
    run = model.facts.get("run")
    short, long = sorted((path.parts, origin.parts), key=len)
    return [
        path == origin or (path.exists() and path.resolve() == origin.resolve()),
        bool(run) and str(origin) in (f"{run}/{name}" for name in WEIGHTS),
        len(short) > 1 and long[-len(short) :] == short,
        not model.facts.get("objective") and _short_name(str(path)) == _short_name(str(origin)),
    ]


def group_families(
    models: Sequence[Model], ancestors: Mapping[str, list[Model]], first: Sequence[str], baseline: str | None
) -> list[Family]:
    """Return all models by base.

    Args:
        models: All models.
        ancestors: From `find_ancestors`.
        first: Names of models that precede others of their family.
        baseline: Name of a model that comes first, with its family.
    """

    def sort_key(model: Model) -> tuple[Any, ...]:
        objective = str(model.facts.get("objective") or "")
        rank = [*OBJECTIVES, objective].index(objective)
        order = first.index(model.name) if model.name in first else len(first)
        stage = (bool(ancestors[model.name]), order, bool(objective), rank, _step(model))
        return (model.name != baseline, *stage, natural_key(model.name))

    bases = {chain[-1].name: chain[-1] for chain in ancestors.values() if chain}
    grouped: dict[tuple[bool, str], list[Model]] = {}  # by whether the base was evaluated, and its name
    for model in sorted(models, key=sort_key):
        root = [model, *ancestors[model.name]][-1]
        is_base = root.name in bases
        grouped.setdefault((is_base, root.name if is_base else _origin(root)), []).append(model)
    families = []
    for (is_base, name), members in grouped.items():
        base = bases[name] if is_base else None
        members.sort(key=lambda m: (m.name != baseline, m is not base))
        families.append(Family(name if is_base else _short_name(name), base, members))
    return families


def choose_baselines(
    members: Sequence[Model], ancestors: Mapping[str, list[Model]]
) -> list[tuple[Model, list[Model]]]:
    """Return the default baselines in a family, each with the models that are compared with it.

    The baselines are the models that others were trained from, and MLE on the same data from the same origin.
    If there are none, the first model is the baseline.
    """
    below = [(model, [m for m in members if model in ancestors[m.name]]) for model in members]
    pairs = [(model, others) for model, others in below if others]
    stages: dict[tuple[Any, Any], list[Model]] = {}
    for model in (m for m in members if m.facts.get("objective")):
        start = model.facts.get("origin"), model.facts.get("data_fingerprint")
        stages.setdefault(start, []).append(model)
    for stage in stages.values():
        mle = max((m for m in stage if m.facts["objective"] == "mle"), key=_step, default=None)
        others = [m for m in stage if m.facts["objective"] != "mle"]
        if mle is not None and others:
            pairs.append((mle, others))
    return pairs or ([(members[0], list(members[1:]))] if len(members) > 1 else [])


def _step(model: Model) -> int:
    return int(model.facts.get("step") or 0)


def _origin(model: Model) -> str:
    """Return the path of the weights that training started from, or ""."""
    origin = str(model.facts.get("origin") or NEW)
    return "" if origin == NEW else origin


def _short_name(path: str) -> str:
    """Return models/llama-7b as llama-7b, and runs/a/export as a."""
    return next((name for name in reversed(Path(path).parts) if name not in WEIGHTS), path)
