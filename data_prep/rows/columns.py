"""Which column of a row is which: the names that are known, those that a recipe maps, and guesses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import yaml

from emo.data_prep.rows.spec import Rejected, RowSpec

TOKEN_COLUMNS = ("ids", "input_ids")
TEXT_COLUMNS = ("text", "content", "sentence", "document", "story")
PROMPT_COLUMNS = ("instruction", "prompt", "question", "query")
INPUT_COLUMNS = ("input", "context")
RESPONSE_COLUMNS = ("output", "response", "completion", "answer")
SYSTEM_COLUMNS = ("system", "system_prompt")
HISTORY = "history"  # earlier exchanges: pairs of prompt and response
CHAT_COLUMNS = ("messages", "conversations")
TOOLS = "tools"  # what the assistant may call, as JSON schemas: for a tokenizer's chat_template
ROLE_KEYS, CONTENT_KEYS = ("role", "from"), ("content", "value")  # of a message
NAMES = {  # a part of a row, as `columns` of a recipe calls it: the columns that are taken for it
    "text": TEXT_COLUMNS,
    "instruction": PROMPT_COLUMNS,
    "input": INPUT_COLUMNS,
    "output": RESPONSE_COLUMNS,
    "system": SYSTEM_COLUMNS,
    "history": (HISTORY,),
    "messages": CHAT_COLUMNS,
    "tools": (TOOLS,),
    "role": ROLE_KEYS,
    "content": CONTENT_KEYS,
}
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


def names_of(part: str, spec: RowSpec) -> tuple[str, ...]:
    """The columns that may be a part of a row: the one that the recipe names, or the known ones."""
    mapped = spec.named(part)
    return NAMES[part] if mapped is None else (mapped,)


def first(raw: dict[str, Any], names: Sequence[str]) -> str | None:
    """Return the first of some columns that a row has, whatever it holds.

    An empty one is not passed over: the next known column may be a file name or another annotator's answer.
    """
    return next((name for name in names if name in raw), None)


def text_columns(spec: RowSpec) -> tuple[str, ...]:
    """Return the columns in which a row's text may be, or its tokens."""
    if spec.column is not None:
        return (spec.column,)
    return TOKEN_COLUMNS if spec.format == "tokens" and not spec.columns else names_of("text", spec)


def prompt_columns(spec: RowSpec) -> tuple[str, ...]:
    """Return the columns in which the prompt of an instruction may be."""
    return (spec.column,) if spec.column else names_of("instruction", spec)


def chat_column(raw: dict[str, Any], spec: RowSpec) -> str | None:
    """The column of a chat's messages, if the row is one."""
    if spec.format == "alpaca" or spec.named("instruction") or spec.named("output"):
        return None
    if spec.column is not None:
        return spec.column if spec.format == "messages" or isinstance(raw.get(spec.column), list) else None
    return first(raw, names_of("messages", spec))


def columns_read(raw: dict[str, Any], spec: RowSpec) -> set[str]:
    """Return the columns that a good row gives text from."""
    tools = [first(raw, names_of("tools", spec))] if spec.chat else []
    if spec.kind == "text":
        names_read = [first(raw, text_columns(spec))]
    elif talk := chat_column(raw, spec):
        names_read = [first(raw, names_of("system", spec)), talk, *tools]
    else:
        parts = (names_of(part, spec) for part in ("system", "history", "input", "output"))
        names_read = [first(raw, names) for names in (prompt_columns(spec), *parts)] + tools
    return {name for name in names_read if name is not None}


def guess(raw: dict[str, Any], kind: str) -> dict[str, str]:
    """A proposal for `columns`, by the names and values of one row; {}: none can be made.

    Parts whose columns are known anyway are left out, and so are columns of answers that were rejected, and
    of several answers of which another column may say which is better.
    """
    raw = {name: value for name, value in raw.items() if not _REJECTED.search(str(name))}
    texts = [str(name) for name, value in raw.items() if isinstance(value, str)]
    stems = Counter(match[1] for match in map(_NUMBERED.fullmatch, texts) if match)
    several = {name for name in texts if (match := _NUMBERED.fullmatch(name)) and stems[match[1]] > 1}
    if any(_ANSWERING.search(name) for name in several):
        return {}
    if kind == "text":
        text = first(raw, TEXT_COLUMNS)
        longest = max(texts, key=lambda name: len(raw[name]), default=None)
        return {} if text or longest is None else {"text": longest}
    talk = next((name for name, value in raw.items() if _is_talk(value)), None)
    if talk is not None:
        keys = [name for name, value in raw[talk][0].items() if isinstance(value, str)]
        role = first(raw[talk][0], ROLE_KEYS) or next(filter(_SPEAKING.search, keys), None)
        content = first(raw[talk][0], CONTENT_KEYS) or next((name for name in keys if name != role), None)
        if role is None or content is None:
            return {}
        return _unknown({"messages": str(talk), "role": role, "content": content})
    prompt = first(raw, PROMPT_COLUMNS) or next(filter(_ASKING.search, texts), None)
    others = [name for name in texts if name != prompt and name not in (*INPUT_COLUMNS, *SYSTEM_COLUMNS)]
    response = first(raw, RESPONSE_COLUMNS) or next(filter(_ANSWERING.search, others), None)
    prompt = prompt or next((name for name in others if name != response), None)
    response = response or next((name for name in reversed(others) if name != prompt), None)
    return {} if prompt is None or response is None else _unknown({"instruction": prompt, "output": response})


def _is_talk(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and len(value[0]) > 1


def _unknown(columns: dict[str, str]) -> dict[str, str]:
    """Return the columns that are not known by their name."""
    return {part: name for part, name in columns.items() if name not in NAMES[part]}


def flow(columns: dict[str, str]) -> str:
    """`columns` as one line of YAML."""
    text: str = yaml.safe_dump(columns, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.strip()


def missing(raw: dict[str, Any], names: Sequence[str], spec: RowSpec | None = None) -> Rejected:
    """The rejection of a row that has none of some columns, and with a spec what to write instead."""
    choices = ", ".join(names[:-1]) + " or " + names[-1] if len(names) > 1 else names[0]
    present = ", ".join(map(str, list(raw)[:12])) or "none"
    hint = "" if spec is None else _hint(raw, spec)
    return Rejected("missing_column", f"no column {choices}; there are: {present}{hint}"[:330])


def _hint(raw: dict[str, Any], spec: RowSpec) -> str:
    if spec.kind == "text" and (_is_instruction(raw) or first(raw, CHAT_COLUMNS)):
        return "; for instructions set data.kind=instruct"
    if spec.kind == "instruct" and not _is_instruction(raw) and first(raw, TEXT_COLUMNS):
        return "; for plain text set data.kind=text"
    settled = spec.column is not None or spec.columns or not guess(raw, spec.kind)
    return "" if settled else "; name yours in the source's columns, as sniff proposes"


def _is_instruction(raw: dict[str, Any]) -> bool:
    return first(raw, PROMPT_COLUMNS) is not None and first(raw, RESPONSE_COLUMNS) is not None


def wrong(name: str, value: Any, expected: str = "text") -> Rejected:
    """The rejection of a row whose column holds something else."""
    kind = "null" if value is None else type(value).__name__
    return Rejected("wrong_type", f"column {name} must be {expected}, not {kind}")
