"""Recipes: YAML files of strict sections, completed by `extends` and `key=value` overrides.

A recipe is one file for the whole run: `data_prep` reads its `data` section, `pipeline` all of it. Every
section is a frozen pydantic model that refuses unknown keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import UserError, nearest


class Section(BaseModel):
    """A part of a recipe: immutable, and strict about its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


SectionT = TypeVar("SectionT", bound=Section)


def read_recipe(path: Path, overrides: list[str]) -> dict[str, Any]:
    """Read a YAML recipe and apply `key.sub=value` overrides (values are YAML too).

    A recipe may begin from another one: `extends: other.yaml`, a file beside it, whose sections it completes
    and overrides key by key; a model architecture that names its model_type replaces the other's whole.

    Raises UserError when a file is missing or not a mapping, or an override has no `=`.
    """
    tree = _read_tree(path)
    for override in overrides:
        _override(tree, override)
    return tree


def _read_tree(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"recipe {path} does not exist; see launch/recipes/ for those that come along")
    try:
        tree = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"recipe {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"recipe {path} must be a mapping of sections")
    base = tree.pop("extends", None)
    return tree if base is None else _merge(_read_tree(path.parent / str(base)), tree)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`: sections key by key, everything else whole."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict) and "model_type" not in value
        merged[key] = _merge(base[key], value) if both else value
    return merged


def _override(tree: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r} must read key.sub=value, for example train.lr=2e-5")
    node = tree
    *parents, leaf = key.split(".")
    for parent in parents:
        child = node.get(parent)
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise UserError(f"override {override!r}: {parent} is a value, not a section")
        node = child
    node[leaf] = _scalar(value)


def _scalar(text: str) -> Any:
    """Parse an override's value as YAML, and as a float where YAML 1.1 would not (2e-5)."""
    value = yaml.safe_load(text)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def parse_section(cls: type[SectionT], tree: Any, where: str) -> SectionT:
    """Validate `tree` as `cls`. Raises UserError naming the first bad key and the nearest known one."""
    try:
        return cls.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in (where, *first["loc"]) if part != "")
        if first["type"] == "extra_forbidden":
            known = _known_keys(cls, first["loc"][:-1])
            raise UserError(f"unknown key {path}; {nearest(str(first['loc'][-1]), known)}") from None
        message = first["msg"].removeprefix("Value error, ")
        given = "" if isinstance(first["input"], dict) else f" (given: {first['input']!r})"
        raise UserError(f"{path or cls.__name__}: {message}{given}") from None


def _known_keys(cls: type[Section], loc: tuple[int | str, ...]) -> list[str]:
    """The keys of the section that stands at `loc` below `cls`."""
    current: type[Section] = cls
    for part in loc:
        if isinstance(part, int):
            continue
        annotation = current.model_fields[part].annotation if part in current.model_fields else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        nested = [c for c in candidates if isinstance(c, type) and issubclass(c, Section)]
        if nested:
            current = nested[0]
    return list(current.model_fields)
