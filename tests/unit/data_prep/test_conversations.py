"""Columns, roles, marks and templates turn conversations into labels, and `sniff` proposes recipes."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from emo.common.cli.progress import make_console
from emo.common.errors import UserError
from emo.data_prep.cli import main
from emo.data_prep.config import DataConfig, load_data_config
from emo.data_prep.encoding.chat_templates import ChatTemplate, RefusedError, read_template
from emo.data_prep.encoding.chat_writer import ChatWriter
from emo.data_prep.encoding.chats import ChatEncoder, check_template
from emo.data_prep.encoding.templates import Chat, Conversation, Exchange
from emo.data_prep.encoding.tokenizer import load_tokenizer, save_tokenizer
from emo.data_prep.encoding.weights import AnswerWeights
from emo.data_prep.shards.inspect import inspect
from emo.data_prep.shards.verify import verify
from emo.data_prep.sniff import guess_columns, sniff
from emo.data_prep.sources.rows import judge_rows, parse
from emo.data_prep.sources.spec import Rejected, RowSpec
from tests.helpers.chat_templates import CHATML, DATED, LLAMA, MARKED, SAYS, SILENT, TOOLS, tokenizer_with
from tests.helpers.corpus import (
    alpaca_rows,
    prepared,
    rejected,
    run,
    segments,
    texts,
    tiny_tokenizer,
    train_set,
    write_jsonl,
)
from tests.helpers.refusals import refused


def rendered(chat: Chat, template: ChatTemplate) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a chat's only example, and the spans of its answers."""
    ((text, answers),) = ChatWriter(template).examples(chat)
    return text, [(answer.start + answer.masked, answer.stop) for answer in answers]


def decoded(saved: Path, ids: list[int]) -> str:
    return Tokenizer.from_file(str(saved / "tokenizer.json")).decode(ids, skip_special_tokens=False)


def talk(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def marked(*marks: dict[str, Any], row: int = 0) -> dict[str, Any]:
    """Return a chat with one answer per mark."""
    turns = []
    for i, mark in enumerate(marks):
        turns += talk(("user", f"q{i} {row}"), ("assistant", f"a{i} {row}"))["messages"]
        turns[-1] |= mark
    return {"messages": turns}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def read(row: Any, chat: bool = False, **columns: str) -> Any:
    spec = RowSpec("instruct", "auto", True, None, "none", 1000, tuple(columns.items()), chat)
    (result,) = parse([row], spec)
    return result


def talked(*exchanges: tuple[str, ...], system: str = "", unused: int = 0) -> Conversation:
    return Conversation(tuple(Exchange(*exchange) for exchange in exchanges), system, unused)


def spoken(chat: Any) -> list[tuple[str, Any]]:
    """Return the roles and contents of a chat's messages."""
    assert isinstance(chat, Chat), chat
    return [(message["role"], message.get("content")) for message in json.loads(chat.messages)]


QUESTION = {"ask": "q", "reply": "a"}
TALK = [{"who": "human", "said": "q"}, {"who": "gpt", "said": "a"}]
CHAT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
PAIR = {"instruction": "q", "output": "a"}
F = '{"name": "f", "arguments": {"x": 1}}'  # a call
USER, ANSWER = talk(("user", "q"), ("assistant", "a"))["messages"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"instruction": "q", "context": "c", "response": "a"}, talked(("q", "a", "c"))),
        ({**PAIR, "system": "s"}, talked(("q", "a"), system="s")),
        (
            {"system": "s", **talk(("system", "s "), ("user", "q"), ("assistant", "a"))},
            talked(("q", "a"), system="s "),
        ),
        ({**PAIR, "history": [["q0", "a0"], ["q1", "a1"]]}, talked(("q0", "a0"), ("q1", "a1"), ("q", "a"))),
        ({"question": "q", "answer": "a"}, talked(("q", "a"))),
        ({"messages": [USER | {"weight": 1}, ANSWER]}, talked(("q", "a"))),
        (talk(("user", parts("q", "uestion")), ("assistant", parts("a"))), talked(("question", "a"))),
        (
            {"system": "s", "conversations": [{"from": "gpt", "value": "x"}, *CHAT, *CHAT, CHAT[0]]},
            talked(("q", "a"), ("q", "a"), system="s", unused=2),
        ),
    ],
)
def test_all_parts_of_a_row_are_read(row: Any, expected: Conversation) -> None:
    assert (read(row), read(row, chat=True).unsupervised) == (expected, ())


def test_messages_may_be_json_text() -> None:
    for row in (talk(("user", "q"), ("assistant", "a")), talk(("human", "q"), ("ai", "a"))):
        assert read({"messages": json.dumps(row["messages"])}) == talked(("q", "a"))
    assert read({"messages": "Hello"}).reason == "wrong_type"


def test_a_chat_keeps_the_keys_of_its_system_message() -> None:
    """Some templates read the tools there."""
    for content in ("s", ""):
        system = {"role": "system", "content": content, "tools": "[]"}
        first, *_ = json.loads(read({"messages": [system, USER, ANSWER]}, chat=True).messages)
        assert first == system


def test_a_call_with_text_needs_a_chat_template() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    rejected = read({"messages": [USER, ANSWER | {"tool_calls": [call]}]})
    assert isinstance(rejected, Rejected) and rejected.reason == "wrong_type"


def test_empty_lists_and_nulls_of_a_message_are_like_missing_keys() -> None:
    """OpenAI-compatible servers log `tool_calls: []`, but templates like Llama 3.1's reject it."""
    empty = {"tool_calls": [], "function_call": None, "functions": [], "audio": {}, "name": ""}
    row = {"messages": [USER, ANSWER | empty], "tools": [], "functions": []}
    result = read(row, chat=True)
    assert json.loads(result.messages) == [USER, ANSWER | {"name": ""}] and result.tools == ""
    assert read(row) == talked(("q", "a"))
    strict = "{% for m in messages if 'tool_calls' in m %}{{ raise_exception('one call') }}{% endfor %}"
    assert rendered(result, read_template(tokenizer_with(strict + CHATML), "t"))
    bare = {"role": "assistant", "tool_calls": []}
    assert read({"messages": [USER, bare]}, chat=True).reason == "missing_column"


@pytest.mark.parametrize("key", ["thinking", "reasoning", "reasoning_content", "name"])
def test_all_text_of_a_message_is_checked(key: str) -> None:
    row = {"messages": [USER, ANSWER | {key: "half of a pair: \ud83d"}]}
    spec = RowSpec("instruct", "auto", True, None, "none", 1000, (), True)
    (judged,) = judge_rows(json.dumps(row).encode() + b"\n", spec)
    assert isinstance(judged.row, Rejected) and judged.row.reason == "bad_utf8"


@pytest.mark.parametrize(
    ("row", "calls"),
    [
        ({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}, 1),
        ({"from": "function_call", "value": F}, 1),
        ({"role": "tool_call", "content": F}, 1),
        ({"role": "assistant", "tool_calls": f'[{{"type": "function", "function": {F}}}]'}, 1),
        ({"role": "assistant", "tool_calls": "[1]"}, None),
        ({"from": "function_call", "value": f"[{F}, {F}]"}, 2),
        ({"role": "assistant", "content": "a", "function_call": None}, 0),
        ({"from": "function_call", "value": "no JSON"}, None),
        ({"from": "function_call", "value": f"[{F}, 1]"}, None),
        ({"from": "function_call", "value": "[]"}, None),
    ],
)
def test_older_forms_of_tool_calls_are_supported(row: dict[str, Any], calls: int | None) -> None:
    result = read({"messages": [USER, row, {"from": "observation", "value": "r"}, ANSWER]}, chat=True)
    if calls is None:
        assert result.reason == "wrong_type"
        return
    roles = [role for role, _ in spoken(result)]
    assert roles == ["user", "assistant", "tool", "assistant"]
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert json.loads(result.messages)[1].get("tool_calls", []) == [call] * calls


def test_null_arguments_are_removed() -> None:
    call = {"function": {"name": "f", "arguments": {"a": None, "b": [None, {"c": None, "d": 0}]}}}
    tools = [{"name": "f", "description": None, "parameters": {"x": None, "enum": ["a", None]}}]
    row = {"messages": [USER, ANSWER | {"tool_calls": [call]}], "tools": tools}
    result = read(row, chat=True)
    (called,) = json.loads(result.messages)[1]["tool_calls"]
    assert called["function"]["arguments"] == {"b": [None, {"d": 0}]}
    plain = {"name": "f", "parameters": {"enum": ["a", None]}}
    assert json.loads(result.tools) == [{"type": "function", "function": plain}]  # as servers pass it
    text = json.dumps(tools)  # storage does not change text
    (tool,) = json.loads(read(row | {"tools": text}, chat=True).tools)
    assert tool["function"] == tools[0]


def test_bare_calls_and_reasoning_without_its_first_tag_are_completed() -> None:
    call = {"name": "f", "arguments": '{"a": 1}', "id": "7"}
    row = {"messages": [USER, ANSWER | {"content": "Hm.\n</think>\n\nYes.", "tool_calls": [call]}]}
    answer = json.loads(read(row, chat=True).messages)[1]
    function = {"name": "f", "arguments": {"a": 1}}
    assert answer["tool_calls"] == [{"id": "7", "type": "function", "function": function}]
    assert answer["content"] == "<think>Hm.\n</think>\n\nYes."


def test_a_prompt_and_its_completion_may_be_messages() -> None:
    """In this format of TRL only the completion is supervised."""
    row = {
        "prompt": [*talk(("user", "q"), ("assistant", "a"), ("user", "r"))["messages"]],
        "completion": [ANSWER],
    }
    result = read(row, chat=True)
    assert spoken(result) == [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "a")]
    assert result.unsupervised == read(row).unsupervised == (0,)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        *(
            (talk(("user", content), ("assistant", "a")), "wrong_type")
            for content in (
                *([{"type": "image_url", "image_url": "x"}, *parts("q")], ["q"], [], [[["q"]]]),
                *([{"type": "text", "text": None}], [{"type": "text", "text": "q", "weight": 0}]),
            )
        ),
        *((marked({}, mark), "wrong_type") for mark in ({"weight": -1}, {"loss_mask": 1}, {"mask": "User"})),
        ({"messages": [USER | {"train": True}, ANSWER]}, "wrong_type"),  # users are never trained on
        ({**PAIR, "output": "", "answer": "B"}, "empty_response"),  # an empty column is not skipped
        ({"messages": [], **PAIR}, "bad_roles"),
        (talk(("user", "q"), ("critic", "r"), ("assistant", "a")), "wrong_type"),
        (talk(("assistant", "a"), ("user", "b")), "bad_roles"),
        (talk(("user", "q"), ("tool", "r"), ("assistant", "a")), "bad_roles"),
        (talk(("user", "a"), ("assistant", " ")), "empty_response"),
        (talk(("user", ""), ("assistant", "a")), "empty_instruction"),
        ({"messages": [{"content": "a"}]}, "missing_column"),
        ({"ask": "a", "output": "b"}, "missing_column"),
    ],
)
def test_a_row_with_unsupported_messages_is_rejected(row: Any, reason: str) -> None:
    result = read(row)
    assert isinstance(result, Rejected) and result.reason == reason


def test_plain_text_among_instructions_gets_advice() -> None:
    for chat in (False, True):
        assert "plain text cannot be mixed into data.kind=instruct" in read({"text": "Once."}, chat).detail
    for row in ({"ask": "q", "output": "a"}, {"messages": [{"text": "q"}]}):
        assert "plain text" not in read(row).detail


def test_proposed_columns_can_be_read() -> None:
    """No rejected answer is proposed. Named columns take precedence over messages in the same row."""
    for row in (QUESTION, {"dialog": TALK}, {"frage": "q", "antwort": "a"}, {"a": "q", "b": "a"}):
        assert read(row, **guess_columns(row, "instruct")) == talked(("q", "a"))
    assert read({**QUESTION, "messages": TALK}, instruction="ask", output="reply") == talked(("q", "a"))
    names = guess_columns({"dialog": TALK}, "instruct")
    assert spoken(read({"dialog": TALK}, chat=True, **names)) == [("user", "q"), ("assistant", "a")]
    assert (
        guess_columns({"prompt": "q", "chosen": "a", "rejected": "longer"}, "instruct")["output"] == "chosen"
    )
    assert (
        guess_columns({"prompt": "q", "response_a": "a", "response_b": "b", "winner": "b"}, "instruct") == {}
    )


def test_unpaired_turns_of_a_chat_are_left_out_and_counted() -> None:
    for roles, used, unused in (
        ("system assistant assistant user assistant", "system user assistant", 2),
        ("user assistant user user tool", "user assistant", 3),
        ("user user assistant", "user user assistant", 0),
    ):
        chat = read(talk(*((role, f"{role}{i}") for i, role in enumerate(roles.split()))), chat=True)
        assert (" ".join(role for role, _ in spoken(chat)), chat.unused) == (used, unused)
    for roles in ("system user", "assistant"):
        assert read(talk(*((role, role) for role in roles.split())), chat=True).reason == "bad_roles"


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"masked": True}])
def test_answers_marked_without_loss_are_not_supervised(mark: dict[str, Any], chat: bool) -> None:
    (key,) = mark
    opposite = {key: type(mark[key])(not mark[key])}
    row = read(marked(mark, opposite, {}, mark), chat=chat)
    assert row.unsupervised == (0, 3)
    assert read(marked(opposite, {key: None}), chat=chat).unsupervised == ()
    assert read(marked(mark), chat=chat).reason == "no_loss"
    if chat:
        assert key not in row.messages


def test_tools_calls_and_developers_reach_a_chat_template() -> None:
    call = {"function": {"name": "f", "arguments": '{"x": "<|im_end|>"}'}}
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "q", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "assistant", "content": "a"},
    ]
    row = {"messages": messages, "tools": json.dumps([{"name": "f"}])}
    before = json.dumps(row)
    result = read(row, chat=True)
    assert json.dumps(row) == before, "rows are read again, and must be what they were"
    inner = json.loads(result.messages)
    assert "name" not in inner[1] and inner[3]["tool_call_id"] == "1"
    template = read_template(tokenizer_with(TOOLS), "t")
    text, spans = rendered(result, template)
    assert text.startswith('{"type": "function", "function": {"name": "f"}}\n<|im_start|>system\nd<|im_end|>')
    call_text, answer = (text[a:b] for a, b in spans)
    assert call_text.count("<|im_end|>") == 2 and answer == "a<|im_end|>"  # in the text, and at the end
    other = template._replace(text=template.text + "{# knows developer #}")
    assert "<|im_start|>developer" in rendered(result, other)[0]
    assert read({**row, "tools": "none"}, chat=True).reason == read(row).reason == "wrong_type"


PLAIN = Chat(json.dumps(marked({}, {})["messages"]))
SYSTEM = Chat(json.dumps([{"role": "system", "content": "be brief"}, *json.loads(PLAIN.messages)]))


@pytest.mark.parametrize("template", [CHATML, LLAMA, MARKED])
def test_prompts_have_the_ids_of_generation(template: str) -> None:
    """The ids agree with apply_chat_template of transformers on the original tokenizer."""
    saved = tokenizer_with(template)
    reference = AutoTokenizer.from_pretrained(saved.parent)
    messages = json.loads(PLAIN.messages)
    ((ids, spans, _),) = ChatEncoder(saved, read_template(saved, "t")).encode(PLAIN)
    assert spans[-1][1] == len(ids), "nothing after the last answer is kept"
    first = reference.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"]
    assert ids[: spans[0][0]] == first
    whole = reference.apply_chat_template(messages)["input_ids"][: len(ids)]
    assert reference.decode(ids) == reference.decode(whole)
    if template is not LLAMA:  # there the space before an answer is a separate token
        assert ids == whole
        assert [decoded(saved, ids[a:b]) for a, b, _ in spans] == ["a0 0<|im_end|>", "a1 0<|im_end|>"]


CONTENT = st.lists(
    st.sampled_from(["river", " ", "\n", "<|im_end|>", "<|im_start|>user", "</s>", "é", "{{ x }}", "🙂"]),
    min_size=1,
    max_size=5,
).map("".join).filter(str.strip)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=3), st.sampled_from([CHATML, MARKED]))
def test_special_tokens_in_messages_never_end_a_turn(turns: list[tuple[str, str]], template: str) -> None:
    """Special tokens in messages are encoded as text, so they begin and end no turns."""
    saved = tokenizer_with(template)
    backend = Tokenizer.from_file(str(saved / "tokenizer.json"))
    spoken_turns = (turn for q, a in turns for turn in (("user", q), ("assistant", a)))
    row = Chat(json.dumps(talk(*spoken_turns)["messages"]))
    ((ids, spans, _),) = ChatEncoder(saved, read_template(saved, "t")).encode(row)
    begin, end = (backend.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    assert ids.count(begin) == ids.count(end) == 2 * len(turns)
    for (_, answer), (start, stop, _) in zip(turns, spans, strict=True):
        assert ids[stop - 1] == end
        assert decoded(saved, ids[start : stop - 1]).strip() == answer.strip()


@pytest.mark.parametrize(
    ("template", "row", "reason"),
    [
        (LLAMA, SYSTEM, "refused_by_chat_template"),
        ("{{ ''.__class__.__mro__ }}" + CHATML, PLAIN, "refused_by_chat_template"),
        (MARKED.replace(SAYS + "{% endg", "{% endg"), PLAIN, "response_not_found"),
    ],
)
def test_a_template_that_cannot_be_learned_from_is_rejected(template: str, row: Chat, reason: str) -> None:
    chat_template = read_template(tokenizer_with(CHATML), "t")._replace(text=template)
    with pytest.raises(RefusedError) as caught:
        rendered(row, chat_template)
    assert caught.value.reason == reason


def test_prepared_data_do_not_depend_on_the_current_date() -> None:
    chat_template = read_template(tokenizer_with(DATED), "t")
    assert rendered(PLAIN, chat_template)[0].startswith("01 Jan 2026<|im_start|>")
    assert len(check_template(chat_template)) == 1
    always = chat_template._replace(text="{% set f = '%Y-%m-%d' %}{{ strftime_now(f) }}" + CHATML)
    other = always._replace(variables=json.dumps({"date": "2031-12-24"}))
    assert rendered(PLAIN, other)[0].startswith("2031-12-24<|im_start|>")
    with pytest.raises(UserError) as caught:
        check_template(chat_template._replace(text="{{ undefined_function('%Y') }}" + CHATML))
    assert caught.value.code == "template-unusable"


@pytest.mark.parametrize(
    "template", [CHATML, [{"name": "x", "template": "y"}, {"name": "default", "template": CHATML}]]
)
def test_templates_in_a_configuration_are_kept(tmp_path: Path, template: str | list[dict[str, str]]) -> None:
    shutil.copy(tiny_tokenizer() / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    save_tokenizer(tmp_path, None, saved := tmp_path / "saved")
    loaded = (load_tokenizer(tmp_path), load_tokenizer(saved), AutoTokenizer.from_pretrained(saved))
    assert [tokenizer.chat_template for tokenizer in loaded] == [CHATML] * 3


@pytest.mark.parametrize("template", ["chat", "chat_template"])
def test_only_supervised_answers_have_spans(tmp_path: Path, template: str) -> None:
    """Only the marked answer and its end have labels. A changed template is an error only if it is used."""
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_with(CHATML), tokenizer)
    rows = [marked({"weight": i % 2}, {"weight": 1 - i % 2}, row=i) for i in range(40)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    options = {"kind": "instruct", "template": template, "sequence_len": 400, "tokenizer": str(tokenizer)}
    config = prepared(tmp_path, **options)
    assert not verify(config.dir)[1]
    examples = segments(train_set(config))
    answers = [[f"a{turn} {i}<|im_end|>" for turn in (i % 2, 1 - i % 2)] for i in range(40)]
    learned = [decoded(tokenizer, [label for label in labels if label >= 0]) for _, labels in examples]
    assert sorted(learned) == sorted(answer for _, answer in answers)
    context = "".join(decoded(tokenizer, ids) for ids, _ in examples)
    for i in range(40):  # messages before a supervised answer are its context
        assert f"a0 {i}" in context
        assert (f"a1 {i}<|im_end|>" in context) == (template == "chat" or i % 2 == 0)
    end = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).token_to_id("<|im_end|>")
    assert train_set(config).manifest.answer_ends == [end]  # here the end of a turn is also EOS
    tokenizer_config = tokenizer / "tokenizer_config.json"
    tokenizer_config.write_text(tokenizer_config.read_text().replace('"{% for m', '"Hello{% for m'))
    with refused("tokenizer-changed") if template == "chat_template" else contextlib.nullcontext():
        run(config)


# a function that writes the file, and a line that its recipe must have
CSV = "".join(f'"{row["instruction"]}","{row["output"]}"\n' for row in alpaca_rows(80))
BOOK = "\n\n".join("\n".join(text.split(". ")) for text in texts(90, sentences=8)) + "\n"
SHARED = json.dumps([{"conversations": CHAT}] * 2 + [marked({}, {}, row=i) for i in range(60)])
FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "alpaca.jsonl": (lambda p: write_jsonl(p, alpaca_rows(80)), "template: alpaca"),
    "other names.csv": (lambda p: p.write_text(f'"Frage, bitte",reply\n{CSV}'), "instruction: Frage, bitte"),
    "share.json": (lambda p: p.write_text(SHARED), "template: chat"),
    "body.parquet": (lambda p: pyarrow.parquet.write_table(pa.table({"body": texts(90)}), p), "text: body"),
    "book [1].txt": (lambda p: p.write_text(BOOK), "format: paragraphs"),
}


@pytest.mark.parametrize("name", FILES)
def test_the_recipe_of_sniff_can_be_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The printed recipe can be pasted into a file, prepared, verified and inspected."""
    write, expected = FILES[name]
    write(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert main(["sniff", name, "--tokenizer", str(tiny_tokenizer())]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    start = next(i for i, line in enumerate(lines) if "recipe lines to paste" in line) + 1
    recipe = "\n".join(lines[start:]) + "\n"
    assert expected in recipe
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert main(["prepare", "recipe.yaml", "--workers", "1"]) == 0
    config = load_data_config(tmp_path / "recipe.yaml", [])
    assert verify(config.dir)[1] == [] and len(train_set(config)) > 0
    assert main(["inspect", str(config.dir / "train")]) == 0


def sniffed(files: Path, tokenizer: Path | None = None) -> tuple[str, str]:
    """Return the output and the recipe of `sniff`."""
    sink = io.StringIO()
    recipe = sniff(str(files), tokenizer and str(tokenizer), make_console(file=sink, width=100))
    return sink.getvalue(), recipe


def test_sniff_marks_supervised_text_and_prefers_the_chat_template(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"instruction": "ask", "output": "the answer"}])
    for tokenizer, answer in ((None, "the answer"), (tiny_tokenizer(), "the answer</s>")):
        printed, _ = sniffed(tmp_path / "a.jsonl", tokenizer)
        assert f"### Response:⟦{answer}" in printed and printed.count("⟦") == 2
    write_jsonl(tmp_path / "b.jsonl", (marked({}, {}, row=i) for i in range(40)))
    for template, expected in ((CHATML, "chat_template"), (SILENT, "chat")):
        printed, recipe = sniffed(tmp_path / "b.jsonl", tokenizer_with(template))
        assert f"template: {expected}\n" in recipe and "⟦a0 0" in printed
        (tmp_path / "recipe.yaml").write_text(recipe)
        config = load_data_config(tmp_path / "recipe.yaml", [f"data.dir={tmp_path / expected}"])
        run(config)
        assert train_set(config).manifest.documents == 40


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("a.b.jsonl", "a"),
        ("*.jsonl", "talks"),
        ("{a.b,c}.jsonl", "talks"),
        ("[ab].*", "talks"),
        ("?/*", "data"),
    ],
)
def test_the_directory_of_a_sniffed_recipe_has_no_pattern(tmp_path: Path, pattern: str, name: str) -> None:
    for file in ("a.b.jsonl", "c.jsonl", "a.jsonl", "x/a.jsonl"):
        (tmp_path / "talks" / file).parent.mkdir(exist_ok=True, parents=True)
        write_jsonl(tmp_path / "talks" / file, [PAIR])
    _, recipe = sniffed(tmp_path / "talks" / pattern)
    assert f"dir: runs/data/{name}\n" in recipe


def test_sniff_reports_rows_that_no_template_can_write(tmp_path: Path) -> None:
    call = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", **call}]
    write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}])
    with refused("nothing-readable"):
        sniffed(tmp_path / "a.jsonl", tokenizer_with(CHATML))


def test_sniff_knows_messages_without_a_tokenizer_and_tokens(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", (marked({}, row=i) for i in range(40)))
    printed, recipe = sniffed(tmp_path / "a.jsonl")
    assert "template: chat  # or chat_template" in recipe and "⟦a0 0" in printed
    write_jsonl(tmp_path / "b.jsonl", ({"input_ids": [i, 1, 2, 3] * 20} for i in range(40)))
    for tokenizer in (None, tiny_tokenizer()):
        _, recipe = sniffed(tmp_path / "b.jsonl", tokenizer)
        assert "format: tokens" in recipe and "kind: instruct" not in recipe
    (tmp_path / "recipe.yaml").write_text(recipe)
    run(config := load_data_config(tmp_path / "recipe.yaml", [f"data.dir={tmp_path / 'tokens'}"]))
    assert train_set(config).manifest.tokens > 1000


@pytest.mark.parametrize("kind", ["instruct", "text"])
def test_a_token_limit_below_the_first_row_is_an_error(tmp_path: Path, kind: str) -> None:
    rows = [talk(("user", f"question {i}"), ("assistant", "a" * 40)) for i in range(30)]
    write_jsonl(tmp_path / "a.jsonl", rows if kind == "instruct" else [f"text {i} " * 20 for i in range(30)])
    with refused("limit-takes-nothing"):
        prepared(tmp_path, kind=kind, limit_tokens=3, sequence_len=128)


WELL = "I'm doing very well, thank you!"  # the example of axolotl's documentation
DETAIL = [
    {"begin_offset": 0, "end_offset": 8, "train": False},
    {"begin_offset": 9, "end_offset": 18, "weight": 3},
    {"begin_offset": 19, "end_offset": 25, "train": True},
]


def weighted_row(mark: dict[str, Any], i: int, **row: Any) -> dict[str, Any]:
    turns = talk(
        ("user", f"how are you {i}"), ("assistant", WELL), ("user", "and now"), ("assistant", f"a {i}")
    )
    turns["messages"][1] |= mark
    return turns | row


def text_by_weight(config: DataConfig, tokenizer: Path) -> set[tuple[tuple[str, float], ...]]:
    """Return every example as stretches of text with equal weight."""
    data, found = train_set(config), set()
    for row in range(len(data)):
        ids, labels, positions, weights = (column[0] for column in data.batch(np.array([row])).values())
        starts = [*np.flatnonzero(positions == 0).tolist(), len(ids)]
        for a, b in itertools.pairwise(starts):
            pairs = [(token, w) for token, w in zip(labels[a:b], weights[a:b], strict=True) if token >= 0]
            runs = [
                (w, [int(t) for t, _ in run]) for w, run in itertools.groupby(pairs, lambda pair: pair[1])
            ]
            found.add(tuple((decoded(tokenizer, run), float(w)) for w, run in runs))
    return found - {()}


@pytest.mark.parametrize("template", ["chat", "chat_template"])
def test_weights_reach_the_tokens_of_their_characters(
    tmp_path: Path, template: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights of row, message and part are multiplied. The end of a turn has its message's weight."""
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_with(CHATML), tokenizer)
    rows = [weighted_row({"train_detail": DETAIL, "loss_scale": 2}, i, weight=0.5) for i in range(30)]
    rows += [weighted_row({"weight": 0.25}, i) for i in range(30, 60)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    options = {"kind": "instruct", "template": template, "sequence_len": 200, "tokenizer": str(tokenizer)}
    config = prepared(tmp_path, **options)
    assert not verify(config.dir)[1]
    end = "<|im_end|>"
    parts = [("very well", 3.0), (f", thank{end}", 1.0)]  # decoding drops the first space
    want = {(*parts, (f"a {i}{end}", 0.5)) for i in range(30)}
    want |= {((WELL + end, 0.25), (f"a {i}{end}", 1.0)) for i in range(30, 60)}
    assert text_by_weight(config, tokenizer) == want
    data = train_set(config)
    assert data.weight_range == (0.25, 3.0) and data.manifest.counts["weighted_spans"] == 90
    batch = data.batch(np.arange(len(data)))
    counted = np.where(batch["labels"] >= 0, batch["loss_weights"].astype(float), 0).sum(1)
    assert data.weight.tolist() == pytest.approx(counted.tolist())
    console = make_console(file=io.StringIO(), width=200)
    inspect(config.dir / "train", 1, 0, console)
    assert "0.25 to 3;" in console.file.getvalue()  # type: ignore[attr-defined]
    file, number = data.provenance(np.array([20]))[0]
    assert main(["inspect", str(config.dir), "--at", f"{file}:{number}"]) == 0
    assert "row 20:" in capsys.readouterr().out
    assert main(["inspect", str(config.dir), "--at", f"{file}:9999"]) == 2


def test_reasoning_has_a_weight(tmp_path: Path) -> None:
    """data.reasoning_weight applies only to the thinking text, where the template writes it."""
    tokenizer = tmp_path / "tokenizer"
    thinks = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
    shutil.copytree(tokenizer_with(CHATML.replace(SAYS, thinks + SAYS)), tokenizer)
    rows = [weighted_row({"reasoning_content": "all is fine", "weight": 2}, i) for i in range(30)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    options = {"kind": "instruct", "template": "chat_template", "sequence_len": 200}
    config = prepared(tmp_path, **options, tokenizer=str(tokenizer), reasoning_weight=0.5)
    for (before, high), (thought, low), (after, same), _ in text_by_weight(config, tokenizer):
        assert (high, low, same) == (2.0, 1.0, 2.0) and thought.strip() == "all is fine"
        assert "<think>" in before and after.endswith(f"</think>\n{WELL}<|im_end|>")


@pytest.mark.parametrize("template", ["chat", "chat_template"])
def test_weight_0_is_a_mask_and_weight_1_is_nothing(tmp_path: Path, template: str) -> None:
    """The shards are equal bit for bit. A row of weight 0 is rejected, as if it were masked."""
    nothing = [DETAIL[0], DETAIL[0] | {"begin_offset": 9, "end_offset": 12, "weight": 0, "train": None}]
    all_of_it = [{"begin_offset": 0, "end_offset": len(WELL) - 1, "weight": 1.0}]
    marks = [{"train": False}, {}, {}], [{"weight": 0}, {"training_detail": all_of_it}, {"loss_weight": 1}]
    marks += ([{"loss_scale": 0.0}, {"weight": True}, {}], [{"train_detail": nothing}, {}, {"weight": 1.0}])
    options = {"kind": "instruct", "template": template, "sequence_len": 200, "strict": False}
    shards = []
    for number, forms in enumerate(marks):
        root = tmp_path / str(number)
        root.mkdir()
        rows = [weighted_row(forms[i % 3], i) for i in range(60)]
        write_jsonl(root / "a.jsonl", [*rows, weighted_row({}, 60, weight=0)])
        config = prepared(root, **options, tokenizer=str(tokenizer_with(CHATML)))
        assert rejected(config)["no_loss"] == 1 and not train_set(config).weighted
        shards.append([info.sha256 for info in train_set(config).manifest.shards])
    assert shards == shards[:1] * len(marks)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("mark", "row", "phrase"),
    [
        *(({"weight": bad}, {}, "messages[1].weight must be a loss weight") for bad in (-1, "2", 1e9, [1])),
        *(({}, {"weight": bad}, "column weight must be a loss weight") for bad in (math.nan, math.inf, -0.5)),
        ({"train_detail": "all"}, {}, "train_detail must be a list"),
        (
            {"train_detail": [{"begin_offset": 0, "end_offset": 3}]},
            {},
            "must have offsets, and train or weight",
        ),
        ({"train_detail": [DETAIL[0] | {"weight": 1}]}, {}, "must have offsets, and train or weight"),
        ({"train_detail": [DETAIL[0] | {"end_offset": 31}]}, {}, "0 <= begin_offset <= end_offset < 31"),
        ({"train_detail": DETAIL[1::-1]}, {}, "train_detail[1] must have offsets with 19 <="),
        ({"train_detail": [DETAIL[0] | {"train": 0.5}]}, {}, "must be true or false"),
        ({"role": "user", "train_detail": DETAIL}, {}, "sets a loss on a message of the user"),
        ({}, {"weight": "high"}, "column weight must be a loss weight"),
    ],
)
def test_wrong_weights_are_rejected(
    mark: dict[str, Any], row: dict[str, Any], phrase: str, chat: bool
) -> None:
    result = read(weighted_row(mark, 0, **row), chat=chat)
    assert isinstance(result, Rejected) and result.reason == "wrong_type"
    assert phrase in result.detail and "\n" not in result.detail


def test_parts_that_a_template_changes_or_repeats_are_rejected() -> None:
    for says in ("{{ m.content }}{{ m.content }}<|im_end|>", "{{ m.content|upper }}<|im_end|>"):
        saved = tokenizer_with(CHATML.replace(SAYS, says))
        chat = read(weighted_row({"train_detail": DETAIL}, 0), chat=True)
        with pytest.raises(RefusedError, match="unchanged and once"):
            ChatEncoder(saved, read_template(saved, "t")).encode(chat)


def test_a_cell_of_a_table_can_be_a_weight() -> None:
    """A CSV cell may hold a weight as text. An empty cell sets none, and documents ignore the column."""
    weights = [read(PAIR | {"weight": cell}).weights for cell in ("0.5", " ", "1")]
    assert weights == [(AnswerWeights(0.5),), (), ()]
    assert list(parse([{"text": "a b c", "weight": "high"}], RowSpec("text", "auto", True, None, "none", 9)))


THINKS = "{{ '<think>\n' + m.reasoning_content + '\n</think>\n' if m.reasoning_content }}"


def weights_by_text(says: str, message: dict[str, Any], **settings: Any) -> list[tuple[str, float]]:
    """Return a written answer as stretches of text with equal weight."""
    template = read_template(tokenizer_with(CHATML.replace(SAYS, says)), "t", **settings)
    row = {"messages": [USER, {"role": "assistant"} | message]}
    ((text, (answer,)),) = ChatWriter(template).examples(read(row, chat=True))
    assert answer.weights is not None and len(answer.weights) == answer.stop - answer.start + 1
    pairs = zip(text[answer.start : answer.stop], answer.weights, strict=False)
    runs = [(weight, list(run)) for weight, run in itertools.groupby(pairs, lambda pair: pair[1])]
    return [("".join(sign for sign, _ in run), weight) for weight, run in runs]


def test_parts_of_a_stripped_content_have_their_weights() -> None:
    """Offsets count the white space that the template strips. The end token is not part of the content."""
    says = f"{THINKS}{{{{ m.content|trim }}}}<|im_end|>\n"

    def written(content: str, *parts: tuple[int, int, float], **keys: str) -> list[tuple[str, float]]:
        detail = [dict(zip(("begin_offset", "end_offset", "weight"), part, strict=True)) for part in parts]
        return weights_by_text(says, {"content": content, "train_detail": detail} | keys)

    end = ("<|im_end|>", 1.0)
    assert written("  It is 4. Bye", (0, 9, 2)) == [("It is 4.", 2.0), (" Bye", 0.0), end]
    assert written("  It is 4. Bye ", (0, 3, 2), (4, 14, 3)) == [("It", 2.0), (" is 4. Bye", 3.0), end]
    assert written("  It", (0, 0, 2), (1, 3, 3), reasoning_content="t") == [
        ("<think>\nt\n</think>\n", 0.0),
        ("It", 3.0),
        end,
    ]
    assert written("e", (0, 0, 2)) == [("e", 2.0), end]


def test_reasoning_is_found_outside_tags_or_rejected() -> None:
    message = {"content": "Hi", "reasoning_content": "think", "reasoning": "think"}
    assert weights_by_text(THINKS + SAYS, message, reasoning_weight=0.5) == [
        ("<think>\n", 1.0),
        ("think", 0.5),
        ("\n</think>\nHi<|im_end|>", 1.0),
    ]
    assert weights_by_text(SAYS, message, reasoning_weight=0.5) == [("Hi<|im_end|>", 1.0)]
    with pytest.raises(RefusedError, match="reasoning_weight"):
        weights_by_text(THINKS.replace("t + '", "t|upper + '") + SAYS, message, reasoning_weight=0.5)
