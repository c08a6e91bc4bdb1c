"""The `data` section of a recipe, and whether data were prepared with it.

Fields say themselves what they change. Unmarked: the rows, that is the bytes of the shards. Marked `place`:
nothing, only where things are. Marked with one of REPORTS: what is said about the rows, or refused. Marked
with a key of USED: that, where the rest of the section makes use of the field. Marked SET: that, where it is
set.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, field_validator, model_validator

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
from emo.common.errors import UserError, one_line
from emo.common.io.untrusted import read_json
from emo.common.io.weights import context_length, reject_adapter

from .encoding.chat_templates import BUILT_IN, GIVEN, fixed_date

# Of templates: raised when the text of one changes, or what of it is supervised.
VERSIONS = {"alpaca": "alpaca/1", "chat": "chat/1", "chat_template": "chat_template/2"} | {
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
FORMAT = 6  # of prepared data; raised whenever the same configuration would give other bytes
SET = "if set"  # marks fields that came later: where they are not set, settings do not speak of them

TRAIN, VALIDATION = "train", "validation"  # the training data, and a validation set without a name of its own
DEFAULT_DOMAIN = "default"  # of sources that name none
NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"  # of a domain or a validation set
MOST_TOKENS = 1 << 20  # in a row
DATA_FILES = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet")  # endings of files that sources may name
INSTRUCTION = ("instruction", "input", "output", "system", "history", "messages", "role", "content", "tools")
COLUMNS = {"text": ("text",), "instruct": INSTRUCTION}  # parts of a row whose columns can be named


class Source(Section):
    """Rows come from here: exactly one of `hub`, `files` and `embedded`."""

    hub: str | None = Field(None, min_length=1)
    """Id of a hub data set, "owner/name". Give exactly one of `hub`, `files` and `embedded`."""
    config: str | None = mark("hub", None)
    """Configuration of the hub data set."""
    revision: str | None = mark("hub", None)
    """Commit of the hub data set."""
    split: str = "train"
    """Split of the hub data set or of a saved one; slices such as `train[:1000]` are allowed."""
    files: str | None = Field(None, min_length=1)
    """Path or glob under data.root, also with {a,b}: txt, jsonl (ndjson, jsonlines), json, csv, tsv (each
    also as .zst, .gz, .bz2 or .xz), parquet, or directories written by `save_to_disk` of the datasets
    library. Also an address or glob that fsspec reads: s3://, gs://, https:// and others."""
    embedded: Literal["world", "world-home", "world-abroad", "world-instruct"] | None = None
    """A corpus that comes along: text about a small world, about one of its halves, or instructions."""
    format: Literal[
        "auto", "document", "lines", "paragraphs", "wikitext", "text", "alpaca", "messages", "tokens"
    ] = "auto"
    """How rows are found. In text files: `document` (the file is one document), `lines`, `paragraphs`
    (separated by blank lines), `wikitext` (a level-1 heading starts a document). In JSON and tables:
    `text`, `alpaca`, `messages`, or `tokens` (lists of ids, used as they are). `auto` takes wikitext or
    lines for text files, and otherwise the form that the columns show."""
    column: str | None = Field(None, min_length=1)
    """Column of the text (default: text, content, sentence, document or story), of the tokens (ids,
    input_ids), or in instructions of the messages (messages, conversations) or the prompt (instruction,
    prompt, question, query)."""
    columns: dict[str, str] | None = mark(SET, None)
    """Columns that go by other names, as part: column. Text has the part text; instructions have instruction,
    input, output, system and history, or messages with the keys role and content; tools with a
    chat_template."""
    clean: Literal["none", "writingprompts", "ag_news"] = "none"
    """Undo the escapes of a known data set."""
    weight: float = Field(1.0, gt=0, le=10_000)
    """0.3 keeps that share of the rows, chosen by content hash; 2.5 repeats each row 2 or 3 times, spread
    over the shard."""
    limit: int | None = Field(None, gt=0)
    """Read at most this many rows of the source, from its beginning. Duplicates and unusable rows count;
    `limit_rows` counts the rows that are used."""
    domain: str | None = mark(SET, None, pattern=f"^{NAME}$")
    """What the text is about. A packed row holds one domain, and each domain is counted, mixed and measured
    by itself."""

    @property
    def domain_name(self) -> str:
        """Return the domain of its rows."""
        return DEFAULT_DOMAIN if self.domain is None else self.domain

    @model_validator(mode="after")
    def _one_origin(self) -> Source:
        if sum(origin is not None for origin in (self.hub, self.files, self.embedded)) != 1:
            raise ValueError("give exactly one of hub, files, embedded")
        if self.column is not None and self.columns is not None:
            raise ValueError("give column or columns, not both")
        return self


Sets = dict[Annotated[str, Field(pattern=f"^{NAME}$")], Annotated[list[Source], Field(min_length=1)]]


class DataConfig(Section):
    """The text to tokenise, the way to do it, and the directory of the shards."""

    dir: Path = mark("place")
    """Directory of the prepared data (tokenizer/, train/, validation/ or one directory per set); nothing else
    may be in it."""
    root: Path = mark("place", Path())
    """Directory that local files of the sources are relative to."""
    kind: Literal["text", "instruct"] = "text"
    """What rows are: documents for continual pre-training, or instructions with responses."""
    tokenizer: str | None = None
    """Hub id, directory or sentencepiece .model file, relative to root if it exists there. Give this or
    train_tokenizer."""
    train_tokenizer: int | None = Field(None, gt=0)
    """Number of pieces of a sentencepiece model to train on the sources."""
    tokenizer_revision: str | None = None
    """Commit of the hub tokenizer."""
    sources: list[Source] = Field(min_length=1)
    """Where the training rows come from."""
    validation: list[Source] | dict[str, list[Source]] = []
    """Sources of the validation set, or of several by name: {home: [...], abroad: [...]}. Each set is
    measured, and no row of it is trained on."""
    validation_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of the sources' rows that is split off for validation, by content hash, when `validation` is
    empty."""
    validation_group: str | None = mark(SET, None, min_length=1)
    """Column whose value keeps rows together when validation_fraction splits them, so that all answers to one
    question are on one side."""
    sequence_len: int = Field(256, gt=1, le=MOST_TOKENS)
    """Tokens per row."""
    shards: int = Field(4, gt=0, le=99_999)
    """Files per split; also the unit of parallel work."""
    template: Literal["alpaca", "chat", "chat_template", "chatml", "llama3"] = mark("instruct", "alpaca")
    """How instructions are written as text: Alpaca's prompt, a plain transcript (`chat`), the tokenizer's own
    chat template, or for a base model whose tokenizer has the special tokens but no template, `chatml` or
    `llama3`, which the prepared tokenizer then has."""
    reasoning: Literal["keep", "drop", "mask_empty"] = mark("chat", "mask_empty")
    """What is learned of reasoning in a chat template. `mask_empty`: all that the template writes, but no
    thinking block that is empty. `keep`: all. `drop`: the row's reasoning is removed before it is written."""
    template_variables: dict[str, Any] = mark("chat", {})
    """Variables for the chat template, such as {enable_thinking: false}. `date` (YYYY-MM-DD, default
    2026-01-01) is what a template gets that asks for today's date."""
    overlong: Literal["drop", "truncate", "split"] = mark("instruct", "truncate")
    """What happens to examples longer than a block."""
    limit_rows: int | None = Field(None, gt=0)
    """Training rows (documents or examples, copies included) over all sources at most."""
    limit_tokens: int | None = Field(None, gt=0)
    """Training tokens over all sources at most."""
    strict: bool = mark("report", True)
    """A broken line or a missing column ends preparation; false counts it as a rejected row."""
    max_chars: int = Field(10_000_000, gt=0)
    """Longer rows are rejected."""
    dedup: Literal["none", "exact", "near"] = "exact"
    """`exact` drops equal rows; `near` also drops rows whose MinHash similarity reaches near_threshold, in
    instructions that of the user's words and of the responses both; `none` keeps all, and what is trained on
    may then be held out too."""
    near_threshold: float = mark("near", 0.8, gt=0, lt=1)
    """Jaccard similarity from which two rows count as near duplicates."""
    contamination: str | None = mark("report", None)
    """Directory under root whose `<task>/test.jsonl` rows are looked for in the training text."""
    contamination_ngram: int = mark("contamination", 8, ge=3)
    """Number of consecutive words that count as an overlap."""
    seed: int = 0
    """Seed of weighted subsampling and of the validation split."""

    @field_validator("validation", mode="before")
    @classmethod
    def _one_set_or_several(cls, tree: Any) -> list[Source] | dict[str, list[Source]]:
        """Decided by what is given, so that a mistake within is named by its own place."""
        if not isinstance(tree, dict):
            return TypeAdapter(list[Source]).validate_python(tree)
        sets = TypeAdapter(Sets).validate_python(tree)
        if len({name.lower() for name in sets}) < len(sets):  # one directory, on some file systems
            raise ValueError("two names differ in case alone; rename one")
        return sets or []

    @field_validator("template_variables")
    @classmethod
    def _as_json(cls, variables: dict[str, Any]) -> dict[str, Any]:
        """Return the variables as JSON values: YAML reads a day as a date."""
        try:
            tree: dict[str, Any] = json.loads(json.dumps(variables, default=str, allow_nan=False))
        except ValueError:
            raise ValueError("numbers must be finite") from None
        return tree

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if (self.tokenizer is None) == (self.train_tokenizer is None):
            raise ValueError("give exactly one of tokenizer and train_tokenizer")
        if self.validation and self.validation_fraction:
            raise ValueError("give validation or validation_fraction, not both")
        if self.validation_group and not self.validation_fraction:
            raise ValueError("validation_group needs validation_fraction")
        if self.by_chat_template and self.train_tokenizer:
            raise ValueError(f"template: {self.template} needs the tokenizer of a model, not train_tokenizer")
        if not self.by_chat_template and (self.reasoning != "mask_empty" or self.template_variables):
            raise ValueError("reasoning and template_variables are for chat templates; set template to one")
        if taken := next((name for name in self.template_variables if name in GIVEN), None):
            raise ValueError(f"template_variables: {taken} comes from the rows; remove it")
        try:
            fixed_date(self.template_variables)
        except (TypeError, ValueError):
            raise ValueError("template_variables: date must be a day, such as 2026-01-31") from None
        every = [source for split in self.splits for source in self.sources_of(split)]
        parts = COLUMNS[self.kind]
        for part in (part for source in every for part in source.columns or () if part not in parts):
            raise ValueError(
                f"columns: {part} is no part of a row of kind {self.kind}; write part: column, the parts are "
                f"{', '.join(parts)}"
            )
        if any(source.format == "tokens" for source in every):
            if self.kind == "instruct":
                raise ValueError("format: tokens is for kind: text; instructions need their text")
            if self.train_tokenizer or self.contamination:
                key = "train_tokenizer" if self.train_tokenizer else "contamination"
                raise ValueError(f"{key} needs text, and a source has format: tokens")
        return self

    @property
    def by_chat_template(self) -> bool:
        """Return whether a chat template of a tokenizer writes the examples."""
        return self.kind == "instruct" and by_chat_template(self.template)

    @property
    def validation_sets(self) -> tuple[str, ...]:
        """Return the names of the validation sets, in the order of the recipe."""
        if isinstance(self.validation, dict):
            return tuple(self.validation)
        return (VALIDATION,) if self.validation or self.validation_fraction else ()

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the data sets that are prepared, by directory; the training data first."""
        return (TRAIN, *map(split_of, self.validation_sets))

    def sources_of(self, split: str) -> list[Source]:
        """Return the sources whose rows a split takes."""
        if split == TRAIN or self.validation_fraction:
            return self.sources
        if isinstance(self.validation, dict):
            return next(rows for name, rows in self.validation.items() if split_of(name) == split)
        return self.validation

    def domains_of(self, split: str) -> tuple[str, ...]:
        """Return the domains of a split's sources, in order of first appearance."""
        return tuple(dict.fromkeys(source.domain_name for source in self.sources_of(split)))


def by_chat_template(template: str) -> bool:
    """Return whether a value of data.template, with a version or without, names a chat template."""
    return template.partition("/")[0] in ("chat_template", *BUILT_IN)


def split_of(name: str) -> str:
    """Return the directory of a validation set."""
    return VALIDATION if name == VALIDATION else f"{VALIDATION}-{name}"


def set_called(name: str) -> str:
    """Return a validation set for a message."""
    return "validation set" if name == VALIDATION else f"validation set {name}"


def splits_made(prepared: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the splits that go with the `settings` of prepared data, which anybody may have written."""
    sets = prepared.get("validation")
    if isinstance(sets, dict):
        return (TRAIN, *(split_of(name) for name in sets if re.fullmatch(NAME, name)))
    return (TRAIN, VALIDATION) if sets or prepared.get("validation_fraction") else (TRAIN,)


def load_data_config(path: Path, overrides: list[str], recipe: type[Section] | None = None) -> DataConfig:
    """Return the `data` section of a recipe.

    recipe: the model of all sections, of which those that are there are checked as well. This package knows
    one of them only.
    """
    inner = re.sub(r"\.(gz|zst|bz2|xz)$", "", path.name.lower())
    if inner.endswith((*DATA_FILES, ".ndjson", ".jsonlines")) and path.suffix != ".json":
        raise UserError(
            f"{path} is data, not a recipe; emo sniff {path} writes one to begin with", code="data-not-recipe"
        )
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
    model = tree.get("model")  # which cannot read longer rows, as training would say much later
    where = model.get("path") if isinstance(model, dict) else None
    context = None
    if isinstance(where, str):
        reject_adapter(Path(where))
        context = context_of(Path(where))
    if context is not None and config.sequence_len > context:
        raise UserError(
            f"blocks of {config.sequence_len} tokens are longer than the context of {context} of the model "
            f"{where}; set data.sequence_len={context} or less"
        )
    return config


def context_of(model: Path) -> int | None:
    """Return the tokens that the model in a directory reads at most, where its config.json says so."""
    tree = None
    with contextlib.suppress(OSError, ValueError):
        tree = read_json(model / "config.json")
    return context_length(tree) if isinstance(tree, dict) else None


def settings(config: DataConfig, reports: bool = True) -> dict[str, Any]:
    """Return what decides the prepared data, as JSON values; fields without effect are null.

    With `reports` all that decides what `prepare` does, without only what changes the rows.
    """
    tree: dict[str, Any] = _decisive(config, reports)
    if isinstance(config.validation, dict):  # whose order a mapping in JSON does not keep
        tree["validation_sets"] = list(config.validation_sets)
    return tree | {"template_version": VERSIONS[config.template] if config.kind == "instruct" else None}


def _decisive(value: Any, reports: bool) -> Any:
    """Return a value as JSON, with what is decisive of the sections in it."""
    if isinstance(value, dict):
        return {key: _decisive(item, reports) for key, item in value.items()}
    if isinstance(value, list):
        return [_decisive(item, reports) for item in value]
    if not isinstance(value, Section):
        return value
    tree = {}
    for key in type(value).model_fields:
        name, item = mark_of(type(value), key), getattr(value, key)
        if name == "place" or (name in REPORTS and not reports) or (name == SET and item is None):
            continue
        tree[key] = None if name in USED and not USED[name](value) else _decisive(item, reports)
    return tree


def differences(
    prepared: Mapping[str, Any], config: DataConfig, reports: bool = True
) -> list[tuple[str, Any, Any]]:
    """Return where the `settings` of prepared data differ from those of a configuration: key, was, is now."""
    ignored = set() if reports else set.union(*(marked(DataConfig, name) for name in REPORTS))
    was = {key: value for key, value in prepared.items() if key not in ignored}
    return list(_differences("data", was, settings(config, reports)))


def _differences(key: str, was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield where two trees of JSON values differ; lists of different length differ as a whole."""
    if isinstance(was, dict) and isinstance(now, dict):
        for inner in dict.fromkeys((*now, *was)):
            yield from _differences(f"{key}.{inner}", was.get(inner), now.get(inner))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for number, pair in enumerate(zip(was, now, strict=True)):
            yield from _differences(f"{key}.{number}", *pair)
    elif was != now:
        yield key, was, now


def check_prepared(directory: Path, prepared: Mapping[str, Any], config: DataConfig) -> None:
    """Raise UserError when the rows in `directory` are not those that the recipe describes.

    prepared: the settings in its manifest. Fields that change no row may differ.
    """
    changed = differences(prepared, config, reports=False)
    if changed:
        raise UserError(
            f"{directory} was {described(changed)}; give the same overrides to both commands, or run prepare "
            f"again with --force or another data.dir",
            code="settings-differ",
        )


def described(changed: list[tuple[str, Any, Any]]) -> str:
    """Return differences as a part of a message."""
    parts = (f"{key}={format_value(was)}, the recipe says {format_value(now)}" for key, was, now in changed)
    return one_line(f"prepared with {'; with '.join(parts)}", 800)
