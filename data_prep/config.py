"""The `data` section of a recipe, and the comparison of prepared data with it.

The mark of a field defines what it changes. Fields without a mark change the rows, that is the bytes of the
shards. `place`: only where files are. One of REPORTS: only reports and checks. A key of USED: the rows, but
only if the rest of the section uses the field. SET: the rows, but only if the field is not the default.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, field_serializer, field_validator, model_validator

from emo.common.config.recipe import (
    KEYS,
    Section,
    check_section,
    format_value,
    mark,
    mark_of,
    marked,
    parse_section,
    read_recipe,
    suggest_key,
)
from emo.common.context_length import check_extension, context_length, extended_context
from emo.common.errors import UserError, one_line
from emo.common.io.objects import address_of, local_directory
from emo.common.io.untrusted import read_json
from emo.common.io.weights import reject_adapter

from .encoding.chat_templates import BUILT_IN, GIVEN, fixed_date

# Versions of templates. Raise the version if the text of a template or its supervised part changes.
VERSIONS = {"alpaca": "alpaca/1", "chat": "chat/1", "chat_template": "chat_template/3"} | {
    name: f"{name}/1" for name in BUILT_IN
}
REPORTS = ("report", "contamination")
USED: dict[str, Callable[[Any], bool]] = {
    "hub": lambda source: source.hub is not None,
    "instruct": lambda config: config.kind == "instruct",
    "chat": lambda config: config.by_chat_template,
    "near": lambda config: config.dedup == "near",
    "contamination": lambda config: config.contamination is not None,
}
FORMAT = 8  # version of prepared data. Raise it if the same configuration gives other bytes
SET = "if set"  # marks newer fields, which are not part of `settings` while they are the default

MARKER = "data_prep.json"  # marks a directory made by prepare
SETTINGS = "settings.json"  # of the prepared data
MANIFEST = "manifest.json"  # marks a split whose shards are complete
TRAIN = "train"  # the training data
VALIDATION = "validation"  # an unnamed validation set
DEFAULT_DOMAIN = "default"  # of sources without a domain
LONG = "-long"  # ends the domains of long documents
NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"  # pattern of names of domains and validation sets
MAX_TOKENS = 1 << 20  # in a row
INSTRUCTION = (
    *("instruction", "input", "output", "system", "history", "weight"),
    *("messages", "role", "content", "tools", "template_variables"),
)
PARTS = {"text": ("text",), "instruct": INSTRUCTION}  # keys of Source.columns


class Source(Section):
    """A source of rows: exactly one of `hub`, `files` and `embedded`."""

    hub: str | None = Field(None, min_length=1)
    """Id of a hub data set, "owner/name"."""
    config: str | None = mark("hub", None)
    """Configuration of the hub data set."""
    revision: str | None = mark("hub", None)
    """Commit of the hub data set."""
    split: str = "train"
    """Split of the hub data set or of a saved one, also a slice such as `train[:1000]`."""
    files: str | None = Field(None, min_length=1)
    """Path or glob under data.root (also with {a,b}), or an address or glob that fsspec reads (s3://, gs://,
    https://). Formats: txt, jsonl (ndjson, jsonlines), json, csv, tsv (each also as .zst, .gz, .bz2 or .xz),
    parquet, or directories written by `save_to_disk` of datasets."""
    embedded: Literal["world", "world-home", "world-abroad", "world-instruct"] | None = None
    """A toy corpus of this package: texts about all facts (`world`), about half of them, or instructions."""
    format: Literal[
        "auto", "document", "lines", "paragraphs", "wikitext", "text", "alpaca", "messages", "tokens"
    ] = "auto"
    """Form of the rows. In text files: `document` (one per file), `lines`, `paragraphs` (between blank
    lines), `wikitext` (a level-1 heading starts a document). In JSON and tables: `text`, `alpaca`,
    `messages`, or `tokens` (lists of ids). `auto` is wikitext or lines for text files, and otherwise the form
    of the columns."""
    column: str | None = Field(None, min_length=1)
    """Column of the text or the tokens, or for instructions, of the messages or the prompt."""
    columns: dict[str, str] | None = mark(SET, None)
    """Names of your columns, as part: column. Text has the part text. Instructions have instruction, input,
    output, system and history, or messages with the keys role and content, and weight. Chat templates also
    have tools and template_variables."""
    clean: Literal["none", "writingprompts", "ag_news"] = "none"
    """Undo the escapes of a known data set."""
    weight: float = Field(1.0, gt=0, le=10_000)
    """0.3 uses that share of the rows, chosen by content hash. 2.5 repeats each row 2 or 3 times."""
    limit: int | None = Field(None, gt=0)
    """Read at most this many rows of the source, from its beginning, counting duplicates and unusable
    rows."""
    domain: str | None = mark(SET, None, pattern=f"^{NAME}$")
    """Name for the subject of the text. Domains are mixed and measured separately, and never share a packed
    row."""

    @property
    def domain_name(self) -> str:
        """Return the domain of the rows."""
        return DEFAULT_DOMAIN if self.domain is None else self.domain

    @model_validator(mode="after")
    def _one_origin(self) -> Source:
        if sum(origin is not None for origin in (self.hub, self.files, self.embedded)) != 1:
            raise ValueError("set exactly one of hub, files, embedded")
        if self.column is not None and self.columns is not None:
            raise ValueError("set column or columns, not both")
        return self


Sets = dict[Annotated[str, Field(pattern=f"^{NAME}$")], Annotated[list[Source], Field(min_length=1)]]


class DataConfig(Section):
    """The text to tokenize, and how to tokenize it."""

    dir: Path = mark("place")
    """Directory of the prepared data, or s3://BUCKET/DIRECTORY. It must not contain other files."""
    root: Path = mark("place", Path())
    """Directory that local files of the sources are relative to."""
    kind: Literal["text", "instruct"] = "text"
    """Kind of rows: documents for continual pre-training, or instructions with responses."""
    tokenizer: str | None = None
    """Hub id, directory or sentencepiece .model file, relative to root if it exists there. Set either this or
    train_tokenizer."""
    train_tokenizer: int | None = Field(None, gt=0)
    """Train a sentencepiece tokenizer with this many pieces on the sources."""
    tokenizer_revision: str | None = None
    """Commit of the hub tokenizer."""
    sources: list[Source] = Field(min_length=1)
    """Sources of the training rows."""
    validation: list[Source] | dict[str, list[Source]] = []
    """Sources of the validation set, or of several named sets: {home: [...], abroad: [...]}. Rows that are
    also training rows are left out of these sets."""
    validation_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of the sources' rows to hold out for validation, chosen by content hash, if `validation` is
    empty."""
    validation_group: str | None = mark(SET, None, min_length=1)
    """Column that groups rows, for example by question. validation_fraction never splits a group."""
    sequence_len: int = Field(256, gt=1, le=MAX_TOKENS)
    """Tokens per row."""
    packing: Literal["blocks", "best_fit", "none"] = mark(SET, "blocks")
    """`blocks` concatenates documents and cuts the result into rows. `best_fit`, which instructions use
    instead, cuts only documents that are longer than a row. It places documents from the longest to the
    shortest, each into the first row with enough space. `none` gives each document its own row, for models
    that cannot separate the documents of a row."""
    min_doc_tokens: int | None = mark(SET, None, gt=0)
    """Leave out documents with fewer tokens, including BOS and EOS."""
    long_doc_tokens: int | None = mark(SET, None, gt=0)
    """Move documents with at least this many tokens to the domain DOMAIN-long (default-long without domains),
    for train.mixture."""
    shards: int = Field(4, gt=0, le=99_999)
    """Files per split, which parallel jobs divide among themselves."""
    template: Literal["alpaca", "chat", "chat_template", "chatml", "llama3"] = mark("instruct", "alpaca")
    """Text format of instructions: Alpaca's prompt, a plain transcript (`chat`), the tokenizer's
    `chat_template`, or `chatml` or `llama3` for a base model whose tokenizer has the special tokens but no
    template."""
    reasoning: Literal["keep", "drop", "mask_empty"] = mark("chat", "mask_empty")
    """Loss on reasoning, with a chat template. `mask_empty`: on all reasoning that the template writes,
    except empty thinking blocks. `keep`: on all of it. `drop`: reasoning is removed from the rows."""
    reasoning_weight: float = mark("chat", 1.0, ge=0, le=1_000_000)
    """Factor for the loss weight of reasoning in answers, with a chat template."""
    template_variables: dict[str, Any] = mark("chat", {})
    """Variables for the chat template, such as {enable_thinking: false}. `date` (YYYY-MM-DD) is the current
    date that the template sees, by default 2026-01-01."""
    overlong: Literal["drop", "truncate", "split"] = mark("instruct", "truncate")
    """Treatment of examples that are longer than a row."""
    limit_rows: int | None = Field(None, gt=0)
    """Use at most this many training rows (documents or examples, including copies)."""
    limit_tokens: int | None = Field(None, gt=0)
    """Use at most this many training tokens."""
    strict: bool = mark("report", True)
    """If true, a broken line or a missing column is an error. If false, it counts as a rejected row."""
    max_chars: int = Field(10_000_000, gt=0)
    """Rows with more characters are rejected."""
    dedup: Literal["none", "exact", "near"] = "exact"
    """`exact` drops duplicate rows. `near` also drops rows whose MinHash similarity to another row reaches
    near_threshold (for instructions, the similarity of prompts and of responses). With `none`, validation
    rows may also be training rows."""
    near_threshold: float = mark("near", 0.8, gt=0, lt=1)
    """Jaccard similarity from which two rows count as near duplicates."""
    contamination: str | None = mark("report", None)
    """Directory under root with rows of evaluation tasks, `<task>/test.jsonl`, to search for in the training
    text."""
    contamination_ngram: int = mark("contamination", 8, ge=3)
    """Number of consecutive words that count as an overlap."""
    seed: int = 0
    """Seed of weighted subsampling and of the validation split."""

    @field_validator("dir", mode="before")
    @classmethod
    def _local_copy(cls, value: Any) -> Any:
        """Return the local copy of a directory in a store."""
        return str(local_directory(value)) if isinstance(value, str) else value

    @field_serializer("dir", when_used="json")
    def _address(self, directory: Path) -> str:
        return address_of(directory) or str(directory)

    @field_validator("validation", mode="before")
    @classmethod
    def _one_set_or_several(cls, tree: Any) -> list[Source] | dict[str, list[Source]]:
        """Choose the type by the value, so that errors name the exact key."""
        if not isinstance(tree, dict):
            return TypeAdapter(list[Source]).validate_python(tree)
        sets = TypeAdapter(Sets).validate_python(tree)
        if len({name.lower() for name in sets}) < len(sets):  # the same directory on some file systems
            raise ValueError("two names differ only in case. Rename one")
        return sets or []

    @field_validator("template_variables")
    @classmethod
    def _as_json(cls, variables: dict[str, object]) -> dict[str, object]:
        """Return the variables as JSON values: YAML parses a day as a date."""
        try:
            return json.loads(json.dumps(variables, default=str, allow_nan=False))
        except ValueError:
            raise ValueError("numbers must be finite") from None

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if (self.tokenizer is None) == (self.train_tokenizer is None):
            raise ValueError("set exactly one of tokenizer and train_tokenizer")
        if self.validation and self.validation_fraction:
            raise ValueError("set validation or validation_fraction, not both")
        if self.validation_group and not self.validation_fraction:
            raise ValueError("validation_group needs validation_fraction")
        if self.by_chat_template and self.train_tokenizer:
            raise ValueError(f"template: {self.template} needs the tokenizer of a model, not train_tokenizer")
        changed = self.reasoning != "mask_empty" or self.reasoning_weight != 1 or self.template_variables
        if not self.by_chat_template and changed:
            raise ValueError(
                "reasoning, reasoning_weight and template_variables are for chat templates; "
                "set template to one"
            )
        if reserved := next((name for name in self.template_variables if name in GIVEN), None):
            raise ValueError(f"template_variables: {reserved} comes from the rows. Remove it")
        self._check_documents()
        try:
            fixed_date(self.template_variables)
        except (TypeError, ValueError):
            raise ValueError("template_variables: date must be a day, such as 2026-01-31") from None
        sources = [source for split in self.splits for source in self.sources_of(split)]
        parts = PARTS[self.kind]
        for part in (part for source in sources for part in source.columns or () if part not in parts):
            raise ValueError(
                f"columns: {part} is not a part of a row of kind {self.kind}. Write part: column, the "
                f"parts are {', '.join(parts)}"
            )
        if any(source.format == "tokens" for source in sources):
            if self.kind == "instruct":
                raise ValueError("format: tokens is for kind: text; instructions need their text")
            if self.train_tokenizer or self.contamination:
                key = "train_tokenizer" if self.train_tokenizer else "contamination"
                raise ValueError(f"{key} needs text, and a source has format: tokens")
        return self

    def _check_documents(self) -> None:
        """Raise ValueError for keys of documents that contradict others."""
        best_fit = {"packing: best_fit": self.packing == "best_fit"}
        long = {"long_doc_tokens": self.long_doc_tokens is not None}
        without_limit = best_fit | {"packing: none": self.packing == "none"} | long
        of_documents = best_fit | long | {"min_doc_tokens": self.min_doc_tokens is not None}
        for key in (key for key, value in without_limit.items() if value and self.limit_tokens is not None):
            raise ValueError(f"{key} does not work with limit_tokens. Set limit_rows instead")
        names = {source.domain_name for split in self.splits for source in self.sources_of(split)}
        if self.long_doc_tokens is not None and (twice := sorted({name + LONG for name in names} & names)):
            raise ValueError(f"domain {twice[0]} is also the name of long documents. Rename the domain")
        for key in (key for key, value in of_documents.items() if value and self.kind == "instruct"):
            raise ValueError(f"{key} is for documents, and kind is instruct. Remove it")

    @property
    def by_chat_template(self) -> bool:
        """Return whether a chat template writes the examples."""
        return self.kind == "instruct" and by_chat_template(self.template)

    @property
    def validation_sets(self) -> tuple[str, ...]:
        """Return the names of the validation sets, in the order of the recipe."""
        if isinstance(self.validation, dict):
            return tuple(self.validation)
        return (VALIDATION,) if self.validation or self.validation_fraction else ()

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the directories of the prepared data sets, the training data first."""
        return (TRAIN, *map(split_of, self.validation_sets))

    def sources_of(self, split: str) -> list[Source]:
        """Return the sources whose rows a split takes."""
        if split == TRAIN or self.validation_fraction:
            return self.sources
        if isinstance(self.validation, dict):
            return next(rows for name, rows in self.validation.items() if split_of(name) == split)
        return self.validation

    def domains_of(self, split: str) -> tuple[str, ...]:
        """Return the domains of a split's sources, in order of first appearance, then of long documents."""
        names = [source.domain_name for source in self.sources_of(split)]
        long = [] if self.long_doc_tokens is None else [name + LONG for name in names]
        return tuple(dict.fromkeys([*names, *long]))


def by_chat_template(template: str) -> bool:
    """Return whether a value of data.template, with or without a version, names a chat template."""
    return template.partition("/")[0] in ("chat_template", *BUILT_IN)


def split_of(name: str) -> str:
    """Return the directory of a validation set."""
    return VALIDATION if name == VALIDATION else f"{VALIDATION}-{name}"


def describe_set(name: str) -> str:
    """Return the name of a validation set for messages."""
    return "validation set" if name == VALIDATION else f"validation set {name}"


def splits_made(prepared: Mapping[str, object]) -> tuple[str, ...]:
    """Return the splits of prepared data with these `settings`, which may be from an untrusted file."""
    sets = prepared.get("validation")
    if isinstance(sets, dict):
        return (TRAIN, *(split_of(name) for name in sets if re.fullmatch(NAME, name)))
    return (TRAIN, VALIDATION) if sets or prepared.get("validation_fraction") else (TRAIN,)


def load_data_config(path: Path, overrides: list[str], recipe: type[Section] | None = None) -> DataConfig:
    """Return the `data` section of a recipe.

    recipe: the model of all sections. The other sections of the recipe are checked with it.
    """
    tree = read_recipe(path, overrides)
    if "data" not in tree:
        problem = f"recipe {path} has no data section; it has: {', '.join(map(str, tree)) or 'nothing'}"
        unknown = sorted(map(str, tree.keys() - {*KEYS}))
        hints = [(key, suggest_key(recipe or DataConfig, [key])) for key in unknown]
        lines = [f"unknown key {key}; {hint}" for key, hint in hints if hint]
        raise UserError(problem, code="no-data-section", more=lines)
    if recipe is not None:
        check_section(recipe, tree, "", may_lack=KEYS)
    config = parse_section(DataConfig, tree["data"], "data")
    model = tree.get("model")  # training would find too long rows much later
    path_of_model = model.get("path") if isinstance(model, dict) else None
    context = None
    if isinstance(path_of_model, str):
        reject_adapter(Path(path_of_model))
        rope = tree["model"].get("rope")
        settings_of_model = _read_config(Path(path_of_model))
        if isinstance(rope, dict):
            check_extension(settings_of_model, rope)
        context = extended_context(context_length(settings_of_model), rope if isinstance(rope, dict) else {})
    if context is not None and config.sequence_len > context:
        raise UserError(
            f"blocks of {config.sequence_len} tokens are longer than the context of {context} of the model "
            f"{path_of_model}. Set data.sequence_len={context} or less, or extend it with model.rope",
            code="context",
        )
    return config


def context_of(model: Path) -> int | None:
    """Return the context length of the model in a directory, or None if its config.json has none."""
    return context_length(_read_config(model))


def _read_config(model: Path) -> dict[str, Any]:
    """Return config.json of the model in a directory, empty if it cannot be read."""
    tree = None
    with contextlib.suppress(OSError, ValueError):
        tree = read_json(model / "config.json")
    return tree if isinstance(tree, dict) else {}


def settings(config: DataConfig, reports: bool = True) -> dict[str, Any]:
    """Return the settings that decide the prepared data, as JSON values. Fields without effect are null.

    Without `reports`, only settings that change the rows are returned.
    """
    tree = _effective_fields(config, reports)
    if isinstance(config.validation, dict):  # JSON mappings have no order
        tree["validation_sets"] = list(config.validation_sets)
    return tree | {"template_version": VERSIONS[config.template] if config.kind == "instruct" else None}


def _effective_fields(value: Any, reports: bool) -> Any:
    """Return a value as JSON, with only the fields of sections that have an effect."""
    if isinstance(value, dict):
        return {key: _effective_fields(item, reports) for key, item in value.items()}
    if isinstance(value, list):
        return [_effective_fields(item, reports) for item in value]
    if not isinstance(value, Section):
        return value
    tree = {}
    for key in type(value).model_fields:
        name = mark_of(type(value), key)
        item = getattr(value, key)
        default = type(value).model_fields[key].default
        if name == "place" or (name in REPORTS and not reports) or (name == SET and item == default):
            continue
        tree[key] = None if name in USED and not USED[name](value) else _effective_fields(item, reports)
    return tree


def differences(
    prepared: Mapping[str, object], config: DataConfig, reports: bool = True
) -> list[tuple[str, Any, Any]]:
    """Return how a configuration differs from prepared `settings`: key, old value, new value."""
    ignored = set() if reports else set.union(*(marked(DataConfig, name) for name in REPORTS))
    was = {key: value for key, value in prepared.items() if key not in ignored}
    return list(_differences("data", was, settings(config, reports)))


def _differences(key: str, was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the differences of two JSON values. Lists of different length are one difference."""
    if isinstance(was, dict) and isinstance(now, dict):
        for inner in dict.fromkeys((*now, *was)):
            yield from _differences(f"{key}.{inner}", was.get(inner), now.get(inner))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for number, pair in enumerate(zip(was, now, strict=True)):
            yield from _differences(f"{key}.{number}", *pair)
    elif was != now:
        yield key, was, now


def check_prepared(directory: Path, prepared: Mapping[str, object], config: DataConfig) -> None:
    """Raise UserError if the rows in a directory differ from the recipe.

    prepared: the settings in the manifest. Fields that do not change rows may differ.
    """
    changed = differences(prepared, config, reports=False)
    if changed:
        raise UserError(
            f"{directory} was {describe_differences(changed)}. Use the same overrides for both commands, or "
            "run prepare again with --force or another data.dir",
            code="settings-differ",
        )


def describe_differences(changed: list[tuple[str, Any, Any]]) -> str:
    """Return differences for messages."""
    parts = (f"{key}={format_value(was)}, the recipe has {format_value(now)}" for key, was, now in changed)
    return one_line(f"prepared with {'; with '.join(parts)}", 800)
