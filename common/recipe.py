"""Recipes: YAML files of strict sections, completed by `extends` and `key=value` overrides.

A recipe is one file for a whole run: `data_prep` reads its `data` section, `pipeline` all of it. Every
section is a frozen pydantic model that refuses unknown keys. What cannot be read is a UserError.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from emo.common.errors import UserError, nearest, one_line, similar
from emo.common.provenance import REPOSITORY, shipped
from emo.common.text import without_secrets
from emo.common.untrusted import read_bytes

EXAMPLES = {"recipe": "launch/recipes", "experiment": "experiments"}  # by kind of file: where ours are
KEYS = ("output_dir", "data", "model", "objective", "train", "deepspeed")  # of a recipe, besides `extends`
FILE_BYTES = 128 << 10  # of a recipe at most: what is larger is data
WRITTEN_BYTES = 8 << 20  # of a program's own YAML, whose defaults are written out
LARGEST = 2**53  # integers beyond it are mistakes: floats can no longer count there
# Settings of a recipe, and their names in other trainers.
_NAMES_ELSEWHERE = {
    "output_dir": "run_dir",
    "data.sequence_len": "max_seq_length max_length block_size seq_len cutoff_len model_max_length block",
    "data.sources": "train_file data_path",
    "data.validation_fraction": "val_fraction",
    "model.path": "model_name_or_path pretrained",
    "model.dtype": "bf16 fp16 precision torch_dtype",
    "model.activation_checkpointing": "gradient_checkpointing",
    "objective.name": "loss_type",
    "train.learning_rate": "lr",
    "train.global_batch_size": "batch_size train_batch_size batch",
    "train.micro_batch_size": "per_device_train_batch_size per_device_eval_batch_size micro_batch "
    "gradient_accumulation_steps",
    "train.num_train_epochs": "epochs num_epochs",
    "train.max_steps": "steps max_iters",
    "train.max_grad_norm": "gradient_clipping gradient_clip_val clip_grad grad_clip clip",
    "train.warmup_ratio": "warmup_steps",
    "train.lr_scheduler_type": "lr_scheduler schedule",
    "train.optimizer": "optim",
    "train.eps": "adam_epsilon",
    "train.betas": "adam_beta1 adam_beta2",
    "train.logging_steps": "log_every log_interval",
    "train.eval_steps": "eval_every eval_interval",
    "train.save_steps": "save_every save_interval",
    "train.save_total_limit": "keep_last",
    "train.report_to": "tensorboard wandb",
    "train.project": "wandb_project",
}
# Also the last word of a key, for one in the wrong section; `name` and `path` could be of anything.
OTHER_NAMES = {
    name: key
    for key, names in _NAMES_ELSEWHERE.items()
    for name in ({key.rpartition(".")[2]} - {"name", "path"}) | set(names.split())
}


class Loader(yaml.SafeLoader):
    """YAML in which keys are given once, no alias contains itself, and 2e-5 is a number."""

    def construct_document(self, node: yaml.Node) -> Any:
        """Return the value of a document, at once: an alias that contains itself is then an error."""
        return self.construct_object(node, deep=True)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping, whose keys differ."""
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [key for key, count in keys.items() if count > 1]:
            raise yaml.MarkedYAMLError(problem=f"key {twice[0]} given twice", problem_mark=node.start_mark)
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
            types = set(_parts(field.annotation))
            if bool not in types and types & {int, float}:
                value = tree.get(key)
                inner = (
                    value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
                )
                if any(isinstance(item, bool) for item in (value, *inner)):
                    raise ValueError(f"{key} must hold numbers, not true or false")
        return tree


SectionT = TypeVar("SectionT", bound=Section)


def mark(name: str, default: Any = ..., **limits: Any) -> Any:
    """Return a field with a mark, for `marked` to find: `keep: int = mark("free", 2, gt=0)`.

    default and limits are those of pydantic's Field; without a default the field is required.
    """
    return Field(default, json_schema_extra={"mark": name}, **limits)


def mark_of(cls: type[Section], key: str) -> str | None:
    """Return the mark of a section's field, None where it has none."""
    extra = cls.model_fields[key].json_schema_extra
    return str(extra["mark"]) if isinstance(extra, dict) and "mark" in extra else None


def marked(cls: type[Section], name: str) -> set[str]:
    """Return the keys below `cls` that are declared with `mark(name, ...)`, as in `train.logging_steps`.

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


def load_section(cls: type[SectionT], path: Path, overrides: Sequence[str], noun: str = "recipe") -> SectionT:
    """Return a YAML file with overrides as `cls`; for files that are written like recipes."""
    return parse_section(cls, read_recipe(path, overrides, tuple(cls.model_fields), noun), "")


def read_recipe(
    path: Path, overrides: Sequence[str], keys: Sequence[str] = KEYS, noun: str = "recipe"
) -> dict[str, Any]:
    """Return the tree of a YAML recipe with `key.sub=value` overrides, whose values are YAML too.

    A recipe may begin from another one: `extends: other.yaml`, a file beside it, whose sections it completes
    and overrides key by key; a model architecture that names its model_type replaces the other's whole.
    keys: of its sections. noun: the name of this kind of file in messages, one of EXAMPLES.

    Raises UserError when a file cannot be read or understood, a key is given twice, a top-level key is
    unknown, recipes extend each other in a circle or one outside their folder and this program, or an
    override has no `=`.
    """
    tree = _read_tree(shipped(path), (), noun)
    for override in overrides:
        apply_override(tree, override)
    for key in tree:
        if key not in keys:
            hint = nearest(str(key), keys, OTHER_NAMES if keys is KEYS else {})
            raise UserError(f"{noun} {path}: unknown key {key}; {hint}", code="unknown-key")
    return tree


def _read_tree(path: Path, before: tuple[Path, ...], noun: str) -> dict[str, Any]:
    """Return the tree of a recipe laid on those that it extends; `before`: the recipes that led here."""
    if path.resolve() in before:
        circle = " -> ".join(p.name for p in (*before[before.index(path.resolve()) :], path))
        raise UserError(f"recipes extend each other in a circle: {circle}", code="recipe-circle")
    try:
        tree = _load_yaml(read_bytes(path, FILE_BYTES))
    except FileNotFoundError:
        examples = REPOSITORY / EXAMPLES[noun]
        match = similar(path.stem, [file.stem for file in examples.glob("*.yaml")], 0.8)
        hint = f"did you mean {EXAMPLES[noun]}/{match}.yaml?" if match else f"see {examples} for examples"
        raise UserError(f"{noun} {path} does not exist; {hint}", code="no-recipe") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise UserError(f"{noun} {path} cannot be read: {reason}", code="recipe-unreadable") from None
    if not isinstance(tree, dict):
        raise UserError(f"{noun} {path} must be a mapping of sections", code="recipe-unreadable")
    base = tree.pop("extends", None)
    if base is None:
        return tree
    try:
        beside = (path.parent / str(base)).resolve()
        allowed = any(beside.is_relative_to(folder) for folder in (path.resolve().parent, REPOSITORY))
    except ValueError:  # no file can have such a name
        allowed = False
    if not allowed:
        problem = f"extends must name a file in its folder or of this program, not {shown(base)}"
        raise UserError(f"{noun} {path}: {problem}", code="extends")
    return _merge(_read_tree(path.parent / str(base), (*before, path.resolve()), noun), tree)


def read_written(path: Path) -> Any:
    """Return the YAML value that a program wrote into a file. Raises OSError or ValueError."""
    return _load_yaml(read_bytes(path, WRITTEN_BYTES))


def _load_yaml(content: bytes | str) -> Any:
    """Return a YAML value. Raises ValueError, whatever is wrong with the text."""
    try:
        return yaml.load(content if isinstance(content, str) else content.decode("utf-8-sig"), Loader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (
        yaml.YAMLError,
        ValueError,
        AttributeError,
        TypeError,
    ) as error:  # constructors fail on odd values
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ValueError(f"not YAML: {getattr(error, 'problem', None) or one_line(error)}{line}") from None


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `over` laid on `base`: sections key by key, everything else whole."""
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
        raise UserError(
            f"override {shown(override)} must read key.sub=value, for example train.learning_rate=2e-5",
            code="bad-override",
        )
    node = tree
    for parent in parents:
        child = node.get(parent)
        if child is not None and not isinstance(child, dict):
            noun = "a list; give it whole" if isinstance(child, list) else "a value, not a section"
            raise UserError(f"override {shown(override)}: {parent} is {noun}", code="bad-override")
        node[parent] = dict(child or {})
        node = node[parent]
    try:
        node[leaf] = _load_yaml(value)
    except ValueError as error:
        message = f"override {shown(override)}: the value is {one_line(error)}"
        raise UserError(message, code="bad-override") from None


def parse_section(cls: type[SectionT], tree: Any, where: str) -> SectionT:
    """Return `tree` as `cls`. Raises UserError naming the first bad key and the nearest known one."""
    try:
        section = cls.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        *above, key = first["loc"] or ("",)
        path = ".".join(str(part) for part in (where, *first["loc"]) if part != "")
        if first["type"] == "extra_forbidden":
            current: type[Section] = cls  # the section that has the key
            for part in above:
                field = current.model_fields.get(part) if isinstance(part, str) else None
                current = (_section(field.annotation) if field is not None else None) or current
            hint = nearest(str(key), current.model_fields, OTHER_NAMES if path.split(".")[0] in KEYS else {})
            raise UserError(f"unknown key {path}; {hint}", code="unknown-key") from None
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "model_type":
            message = "must be a section of key: value lines"
        detail = "" if isinstance(first["input"], dict) else f" (given: {shown(first['input'])})"
        raise UserError(f"{path or cls.__name__}: {message}{detail}", code="bad-value") from None
    for path, value in _leaves(section.model_dump(), where):
        if isinstance(value, int) and abs(value) > LARGEST:
            raise UserError(f"{path}: {shown(value)} is far too large", code="bad-value")
        if isinstance(value, str | Path) and without_secrets(str(value)) != str(value):
            raise UserError(
                f"{path} holds a password or token, and would be copied to config.yaml, logs and reports; "
                "leave it out, and give it where its library looks for it (HF_TOKEN, AWS_PROFILE, ~/.netrc)",
                code="secret",
            )
    return section


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every value of a tree with its key."""
    if not isinstance(value, dict | list | tuple):
        yield path, value
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(inner, f"{path}.{key}" if path else str(key))


def shown(value: Any) -> str:
    """Return a value for a message, cut short."""
    return one_line(repr(value), 80)


def _section(annotation: Any) -> type[Section] | None:
    """Return the section that a field holds, alone, optional or in a list."""
    sections = (part for part in _parts(annotation) if isinstance(part, type) and issubclass(part, Section))
    return next(sections, None)


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield a type and those that it is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)
