"""`prepare`: a recipe's data section -> tokenizer, shards and manifests. Runs again without harm.

First all jobs read the sources and one of them decides, which gives what all share:
    data_prep.json      the mark of a directory that was made here: nothing is removed without it
    tokenizer/          saved, or trained
    grams.npz           of the tasks' test rows, if data.contamination is set
    settings.json       all that decides the content; later jobs must have the same
    plan.parquet        which rows each shard takes; written last
Until the plan is there, these lie in `.new`, with the parts of the scan: they stay when jobs die, and the
next ones go on from them as long as settings and sources are those that they were made from.

Then every job makes, if it is not there or not as it was made:
    train/, validation/ its shards, each with a note that it is whole; validation-NAME/ of a set with a name
    manifest.json       of each split whose shards are all whole; whichever job finishes last
    hashes.json         of sources and shards, so that the next job need not compute them
A job that dies leaves nothing that is believed; it is simply started again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path

from tokenizers import Tokenizer

from emo.common.cli.progress import progress
from emo.common.errors import FailureError, UserError, one_line
from emo.common.io.files import (
    PART,
    Hashes,
    claim_directory,
    find_foreign_files,
    full_disk,
    remove_abandoned,
    remove_matching,
    signature,
    write_text,
)
from emo.common.io.lease import Lease, living_users, register_user, wait_and_hold
from emo.common.io.untrusted import read_json
from emo.common.parallel import WorkerPool
from emo.common.text import counted

from .config import (
    FORMAT,
    TRAIN,
    VALIDATION,
    DataConfig,
    context_of,
    described,
    differences,
    settings,
)
from .encoding.chat_templates import BUILT_IN, ChatTemplate, read_template
from .encoding.chats import check_template
from .encoding.tokenizer import (
    FILES,
    TokenizerFacts,
    chat_template,
    read_tokenizer,
    require_end,
    save_tokenizer,
    set_chat_template,
    tokenizer_facts,
    train_sentencepiece,
)
from .selection import contamination
from .selection.plan import SPILL, Part, Plan, limit_tokens, select
from .selection.scan import BEYOND_LIMIT, Scan
from .shards.encode import Encoded, EncodeSettings, counting, encoding, words_agree
from .shards.format import (
    MANIFEST,
    ShardInfo,
    manifest_text,
    read_manifest,
    shard_name,
    token_dtype,
)
from .shards.reencode import PlainEncoder, ShardCheck
from .shards.scores import ABOUT, BEGUN, HASH, SCORES
from .shards.write import (
    PLAN,
    SETTINGS,
    TOKENIZER,
    columns_read,
    left_out,
    losses,
    manifest_of,
    overlap_path,
    read_note,
    write_shard,
)
from .sources.inputs import AGAIN, Input, is_saved, open_inputs
from .sources.rows import plain_text, take

MARKER, GRAMS = "data_prep.json", "grams.npz"
HASHES, OVERLAP = "hashes.json", "contamination.json"
NEW, SCAN = ".new", "scan"  # what planning jobs have made so far; in it, parts of the scan
ROWS, LIMITED = "rows.parquet", "limited.parquet"  # in .new: what is selected, before the plan is whole
PLANNING, JOBS = ".planning", ".jobs"  # leases of the job that sets up or decides, and of all that run
NOTE = '{"made_by": "emo prepare", "meaning": "prepare --force may clear this directory"}\n'
SHARED = (*(f"{TOKENIZER}/{file}" for file in FILES), GRAMS, SETTINGS, PLAN)
SET_UP = (f"{NEW}/*", f"{NEW}/{TOKENIZER}/*", f"{NEW}/{SPILL}/*")
UNFINISHED = (f"{NEW}/*", f"{NEW}/*/*", f"{NEW}/{SCAN}/*/*")
OF_SPLIT = ("shard-[0-9]*-of-[0-9]*.arrow", "shard-[0-9]*-of-[0-9]*.json", MANIFEST, OVERLAP, f".*{PART}")
OF_SCORES = tuple(f"{SCORES}/*/{name}" for name in (ABOUT, BEGUN, "*.npy", f"*{HASH}", f".*{PART}"))
SPLITS = (TRAIN, VALIDATION, f"{VALIDATION}-*")
OF_SPLITS = tuple(f"{split}/{name}" for split in SPLITS for name in (*OF_SPLIT, *OF_SCORES))
OF_ALL = (*SHARED, HASHES, f".*{PART}")
TRAINING_CHARS = 50_000_000  # of text at most to train a tokenizer on

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
    claim_directory(config.dir, MARKER, NOTE, "data.dir")
    job = Preparation(config, workers, say)
    with contextlib.ExitStack() as stack:
        stack.enter_context(full_disk(config.dir))
        with job.alone():
            if force or not (config.dir / PLAN).is_file():
                job.begin(force)
            else:
                job.clear()  # what a job that died had still to clear
            stack.enter_context(register_user(config.dir / JOBS))
        if not (config.dir / PLAN).is_file():
            scan = job.scan(shard[0] / shard[1])
            with job.alone():
                if not (config.dir / PLAN).is_file():
                    if not (job.new / SETTINGS).is_file():  # a job died as it put all in place
                        job.set_up()
                    job.decide(scan)
        hashes = Hashes(config.dir / HASHES)
        plan, inputs, tokenizer = job.load(hashes)
        todo = [] if finish else job.missing(hashes, shard)
        if todo:
            job.make(plan, inputs, tokenizer, todo, hashes)
        sealed = [job.seal(plan, split, finish) for split in config.splits]
        if not todo and all(sealed):
            say(f"{config.dir} is already prepared; nothing to do")
        elif not todo and not finish:
            say(f"all shards of job {shard[0]}/{shard[1]} are there")
        hashes.save()
    lost = left_out(plan.summary)
    for split in config.splits:
        lost += [f"{split}: {line}" for line in losses(config, split, list(job.notes(split).values()))]
    say(f"{config.dir}: cut or dropped: {'; '.join(lost) or 'nothing'}")


class Preparation:
    """One job's share in the preparation of a directory."""

    def __init__(self, config: DataConfig, workers: int, say: Say) -> None:
        self.config, self.workers, self.say = config, workers, say
        self.new = config.dir / NEW

    def alone(self) -> AbstractContextManager[None]:
        """Return a context in which no other job sets up or decides."""
        return wait_and_hold(
            Lease(self.config.dir / PLANNING, "plan"),
            lambda holder: self.say(f"another job is planning ({holder}); waiting for it"),
        )

    def begin(self, force: bool) -> None:
        """Set up the plan, unless other jobs are making it: then it must be of the same settings.

        Under `force` it is also made, before another job can begin: what is there is cleared when all is made
        and nothing can fail any more.
        """
        directory = self.config.dir
        others = living_users(directory / JOBS)
        if others and (force or not (self.new / SETTINGS).is_file()):
            raise UserError(
                f"another job ({others[0]}) is working in {directory}; wait for it, or set another data.dir",
                code="in-use",
            )
        if others:
            check_settings(self.config, self.new)
            return
        if not force and (directory / SETTINGS).is_file():
            check_settings(self.config, directory)
        if not force and any(directory.glob(f"*/{MANIFEST}")):
            raise UserError(
                f"{directory} holds prepared data, but its {PLAN} is gone; run prepare with --force",
                code="plan-gone",
            )
        patterns = (*OF_ALL, *OF_SPLITS, *UNFINISHED, MARKER, f"{PLANNING}/*", f"{JOBS}/*")
        other = next(find_foreign_files(directory, patterns), None)
        if other is not None:
            raise UserError(
                f"{other} was not made by prepare; move it away, or set another data.dir", code="foreign-file"
            )
        self.set_up(force)
        if force:
            try:
                self.decide(self.scan(0, alone=True))
            finally:
                self.clear()

    def set_up(self, force: bool = False) -> None:
        """Make what takes no scan, in `.new`; last the settings, which say that it is there.

        force: parts of an earlier scan are not believed either. Raises UserError for all that can be wrong
        before the rows are read.
        """
        config, say = self.config, self.say
        remove_matching(config.dir, UNFINISHED if force else SET_UP)
        (self.new / SCAN).mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.new / SCAN)
        try:
            inputs = planned_inputs(config)
            say(f"reading {counted(len(inputs), 'input')}")
            for opened in inputs:
                if opened.source.hub and not opened.source.revision and not is_saved(Path(opened.source.hub)):
                    say(f"note: {opened.name} is not pinned; set its revision to prepare the same data again")
            if config.tokenizer is not None:  # first what may be misspelt, then the scan, which takes longer
                local = config.root / config.tokenizer
                if (context := context_of(local)) is not None and config.sequence_len > context:
                    say(
                        f"note: blocks of {config.sequence_len} tokens are longer than the context of "
                        f"{context} of the model in {local}, which cannot be trained on them"
                    )
                source = local if local.exists() else config.tokenizer
                save_tokenizer(source, config.tokenizer_revision, self.new / TOKENIZER)
            if config.contamination is not None:
                grams = contamination.collect(config.root / config.contamination, config.contamination_ngram)
                contamination.save(grams, self.new / GRAMS)
            if (chat := self.chat(self.new)) is not None:
                for note in check_template(chat):
                    say(note)
            for opened in inputs:
                opened.probe()
            if chat is not None and config.template in BUILT_IN:
                set_chat_template(self.new / TOKENIZER, chat.text)
            tree = settings(config) | {"format": FORMAT}
            write_text(self.new / SETTINGS, json.dumps(tree, indent=1, sort_keys=True) + "\n")
        except BaseException:
            self.clear(SET_UP)
            raise

    def clear(self, patterns: tuple[str, ...] = UNFINISHED) -> None:
        """Remove what was made in `.new`."""
        remove_matching(self.config.dir, patterns)
        for directory in (self.new / SCAN, self.new):
            with contextlib.suppress(OSError):
                directory.rmdir()

    def chat(self, directory: Path) -> ChatTemplate | None:
        """Return the template of the tokenizer saved in a directory, where the recipe asks for it."""
        if not self.config.by_chat_template:
            return None
        config = self.config
        chosen = config.template, config.template_variables, config.reasoning
        return read_template(directory / TOKENIZER, str(config.tokenizer), *chosen)

    def scan(self, first: float, alone: bool = False) -> Scan:
        """Read the sources, beside other jobs; `first`: see `Scan.run`.

        alone: no other job can make the plan meanwhile, the one that is there is to be made again.
        """
        scan = Scan(self.config, planned_inputs(self.config), self.chat(self.new), self.new / SCAN)
        plan = self.config.dir / PLAN
        scan.run(first, self.workers, lambda: not alone and plan.is_file(), self.say)
        return scan

    def decide(self, scan: Scan) -> None:
        """Make the plan of what has been scanned, and let it and what belongs to it take the place of others.

        Raises UserError when that leaves nothing to train on.
        """
        config, say, inputs = self.config, self.say, scan.inputs
        parts = [scan.parts[unit.number] for unit in scan.units]
        plan = select(config, inputs, parts, self.new / ROWS, self.workers, scan.fault)
        summary = plan.summary
        if scan.chat is not None:
            summary["chat_template"] = scan.chat.digest
        total, characters = int(plan.ends[-1]), summary["chars"][TRAIN]
        say(f"{counted(total, 'row')} read; {counted(characters, 'character')} of them to train on")
        if config.train_tokenizer is None:
            facts = tokenizer_facts(self.new / TOKENIZER)
        else:
            say(f"training a tokenizer of {config.train_tokenizer} pieces")
            # An even sample of the rows if there is much text; other rows are not parsed.
            taken = plan.training(inputs, config.shards, 1 + characters // TRAINING_CHARS)
            rows = (row for part in taken for row in take(part.payload, part.spec, part.copies.tolist()))
            model = self.new / TOKENIZER / "tokenizer.model"
            train_sentencepiece(map(plain_text, rows), config.train_tokenizer, model)
            facts = save_tokenizer(model, None, self.new / TOKENIZER)
        if note := require_end(facts, str(config.tokenizer or config.dir / TOKENIZER), config.kind):
            say(note)
        summary["tokenizer"] = facts._asdict()
        hashes = Hashes(config.dir / HASHES)  # so that the next job need not compute them
        for opened, source in zip(inputs, summary["sources"], strict=True):
            path = local_file(opened)
            if path is not None and "bytes" in source:
                hashes.remember(path, opened.state[0], source["sha256"])
            elif path is not None and BEYOND_LIMIT not in source:
                source["content"] = content(path, hashes)
        encode = self.encode_settings(plan, self.new)
        summary["by_words"] = words_agree(encode, plan, inputs)
        if not summary["by_words"]:
            say("note: with this tokenizer words get other ids than whole texts; words are not cached")
        if config.limit_tokens is not None:
            encode = encode._replace(by_words=summary["by_words"], grams=None)
            with WorkerPool(self.workers, counting, encode) as pool:
                plan = limit_tokens(config, plan, inputs, pool, self.new / LIMITED)
        say(f"not used: {'; '.join(left_out(summary)) or 'nothing'}")
        for line in (*columns_read(summary), *summary.pop("notes")):
            say(line)
        plan.save(self.new / PLAN)
        (config.dir / PLAN).unlink(missing_ok=True)  # first, as it vouches for the rest
        remove_matching(config.dir, [f"{split}/{MANIFEST}" for split in SPLITS])
        remove_matching(config.dir, (*OF_SPLITS, *OF_ALL))
        for name in (SETTINGS, TOKENIZER, GRAMS, PLAN):
            if (self.new / name).exists():
                (self.new / name).replace(config.dir / name)
        hashes.save()
        self.clear()

    def encode_settings(self, plan: Plan, directory: Path) -> EncodeSettings:
        """Return what workers need to encode; `directory` holds the tokenizer and the grams."""
        config = self.config
        return EncodeSettings(
            directory / TOKENIZER,
            TokenizerFacts(**plan.summary["tokenizer"]),
            config.template,
            config.sequence_len,
            config.overlong,
            directory / GRAMS if config.contamination is not None else None,
            plan.summary.get("by_words", True),
            self.chat(directory),
        )

    def load(self, hashes: Hashes) -> tuple[Plan, list[Input] | str, Tokenizer]:
        """Return the plan, the inputs and the tokenizer, which must be those of the recipe and of the plan.

        Where inputs are gone whose data are there, the second is the reason.
        """
        config = self.config
        check_settings(config, config.dir)
        try:
            plan = Plan.load(config.dir / PLAN)
        except Exception as error:  # pyarrow and zlib raise many classes for a damaged file
            raise UserError(
                f"{config.dir / PLAN} is damaged ({one_line(error)}); {AGAIN}", code="plan-damaged"
            ) from None
        inputs = check_inputs(config, plan, hashes)
        planned = TokenizerFacts(**plan.summary["tokenizer"])
        directories = [config.dir / TOKENIZER]
        if config.tokenizer is not None and (config.root / config.tokenizer).exists():
            directories.insert(0, config.root / config.tokenizer)
        for directory in directories:
            try:
                same = tokenizer_facts(directory) == planned
                if config.template == "chat_template" and config.by_chat_template:
                    same = same and chat_template(directory) == chat_template(config.dir / TOKENIZER)
                chat = self.chat(config.dir)
                same = same and (None if chat is None else chat.digest) == plan.summary.get("chat_template")
                why = ""
            except (UserError, OSError) as error:
                same, why = False, f" ({one_line(error)})"
            if not same:
                raise UserError(
                    f"{directory} is missing, damaged or not the tokenizer that {config.dir} was prepared "
                    f"with{why}; {AGAIN}",
                    code="tokenizer-changed",
                )
        return plan, inputs, read_tokenizer(config.dir / TOKENIZER)[0]

    def missing(self, hashes: Hashes, job: tuple[int, int]) -> list[int]:
        """Return those of a job's shards that are not there, or not as note, manifest and hash say.

        Shards are counted through all splits.
        """
        config, missing = self.config, []
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
                if info is not None and not (as_listed and hashes.sha256(path) == info.sha256):
                    self.say(f"{path} was changed since it was made; making it again")
                    info = None
                overlap = overlap_path(directory, number, config.shards)
                if info is None or (config.contamination is not None and not overlap.is_file()):
                    missing.append(split_number * config.shards + number)
        return missing

    def make(
        self, plan: Plan, inputs: list[Input] | str, tokenizer: Tokenizer, todo: list[int], hashes: Hashes
    ) -> None:
        """Make shards, counted through all splits."""
        config, say = self.config, self.say
        if isinstance(inputs, str):
            raise UserError(
                f"{counted(len(todo), 'shard')} must be made again, but {inputs}", code="sources-gone"
            )
        encode = self.encode_settings(plan, config.dir)
        dtype = token_dtype(encode.tokenizer.vocab_size)
        plain = PlainEncoder(tokenizer, encode.tokenizer)
        chars = plan.summary["chars"]
        copies = sum(source[split] for source in plan.summary["sources"] for split in chars)
        row_size = sum(chars.values()) // max(1, copies)  # on average
        size = sum(int(plan.rows(shard, shard + 1).copies.sum(dtype="int64")) for shard in todo) * row_size
        with (
            WorkerPool(min(self.workers, len(plan.pieces)), encoding, encode) as pool,
            progress("tokenising", size, say) as advance,
        ):

            def parts() -> Iterator[Part]:
                """Yield the parts of all shards: workers begin the next while this process ends the last."""
                for shard in todo:
                    yield from plan.parts(inputs, shard)

            def encoded() -> Iterator[Encoded]:
                done = 0
                for part in pool.map(parts()):
                    done += part.documents * row_size
                    advance(done)
                    yield part

            began, tokens = time.perf_counter(), 0
            quotas = plan.summary.get("token_quotas", [])  # of the training shards, which come first
            groups = groupby(encoded(), lambda part: part.shard)
            none: tuple[int, Iterator[Encoded]] = -1, iter(())
            current, group = next(groups, none)
            for shard in todo:
                directory, number = config.dir / config.splits[shard // config.shards], shard % config.shards
                check = ShardCheck(plain, config, encode.chat)
                quota = quotas[shard] if shard < len(quotas) else None
                rows = group if current == shard else none[1]  # a shard may have none
                info = write_shard(directory, number, config, dtype, rows, check, quota)
                if current == shard:
                    current, group = next(groups, none)
                tokens += info.tokens
                path = directory / info.file
                hashes.remember(path, signature(path), info.sha256)
                say(
                    f"{directory.name}/{info.file}: {counted(info.rows, 'row')}, "
                    f"{counted(info.tokens, 'token')}"
                )
            seconds = time.perf_counter() - began
            rate = f"{counted(tokens, 'token')} in {seconds:,.1f} s, {tokens / seconds:,.0f} tokens/s"
            say(f"shards made: {len(todo)}, {rate}")

    def seal(self, plan: Plan, split: str, required: bool) -> bool:
        """Write the manifest of a split whose shards are all there; return whether it was there already.

        required: it is an error that shards are still to be made.
        """
        config, directory, infos = self.config, self.config.dir / split, self.notes(split)
        if len(infos) < config.shards:
            missing = [i for i in range(config.shards) if i not in infos]
            report = f"{split}: {len(missing)} of {config.shards} shards are still to be made"
            if required:
                raise UserError(
                    f"{report}, the first is {shard_name(missing[0], config.shards)}", code="shards-missing"
                )
            self.say(report)
            return False
        manifest = manifest_of(config, plan.summary, split, list(infos.values()))
        file, text = directory / MANIFEST, manifest_text(manifest)
        same = file.is_file() and file.read_bytes() == text.encode()
        if same and (config.contamination is None or (directory / OVERLAP).is_file()):
            return True
        if config.contamination is not None:  # beside the manifest that is written next
            paths = [overlap_path(directory, i, config.shards) for i in range(config.shards)]
            notes = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
            hits = {gram for note in notes for gram in note["grams"]}
            documents, n = sum(note["documents"] for note in notes), config.contamination_ngram
            grams = contamination.load(config.dir / GRAMS)
            overlap = contamination.report(grams, hits, documents, n)
            write_text(directory / OVERLAP, json.dumps(overlap, indent=1, ensure_ascii=False) + "\n")
            tasks = overlap["tasks"].items()
            counts = ", ".join(f"{name} {task['overlapping']}/{task['rows']}" for name, task in tasks)
            self.say(f"{split}: test rows that share {n} words with {documents:,} documents: {counts}")
        write_text(file, text)
        self.say(
            f"{directory}: {counted(manifest.rows, 'row')} of {config.sequence_len}, "
            f"{counted(manifest.tokens, 'token')}, {manifest.waste:.2%} padding"
        )
        return False

    def notes(self, split: str) -> dict[int, ShardInfo]:
        """Return the notes of a split's shards that are there, by number."""
        directory, shards = self.config.dir / split, self.config.shards
        notes = {i: read_note(directory, i, shards) for i in range(shards)}
        return {i: info for i, info in notes.items() if info is not None}


def planned_inputs(config: DataConfig) -> list[Input]:
    """Return the inputs. Raises UserError when one of them lies where prepared data are written."""
    inputs = open_inputs(config)
    read = [config.root / name for name in (config.tokenizer, config.contamination) if name is not None]
    home = config.dir.resolve()
    for path in (*filter(None, map(local_file, inputs)), *read):
        if path.exists() and path.resolve().is_relative_to(home):
            raise UserError(
                f"{path} lies in data.dir={config.dir}, which is for prepared data; set another",
                code="source-in-data-dir",
            )
    return inputs


def local_file(opened: Input) -> Path | None:
    """Return the local file or directory that an input of `files` reads."""
    return opened.path if opened.source.files is not None and isinstance(opened.path, Path) else None


def content(path: Path, hashes: Hashes) -> str:
    """Return the hash of a file, or of all files of a directory and their names."""
    if path.is_file():
        return hashes.sha256(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    listed = [[str(file.relative_to(path)), hashes.sha256(file)] for file in files]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def check_settings(config: DataConfig, directory: Path) -> None:
    """Refuse to continue with other settings than those in a directory."""
    file = directory / SETTINGS
    try:
        prepared = read_json(file)
        version = prepared.pop("format")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(
            f"{file} is missing or damaged ({one_line(error)}); {AGAIN}", code="settings-damaged"
        ) from None
    if version != FORMAT:
        raise UserError(f"{config.dir} was prepared in format {version}, this version has {FORMAT}; {AGAIN}")
    changed = differences(prepared, config)
    if changed:
        raise UserError(
            f"{config.dir} was {described(changed)}; set another data.dir, or {AGAIN}", code="settings-differ"
        )


def check_inputs(config: DataConfig, plan: Plan, hashes: Hashes) -> list[Input] | str:
    """Return the inputs, which must be those that were planned; or which is gone, if its data are there."""
    planned = {source["name"]: source for source in plan.summary["sources"]}
    complete = all((config.dir / split / MANIFEST).is_file() for split in config.splits)
    try:
        inputs = planned_inputs(config)
    except UserError as error:
        if complete and ("no file matches" in str(error) or isinstance(error, FailureError)):
            return str(error)
        raise
    for opened in inputs:
        if opened.name not in planned:
            raise UserError(
                f"{opened.name} was not there when {config.dir} was prepared; take it away, or {AGAIN}",
                code="source-new",
            )
        source, path = planned[opened.name], local_file(opened)
        size = source.get("bytes")
        if path is None:
            same = "://" not in opened.name or size is None or opened.size in (0, size)
        else:
            expected = source.get("content") if size is None else source["sha256"]
            sized = size is None or path.stat().st_size == size
            same = expected is None or (sized and content(path, hashes) == expected)
        if not same:
            raise UserError(
                f"{opened.name} changed since {config.dir} was prepared; {AGAIN}", code="source-changed"
            )
    names = {opened.name for opened in inputs}
    gone = next((name for name in planned if name not in names), None)
    if gone is not None and not complete:
        raise UserError(
            f"{gone} is gone since {config.dir} was prepared; put it back, or {AGAIN}", code="source-gone"
        )
    return inputs if gone is None else f"{gone} is gone since {config.dir} was prepared"
