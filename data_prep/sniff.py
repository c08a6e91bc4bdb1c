"""`sniff`: what a file is taken for, three examples with their loss in colour, and recipe lines to paste."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer

from emo.common.errors import UserError
from emo.common.progress import amount
from emo.common.recipe import parse_section
from emo.common.text import counted, printable
from emo.data_prep.config import DataConfig, context_of
from emo.data_prep.encode import EncodeSettings, RowEncoder
from emo.data_prep.inputs import Input
from emo.data_prep.inspect import CONTEXT, stretch
from emo.data_prep.rows import STRUCTURE, Payload, Rejected, Row, columns, guess, parse, plain_text, raw_rows
from emo.data_prep.sources import open_inputs
from emo.data_prep.templates import Chat, Conversation, render
from emo.data_prep.templates.chat import RefusedError, read_template
from emo.data_prep.templates.chat import render as render_chat
from emo.data_prep.tokenizer import chat_template, save_tokenizer, tokenizer_facts

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


class Look(NamedTuple):
    """A file as it is understood by its beginning."""

    input: Input  # the first of the inputs
    files: int
    payload: Payload
    rows: list[Row | Rejected]
    config: DataConfig
    proposed: dict[str, str]  # columns that have to be named

    @property
    def good(self) -> list[tuple[int, Row]]:
        """Return the rows that can be used, and their numbers."""
        return [(number, row) for number, row in enumerate(self.rows) if not isinstance(row, Rejected)]

    @property
    def template(self) -> str:
        """Return Alpaca's prompt for its rows; for chats what the tokenizer has, or a transcript."""
        if self.config.by_chat_template:
            return "chat_template"
        several = any(isinstance(row, Conversation) and len(row.exchanges) > 1 for _, row in self.good)
        return "chat" if several else "alpaca"


def sniff(files: str, tokenizer: str | None, console: Console) -> str:
    """Print what `files`, a path, pattern or address, is taken for; the recipe lines that read it.

    tokenizer: hub id, directory or .model file; without one text is shown as it is. Raises UserError when no
    row can be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        directory = None if tokenizer is None else Path(folder)
        if tokenizer is not None and directory is not None:
            save_tokenizer(tokenizer, None, directory)
        has_template = directory is not None and chat_template(directory) is not None
        look = _best_look(files, "chat_template" if has_template else None)
        if has_template and directory is not None and look.config.kind == "instruct":
            look = _written(look, files, directory, console)
        for line in _description(look):
            console.print(Text(printable(line)), soft_wrap=True)
        rows = [row for _, row in look.good]
        picked = np.unique(np.linspace(0, len(rows) - 1, EXAMPLES).astype(int)).tolist()
        examples, lengths = _examples(look, rows, picked, directory)
    colours = console.is_terminal and not console.no_color
    for number, stretches in zip(picked, examples, strict=True):
        console.rule(f"row {look.good[number][0] + 1}")
        console.print(_coloured(stretches, colours))
    console.print(_coloured([("supervised", True), (", context", False)], colours))
    console.rule("recipe lines to paste")
    lines = recipe(look, files, tokenizer, lengths)
    console.print(Text(lines), soft_wrap=True)
    return lines


def _best_look(files: str, template: str | None) -> Look:
    """Return the first way of reading that half of the rows allow.

    Instructions come first, then text, then both by guessed columns.
    """
    looks = []
    with contextlib.suppress(UserError):  # what is no text either is refused as that
        looks.append(_look(files, "instruct", {}, template))
    try:
        looks.append(_look(files, "text", {}, template))
    except UserError:
        if not looks:
            raise
    for look in looks[:2]:
        for row in _objects(look):  # which may have none of the known names
            if proposed := guess(row, look.config.kind):
                looks.append(_look(files, look.config.kind, proposed, template))
                break
    for look in looks:
        if 2 * len(look.good) >= len(look.rows) > 0:
            return look
    best = max(looks, key=lambda look: len(look.good))
    if not best.good:
        fault = next((row for row in best.rows if isinstance(row, Rejected)), Rejected("no rows"))
        reason = f"{fault.reason.replace('_', ' ')} ({fault.detail})"
        raise UserError(f"{best.input.name}: no row can be read: {reason}", code="nothing-readable")
    return best


def _look(files: str, kind: str, proposed: dict[str, str], template: str | None) -> Look:
    """Return the first piece of a source, read in one way."""
    source: dict[str, Any] = {"files": files} | ({"columns": proposed} if proposed else {})
    tree = {"dir": "prepared", "kind": kind, "tokenizer": "any", "sources": [source]}
    tree |= {} if template is None else {"template": template}
    config = parse_section(DataConfig, tree, "data")
    inputs = open_inputs(config)
    first = inputs[0]
    payload = next((piece.payload for piece in first.pieces() if piece.payload is not None), b"")
    if first.spec.format == "lines" and isinstance(payload, bytes):
        # Blank lines may divide the text into stretches of several lines.
        filled = [bool(line.strip()) for line in payload.split(b"\n")[:-1]]
        together = any(a and b for a, b in pairwise(filled))
        if together and filled.count(False) * 20 > len(filled):
            first.spec = first.spec._replace(format="paragraphs")
    return Look(first, len(inputs), payload, list(parse(payload, first.spec)), config, proposed)


def _objects(look: Look) -> Iterator[dict[str, Any]]:
    """Yield the first rows that are objects."""
    if look.input.spec.lines or not isinstance(look.payload, bytes):
        for raw in raw_rows(look.payload, look.input.spec)[:EXAMPLES]:
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(raw.decode("utf-8-sig")) if isinstance(raw, bytes) else raw
                if isinstance(row, dict):
                    yield row


def _written(look: Look, files: str, directory: Path, console: Console) -> Look:
    """Return the look without rows that the chat_template refuses; where it refuses all, without it."""
    template = read_template(directory, "")
    rows: list[Row | Rejected] = []
    reason = None
    for row in look.rows:
        try:
            if isinstance(row, Chat):
                render_chat(row, template)
            rows.append(row)
        except RefusedError as error:
            rows.append(Rejected(error.reason, error.detail))
            reason = reason or error.detail
    if reason is not None and not any(isinstance(row, Chat) for row in rows):
        console.print(Text(printable(f"the tokenizer's chat_template cannot be used: {reason}")))
        return _look(files, "instruct", look.proposed, None)
    return look._replace(rows=rows)


def _description(look: Look) -> list[str]:
    """Return the lines about a file that come before its rows."""
    opened, spec = look.input, look.input.spec
    kind = "instructions" if look.config.kind == "instruct" else "text"
    size = f", {amount(opened.size)}" if opened.size else ""
    others = f" and {counted(look.files - 1, 'more file')}" if look.files > 1 else ""
    form = f", format {spec.format}" if spec.format != "auto" else ""
    lines = [f"{opened.name}{size}{others}: {kind}{form}"]
    read, unread, marks = columns(look.payload, spec)
    if read:
        names = ", ".join(sorted(unread)) or "none"
        lines.append(f"columns read: {', '.join(sorted(read))}; not read: {names}")
    if marks:
        lines.append(
            f"{', '.join(sorted(marks))} is true or false and is not read: if it marks answers as bad, "
            "these would be trained on too; leave such rows out first"
        )
    if look.proposed:
        lines.append("no column has a known name; these were guessed, look whether they are right")
        if body := look.proposed.get("output"):
            text = yaml.safe_dump({"text": body}, default_flow_style=True, width=10_000, allow_unicode=True)
            lines.append(
                f"to read {body} as plain text instead, for continual pre-training: leave out kind and "
                f"template below, and write columns: {text.strip()}"
            )
    rejected = [row for row in look.rows if isinstance(row, Rejected)]
    reasons = Counter(row.reason.replace("_", " ") for row in rejected)
    listed = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items()) or "none"
    first, are = counted(len(look.rows), "row"), "is" if len(look.good) == 1 else "are"
    lines.append(f"of the first {first} {len(look.good):,} {are} used; rejected: {listed}")
    if fault := next((row for row in rejected if row.detail), None):
        lines.append(f"the first of these: {fault.reason.replace('_', ' ')} ({fault.detail})")
    if unused := sum(row.unused for _, row in look.good if isinstance(row, Conversation | Chat)):
        lines.append(f"messages left out, before the first prompt or after the last response: {unused:,}")
    return lines


def _examples(
    look: Look, rows: list[Row], picked: list[int], directory: Path | None
) -> tuple[list[list[Stretch]], list[int]]:
    """Return the picked rows as training sees them, and the tokens of all; `directory`: of a tokenizer."""
    if directory is None:  # about as many
        plain: list[list[Stretch]] = []
        for row in (rows[number] for number in picked):
            if not isinstance(row, Conversation):
                plain.append([(str(row), True)])
                continue
            plain.append([])
            for number, turn in enumerate(render(row, look.template)):
                supervised = number not in row.unsupervised
                plain[-1] += [(turn.text[: turn.start], False), (turn.text[turn.start :] + "\n", supervised)]
        return plain, [len(plain_text(row)) // CHARS for row in rows]
    chat = read_template(directory, "") if look.template == "chat_template" else None
    facts = tokenizer_facts(directory)
    encoder = RowEncoder(
        EncodeSettings(directory, facts, look.template, WHOLE, "truncate", None, False, chat)
    )
    decoder = Tokenizer.from_file(str(directory / "tokenizer.json"))
    encoded = []
    for row in rows:
        if isinstance(row, Conversation | Chat):
            example = encoder.conversations([row])
            encoded.append((example.ids, example.spans[0]))
        else:
            ids = encoder.texts([row], look.input.name).ids
            encoded.append((ids, np.array([[0, len(ids)]], np.int64)))
    examples: list[list[Stretch]] = []
    for ids, spans in (encoded[number] for number in picked):
        examples.append([])
        before = ""
        for begin, end in pairwise(sorted({0, len(ids), *spans.ravel().tolist()})):
            # Decoding from the beginning keeps spaces and split characters right.
            text = decoder.decode(ids[:end].tolist(), skip_special_tokens=False)
            inside = bool(((spans[:, 0] <= begin) & (begin < spans[:, 1])).any())
            examples[-1].append((text[len(before) :], inside))
            before = text
    return examples, [len(ids) for ids, _ in encoded]


def _coloured(stretches: list[Stretch], colours: bool) -> Text:
    """Return an example for the terminal, its first SHOWN characters."""
    text, left = Text(), SHOWN
    for piece, supervised in stretches:
        text.append(stretch(printable(piece[:left]), supervised, colours))
        left -= len(piece[:left])
        if left <= 0:
            text.append(" ...", CONTEXT)
            break
    return text


def recipe(look: Look, files: str, tokenizer: str | None, lengths: list[int]) -> str:
    """Return the `data` section that reads a file as it was shown: YAML to paste."""
    size = look.input.size * look.files
    source = {"files": files if "://" in files else str(Path(files).expanduser().absolute())}
    shards = min(64, max(1, size // SHARD))
    data: dict[str, Any] = {"dir": f"runs/data/{Path(files).name.split('.')[0] or 'data'}"}
    local = Path(tokenizer) if tokenizer is not None and Path(tokenizer).exists() else None
    data["tokenizer"] = str(local.absolute()) if local else tokenizer or UNNAMED
    tokens = sum(lengths)
    if look.config.kind == "instruct":
        data |= {"kind": "instruct", "template": look.template}
        longest = int(np.quantile(lengths, 0.99)) if lengths else 512
        block = min(4096, 1 << (max(256, longest) - 1).bit_length())
    else:
        block = 1 << min(1024, max(32, tokens // 2)).bit_length() - 1
    data["sequence_len"] = min(block, (context_of(local) if local else None) or block)
    # Rows drawn by chance must surely give every shard of a validation set some.
    large = isinstance(look.payload, bytes) and look.input.size > len(look.payload)
    enough = (
        large
        or look.config.kind == "instruct"
        or VALIDATED * tokens >= SURELY * data["sequence_len"] * shards
    )
    if enough and VALIDATED * len(lengths) >= SURELY:
        data["validation_fraction"] = VALIDATED
    if any(isinstance(row, Rejected) and row.reason in STRUCTURE for row in look.rows):
        data["strict"] = False
    form = {"format": "paragraphs"} if look.input.spec.format == "paragraphs" else {}
    columns_part = {"columns": look.proposed} if look.proposed else {}
    data |= {"shards": shards, "sources": [source | form | columns_part]}
    text: str = yaml.safe_dump({"data": data}, sort_keys=False, allow_unicode=True, width=10_000)
    for line, reason in REASONS.items():
        text = text.replace(f"  {line}\n", f"  {line}  # {reason}\n", 1)
    return text
