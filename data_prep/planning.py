"""How the plan comes about: one job sets up, all jobs scan, and one of them decides.

In `.new`, until the plan is there:
    tokenizer/, grams.npz, settings.json    set up by the job that comes first
    scan/                                   a part of each unit, and a lease of who makes it
    rows.parquet, limited.parquet, spill/   of the job that decides
Parts stay when jobs die: the next ones go on from them. A part is believed as long as settings and sources
are those that it was made from.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from emo.common.errors import UserError
from emo.common.files import Hashes, Signature, remove_abandoned, remove_made, signature, write_text
from emo.common.parallel import Workers
from emo.common.progress import progress
from emo.common.text import counted
from emo.data_prep import contamination
from emo.data_prep.config import DataConfig, context_of, settings
from emo.data_prep.encode import EncodeSettings, counting, words_agree
from emo.data_prep.inputs import Input, is_saved
from emo.data_prep.limit import limit_tokens
from emo.data_prep.plan import Plan
from emo.data_prep.rows import plain_text, take
from emo.data_prep.scan import (
    BEYOND_LIMIT,
    Part,
    ScanSettings,
    Unit,
    digest,
    divide,
    scan_unit,
    scanner,
    shared_out,
)
from emo.data_prep.selection import select
from emo.data_prep.shards import FORMAT
from emo.data_prep.templates import ChatTemplate, check_template, read_template
from emo.data_prep.tokenizer import (
    TokenizerFacts,
    require_end,
    save_tokenizer,
    tokenizer_facts,
    train_sentencepiece,
)
from emo.data_prep.verify import content, file_of, planned_inputs
from emo.data_prep.write import (
    GRAMS,
    HASHES,
    LIMITED,
    NEW,
    PLAN,
    ROWS,
    SCAN,
    SET_UP,
    SETTINGS,
    TOKENIZER,
    UNFINISHED,
    columns_read,
    left_out,
)

TRAINING_CHARS = 50_000_000  # of text at most to train a tokenizer on

Say = Callable[[str], None]


def set_up(config: DataConfig, force: bool, say: Say) -> None:
    """Make what takes no scan, in `.new`; last the settings, which say that it is there.

    force: parts of an earlier scan are not believed either. Raises UserError for all that can be found wrong
    before the rows are read.
    """
    directory = config.dir / NEW
    remove_made(config.dir, UNFINISHED if force else SET_UP)
    (directory / SCAN).mkdir(parents=True, exist_ok=True)
    remove_abandoned(directory / SCAN)
    try:
        inputs = planned_inputs(config)
        say(f"reading {counted(len(inputs), 'input')}")
        for opened in inputs:
            if opened.source.hub and not opened.source.revision and not is_saved(Path(opened.source.hub)):
                say(f"note: {opened.name} is not pinned; set its revision to prepare the same data again")
        if config.tokenizer is not None:  # first what may be misspelt, then the scan, which takes longer
            local = config.root / config.tokenizer
            source = local if local.exists() else config.tokenizer
            if (context := context_of(local)) is not None and config.sequence_len > context:
                say(
                    f"note: blocks of {config.sequence_len} tokens are longer than the context of "
                    f"{context} of the "
                    f"model in {local}, which cannot be trained on them"
                )
            save_tokenizer(source, config.tokenizer_revision, directory / TOKENIZER)
        if config.contamination is not None:
            grams = contamination.collect(config.root / config.contamination, config.contamination_ngram)
            contamination.save(grams, directory / GRAMS)
        if config.by_chat_template:
            for note in check_template(read_template(directory / TOKENIZER, str(config.tokenizer))):
                say(note)
        for opened in inputs:
            opened.probe()
        tree = settings(config) | {"format": FORMAT}
        write_text(directory / SETTINGS, json.dumps(tree, indent=1, sort_keys=True) + "\n")
    except BaseException:
        clear(config, SET_UP)
        raise


def clear(config: DataConfig, patterns: tuple[str, ...] = UNFINISHED) -> None:
    """Remove what was made in `.new`."""
    remove_made(config.dir, patterns)
    for directory in (config.dir / NEW / SCAN, config.dir / NEW):
        with contextlib.suppress(OSError):
            directory.rmdir()


class Planning:
    """One job's part in making the plan of a directory that is set up."""

    def __init__(self, config: DataConfig, say: Say) -> None:
        self.config, self.say = config, say
        self.place = config.dir / NEW
        self.inputs = planned_inputs(config)
        self.units = divide(self.inputs)
        self._files = {
            opened.name: path for opened in self.inputs if (path := file_of(config, opened)) is not None
        }
        self._seen = {name: signature(path) for name, path in self._files.items()}
        made_with = [settings(config), FORMAT, None if self.chat is None else self.chat.digest]
        self._keys = [digest([made_with, self._origin(unit)]) for unit in self.units]

    @cached_property
    def chat(self) -> ChatTemplate | None:
        """The tokenizer's template, where the recipe asks for it."""
        config = self.config
        return (
            read_template(self.place / TOKENIZER, str(config.tokenizer)) if config.by_chat_template else None
        )

    def _origin(self, unit: Unit) -> list[tuple[str, int, int | None, list[Signature] | int]]:
        """Return what a unit reads, and what tells that from what was there before."""
        origins = []
        for number, begin, end in unit.stretches:
            opened = self.inputs[number]
            path = self._files.get(opened.name)
            state: list[Signature] | int = opened.size
            if path is not None:
                files = sorted(path.rglob("*")) if path.is_dir() else []
                state = [self._seen[opened.name], *map(signature, files)]
            origins.append((opened.name, begin, end, state))
        return origins

    def _part(self, unit: Unit) -> Part | None:
        return Part.read(self.place / SCAN, unit, self._keys[unit.number])

    def scan(self, first: float, workers: int, alone: bool = False) -> None:
        """Make parts until all are there, by this job or others; `first`: see `shared_out`.

        alone: no other job can make the plan meanwhile, the one that is there is to be made again.
        """
        whole: set[int] = set()
        directory, near = self.place / SCAN, self.config.dedup == "near"
        total, read = sum(unit.size for unit in self.units), 0

        def count(unit: Unit) -> None:
            nonlocal read
            whole.add(unit.number)
            read += unit.size

        def done(unit: Unit) -> bool:
            if unit.number not in whole and self._part(unit) is not None:
                count(unit)
            return unit.number in whole or (not alone and (self.config.dir / PLAN).is_file())

        threshold = self.config.near_threshold if near else None
        settings = ScanSettings(threshold, self.chat, self.config.seed, self.config.validation_fraction)
        with Workers(workers, scanner, settings) as pool, progress("reading", total, self.say) as advance:
            for unit in shared_out(self.units, directory, done, first, self.say):
                key, strict = self._keys[unit.number], self.config.strict
                scan_unit(
                    directory, unit, key, self.inputs, strict, near, pool, lambda now: advance(read + now)
                )
                count(unit)

    def finish(self, workers: int) -> Hashes:
        """Decide what becomes of all rows, and save the plan in `.new`; the hashes of the sources.

        Raises UserError when that leaves nothing to train on, or a source has changed meanwhile.
        """
        config, directory, say = self.config, self.place, self.say
        parts = []
        for unit in self.units:
            part = self._part(unit)
            if part is None:
                name = self.inputs[unit.stretches[0].input].name
                raise UserError(f"{name} changed while it was read; run prepare again", code="source-changed")
            parts.append(part)
        rows = directory / ROWS
        summary = select(config, self.inputs, parts, rows, workers)
        plan = Plan(rows, np.concatenate([part.pieces for part in parts]), summary)
        if self.chat is not None:
            plan.summary["chat_template"] = self.chat.digest
        total, characters = int(plan.ends[-1]), summary["chars"]["train"]
        say(f"{counted(total, 'row')} read; {counted(characters, 'character')} of them to train on")
        facts = self._tokenizer(plan)
        if note := require_end(facts, str(config.tokenizer or config.dir / TOKENIZER), config.kind):
            say(note)
        plan.summary["tokenizer"] = facts._asdict()
        hashes = self._hashes(plan)
        encode = encode_settings(config, plan, directory)
        summary["by_words"] = words_agree(encode, plan, self.inputs)
        if not summary["by_words"]:
            say("note: with this tokenizer words get other ids than whole texts; words are not cached")
        if config.limit_tokens is not None:
            encode = encode._replace(by_words=summary["by_words"], grams=None)
            with Workers(workers, counting, encode) as pool:
                plan = limit_tokens(config, plan, self.inputs, pool, directory / LIMITED)
        say(f"not used: {'; '.join(left_out(plan.summary)) or 'nothing'}")
        for line in columns_read(plan.summary):
            say(line)
        plan.save(directory / PLAN)
        return hashes

    def _tokenizer(self, plan: Plan) -> TokenizerFacts:
        """Return the facts of the tokenizer that was saved, or is now trained."""
        if self.config.train_tokenizer is None:
            return tokenizer_facts(self.place / TOKENIZER)
        self.say(f"training a tokenizer of {self.config.train_tokenizer} pieces")
        model = self.place / TOKENIZER / "tokenizer.model"
        texts = _training_texts(self.config, plan, self.inputs)
        train_sentencepiece(texts, self.config.train_tokenizer, model)
        return save_tokenizer(model, None, self.place / TOKENIZER)

    def _hashes(self, plan: Plan) -> Hashes:
        """Return the hashes of the sources, so that the next job need not compute them."""
        hashes = Hashes(self.config.dir / HASHES)
        for source in plan.summary["sources"]:
            name = source["name"]
            if "bytes" in source and name in self._files:
                hashes.remember(self._files[name], self._seen[name], source["sha256"])
            elif name in self._files and BEYOND_LIMIT not in source:
                source["content"] = content(self._files[name], hashes)
        return hashes


def encode_settings(config: DataConfig, plan: Plan, directory: Path) -> EncodeSettings:
    """Return what workers need to encode; `directory` holds the tokenizer and the grams."""
    return EncodeSettings(
        directory / TOKENIZER,
        TokenizerFacts(**plan.summary["tokenizer"]),
        config.template,
        config.sequence_len,
        config.overlong,
        directory / GRAMS if config.contamination is not None else None,
        plan.summary.get("by_words", True),
        read_template(directory / TOKENIZER, str(config.tokenizer)) if config.by_chat_template else None,
    )


def _training_texts(config: DataConfig, plan: Plan, inputs: list[Input]) -> Iterator[str]:
    """Yield the training rows' text, an even sample of it if there is much; other rows are not parsed."""
    step = 1 + plan.summary["chars"]["train"] // TRAINING_CHARS
    for part in plan.training(inputs, config.shards, step):
        yield from map(plain_text, take(part.payload, part.spec, part.copies.tolist()))
