"""The `data` section of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from common.errors import UserError
from common.recipe import Section, parse_section, read_recipe


class Source(Section):
    """Where rows come from. Exactly one of `hub`, `files` and `embedded`."""

    hub: str | None = Field(None, min_length=1)  # hub id, "owner/name"
    config: str | None = None  # the hub data set's configuration
    revision: str | None = None  # commit of the hub data set
    split: str = "train"  # split of the hub data set, slices allowed; or of a saved one
    # Path or glob under data.root: txt, jsonl, json (each also .zst, .gz), parquet, directories that
    # `save_to_disk` of the datasets library wrote.
    files: str | None = Field(None, min_length=1)
    embedded: Literal["world", "world-instruct"] | None = None  # a corpus that data_prep generates itself
    seed: int = 0  # embedded only: which corpus
    # How rows are found. Text files: `document` (the file is one), `lines`, `paragraphs` (by blank lines),
    # `wikitext` (level-1 headings start one). JSON and tables: `text`, `alpaca`, `messages`.
    # `auto`: wikitext or lines for text files, the form that a row's columns show for the others.
    format: Literal["auto", "document", "lines", "paragraphs", "wikitext", "text", "alpaca", "messages"] = (
        "auto"
    )
    # Column of the text (unset: text, content, sentence, document, story); in instructions of the messages
    # (messages, conversations) or of the prompt (instruction, prompt, question, query).
    column: str | None = Field(None, min_length=1)
    clean: Literal["none", "writingprompts", "ag_news"] = "none"  # undo a data set's own escapes
    # 0.3: that share of the rows, by content hash; 2.5: each 2 or 3 times, spread over the shard.
    weight: float = Field(1.0, gt=0, le=10_000)
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
    limit_rows: int | None = Field(None, gt=0)  # training rows (documents, examples, copies), all sources
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


def load_data_config(path: Path, overrides: list[str]) -> DataConfig:
    """The `data` section of a recipe."""
    tree = read_recipe(path, overrides)
    if "data" not in tree:
        raise UserError(f"recipe {path} has no data section")
    return parse_section(DataConfig, tree["data"], "data")
