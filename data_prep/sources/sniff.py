"""`sniff`: what a file is taken for, three examples with their loss in colour, and recipe lines to paste."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer

from common.errors import UserError
from common.progress import amount
from common.recipe import parse_section
from common.text import counted, printable
from data_prep.config import DataConfig, context_of
from data_prep.encode import EncodeSettings, RowEncoder
from data_prep.inputs import Input
from data_prep.inspect import CONTEXT, stretch
from data_prep.rows import STRUCTURE, Payload, Rejected, Row, columns, parse, plain_text, raw_rows
from data_prep.rows.columns import flow, guess
from data_prep.sources import open_inputs
from data_prep.templates import Chat, Conversation, render
from data_prep.templates.chat import ChatTemplate, RefusedError, read_template
from data_prep.templates.chat import render as render_chat
from data_prep.tokenizer import chat_template, save_tokenizer, tokenizer_facts

EXAMPLES = 3
SHOWN = 1600  # characters of an example
CHARS = 4  # in a token, roughly
SHARD = 64 << 20  # bytes of a file for each shard
UNNAMED = "openai-community/gpt2"  # the tokenizer where none was given
VALIDATED = 0.05  # of the rows are not trained on, where there are enough
SURELY = 5  # as many are expected where one is needed
REASONS = {  # lines of the recipe, and what stands behind them
    f"tokenizer: {UNNAMED}": "that of the model to be trained",
    "strict: false": "or the first row that cannot be read, see above, would end prepare",
}
WHOLE = 1 << 20  # tokens: nothing is cut here
Stretch = tuple[str, bool]  # of an example: text, and whether it is supervised


class Taken(NamedTuple):
    """A file as it is understood by its beginning."""

    input: Input  # the first of the inputs
    files: int
    payload: Payload
    rows: list[Row | Rejected]
    config: DataConfig
    proposed: dict[str, str]  # columns that have to be named

    @property
    def good(self) -> list[tuple[int, Row]]:
        """Rows that can be used, and their numbers."""
        return [(number, row) for number, row in enumerate(self.rows) if not isinstance(row, Rejected)]


class Examples(NamedTuple):
    """Rows as training would see them."""

    picked: list[int]  # which of the good rows are shown
    stretches: list[list[Stretch]]  # of those
    lengths: list[int]  # tokens of all good rows, without a tokenizer about as many


def sniff(files: str, tokenizer: str | None, console: Console) -> str:
    """Print what `files`, a path, pattern or address, is taken for; the recipe lines that read it.

    tokenizer: hub id, directory or .model file; without one text is shown as it is. Raises UserError when no
    row can be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        directory = None if tokenizer is None else Path(folder)
        if tokenizer is not None and directory is not None:
            save_tokenizer(tokenizer, None, directory)
        template = "chat_template" if directory is not None and chat_template(directory) is not None else None
        taken = _taken(files, template)
        if template is not None and taken.config.kind == "instruct":
            taken = _written(taken, files, read_template(directory or Path(), str(tokenizer)), console)
        for line in _told(taken):
            console.print(Text(printable(line)), soft_wrap=True)
        examples = _examples(taken, directory)
    colours = console.is_terminal and not console.no_color
    for number, stretches in zip(examples.picked, examples.stretches, strict=True):
        console.rule(f"row {taken.good[number][0] + 1}")
        console.print(_coloured(stretches, colours))
    like = _coloured([("supervised", True), (", context", False)], colours)
    console.print(like)
    console.rule("recipe lines to paste")
    lines = recipe(taken, files, tokenizer, examples.lengths)
    console.print(Text(lines), soft_wrap=True)
    return lines


def _taken(files: str, template: str | None) -> Taken:
    """The first way of reading that half of the rows allow: instructions, text, then by guessed columns."""
    refused: UserError | None = None
    looks = []
    for kind in ("instruct", "text"):
        try:
            looks.append(_look(files, kind, {}, template))
        except UserError as error:
            refused = error  # of text, after that of instructions
    if not looks:
        raise refused or UserError(f"{files} cannot be read")
    for look in looks[:2]:
        if proposed := _proposed(look):
            looks.append(_look(files, look.config.kind, proposed, template))
    for look in looks:
        if 2 * len(look.good) >= len(look.rows) > 0:
            return look
    best = max(looks, key=lambda look: len(look.good))
    if best.good:
        return best
    fault = next((row for row in best.rows if isinstance(row, Rejected)), Rejected("no rows"))
    raise UserError(
        f"{best.input.name}: no row can be read: {fault.reason.replace('_', ' ')} ({fault.detail})"
    )


def _look(files: str, kind: str, proposed: dict[str, str], template: str | None) -> Taken:
    """The first piece of a source, read in one way."""
    source: dict[str, Any] = {"files": files}
    if proposed:
        source["columns"] = proposed
    tree = {"dir": "prepared", "kind": kind, "tokenizer": "any", "sources": [source]}
    if template is not None:
        tree["template"] = template
    config = parse_section(DataConfig, tree, "data")
    inputs = open_inputs(config)
    opened = inputs[0]
    payload = next((piece.payload for piece in opened.pieces() if piece.payload is not None), b"")
    if isinstance(payload, bytes) and opened.spec.format == "lines" and _has_paragraphs(payload):
        opened.spec = opened.spec._replace(format="paragraphs")
    return Taken(opened, len(inputs), payload, list(parse(payload, opened.spec)), config, proposed)


def _has_paragraphs(text: bytes) -> bool:
    """Return whether blank lines divide a text into stretches of several lines."""
    lines = text.split(b"\n")[:-1]
    blank = sum(not line.strip() for line in lines)
    return (
        bool(blank) and any(a.strip() and b.strip() for a, b in pairwise(lines)) and blank * 20 > len(lines)
    )


def _proposed(look: Taken) -> dict[str, str]:
    """Columns for rows that have none of the known names, by the first rows that are objects."""
    if not look.input.spec.lines and isinstance(look.payload, bytes):
        return {}
    for raw in raw_rows(look.payload, look.input.spec)[:EXAMPLES]:
        try:
            row = json.loads(raw.decode("utf-8-sig")) if isinstance(raw, bytes) else raw
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and (columns := guess(row, look.config.kind)):
            return columns
    return {}


def _written(taken: Taken, files: str, template: ChatTemplate, console: Console) -> Taken:
    """The same without the rows that the chat_template refuses; where that are all, without the template."""
    rows: list[Row | Rejected] = []
    why = None
    for row in taken.rows:
        try:
            if isinstance(row, Chat):
                render_chat(row, template)
            rows.append(row)
        except RefusedError as error:
            rows.append(Rejected(error.reason, error.detail))
            why = why or error
    if why is not None and not any(isinstance(row, Chat) for row in rows):
        console.print(Text(printable(f"the tokenizer's chat_template cannot be used: {why.detail}")))
        return _look(files, "instruct", taken.proposed, None)
    return taken._replace(rows=rows)


def _told(taken: Taken) -> list[str]:
    """Return the lines about a file that come before its rows."""
    opened, spec = taken.input, taken.input.spec
    kind = "instructions" if taken.config.kind == "instruct" else "text"
    size = f", {amount(opened.size)}" if opened.size else ""
    others = f" and {counted(taken.files - 1, 'more file')}" if taken.files > 1 else ""
    form = f", format {spec.format}" if spec.format != "auto" else ""
    rejected = Counter(row.reason.replace("_", " ") for row in taken.rows if isinstance(row, Rejected))
    lines = [f"{opened.name}{size}{others}: {kind}{form}"]
    read, unread, marks = columns(taken.payload, spec)
    if read:
        lines.append(
            f"columns read: {', '.join(sorted(read))}; not read: {', '.join(sorted(unread)) or 'none'}"
        )
        if marks:
            lines.append(
                f"{', '.join(sorted(marks))} is true or false and is not read: if it marks answers as bad, "
                "these would be trained on too; leave such rows out first"
            )
    if taken.proposed:
        lines.append("no column has a known name; these were guessed, look whether they are right")
        if body := taken.proposed.get("output"):
            lines.append(
                f"to read {body} as plain text instead, for continual pre-training: leave out kind and "
                f"template below, and write columns: {flow({'text': body})}"
            )
    listed = ", ".join(f"{count:,} {reason}" for reason, count in rejected.items()) or "none"
    first, are = counted(len(taken.rows), "row"), "is" if len(taken.good) == 1 else "are"
    lines.append(f"of the first {first} {len(taken.good):,} {are} used; rejected: {listed}")
    if fault := next((row for row in taken.rows if isinstance(row, Rejected) and row.detail), None):
        lines.append(f"the first of these: {fault.reason.replace('_', ' ')} ({fault.detail})")
    if unused := sum(row.unused for _, row in taken.good if isinstance(row, Conversation | Chat)):
        lines.append(f"messages left out, before the first prompt or after the last response: {unused:,}")
    return lines


def _examples(taken: Taken, directory: Path | None) -> Examples:
    """The good rows as training sees them; `place`: of a saved tokenizer."""
    rows = [row for _, row in taken.good]
    picked = np.unique(np.linspace(0, len(rows) - 1, EXAMPLES).astype(int)).tolist()
    template = _template(taken)
    if directory is None:
        lengths = [len(plain_text(row)) // CHARS for row in rows]
        return Examples(picked, [_plain(rows[number], template) for number in picked], lengths)
    chat = read_template(directory, "") if template == "chat_template" else None
    encoder = RowEncoder(
        EncodeSettings(directory, tokenizer_facts(directory), template, WHOLE, "truncate", None, False, chat)
    )
    decoder = Tokenizer.from_file(str(directory / "tokenizer.json"))
    encoded = [_encoded(row, encoder, taken.input.name) for row in rows]
    stretches = [_decoded(encoded[number][0], encoded[number][1], decoder) for number in picked]
    return Examples(picked, stretches, [len(ids) for ids, _ in encoded])


def _encoded(row: Row, encoder: RowEncoder, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Ids of a row, and int64 [k, 2], which of them are supervised."""
    if isinstance(row, Conversation | Chat):
        example = encoder.conversations([row])
        return example.ids, example.spans[0]
    ids = encoder.texts([row], name).ids
    return ids, np.array([[0, len(ids)]], np.int64)


def _template(taken: Taken) -> str:
    """Alpaca's rows are written by its prompt, chats by what the tokenizer has or as a transcript."""
    if taken.config.by_chat_template:
        return "chat_template"
    several = any(isinstance(row, Conversation) and len(row.exchanges) > 1 for _, row in taken.good)
    return "chat" if several else "alpaca"


def _plain(row: Row, template: str) -> list[Stretch]:
    if not isinstance(row, Conversation):
        return [(str(row), True)]
    stretches = []
    for number, turn in enumerate(render(row, template)):
        supervised = number not in row.unsupervised
        stretches += [(turn.text[: turn.start], False), (turn.text[turn.start :] + "\n", supervised)]
    return stretches


def _decoded(ids: np.ndarray, spans: np.ndarray, decoder: Tokenizer) -> list[Stretch]:
    """Ids as text; decoding from the beginning keeps spaces and split characters right."""
    edges = sorted({0, len(ids), *spans.ravel().tolist()})
    stretches, before = [], ""
    for begin, end in pairwise(edges):
        text = decoder.decode(ids[:end].tolist(), skip_special_tokens=False)
        inside = bool(((spans[:, 0] <= begin) & (begin < spans[:, 1])).any())
        stretches.append((text[len(before) :], inside))
        before = text
    return stretches


def _coloured(stretches: list[Stretch], colours: bool) -> Text:
    """An example for the terminal, its first SHOWN characters."""
    text, left = Text(), SHOWN
    for piece, supervised in stretches:
        text.append(stretch(printable(piece[:left]), supervised, colours))
        left -= len(piece[:left])
        if left <= 0:
            text.append(" ...", CONTEXT)
            break
    return text


def recipe(taken: Taken, files: str, tokenizer: str | None, lengths: list[int]) -> str:
    """The `data` section that reads a file as it was shown: YAML to paste."""
    size = taken.input.size * taken.files
    address = files if "://" in files else str(Path(files).expanduser().absolute())
    source: dict[str, Any] = {"files": address}
    if taken.input.spec.format == "paragraphs":
        source["format"] = "paragraphs"
    if taken.proposed:
        source["columns"] = taken.proposed
    shards = min(64, max(1, size // SHARD))
    data: dict[str, Any] = {"dir": f"runs/data/{Path(files).name.split('.')[0] or 'data'}"}
    local = tokenizer is not None and Path(tokenizer).exists()
    data["tokenizer"] = str(Path(str(tokenizer)).absolute()) if local else tokenizer or UNNAMED
    if taken.config.kind == "instruct":
        data |= {"kind": "instruct", "template": _template(taken)}
        longest = int(np.quantile(lengths, 0.99)) if lengths else 512
        data["block"] = _power(max(256, longest), up=True)
    else:
        data["block"] = _power(min(1024, max(32, sum(lengths) // 2)))
    context = context_of(Path(str(tokenizer))) if local else None
    data["block"] = min(data["block"], context or data["block"])
    if _enough(taken, lengths, data["block"], shards):
        data["validation_fraction"] = VALIDATED
    if any(isinstance(row, Rejected) and row.reason in STRUCTURE for row in taken.rows):
        data["strict"] = False
    data |= {"shards": shards, "sources": [source]}
    text: str = yaml.safe_dump({"data": data}, sort_keys=False, allow_unicode=True, width=10_000)
    for line, reason in REASONS.items():
        text = text.replace(f"  {line}\n", f"  {line}  # {reason}\n", 1)
    return text


def _enough(taken: Taken, lengths: list[int], block: int, shards: int) -> bool:
    """Return whether VALIDATED of the rows, drawn by chance, surely gives every validation shard rows."""
    rows, tokens = VALIDATED * len(lengths), VALIDATED * sum(lengths)
    large = taken.input.size > len(taken.payload) if isinstance(taken.payload, bytes) else False
    return rows >= SURELY and (large or taken.config.kind == "instruct" or tokens >= SURELY * block * shards)


def _power(count: int, up: bool = False) -> int:
    """A power of two near a number of tokens, 4096 at most."""
    return min(4096, 1 << (count - 1).bit_length() if up else 1 << count.bit_length() - 1)
