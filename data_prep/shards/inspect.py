"""`inspect`: print a prepared data set: counts, lengths, and rows with the loss in colour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from emo.common.causal_lm import IGNORE
from emo.common.errors import UserError
from emo.common.io.untrusted import read_json
from emo.common.text import counted, on_one_line, printable

from ..config import DEFAULT_DOMAIN
from ..encoding.tokenizer import load_tokenizer
from .format import AGAIN, TokenDataset

SOURCES = 20  # sources with a separate line
BAR = 40  # characters of the longest bar
SUPERVISED = "bold green"
CONTEXT = "dim"
MARK = "bold yellow"
# Around supervised text without colours.
OPEN = "⟦"
CLOSE = "⟧"


def inspect(
    directory: Path, samples: int, seed: int, console: Console, at: Sequence[tuple[str, int]] = ()
) -> None:
    """Print the summary of a data set and some of its rows. Raises UserError for another directory.

    Args:
        directory: A split of prepared data.
        samples: Number of rows that are drawn.
        seed: Seed of the draw.
        console: Where the text goes.
        at: Shard files and rows in them to print instead.
    """
    data = TokenDataset(directory)
    for table in _tables(directory, data):
        console.print(table)
    tokenizer = load_tokenizer(directory.parent / "tokenizer")
    drawn = np.random.default_rng(seed).permutation(len(data))[:samples]
    if at:
        drawn = np.array([_find_row(data, file, number) for file, number in at])
    damage = data.damage(drawn, data.manifest.vocab_size)
    if damage is not None:
        raise UserError(f"{damage}; {AGAIN}", code="damaged-data")
    colours = console.is_terminal and not console.no_color
    for row in np.sort(drawn).tolist():
        file, number = data.provenance(np.array([row]))[0]
        domain = data.domains[data.domain[row]]
        suffix = "" if data.domains == (DEFAULT_DOMAIN,) else f", domain {domain}"
        supervised = counted(int(data.valid[row]), "supervised token")
        supervised += f" of weight {data.weight[row]:g}" if data.weighted else ""
        console.rule(f"row {row}: {supervised}  ({file} row {number}{suffix})")
        console.print(render_row(data, row, tokenizer, colours))
    legend = stretch("like this", True, colours), ", context ", ("like this", CONTEXT)
    console.print(Text.assemble("supervised ", *legend))


def _find_row(data: TokenDataset, file: str, number: int) -> int:
    """Return the number of row `number` of a shard file. Raises UserError if there is none."""
    files = [shard.file for shard in data.manifest.shards]
    if file not in files or number >= len(rows := data.rows_of(files.index(file))):
        problem = f"{data.directory} has no row {number} of {file}"
        raise UserError(f"{problem}. Correct --at, or name the split that has it", code="no-such-row")
    return int(rows[number])


def stretch(text: str, supervised: bool, colours: bool) -> Text:
    """Return text in its colour. Without colours supervised text is in brackets."""
    marked = f"{OPEN}{text}{CLOSE}" if supervised and text and not colours else text
    return Text(marked, SUPERVISED if supervised else CONTEXT)


def segment(
    ids: np.ndarray, supervised: np.ndarray, decode: Callable[[list[int]], str], colours: bool
) -> Text:
    """Return the text of a segment with supervised text marked.

    Args:
        ids: int [tokens].
        supervised: bool [tokens].
        decode: Returns the text of ids.
        colours: Whether the terminal has colours.
    """
    text = Text()
    before = ""
    for stop in [*(np.flatnonzero(np.diff(supervised)) + 1).tolist(), len(ids)]:
        # Decoding from the start of the segment keeps spaces and split characters correct.
        decoded = printable(decode(ids[:stop].tolist()))
        text.append(stretch(decoded[len(before) :], bool(supervised[stop - 1]), colours))
        before = decoded
    return text


def render_row(data: TokenDataset, row: int, tokenizer: Any, colours: bool = True) -> Text:
    """Return the text of a row with its segments separated and supervised text marked."""
    batch = data.batch(np.array([row]))
    ids, labels, positions = (batch[key][0] for key in ("input_ids", "labels", "position_ids"))
    used = data.tokens_of(row)
    supervised = np.concatenate([[False], labels[: used - 1] != IGNORE])
    starts = np.append(np.flatnonzero(positions[:used] == 0), used)
    segments = [segment(ids[a:b], supervised[a:b], tokenizer.decode, colours) for a, b in pairwise(starts)]
    return Text("\n── next segment ──\n", MARK).join(segments)


def _tables(directory: Path, data: TokenDataset) -> Iterator[Table]:
    """Yield the tables: summary, domains, sources, segment lengths, and overlap with tasks."""
    m = data.manifest
    table = Table(title=_cell(directory), show_header=False)
    rows = {
        "kind": f"{m.kind}{f', template {m.template}' if m.template else ''}",
        "rows": f"{m.rows:,} of {m.block} tokens",
        "tokens": f"{m.tokens:,}",
        "supervised": f"{m.valid_tokens:,} ({m.valid_tokens / max(1, m.tokens):.1%})",
        "documents": f"{m.documents:,} in {counted(m.segments, 'segment')}",
        "padding": f"{m.waste:.2%}",
        "vocabulary": f"{m.vocab_size:,}, BOS {m.bos_id}, EOS {m.eos_id}",
        "tokenizer": m.tokenizer_fingerprint[:16],
        "fingerprint": m.fingerprint[:16],
    } | {name.replace("_", " "): f"{count:,}" for name, count in m.counts.items()}
    if data.weighted:
        rows["loss weights"] = data.describe_weights()
    for name, value in rows.items():
        table.add_row(_cell(name), _cell(value))
    yield table
    if data.domains != (DEFAULT_DOMAIN,):
        table = Table("domain", "rows", "tokens", "share", "supervised", "documents", title="domains")
        for domain in m.domains:
            share = f"{domain.tokens / max(1, m.tokens):.1%}"
            counts = (f"{count:,}" for count in (domain.valid_tokens, domain.documents))
            table.add_row(_cell(domain.name), f"{domain.rows:,}", f"{domain.tokens:,}", share, *counts)
        yield table
    table = Table("source", "format", "weight", "rows", "used here", "rejected", "not read", title="sources")
    for source in (*m.sources[:SOURCES], *_others(m.sources[SOURCES:], m.split)):
        rejected = [f"{n:,} {reason.replace('_', ' ')}" for reason, n in source["rejected"].items()]
        table.add_row(
            *(_cell(source[key]) for key in ("name", "format", "weight")),
            *(f"{source[key]:,}" for key in ("rows", m.split)),
            _cell(", ".join(rejected) or "none"),
            _cell(", ".join(source["columns_not_read"][:12]) or "none"),
        )
    yield table
    table = Table("tokens", "segments", "", title="segment lengths")
    powers = np.ceil(np.log2(np.maximum(data.segment_lengths(), 1))).astype(int)
    for power, count in zip(*np.unique(powers, return_counts=True), strict=True):
        low = (1 << power >> 1) + 1
        high = 1 << power
        bar = "█" * max(1, round(BAR * count / np.bincount(powers).max()))
        table.add_row(f"{min(low, high):,} to {high:,}", f"{count:,}", bar)
    yield table
    if (directory / "contamination.json").is_file():
        report = read_json(directory / "contamination.json")
        table = Table("task", "test rows", "overlapping", "contained", title="test rows in this text")
        for name, task in report["tasks"].items():
            table.add_row(_cell(name), *(f"{task[key]:,}" for key in ("rows", "overlapping", "contained")))
        table.caption = f"overlapping: shares {_cell(report['ngram'])} words; contained: wholly there"
        yield table


def _others(sources: list[dict[str, Any]], split: str) -> Iterator[dict[str, Any]]:
    """Yield one line with the sum of the sources."""
    if not sources:
        return
    rejected: Counter[str] = Counter()
    for source in sources:
        rejected.update(source["rejected"])
    unread = sorted({name for source in sources for name in source["columns_not_read"]})
    sums = {key: sum(source[key] for source in sources) for key in ("rows", split)}
    yield {
        **{"name": f"{len(sources):,} more", "format": "", "weight": ""},
        **sums,
        **{"rejected": rejected, "columns_not_read": unread},
    }


def _cell(value: object) -> str:
    """Return text without escape sequences of terminals."""
    return on_one_line(str(value))
