"""`sniff`: what a file is taken for, three examples with their loss in colour, and recipe lines to paste."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer

from emo.common.cli.progress import amount
from emo.common.config.recipe import parse_section
from emo.common.errors import UserError
from emo.common.text import counted, printable

from .config import DataConfig, context_of
from .encoding.chat_templates import ChatTemplate, RefusedError, read_template
from .encoding.chats import ChatWriter
from .encoding.templates import Chat, Conversation, render
from .encoding.tokenizer import chat_template, save_tokenizer, tokenizer_facts
from .shards.encode import EncodeSettings, RowEncoder
from .shards.inspect import segment, stretch
from .sources.inputs import Input, open_inputs
from .sources.rows import (
    CHAT_COLUMNS,
    NAMES,
    STRUCTURE,
    TOKEN_COLUMNS,
    Payload,
    Rejected,
    Row,
    TokenIds,
    columns,
    first,
    parse,
    plain_text,
    raw_rows,
)

EXAMPLES = 3
SHOWN = 1600  # characters of an example
CHARS = 4  # in a token, roughly
SHARD = 64 << 20  # bytes of a file for each shard
UNNAMED = "openai-community/gpt2"  # the tokenizer where none was given
VALIDATED, SURELY = 0.05, 5  # share of the rows that is not trained on, where it is so many at least
REASONS = {  # lines of the recipe, and what stands behind them
    f"tokenizer: {UNNAMED}": "that of the model to be trained",
    "strict: false": "or the first row that cannot be read, see above, would end prepare",
}
WHOLE = 1 << 20  # tokens: nothing is cut here
# Words in the names of columns that are prompts or responses, for guesses.
_ASKING = re.compile("question|prompt|instruct|query|ask|user|human|problem|request|source|title", re.I)
_ANSWERING = re.compile(
    "chosen|prefer|(?<![a-z])w(in|ins|inner|inning|on)(?![a-z])|answer|respon|output|complet|reply|assistant|target|"
    "solution|gpt|bot|label",
    re.I,
)
_REJECTED = re.compile(
    "reject|wrong|incorrect|negative|worse|dispref|(?<![a-z])(bad|los(e|es|er|ing|t))(?![a-z])", re.I
)
_NUMBERED = re.compile("(.*?)[ _-]?([0-9]|[a-z])", re.I)  # output_1, response_b
_SPEAKING = re.compile("role|from|speaker|author|sender|name|who", re.I)


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
        messages = "messages" in self.proposed or columns(self.payload, self.input.spec)[0] & {*CHAT_COLUMNS}
        return "chat" if several or messages else "alpaca"


def sniff(files: str, tokenizer: str | None, console: Console) -> str:
    """Print what `files`, a path, pattern or address, is taken for; the recipe lines that read it.

    tokenizer: hub id, directory or .model file; without one text is shown as it is. Raises UserError when no
    row can be read.
    """
    colours = console.is_terminal and not console.no_color
    with tempfile.TemporaryDirectory() as folder:
        directory = chat = None
        if tokenizer is not None:
            directory = Path(folder)
            save_tokenizer(tokenizer, None, directory)
            chat = read_template(directory, "") if chat_template(directory) is not None else None
        look = _best_look(files, None if chat is None else "chat_template")
        if chat is not None and look.config.kind == "instruct":
            written = _written(look, chat)
            if written.good:
                look = written
            else:
                refused = next((row.detail for row in written.rows if isinstance(row, Rejected)), "")
                console.print(Text(printable(f"the tokenizer's chat_template cannot be used: {refused}")))
                look = _look(files, "instruct", look.proposed, None)
                if not look.good:
                    raise _unreadable(look, "without that template either")
        for line in _description(look):
            console.print(Text(printable(line)), soft_wrap=True)
        picked = np.unique(np.linspace(0, len(look.good) - 1, EXAMPLES).astype(int)).tolist()
        examples, lengths = _examples(look, picked, directory, chat, colours)
    for number, example in zip(picked, examples, strict=True):
        console.rule(f"row {look.good[number][0] + 1}")
        example.truncate(SHOWN, overflow="ellipsis")
        console.print(example)
    console.print(stretch("supervised", True, colours) + stretch(", context", False, colours))
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
        objects = look.input.spec.lines or isinstance(look.payload, list)
        for raw in raw_rows(look.payload, look.input.spec)[:EXAMPLES] if objects else []:
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(raw.decode("utf-8-sig")) if isinstance(raw, bytes) else raw
                if isinstance(row, dict) and isinstance(row.get(first(row, TOKEN_COLUMNS) or ""), list):
                    looks.append(_look(files, "text", {}, template, "tokens"))
                    break
                if isinstance(row, dict) and (proposed := guess(row, look.config.kind)):
                    looks.append(_look(files, look.config.kind, proposed, template))
                    break
    for look in looks:
        if 2 * len(look.good) >= len(look.rows) > 0:
            return look
    best = max(looks, key=lambda look: len(look.good))
    if not best.good:
        raise _unreadable(best)
    return best


def _unreadable(look: Look, how: str = "") -> UserError:
    """Return the error for a file without a usable row, which says what is wrong with the first."""
    fault = next((row for row in look.rows if isinstance(row, Rejected)), Rejected("no rows"))
    reason = f"{fault.reason.replace('_', ' ')} ({fault.detail})"
    problem = f"{look.input.name}: no row can be read{how and ' '}{how}: {reason}"
    return UserError(problem, code="nothing-readable")


def _look(files: str, kind: str, proposed: dict[str, str], template: str | None, form: str = "auto") -> Look:
    """Return the first piece of a source, read in one way."""
    source: dict[str, Any] = {"files": files, "format": form} | ({"columns": proposed} if proposed else {})
    tree = {"dir": "prepared", "kind": kind, "tokenizer": "any", "sources": [source]}
    config = parse_section(DataConfig, tree | ({} if template is None else {"template": template}), "data")
    inputs = open_inputs(config)
    opened = inputs[0]
    payload = next((piece.payload for piece in opened.pieces() if piece.payload is not None), b"")
    if opened.spec.format == "lines" and isinstance(payload, bytes):
        # Blank lines may divide the text into stretches of several lines.
        filled = [bool(line.strip()) for line in payload.split(b"\n")[:-1]]
        together = any(a and b for a, b in pairwise(filled))
        if together and filled.count(False) * 20 > len(filled):
            opened.spec = opened.spec._replace(format="paragraphs")
    return Look(opened, len(inputs), payload, list(parse(payload, opened.spec)), config, proposed)


def _written(look: Look, chat: ChatTemplate) -> Look:
    """Return the look without the rows that the chat_template refuses."""
    rows, writer = list(look.rows), ChatWriter(chat)
    for number, row in enumerate(rows):
        try:
            if isinstance(row, Chat):
                writer.examples(row)
        except RefusedError as error:
            rows[number] = Rejected(error.reason, error.detail)
    return look._replace(rows=rows)


def guess(raw: dict[str, Any], kind: str) -> dict[str, str]:
    """Return a proposal for `columns`, by the names and values of one row; {}: none can be made.

    Parts whose columns are known anyway are left out, and so are columns of answers that were rejected, and
    of several answers of which another column may say which is better.
    """
    raw = {name: value for name, value in raw.items() if not _REJECTED.search(str(name))}
    texts = [str(name) for name, value in raw.items() if isinstance(value, str)]
    stems = Counter(match[1] for match in map(_NUMBERED.fullmatch, texts) if match)
    several = {name for name in texts if (match := _NUMBERED.fullmatch(name)) and stems[match[1]] > 1}
    if any(_ANSWERING.search(name) for name in several):
        return {}
    lists = ((name, value) for name, value in raw.items() if isinstance(value, list) and value)
    talks = (name for name, talk in lists if isinstance(talk[0], dict) and len(talk[0]) > 1)
    parts: dict[str, str | None]
    if kind == "text":
        longest = max(texts, key=lambda name: len(raw[name]), default=None)
        parts = {"text": first(raw, NAMES["text"]) or longest}
    elif (column := next(talks, None)) is not None:
        message = raw[column][0]
        keys = [name for name, value in message.items() if isinstance(value, str)]
        role = first(message, NAMES["role"]) or next(filter(_SPEAKING.search, keys), None)
        content = first(message, NAMES["content"]) or next((key for key in keys if key != role), None)
        parts = {"messages": str(column), "role": role, "content": content}
    else:
        prompt = first(raw, NAMES["instruction"]) or next(filter(_ASKING.search, texts), None)
        others = [name for name in texts if name not in (prompt, *NAMES["input"], *NAMES["system"])]
        response = first(raw, NAMES["output"]) or next(filter(_ANSWERING.search, others), None)
        prompt = prompt or next((name for name in others if name != response), None)
        response = response or next((name for name in reversed(others) if name != prompt), None)
        parts = {"instruction": prompt, "output": response}
    if None in parts.values():
        return {}
    return {part: name for part, name in parts.items() if name is not None and name not in NAMES[part]}


def _description(look: Look) -> list[str]:
    """Return the lines about a file that come before its rows."""
    opened, spec = look.input, look.input.spec
    kind = "instructions" if look.config.kind == "instruct" else "text"
    size = f", {amount(opened.size)}" if opened.size else ""
    others = f" and {counted(look.files - 1, 'more file')}" if look.files > 1 else ""
    form = f", format {spec.format}" if spec.format != "auto" else ""
    lines = [f"{opened.name}{size}{others}: {kind}{form}"]
    read, unread = columns(look.payload, spec)
    if read:
        names = ", ".join(sorted(unread)) or "none"
        lines.append(f"columns read: {', '.join(sorted(read))}; not read: {names}")
    if look.proposed:
        lines.append("no column has a known name; these were guessed, look whether they are right")
        if body := look.proposed.get("output"):
            lines.append(
                f"to read {body} as plain text instead, for continual pre-training: leave out kind and "
                f"template below, and write columns: {json.dumps({'text': body}, ensure_ascii=False)}"
            )
    rejected = [row for row in look.rows if isinstance(row, Rejected)]
    reasons = Counter(row.reason.replace("_", " ") for row in rejected)
    listed = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items()) or "none"
    used = f"{counted(len(look.good), 'row')} used of the first {len(look.rows):,}"
    lines.append(f"{used}; rejected: {listed}")
    if fault := next((row for row in rejected if row.detail), None):
        lines.append(f"the first of these: {fault.reason.replace('_', ' ')} ({fault.detail})")
    if unused := sum(row.unused for _, row in look.good if isinstance(row, Conversation | Chat)):
        lines.append(f"messages left out, before the first prompt or after the last response: {unused:,}")
    return lines


def _examples(
    look: Look, picked: list[int], directory: Path | None, chat: ChatTemplate | None, colours: bool
) -> tuple[list[Text], list[int]]:
    """Return the picked rows as training sees them, and the tokens of all; `directory`: of a tokenizer."""
    examples, lengths = [], []
    encoder = None
    decode: Callable[[list[int]], str] = _text
    if directory is not None:
        written_by = chat if look.template == "chat_template" else None
        facts = tokenizer_facts(directory)
        encoder = RowEncoder(
            EncodeSettings(directory, facts, look.template, WHOLE, "truncate", None, False, written_by)
        )
        backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
        decode = partial(backend.decode, skip_special_tokens=False)
    for number, (_, row) in enumerate(look.good):
        if encoder is None:
            ids, supervised = _characters(row, look.template)
        elif isinstance(row, Conversation | Chat):
            encoded = encoder.conversations([row])
            ids, supervised = encoded.ids, np.zeros(len(encoded.ids), bool)
            starts = np.cumsum(encoded.lengths) - encoded.lengths
            for start, spans in zip(starts.tolist(), encoded.spans, strict=True):
                for begin, end in spans:
                    supervised[start + begin : start + end] = True
        else:
            ids = encoder.texts([row], look.input.name).ids
            supervised = np.ones(len(ids), bool)
        exact = encoder is not None or isinstance(row, TokenIds)
        count = len(row.ids) if isinstance(row, TokenIds) else len(ids)
        lengths.append(count if exact else count // CHARS)  # about as many
        if number in picked:
            examples.append(segment(ids, supervised, decode, colours))
    return examples, lengths


def _text(characters: list[int]) -> str:
    return "".join(map(chr, characters))


def _characters(row: Row, template: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the characters of a row that training would see, as numbers, and which carry loss."""
    parts = [(plain_text(row), True)]
    if isinstance(row, Conversation):
        parts = []
        for number, (text, start) in enumerate(render(row, template)):
            parts += [(text[:start], False), (text[start:] + "\n", number not in row.unsupervised)]
    ids = np.array([ord(character) for text, _ in parts for character in text])
    return ids, np.repeat([learned for _, learned in parts], [len(text) for text, _ in parts])


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
    format_ = look.input.spec.format
    form = {"format": format_} if format_ in ("paragraphs", "tokens") else {}
    columns_part = {"columns": look.proposed} if look.proposed else {}
    data |= {"shards": shards, "sources": [source | form | columns_part]}
    text: str = yaml.safe_dump({"data": data}, sort_keys=False, allow_unicode=True, width=10_000)
    advice = (
        {} if tokenizer else {"template: chat": "or chat_template, if the tokenizer of the model has one"}
    )
    for line, reason in (REASONS | advice).items():
        text = text.replace(f"  {line}\n", f"  {line}  # {reason}\n", 1)
    return text
