"""The `data` section of a recipe, and how any recipe is read.

A recipe is one YAML file that both rooms read: `data_prep` its `data` section, `pipeline` the whole of it.
Every section is a frozen pydantic model that refuses unknown keys.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class UserError(Exception):
    """A mistake in what the user gave. Its text is one line: what is wrong, where, what to set."""


class Section(BaseModel):
    """A part of a recipe: immutable, and strict about its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


SectionT = TypeVar("SectionT", bound=Section)


class Source(Section):
    """Where rows come from. Exactly one of `hub`, `files` and `embedded`."""

    hub: str | None = None  # hub id, "owner/name"
    config: str | None = None  # the hub data set's configuration
    revision: str | None = None  # commit of the hub data set
    split: str = "train"  # split of the hub data set, slices allowed
    files: str | None = None  # path or glob under data.root: txt, jsonl, json, parquet, each also .zst / .gz
    embedded: Literal["world", "world-instruct"] | None = None  # a corpus that data_prep generates itself
    seed: int = 0  # embedded only: which corpus
    # How rows are found. Text files: `document` (the file is one), `lines`, `paragraphs` (by blank lines),
    # `wikitext` (level-1 headings start one). JSON and tables: `text`, `alpaca`, `messages`.
    # `auto`: wikitext or lines for text files, the form that a row's columns show for the others.
    format: Literal["auto", "document", "lines", "paragraphs", "wikitext", "text", "alpaca", "messages"] = (
        "auto"
    )
    column: str | None = None  # column of the text; unset: text, content, sentence, document or story
    clean: Literal["none", "writingprompts", "ag_news"] = "none"  # undo a data set's own escapes
    weight: float = Field(1.0, gt=0)  # 0.3: that share of the rows, by content hash; 2.5: each 2 or 3 times
    limit: int | None = Field(None, gt=0)  # rows of this source that are read at most

    @model_validator(mode="after")
    def _one_origin(self) -> Source:
        if sum(origin is not None for origin in (self.hub, self.files, self.embedded)) != 1:
            raise ValueError("give exactly one of hub, files, embedded")
        return self


class DataConfig(Section):
    """What to tokenise, how, and where the shards are."""

    dir: Path  # the prepared data: tokenizer/, train/, validation/
    root: Path = Path()  # local files of the sources are relative to this
    kind: Literal["text", "instruct"] = "text"
    tokenizer: str | None = None  # hub id, directory, or .model (relative to root if it exists there); or
    train_tokenizer: int | None = Field(None, gt=0)  # pieces of a sentencepiece model trained on the sources
    tokenizer_revision: str | None = None  # commit of the hub tokenizer
    sources: list[Source] = Field(min_length=1)
    validation: list[Source] = []  # empty: split off `validation_fraction` by content hash
    validation_fraction: float = Field(0.0, ge=0, lt=1)
    block: int = Field(256, gt=1)  # tokens per row
    shards: int = Field(4, gt=0)  # files per split; the unit of parallel work
    template: Literal["alpaca", "chat"] = "alpaca"  # instruct only
    overlong: Literal["drop", "truncate", "split"] = "truncate"  # instruct: examples longer than block
    limit_rows: int | None = Field(None, gt=0)  # training rows (documents, lines, examples), all sources
    limit_tokens: int | None = Field(None, gt=0)  # training tokens, all sources
    strict: bool = True  # a broken line or missing column is an error, not a counted rejection
    max_chars: int = Field(10_000_000, gt=0)  # longer rows are rejected
    dedup: Literal["none", "exact", "near"] = "exact"  # near: MinHash over 5-word shingles as well
    near_threshold: float = Field(0.8, gt=0, lt=1)  # Jaccard similarity from which rows count as near
    contamination: str | None = None  # directory under root: <task>/test.jsonl are looked for in the text
    contamination_ngram: int = Field(8, ge=3)  # words in a row that count as an overlap
    seed: int = 0  # of weighted subsampling and of the split

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if (self.tokenizer is None) == (self.train_tokenizer is None):
            raise ValueError("give exactly one of tokenizer and train_tokenizer")
        if self.validation and self.validation_fraction:
            raise ValueError("give validation or validation_fraction, not both")
        return self


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
            near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise UserError(f"unknown key {path}; {hint}") from None
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


def load_data_config(path: Path, overrides: list[str]) -> DataConfig:
    """The `data` section of a recipe."""
    tree = read_recipe(path, overrides)
    if "data" not in tree:
        raise UserError(f"recipe {path} has no data section")
    return parse_section(DataConfig, tree["data"], "data")
