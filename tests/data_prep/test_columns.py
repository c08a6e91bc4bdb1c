"""Columns by any name, roles and content parts: read as the recipe says, refused with what to write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emo.data_prep.rows import Rejected, RowSpec, guess, parse
from emo.data_prep.templates import Chat, Conversation, Exchange
from emo.data_prep.tokenizer import save_tokenizer
from emo.data_prep.verify import verify
from tests.helpers.corpus import alpaca_rows, prepared, segments, tiny_tokenizer, train_set, write_jsonl

QUESTION = {"ask": "q", "reply": "a"}
TALK = [{"who": "human", "said": "q"}, {"who": "gpt", "said": "a"}]
CHAT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
PAIR, TURN = {"instruction": "q", "output": "a"}, {"role": "assistant", "content": "a"}


def read(row: Any, kind: str = "instruct", chat: bool = False, **columns: str) -> Any:
    spec = RowSpec(kind, "auto", True, None, "none", 1000, tuple(columns.items()), chat)
    (result,) = parse([row], spec)
    return result


def talked(*exchanges: tuple[str, ...], system: str = "", unused: int = 0) -> Conversation:
    return Conversation(tuple(Exchange(*exchange) for exchange in exchanges), system, unused)


def spoken(chat: Any) -> list[tuple[str, Any]]:
    """Return the roles and contents of a chat's messages."""
    assert isinstance(chat, Chat), chat
    return [(message["role"], message.get("content")) for message in json.loads(chat.messages)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"instruction": "q", "context": "c", "response": "a"}, talked(("q", "a", "c"))),
        ({**PAIR, "input": "", "context": "c"}, talked(("q", "a"))),
        ({**PAIR, "system": "s"}, talked(("q", "a"), system="s")),
        ({"system": None, "prompt": "q", "output": "a"}, talked(("q", "a"))),
        ({**PAIR, "history": [["q0", "a0"], ["q1", "a1"]]}, talked(("q0", "a0"), ("q1", "a1"), ("q", "a"))),
        ({"question": "q", "answer": "a"}, talked(("q", "a"))),
        ({"conversations": [{"from": "gpt", "value": "hello"}, *CHAT]}, talked(("q", "a"), unused=1)),
        ({"conversations": [*CHAT, {"from": "human", "value": "bye"}]}, talked(("q", "a"), unused=1)),
        (
            {"system": "s", "conversations": [{"from": "gpt", "value": "x"}, *CHAT, *CHAT, CHAT[0]]},
            talked(("q", "a"), ("q", "a"), system="s", unused=2),
        ),
    ],
)
def test_all_of_a_row_is_read(row: Any, expected: Conversation) -> None:
    assert read(row) == expected


def test_columns_of_a_recipe_give_the_data_of_known_names(tmp_path: Path) -> None:
    """The same shards, whatever the columns are called; what is not read is noted."""
    rows = alpaca_rows(40)
    write_jsonl(tmp_path / "known.jsonl", rows)
    names = {"instruction": "frage", "input": "kontext", "output": "antwort"}
    write_jsonl(tmp_path / "own.jsonl", ({names[k]: v for k, v in row.items()} | {"n": 1} for row in rows))
    manifests = []
    for source in ({"files": "known.jsonl"}, {"files": "own.jsonl", "columns": names}):
        kind = {"kind": "instruct", "sequence_len": 200, "dir": str(tmp_path / f"of {source['files']}")}
        config = prepared(tmp_path, sources=[source], **kind)
        manifests.append(train_set(config).manifest)
    assert manifests[0].fingerprint == manifests[1].fingerprint
    assert manifests[1].sources[0]["columns"] == sorted(names.values())
    assert manifests[1].sources[0]["columns_not_read"] == ["n"]


def test_messages_may_have_keys_of_their_own() -> None:
    names = {"messages": "dialog", "role": "who", "content": "said"}
    assert read({"dialog": TALK}, **names) == talked(("q", "a"))
    assert spoken(read({"dialog": TALK}, chat=True, **names)) == [("user", "q"), ("assistant", "a")]
    # a prompt that is named wins over messages that are there as well
    assert read({**QUESTION, "messages": TALK}, instruction="ask", output="reply") == talked(("q", "a"))


def test_what_is_proposed_is_read() -> None:
    for row in (QUESTION, {"dialog": TALK}, {"frage": "q", "antwort": "a"}, {"a": "q", "b": "a"}):
        proposed = guess(row, "instruct")
        assert read(row, **proposed) == talked(("q", "a")), proposed


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def talk(*turns: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]} | more


def test_content_parts_are_one_text() -> None:
    row = talk(("user", parts("q", "uestion")), ("assistant", parts("a")))
    assert read(row) == talked(("question", "a"))
    assert spoken(read(row, chat=True)) == [("user", "question"), ("assistant", "a")]
    image = [{"type": "image_url", "image_url": "x"}, *parts("q")]
    marked_part = [{"type": "text", "text": "q", "weight": 0}]
    for content in (image, ["q"], [], [{"type": "text", "text": None}], [[["q"]]], marked_part):
        assert read(talk(("user", content), ("assistant", "a"))).reason == "wrong_type"


def test_system_tool_and_developer_messages_reach_a_chat_template() -> None:
    function = {"function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "q", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [function]},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "assistant", "content": "a"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {"messages": messages, "tools": json.dumps(tools)}
    before = json.dumps(row)
    result = read(row, chat=True)
    assert json.dumps(row) == before, "rows are read again, and must be what they were"
    inner = json.loads(result.messages)
    assert [message["role"] for message in inner] == ["developer", "user", "assistant", "tool", "assistant"]
    assert inner[2]["tool_calls"][0]["function"]["arguments"] == {} and inner[3]["tool_call_id"] == "1"
    assert "name" not in inner[1] and json.loads(result.tools) == tools
    assert read(row).reason == "wrong_type"
    plain = talk(("user", "q"), ("tool", "r"), ("assistant", "a"))
    assert read(plain) == Rejected("bad_roles", "user tool assistant")
    assert spoken(read(plain, chat=True)) == [("user", "q"), ("tool", "r"), ("assistant", "a")]
    assert read({**plain, "tools": "none"}, chat=True).reason == "wrong_type"


@pytest.mark.parametrize(
    ("roles", "used", "unused"),
    [
        ("user assistant", "user assistant", 0),
        ("system assistant assistant user assistant", "system user assistant", 2),
        ("user assistant user user tool", "user assistant", 3),
        ("user user assistant", "user user assistant", 0),
        ("human gpt", "user assistant", 0),
        *((roles, "", 0) for roles in ("", "system user", "assistant", "user critic assistant")),
    ],
)
def test_odd_turns_of_a_chat_are_left_out_and_counted(roles: str, used: str, unused: int) -> None:
    result = read(talk(*((role, f"{role}{i}") for i, role in enumerate(roles.split()))), chat=True)
    if not used:
        assert result.reason == "bad_roles"
    else:
        assert " ".join(role for role, _ in spoken(result)) == used and result.unused == unused


def test_alpaca_rows_are_chats_too() -> None:
    row = {**PAIR, "input": "i", "system": "s", "history": [["q0", "a0"]]}
    assert spoken(read(row, chat=True)) == [
        *(("system", "s"), ("user", "q0"), ("assistant", "a0")),
        *(("user", "q\n\ni"), ("assistant", "a")),
    ]


@pytest.mark.parametrize(
    ("row", "kind", "expected"),
    [
        ({"text": "", "document": "crawl/2.html"}, "text", "empty"),
        ({"text": None, "story": "id-7"}, "text", "wrong_type"),
        ({**PAIR, "output": "", "answer": "B"}, "instruct", "empty_response"),
        ({"messages": [], **PAIR}, "instruct", "bad_roles"),
        (
            {"messages": [{"role": "user", "content": "", "value": "x"}, TURN]},
            "instruct",
            "empty_instruction",
        ),
        ({"messages": [{"role": None, "from": "human", "content": "q"}, TURN]}, "instruct", "wrong_type"),
    ],
)
def test_an_empty_column_is_not_passed_over(row: Any, kind: str, expected: str) -> None:
    assert read(row, kind).reason == expected


def marked(*marks: dict[str, Any]) -> dict[str, Any]:
    """Return a chat with an answer for each of the marks."""
    turns = []
    for i, mark in enumerate(marks):
        turns += [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}", **mark}]
    return {"messages": turns}


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
    common = {"kind": "instruct", "template": template, "sequence_len": 400, "tokenizer": "tokenizer"}
    found = []
    for name in ("marked", "all"):
        rows = [
            marked({"weight": i % 2 or name == "all"}, {"weight": 1 - i % 2 or name == "all"})
            for i in range(40)
        ]
        for i, row in enumerate(rows):
            for message in row["messages"]:
                message["content"] += f" {i}"
        write_jsonl(tmp_path / "a.jsonl", rows)
        config = prepared(tmp_path, dir=str(tmp_path / name), shards=1, **common)
        found.append(segments(train_set(config)))
        assert not verify(config.dir)[1]
    assert [ids for ids, _ in found[0]] == [ids for ids, _ in found[1]]
    for (_, some), (_, every) in zip(*found, strict=True):
        assert 0 < sum(label != -100 for label in some) < sum(label != -100 for label in every)
        assert all(a in (b, -100) for a, b in zip(some, every, strict=True))


def test_answers_that_were_rejected_are_not_proposed() -> None:
    for row in (
        {"prompt": "q", "chosen": "a", "rejected": "a much longer answer"},
        {"question": "q", "incorrect_answers": "b", "chosen": "a"},
        {"prompt": "q", "lose": "b", "chosen": "a"},
    ):
        assert guess(row, "instruct")["output"] == "chosen"
    for row in (
        {"instruction": "q", "output_1": "a", "output_2": "b", "preference": 2},
        {"prompt": "q", "response_a": "a", "response_b": "b", "winner": "b"},
    ):
        assert guess(row, "instruct") == {}
    assert guess({"chosen": "a talk", "rejected": "another and longer talk"}, "text") == {"text": "chosen"}
