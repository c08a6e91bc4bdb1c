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

from common.errors import FailureError, UserError, one_line
from common.files import Hashes, remove_abandoned, sha256
from common.text import counted
from common.untrusted import read_json
from data_prep.config import TRAIN, VALIDATION, DataConfig, described, differences, splits_made
from data_prep.inputs import AGAIN, Input
from data_prep.plan import Plan
from data_prep.reencode import PlainEncoder, written_again
from data_prep.shards import (
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
from data_prep.sources import open_inputs
from data_prep.templates.chat import read_template
from data_prep.tokenizer import TokenizerFacts, read_tokenizer, tokenizer_facts
from data_prep.write import PLAN, SETTINGS, TOKENIZER, overlap_path, read_note, totals

ROWS = 256  # rows looked at together


class Missing(NamedTuple):
    """A shard that this job has to make."""

    directory: Path
    number: int
    planned: int  # counted through all splits


def planned_inputs(config: DataConfig) -> list[Input]:
    """The inputs. Raises UserError when something that is read lies where prepared data are written."""
    inputs = open_inputs(config)
    read = [config.root / name for name in (config.tokenizer, config.contamination) if name is not None]
    own = config.dir.resolve()
    for path in (*filter(None, (file_of(config, one) for one in inputs)), *read):
        if path.exists() and (own in path.resolve().parents or own == path.resolve()):
            raise UserError(f"{path} lies in data.dir={config.dir}, which is for prepared data; set another")
    return inputs


def file_of(config: DataConfig, one: Input) -> Path | None:
    """The local file that an input reads, if it is one."""
    return None if one.source.files is None or "://" in one.source.files else config.root / one.name


def content(path: Path, hashes: Hashes) -> str:
    """Hash of a file, or of all files of a directory and their names."""
    if path.is_file():
        return hashes.sha256(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    listed = [[str(file.relative_to(path)), hashes.sha256(file)] for file in files]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def load_plan(config: DataConfig) -> Plan:
    """The plan, whose settings must be those of the recipe."""
    check_settings(config)
    try:
        return Plan.load(config.dir / PLAN)
    except Exception as error:  # numpy and zipfile raise many classes for a damaged file
        raise UserError(f"{config.dir / PLAN} is damaged ({one_line(error)}); {AGAIN}") from None


def check_settings(config: DataConfig, place: Path | None = None) -> None:
    """Refuse to continue with other settings than what is there, or in `place`, was prepared with."""
    file = (place or config.dir) / SETTINGS
    try:
        found = read_json(file)
        version = found.pop("format")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{file} is missing or damaged ({one_line(error)}); {AGAIN}") from None
    if version != FORMAT:
        raise UserError(f"{config.dir} was prepared in format {version}, this version has {FORMAT}; {AGAIN}")
    changed = differences(found, config)
    if changed:
        raise UserError(f"{config.dir} was {described(changed)}; set another data.dir, or {AGAIN}")


def check_inputs(config: DataConfig, plan: Plan, hashes: Hashes) -> list[Input] | str:
    """The inputs, which must be those that were planned; or which is gone, if its data are there."""
    planned = [source["name"] for source in plan.summary["sources"]]
    complete = all((config.dir / split / MANIFEST).is_file() for split in config.splits)
    try:
        inputs = planned_inputs(config)
    except UserError as error:
        if complete and ("no file matches" in str(error) or isinstance(error, FailureError)):
            return str(error)
        raise
    names = [one.name for one in inputs]
    for name in Counter(names) - Counter(planned):
        raise UserError(f"{name} was not there when {config.dir} was prepared; take it away, or {AGAIN}")
    gone = next(iter(Counter(planned) - Counter(names)), None)
    if gone is not None and not complete:
        raise UserError(f"{gone} is gone since {config.dir} was prepared; put it back, or {AGAIN}")
    sizes = {one.name: one.size for one in inputs}
    for source in plan.summary["sources"]:
        if (
            "bytes" in source
            and "://" in source["name"]
            and sizes.get(source["name"], 0) not in (0, source["bytes"])
        ):
            raise UserError(f"{source['name']} changed since {config.dir} was prepared; {AGAIN}")
        path = config.root / source["name"]
        expected = source["sha256"] if "bytes" in source else source.get("content")
        if expected is None or not path.exists():
            continue
        if "bytes" in source and path.stat().st_size != source["bytes"]:
            raise UserError(
                f"{path} has {path.stat().st_size:,} bytes, when {config.dir} was prepared it had "
                f"{source['bytes']:,}; {AGAIN}"
            )
        if content(path, hashes) != expected:
            raise UserError(f"{path} changed since {config.dir} was prepared; {AGAIN}")
    return inputs if gone is None else f"{gone} is gone since {config.dir} was prepared"


def check_tokenizer(config: DataConfig, plan: Plan) -> Tokenizer:
    """Return the saved tokenizer.

    Raises UserError unless it, and a local one that it was made from, are those that were planned with.
    """
    planned = TokenizerFacts(**plan.summary["tokenizer"])
    places = [config.dir / TOKENIZER]
    if config.tokenizer is not None and (config.root / config.tokenizer).exists():
        places.insert(0, config.root / config.tokenizer)
    for place in places:
        try:
            same = tokenizer_facts(place) == planned and (
                not config.by_chat_template or _same_template(place, plan)
            )
        except Exception:  # a broken file; `tokenizers` raises plain Exception
            same = False
        if not same:
            raise UserError(
                f"{place} is missing, damaged or not the tokenizer that {config.dir} was prepared with; "
                f"{AGAIN}",
                code="tokenizer-changed",
            )
    return read_tokenizer(config.dir / TOKENIZER)[0]


def _same_template(place: Path, plan: Plan) -> bool:
    return read_template(place, str(place)).digest == plan.summary["chat_template"]


def missing_shards(
    config: DataConfig, hashes: Hashes, shard: tuple[int, int], say: Callable[[str], None]
) -> list[Missing]:
    """Those of this job's shards that are not there, or not as they were made."""
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
            if info is not None and not _is_as_made(path, info, listed.get(path.name, info), hashes):
                say(f"{path} was changed since it was made; making it again")
                info = None
            overlap = config.contamination is None or overlap_path(directory, number, config.shards).is_file()
            if info is None or not overlap:
                missing.append(Missing(directory, number, split_number * config.shards + number))
    return missing


def _is_as_made(path: Path, noted: ShardInfo, listed: ShardInfo, hashes: Hashes) -> bool:
    """Whether note, manifest and content of a shard agree."""
    return noted == listed and hashes.sha256(path) == noted.sha256


def data_sets(directory: Path) -> list[Path]:
    """The data sets that should be in a prepared directory, or the data set that the directory is."""
    if (directory / MANIFEST).is_file():
        return [directory]
    named = sorted(place.name for place in directory.glob(f"{VALIDATION}-*"))
    there = [place for name in (TRAIN, VALIDATION, *named) if (place := directory / name).is_dir()]
    for place in there:
        try:
            made = splits_made(parse_manifest(place).config)
        except UserError:
            continue
        also = (split for split in (TRAIN, VALIDATION) if directory / split in there)
        return [directory / split for split in dict.fromkeys((*made, *also))]
    return there or [directory]


def verify(directory: Path) -> tuple[list[str], list[str]]:
    """What was found right, and every fault, a line each."""
    right, faults = [], []
    for place in data_sets(directory):
        try:
            manifest = parse_manifest(place)
        except UserError as error:
            faults.append(str(error))
            continue
        wrong = [*_shard_faults(place, manifest), *_total_faults(place, manifest)]
        wrong += _origin_faults(place, manifest)
        try:
            if not (place.parent / TOKENIZER).is_dir():
                raise UserError(f"{place.parent / TOKENIZER} is missing", code="no-tokenizer")
            tokenizer = read_tokenizer(place.parent / TOKENIZER)
            wrong += _tokenizer_faults(place, manifest, tokenizer[1])
        except UserError as error:
            wrong.append(str(error))
        again = 0
        if not wrong:
            wrong += _row_faults(place)
            again, misencoded = _encoded_again(place, manifest, PlainEncoder(*tokenizer))
            wrong += misencoded
        faults += wrong
        if not wrong:
            counts = f"{manifest.rows:,} rows in {len(manifest.shards)} shards, all as written"
            what = counted(again, "document" if manifest.kind == "text" else "example")
            right.append(f"{place}: {counts}; encoded again and the same: {what if again else 'none'}")
    return right, faults


def _encoded_again(place: Path, manifest: Manifest, plain: PlainEncoder) -> tuple[int, list[str]]:
    """Return how many documents of a data set were encoded again, and the shards where one got other ids."""
    total, faults = 0, []
    for info in manifest.shards:
        same = list(written_again(Shard(place / info.file, manifest.kind), manifest, plain))
        total += len(same)
        if not all(same):
            faults.append(
                f"{place / info.file} has ids that {place.parent / TOKENIZER} does not give for their text"
            )
    return total, faults


def _shard_faults(place: Path, manifest: Manifest) -> Iterator[str]:
    """Files: there, whole, unchanged, readable; and no others."""
    names = [shard_name(i, len(manifest.shards)) for i in range(len(manifest.shards))]
    if [info.file for info in manifest.shards] != names:
        yield f"{place / MANIFEST} does not list its shards in order"
    for extra in sorted(p.name for p in place.glob("*.arrow") if p.name not in names):
        yield f"{place / extra} is not in the manifest"
    for number, info in enumerate(manifest.shards):
        path = place / names[number]
        if not path.is_file():
            yield f"{path} is missing"
            continue
        size = path.stat().st_size
        if size != info.bytes:
            yield f"{path} has {size:,} bytes instead of {info.bytes:,}"
            continue
        found = sha256(path)
        if found != info.sha256:
            yield f"{path} was changed: sha256 {found[:12]}... instead of {info.sha256[:12]}..."
            continue
        note = read_note(place, number, len(names))
        if note is not None and note != info:
            yield f"{path}: its note does not say what {place / MANIFEST} says"
        try:
            yield from _content_faults(path, Shard(path, manifest.kind), info, manifest)
        except (pa.ArrowException, KeyError, ValueError) as error:
            yield f"{path} is not a shard: {one_line(error)}"


def _content_faults(path: Path, shard: Shard, info: ShardInfo, manifest: Manifest) -> Iterator[str]:
    """Columns agree with each other, with the block and with the vocabulary."""
    counted = dict.fromkeys(("rows", "tokens", "segments"), 0)
    for (id_offsets, ids), (segment_offsets, segments), (source_offsets, _) in zip(
        *(shard.columns[name] for name in ("input_ids", "segment_lengths", "sources")), strict=True
    ):
        lengths = np.diff(id_offsets)
        if len(ids) and int(ids.max()) >= manifest.vocab_size:
            yield f"{path} has id {ids.max()}, the vocabulary only {manifest.vocab_size}"
        if (lengths > manifest.block).any() or (
            manifest.kind == "text" and (lengths != manifest.block).any()
        ):
            yield f"{path} has rows that are not {manifest.block} tokens"
        sums = np.add.reduceat(segments, segment_offsets[:-1]) if len(segments) else lengths[:0]
        if not np.array_equal(sums, lengths) or (segments == 0).any():
            yield f"{path} has segments that do not add up to their rows"
        if not np.array_equal(source_offsets, segment_offsets):
            yield f"{path} has segments without a source"
        counted["rows"] += len(lengths)
        counted["tokens"] += len(ids)
        counted["segments"] += len(segments)
    counted["valid_tokens"] = int(shard.valid.sum())
    for name, count in counted.items():
        if count != getattr(info, name):
            yield f"{path} has {count:,} {name}, its manifest {getattr(info, name):,}"
    yield from _domain_faults(path, shard, info, manifest)


def _domain_faults(path: Path, shard: Shard, info: ShardInfo, manifest: Manifest) -> Iterator[str]:
    """The domains of a shard's rows are the manifest's, and hold what it says."""
    names = [one.name for one in manifest.domains]
    if shard.domain.max(initial=0) >= len(names):
        yield f"{path} has rows of domain {shard.domain.max()}, its manifest only {len(names)} domains"
        return
    said = {one.name: one for one in info.domains}
    if len(said) != len(info.domains) or [name for name in names if name in said] != list(said):
        yield f"{path} is said to have domains that are not those of {MANIFEST}, in their order"
        return
    if totals(info.domains)["documents"] != info.documents:
        yield f"{path} is said to hold {info.documents:,} documents, its domains hold others"
    segments = [np.diff(offsets) for offsets, _ in shard.columns["segment_lengths"]]
    found = {
        "rows": None,
        "tokens": np.diff(shard.token_offsets()),
        "valid_tokens": shard.valid,
        "segments": np.concatenate([np.zeros(0, np.int64), *segments]),
    }
    for key, amounts in found.items():
        for name, count in zip(names, np.bincount(shard.domain, amounts, len(names)).tolist(), strict=True):
            expected = getattr(said[name], key) if name in said else 0
            if count != expected:
                yield f"{path} has {int(count):,} {key} of domain {name}, its manifest {expected:,}"


def _total_faults(place: Path, manifest: Manifest) -> Iterator[str]:
    """Sums, the fingerprint, and the digest that covers all of the manifest."""
    file = place / MANIFEST
    for name, total in totals(manifest.shards).items():
        if total != getattr(manifest, name):
            yield f"{file} says {getattr(manifest, name):,} {name}, its shards {total:,}"
    for domain in manifest.domains:
        parts = totals(o for info in manifest.shards for o in info.domains if o.name == domain.name)
        for name, total in parts.items():
            if total != getattr(domain, name):
                said = f"{getattr(domain, name):,} {name} of domain {domain.name}"
                yield f"{file} says {said}, its shards {total:,}"
    counts: Counter[str] = Counter()
    for info in manifest.shards:
        counts.update(info.counts)
    if dict(counts) != manifest.counts:
        yield f"{file} has counts that are not the sums of its shards' counts"
    waste = round(1 - manifest.tokens / max(1, manifest.rows * manifest.block), 6)
    if waste != manifest.waste:
        yield f"{file} says {manifest.waste:.2%} padding, its rows have {waste:.2%}"
    if manifest.fingerprint != content_fingerprint(
        manifest.kind, manifest.block, manifest.tokenizer_fingerprint, manifest.shards
    ):
        yield f"{file} was edited: its fingerprint is not that of its shards"
    if manifest.digest != manifest_digest(manifest):
        yield f"{file} was edited: its digest is not that of its content"


def _origin_faults(place: Path, manifest: Manifest) -> Iterator[str]:
    """What the manifest says of settings and sources is what the directory's plan and the other split say."""
    file, made = place / MANIFEST, manifest.config
    expected = {
        "split": place.name if place.name in splits_made(made) else manifest.split,
        "kind": made.get("kind"),
        "block": made.get("block"),
        "template": made.get("template_version"),
    }
    for name, value in expected.items():
        if getattr(manifest, name) != value:
            yield f"{file} says {name} {getattr(manifest, name)}, it was made with {value}"
    if len(manifest.shards) != made.get("shards"):
        yield f"{file} lists {len(manifest.shards)} shards of {made.get('shards')}"
    try:
        tree = json.loads((place.parent / SETTINGS).read_text(encoding="utf-8"))
        summary = Plan.load(place.parent / PLAN).summary
    except FileNotFoundError:  # a data set may be copied without them
        return
    except Exception as error:  # numpy and zipfile raise many classes for a damaged file
        yield f"{place.parent}: {SETTINGS} or {PLAN} is damaged ({one_line(error)})"
        return
    if tree != made | {"format": FORMAT}:
        yield f"{file} was not made with the settings in {place.parent / SETTINGS}"
    for name in ("sources", "rejected"):
        if getattr(manifest, name) != summary[name]:
            yield f"{file} says other {name} than {place.parent / PLAN}"


def _tokenizer_faults(place: Path, manifest: Manifest, facts: TokenizerFacts) -> Iterator[str]:
    """The tokenizer beside the data set is the one that made it."""
    saved = place.parent / TOKENIZER
    if facts.fingerprint != manifest.tokenizer_fingerprint:
        yield f"{saved} is not the tokenizer that made {place}"
    for name in ("vocab_size", "bos_id", "eos_id"):
        if getattr(facts, name) != getattr(manifest, name):
            yield f"{place / MANIFEST} says {name} {getattr(manifest, name)}, {saved} {getattr(facts, name)}"


def _row_faults(place: Path) -> Iterator[str]:
    """What training would read: supervised targets as counted, positions as segments say."""
    data = TokenDataset(place)
    for start in range(0, len(data), ROWS):
        rows = np.arange(start, min(start + ROWS, len(data)))
        batch: dict[str, Any] = data.batch(rows)
        found = (batch["labels"] != IGNORE).sum(axis=1)
        wrong = np.flatnonzero(found != data.valid[rows])
        if len(wrong):
            row = int(rows[wrong[0]])
            file, at = data.provenance(np.array([row]))[0]
            counts = f"supervises {found[wrong[0]]} tokens, its count says {data.valid[row]}"
            yield f"{place / file} row {at} {counts}"
            return
