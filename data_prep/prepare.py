"""`prepare`: a recipe's data section -> tokenizer, shards and manifests. Runs again without harm.

First all jobs read the sources and one of them decides (see scan/planning.py), which gives what all share:
    data_prep.json      the mark of a directory that was made here: nothing is removed without it
    tokenizer/          saved, or trained
    grams.npz           of the tasks' test rows, if data.contamination is set
    settings.json       all that decides the content; later jobs must have the same
    plan.parquet            which rows each shard takes; written last
Then every job makes, if it is not there or not as it was made:
    train/, validation/ its shards, each with a note that it is whole; validation-NAME/ of a set with a name
    manifest.json       of each split whose shards are all whole; whichever job finishes last
    hashes.json         of sources and shards, so that the next job need not compute them
A job that dies leaves nothing that is believed; it is simply started again.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from tokenizers import Tokenizer

from emo.common.errors import UserError
from emo.common.files import (
    Hashes,
    claim,
    foreign,
    full_disk,
    remove_made,
    signature,
    write_once,
    write_text,
)
from emo.common.lease import Lease, joined, users, waited
from emo.common.parallel import Workers
from emo.common.progress import progress
from emo.common.text import counted
from emo.common.untrusted import read_json
from emo.data_prep import contamination
from emo.data_prep.config import TRAIN, VALIDATION, DataConfig, splits_made
from emo.data_prep.encode import (
    PartStream,
    encoding,
)
from emo.data_prep.inputs import Input
from emo.data_prep.plan import Plan
from emo.data_prep.planning import Planning, clear, encode_settings, set_up
from emo.data_prep.reencode import PlainEncoder, ShardCheck
from emo.data_prep.shards import (
    MANIFEST,
    ShardInfo,
    manifest_text,
    shard_name,
    token_dtype,
)
from emo.data_prep.verify import (
    Missing,
    check_inputs,
    check_settings,
    check_tokenizer,
    load_plan,
    missing_shards,
)
from emo.data_prep.write import (
    GRAMS,
    HASHES,
    JOBS,
    MARKER,
    NEW,
    NOTE,
    OF_ALL,
    OF_SPLIT,
    OVERLAP,
    PLAN,
    PLANNING,
    SETTINGS,
    TOKENIZER,
    UNFINISHED,
    left_out,
    losses,
    manifest_of,
    overlap_path,
    read_note,
    write_shard,
)

Say = Callable[[str], None]


def prepare(
    config: DataConfig, shard: tuple[int, int], workers: int, force: bool, finish: bool, say: Say
) -> None:
    """Make this job's shards, and whatever they need first.

    shard: (i, n), job i of n. force: start over. finish: only write the manifests. Raises UserError.
    """
    if force and shard[1] > 1:
        raise UserError(
            "--force with --shard would discard other jobs' shards; run it once without --shard",
            code="force-with-shard",
        )
    claim(config.dir, MARKER, NOTE, "data.dir")
    with contextlib.ExitStack() as stack:
        stack.enter_context(full_disk(config.dir))
        with _alone(config, say):
            if force or not (config.dir / PLAN).is_file():
                _begin(config, force, workers, say)
            else:
                clear(config)  # what a job that died had still to clear
            stack.enter_context(joined(config.dir / JOBS))
        if not (config.dir / PLAN).is_file():
            planning = Planning(config, say)
            planning.scan(shard[0] / shard[1], workers)
            with _alone(config, say):
                _decide(config, planning, workers, say)
        plan = load_plan(config)
        hashes = Hashes(config.dir / HASHES)
        inputs = check_inputs(config, plan, hashes)
        tokenizer = check_tokenizer(config, plan)
        todo = [] if finish else missing_shards(config, hashes, shard, say)
        if not todo and all(_as_expected(config, plan, split) for split in config.splits):
            say(f"{config.dir} is already prepared; nothing to do")
        else:
            if not todo and not finish:
                say(f"all shards of job {shard[0]}/{shard[1]} are there")
            if todo:
                _shards(config, plan, inputs, tokenizer, todo, workers, hashes, say)
            _finish(config, plan, finish, say)
        hashes.save()
    lost = left_out(plan.summary)
    for split in config.splits:
        lost += [f"{split}: {line}" for line in losses(config, split, list(_notes(config, split).values()))]
    say(f"{config.dir}: cut or dropped: {'; '.join(lost) or 'nothing'}")


def _alone(config: DataConfig, say: Say) -> AbstractContextManager[None]:
    """Return a context in which no other job sets up or decides."""
    return waited(
        Lease(config.dir / PLANNING, "plan"),
        lambda holder: say(f"another job is planning ({holder}); waiting for it"),
    )


def _begin(config: DataConfig, force: bool, workers: int, say: Say) -> None:
    """Set up the plan, unless other jobs are making it: then it must be of the same settings.

    Under `force` it is also made, before another job can begin: what is there is cleared when all is made and
    nothing can fail any more.
    """
    others = users(config.dir / JOBS)
    if others:
        if force or not (config.dir / NEW / SETTINGS).is_file():
            raise UserError(
                f"another job ({others[0]}) is working in {config.dir}; wait for it, or set another data.dir",
                code="in-use",
            )
        check_settings(config, config.dir / NEW)
        return
    if not force and (config.dir / SETTINGS).is_file():
        check_settings(config)
    splits = _splits_there(config)
    if not force and any((config.dir / split / MANIFEST).is_file() for split in splits):
        raise UserError(
            f"{config.dir} holds prepared data, but its {PLAN} is gone; run prepare with --force",
            code="plan-gone",
        )
    patterns = (*OF_ALL, *_of_splits(config, *OF_SPLIT), *UNFINISHED, MARKER, f"{PLANNING}/*", f"{JOBS}/*")
    other = next(foreign(config.dir, patterns), None)
    if other is not None:
        raise UserError(
            f"{other} was not made by prepare; move it away, or set another data.dir", code="foreign-file"
        )
    set_up(config, force, say)
    if force:
        try:
            planning = Planning(config, say)
            planning.scan(0, workers, alone=True)
            _put_in_place(config, planning, workers)
        finally:
            clear(config)


def _decide(config: DataConfig, planning: Planning, workers: int, say: Say) -> None:
    """Make the plan of what has been scanned, unless another job has."""
    if (config.dir / PLAN).is_file():
        return
    if not (config.dir / NEW / SETTINGS).is_file():  # a job died as it put all in place
        set_up(config, False, say)
    _put_in_place(config, planning, workers)


def _put_in_place(config: DataConfig, planning: Planning, workers: int) -> None:
    """Make the plan of what has been scanned, and let it and what belongs to it take the place of others."""
    hashes = planning.finish(workers)
    (config.dir / PLAN).unlink(missing_ok=True)  # first, as it vouches for the rest
    remove_made(config.dir, _of_splits(config, MANIFEST))
    remove_made(config.dir, _of_splits(config, *OF_SPLIT))  # before the settings, which name them
    remove_made(config.dir, OF_ALL)
    for name in (SETTINGS, TOKENIZER, GRAMS, PLAN):
        if (config.dir / NEW / name).exists():
            (config.dir / NEW / name).replace(config.dir / name)
    hashes.save()
    clear(config)


def _splits_there(config: DataConfig) -> tuple[str, ...]:
    """Return the splits that may be in the directory: the recipe's, and those of the settings before."""
    earlier: tuple[str, ...] = ()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        earlier = splits_made(read_json(config.dir / SETTINGS))
    return tuple(dict.fromkeys((TRAIN, VALIDATION, *config.splits, *earlier)))


def _of_splits(config: DataConfig, *names: str) -> list[str]:
    """Return names in every split that may be there."""
    return [f"{split}/{name}" for split in _splits_there(config) for name in names]


def _shards(
    config: DataConfig,
    plan: Plan,
    inputs: list[Input] | str,
    tokenizer: Tokenizer,
    todo: list[Missing],
    workers: int,
    hashes: Hashes,
    say: Say,
) -> None:
    """Make shards; `inputs` may be the reason why there are none."""
    if isinstance(inputs, str):
        raise UserError(
            f"{counted(len(todo), 'shard')} must be made again, but {inputs}", code="sources-gone"
        )
    encode = encode_settings(config, plan, config.dir)
    dtype = token_dtype(encode.tokenizer.vocab_size)
    plain = PlainEncoder(tokenizer, encode.tokenizer)
    workers = min(workers, len(plan.pieces))
    stream = PartStream(plan, inputs, [planned for _, _, planned in todo])
    with Workers(workers, encoding, encode) as pool, progress("tokenising", stream.size(), say) as advance:
        stream.encoded = pool.map(stream.parts(advance))
        began, tokens = time.perf_counter(), 0
        quotas = plan.summary.get("token_quotas", [])  # of the training shards, which come first
        for directory, number, planned in todo:
            quota = quotas[planned] if planned < len(quotas) else None
            check = ShardCheck(plain, config.template, config.sequence_len, config.overlong, encode.chat)
            info = write_shard(directory, number, config, dtype, stream.of(planned), check, quota)
            tokens += info.tokens
            path = directory / info.file
            hashes.remember(path, signature(path), info.sha256)
            say(f"{directory.name}/{info.file}: {counted(info.rows, 'row')}, {counted(info.tokens, 'token')}")
        seconds = time.perf_counter() - began
        rate = f"{counted(tokens, 'token')} in {seconds:,.1f} s, {tokens / seconds:,.0f} tokens/s"
        say(f"shards made: {len(todo)}, {rate}")


def _finish(config: DataConfig, plan: Plan, required: bool, say: Say) -> None:
    """Write the manifest of every split whose shards are all there; exactly one job does."""
    for split in config.splits:
        directory, infos = config.dir / split, _notes(config, split)
        if len(infos) < config.shards:
            missing = [i for i in range(config.shards) if i not in infos]
            report = f"{split}: {len(missing)} of {config.shards} shards are still to be made"
            if required:
                raise UserError(
                    f"{report}, the first is {shard_name(missing[0], config.shards)}", code="shards-missing"
                )
            say(report)
            continue
        if config.contamination is not None:
            _report_overlap(config, directory, say)
        manifest = manifest_of(config, plan.summary, split, list(infos.values()))
        file, text = directory / MANIFEST, manifest_text(manifest)
        if write_once(file, text):
            say(
                f"{directory}: {counted(manifest.rows, 'row')} of {config.sequence_len}, "
                f"{counted(manifest.tokens, 'token')}, {manifest.waste:.2%} padding"
            )
        elif file.read_bytes() != text.encode():
            write_text(file, text)
            say(f"{file} was not that of its shards; written again")


def _notes(config: DataConfig, split: str) -> dict[int, ShardInfo]:
    """Return the notes of a split's shards that are there, by number."""
    notes = {i: read_note(config.dir / split, i, config.shards) for i in range(config.shards)}
    return {i: info for i, info in notes.items() if info is not None}


def _as_expected(config: DataConfig, plan: Plan, split: str) -> bool:
    """Return whether a split is complete and its manifest is what its shards' notes give."""
    directory, infos = config.dir / split, _notes(config, split)
    if len(infos) < config.shards or not (directory / MANIFEST).is_file():
        return False
    if config.contamination is not None and not (directory / OVERLAP).is_file():
        return False
    text = manifest_text(manifest_of(config, plan.summary, split, list(infos.values())))
    return (directory / MANIFEST).read_bytes() == text.encode()


def _report_overlap(config: DataConfig, directory: Path, say: Say) -> None:
    """Write contamination.json, beside the manifest that is written next."""
    paths = [overlap_path(directory, i, config.shards) for i in range(config.shards)]
    notes = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    hits = {gram for note in notes for gram in note["grams"]}
    documents = sum(note["documents"] for note in notes)
    n = config.contamination_ngram
    report = contamination.report(contamination.load(config.dir / GRAMS), hits, documents, n)
    write_text(directory / OVERLAP, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    counts = (f"{name} {task['overlapping']}/{task['rows']}" for name, task in report["tasks"].items())
    say(f"{directory.name}: test rows that share {n} words with {documents:,} documents: {', '.join(counts)}")
