"""Instruction rows -> conversations and chats. Rows have Alpaca's columns or the messages of a chat."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..encoding.chat_templates import PREFACES, REASONING, TAGS
from ..encoding.templates import Chat, Conversation, Exchange
from ..encoding.weights import AnswerWeights, Part
from .spec import RowError, RowSpec, chat_column, clean_text, first_present, missing_column, wrong_type

ROLES = {
    "system": ("system",),
    "developer": ("developer",),  # OpenAI's newer models name the system role like this
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model", "ai", "function_call", "tool_call"),
    "tool": ("tool", "function", "observation", "tool_response"),
}
CALL_ROLES = ("function_call", "tool_call")  # ShareGPT's and ms-swift's: the content is a call
ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
# Keys of a message that turn its loss on or off, and their value for a message with loss: axolotl's train and
# training, ms-swift's loss, torchtune's masked.
LOSS_KEYS = {"train": 1, "training": 1, "trainable": 1, "loss": 1, "masked": 0}
# Keys with a number that the loss is multiplied by: OpenAI's weight, ms-swift's loss_scale.
WEIGHT_KEYS = ("weight", "loss_weight", "loss_scale")
PART_KEYS = ("train_detail", "training_detail")  # axolotl's, for parts of a message
UNSUPPORTED_LOSS_KEYS = ("mask", "loss_mask")  # they have several meanings
ALL_LOSS_KEYS = (*LOSS_KEYS, *WEIGHT_KEYS, *PART_KEYS, *UNSUPPORTED_LOSS_KEYS)
# Products of four weights stay within float32.
MIN_WEIGHT = 1e-6
MAX_WEIGHT = 1e6
TEXT_PARTS = ("text", "input_text", "output_text")  # types of the parts of a content that are read
CLOSED = re.compile(rf"^</({TAGS})>", re.M)  # end of reasoning in a content


class Message(NamedTuple):
    """A message of a chat."""

    role: str  # one of ROLES
    content: str | None
    extra: dict[str, object]  # keys that only a chat_template reads: tool_calls, name, reasoning_content ...
    loss: AnswerWeights = AnswerWeights()


def parse_instruction(row: Mapping[str, object], spec: RowSpec) -> Conversation | Chat:
    """Return an instruction row as a conversation, or as a chat for a chat template. Raises RowError."""
    messages = _read_messages(row, spec)
    if messages is None:
        return _parse_alpaca(row, spec)
    preface = _pop_preface(messages, row, spec)
    if spec.chat:
        kept = preface.content or preface.extra  # some templates read other keys, for example the tools
        return _to_chat([preface, *messages] if kept else messages, row, spec)
    return _to_conversation(messages, preface.content or "", row, spec)


def _read_messages(row: Mapping[str, object], spec: RowSpec) -> list[Message] | None:
    """Return the messages of a row, or None for a row in Alpaca's columns."""
    column = chat_column(row, spec)
    if column is None and (pair := _prompt_and_completion(row, spec)) is not None:
        prompt, completion = (_parse_messages(row, name, spec) for name in pair)
        # The assistant's messages in the prompt are context.
        context = [message._replace(loss=AnswerWeights(0.0)) for message in prompt]
        return [*context, *completion]
    if column is None and spec.format != "messages":
        return None
    if column is None or column not in row:
        raise missing_column(row, spec.names("messages") if column is None else (column,), spec)
    return _parse_messages(row, column, spec)


def _prompt_and_completion(row: Mapping[str, object], spec: RowSpec) -> tuple[str, str] | None:
    """Return the columns of a prompt and its completion if both are lists of messages, as in TRL."""
    prompt = spec.find(row, "instruction")
    completion = spec.find(row, "output")
    if prompt is None or completion is None:
        return None
    both_lists = isinstance(row[prompt], list) and isinstance(row[completion], list)
    return (prompt, completion) if both_lists else None


def _parse_messages(row: Mapping[str, object], column: str, spec: RowSpec) -> list[Message]:
    """Return the messages in a column of a row."""
    messages = parse_json(row[column])
    if not isinstance(messages, list):
        raise wrong_type(column, messages, "a list of messages")
    return [_parse_message(message, f"{column}[{i}]", spec) for i, message in enumerate(messages)]


def _pop_preface(messages: list[Message], row: Mapping[str, object], spec: RowSpec) -> Message:
    """Remove the system message from the messages. Return it with the text of the system column."""
    name = spec.find(row, "system")
    preface = row[name] or "" if name is not None else ""
    if not isinstance(preface, str):
        raise wrong_type(str(name), preface)
    system = clean_text(preface, spec.clean)
    if not messages or messages[0].role not in PREFACES:
        return Message("system", system, {})
    first = messages.pop(0)
    if system.strip() == (first.content or "").strip():  # the column repeats the message
        return first
    return Message(first.role, "\n\n".join(filter(None, (system, first.content))), first.extra)


def _to_conversation(
    messages: list[Message], system: str, row: Mapping[str, object], spec: RowSpec
) -> Conversation:
    """Return messages as exchanges of a prompt and a response.

    The assistant's messages before the first prompt and the user's last message have no counterpart. They are
    left out and counted.
    """
    start = next((i for i, message in enumerate(messages) if message.role != "assistant"), len(messages))
    end = len(messages) - (len(messages) > start and messages[-1].role == "user")
    used = messages[start:end]
    if not used or [message.role for message in used] != ["user", "assistant"] * (len(used) // 2):
        raise _bad_roles(messages)
    pairs = zip(used[::2], used[1::2], strict=True)
    exchanges = tuple(Exchange(prompt.content or "", reply.content or "") for prompt, reply in pairs)
    return Conversation(exchanges, system, len(messages) - len(used), *_weights_of(used, row, spec))


def _parse_alpaca(row: Mapping[str, object], spec: RowSpec) -> Conversation | Chat:
    """Return a row in Alpaca's columns. Raises RowError."""
    names = [spec.find(row, part) for part in ("instruction", "output", "input", "system")]
    if None in names[:2]:
        raise missing_column(row, spec.names("output" if names[0] else "instruction"), spec)
    values = []
    for i, name in enumerate(names):
        value = "" if name is None or (row[name] is None and i > 1) else row[name]
        if not isinstance(value, str):
            raise wrong_type(str(name), value)
        values.append(clean_text(value, spec.clean))
    exchanges = []
    history = row.get(spec.names("history")[0]) or []
    for pair in history if isinstance(history, list) else [None]:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise wrong_type("history", pair, "a list of pairs, of a prompt and a response")
        exchanges.append(Exchange(*(clean_text(text, spec.clean) for text in pair)))
    exchanges.append(Exchange(*values[:3]))
    if not spec.chat:
        answers = [Message("assistant", exchange.response, {}) for exchange in exchanges]
        return Conversation(tuple(exchanges), values[3], 0, *_weights_of(answers, row, spec))
    messages = [Message("system", values[3], {})] if values[3] else []
    for exchange in exchanges:
        prompt = f"{exchange.prompt}\n\n{exchange.input}" if exchange.input else exchange.prompt
        messages += [Message("user", prompt, {}), Message("assistant", exchange.response, {})]
    return _to_chat(messages, row, spec)


# --- one message ------------------------------------------------------------------------------------------


def _parse_message(message: Any, where: str, spec: RowSpec) -> Message:
    """Return a message. `where` is its position in the row, for errors."""
    if not isinstance(message, dict):
        raise wrong_type(where, message, "an object")
    roles = spec.names("role")
    contents = spec.names("content")
    role, content = (message.get(first_present(message, names) or "") for names in (roles, contents))
    keys = (*roles, *contents, *ALL_LOSS_KEYS)
    extra: dict[str, object] = {}
    if spec.chat:
        # Servers log fields that a message lacks as null or as an empty list.
        extra = {k: v for k, v in message.items() if k not in keys and v not in (None, [], {})}
    if "tool_calls" in extra:  # a table has them as text if their arguments differ in type
        extra["tool_calls"] = _parse_calls(extra["tool_calls"], where)
    call = extra.pop("function_call", None)  # OpenAI's older form, and ShareGPT's as a role
    if role in CALL_ROLES and spec.chat:
        call = parse_json(content)
        content = None
    if call is not None:
        calls = call if isinstance(call, list) else [call]  # LLaMA-Factory writes parallel calls as a list
        if not calls or not all(map(_is_call, calls)):
            raise wrong_type(f"{where} (function_call)", call, "an object with name and arguments, or a list")
        extra["tool_calls"] = [{"type": "function", "function": each} for each in calls]
    elif not spec.chat and (message.get("function_call") or message.get("tool_calls")):
        raise RowError("wrong_type", f"{where} is a tool call, which only a chat template writes")
    if role is None or (content is None and not extra.get("tool_calls")):
        null = next((n for n in (*roles, *contents) if n in message and message[n] is None), None)
        if null is None:
            raise missing_column(message, (f"{roles[0]} and {contents[0]}",), spec)
        raise wrong_type(null, None)
    if isinstance(content, list):
        content = _join_parts(content, where, contents[0])
    if not isinstance(content, str | None):
        raise wrong_type(f"{where}.{contents[0]}", content)
    role = str(role)
    if role not in ROLE_OF:
        known = ", ".join(ROLE_OF)
        raise RowError("wrong_type", f"{where} has the unknown role {role[:40]!r}. Known: {known}")
    role = ROLE_OF[role]
    loss = _read_loss(message, role, where, len(content or ""))
    cleaned = None if content is None else clean_text(content, spec.clean)
    if loss.parts is not None and cleaned != content:
        raise RowError("wrong_type", f"{where} weights parts of a content that clean={spec.clean} changes")
    return Message(role, cleaned, extra, loss)


def _parse_calls(value: object, where: str) -> list[dict[str, Any]]:
    """Return the tool calls of a message, which may be JSON text."""
    calls = parse_json(value)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise wrong_type(f"{where}.tool_calls", value, "a list of calls")
    return calls


def _is_call(value: Any) -> bool:
    """Return whether a value is a call of a tool, with a name and arguments."""
    return isinstance(value, dict) and isinstance(value.get("name"), str) and "arguments" in value


def _join_parts(content: list[Any], where: str, name: str) -> str:
    """Return the text of a content that is a list of parts."""
    parts = [part if isinstance(part, dict) else {} for part in content]
    texts = [part.get("text") if part.get("type", "text") in TEXT_PARTS else None for part in parts]
    if not texts or not all(isinstance(text, str) for text in texts):
        kinds = sorted({str(part["type"]) for part in parts if part.get("type", "text") not in TEXT_PARTS})
        found = f"parts of the type {', '.join(kinds)}" if kinds else type(content).__name__
        problem = f"column {where}.{name} must be text, or a list of parts that are text, not {found}"
        raise RowError("wrong_type", problem)
    if any(part.get(key) is not None for part in parts for key in ALL_LOSS_KEYS):
        raise RowError("wrong_type", f"{where}: a part sets the loss. Use {PART_KEYS[0]} of the message")
    return "".join(map(str, texts))


def _read_loss(message: Mapping[str, object], role: str, where: str, length: int) -> AnswerWeights:
    """Return the weights that a message sets by LOSS_KEYS, WEIGHT_KEYS and PART_KEYS.

    where: its position in the row. length: characters of its content.
    """
    weight = 1.0
    for key in (*LOSS_KEYS, *WEIGHT_KEYS, *UNSUPPORTED_LOSS_KEYS):
        value = message.get(key)
        if value is None:
            continue
        if key in WEIGHT_KEYS:
            factor = read_weight(value, f"{where}.{key}")
        elif key in UNSUPPORTED_LOSS_KEYS or not isinstance(value, int | float) or value not in (0, 1):
            raise RowError(
                "wrong_type",
                f"{where}.{key} may set the loss in a way that is not supported. Remove it, or use "
                f"weight with a number, or {', '.join(LOSS_KEYS)} with 0, 1, true or false",
            )
        else:
            factor = float(value == LOSS_KEYS[key])
        if factor and role != "assistant" and key != "weight":  # weight is only read for the assistant
            raise _wrong_role(f"{where}.{key}", role)
        weight *= factor
    present = next((key for key in PART_KEYS if message.get(key) is not None), None)
    if present is None:
        return AnswerWeights(weight)
    parts = _read_parts(message[present], f"{where}.{present}", length)
    if role != "assistant":
        if any(part.weight for part in parts):
            raise _wrong_role(f"{where}.{present}", role)
        return AnswerWeights(weight)
    return AnswerWeights(weight if any(part.weight for part in parts) else 0.0, parts)


def _read_parts(value: object, where: str, length: int) -> tuple[Part, ...]:
    """Return the parts of a content of `length` characters in a list of axolotl's form."""
    if not isinstance(value, list):
        raise wrong_type(where, value, "a list of begin_offset, end_offset, and train or weight")
    parts: list[Part] = []
    for number, entry in enumerate(value):
        tree = {k: v for k, v in entry.items() if v is not None} if isinstance(entry, dict) else {}
        begin, end = (tree.pop(key, None) for key in ("begin_offset", "end_offset"))
        if len(tree) != 1 or not tree.keys() <= {"train", "weight"}:
            raise RowError("wrong_type", f"{where}[{number}] must have offsets, and train or weight")
        (factor,) = tree.values()
        if "train" in tree and factor not in (0, 1):
            raise wrong_type(f"{where}[{number}].train", factor, "true or false")
        before = parts[-1].stop if parts else 0
        if type(begin) is not int or type(end) is not int or not before <= begin <= end < length:
            raise RowError(
                "wrong_type",
                f"{where}[{number}] must have offsets with {before} <= begin_offset <= end_offset < "
                f"{length}, which is the length of the content. Write the parts in order",
            )
        # end_offset is the last character, as in axolotl
        parts.append(Part(begin, end + 1, read_weight(factor, f"{where}[{number}]")))
    return tuple(parts)


def read_weight(value: object, where: str) -> float:
    """Return a loss weight. Raises RowError for another value."""
    if not isinstance(value, int | float) or not (value == 0 or MIN_WEIGHT <= value <= MAX_WEIGHT):
        expected = f"a loss weight, 0 or a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
        raise RowError("wrong_type", f"{where} must be {expected}, not {value!r}"[:200])
    return float(value)


def _weights_of(
    messages: list[Message], row: Mapping[str, object], spec: RowSpec
) -> tuple[tuple[int, ...], tuple[AnswerWeights, ...]]:
    """Return which of the assistant's messages carry no loss, and the weights of all."""
    of_row = _row_weight(row, spec)
    answers = [message.loss for message in messages if message.role == "assistant"]
    answers = [loss._replace(weight=loss.weight * of_row) for loss in answers]
    unsupervised = tuple(number for number, loss in enumerate(answers) if not loss.weight)
    weighted = any(loss.weight not in (0, 1) or loss.parts for loss in answers)
    return unsupervised, tuple(answers) if weighted else ()


def _row_weight(row: Mapping[str, object], spec: RowSpec) -> float:
    """Return the loss weight of a row. Raises RowError for a value that is not one."""
    name = spec.find(row, "weight")
    value = None if name is None else row[name]
    if isinstance(value, str):  # a cell of a csv or tsv file
        with contextlib.suppress(ValueError):
            value = float(value) if value.strip() else None
    return 1.0 if value is None else read_weight(value, f"column {name}")


def _wrong_role(where: str, role: str) -> RowError:
    return RowError("wrong_type", f"{where} sets a loss on a message of the {role}. Remove it")


def _bad_roles(messages: list[Message]) -> RowError:
    return RowError("bad_roles", " ".join(message.role for message in messages) or "no messages")


# --- chats for a chat template ----------------------------------------------------------------------------


def _to_chat(messages: list[Message], row: Mapping[str, object], spec: RowSpec) -> Chat:
    """Return messages for a chat_template, which itself decides which order of roles it allows.

    The assistant's messages before all others, and all messages after its last one, are left out and counted.
    """
    front = next((i for i, message in enumerate(messages) if message.role not in PREFACES), len(messages))
    begin = next((i for i in range(front, len(messages)) if messages[i].role != "assistant"), len(messages))
    last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=-1)
    if last <= begin:
        raise _bad_roles(messages)
    used = [*messages[:front], *messages[begin : last + 1]]
    trees = [_message_tree(message) for message in used]
    left_out = len(messages) - len(used)
    weights = _weights_of(used, row, spec)
    return Chat(to_json(trees), _read_tools(row, spec), left_out, *weights, _read_variables(row, spec))


def _read_tools(row: Mapping[str, object], spec: RowSpec) -> str:
    """Return the schemas of a row's tools as JSON, or ''. The column holds a list, or the list as JSON."""
    name = spec.find(row, "tools")
    tools = None if name is None else parse_json(row[name]) or None
    if name is None or tools is None:
        return ""
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise wrong_type(name, tools, "a list of tools")
    tools = tools if isinstance(row[name], str) else without_nulls(tools)
    return to_json([_wrap_function(tool) for tool in tools])


def _read_variables(row: Mapping[str, object], spec: RowSpec) -> str:
    """Return a row's variables of the chat template as JSON, or ''. The column has an object or JSON text."""
    name = spec.find(row, "template_variables")
    variables = None if name is None else without_nulls(parse_json(row[name])) or None
    if name is None or variables is None:
        return ""
    if not isinstance(variables, dict):
        raise wrong_type(name, variables, "an object with variables of the chat template")
    return json.dumps(variables, sort_keys=True, default=str)


def _wrap_function(value: dict[str, Any]) -> dict[str, Any]:
    """Return a tool or a call in the form of OpenAI, in which servers pass it to the template."""
    is_function = isinstance(value.get("name"), str) and value.get("type", "function") == "function"
    if "function" in value or not is_function:
        return value
    number = {"id": value["id"]} if "id" in value else {}
    function = {key: item for key, item in value.items() if key not in ("id", "type")}
    return {**number, "type": "function", "function": function}


def _message_tree(message: Message) -> dict[str, object]:
    """Return a message as a template gets it: the arguments of tool calls are objects, not JSON text."""
    content = {} if message.content is None else {"content": message.content}
    tree: dict[str, object] = {"role": message.role, **content, **message.extra}
    calls = without_nulls(json.loads(to_json(message.extra.get("tool_calls"))))  # a copy
    if isinstance(calls, list):
        calls = [_wrap_function(call) if isinstance(call, dict) else call for call in calls]
    if calls:
        tree["tool_calls"] = calls
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and "arguments" in function:
            function["arguments"] = parse_json(function["arguments"])
        if isinstance(call, dict) and function is not call:
            call.setdefault("type", "function")
    thought = any(isinstance(message.extra.get(key), str) for key in REASONING)
    if message.role == "assistant" and message.content and message.loss.parts is None and not thought:
        tree["content"] = _open_thinking(message.content)
    return tree


def _open_thinking(content: str) -> str:
    """Return an answer with the tag that begins its reasoning, which the prompt of some models contains.

    The closing tag must begin a line, because text may mention it.
    """
    closed = CLOSED.findall(content)
    if len(closed) != 1 or f"<{closed[0]}>" in content:
        return content
    return f"<{closed[0]}>{content}"


def without_nulls(value: Any) -> Any:
    """Return a value without the keys of objects that are null.

    A table has one type for all rows, so a key of one row is null in the others. A null in the row itself
    cannot be distinguished from these. It is removed too, also from JSON lines, so that both give the same
    tokens.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def parse_json(value: Any) -> Any:
    """Return the value of JSON text, or any other value unchanged."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def to_json(value: Any) -> str:
    """Return a value as the JSON text that rows are stored and compared by."""
    return json.dumps(value, ensure_ascii=False, default=str)
