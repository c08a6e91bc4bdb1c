"""`prepare`: a recipe's data section -> tokenizer, shards and manifests. Runs again without harm.

First one job makes what all jobs share, while the others wait:
    tokenizer/          saved, or trained
    grams.npz           of the tasks' test rows, if data.contamination is set
    settings.json       all that decides the content; later jobs must have the same
    plan.npz            which rows each shard takes; written last
Then every job makes, if it is not there yet:
    train/, validation/ its shards, each with a note that it is whole
    manifest.json       of each split whose shards are all whole; whichever job finishes last
A job that dies leaves nothing that is believed; it is simply started again.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from common.errors import UserError, one_line
from common.files import full_disk, locked, remove_abandoned, write_once, write_text
from data_prep import contamination
from data_prep.config import DataConfig
from data_prep.encode import (
    Encoded,
    EncodeSettings,
    counting,
    encoding,
    limit_tokens,
    losses,
    words_agree,
)
from data_prep.inputs import Input
from data_prep.parallel import Workers
from data_prep.rows import plain_text, take
from data_prep.scan import SPLITS, Assignment, Part, describe, scan_inputs, scanner
from data_prep.shards import (
    FORMAT,
    MANIFEST,
    Manifest,
    content_fingerprint,
    manifest_text,
    shard_name,
    token_dtype,
)
from data_prep.sources import is_saved, open_inputs
from data_prep.templates import VERSIONS
from data_prep.tokenizer import TokenizerFacts, require_end, save_tokenizer, train_sentencepiece
from data_prep.write import overlap_path, read_note, write_shard

TOOL = f"data_prep {FORMAT}"
SETTINGS, PLAN, GRAMS, TOKENIZER, LOCK = "settings.json", "plan.npz", "grams.npz", "tokenizer", ".lock"
OVERLAP = "contamination.json"  # in each split
TRAINING_CHARS = 50_000_000  # of text at most to train a tokenizer on

Say = Callable[[str], None]


def prepare(
    config: DataConfig, shard: tuple[int, int], workers: int, force: bool, finish: bool, say: Say
) -> None:
    """Make this job's shards, and whatever they need first.

    shard: (i, n), job i of n. force: start over. finish: only write the manifests. Raises UserError.
    """
    directory = config.dir
    if force and shard[1] > 1:
        raise UserError("--force with --shard would discard other jobs' shards; run it once without --shard")
    _make_directory(directory)
    with locked(directory / LOCK, lambda: say("another job is planning; waiting for it")):
        if force or not (directory / PLAN).is_file():
            _clear(directory)
            _begin(config, workers, say)
        plan = Assignment.load(directory / PLAN)
    _compare(config, plan)
    if all((directory / split / MANIFEST).is_file() for split in _splits(config)):
        say(f"{directory} is already prepared; nothing to do")
        return
    inputs = [] if finish else open_inputs(config)
    settings = _settings(config, plan)
    if not finish:
        plan.require(inputs)
        _shards(config, plan, inputs, settings, shard, workers, say)
    _finish(config, plan, settings, finish, say)


def _make_directory(directory: Path) -> None:
    """Make the directory, and make sure that it can be written. Raises UserError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        reason = "it is a file" if directory.is_file() else error.strerror or one_line(error)
        raise UserError(f"data.dir={directory} cannot be written: {reason}; set another data.dir") from None


def _begin(config: DataConfig, workers: int, say: Say) -> None:
    """Settings, tokenizer and grams, and last the plan: once it is there, all of them are."""
    inputs = open_inputs(config)
    say(f"reading {len(inputs)} inputs")
    for one in inputs:
        if one.source.hub and not one.source.revision and not is_saved(Path(one.source.hub)):
            say(f"note: {one.name} is not pinned; set its revision to prepare the same data again")
    facts = None
    if config.train_tokenizer is None:  # first what may be misspelt, then the scan, which takes longer
        facts = _save_tokenizer(config, None, inputs, say)
    if config.contamination is not None:
        grams = contamination.collect(config.root / config.contamination, config.contamination_ngram)
        contamination.save(grams, config.dir / GRAMS)
    with Workers(workers, scanner, config.dedup == "near") as pool:
        plan = scan_inputs(config, inputs, pool)
    say(f"{len(plan.shard):,} rows, {plan.summary['chars']['train']:,} characters to train on")
    plan.summary["tokenizer"] = (facts or _save_tokenizer(config, plan, inputs, say))._asdict()
    plan = _fit_tokens(config, plan, inputs, workers, say)
    for line in describe(plan.summary):
        say(line)
    write_text(config.dir / SETTINGS, json.dumps(_decisive(config), indent=1, sort_keys=True) + "\n")
    plan.save(config.dir / PLAN)


def _fit_tokens(
    config: DataConfig, plan: Assignment, inputs: list[Input], workers: int, say: Say
) -> Assignment:
    """What takes a tokenizer to decide: whether texts are encoded by words, and data.limit_tokens."""
    plan.summary["by_words"] = words_agree(_settings(config, plan), plan, inputs)
    if not plan.summary["by_words"]:
        say("note: with this tokenizer words get other ids than whole texts; the word cache is switched off")
    if config.limit_tokens is None:
        return plan
    with Workers(workers, counting, _settings(config, plan)._replace(grams=None)) as pool:
        return limit_tokens(config, plan, inputs, pool)


def _compare(config: DataConfig, plan: Assignment) -> None:
    """Refuse settings or files that differ from those that the directory was prepared with.

    Files that are gone are not missed here.
    """
    found, wanted = json.loads((config.dir / SETTINGS).read_text()), _decisive(config)
    if found != wanted:
        keys = [k for k in sorted(found | wanted) if found.get(k) != wanted.get(k)]
        differs = "; ".join(f"{k} was {_short(found.get(k))}, now {_short(wanted.get(k))}" for k in keys)
        raise UserError(
            f"{config.dir} was prepared with other settings ({differs}); "
            "set another data.dir, or prepare with --force"
        )
    for source in plan.summary["sources"]:
        path = config.root / source["name"]
        if "bytes" in source and path.is_file() and path.stat().st_size != source["bytes"]:
            raise UserError(
                f"{path} has {path.stat().st_size:,} bytes, when {config.dir} was prepared it had "
                f"{source['bytes']:,}; prepare with --force"
            )


def _decisive(config: DataConfig) -> dict[str, Any]:
    """The settings that decide what the data hold, and where the tokenizer is from."""
    tree = config.model_dump(mode="json", exclude={"dir", "root"})
    template = VERSIONS[config.template] if config.kind == "instruct" else None
    return tree | {"format": FORMAT, "template": template}


def _save_tokenizer(
    config: DataConfig, plan: Assignment | None, inputs: list[Input], say: Say
) -> TokenizerFacts:
    """The tokenizer in its place; one that is trained needs the rows that were scanned."""
    with full_disk(config.dir):
        facts = _make_tokenizer(config, plan, inputs, say)
    name = str(config.tokenizer or config.dir / TOKENIZER)
    if note := require_end(facts, name, config.kind):
        say(note)
    return facts


def _make_tokenizer(
    config: DataConfig, plan: Assignment | None, inputs: list[Input], say: Say
) -> TokenizerFacts:
    place = config.dir / TOKENIZER
    if config.train_tokenizer is not None:
        assert plan is not None
        say(f"training a tokenizer of {config.train_tokenizer} pieces")
        model = config.dir / TOKENIZER / "tokenizer.model"
        train_sentencepiece(_training_texts(config, plan, inputs), config.train_tokenizer, model)
        return save_tokenizer(model, None, place)
    assert config.tokenizer is not None
    local = config.root / config.tokenizer
    source = local if local.exists() else config.tokenizer
    return save_tokenizer(source, config.tokenizer_revision, place)


def _settings(config: DataConfig, plan: Assignment) -> EncodeSettings:
    """What workers need to encode."""
    return EncodeSettings(
        config.dir / TOKENIZER,
        TokenizerFacts(**plan.summary["tokenizer"]),
        config.template,
        config.block,
        config.overlong,
        config.dir / GRAMS if config.contamination is not None else None,
        plan.summary.get("by_words", True),
    )


def _training_texts(config: DataConfig, plan: Assignment, inputs: list[Input]) -> Iterator[str]:
    """The training rows' text, an even sample of it if there is much."""
    step = 1 + plan.summary["chars"]["train"] // TRAINING_CHARS
    training = np.flatnonzero((plan.shard >= 0) & (plan.shard < config.shards))
    parts = plan.once(training).parts(inputs, 0)
    rows = (row for part in parts for row in take(part.payload, part.spec, part.copies.tolist()))
    return map(plain_text, islice(rows, 0, None, step))


def _shards(
    config: DataConfig,
    plan: Assignment,
    inputs: list[Input],
    settings: EncodeSettings,
    shard: tuple[int, int],
    workers: int,
    say: Say,
) -> None:
    """Make those of this job's shards that are not there."""
    index, jobs = shard
    todo = []
    for number, split in enumerate(_splits(config)):
        directory = config.dir / split
        directory.mkdir(exist_ok=True)
        remove_abandoned(directory)
        for one in range(index, config.shards, jobs):
            if read_note(directory, one, config.shards) is None:
                todo.append((directory, one, number * config.shards + one))
    if not todo:
        say(f"all shards of job {index}/{jobs} are there")
        return
    dtype = token_dtype(settings.tokenizer.vocab_size)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)
    with Workers(min(workers, len(plan.pieces)), encoding, settings) as pool, bar:
        count = sum(plan.part_count(planned) for _, _, planned in todo)
        stream = _Shards(plan, inputs, [planned for _, _, planned in todo])
        stream.encoded = pool.map(bar.track(stream.parts(), count, description="encoding"))
        began, tokens = time.perf_counter(), 0
        quotas = plan.summary.get("token_quotas", [])  # of the training shards, which come first
        for directory, one, planned in todo:
            quota = quotas[planned] if planned < len(quotas) else None
            info = write_shard(directory, one, config, dtype, stream.of(planned), quota)
            tokens += info.tokens
            say(f"{directory.name}/{info.file}: {info.rows:,} rows, {info.tokens:,} tokens")
        seconds = time.perf_counter() - began
        rate = f"{tokens:,} tokens in {seconds:,.1f} s, {tokens / seconds:,.0f} tokens/s"
        say(f"shards made: {len(todo)}, {rate}")


class _Shards:
    """The parts of several shards as one stream, so that workers begin the next shard while this process
    finishes the last; and what became of them, given back to each shard."""

    def __init__(self, plan: Assignment, inputs: list[Input], planned: list[int]) -> None:
        self.plan, self.inputs, self.planned = plan, inputs, planned
        self.encoded: Iterator[Encoded] = iter(())  # of `parts`, in order
        self._order: deque[int] = deque()  # shards of the parts that were taken and have not come back
        self._next: tuple[int, Encoded] | None = None

    def parts(self) -> Iterator[Part]:
        """All parts, shard after shard."""
        for planned in self.planned:
            for part in self.plan.parts(self.inputs, planned):
                self._order.append(planned)
                yield part

    def of(self, planned: int) -> Iterator[Encoded]:
        """What is next in the stream, as long as it belongs to the shard."""
        while True:
            if self._next is None:
                one = next(self.encoded, None)
                if one is None:
                    return
                self._next = self._order.popleft(), one
            if self._next[0] != planned:
                return
            (_, one), self._next = self._next, None
            yield one


def _finish(config: DataConfig, plan: Assignment, settings: EncodeSettings, required: bool, say: Say) -> None:
    """Write the manifest of every split whose shards are all there; exactly one job does."""
    for split in _splits(config):
        directory = config.dir / split
        infos = [read_note(directory, i, config.shards) for i in range(config.shards)]
        missing = [i for i, info in enumerate(infos) if info is None]
        if missing:
            what = f"{split}: {len(missing)} of {config.shards} shards are still to be made"
            if required:
                raise UserError(f"{what}, the first is {shard_name(missing[0], config.shards)}")
            say(what)
            continue
        if config.contamination is not None:
            _report_overlap(config, directory, say)
        manifest = _manifest(config, plan, settings, split, [i for i in infos if i is not None])
        if write_once(directory / MANIFEST, manifest_text(manifest)):
            say(
                f"{directory}: {manifest.rows:,} rows of {config.block}, {manifest.tokens:,} tokens, "
                f"{manifest.waste:.2%} padding"
            )
            for line in losses(manifest.counts, manifest.documents, config.block):
                say(f"{directory}: {line}")


def _report_overlap(config: DataConfig, directory: Path, say: Say) -> None:
    """contamination.json, beside the manifest that is written next."""
    notes = [json.loads(overlap_path(directory, i, config.shards).read_text()) for i in range(config.shards)]
    hits = {gram for note in notes for gram in note["grams"]}
    documents = sum(note["documents"] for note in notes)
    n = config.contamination_ngram
    found = contamination.report(contamination.load(config.dir / GRAMS), hits, documents, n)
    write_text(directory / OVERLAP, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    tasks = ", ".join(f"{name} {task['overlapping']}/{task['rows']}" for name, task in found["tasks"].items())
    say(f"{directory.name}: test rows that share {n} words with {documents:,} documents: {tasks}")


def _manifest(
    config: DataConfig, plan: Assignment, settings: EncodeSettings, split: str, infos: list[Any]
) -> Manifest:
    decisive, facts = _decisive(config), settings.tokenizer
    counts: Counter[str] = Counter()
    for info in infos:
        counts.update(info.counts)
    total = {
        key: sum(getattr(info, key) for info in infos)
        for key in ("rows", "tokens", "valid_tokens", "documents", "segments")
    }
    if not total["rows"]:
        what = "training" if split == "train" else "validation"
        if config.kind == "instruct":
            raise UserError(
                f"no {what} example has a response within data.block={config.block} tokens; set a larger one "
                "and prepare with --force"
            )
        more = " or fewer data.shards" if config.shards > 1 else ""
        raise UserError(
            f"the {what} data are less than one block of {config.block} tokens in every shard; "
            f"set a smaller data.block{more}, or add {what} data, and prepare with --force"
        )
    return Manifest(
        format=FORMAT,
        tool=TOOL,
        kind=config.kind,
        split=split,
        block=config.block,
        vocab_size=facts.vocab_size,
        tokenizer_fingerprint=facts.fingerprint,
        bos_id=facts.bos_id,
        eos_id=facts.eos_id,
        template=decisive["template"],
        fingerprint=content_fingerprint(config.kind, config.block, facts.fingerprint, infos),
        config=decisive,
        sources=plan.summary["sources"],
        rejected=plan.summary["rejected"],
        counts=dict(sorted(counts.items())),
        **total,
        waste=round(1 - total["tokens"] / max(1, total["rows"] * config.block), 6),
        shards=infos,
    )


def _splits(config: DataConfig) -> list[str]:
    return list(SPLITS) if config.validation or config.validation_fraction else [SPLITS[0]]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _clear(directory: Path) -> None:
    """Remove what an earlier preparation made, and only that; first the plan, which vouches for the rest."""
    for name in (PLAN, SETTINGS, GRAMS):
        (directory / name).unlink(missing_ok=True)
    for name in (*SPLITS, TOKENIZER):
        shutil.rmtree(directory / name, ignore_errors=True)
    remove_abandoned(directory)
