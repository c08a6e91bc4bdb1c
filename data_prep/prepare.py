"""`prepare`: the data section of a recipe -> tokenizer, shards and manifests. It can be repeated.

First all jobs read the sources, and one of them makes the files that all jobs share:
    data_prep.json      marks a directory made by prepare: nothing is removed without it
    tokenizer/          saved, or trained
    grams.npz           n-grams of the tasks' test rows, if data.contamination is set
    settings.json       all settings that decide the content. Later jobs must have the same
    rows.parquet        the rows of each shard
    plan.parquet        how they are read, and the counts of all rows. Written last
Until the plan is complete these files are in `.new`, with the parts of the scan and the stages of the
selection. They stay when jobs die. The next jobs continue from them if their settings and sources are the
same.

Then every job makes the missing or changed ones of:
    train/, validation/ its shards, each with a note that it is complete. validation-NAME/ for a named set
    manifest.json       of each split whose shards are all complete. Written by the job that finishes last
    hashes.json         hashes of sources and shards, so that the next job need not compute them
    costs-*.json        duration and memory of each job
    forecast.json       what `plan --data` predicted
If a job dies, start it again: incomplete files are made again.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from emo.common.cli.progress import progress
from emo.common.errors import UserError, one_line
from emo.common.io.files import (
    PART,
    Hashes,
    claim_directory,
    find_foreign_files,
    full_disk,
    remove_abandoned,
    remove_matching,
    signature,
    upload_tree,
    write_text,
)
from emo.common.io.lease import Lease, living_users, register_user, wait_and_hold
from emo.common.io.mirror import refresh
from emo.common.io.objects import existed_recently, in_store, shown
from emo.common.parallel import WorkerPool
from emo.common.text import counted

from .checks import (
    PlannedInputs,
    check_inputs,
    check_settings,
    check_tokenizer,
    hash_content,
    hash_tasks,
    local_file,
    planned_inputs,
    read_chat_template,
)
from .config import FORMAT, MARKER, SETTINGS, TRAIN, VALIDATION, DataConfig, settings
from .encoding.chat_templates import BUILT_IN
from .encoding.chats import check_template
from .encoding.tokenizer import (
    FILES,
    TokenizerFacts,
    read_tokenizer,
    require_end,
    set_chat_template,
)
from .selection.plan import ROWS, Plan, ShardPart
from .selection.scan import BEYOND_LIMIT, Scan
from .selection.select import Selection
from .selection.similarity import contamination
from .selection.stages import PlanFinishedError
from .selection.token_limit import TokenLimit
from .shards import costs, manifests, tokenizer
from .shards.encode import SPECIAL, Encoded, EncodeSettings, counting, encoding, words_agree
from .shards.format import HASHES, MANIFEST, ShardInfo, read_manifest, shard_name, token_dtype
from .shards.manifests import GRAMS, OVERLAP
from .shards.reencode import PlainEncoder, ShardCheck
from .shards.scores import ABOUT, BEGUN, HASH, SCORES
from .shards.write import (
    PLAN,
    TOKENIZER,
    describe_columns,
    describe_left_out,
    describe_losses,
    overlap_path,
    read_note,
    write_shard,
)
from .sources.files import AGAIN
from .sources.hub import is_saved
from .sources.reader import SourceReader

NEW = ".new"  # the directory of planning jobs
SCAN = "scan"  # in .new: the parts of the scan
PIECES = "pieces.parquet"  # in .new: the pieces of the plan before it is complete
DRAFT = "draft.parquet"  # in .new: the plan without data.limit_tokens
PLANNING = ".planning"  # lease of the planning job
JOBS = ".jobs"  # leases of all running jobs
NOTE = '{"made_by": "emo prepare", "meaning": "prepare --force may clear this directory"}\n'

# Patterns of files that prepare makes.
SHARED = (*(f"{TOKENIZER}/{file}" for file in FILES), GRAMS, SETTINGS, ROWS, PLAN)
SET_UP = (f"{NEW}/*", f"{NEW}/{TOKENIZER}/*")
UNFINISHED = (f"{NEW}/*", f"{NEW}/*/*", f"{NEW}/*/*/*")  # the last: leases of units
OF_SPLIT = ("shard-[0-9]*-of-[0-9]*.arrow", "shard-[0-9]*-of-[0-9]*.json", MANIFEST, OVERLAP, f".*{PART}")
OF_SCORES = tuple(f"{SCORES}/*/{name}" for name in (ABOUT, BEGUN, "*.npy", f"*{HASH}", f".*{PART}"))
SPLITS = (TRAIN, VALIDATION, f"{VALIDATION}-*")
OF_SPLITS = tuple(f"{split}/{name}" for split in SPLITS for name in (*OF_SPLIT, *OF_SCORES))
OF_ALL = (*SHARED, HASHES, costs.FILES, f".*{PART}")
# The files of other jobs that a job reads, besides shards and the files that share the work of planning.
NOTES = tuple(f"{split}/{name}" for split in SPLITS for name in ("shard-*.json", MANIFEST, OVERLAP))
READ = (*SHARED, *SET_UP, *NOTES)

Say = Callable[[str], None]


class LoadedPlan(NamedTuple):
    """A finished plan, and what is needed to make its shards."""

    plan: Plan
    sources: PlannedInputs
    tokenizer: Tokenizer


def _plan_rows(job: Preparation, begin: float) -> None:
    """Scan the sources and select rows together with the other jobs, until the plan exists.

    begin: Part of the units, from 0 to 1, at which this job starts.
    """
    plan = job.config.dir / PLAN
    scan = job.scan(begin)
    selection = job.select(scan, begin)
    if job.config.limit_tokens is not None and selection is not None:
        with job.lock_planning():
            if not plan.is_file():
                selection.share(lambda: job.draft(scan, selection))
        selection.share(lambda: job.limit(selection))
    finished = False
    while not finished:  # another job takes over from one that was stopped for long
        with job.lock_planning():
            finished = plan.is_file() or job.make_plan(scan, selection)
            if finished:
                job.clear()  # also the local copies on this host


def prepare(
    config: DataConfig,
    shard: tuple[int, int],
    workers: int,
    force: bool,
    finish: bool,
    say: Say,
    kind: type[Preparation] | None = None,
) -> None:
    """Make the shards of one job, and all files that they need. Raises UserError.

    Args:
        config: The data section of the recipe.
        shard: (i, n), this is job i of n.
        workers: Number of worker processes.
        force: Discard prepared data and start over.
        finish: Make no shards, only write the manifests.
        say: Prints a line for the user.
        kind: The class of the job, if other processes do its work.
    """
    if force and shard[1] > 1:
        raise UserError(
            "--force with --shard would discard the shards of other jobs. Run it once without --shard",
            code="force-with-shard",
        )
    claim_directory(config.dir, MARKER, NOTE, "data.dir")
    job = (kind or Preparation)(config, workers, say)
    with contextlib.ExitStack() as stack:
        stack.enter_context(full_disk(config.dir))
        with job.lock_planning():
            if force or not (config.dir / PLAN).is_file():
                job.begin(force)
            else:
                job.clear()  # files of a job that died
            stack.enter_context(register_user(config.dir / JOBS))
        if not (config.dir / PLAN).is_file():
            _plan_rows(job, shard[0] / shard[1])
        hashes = Hashes(config.dir / HASHES)
        loaded = job.load(hashes)
        missing = [] if finish else job.find_missing(hashes, shard)
        if missing:
            job.make_shards(loaded, missing, hashes)
            job.refresh()
        sealed = [manifests.seal(config, loaded.plan.summary, split, finish, say) for split in config.splits]
        if not missing and all(sealed):
            say(f"{job.name} is already prepared; nothing to do")
        elif not missing and not finish:
            say(f"all shards of job {shard[0]}/{shard[1]} exist")
        hashes.save()
        job.stopwatch.save(config.dir, shard, workers)
    lost = describe_left_out(loaded.plan.summary)
    special = 0
    for split in config.splits:
        notes = list(manifests.read_notes(config, split).values())
        lost += [f"{split}: {line}" for line in describe_losses(config, split, notes)]
        special += sum(note.counts.get(SPECIAL, 0) for note in notes)
    say(f"{job.name}: cut or dropped: {'; '.join(lost) or 'nothing'}")
    if special:
        documents = counted(special, "document")
        advice = "are read as text. For chats, set data.kind=instruct"
        say(f"{job.name}: note: {documents} with special tokens of the tokenizer, which {advice}")


class Preparation:
    """The work of one job in the preparation of a directory."""

    def __init__(self, config: DataConfig, workers: int, say: Say) -> None:
        self.config = config
        self.workers = workers
        self.say = say
        self.new = config.dir.absolute() / NEW  # pyarrow takes a relative name with a colon for an address
        self.planning = Lease(config.dir / PLANNING, "plan")
        self.name = shown(config.dir)
        self.stopwatch = costs.Stopwatch()

    def refresh(self) -> None:
        """Copy what other jobs have written to a store, except shards, parts of the scan and stages."""
        refresh(self.config.dir, READ)

    # --- planning -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lock_planning(self) -> Iterator[None]:
        """Let no other job plan during a block, which has the files of earlier plans."""
        with wait_and_hold(
            self.planning, lambda holder: self.say(f"another job is planning ({holder}); waiting for it")
        ):
            self.refresh()
            yield

    def begin(self, force: bool) -> None:
        """Set up the plan, unless other jobs with the same settings are making it.

        With `force` the plan is also made, before another job can begin. Prepared data are only cleared when
        the new plan is complete and nothing can fail any more.
        """
        directory = self.config.dir
        others = living_users(directory / JOBS)
        if others and (force or not (self.new / SETTINGS).is_file()):
            raise UserError(
                f"another job ({others[0]}) is using {self.name}. Wait for it, or set another data.dir",
                code="in-use",
            )
        if others:
            check_settings(self.config, self.new)
            return
        if not force and (directory / SETTINGS).is_file():
            check_settings(self.config, directory)
        if not force and any(directory.glob(f"*/{MANIFEST}")):
            raise UserError(
                f"{self.name} holds prepared data without {PLAN}. Run prepare with --force",
                code="plan-gone",
            )
        patterns = (*OF_ALL, *OF_SPLITS, *UNFINISHED, MARKER, costs.FORECAST, f"{PLANNING}/*", f"{JOBS}/*")
        other = next(find_foreign_files(directory, patterns), None)
        if other is not None:
            raise UserError(
                f"{shown(other)} was not made by prepare. Move it, or set another data.dir",
                code="foreign-file",
            )
        self.set_up(force)
        if force:
            try:
                scan = self.scan(0, alone=True)
                self.make_plan(scan, self.select(scan, 0, alone=True))
            finally:
                self.clear()

    def set_up(self, force: bool = False) -> None:
        """Make the files in `.new` that need no scan. The settings come last and mark them as complete.

        With `force` the parts of an earlier scan are removed too. Raises UserError for all errors that can be
        found before the rows are read.
        """
        config = self.config
        say = self.say
        remove_matching(config.dir, UNFINISHED if force else SET_UP)
        (self.new / SCAN).mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.new / SCAN)
        try:
            inputs = planned_inputs(config)
            say(f"reading {counted(len(inputs), 'input')}")
            for reader in inputs:
                if reader.source.hub and not reader.source.revision and not is_saved(Path(reader.source.hub)):
                    say(f"note: {reader.name} is not pinned. Set its revision to prepare the same data again")
            if config.tokenizer is not None:  # may be misspelt, so before the scan, which takes longer
                tokenizer.save(config, self.new / TOKENIZER, say)
            if config.contamination is not None:
                grams = contamination.collect(config.root / config.contamination, config.contamination_ngram)
                contamination.save(grams, self.new / GRAMS)
            chat = read_chat_template(config, self.new)
            if chat is not None:
                for note in check_template(chat):
                    say(note)
            for reader in inputs:
                reader.probe()
            if chat is not None and config.template in BUILT_IN:
                set_chat_template(self.new / TOKENIZER, chat.text)
            elif config.tokenizer is not None:
                tokenizer.set_served_template(config, config.tokenizer, self.new / TOKENIZER, say)
            upload_tree(self.new / TOKENIZER)
            tree = settings(config) | {"format": FORMAT}
            write_text(self.new / SETTINGS, json.dumps(tree, indent=1, sort_keys=True) + "\n")
        except BaseException:
            self.clear(SET_UP)
            raise

    def clear(self, patterns: tuple[str, ...] = UNFINISHED) -> None:
        """Remove files in `.new`, unless another job has taken over the planning and uses them."""
        if not self.planning.is_held():
            return
        remove_matching(self.config.dir, patterns)
        for directory in (self.new / SCAN, self.new):
            with contextlib.suppress(OSError):
                directory.rmdir()

    def scan(self, first: float, alone: bool = False) -> Scan:
        """Read the sources, together with other jobs.

        first: where to begin, see `Scan.run`. alone: no other job can finish the plan, which is made again.
        """
        plan = self.config.dir / PLAN
        scan = self.open_scan()
        with self.stopwatch.time("reading"):
            scan.run(first, self.workers, lambda: not alone and existed_recently(plan), self.say)
        return scan

    def open_scan(self) -> Scan:
        """Return the scan of the sources, whose settings are in `.new`."""
        chat = read_chat_template(self.config, self.new)
        return Scan(self.config, planned_inputs(self.config), chat, self.new / SCAN)

    def select(self, scan: Scan, first: float, alone: bool = False) -> Selection | None:
        """Select the scanned rows, together with other jobs.

        Returns None if another job has finished the plan. first, alone: see `scan`.
        """
        plan = self.config.dir / PLAN
        if not alone and existed_recently(plan):
            return None
        refresh(self.new / SCAN, ["*.parquet"])
        parts = [scan.parts[unit.number] for unit in scan.units]
        selection = Selection(self.config, scan.inputs, parts, self.new)
        with self.stopwatch.time("selection"):
            done = selection.run(first, lambda: not alone and existed_recently(plan), self.say)
        return selection if done else None

    def draft(self, scan: Scan, selection: Selection) -> Plan:
        """Return the plan without data.limit_tokens. With a limit it is saved, for `limit` in all jobs.

        Raises UserError if nothing is left to train on.
        """
        config = self.config
        say = self.say
        inputs = scan.inputs
        if not (self.new / SETTINGS).is_file():  # a job died while it published the plan
            self.set_up()
        if (self.new / DRAFT).is_file():
            return Plan.load(self.new / DRAFT)
        plan = selection.plan(self.new / PIECES, scan.first_fault)
        summary = plan.summary
        if scan.chat is not None:
            summary["chat_template"] = scan.chat.digest
        characters = counted(summary["chars"][TRAIN], "character")
        say(f"{counted(int(plan.input_ends[-1]), 'row')} read; {characters} of them to train on")
        facts = tokenizer.train_or_read(config, plan, inputs, self.new / TOKENIZER, say)
        if note := require_end(facts, str(config.tokenizer or config.dir / TOKENIZER), config.kind):
            say(note)
        summary["tokenizer"] = facts._asdict()
        summary["by_words"] = words_agree(self.encode_settings(summary, self.new), plan, inputs)
        if not summary["by_words"]:
            say("note: with this tokenizer words have other ids than complete texts; words are not cached")
        if config.limit_tokens is not None:
            plan.save(self.new / DRAFT)
            for name in (TOKENIZER, ROWS, DRAFT):
                upload_tree(self.new / name)
        return plan

    def limit(self, selection: Selection) -> TokenLimit:
        """Select the rows within data.limit_tokens, together with other jobs, after `draft`."""
        plan = Plan.load(self.new / DRAFT)
        encode = self.encode_settings(plan.summary, self.new)._replace(grams=None)
        with WorkerPool(self.workers, counting, encode) as pool, self.stopwatch.time("selection"):
            return TokenLimit(self.config, plan, pool, selection)

    def make_plan(self, scan: Scan, selection: Selection | None) -> bool:
        """Make the plan of the selected rows and publish it with its files. Raises UserError, see `draft`.

        Returns False if another job has done so or has taken over.
        """
        assert selection is not None, "the plan was removed"
        return selection.share(lambda: self._finish_plan(scan, selection))

    def _finish_plan(self, scan: Scan, selection: Selection) -> None:
        plan = self.draft(scan, selection)
        if self.config.limit_tokens is not None:
            plan = self.limit(selection).save()
        hashes = self._hash_sources(plan, scan.inputs)
        self.say(f"not used: {'; '.join(describe_left_out(plan.summary)) or 'nothing'}")
        for line in (*describe_columns(plan.summary), *plan.summary.pop("notes")):
            self.say(line)
        plan.save(self.new / PLAN)
        if not self.planning.is_held():  # it was stopped, or had no network, for too long
            raise PlanFinishedError
        self._publish()
        hashes.save()

    def _hash_sources(self, plan: Plan, inputs: list[SourceReader]) -> Hashes:
        """Return hashes of the local sources, and add missing ones and that of the tasks to the plan."""
        hashes = Hashes(self.config.dir / HASHES)
        if (tasks := hash_tasks(self.config, hashes)) is not None:
            plan.summary["contamination"] = tasks
        for reader, source in zip(inputs, plan.summary["sources"], strict=True):
            path = local_file(reader)
            if path is not None and "bytes" in source:
                hashes.remember(path, reader.state[0], source["sha256"])
            elif path is not None and BEYOND_LIMIT not in source:
                source["content"] = hash_content(path, hashes)
            elif "://" in reader.name:
                source["state"] = reader.state
        return hashes

    def _publish(self) -> None:
        """Move the plan and its files from `.new` to the directory, in place of older data."""
        directory = self.config.dir
        remove_matching(directory, [PLAN])  # first, as it makes the other files valid
        remove_matching(directory, [f"{split}/{MANIFEST}" for split in SPLITS])
        remove_matching(directory, (*OF_SPLITS, *OF_ALL))
        for name in (SETTINGS, TOKENIZER, GRAMS, ROWS, PLAN):
            if (self.new / name).exists():
                (self.new / name).replace(directory / name)
                upload_tree(directory / name)

    def encode_settings(self, summary: Mapping[str, Any], directory: Path) -> EncodeSettings:
        """Return the settings of encoding workers. `directory` holds the tokenizer and the n-grams."""
        config = self.config
        return EncodeSettings(
            directory=directory / TOKENIZER,
            tokenizer=TokenizerFacts(**summary["tokenizer"]),
            template=config.template,
            block=config.sequence_len,
            overlong=config.overlong,
            grams=directory / GRAMS if config.contamination is not None else None,
            by_words=summary.get("by_words", True),
            chat=read_chat_template(config, directory),
            min_tokens=config.min_doc_tokens or 1,
        )

    # --- shards -------------------------------------------------------------------------------------------

    def load(self, hashes: Hashes) -> LoadedPlan:
        """Return the plan, its sources and its tokenizer. Raises UserError if the recipe has others."""
        config = self.config
        check_settings(config, config.dir)
        plan = self._read_plan()
        sources = check_inputs(config, plan, hashes)
        check_tokenizer(config, plan)
        return LoadedPlan(plan, sources, read_tokenizer(config.dir / TOKENIZER)[0])

    def _read_plan(self) -> Plan:
        """Return the plan. Raises UserError if it is damaged, in its store if it belongs to one."""
        path = self.config.dir / PLAN
        again = in_store(path)
        while True:
            try:
                return Plan.load(path.absolute())
            except Exception as error:  # pyarrow and zlib raise many classes for a damaged file
                if not again:
                    problem = f"{shown(path)} is damaged ({one_line(error)})"
                    raise UserError(f"{problem}; {AGAIN}", code="plan-damaged") from None
            again = False
            path.unlink(missing_ok=True)
            self.refresh()

    def find_missing(self, hashes: Hashes, job: tuple[int, int]) -> list[int]:
        """Return the shards of a job that are missing, or differ from their note, manifest or hash.

        Shards are counted through all splits.
        """
        config = self.config
        missing = []
        for split_number, split in enumerate(config.splits):
            directory = config.dir / split
            directory.mkdir(exist_ok=True)
            remove_abandoned(directory)
            try:
                listed = {info.file: info for info in read_manifest(directory).shards}
            except UserError:
                listed = {}
            for number in range(job[0], config.shards, job[1]):
                path = directory / shard_name(number, config.shards)
                info = read_note(directory, number, config.shards)
                as_listed = info is not None and info == listed.get(path.name, info)
                same = in_store(path) or info is None or hashes.sha256(path) == info.sha256
                if info is not None and not (as_listed and same):
                    self.say(f"{path} was changed since it was made; making it again")
                    info = None
                overlap = overlap_path(directory, number, config.shards)
                if info is None or (config.contamination is not None and not overlap.is_file()):
                    missing.append(split_number * config.shards + number)
        return missing

    def make_shards(self, loaded: LoadedPlan, shards: list[int], hashes: Hashes) -> list[ShardInfo]:
        """Make shards, which are counted through all splits, and return their notes."""
        plan = loaded.plan
        config = self.config
        if loaded.sources.problem:
            raise UserError(
                f"{counted(len(shards), 'shard')} must be made again, but {loaded.sources.problem}",
                code="sources-gone",
            )
        encode = self.encode_settings(plan.summary, config.dir)
        plain = PlainEncoder(loaded.tokenizer, encode.tokenizer)
        chars = plan.summary["chars"]
        copies = sum(source[split] for source in plan.summary["sources"] for split in chars)
        row_size = sum(chars.values()) // max(1, copies)  # average
        batches = (batch for shard in shards for batch in plan.rows(shard, shard + 1))
        rows = sum(int(batch.copies.sum(dtype="int64")) for batch in batches)

        def parts() -> Iterator[ShardPart]:
            """Yield the parts of all shards: workers begin the next one while this process ends the last."""
            for shard in shards:
                yield from plan.parts(loaded.sources.inputs, shard)

        with (
            WorkerPool(min(self.workers, plan.pieces), encoding, encode) as pool,
            progress("tokenising", rows * row_size, self.say) as advance,
            self.stopwatch.time("shards"),
        ):
            encoded = _report_progress(pool.map(parts()), row_size, advance)
            began = time.perf_counter()
            infos = []
            for shard, sequences in _group_by_shard(shards, encoded):
                check = ShardCheck(plain, config, encode.chat)
                infos.append(self._write_shard(plan, shard, encode, sequences, check, hashes))
        self.say_rate(infos, time.perf_counter() - began)
        return infos

    def say_shard(self, info: ShardInfo) -> None:
        """Print a line about a new shard."""
        self.say(f"{info.split}/{info.file}: {counted(info.rows, 'row')}, {counted(info.tokens, 'token')}")

    def say_rate(self, infos: list[ShardInfo], seconds: float) -> None:
        """Print how fast shards were made."""
        tokens = sum(info.tokens for info in infos)
        rate = f"{counted(tokens, 'token')} in {seconds:,.1f} s, {tokens / seconds:,.0f} tokens/s"
        self.say(f"shards made: {len(infos)}, {rate}")

    def _write_shard(
        self,
        plan: Plan,
        shard: int,
        encode: EncodeSettings,
        sequences: Iterator[Encoded],
        check: ShardCheck,
        hashes: Hashes,
    ) -> ShardInfo:
        config = self.config
        directory = config.dir / config.splits[shard // config.shards]
        quotas = plan.summary.get("token_quotas", [])  # of the training shards, which come first
        quota = quotas[shard] if shard < len(quotas) else None
        dtype = token_dtype(encode.tokenizer.vocab_size)
        info = write_shard(directory, shard % config.shards, config, dtype, sequences, check, quota)
        path = directory / info.file
        hashes.remember(path, signature(path), info.sha256)
        self.say_shard(info)
        return info


def _report_progress(
    parts: Iterable[Encoded], row_size: int, advance: Callable[[int], None]
) -> Iterator[Encoded]:
    done = 0
    for part in parts:
        done += part.documents * row_size
        advance(done)
        yield part


def _group_by_shard(shards: list[int], parts: Iterable[Encoded]) -> Iterator[tuple[int, Iterator[Encoded]]]:
    """Yield each shard with its parts, which are in order of the shards. A shard may have no parts."""
    groups = groupby(parts, lambda part: part.shard)
    none: tuple[int, Iterator[Encoded]] = -1, iter(())
    current, group = next(groups, none)
    for shard in shards:
        if current == shard:
            yield shard, group
            current, group = next(groups, none)
        else:
            yield shard, iter(())
