"""Recipes: YAML files of strict sections, completed by `extends` and `key=value` overrides.

A recipe is one file for a whole run: `data_prep` reads its `data` section, `pipeline` all of it. Every
section is a frozen pydantic model that refuses unknown keys. What cannot be read is a UserError.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from common.errors import OTHER_NAMES, UserError, nearest, one_line
from common.provenance import REPOSITORY, shipped
from common.text import without_secrets
from common.untrusted import read_bytes

EXAMPLES = {"recipe": "launch/recipes", "experiment": "experiments"}  # what a file is: where ours are
KEYS = ("run_dir", "data", "model", "objective", "train", "deepspeed")  # of a recipe, besides `extends`
FILE_BYTES = 128 << 10  # of a recipe at most: what is larger is data
WRITTEN = 64  # a program's own YAML, whose defaults are written out, may be so many times as large
ALIASES = 50  # in a file at most
LARGEST = 2**53  # integers beyond it are mistakes: floats can no longer count there
_MARK = "mark"  # where a field keeps its mark


class Loader(yaml.SafeLoader):
    """YAML in which keys are given once, no alias contains itself, and 2e-5 is a number."""

    aliases = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node. Raises MarkedYAMLError for too many aliases, which may stand for any size."""
        if self.check_event(yaml.AliasEvent):
            self.aliases += 1
            if self.aliases > ALIASES:
                mark = self.peek_event().start_mark
                raise yaml.MarkedYAMLError(problem=f"more than {ALIASES} aliases", problem_mark=mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node

    def construct_document(self, node: yaml.Node) -> Any:
        """Return the value of a document. Raises MarkedYAMLError for an alias that contains itself."""
        return self.construct_object(node, deep=True)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping. Raises MarkedYAMLError when a key is given twice in it."""
        keys: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in keys:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key.value} given twice", problem_mark=key.start_mark
                )
            keys.add(key.value)
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


class Section(BaseModel):
    """A part of a recipe: immutable, and strict about its keys and numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_bool_as_number(cls, tree: Any) -> Any:
        """Python takes `true` for 1; a recipe does not."""
        for key, field in cls.model_fields.items() if isinstance(tree, dict) else ():
            types = list(_parts(field.annotation))
            if bool in types or not (int in types or float in types):
                continue
            value = tree.get(key)
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            boolean = next((item for item in (value, *inner) if isinstance(item, bool)), None)
            if boolean is not None:
                raise ValueError(f"{key} must hold numbers, not {str(boolean).lower()}")
        return tree


SectionT = TypeVar("SectionT", bound=Section)


def mark(name: str, default: Any = ..., **limits: Any) -> Any:
    """A field that says something about itself, for `marked` to find: `keep: int = mark("free", 2, gt=0)`.

    default and limits are those of pydantic's Field; without a default the field is required.
    """
    return Field(default, json_schema_extra={_MARK: name}, **limits)


def mark_of(cls: type[Section], key: str) -> str | None:
    """Return the mark of a section's field, None where it has none."""
    extra = cls.model_fields[key].json_schema_extra
    return str(extra[_MARK]) if isinstance(extra, dict) and _MARK in extra else None


def marked(cls: type[Section], name: str) -> set[str]:
    """Keys below `cls` that are declared with `mark(name, ...)`, as in `train.log_every`.

    A marked section covers all that it holds. Sections in lists are not searched.
    """
    keys: set[str] = set()
    for key, field in cls.model_fields.items():
        listed = any(get_origin(part) is list for part in _parts(field.annotation))
        section = None if listed else _section(field.annotation)
        if mark_of(cls, key) == name:
            keys.add(key)
        elif section is not None:
            keys |= {f"{key}.{inner}" for inner in marked(section, name)}
    return keys


def load_section(
    cls: type[SectionT],
    path: Path,
    overrides: Sequence[str],
    noun: str = "recipe",
    readers: Mapping[str, str] = MappingProxyType({}),
) -> SectionT:
    """A YAML file with overrides as `cls`: for files that are not recipes but are written like them.

    readers: by a key of other kinds of such files, the command that reads them. `noun` is one of EXAMPLES.
    """
    keys = tuple(cls.model_fields)
    others = {key: command for key, command in readers.items() if key not in keys}
    return parse_section(cls, read_recipe(path, overrides, keys, noun, others), "")


def read_recipe(
    path: Path,
    overrides: Sequence[str],
    keys: Sequence[str] = KEYS,
    noun: str = "recipe",
    others: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Read a YAML recipe and apply `key.sub=value` overrides (values are YAML too); `keys`: its sections.

    noun: what messages call the file, one of EXAMPLES. others: by a key of other files, who reads them.

    A recipe may begin from another one: `extends: other.yaml`, a file beside it, whose sections it completes
    and overrides key by key; a model architecture that names its model_type replaces the other's whole.

    Raises UserError when a file cannot be read or understood, a key is given twice, a top-level key is
    unknown, recipes extend each other in a circle or one outside their folder and this program, or an
    override has no `=`.
    """
    tree = _read_tree(shipped(path), (), noun)
    for override in overrides:
        apply_override(tree, override)
    for reader in (others[key] for key in tree if key in others):
        raise UserError(f"{noun} {path} is not for this command; give it to {reader}")
    for key in tree:
        if key not in keys:
            hint = nearest(str(key), keys, OTHER_NAMES if keys is KEYS else {})
            raise UserError(f"{noun} {path}: unknown key {key}; {hint}")
    return tree


def _read_tree(path: Path, before: tuple[Path, ...], noun: str) -> dict[str, Any]:
    """The tree of a recipe laid on those that it extends; `before`: the recipes that led here."""
    if path.resolve() in before:
        circle = " -> ".join(p.name for p in (*before[before.index(path.resolve()) :], path))
        raise UserError(f"recipes extend each other in a circle: {circle}")
    try:
        tree = _load_yaml(_text(path, noun))
    except ValueError as error:
        raise UserError(f"{noun} {path} cannot be read: {one_line(error)}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{noun} {path} must be a mapping of sections")
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise UserError(f"{noun} {path}: extends must be the name of one file, not {shown(base)}")
    within = (path.resolve().parent, REPOSITORY)
    if not any((path.parent / base).resolve().is_relative_to(folder) for folder in within):
        raise UserError(
            f"{noun} {path} extends {base}, which is neither in its folder nor part of this program; copy "
            "it there"
        )
    return _merge(_read_tree(path.parent / base, (*before, path.resolve()), noun), tree)


def _text(path: Path, noun: str) -> str:
    """A recipe's text. Raises UserError when it is not there, ValueError when it is not text."""
    try:
        if not path.exists():
            raise UserError(f"{noun} {path} does not exist; {_file_meant(path, EXAMPLES[noun])}")
        if not path.is_file():
            raise UserError(f"{noun} {path} is not a file")
        return _decoded(read_bytes(path, FILE_BYTES))
    except OSError as error:
        raise UserError(f"{noun} {path} cannot be read: {error.strerror}") from None


def _file_meant(path: Path, folder: str) -> str:
    """The file of `folder`, which comes with this program, that was probably meant; or where to look."""
    names = [file.stem for file in (REPOSITORY / folder).glob("*.yaml")]
    near = difflib.get_close_matches(path.name.removesuffix(".yaml")[:200], names, n=1, cutoff=0.8)
    return f"did you mean {folder}/{near[0]}.yaml?" if near else f"see {REPOSITORY / folder} for examples"


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8 text") from None


def read_written(path: Path) -> Any:
    """Return the YAML value that a program wrote into a file. Raises OSError or ValueError."""
    return _load_yaml(_decoded(read_bytes(path, WRITTEN * FILE_BYTES)))


def _load_yaml(text: str) -> Any:
    """Return a YAML value. Raises ValueError, whatever is wrong with the text."""
    try:
        return yaml.load(text, Loader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ValueError(f"not YAML: {error.problem}{line}") from None
    except (yaml.YAMLError, AttributeError, TypeError) as error:  # some constructors fail on odd values
        raise ValueError(f"not YAML: {one_line(error)}") from None


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`: sections key by key, everything else whole."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict) and "model_type" not in value
        merged[key] = _merge(base[key], value) if both else value
    return merged


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `key.sub=value` in the tree; sections on the way are copied, as an alias may share them."""
    key, equals, value = override.partition("=")
    *parents, leaf = key.split(".")
    if not equals or not all((*parents, leaf)):
        raise UserError(f"override {shown(override)} must read key.sub=value, for example train.lr=2e-5")
    node = tree
    for parent in parents:
        child = node.get(parent)
        if child is not None and not isinstance(child, dict):
            noun = "a list; give it whole" if isinstance(child, list) else "a value, not a section"
            raise UserError(f"override {shown(override)}: {parent} is {noun}")
        node[parent] = dict(child or {})
        node = node[parent]
    try:
        node[leaf] = _load_yaml(value)
    except ValueError as error:
        raise UserError(f"override {shown(override)}: the value is {one_line(error)}") from None


def parse_section(cls: type[SectionT], tree: Any, where: str) -> SectionT:
    """Validate `tree` as `cls`. Raises UserError naming the first bad key and the nearest known one."""
    try:
        section = cls.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in (where, *first["loc"]) if part != "")
        if first["type"] == "extra_forbidden":
            keys = _known_keys(cls, first["loc"][:-1])
            elsewhere = OTHER_NAMES if path.split(".")[0] in KEYS else {}
            hint = nearest(str(first["loc"][-1]), keys, elsewhere)
            raise UserError(f"unknown key {path}; {hint}") from None
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "model_type":
            message = "must be a section of key: value lines"
        detail = "" if isinstance(first["input"], dict) else f" (given: {shown(first['input'])})"
        raise UserError(f"{path or cls.__name__}: {message}{detail}") from None
    for path, value in _leaves(section, where):
        if isinstance(value, int) and abs(value) > LARGEST:
            raise UserError(f"{path}: {shown(value)} is far too large")
        if isinstance(value, str | Path) and without_secrets(str(value)) != str(value):
            raise UserError(
                f"{path} holds a password or token, and would be copied to config.yaml, logs and reports; "
                "leave it out, and give it where its library looks for it (HF_TOKEN, AWS_PROFILE, ~/.netrc)"
            )
    return section


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every value below `value` and its key."""
    items: Any = ()
    if isinstance(value, Section):
        items = ((key, getattr(value, key)) for key in type(value).model_fields)
    elif isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        yield path, value
    for key, inner in items:
        yield from _leaves(inner, f"{path}.{key}" if path else str(key))


def shown(value: Any) -> str:
    """A value for a message, cut short; Python refuses to print very long numbers."""
    try:
        return one_line(repr(value), 80)
    except ValueError:
        return "a very long number"


def _known_keys(cls: type[Section], loc: tuple[int | str, ...]) -> list[str]:
    """The keys of the section at `loc` below `cls`."""
    current = cls
    for part in loc:
        field = current.model_fields.get(part) if isinstance(part, str) else None
        current = (_section(field.annotation) if field is not None else None) or current
    return list(current.model_fields)


def _section(annotation: Any) -> type[Section] | None:
    """The section that a field holds, alone, optional or in a list."""
    sections = (part for part in _parts(annotation) if isinstance(part, type) and issubclass(part, Section))
    return next(sections, None)


def _parts(annotation: Any) -> Iterator[Any]:
    """A type and those that it is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)
