"""Recipes: YAML files with strict sections, `extends` and `key=value` overrides.

One recipe configures a whole run: `data_prep` reads its `data` section, and `pipeline` all sections. Each
section is a frozen pydantic model that rejects unknown keys. All errors in a recipe are UserErrors.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import UserError, nearest, one_line, similar
from ..io.untrusted import read_bytes
from ..provenance import REPOSITORY, shipped
from ..text import without_secrets
from .foreign_keys import AMBIGUOUS, KEYS_BY_NAME, UNSUPPORTED_KEYS, UNSUPPORTED_VALUES

EXAMPLES = {"recipe": "launch/recipes", "experiment": "experiments/configs"}  # folders by kind of file
KEYS = ("output_dir", "data", "model", "objective", "train", "deepspeed")  # of a recipe, besides `extends`
# Keys whose values are paths, in which `~/` stands for the home directory.
PATHS = ["output_dir", "deepspeed", "model.path", "model.lora.path", "objective.cost"]
PATHS += ["objective.teacher.model", "data.dir", "data.root", "data.tokenizer", "data.contamination"]
PATHS += ["train.decay_from", "train.copy_to"]
DATA_FILES = (
    ".txt",
    ".jsonl",
    ".ndjson",
    ".jsonlines",
    ".csv",
    ".tsv",
    ".parquet",
    ".gz",
    ".zst",
    ".bz2",
    ".xz",
)
FILE_BYTES = 128 << 10  # largest recipe
WRITTEN_BYTES = 8 << 20  # largest YAML file written by a program, which includes defaults
LARGEST = 2**53  # largest integer that floats represent exactly


class RecipeLoader(yaml.SafeLoader):
    """A YAML loader that rejects duplicate keys and recursive aliases, and reads 2e-5 as a number."""

    def construct_document(self, node: yaml.Node) -> Any:
        """Construct a document depth-first, so that a recursive alias is an error."""
        return self.construct_object(node, deep=True)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping without duplicate keys."""
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [key for key, count in keys.items() if count > 1]:
            raise yaml.MarkedYAMLError(problem=f"key {twice[0]} given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


class RecipeDumper(yaml.SafeDumper):
    """Quotes the texts that RecipeLoader would read as numbers, such as 12e4."""


RecipeDumper.yaml_implicit_resolvers = RecipeLoader.yaml_implicit_resolvers


def dump_recipe(tree: dict[str, Any], **options: Any) -> str:
    """Return YAML from which `RecipeLoader` reads the same values. options: those of yaml.dump."""
    text: str = yaml.dump(tree, Dumper=RecipeDumper, sort_keys=False, **options)
    return text


class Section(BaseModel):
    """A section of a recipe. It is immutable and strict about keys and numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_bool_as_number(cls, tree: Any) -> Any:
        """Reject booleans as numbers, which pydantic would accept."""
        if not isinstance(tree, dict):
            return tree
        checked = dict(tree)
        for key in tree.keys() & cls.model_fields.keys():
            types = set(_parts(cls.model_fields[key].annotation))
            if bool not in types and types & {int, float}:
                checked[key] = _without_bools(tree[key])
        return checked


class _NotANumber:
    """Replaces a boolean in a numeric field, so that pydantic rejects it with the key's path."""

    def __init__(self, value: bool) -> None:
        self.value = value

    def __repr__(self) -> str:
        return str(self.value).lower()


def _without_bools(value: Any) -> Any:
    """Replace booleans, also in a list or mapping, by objects that pydantic rejects."""
    if isinstance(value, dict):
        return {key: _NotANumber(item) if isinstance(item, bool) else item for key, item in value.items()}
    if isinstance(value, list):
        return [_NotANumber(item) if isinstance(item, bool) else item for item in value]
    return _NotANumber(value) if isinstance(value, bool) else value


SectionT = TypeVar("SectionT", bound=Section)


# Mark of fields that may change when a run resumes, because they do not affect what is learned.
FREE = "free"


def mark(name: str, default: Any = ..., **limits: Any) -> Any:
    """Declare a field with a mark that `marked` finds: `keep: int = mark("free", 2, gt=0)`.

    `default` and `limits` are arguments of pydantic's Field.
    """
    return Field(default, json_schema_extra={"mark": name}, **limits)


def mark_of(cls: type[Section], key: str) -> str | None:
    """Return the mark of a section's field, or None."""
    extra = cls.model_fields[key].json_schema_extra
    return str(extra["mark"]) if isinstance(extra, dict) and "mark" in extra else None


def marked(cls: type[Section], name: str) -> set[str]:
    """Return the dotted keys of `cls` that are declared with `mark(name, ...)`.

    A marked section covers all its keys. Sections in lists are not searched.
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


def load_section(cls: type[SectionT], path: Path, overrides: Sequence[str], noun: str = "recipe") -> SectionT:
    """Read a file in the format of recipes as a `cls`."""
    return parse_section(cls, read_recipe(path, overrides, noun), "")


def read_recipe(path: Path, overrides: Sequence[str], noun: str = "recipe") -> dict[str, Any]:
    """Read a YAML recipe and apply `key.sub=value` overrides, whose values are YAML.

    `extends: other.yaml` names a base recipe in the same folder, or one that ships with this code, which is
    merged key by key. A model architecture with a model_type replaces the base's.

    Args:
        path: The recipe, or one that ships with this code.
        overrides: `key.sub=value` texts.
        noun: Kind of file in messages, a key of EXAMPLES.

    Raises:
        UserError: A file is unreadable or has a duplicate key, `extends` forms a circle or leaves its folder
            and this program, or an override is invalid.
    """
    tree = _read_tree(shipped(path), (), noun)
    for override in overrides:
        apply_override(tree, override)
    _expand_home(tree)
    return tree


def _expand_home(tree: dict[str, Any]) -> None:
    """Replace `~/` at the beginning of paths. A shell does so only after some equals signs."""
    for key in PATHS:
        *sections, leaf = key.split(".")
        node: Any = tree
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if isinstance(node, dict) and isinstance(node.get(leaf), str) and node[leaf].startswith("~/"):
            node[leaf] = str(Path(node[leaf]).expanduser())


def _read_tree(path: Path, before: tuple[Path, ...], noun: str) -> dict[str, Any]:
    """Read a recipe with its bases. `before`: the recipes that led here."""
    if path.resolve() in before:
        circle = " -> ".join(p.name for p in (*before[before.index(path.resolve()) :], path))
        raise UserError(f"recipes extend each other in a circle: {circle}", code="recipe-circle")
    if path.suffix.lower() in DATA_FILES:
        hint = f"Run `emo sniff {path}`, which prints the data section of a recipe for it"
        raise UserError(f"{path} is a data file, not a recipe. {hint}", code="data-not-recipe")
    try:
        tree = _load_yaml(read_bytes(path, FILE_BYTES))
    except FileNotFoundError:
        examples = REPOSITORY / EXAMPLES[noun]
        names = {file.stem: file.relative_to(REPOSITORY) for file in examples.rglob("*.yaml")}
        match = similar(path.stem, list(names), 0.8)
        hint = f"did you mean {names[match]}?" if match else f"see {examples} for examples"
        raise UserError(f"{noun} {path} does not exist; {hint}", code="no-recipe") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise UserError(f"{noun} {path} cannot be read: {reason}", code="recipe-unreadable") from None
    if not isinstance(tree, dict):
        raise UserError(f"{noun} {path} must be a mapping of sections", code="recipe-unreadable")
    base = tree.pop("extends", None)
    if base is None:
        return tree
    target = path.parent / str(base)
    try:
        if not target.exists() and (REPOSITORY / str(base)).exists():
            target = REPOSITORY / str(base)
        folders = (path.resolve().parent, REPOSITORY)
        allowed = any(target.resolve().is_relative_to(folder) for folder in folders)
    except (ValueError, OSError):  # an invalid or too long file name
        allowed = False
    if not allowed:
        problem = f"extends must name a file in the same folder or of this program, not {format_value(base)}"
        raise UserError(f"{noun} {path}: {problem}", code="extends")
    return _merge(_read_tree(target, (*before, path.resolve()), noun), tree)


def read_written(path: Path) -> dict[str, Any]:
    """Read a mapping that a program wrote as YAML. Raises OSError or ValueError."""
    tree = _load_yaml(read_bytes(path, WRITTEN_BYTES))
    if not isinstance(tree, dict):
        raise ValueError("it has no keys")
    return tree


def _load_yaml(content: bytes | str) -> Any:
    """Parse YAML. Raises ValueError for every error."""
    try:
        return yaml.load(content if isinstance(content, str) else content.decode("utf-8-sig"), RecipeLoader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, AttributeError, TypeError, LookupError) as error:  # odd values
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ValueError(f"not YAML: {getattr(error, 'problem', None) or one_line(error)}{line}") from None


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge `over` into `base`: sections key by key, other values replaced. `{}` replaces a section."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and value and isinstance(base.get(key), dict)
        both = both and "model_type" not in value
        merged[key] = _merge(base[key], value) if both else value
    return merged


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `key.sub=value` in the tree. Sections on the path are copied, because aliases share them."""
    key, equals, value = override.partition("=")
    *parents, leaf = key.split(".")
    if not equals or not all((*parents, leaf)):
        raise UserError(
            f"override {format_value(override)} must be key.sub=value, for example train.learning_rate=2e-5",
            code="bad-override",
        )
    node = tree
    for parent in parents:
        child = node.get(parent)
        if child is not None and not isinstance(child, dict):
            noun = "a list; set the complete list" if isinstance(child, list) else "a value, not a section"
            raise UserError(f"override {format_value(override)}: {parent} is {noun}", code="bad-override")
        node[parent] = dict(child or {})
        node = node[parent]
    try:
        node[leaf] = _load_yaml(value)
    except ValueError as error:
        message = f"override {format_value(override)}: the value is {one_line(error)}"
        raise UserError(message, code="bad-override") from None


def parse_section(cls: type[SectionT], tree: Any, where: str) -> SectionT:
    """Validate `tree` as a `cls`. Raises UserError for every invalid key, with suggestions."""
    section = check_section(cls, tree, where)
    assert section is not None
    return section


def check_section(
    cls: type[SectionT], tree: Any, where: str, may_lack: Sequence[str] = ()
) -> SectionT | None:
    """Validate `tree` as a `cls`. Raises UserError for every invalid key, with suggestions.

    Args:
        cls: The section.
        tree: The YAML value.
        where: Prefix of the keys in messages.
        may_lack: Required keys that may be missing. The result is None if one of them is.
    """
    section = None
    mistakes: dict[Any, UserError] = {}
    try:
        section = cls.model_validate(tree)
    except ValidationError as error:
        for problem in [*error.errors(), *_find_hidden_errors(cls, tree, error)]:
            absent = problem["type"] == "missing" and problem["loc"] in [(key,) for key in may_lack]
            if absent or problem["type"] == "default_factory_not_called":  # a follow-up error
                continue
            # Pydantic reports one error for each type of a union; keep the first.
            is_unknown = problem["type"] == "extra_forbidden"
            path = problem["loc"] if is_unknown else _located(cls, problem["loc"])[1]
            mistakes.setdefault((path, repr(problem["input"])), _convert_error(cls, problem, where))
    for key, value in _leaves(tree if section is None else section.model_dump(), where):
        if isinstance(value, int) and abs(value) > LARGEST:
            mistakes[key, ""] = UserError(f"{key}: {format_value(value)} is far too large", code="bad-value")
        if isinstance(value, str | Path) and without_secrets(str(value)) != str(value):
            mistakes[key, ""] = UserError(
                f"{key} contains a password or token, which would appear in config.yaml, logs and reports. "
                "Remove it, and set it where its library looks for it (HF_TOKEN, AWS_PROFILE, ~/.netrc)",
                code="secret",
            )
    if mistakes:
        raise UserError.of(list(mistakes.values()))
    return section


def _find_hidden_errors(cls: type[Section], tree: Any, error: ValidationError) -> list[Any]:
    """Return the errors between fields that pydantic did not check because single fields are invalid.

    The invalid fields are removed first, and errors that mention them are left out.
    """
    rest = copy.deepcopy(tree)
    wrong: set[str] = set()
    for problem in error.errors():
        path = problem["loc"] if problem["type"] == "extra_forbidden" else _located(cls, problem["loc"])[1]
        *above, key = [*takewhile(lambda part: isinstance(part, str), path)] or [""]
        node = rest
        for part in above:
            node = node.get(part) if isinstance(node, dict) else None
        if problem["type"] not in ("missing", "value_error") and isinstance(node, dict):
            wrong.add(str(key))
            node.pop(key, None)
    try:
        cls.model_validate(rest)
    except ValidationError as more:
        return [
            problem
            for problem in more.errors()
            if problem["type"] == "value_error" and not wrong & {*re.findall(r"\w+", problem["msg"])}
        ]
    return []


def _located(cls: type[Section], location: Sequence[int | str]) -> tuple[type[Section], Sequence[int | str]]:
    """Return the innermost section on a path, and the path up to its last known part."""
    current = cls
    known = 0
    for number, part in enumerate(location, 1):
        field = current.model_fields.get(part) if isinstance(part, str) else None
        if field is not None or isinstance(part, int):
            known = number
        current = (_section(field.annotation) if field is not None else None) or current
    return current, location[:known]


def _convert_error(cls: type[Section], problem: Mapping[str, Any], where: str) -> UserError:
    """Convert an error of pydantic."""
    path = ".".join(str(part) for part in (where, *problem["loc"]) if part != "")
    value = problem["input"]
    message = problem["msg"].removeprefix("Value error, ")
    in_recipe = path.split(".")[0] in KEYS or set(KEYS) <= cls.model_fields.keys()
    if problem["type"] == "extra_forbidden":
        *parents, key = problem["loc"]
        names = _located(cls, parents)[0].model_fields
        hint = suggest_key(cls, problem["loc"]) if in_recipe else None
        hint = hint or nearest(str(key), names, KEYS_BY_NAME if in_recipe else {})
        return UserError(f"unknown key {path}; {hint}", code="unknown-key")
    if problem["type"] == "list_type" and isinstance(value, str | int | float):
        message = f"must be a list, for example [{value}]"
    if problem["type"] == "model_type":
        message = "must be a section of key: value lines"
    detail = "" if isinstance(value, dict) else f" (given: {format_value(value)})"
    if problem["type"] == "literal_error" and in_recipe:
        detail += "".join(
            f"; {hint}" for word, hint in UNSUPPORTED_VALUES.items() if word in str(value).lower()
        )
    return UserError(f"{path or cls.__name__}: {message}{detail}", code="bad-value")


def suggest_key(cls: type[Section], location: Sequence[int | str]) -> str | None:
    """Return a hint for an unknown key of a recipe, or None.

    A similar key of the same section comes first, then a key of another section, then foreign names.
    """
    words = [str(part).lower() for part in location if isinstance(part, str)]
    key = words[-1]
    if hint := UNSUPPORTED_KEYS.get(key) or UNSUPPORTED_KEYS.get(".".join(words[-2:])):
        return hint
    neighbour = similar(key, _located(cls, location[:-1])[0].model_fields, 0.85)
    others = _keys_named(cls, key) if key not in AMBIGUOUS else []
    suggestion = neighbour or " or ".join(others) or KEYS_BY_NAME.get(key)
    return f"did you mean {suggestion}?" if suggestion else None


def find_keys(cls: type[Section], name: str) -> tuple[list[str], str | None]:
    """Return the keys of a recipe that an option `--name` stands for, here or in other trainers, and a hint.

    The hint says what to do instead if there is no such key.
    """
    path = name.split(".")
    if path[-1] in _located(cls, path[:-1])[0].model_fields and _located(cls, path)[1] == path:
        return [name], None
    key = path[-1].lower()
    if hint := UNSUPPORTED_KEYS.get(key):
        return [], hint
    known = KEYS_BY_NAME.get(key)
    return _keys_named(cls, key) or ([known] if known else []), None


def _keys_named(cls: type[Section], key: str) -> list[str]:
    """Return the keys in the sections of `cls` whose last part is `key`, with those of `train` first."""
    sections = {name: _section(field.annotation) for name, field in cls.model_fields.items()}
    keys = [f"{name}.{key}" for name, section in sections.items() if section and key in section.model_fields]
    return sorted(keys, key=lambda other: not other.startswith("train."))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a tree with its dotted key."""
    if not isinstance(value, dict | list | tuple):
        yield path, value
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(inner, f"{path}.{key}" if path else str(key))


def format_value(value: Any) -> str:
    """Format a value for a message, shortened."""
    return one_line(repr(value), 80)


def _section(annotation: Any) -> type[Section] | None:
    """Return the section class in a field's type, or None."""
    sections = (part for part in _parts(annotation) if isinstance(part, type) and issubclass(part, Section))
    return next(sections, None)


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield a type and its type arguments, recursively."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)
