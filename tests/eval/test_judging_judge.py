"""Judging: both orders, replies kept, prompts that do not fit, judges elsewhere, kills, bad files, keys."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emo.common.errors import UserError
from emo.eval.judging import judging
from emo.eval.judging.engines import engine
from emo.eval.judging.judges import JUDGES
from emo.eval.judging.judging import Judging, shown
from emo.eval.judging.pairs import of_answers
from emo.eval.model import EvaluatedModel
from tests.helpers.evaluating import command, tiny_judge, tiny_model
from tests.helpers.killing import undisturbed_and_killed
from tests.helpers.said import lines

NAMES = ["cat", "dog", "lamp", "town", "boat", "tree", "rain", "road", "bird", "hill"]
EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A judge whose replies are 1 or 2, and two models' answers to ten questions; one pair is the same."""
    root = tmp_path_factory.mktemp("judging")
    os.environ["EVAL_CACHE"] = str(root / "cache")
    tiny_judge(root / "judge")
    rows = [{"id": n, "instruction": f"Tell me about the {n}.", "output": f"The {n} is old."} for n in NAMES]
    answers(root / "a.json", rows, "mle")
    other = [
        row | {"output": f"A {row['id']} sees a {n}." * 2} for row, n in zip(rows, NAMES[::-1], strict=True)
    ]
    other[3]["output"] = rows[3]["output"]
    other[4]["output"] = ""
    answers(root / "b.json", other[::-1], "emo")  # the order of a file does not matter
    yield root
    del os.environ["EVAL_CACHE"]


def answers(path: Path, rows: list[dict[str, Any]], generator: str = "m") -> Path:
    path.write_text(
        json.dumps([{"dataset": "d", "generator": generator, **row} for row in rows]), encoding="utf-8"
    )
    return path


def judge(world: Path, out: Path, *options: object, name: str = "pandalm") -> tuple[int, str, str]:
    both = ["--a", world / "a.json", "--b", world / "b.json"]
    return command("judge", "--judge", name, *both, "--output_path", out, *options)


def read(out: Path, name: str = "v") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The numbers and the pairs of a judgement."""
    lines = (out / "judgements" / f"{name}.jsonl").read_text().split("\n")
    numbers = json.loads((out / "judgements" / f"{name}.json").read_text())
    return numbers, [json.loads(line) for line in lines if line]


@pytest.fixture(scope="module")
def judged(world: Path) -> Path:
    code, _, err = judge(
        world, world / "out", "--model", world / "judge", "--max_new_tokens", 1, "--name", "v"
    )
    assert code == 0, err
    return world / "out"


def test_every_reply_is_kept_and_both_orders_count(world: Path, judged: Path) -> None:
    numbers, rows = read(judged)
    assert [row["id"] for row in rows] == NAMES and numbers["orders"] == 2
    for row in rows:
        if row["id"] == "town":
            assert row["unasked"] == "identical" and row["outcome"] == "tie" and row["replies"] == []
            continue
        texts = [reply["text"] for reply in row["replies"]]
        assert set(texts) <= {"1", "2"} and len(texts) == 2
        sides = [{"1": "a", "2": "b"}[texts[0]], {"1": "b", "2": "a"}[texts[1]]]
        assert row["verdicts"] == sides
        assert row["outcome"] == (sides[0] if sides[0] == sides[1] else "changed")
    counts = numbers["counts"]
    assert counts["a"] + counts["b"] + counts["tie"] + counts["changed"] == 10 == numbers["read"]
    assert counts["changed"] and counts["tie"] == 1 == counts["identical"] and counts["empty_b"] == 1
    expected = (counts["b"] + (counts["tie"] + counts["changed"]) / 2) / 10
    assert numbers["win_rate"]["value"] == pytest.approx(expected)
    assert len(numbers["shown"]) == 5


def test_asking_again_costs_nothing_and_other_answers_are_asked_anew(world: Path, judged: Path) -> None:
    stores = set((judged / "store").iterdir())
    options = ["--model", world / "judge", "--max_new_tokens", 1, "--name=v"]
    before = (judged / "judgements" / "v.jsonl").read_bytes()
    assert judge(world, judged, *options)[0] == 0
    assert set((judged / "store").iterdir()) == stores
    assert (judged / "judgements" / "v.jsonl").read_bytes() == before
    assert judge(world, judged, *options, "--limit", 4)[0] == 0
    assert len(set((judged / "store").iterdir()) - stores) == 1
    assert len(read(judged)[1]) == 4
    assert judge(world, judged, *options)[0] == 0


def test_a_short_context_cuts_both_answers_alike(world: Path, tmp_path: Path) -> None:
    """A pair that fits, one whose answers are cut, one whose question alone is too long."""
    short = tiny_judge(tmp_path / "short", max_position_embeddings=320)
    rows = [
        {"instruction": "Why?", "output": "No."},
        {"instruction": "Tell a tale.", "output": "once " * 200},
        {"instruction": "why " * 400, "output": "No."},
    ]
    answers(tmp_path / "a.json", rows, "mle")
    answers(tmp_path / "b.json", [row | {"output": f"Yes! {row['output']}"} for row in rows], "emo")
    common = ["judge", "--judge", "pandalm", "--a", tmp_path / "a.json", "--b", tmp_path / "b.json"]
    common += ["--model", short, "--max_new_tokens", 1, "--name", "v", "--output_path", tmp_path]
    code, _, _ = command(*common)
    numbers, (fits, cut, absent) = read(tmp_path)
    assert code == 0
    assert fits["cut"] is None and absent["unasked"] == "no_room" and absent["replies"] == []
    assert 0 < cut["cut"] < 1000 and numbers["counts"]["cut"] == 1 == numbers["counts"]["no_room"]
    assert numbers["read"] == 2 and numbers["counts"]["unreadable"] == 0
    pairs, model = of_answers(tmp_path / "a.json", tmp_path / "b.json"), EvaluatedModel(str(short))
    tokens = [
        [1 + len(model.tokenizer(shown(JUDGES["pandalm"], pairs.rows[1], order, cut["cut"] + options),
                                 add_special_tokens=False).input_ids) for order in (False, True)]
        for options in (0, 1)
    ]  # fmt: skip
    assert max(tokens[0]) + 1 <= 320 < max(tokens[1]) + 1
    assert command(*common, "--max_new_tokens", 400)[0] == 2


def test_a_judge_with_a_chat_template_gets_messages(world: Path, tmp_path: Path) -> None:
    chat = tiny_model(tmp_path / "chat", max_position_embeddings=2048)
    (chat / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}:"
    )
    code, _, _ = judge(
        world, tmp_path, "--model", chat, "--max_new_tokens", 2, "--name", "v", name="alpaca_eval"
    )
    numbers, _ = read(tmp_path)
    assert code == 0 and numbers["facts"]["chat_template"] is True
    assert numbers["read"] == 1  # the identical pair remains


def exported(world: Path, out: Path, name: str, form: str = "jsonl") -> list[dict[str, Any]]:
    code, messages, _ = judge(world, out, "--export", out / "ask.jsonl", "--format", form, name=name)
    rows = [json.loads(line) for line in (out / "ask.jsonl").read_text().splitlines()]
    assert code == 0 and f"{len(rows)} prompts on 10 pairs" in messages and len(rows) == 18
    return rows


def test_prompts_go_out_and_replies_come_back(world: Path, tmp_path: Path) -> None:
    """Auto-J behind a program of one's own: A's answers always win, once a reply says nothing."""
    rows = exported(world, tmp_path, "auto-j")
    assert all(row["prompt"].startswith("[INST] You are assessing") for row in rows)
    messages = {
        row["id"]: f"{EVIL} So, the final decision is Response {1 if row['id'].endswith('ab') else 2}."
        for row in rows
    }
    silent = rows[6]["id"]
    messages[silent] = "I cannot tell."
    replies = [json.dumps({"id": key, "reply": text}) for key, text in messages.items()]
    random.Random(0).shuffle(replies)
    (tmp_path / "r.jsonl").write_text("\n".join(replies))
    code, _, _ = judge(world, tmp_path, "--replies", tmp_path / "r.jsonl", "--name", "v", name="auto-j")
    numbers, pairs = read(tmp_path)
    counts = numbers["counts"]
    assert code == 0 and counts["a"] == 8 and counts["tie"] == 1 and counts["unreadable"] == 1
    assert counts["unreadable_replies"] == 1 and numbers["consistency"] == pytest.approx(8 / 9)
    assert [reply["text"] for reply in pairs[0]["replies"]] == [
        messages[rows[0]["id"]],
        messages[rows[1]["id"]],
    ]


def test_openai_batches_go_out_and_come_back_without_a_key(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "sk-0123456789abcdefSECRET"
    for variable in ("OPENAI_API_KEY", "HF_TOKEN", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(variable, secret)
    rows = exported(world, tmp_path, "alpaca_eval", "openai")
    assert {row["url"] for row in rows} == {"/v1/chat/completions"}
    body = rows[0]["body"]
    assert body["model"] == "gpt-4" and body["temperature"] == 0 and body["max_tokens"] == 100
    assert [m["role"] for m in body["messages"]] == ["system", "user"]
    verdict = repr([{"model": "model_1", "rank": 1}, {"model": "model_2", "rank": 2}])
    lines = [
        {"custom_id": r["custom_id"], "error": None,
         "response": {"status_code": 200, "body": {"choices": [{"message": {"content": verdict}}]}}}
        for r in rows[:-1]
    ]  # fmt: skip
    lines.append({"custom_id": rows[-1]["custom_id"], "response": None, "error": {"code": "batch_expired"}})
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--replies", tmp_path / "r.jsonl", "--name=v"]
    code, out, err = judge(world, tmp_path, *options, name="alpaca_eval")
    numbers, _ = read(tmp_path)
    assert code == 0 and numbers["counts"]["changed"] == 8 and numbers["counts"]["unreadable"] == 1
    written = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert secret.encode() not in written and secret not in out + err


BAD_REPLIES: dict[str, Callable[[list[str]], list[str]]] = {
    "not-json": lambda lines: [*lines[:-1], lines[-1][:20]],
    "missing": lambda lines: lines[:5],
    "twice": lambda lines: [*lines, lines[0]],
    "foreign": lambda lines: [*lines, json.dumps({"id": "x-1-ab", "reply": "1"})],
    "no-id": lambda lines: [*lines, json.dumps({"reply": "1"})],
    "no-rows": lambda lines: [],
    "no-reply": lambda lines: [line.replace("reply", "text") for line in lines],
    "no-text": lambda lines: [line.replace('"1"', "1") for line in lines],
}


@pytest.mark.parametrize("code", BAD_REPLIES)
def test_bad_reply_files_are_refused(world: Path, tmp_path: Path, code: str) -> None:
    rows = exported(world, tmp_path, "pandalm")
    replies = [json.dumps({"id": row["id"], "reply": "1"}) for row in rows]
    (tmp_path / "r.jsonl").write_text("\n".join(BAD_REPLIES[code](replies)))
    pairs = of_answers(world / "a.json", world / "b.json")
    with pytest.raises(UserError) as error:
        judging.read_replies(JUDGES["pandalm"], pairs, tmp_path / "r.jsonl")
    assert error.value.code == code
    (tmp_path / "r.jsonl").write_text("\n".join(replies))
    with pytest.raises(UserError) as error:  # of another judge
        judging.read_replies(JUDGES["auto-j"], pairs, tmp_path / "r.jsonl")
    assert error.value.code == "foreign"


def test_a_model_beside_itself_is_all_ties_and_nothing_is_asked(world: Path, tmp_path: Path) -> None:
    same = [
        "judge",
        "--judge",
        "auto-j",
        "--a",
        world / "a.json",
        "--b",
        world / "a.json",
        "--output_path",
        tmp_path,
    ]
    code, out, _ = command(*same, "--export", tmp_path / "p.jsonl")
    assert code == 0 and "0 prompts on 10 pairs" in out and (tmp_path / "p.jsonl").read_text() == ""
    for setting in (["--replies", tmp_path / "p.jsonl"], ["--model", world / "judge"]):
        assert command(*same, *setting, "--max_new_tokens", 9, "--name", "v")[0] == 0
        numbers, _ = read(tmp_path)
        assert numbers["win_rate"]["value"] == 0.5 and numbers["counts"]["identical"] == 10


def row(key: Any = None, instruction: str = "Why?", output: Any = "No.") -> dict[str, Any]:
    return {"instruction": instruction, "output": output} | ({} if key is None else {"id": key})


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([row(i) for i in range(6)], [row(i) for i in (0, 9)]),
        ([row(1), row(1)], [row(1)]),
        ([row(1)], [row(1, "Who?")]),
        ([row(None, "x"), row(None, "y")], [row(None, "x")]),
        ([row(None, "x"), row(None, "x")], [row(None, "x")]),
        ([row(1) | {"generator": "p"}, row(2) | {"generator": "q"}], [row(1)]),
        ([row(1, output=[])], [row(1)]),
    ],
    ids=["ids", "twice", "other-question", "texts", "text-twice", "generators", "no-text"],
)
def test_bad_answers_are_refused(tmp_path: Path, a: list[Any], b: list[Any]) -> None:
    for name, rows in (("a", a), ("b", b)):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    with pytest.raises(UserError):
        of_answers(tmp_path / "a.json", tmp_path / "b.json")


BOTH = ["--a", "a.json", "--b", "b.json"]


@pytest.mark.parametrize(
    "options",
    [
        ["gpt-5"],
        ["auto-j"],
        ["alpaca_eval", *BOTH],
        ["auto-j", *BOTH, "--export", "p", "--format", "x"],
        ["pandalm", *BOTH, "--export", "p", "--format", "openai"],
        ["auto-j", *BOTH, "--export", "."],
        ["auto-j", "--from", "a.json"],
        ["auto-j", "--from", "a.json", "--limit", 3],
        ["auto-j", "--a", "a.json", "--labelled", "b.json"],
        ["auto-j", "--labelled", "a.json", "--export", "p"],
    ],
)
def test_bad_options_are_refused(world: Path, monkeypatch: pytest.MonkeyPatch, options: list[Any]) -> None:
    monkeypatch.chdir(world)
    code, _, err = command("judge", "--judge", *options, "--output_path", "nothing")
    assert code == 2 and len(lines(err)) == 1
    assert not (world / "nothing").exists() and not (world / "p").exists()


def test_answers_with_and_without_ids_match_by_their_questions(tmp_path: Path) -> None:
    """Also in a file that begins with a mark, and has half of a character, which counts as one."""
    text = json.dumps([row(1, "x", "a\ud800b"), row(2, "y", "")])
    (tmp_path / "a.json").write_text("\ufeff" + text, encoding="utf-8")
    answers(tmp_path / "b.json", [row(None, "y", "b"), row(None, "x", None)], "a")
    pairs = of_answers(tmp_path / "a.json", tmp_path / "b.json")
    assert [(p.question.instruction, p.a, p.b) for p in pairs.rows] == [("x", "a\ufffdb", ""), ("y", "", "b")]
    assert pairs.a != pairs.b and sum("are empty" in note for note in pairs.notes) == 2


def test_published_files_have_odd_answers(tmp_path: Path) -> None:
    """PandaLM's test set has answers that became true when it was written."""
    labels = {f"annotator{i}": 1 for i in (1, 2, 3)}
    first = {"idx": 5, "instruction": "a", "input": "", "response1": True, "response2": None, **labels}
    (tmp_path / "t.json").write_text(json.dumps([first]))
    (tmp_path / "v.json").write_text(json.dumps([{"idx": 5, "pandalm_result": 1}]))
    options = [
        "--labelled",
        tmp_path / "t.json",
        "--from",
        tmp_path / "v.json",
        "--output_path",
        tmp_path,
        "--name",
        "v",
    ]
    assert command("judge", "--judge", "pandalm", *options)[0] == 0
    assert (read(tmp_path)[1][0]["a"], read(tmp_path)[1][0]["b"]) == ("True", "")
    for verdicts in ([{"idx": 6, "pandalm_result": 1}], [{"pandalm_result": 1}, {"pandalm_result": 2}]):
        (tmp_path / "v.json").write_text(json.dumps(verdicts))
        assert command("judge", "--judge", "pandalm", *options)[0] == 2


def test_judgements_of_one_name_are_not_written_over_each_other(tmp_path: Path) -> None:
    """Two files of verdicts on the same test set: neither is lost without a word."""
    first = {"idx": 5, "instruction": "a", "response1": "x", "response2": "y", "pandalm_result": 1}
    files = [tmp_path / "v.json", tmp_path / "w.json"]
    for i, file in enumerate(files):
        file.write_text(json.dumps([first | {f"annotator{k}": i for k in (1, 2, 3)}]))
    assert command("judge", "--judge", "pandalm", "--from", *files, "--output_path", tmp_path / "o")[0] == 2
    assert not (tmp_path / "o").exists()


def run(world: Path, out: Path) -> None:
    """What `judge` does."""
    pandalm, model = JUDGES["pandalm"], EvaluatedModel(str(world / "judge"))
    pairs = of_answers(world / "a.json", world / "b.json")
    actual = Judging(pandalm, pairs, engine("transformers", model, pandalm.decoding, 1), out, 1).run()
    (out / "replies.json").write_text(json.dumps(actual))


def test_killed_at_random_moments_the_same_replies(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quick form of tests/campaigns/judging.py, in chunks of one pair."""
    monkeypatch.setattr(judging, "CHUNK", 1)
    whole, killed = undisturbed_and_killed(run, world, tmp_path, 1)
    assert (whole / "replies.json").read_bytes() == (killed / "replies.json").read_bytes()
