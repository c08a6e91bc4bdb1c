"""`inspect`: a prepared data set for the eye: numbers, lengths, and rows with their loss in colour."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from emo.common.errors import UserError
from emo.common.labels import IGNORE
from emo.common.text import counted, on_one_line, printable
from emo.common.untrusted import read_json
from emo.data_prep.config import DEFAULT_DOMAIN
from emo.data_prep.shards import AGAIN, TokenDataset
from emo.data_prep.tokenizer import load_tokenizer

BAR = 40  # characters of the longest bar
SUPERVISED, CONTEXT, MARK = "bold green", "dim", "bold yellow"
OPEN, CLOSE = "⟦", "⟧"  # around what is supervised where there are no colours


def inspect(directory: Path, samples: int, seed: int, console: Console) -> None:
    """Print the summary of a data set and `samples` of its rows. Raises UserError when it is not one."""
    data = TokenDataset(directory)
    console.print(_summary(directory, data))
    if data.domains != (DEFAULT_DOMAIN,):
        console.print(_domains(data))
    console.print(_sources(data))
    console.print(_histogram(data))
    overlap = directory / "contamination.json"
    if overlap.is_file():
        console.print(_overlap(overlap))
    tokenizer = load_tokenizer(directory.parent / "tokenizer")
    drawn = np.random.default_rng(seed).permutation(len(data))[:samples]
    damage = data.damage(drawn, data.manifest.vocab_size)
    if damage is not None:
        raise UserError(f"{damage}; {AGAIN}")
    colours = console.is_terminal and not console.no_color
    for row in np.sort(drawn).tolist():
        file, number = data.provenance(np.array([row]))[0]
        domain = data.domains[data.domain[row]]
        suffix = "" if data.domains == (DEFAULT_DOMAIN,) else f", domain {domain}"
        supervised = counted(int(data.valid[row]), "supervised token")
        console.rule(escape(f"row {row}  ({file} row {number}{suffix}, {supervised})"))
        console.print(coloured(data, row, tokenizer, colours))
    like = stretch("like this", True, colours), ", context ", ("like this", CONTEXT)
    console.print(Text.assemble("supervised ", *like))


def stretch(text: str, supervised: bool, colours: bool) -> Text:
    """A stretch of a row, in its colour; in brackets where it is supervised and there are no colours."""
    marked = f"{OPEN}{text}{CLOSE}" if supervised and text and not colours else text
    return Text(marked, SUPERVISED if supervised else CONTEXT)


def coloured(data: TokenDataset, row: int, tokenizer: object, colours: bool = True) -> Text:
    """A row's text, segments apart, with what carries loss marked."""
    batch = data.batch(np.array([row]))
    ids, labels, positions = (batch[key][0] for key in ("input_ids", "labels", "position_ids"))
    used = data.tokens_of(row)
    supervised = np.concatenate([[False], labels[: used - 1] != IGNORE])
    starts = np.append(np.flatnonzero(positions[:used] == 0), used)
    text = Text()
    for begin, end in pairwise(starts):
        if begin:
            text.append("\n── next segment ──\n", MARK)
        changes = np.flatnonzero(np.diff(supervised[begin:end])) + 1
        before = ""
        for stop in [*(begin + changes), end]:
            # Decoding from the segment's start keeps spaces and split characters right.
            upto = printable(tokenizer.decode(ids[begin:stop]))  # type: ignore[attr-defined]
            text.append(stretch(upto[len(before) :], bool(supervised[stop - 1]), colours))
            before = upto
    return text


def _summary(directory: Path, data: TokenDataset) -> Table:
    m = data.manifest
    table = Table(title=shown(directory), show_header=False)
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
    for name, value in rows.items():
        table.add_row(shown(name), shown(value))
    return table


def _domains(data: TokenDataset) -> Table:
    """Return what of the data is of which domain; shares are of the tokens."""
    table = Table("domain", "rows", "tokens", "share", "supervised", "documents", title="domains")
    total = max(1, data.manifest.tokens)
    for domain in data.manifest.domains:
        share, others = f"{domain.tokens / total:.1%}", (domain.valid_tokens, domain.documents)
        counts = (f"{domain.rows:,}", f"{domain.tokens:,}", share, *(f"{count:,}" for count in others))
        table.add_row(shown(domain.name), *counts)
    return table


def shown(value: object) -> str:
    """A cell of a table as it is: rich would read [b] as markup, and a terminal escapes as commands."""
    return escape(on_one_line(str(value)))


def _sources(data: TokenDataset) -> Table:
    table = Table("source", "format", "weight", "rows", "used here", "rejected", "not read", title="sources")
    for source in data.manifest.sources:
        rejected = [f"{n:,} {reason.replace('_', ' ')}" for reason, n in source["rejected"].items()]
        table.add_row(
            *(shown(source[key]) for key in ("name", "format", "weight")),
            *(f"{source[key]:,}" for key in ("rows", data.manifest.split)),
            shown(", ".join(rejected) or "none"),
            shown(", ".join(source["columns_not_read"][:12]) or "none"),
        )
    return table


def _histogram(data: TokenDataset) -> Table:
    """Segment lengths in powers of two."""
    lengths = data.segment_lengths()
    table = Table("tokens", "segments", "", title="segment lengths")
    bins = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(bins) if len(bins) else np.zeros(0, int)
    for power in np.flatnonzero(counts).tolist():
        low, high = (1 << power >> 1) + 1, 1 << power
        bar = "█" * max(1, round(BAR * counts[power] / counts.max()))
        table.add_row(f"{min(low, high):,} to {high:,}", f"{counts[power]:,}", bar)
    return table


def _overlap(file: Path) -> Table:
    table = Table("task", "test rows", "overlapping", "contained", title="test rows in this text")
    report = read_json(file)
    for name, task in report["tasks"].items():
        table.add_row(shown(name), *(f"{task[key]:,}" for key in ("rows", "overlapping", "contained")))
    table.caption = f"overlapping: shares {shown(report['ngram'])} words; contained: wholly there"
    return table
