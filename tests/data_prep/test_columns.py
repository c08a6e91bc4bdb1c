"""Columns, roles and content parts are read as the recipe says; `sniff` proposes what `prepare` reads."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from rich.console import Console

from emo.data_prep.cli import main
from emo.data_prep.config import load_data_config
from emo.data_prep.rows import Rejected, RowSpec, parse
from emo.data_prep.sniff import guess, sniff
from emo.data_prep.templates import Chat, Conversation, Exchange
from emo.data_prep.verify import verify
from tests.data_prep.test_chat import CHATML, THINKING, tokenizer_with
from tests.helpers.corpus import (
    alpaca_rows,
    prepared,
    run,
    segments,
    texts,
    tiny_tokenizer,
    train_set,
    write_jsonl,
)

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
        ({**PAIR, "system": "s"}, talked(("q", "a"), system="s")),
        ({**PAIR, "history": [["q0", "a0"], ["q1", "a1"]]}, talked(("q0", "a0"), ("q1", "a1"), ("q", "a"))),
        ({"question": "q", "answer": "a"}, talked(("q", "a"))),
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
    known, own = (
        train_set(
            prepared(tmp_path, sources=[source], kind="instruct", sequence_len=200, dir=str(tmp_path / name))
        ).manifest
        for name, source in {
            "known": {"files": "known.jsonl"},
            "own": {"files": "own.jsonl", "columns": names},
        }.items()
    )
    assert known.fingerprint == own.fingerprint
    assert own.sources[0]["columns"] == sorted(names.values())
    assert own.sources[0]["columns_not_read"] == ["n"]


def test_what_is_proposed_is_read() -> None:
    """Never an answer that was rejected; what is named wins over messages that are there as well."""
    for row in (QUESTION, {"dialog": TALK}, {"frage": "q", "antwort": "a"}, {"a": "q", "b": "a"}):
        assert read(row, **guess(row, "instruct")) == talked(("q", "a"))
    assert read({**QUESTION, "messages": TALK}, instruction="ask", output="reply") == talked(("q", "a"))
    names = guess({"dialog": TALK}, "instruct")
    assert spoken(read({"dialog": TALK}, chat=True, **names)) == [("user", "q"), ("assistant", "a")]
    assert guess({"prompt": "q", "chosen": "a", "rejected": "longer"}, "instruct")["output"] == "chosen"
    assert guess({"prompt": "q", "response_a": "a", "response_b": "b", "winner": "b"}, "instruct") == {}


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
        ("system assistant assistant user assistant", "system user assistant", 2),
        ("user assistant user user tool", "user assistant", 3),
        ("user user assistant", "user user assistant", 0),
        *((roles, "", 0) for roles in ("", "system user", "assistant", "user critic assistant")),
    ],
)
def test_odd_turns_of_a_chat_are_left_out_and_counted(roles: str, used: str, unused: int) -> None:
    result = read(talk(*((role, f"{role}{i}") for i, role in enumerate(roles.split()))), chat=True)
    if not used:
        assert result.reason == "bad_roles"
    else:
        assert " ".join(role for role, _ in spoken(result)) == used and result.unused == unused


@pytest.mark.parametrize(
    ("row", "kind", "expected"),
    [
        ({"text": "", "document": "crawl/2.html"}, "text", "empty"),
        ({**PAIR, "output": "", "answer": "B"}, "instruct", "empty_response"),
        ({"messages": [], **PAIR}, "instruct", "bad_roles"),
    ],
)
def test_an_empty_column_is_not_passed_over(row: Any, kind: str, expected: str) -> None:
    assert read(row, kind).reason == expected


def marked(*marks: dict[str, Any], row: int = 0) -> dict[str, Any]:
    """Return a chat with an answer for each of the marks."""
    turns = []
    for i, mark in enumerate(marks):
        turns += [
            {"role": "user", "content": f"q{i} {row}"},
            {"role": "assistant", "content": f"a{i} {row}", **mark},
        ]
    return {"messages": turns}


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    "mark",
    [{"weight": 0}, {"train": False}, {"masked": True}],
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


@pytest.mark.parametrize("mark", [{"weight": 0.5}, {"loss_mask": 1}, {"mask": "User"}])
def test_marks_that_cannot_be_followed_are_refused(mark: dict[str, Any]) -> None:
    assert read(marked({}, mark)).reason == "wrong_type"
    talk = marked({})["messages"]
    talk[0]["train"] = True  # what the user says is never trained on
    assert read({"messages": talk}).reason == "wrong_type"
    talk[0] = {"role": "user", "content": "q", "weight": 1}
    assert read({"messages": talk}) == read(marked({}))._replace(exchanges=(Exchange("q", "a0 0"),))


@pytest.mark.parametrize("template", ["chat", "chat_template"])
def test_only_what_is_learned_is_supervised(tmp_path: Path, template: str) -> None:
    """From the file to labels: the context is the same, the answer that is marked has none."""
    tokenizer = tokenizer_with(CHATML, tmp_path)
    common = {"kind": "instruct", "template": template, "sequence_len": 400, "tokenizer": str(tokenizer)}
    found = []
    for every in (False, True):
        write_jsonl(
            tmp_path / "a.jsonl",
            (marked({"weight": i % 2 or every}, {"weight": 1 - i % 2 or every}, row=i) for i in range(40)),
        )
        config = prepared(tmp_path, dir=str(tmp_path / str(every)), shards=1, **common)
        found.append(segments(train_set(config)))
        assert not verify(config.dir)[1]
    assert [ids for ids, _ in found[0]] == [ids for ids, _ in found[1]]
    for (_, some), (_, all_of_it) in zip(*found, strict=True):
        assert 0 < sum(label != -100 for label in some) < sum(label != -100 for label in all_of_it)
        assert all(a in (b, -100) for a, b in zip(some, all_of_it, strict=True))


def shown(files: Path | str, tokenizer: Path | None = None, colours: str | None = None) -> tuple[str, str]:
    """What is printed, and the recipe."""
    sink = io.StringIO()
    console = Console(file=sink, force_terminal=bool(colours), width=100, color_system=colours)  # type: ignore[arg-type]
    recipe = sniff(str(files), None if tokenizer is None else str(tokenizer), console)
    return sink.getvalue(), recipe


# what is written, and what the recipe must say of it
CSV = "".join(f'"{row["instruction"]}","{row["output"]}"\n' for row in alpaca_rows(80))
BOOK = "\n\n".join("\n".join(text.split(". ")) for text in texts(90, sentences=8)) + "\n"
SHARED = json.dumps([{"conversations": CHAT}] * 2 + [marked({}, {}, row=i) for i in range(60)])
FILES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "alpaca.jsonl": (lambda p: write_jsonl(p, alpaca_rows(80)), ["kind: instruct", "template: alpaca"]),
    "own names.csv": (lambda p: p.write_text(f'"Frage, bitte",reply\n{CSV}'), ["instruction: Frage, bitte"]),
    "share.json": (lambda p: p.write_text(SHARED), ["template: chat"]),
    "body.parquet": (lambda p: pyarrow.parquet.write_table(pa.table({"body": texts(90)}), p), ["text: body"]),
    "lines.txt": (lambda p: p.write_text("\n".join(texts(90))), ["lines.txt\n"]),
    "book [1].txt": (lambda p: p.write_text(BOOK), ["format: paragraphs"]),
}


@pytest.mark.parametrize("name", FILES)
def test_the_lines_work_when_they_are_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Sniff, paste, prepare, inspect: as a newcomer does it."""
    write, expected = FILES[name]
    write(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert main(["sniff", name, "--tokenizer", str(tiny_tokenizer())]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    start = next(i for i, line in enumerate(lines) if "recipe lines to paste" in line) + 1
    recipe = "\n".join(lines[start:]) + "\n"
    assert all(line in recipe for line in expected), recipe
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert main(["prepare", "recipe.yaml", "--workers", "1"]) == 0
    config = load_data_config(tmp_path / "recipe.yaml", [])
    assert verify(config.dir)[1] == [] and len(train_set(config)) > 0
    assert main(["inspect", str(config.dir / "train")]) == 0


def test_examples_show_what_is_supervised(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"instruction": "ask", "output": "the answer"}])
    for tokenizer, answer in ((None, "the answer"), (tiny_tokenizer(), "the answer</s>")):
        plain, _ = shown(tmp_path / "a.jsonl", tokenizer)
        assert f"### Response:⟦{answer}" in plain and plain.count("⟦") == 2 and "\x1b" not in plain
        coloured, _ = shown(tmp_path / "a.jsonl", tokenizer, colours="truecolor")
        assert f"\x1b[1;32m{answer}" in coloured and "⟦" not in coloured
    write_jsonl(tmp_path / "b.jsonl", texts(40))
    plain, _ = shown(tmp_path / "b.jsonl", tiny_tokenizer())
    assert [plain.count(f"row {at} ─") for at in (1, 20, 21, 40)] in ([1, 1, 0, 1], [1, 0, 1, 1])


def test_a_chat_template_is_used_where_it_can_be(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", (marked({}, {}, row=i) for i in range(40)))
    for template, expected in ((CHATML, "chat_template"), (THINKING, "chat")):
        printed, recipe = shown(tmp_path / "a.jsonl", tokenizer_with(template, tmp_path))
        assert f"template: {expected}\n" in recipe
        assert ("cannot be used" in printed) == (template is THINKING)
        if template is CHATML:
            assert "⟦a0 0<|im_end|>⟧" in printed
        (tmp_path / "recipe.yaml").write_text(recipe)
        config = load_data_config(tmp_path / "recipe.yaml", [f"data.dir={tmp_path / expected}"])
        run(config)
        assert train_set(config).manifest.documents == 40
