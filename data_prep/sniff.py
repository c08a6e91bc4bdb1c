"""`sniff`: show how a file is parsed, three examples with their loss in colour, and a `data` section."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer

from emo.common.cli.progress import amount
from emo.common.config.recipe import dump_recipe, parse_section
from emo.common.errors import UserError
from emo.common.text import counted, printable

from .config import DataConfig, context_of
from .encoding.chat_templates import ChatTemplate, RefusedError, read_template
from .encoding.chat_writer import ChatWriter
from .encoding.templates import Chat, Conversation, render
from .encoding.tokenizer import chat_template, save_tokenizer, tokenizer_facts
from .shards.encode import EncodeSettings, RowEncoder
from .shards.inspect import segment, stretch
from .sources.inputs import open_inputs
from .sources.reader import SourceReader
from .sources.rows import find_columns, parse, plain_text, raw_rows
from .sources.spec import (
    CHAT_COLUMNS,
    NAMES,
    STRUCTURE,
    TOKEN_COLUMNS,
    Payload,
    Rejected,
    Row,
    TokenIds,
    first_present,
)

EXAMPLES = 3
EXAMPLE_CHARS = 1600  # longest printed example
CHARS_PER_TOKEN = 4  # approximately
SHARD_BYTES = 64 << 20  # bytes of a file for each shard
DEFAULT_TOKENIZER = "openai-community/gpt2"
VALIDATION_SHARE = 0.05  # share of the rows for validation
MIN_VALIDATION = 5  # fewest rows for validation
COMMENTS = {  # comments on lines of the recipe
    f"tokenizer: {DEFAULT_TOKENIZER}": "use the tokenizer of your model",
    "strict: false": "skip rows that cannot be read, see above",
}
NO_LIMIT = 1 << 20  # tokens: nothing is cut
# Words in the names of columns with prompts or responses, for guesses.
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
    """One way to parse a file, with the rows at its beginning."""

    input: SourceReader  # the first file
    files: int
    payload: Payload
    rows: list[Row | Rejected]
    config: DataConfig
    proposed: dict[str, str]  # `columns` for the recipe

    @property
    def good(self) -> list[tuple[int, Row]]:
        """Return the usable rows and their numbers."""
        return [(number, row) for number, row in enumerate(self.rows) if not isinstance(row, Rejected)]

    @property
    def template(self) -> str:
        """Return alpaca for Alpaca rows, and chat_template or chat for chats."""
        if self.config.by_chat_template:
            return "chat_template"
        several = any(isinstance(row, Conversation) and len(row.exchanges) > 1 for _, row in self.good)
        messages = "messages" in self.proposed or find_columns(self.payload, self.input.spec)[0] & {
            *CHAT_COLUMNS
        }
        return "chat" if several or messages else "alpaca"


def sniff(files: str, tokenizer: str | None, console: Console) -> str:
    """Print how files are parsed. Return the recipe. Raises UserError if no row can be read.

    Args:
        files: A path, pattern or address.
        tokenizer: Hub id, directory or .model file, or None to print characters instead of tokens.
        console: Prints the output.
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
            writable = _reject_unwritable(look, chat)
            if writable.good:
                look = writable
            else:
                refused = next((row.detail for row in writable.rows if isinstance(row, Rejected)), "")
                console.print(Text(printable(f"the tokenizer's chat_template cannot be used: {refused}")))
                look = _look(files, "instruct", look.proposed, None)
                if not look.good:
                    raise _unreadable(look, "also without that template")
        for line in _describe(look):
            console.print(Text(printable(line)), soft_wrap=True)
        chosen = np.unique(np.linspace(0, len(look.good) - 1, EXAMPLES).astype(int)).tolist()
        examples, lengths = _examples(look, chosen, directory, chat, colours)
    for number, example in zip(chosen, examples, strict=True):
        console.rule(f"row {look.good[number][0] + 1}")
        example.truncate(EXAMPLE_CHARS, overflow="ellipsis")
        console.print(example)
    console.print(stretch("supervised", True, colours) + stretch(", context", False, colours))
    console.rule("recipe lines to paste")
    lines = make_recipe(look, files, tokenizer, lengths)
    console.print(Text(lines), soft_wrap=True)
    return lines


def _best_look(files: str, template: str | None) -> Look:
    """Return the first way of parsing that at least half of the rows allow.

    Instructions are tried first, then text, then both with guessed columns.
    """
    looks = []
    with contextlib.suppress(UserError):  # the error of parsing as text is raised instead
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
                if isinstance(row, dict) and isinstance(
                    row.get(first_present(row, TOKEN_COLUMNS) or ""), list
                ):
                    looks.append(_look(files, "text", {}, template, "tokens"))
                    break
                if isinstance(row, dict) and (proposed := guess_columns(row, look.config.kind)):
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
    """Return the error for a file without a usable row, with the problem of the first row."""
    fault = next((row for row in look.rows if isinstance(row, Rejected)), Rejected("no rows"))
    reason = f"{fault.reason.replace('_', ' ')} ({fault.detail})"
    problem = f"{look.input.name}: no row can be read{how and ' '}{how}: {reason}"
    return UserError(problem, code="nothing-readable")


def _look(files: str, kind: str, proposed: dict[str, str], template: str | None, form: str = "auto") -> Look:
    """Return the first piece of a source, parsed in one way."""
    source = {"files": files, "format": form, "columns": proposed or None}
    tree = {"dir": "prepared", "kind": kind, "tokenizer": "any", "sources": [source]}
    config = parse_section(DataConfig, tree | ({} if template is None else {"template": template}), "data")
    inputs = open_inputs(config)
    opened = inputs[0]
    opened.spec = opened.spec._replace(all_columns=True)  # to guess columns from their values
    payload = next((piece.payload for piece in opened.pieces() if piece.payload is not None), b"")
    if opened.spec.format == "lines" and isinstance(payload, bytes):
        # Blank lines may separate paragraphs of several lines.
        filled = [bool(line.strip()) for line in payload.split(b"\n")[:-1]]
        has_paragraphs = any(a and b for a, b in pairwise(filled))
        if has_paragraphs and filled.count(False) * 20 > len(filled):
            opened.spec = opened.spec._replace(format="paragraphs")
    return Look(opened, len(inputs), payload, list(parse(payload, opened.spec)), config, proposed)


def _reject_unwritable(look: Look, chat: ChatTemplate) -> Look:
    """Return the look with the rows rejected that the chat_template cannot write."""
    rows = list(look.rows)
    writer = ChatWriter(chat)
    for number, row in enumerate(rows):
        try:
            if isinstance(row, Chat):
                writer.examples(row)
        except RefusedError as error:
            rows[number] = Rejected(error.reason, error.detail)
    return look._replace(rows=rows)


def guess_columns(row: Mapping[str, object], kind: str) -> dict[str, str]:
    """Return a proposal for `columns` by the names and values of one row, or {} without a plausible one.

    Parts with known columns are left out. Columns of rejected answers are not used, and rows with several
    numbered answers have no proposal, because another column may hold the preference.
    """
    row = {name: value for name, value in row.items() if not _REJECTED.search(str(name))}
    texts = {str(name): value for name, value in row.items() if isinstance(value, str)}
    stems = Counter(match[1] for match in map(_NUMBERED.fullmatch, texts) if match)
    several = {name for name in texts if (match := _NUMBERED.fullmatch(name)) and stems[match[1]] > 1}
    if any(_ANSWERING.search(name) for name in several):
        return {}
    lists = ((name, value) for name, value in row.items() if isinstance(value, list) and value)
    chats = ((str(name), chat[0]) for name, chat in lists if isinstance(chat[0], dict) and len(chat[0]) > 1)
    parts: dict[str, str | None]
    if kind == "text":
        longest = max(texts, key=lambda name: len(texts[name]), default=None)
        parts = {"text": first_present(row, NAMES["text"]) or longest}
    elif (chat := next(chats, None)) is not None:
        column, message = chat
        keys = [name for name, value in message.items() if isinstance(value, str)]
        role = first_present(message, NAMES["role"]) or next(filter(_SPEAKING.search, keys), None)
        content = first_present(message, NAMES["content"]) or next((key for key in keys if key != role), None)
        parts = {"messages": column, "role": role, "content": content}
    else:
        prompt = first_present(row, NAMES["instruction"]) or next(filter(_ASKING.search, texts), None)
        others = [name for name in texts if name not in (prompt, *NAMES["input"], *NAMES["system"])]
        response = first_present(row, NAMES["output"]) or next(filter(_ANSWERING.search, others), None)
        prompt = prompt or next((name for name in others if name != response), None)
        response = response or next((name for name in reversed(others) if name != prompt), None)
        parts = {"instruction": prompt, "output": response}
    if None in parts.values():
        return {}
    return {part: name for part, name in parts.items() if name is not None and name not in NAMES[part]}


def _describe(look: Look) -> list[str]:
    """Return the lines about a file that are printed before its rows."""
    reader = look.input
    spec = look.input.spec
    kind = "instructions" if look.config.kind == "instruct" else "text"
    size = f", {amount(reader.size)}" if reader.size else ""
    others = f" and {counted(look.files - 1, 'more file')}" if look.files > 1 else ""
    form = f", format {spec.format}" if spec.format != "auto" else ""
    lines = [f"{reader.name}{size}{others}: {kind}{form}"]
    read, unread = find_columns(look.payload, spec)
    if read:
        names = ", ".join(sorted(unread)) or "none"
        lines.append(f"columns read: {', '.join(sorted(read))}; not read: {names}")
    if look.proposed:
        lines.append("no column has a known name; these were guessed, check them")
        if body := look.proposed.get("output"):
            lines.append(
                f"to train on {body} as plain text instead: remove kind and template below, and set "
                f"columns: {json.dumps({'text': body}, ensure_ascii=False)}"
            )
    rejected = [row for row in look.rows if isinstance(row, Rejected)]
    reasons = Counter(row.reason.replace("_", " ") for row in rejected)
    listed = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items()) or "none"
    used = f"{counted(len(look.good), 'row')} used of the first {len(look.rows):,}"
    lines.append(f"{used}; rejected: {listed}")
    if fault := next((row for row in rejected if row.detail), None):
        lines.append(f"the first of these: {fault.reason.replace('_', ' ')} ({fault.detail})")
    if weighted := sum(bool(row.weights) for _, row in look.good if isinstance(row, Conversation | Chat)):
        lines.append(f"rows with loss weights: {weighted:,}")
    if unused := sum(row.unused for _, row in look.good if isinstance(row, Conversation | Chat)):
        lines.append(f"messages left out, before the first prompt or after the last response: {unused:,}")
    return lines


def _examples(
    look: Look, chosen: list[int], directory: Path | None, chat: ChatTemplate | None, colours: bool
) -> tuple[list[Text], list[int]]:
    """Return the chosen rows as in training, and the number of tokens of all rows.

    Without `directory`, the saved tokenizer, characters stand for tokens.
    """
    examples = []
    lengths = []
    encoder = None
    decode: Callable[[list[int]], str] = _to_text
    if directory is not None:
        encoder = RowEncoder(
            EncodeSettings(
                directory=directory,
                tokenizer=tokenizer_facts(directory),
                template=look.template,
                block=NO_LIMIT,
                overlong="truncate",
                grams=None,
                by_words=False,
                chat=chat if look.template == "chat_template" else None,
            )
        )
        backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
        decode = partial(backend.decode, skip_special_tokens=False)
    for number, (_, row) in enumerate(look.good):
        if encoder is None:
            ids, supervised = _characters(row, look.template)
        elif isinstance(row, Conversation | Chat):
            encoded = encoder.conversations([row])
            ids = encoded.ids
            supervised = np.zeros(len(encoded.ids), bool)
            starts = np.cumsum(encoded.lengths) - encoded.lengths
            for start, spans in zip(starts.tolist(), encoded.spans, strict=True):
                for begin, end, _ in spans.tolist():
                    supervised[start + begin : start + end] = True
        else:
            ids = encoder.texts([row], look.input.name).ids
            supervised = np.ones(len(ids), bool)
        exact = encoder is not None or isinstance(row, TokenIds)
        count = len(row.ids) if isinstance(row, TokenIds) else len(ids)
        lengths.append(count if exact else count // CHARS_PER_TOKEN)
        if number in chosen:
            examples.append(segment(ids, supervised, decode, colours))
    return examples, lengths


def _to_text(characters: list[int]) -> str:
    return "".join(map(chr, characters))


def _characters(row: Row, template: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the code points of a row's text as in training, and which of them carry loss."""
    parts = [(plain_text(row), True)]
    if isinstance(row, Conversation):
        parts = []
        for number, (text, start) in enumerate(render(row, template)):
            parts += [(text[:start], False), (text[start:] + "\n", number not in row.unsupervised)]
    ids = np.array([ord(character) for text, _ in parts for character in text])
    return ids, np.repeat([supervised for _, supervised in parts], [len(text) for text, _ in parts])


def _name_of(files: str) -> str:
    """Return a name for prepared data: the name of the file, or of its folder if the file is a pattern."""
    path = Path(files.partition("://")[2] or files)
    names = (path.name.split(".")[0], path.absolute().parent.name)
    return next((name for name in names if name and not set(name) & set("*?[{}")), "data")


def make_recipe(look: Look, files: str, tokenizer: str | None, lengths: list[int]) -> str:
    """Return the `data` section for a file as YAML.

    Args:
        look: The parsed file.
        files: A path, pattern or address.
        tokenizer: Hub id, directory or .model file, or None.
        lengths: Tokens of each usable row.
    """
    size = look.input.size * look.files
    source = {"files": files if "://" in files else str(Path(files).expanduser().absolute())}
    shards = min(64, max(1, size // SHARD_BYTES))
    data: dict[str, object] = {"dir": f"runs/data/{_name_of(files)}"}
    local = Path(tokenizer) if tokenizer is not None and Path(tokenizer).exists() else None
    data["tokenizer"] = str(local.absolute()) if local else tokenizer or DEFAULT_TOKENIZER
    tokens = sum(lengths)
    if look.config.kind == "instruct":
        data |= {"kind": "instruct", "template": look.template}
        longest = int(np.quantile(lengths, 0.99)) if lengths else 512
        block = min(4096, 1 << (max(256, longest) - 1).bit_length())
    else:
        block = 1 << min(1024, max(32, tokens // 2)).bit_length() - 1
    block = min(block, (context_of(local) if local else None) or block)
    data["sequence_len"] = block
    # Every shard of the random validation set must get rows.
    large = isinstance(look.payload, bytes) and look.input.size > len(look.payload)
    enough = (
        large
        or look.config.kind == "instruct"
        or VALIDATION_SHARE * tokens >= MIN_VALIDATION * block * shards
    )
    if enough and VALIDATION_SHARE * len(lengths) >= MIN_VALIDATION:
        data["validation_fraction"] = VALIDATION_SHARE
    if any(isinstance(row, Rejected) and row.reason in STRUCTURE for row in look.rows):
        data["strict"] = False
    format_ = look.input.spec.format
    form = {"format": format_} if format_ in ("paragraphs", "tokens") else {}
    columns_part = {"columns": look.proposed} if look.proposed else {}
    data |= {"shards": shards, "sources": [source | form | columns_part]}
    text = dump_recipe({"data": data}, allow_unicode=True, width=10_000)
    comments = dict(COMMENTS)
    if not tokenizer:
        comments["template: chat"] = "or chat_template if the tokenizer of your model has one"
    for line, comment in comments.items():
        text = text.replace(f"  {line}\n", f"  {line}  # {comment}\n", 1)
    return text
