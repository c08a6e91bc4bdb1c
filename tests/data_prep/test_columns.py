"""Columns by any name, roles and content parts: read as the recipe says, refused with what to write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from data_prep.config import settings
from data_prep.rows import Rejected, RowSpec, flags, parse
from data_prep.rows.columns import guess
from data_prep.templates import Chat, Conversation, Exchange
from data_prep.tokenizer import save_tokenizer
from data_prep.verify import verify
from tests.helpers.corpus import (
    alpaca_rows,
    data_config,
    run,
    segments,
    texts,
    tiny_tokenizer,
    train_set,
    write_jsonl,
)

QUESTION = {"ask": "q", "reply": "a"}
TALK = [{"who": "human", "said": "q"}, {"who": "gpt", "said": "a"}]


def read(row: Any, kind: str = "instruct", chat: bool = False, **columns: str) -> Any:
    spec = RowSpec(kind, "auto", True, None, "none", 1000, tuple(columns.items()), chat)
    (found,) = parse([row], spec)
    return found


def said(chat: Any) -> list[tuple[str, Any]]:
    """Roles and contents of a chat's messages."""
    assert isinstance(chat, Chat), chat
    return [(one["role"], one.get("content")) for one in json.loads(chat.messages)]


def test_columns_of_a_recipe_give_the_data_of_known_names(tmp_path: Path) -> None:
    """The same shards, whatever the columns are called."""
    rows = alpaca_rows(40)
    write_jsonl(tmp_path / "known.jsonl", rows)
    names = {"instruction": "frage", "input": "kontext", "output": "antwort"}
    write_jsonl(tmp_path / "own.jsonl", ({names[key]: value for key, value in row.items()} for row in rows))
    write_jsonl(tmp_path / "text.jsonl", ({"body": text, "text": "not this"} for text in texts(60)))
    prints = []
    for source in ({"files": "known.jsonl"}, {"files": "own.jsonl", "columns": names}):
        config = data_config(
            tmp_path,
            dir=str(tmp_path / f"of {source['files']}"),
            kind="instruct",
            block=200,
            sources=[source],
        )
        run(config)
        prints.append(train_set(config).fingerprint)
    assert prints[0] == prints[1]
    source = {"files": "text.jsonl", "columns": {"text": "body"}}
    config = data_config(tmp_path, sources=[source])
    run(config)
    assert train_set(config).manifest.sources[0]["columns"] == ["body"]
    assert train_set(config).manifest.config["sources"][0]["columns"] == {"text": "body"}
    with pytest.raises(UserError, match=r'columns=\{"text": "body"\}, the recipe says null'):
        run(data_config(tmp_path, sources=[{"files": "text.jsonl"}]))


def test_settings_do_not_speak_of_columns_that_are_not_set(tmp_path: Path) -> None:
    """Data prepared before there was such a key stay what they are, to the byte of their manifest."""
    found = settings(data_config(tmp_path, sources=[{"files": "a.jsonl"}]))
    assert list(found["sources"][0]) == [
        *("hub", "config", "revision", "split", "files", "embedded"),
        *("format", "column", "clean", "weight", "limit"),
    ]


def test_messages_may_have_keys_of_their_own() -> None:
    names = {"messages": "dialog", "role": "who", "content": "said"}
    assert read({"dialog": TALK}, **names) == Conversation((Exchange("q", "a"),))
    assert said(read({"dialog": TALK}, chat=True, **names)) == [("user", "q"), ("assistant", "a")]
    # a prompt that is named wins over messages that are there as well
    assert read({**QUESTION, "messages": TALK}, instruction="ask", output="reply") == Conversation(
        (Exchange("q", "a"),)
    )


@pytest.mark.parametrize(
    ("row", "kind", "hint"),
    [
        (QUESTION, "instruct", "for example columns: {instruction: ask, output: reply}"),
        ({"question": "q", "said": "a"}, "instruct", "columns: {output: said}"),
        ({"dialog": TALK}, "instruct", "columns: {content: said, messages: dialog, role: who}"),
        ({"body": "b"}, "text", "columns: {text: body}"),
        ({"question": "q", "answer": "a"}, "text", "; for instructions set data.kind=instruct"),
        ({"messages": TALK}, "text", "; for instructions set data.kind=instruct"),
        ({"text": "b"}, "instruct", "; for plain text set data.kind=text"),
        ({"n": 1}, "instruct", "there are: n"),
    ],
)  # fmt: skip
def test_an_unknown_column_is_refused_with_what_to_write(row: Any, kind: str, hint: str) -> None:
    found = read(row, kind)
    assert isinstance(found, Rejected) and found.reason == "missing_column"
    assert found.detail.endswith(hint) and found.detail.startswith("no column ")


def test_what_is_proposed_is_read() -> None:
    for row in (QUESTION, {"dialog": TALK}, {"frage": "q", "antwort": "a"}, {"a": "q", "b": "a"}):
        proposed = guess(row, "instruct")
        assert read(row, **proposed) == Conversation((Exchange("q", "a"),)), proposed


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"columns": {"question": "instruction"}}, "columns: question is no part of a row of kind instruct"),
        ({"columns": {"output": "a"}, "column": "b"}, "give column or columns, not both"),
        ({"columns": "instruction"}, "sources.0.columns"),
        ({"columns": {"instruction": 3}}, "sources.0.columns.instruction"),
    ],
)  # fmt: skip
def test_columns_that_cannot_be_meant(tmp_path: Path, source: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        data_config(tmp_path, kind="instruct", sources=[{"files": "a.jsonl"} | source])


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def talk(*turns: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]} | more


def test_content_parts_are_one_text() -> None:
    row = talk(("user", parts("q", "uestion")), ("assistant", parts("a")))
    assert read(row) == Conversation((Exchange("question", "a"),))
    assert said(read(row, chat=True)) == [("user", "question"), ("assistant", "a")]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ([{"type": "image_url", "image_url": "x"}, *parts("q")], "image_url"),
        (["q"], "str"),
        ([], "text without text"),
        ([{"type": "text"}], "text without text"),
        ([{"type": "text", "text": None}], "text without text"),
        ([[["q"]]], "list"),
    ],
)
def test_content_that_is_not_text_is_told(content: Any, found: str) -> None:
    answer = read(talk(("user", content), ("assistant", "a")))
    assert answer == Rejected("wrong_type", f"column messages[0].content must be text, not {found}")


def test_system_tool_and_developer_messages_reach_a_chat_template() -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
    }
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "q", "name": None},
        call,
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "assistant", "content": "a"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {"messages": messages, "tools": json.dumps(tools)}
    before = json.dumps(row)
    found = read(row, chat=True)
    assert json.dumps(row) == before, "rows are read again, and must be what they were"
    assert [one["role"] for one in json.loads(found.messages)] == [
        *("developer", "user", "assistant", "tool", "assistant")
    ]
    inner = json.loads(found.messages)
    assert inner[2]["tool_calls"][0]["function"]["arguments"] == {} and inner[3]["tool_call_id"] == "1"
    assert "name" not in inner[1] and json.loads(found.tools) == tools
    assert read(row) == Rejected("wrong_type", "column messages[2].content must be text, not null")
    plain = talk(("user", "q"), ("tool", "r"), ("assistant", "a"))
    assert read(plain) == Rejected("bad_roles", "user tool assistant")
    assert said(read(plain, chat=True)) == [("user", "q"), ("tool", "r"), ("assistant", "a")]
    assert read({**plain, "tools": "none"}, chat=True) == Rejected(
        "wrong_type", "column tools must be a list of tools, not str"
    )


@pytest.mark.parametrize(
    ("roles", "kept", "unused"),
    [
        (("user", "assistant"), ("user", "assistant"), 0),
        (("assistant", "user", "assistant"), ("user", "assistant"), 1),
        (("system", "assistant", "assistant", "user", "assistant"), ("system", "user", "assistant"), 2),
        (("user", "assistant", "user"), ("user", "assistant"), 1),
        (("user", "assistant", "user", "user", "tool"), ("user", "assistant"), 3),
        (("user", "user", "assistant"), ("user", "user", "assistant"), 0),
        (("human", "gpt"), ("user", "assistant"), 0),
    ],
)
def test_odd_turns_of_a_chat_are_left_out_and_counted(
    roles: tuple[str, ...], kept: tuple[str, ...], unused: int
) -> None:
    found = read(talk(*((role, f"{role}{i}") for i, role in enumerate(roles))), chat=True)
    assert tuple(role for role, _ in said(found)) == kept and found.unused == unused


@pytest.mark.parametrize(
    "roles", [(), ("user",), ("system", "user"), ("assistant",), ("user", "critic", "assistant")]
)
def test_chats_without_an_answer_or_with_strange_roles_are_rejected(roles: tuple[str, ...]) -> None:
    found = read(talk(*((role, "x") for role in roles)), chat=True)
    assert isinstance(found, Rejected) and found.reason == "bad_roles"


def test_silence_is_no_message() -> None:
    assert read(talk(("user", " "), ("assistant", "a")), chat=True) == Rejected("empty_instruction")
    assert read(talk(("user", "q"), ("assistant", "")), chat=True) == Rejected("empty_response")


def test_alpaca_rows_are_chats_too() -> None:
    row = {"instruction": "q", "input": "i", "output": "a", "system": "s", "history": [["q0", "a0"]]}
    assert said(read(row, chat=True)) == [
        *(("system", "s"), ("user", "q0"), ("assistant", "a0")),
        *(("user", "q\n\ni"), ("assistant", "a")),
    ]


PAIR, TURN = {"instruction": "q", "output": "a"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("row", "kind", "expected"),
    [
        ({"text": "", "document": "crawl/2.html"}, "text", "empty"),
        ({"text": " ", "content": "id-7"}, "text", "empty"),
        ({"text": None, "story": "id-7"}, "text", "wrong_type"),
        ({**PAIR, "output": "", "answer": "B"}, "instruct", "empty_response"),
        ({**PAIR, "instruction": "", "question": "id-7"}, "instruct", "empty_instruction"),
        ({"messages": [], **PAIR}, "instruct", "bad_roles"),
        (
            {"messages": [{"role": "user", "content": "", "value": "id-7"}, TURN]},
            "instruct",
            "empty_instruction",
        ),
        ({"messages": [{"role": None, "from": "human", "content": "q"}, TURN]}, "instruct", "wrong_type"),
    ],
)
def test_an_empty_column_is_not_passed_over(row: Any, kind: str, expected: str) -> None:
    assert read(row, kind).reason == expected


def test_an_empty_context_and_system_stay_empty() -> None:
    for name, other in (("input", "context"), ("system", "system_prompt")):
        assert read({**PAIR, name: "", other: "id-7"}) == Conversation((Exchange("q", "a"),))


def marked(*marks: dict[str, Any]) -> dict[str, Any]:
    """A chat with an answer for each of the marks."""
    talk = []
    for i, mark in enumerate(marks):
        talk += [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}", **mark}]
    return {"messages": talk}


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    "mark",
    [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": 0}, {"masked": True}],
)
def test_answers_marked_as_not_learned_carry_no_loss(mark: dict[str, Any], chat: bool) -> None:
    (key,) = mark
    opposite = {key: type(mark[key])(not mark[key])}
    row = read(marked(mark, opposite, {}, mark), chat=chat)
    assert row.unsupervised == (0, 3)
    assert read(marked(opposite, {key: None}), chat=chat).unsupervised == ()
    assert read(marked(mark), chat=chat).reason == "no_loss"
    if chat:
        assert key not in row.messages


@pytest.mark.parametrize(
    "mark", [{"weight": 0.5}, {"weight": "0"}, {"loss_mask": 1}, {"mask": "User"}, {"training_detail": [{}]}]
)
def test_marks_that_cannot_be_followed_are_refused(mark: dict[str, Any]) -> None:
    assert read(marked({}, mark)).reason == "wrong_type"
    talk = marked({})["messages"]
    talk[0]["train"] = True  # what the user says is never trained on
    assert read({"messages": talk}).reason == "wrong_type"
    talk[0] = {"role": "user", "content": "q", "weight": 1}
    assert read({"messages": talk}) == read(marked({}))._replace(exchanges=(Exchange("q", "a0"),))


@pytest.mark.parametrize("template", ["chat", "chat_template"])
def test_only_what_is_learned_is_supervised(tmp_path: Path, template: str) -> None:
    """From the file to labels: the context is the same, the answer that is marked has none."""
    save_tokenizer(tiny_tokenizer(), None, tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% if m['role'] == 'assistant' %}</s>"
        "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    rows = [marked({"weight": i % 2}, {"weight": (i + 1) % 2}) for i in range(40)]
    for i, row in enumerate(rows):
        for message in row["messages"]:
            message["content"] += f" {texts(1, seed=i)[0]}"
    found = {}
    for name, weight in (("marked", None), ("all", 1)):
        for row in rows:
            for message in row["messages"]:
                if weight is not None and message["role"] == "assistant":
                    message["weight"] = weight
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
        more = {"kind": "instruct", "template": template, "block": 400, "dedup": "none", "shards": 1}
        more |= {"tokenizer": str(tmp_path / "tokenizer"), "dir": str(tmp_path / name)}
        config = data_config(tmp_path, sources=[{"files": f"{name}.jsonl"}], **more)
        run(config)
        found[name] = segments(train_set(config))
        assert not verify(config.dir)[1]
    assert [ids for ids, _ in found["marked"]] == [ids for ids, _ in found["all"]]
    for (_, some), (_, every) in zip(found["marked"], found["all"], strict=True):
        learned = [label for label in some if label != -100]
        assert 0 < len(learned) < sum(label != -100 for label in every)
        assert all(a in (b, -100) for a, b in zip(some, every, strict=True))


def test_keys_of_messages_that_are_not_read_are_said(tmp_path: Path) -> None:
    rows = [{"id": i, **marked({"score": 3, "weight": 1})} for i in range(5)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    config = data_config(tmp_path, kind="instruct", template="chat", sources=[{"files": "a.jsonl"}], shards=1)
    run(config)
    assert train_set(config).manifest.sources[0]["columns_not_read"] == ["id", "messages[].score"]


def test_columns_that_may_mark_bad_answers_are_named() -> None:
    rows = [{"prompt": "q", "completion": "a", "label": flag, "n": 1} for flag in (True, False)]
    payload = "".join(json.dumps(row) + "\n" for row in rows).encode()
    assert flags(payload, RowSpec("instruct", "auto", True, None, "none", 1000)) == {"label"}


def test_a_mark_on_a_part_of_a_content_is_refused() -> None:
    part = {"type": "text", "text": "bad", "weight": 0}
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": [part]}]
    line = json.dumps({"messages": talk}).encode() + b"\n"
    (row,) = parse(line, RowSpec("instruct", "auto", True, None, "none", 1000))
    assert isinstance(row, Rejected) and row.reason == "wrong_type"


def test_answers_that_were_rejected_are_not_proposed() -> None:
    for row in (
        {"prompt": "q", "chosen": "a", "rejected": "a much longer answer"},
        {"rejected": "b", "chosen": "a", "prompt": "q"},
        {"question": "q", "incorrect_answers": "b", "chosen": "a"},
        {"prompt": "q", "rejected_response": "b", "chosen": "a"},
        {"prompt": "q", "lose": "b", "chosen": "a"},
    ):
        assert guess(row, "instruct")["output"] == "chosen"
    for better, worse in (("win", "lose"), ("winning_response", "losing_response"), ("winner", "loser")):
        assert guess({"prompt": "q", worse: "b, longer", better: "a"}, "instruct") == {"output": better}
    for row in (
        {"instruction": "q", "output_1": "a", "output_2": "b", "preference": 2},
        {"prompt": "q", "response_a": "a", "response_b": "b", "winner": "b"},
        {"prompt": "q", "response_0": "a", "response_1": "b", "better_response_id": 1},
    ):
        assert guess(row, "instruct") == {}
    talks = {"rejected": [{"role": "user", "content": "q"}], "chosen": [{"role": "user", "content": "q"}]}
    assert guess(talks, "instruct") == {"messages": "chosen"}
    assert guess({"chosen": "a talk", "rejected": "another and longer talk"}, "text") == {"text": "chosen"}
