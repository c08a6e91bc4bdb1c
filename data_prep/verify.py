"""Is a prepared directory what was made, and made from what the sources are now?

Before every job `prepare` checks what is cheap: settings, names, sizes, and hashes of files that were touched
since they were last hashed. `verify` believes nothing of what is in the directory: it computes hashes, counts
and sums again, reads every row as training would, and encodes the text of a sample. It reads no sources.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from emo.common.errors import FailureError, UserError, one_line
from emo.common.files import Hashes, remove_abandoned, sha256
from emo.common.text import counted
from emo.common.untrusted import read_json
from emo.data_prep.config import TRAIN, VALIDATION, DataConfig, described, differences, splits_made
from emo.data_prep.inputs import AGAIN, Input, open_inputs
from emo.data_prep.plan import Plan
from emo.data_prep.reencode import PlainEncoder, written_again
from emo.data_prep.shards import (
    FORMAT,
    IGNORE,
    MANIFEST,
    Manifest,
    Shard,
    ShardInfo,
    TokenDataset,
    content_fingerprint,
    manifest_digest,
    parse_manifest,
    read_manifest,
    shard_name,
)
from emo.data_prep.templates import read_template
from emo.data_prep.tokenizer import TokenizerFacts, read_tokenizer, tokenizer_facts
from emo.data_prep.write import COUNTED, PLAN, SETTINGS, TOKENIZER, overlap_path, read_note, totals

ROWS = 256  # rows looked at together


class Missing(NamedTuple):
    """A shard that this job has to make."""

    directory: Path
    number: int
    planned: int  # counted through all splits


def planned_inputs(config: DataConfig) -> list[Input]:
    """Return the inputs. Raises UserError when one of them lies where prepared data are written."""
    inputs = open_inputs(config)
    read = [config.root / name for name in (config.tokenizer, config.contamination) if name is not None]
    home = config.dir.resolve()
    for path in (*filter(None, (file_of(config, opened) for opened in inputs)), *read):
        if path.exists() and path.resolve().is_relative_to(home):
            raise UserError(
                f"{path} lies in data.dir={config.dir}, which is for prepared data; set another",
                code="source-in-data-dir",
            )
    return inputs


def file_of(config: DataConfig, opened: Input) -> Path | None:
    """Return the local file that an input reads, if it is one."""
    files = opened.source.files
    return None if files is None or "://" in files else config.root / opened.name


def content(path: Path, hashes: Hashes) -> str:
    """Return the hash of a file, or of all files of a directory and their names."""
    if path.is_file():
        return hashes.sha256(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    listed = [[str(file.relative_to(path)), hashes.sha256(file)] for file in files]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def load_plan(config: DataConfig) -> Plan:
    """Return the plan, whose settings must be those of the recipe."""
    check_settings(config)
    try:
        return Plan.load(config.dir / PLAN)
    except Exception as error:  # numpy and zipfile raise many classes for a damaged file
        raise UserError(
            f"{config.dir / PLAN} is damaged ({one_line(error)}); {AGAIN}", code="plan-damaged"
        ) from None


def check_settings(config: DataConfig, directory: Path | None = None) -> None:
    """Refuse to continue with other settings than what is there, or in `place`, was prepared with."""
    file = (directory or config.dir) / SETTINGS
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
    listed = Counter(source["name"] for source in plan.summary["sources"])
    names = Counter(opened.name for opened in inputs)
    for name in names - listed:
        raise UserError(
            f"{name} was not there when {config.dir} was prepared; take it away, or {AGAIN}",
            code="source-new",
        )
    gone = next(iter(listed - names), None)
    if gone is not None and not complete:
        raise UserError(
            f"{gone} is gone since {config.dir} was prepared; put it back, or {AGAIN}", code="source-gone"
        )
    for opened in inputs:
        source, path = planned[opened.name], config.root / opened.name
        size = source.get("bytes")
        if "://" in opened.name:
            same = size is None or opened.size in (0, size)
        else:
            expected = source.get("content") if size is None else source["sha256"]
            same = expected is None or not path.exists()
            if not same and (size is None or path.stat().st_size == size):
                same = content(path, hashes) == expected
        if not same:
            raise UserError(
                f"{opened.name} changed since {config.dir} was prepared; {AGAIN}", code="source-changed"
            )
    return inputs if gone is None else f"{gone} is gone since {config.dir} was prepared"


def check_tokenizer(config: DataConfig, plan: Plan) -> Tokenizer:
    """Return the saved tokenizer."""
    planned = TokenizerFacts(**plan.summary["tokenizer"])
    directories = [config.dir / TOKENIZER]
    if config.tokenizer is not None and (config.root / config.tokenizer).exists():
        directories.insert(0, config.root / config.tokenizer)
    for directory in directories:
        try:
            same = tokenizer_facts(directory) == planned and (
                not config.by_chat_template
                or read_template(directory, str(directory)).digest == plan.summary["chat_template"]
            )
        except Exception:  # a broken file; `tokenizers` raises plain Exception
            same = False
        if not same:
            raise UserError(
                f"{directory} is missing, damaged or not the tokenizer that {config.dir} was prepared with; "
                f"{AGAIN}",
                code="tokenizer-changed",
            )
    return read_tokenizer(config.dir / TOKENIZER)[0]


def missing_shards(
    config: DataConfig, hashes: Hashes, shard: tuple[int, int], say: Callable[[str], None]
) -> list[Missing]:
    """Return those of this job's shards that are not there, or not as note, manifest and hash say."""
    index, jobs = shard
    missing = []
    for split_number, split in enumerate(config.splits):
        directory = config.dir / split
        directory.mkdir(exist_ok=True)
        remove_abandoned(directory)
        try:
            listed = {info.file: info for info in read_manifest(directory).shards}
        except UserError:
            listed = {}
        for number in range(index, config.shards, jobs):
            path = directory / shard_name(number, config.shards)
            info = read_note(directory, number, config.shards)
            as_listed = info is not None and info == listed.get(path.name, info)
            if info is not None and not (as_listed and hashes.sha256(path) == info.sha256):
                say(f"{path} was changed since it was made; making it again")
                info = None
            overlap = config.contamination is None or overlap_path(directory, number, config.shards).is_file()
            if info is None or not overlap:
                missing.append(Missing(directory, number, split_number * config.shards + number))
    return missing


def data_sets(directory: Path) -> list[Path]:
    """The data sets that should be in a prepared directory, or the data set that the directory is."""
    if (directory / MANIFEST).is_file():
        return [directory]
    sets = sorted(path.name for path in directory.glob(f"{VALIDATION}-*"))
    present = [path for name in (TRAIN, VALIDATION, *sets) if (path := directory / name).is_dir()]
    for path in present:
        try:
            splits = splits_made(parse_manifest(path).config)
        except UserError:
            continue
        also = (split for split in (TRAIN, VALIDATION) if directory / split in present)
        return [directory / split for split in dict.fromkeys((*splits, *also))]
    return present or [directory]


def verify(directory: Path) -> tuple[list[str], list[str]]:
    """Return what was right, and every fault, a line each."""
    right, faults = [], []
    for split in data_sets(directory):
        wrong: list[str] = []
        again = 0
        try:
            manifest = parse_manifest(split)
            wrong += [*_shard_faults(split, manifest), *_manifest_faults(split, manifest)]
            tokenizer, facts = read_tokenizer(split.parent / TOKENIZER)
            expected = (manifest.vocab_size, manifest.bos_id, manifest.eos_id, manifest.tokenizer_fingerprint)
            if facts != expected:
                wrong.append(f"{split.parent / TOKENIZER} is not the tokenizer that made {split}")
            if not wrong:
                wrong += _row_faults(split)
                plain = PlainEncoder(tokenizer, facts)
                for info in manifest.shards:
                    path = split / info.file
                    same = list(written_again(Shard(path, manifest.kind), manifest, plain))
                    again += len(same)
                    if not all(same):
                        wrong.append(f"{path} has ids that the tokenizer does not give for their text")
        except UserError as error:
            wrong.append(str(error))
        faults += wrong
        if not wrong:
            encoded = (
                counted(again, "document" if manifest.kind == "text" else "example") if again else "none"
            )
            right.append(
                f"{split}: {manifest.rows:,} rows in {len(manifest.shards)} shards, all as written; encoded "
                f"again and the same: {encoded}"
            )
    return right, faults


def _shard_faults(directory: Path, manifest: Manifest) -> Iterator[str]:
    """Yield faults of files: there, whole, unchanged, readable; and no others."""
    names = [shard_name(i, len(manifest.shards)) for i in range(len(manifest.shards))]
    if [info.file for info in manifest.shards] != names:
        yield f"{directory / MANIFEST} does not list its shards in order"
    for extra in sorted(directory.glob("*.arrow")):
        if extra.name not in names:
            yield f"{extra} is not in the manifest"
    for number, info in enumerate(manifest.shards):
        path = directory / names[number]
        if not path.is_file():
            yield f"{path} is missing"
            continue
        size = path.stat().st_size
        if size != info.bytes or sha256(path) != info.sha256:
            yield f"{path} was changed: it has {size:,} bytes of the {info.bytes:,}, or another hash"
            continue
        note = read_note(directory, number, len(names))
        if note is not None and note != info:
            yield f"{path}: its note does not say what {directory / MANIFEST} says"
        try:
            yield from _content_faults(path, Shard(path, manifest.kind), info, manifest)
        except (pa.ArrowException, KeyError, ValueError) as error:
            yield f"{path} is not a shard: {one_line(error)}"


def _content_faults(path: Path, shard: Shard, info: ShardInfo, manifest: Manifest) -> Iterator[str]:
    """Yield where columns disagree with each other, the block, the vocabulary or what is said of them."""
    segments = [np.zeros(0, np.int64)]  # of each row
    for (id_offsets, ids), (offsets, lengths), (source_offsets, _) in zip(
        *(shard.columns[name] for name in ("input_ids", "segment_lengths", "sources")), strict=True
    ):
        tokens = np.diff(id_offsets)
        segments.append(np.diff(offsets))
        if len(ids) and int(ids.max()) >= manifest.vocab_size:
            yield f"{path} has id {ids.max()}, the vocabulary only {manifest.vocab_size}"
        if (tokens > manifest.block).any() or (manifest.kind == "text" and (tokens != manifest.block).any()):
            yield f"{path} has rows that are not {manifest.block} tokens"
        sums = np.add.reduceat(lengths, offsets[:-1]) if len(lengths) else tokens[:0]
        if not np.array_equal(sums, tokens) or (lengths == 0).any():
            yield f"{path} has segments that do not add up to their rows"
        if not np.array_equal(source_offsets, offsets):
            yield f"{path} has segments without a source"
    names = [domain.name for domain in manifest.domains]
    listed = {domain.name: domain for domain in info.domains}
    if [name for name in names if name in listed] != [domain.name for domain in info.domains]:
        yield f"{path} is said to have domains that are not those of {MANIFEST}, in their order"
        return
    amounts = (None, np.diff(shard.token_offsets()), shard.valid, np.concatenate(segments))
    for key, values in zip(COUNTED, amounts, strict=True):
        counts = np.bincount(shard.domain, values, len(names)).tolist()
        expected = [getattr(listed[name], key) if name in listed else 0 for name in names]
        if counts != expected:
            yield f"{path} has {counts} {key} of the domains {', '.join(names)}, its manifest {expected}"
    yield from _unequal(path, info, totals(info.domains), "its domains")


def _manifest_faults(directory: Path, manifest: Manifest) -> Iterator[str]:
    """Yield where a manifest differs from its shards, its settings, its plan, or its own digest."""
    file, settled_with = directory / MANIFEST, manifest.config
    yield from _unequal(file, manifest, totals(manifest.shards), "its shards")
    for domain in manifest.domains:
        parts = totals(o for info in manifest.shards for o in info.domains if o.name == domain.name)
        yield from _unequal(file, domain, parts, f"domain {domain.name} of its shards")
    identity = (manifest.kind, manifest.block, manifest.tokenizer_fingerprint, manifest.shards)
    expected = {
        "counts": dict(sum((Counter(info.counts) for info in manifest.shards), Counter())),
        "waste": round(1 - manifest.tokens / max(1, manifest.rows * manifest.block), 6),
        "fingerprint": content_fingerprint(*identity),
        "digest": manifest_digest(manifest),
    }
    yield from _unequal(file, manifest, expected, "its content")
    if len(manifest.shards) != settled_with.get("shards"):
        yield f"{file} lists {len(manifest.shards)} shards of {settled_with.get('shards')}"
    settled = {
        "split": directory.name if directory.name in splits_made(settled_with) else manifest.split,
        "kind": settled_with.get("kind"),
        "block": settled_with.get("sequence_len"),
        "template": settled_with.get("template_version"),
    }
    yield from _unequal(file, manifest, settled, "its settings")
    try:
        tree = json.loads((directory.parent / SETTINGS).read_text(encoding="utf-8"))
        summary = Plan.load(directory.parent / PLAN).summary
    except FileNotFoundError:  # a data set may be copied without them
        return
    except Exception as error:  # pyarrow and zlib raise many classes for a damaged file
        yield f"{directory.parent}: {SETTINGS} or {PLAN} is damaged ({one_line(error)})"
        return
    if tree != settled_with | {"format": FORMAT}:
        yield f"{file} was not made with the settings in {directory.parent / SETTINGS}"
    planned = {name: summary[name] for name in ("sources", "rejected")}
    yield from _unequal(file, manifest, planned, PLAN)


def _unequal(file: Path, record: Any, expected: dict[str, Any], origin: str) -> Iterator[str]:
    """Yield a fault for every field of a record that is not as expected by `origin`."""
    for name, value in expected.items():
        if (recorded := getattr(record, name)) != value:
            recorded, right = one_line(str(recorded), 80), one_line(str(value), 80)
            yield f"{file} says {name} {recorded}, {origin} {right}; it was edited, or is of other data"


def _row_faults(directory: Path) -> Iterator[str]:
    """Yield the first row whose supervised targets, as training reads them, are not as many as counted."""
    data = TokenDataset(directory)
    for start in range(0, len(data), ROWS):
        rows = np.arange(start, min(start + ROWS, len(data)))
        targets = (data.batch(rows)["labels"] != IGNORE).sum(axis=1)
        wrong = np.flatnonzero(targets != data.valid[rows])
        if len(wrong):
            row = int(rows[wrong[0]])
            file, number = data.provenance(np.array([row]))[0]
            counts = f"supervises {targets[wrong[0]]} tokens, its count says {data.valid[row]}"
            yield f"{directory / file} row {number} {counts}"
            return
