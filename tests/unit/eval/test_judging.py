"""Answers and verdicts: prompts as in training, rules of the judges, win rates and agreement."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

from emo.common.errors import UserError
from emo.eval.judging import answers, judges, judging, results
from emo.eval.judging.answers import Question, read_questions
from emo.eval.judging.judges import JUDGES
from emo.eval.judging.pairs import Judged, Pair, judged_row, pair_answers, read_labelled, read_verdicts
from emo.eval.judging.results import length_controlled, summarise_judgement
from emo.eval.models.model import EvaluatedModel
from emo.eval.report.gather import Report
from emo.eval.report.judged import compare_judgements
from emo.eval.report.page import document
from emo.eval.results import store
from tests.helpers.evaluating import (
    command,
    is_mistake,
    load,
    read_lines,
    tiny_judge,
    tiny_model,
    write_lines,
)
from tests.helpers.html import Page
from tests.helpers.refusals import refused

CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}A: {{ m.content }}{{ eos_token }}"
    "{% else %}U: {{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
)
NAMES = ["cat", "dog", "lamp", "town", "boat", "tree", "rain", "road", "bird", "hill"]
QUESTIONS = [
    {"id": f"q{i}", "instruction": f"Say {'why ' * (i % 5)}the {name} is here.", "input": "It is." * (i % 2)}
    for i, name in enumerate(NAMES[:7])
]


def write_answers(path: Path, rows: list[dict[str, Any]], generator: str = "m") -> Path:
    rows = [{"dataset": "d", "generator": generator, **row} for row in rows]
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tuned model, questions, a judge that replies 1 or 2, and answers of two models."""
    root = tmp_path_factory.mktemp("judging")
    tiny_model(root / "tuned", max_position_embeddings=512)
    (root / "tuned" / "export.json").write_text(json.dumps({"step": 9, "tokens": 9, "template": "alpaca/1"}))
    write_lines(root / "questions.jsonl", QUESTIONS)
    tiny_judge(root / "judge")
    rows = [{"id": n, "instruction": f"Tell me about the {n}.", "output": f"The {n} is old."} for n in NAMES]
    other = [row | {"output": f"A {row['id']} sees it." * 2} for row in rows]
    other[3]["output"], other[4]["output"] = rows[3]["output"], ""
    write_answers(root / "a.json", rows, "mle")
    write_answers(root / "b.json", other[::-1], "emo")  # the order of rows in a file is irrelevant
    return root


def judge(world: Path, out: Path, *options: object, name: str = "pandalm", expected: int = 0) -> str:
    """Judge the answers as judgement v. Assert the exit code `expected`, and return what is printed."""
    both = ("--a", world / "a.json", "--b", world / "b.json", "--output_path", out, "--name", "v")
    code, messages, err = command("judge", "--judge", name, *both, *options)
    assert code == expected, err
    return messages


def read(out: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the numbers and pairs of judgement v."""
    judgements = out / "judgements"
    return json.loads((judgements / "v.json").read_text()), read_lines(judgements / "v.jsonl")


def test_both_orders_count_and_replies_are_reused(world: Path, tmp_path: Path) -> None:
    options = ("--model", world / "judge", "--max_new_tokens", 1)
    judge(world, tmp_path, *options, expected=2)  # this judge decides by the order alone
    numbers, rows = read(tmp_path)
    assert [row["id"] for row in rows] == NAMES and numbers["orders"] == 2
    same = rows.pop(3)
    assert (same["unasked"], same["outcome"], same["replies"]) == ("identical", "tie", [])
    for row in rows:
        texts = [reply["text"] for reply in row["replies"]]
        sides = [{"1": "a", "2": "b"}[texts[0]], {"1": "b", "2": "a"}[texts[1]]]
        assert row["verdicts"] == sides
        assert row["outcome"] == (sides[0] if sides[0] == sides[1] else "changed")
    counts = numbers["counts"]
    assert counts["a"] + counts["b"] + counts["tie"] + counts["changed"] == 10 == numbers["read"]
    assert counts["tie"] == 1 == counts["identical"] == counts["empty_b"]
    expected = (counts["b"] + (counts["tie"] + counts["changed"]) / 2) / 10
    assert numbers["win_rate"]["value"] == pytest.approx(expected) and len(numbers["shown"]) == 5
    judge(world, tmp_path, *options, expected=2)
    assert len(list((tmp_path / "store").iterdir())) == 1 and read(tmp_path)[1][4:] == rows[3:]
    judge(world, tmp_path, *options, "--limit", 4, expected=2)
    assert len(list((tmp_path / "store").iterdir())) == 2 and len(read(tmp_path)[1]) == 4


def test_a_short_context_cuts_both_answers_to_the_same_length(world: Path, tmp_path: Path) -> None:
    """One pair fits, the answers of one are cut, and the question of one is too long."""
    short = tiny_judge(tmp_path / "short", max_position_embeddings=320)
    texts = [("Why?", "No."), ("Tell a tale.", "once " * 200), ("why " * 400, "No.")]
    rows = [{"instruction": question, "output": text} for question, text in texts]
    write_answers(tmp_path / "a.json", rows, "mle")
    write_answers(tmp_path / "b.json", [row | {"output": f"Yes! {row['output']}"} for row in rows], "emo")
    judge(tmp_path, tmp_path, "--model", short, "--max_new_tokens", 1, expected=2)
    numbers, (fits, cut, absent) = read(tmp_path)
    assert fits["cut"] is None and absent["unasked"] == "no_room" and absent["replies"] == []
    assert 0 < cut["cut"] < 1000 and numbers["counts"]["cut"] == 1 == numbers["counts"]["no_room"]
    assert numbers["read"] == 2 and numbers["counts"]["unreadable"] == 0


def exported(
    world: Path, out: Path, name: str, form: str = "jsonl", *options: str, left_out: int = 0
) -> list[dict[str, Any]]:
    judge(world, out, "--write_prompts", out / "ask.jsonl", "--format", form, *options, name=name)
    rows = read_lines(out / "ask.jsonl")
    assert len(rows) == 2 * (9 - left_out)
    return rows


@pytest.mark.parametrize("form", ["jsonl", "openai"])
def test_prompts_are_exported_and_replies_are_read(
    form: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs write the replies, so no key is stored. A wins, except for an unreadable reply."""
    monkeypatch.setenv("OPENAI_API_KEY", secret := "sk-0123456789abcdefSECRET")
    rows, replies = exported(world, tmp_path, "auto-j", form), []
    for number, row in enumerate(rows):
        key, prompt = (row["id"], row) if form == "jsonl" else (row["custom_id"], row["body"])
        assert prompt["prompt"].startswith("[INST] You are assessing")
        text = f"So, the final decision is Response {1 if key.endswith('ab') else 2}."
        response = {"status_code": 200, "body": {"model": "m", "choices": [{"text": text}]}}
        of_openai = {"custom_id": key, "error": None, "response": response}
        replies.append({"id": key, "reply": text, "model": "m"} if form == "jsonl" else of_openai)
        if number == 6:
            replies[-1] |= {"reply": "I cannot tell."} if form == "jsonl" else {"error": {"code": "expired"}}
    random.Random(0).shuffle(replies)
    out = judge(world, tmp_path, "--replies", write_lines(tmp_path / "r.jsonl", replies), name="auto-j")
    counts = (numbers := read(tmp_path)[0])["counts"]
    assert (counts["a"], counts["tie"], counts["unreadable"], counts["unreadable_replies"]) == (8, 1, 1, 1)
    assert numbers["consistency"] == pytest.approx(8 / 9)
    written = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert secret.encode() not in written and secret not in out


def test_bad_reply_files_are_rejected(world: Path, tmp_path: Path) -> None:
    rows = exported(world, tmp_path, "pandalm")
    lines = [json.dumps({"id": row["id"], "reply": "1"}) for row in rows]
    failed = [{"custom_id": row["id"], "response": None, "error": {"code": "expired"}} for row in rows]
    failed = [json.dumps(row) for row in failed]
    body = {"choices": [{"text": "1"}], "model": 4}
    named = [{"id": rows[0]["id"], "reply": "1", "model": model} for model in (0, 4)]
    named.append({"custom_id": rows[0]["id"], "response": {"body": body}})
    pairs, file = pair_answers(world / "a.json", world / "b.json"), tmp_path / "r.jsonl"
    judge_of = JUDGES["pandalm"]
    for code, judge, changed in (
        ("not-json", "pandalm", [*lines[:-1], lines[-1][:20]]),
        ("missing", "pandalm", lines[:5]),
        ("twice", "pandalm", [*lines, lines[0]]),
        ("foreign", "pandalm", [*lines, '{"reply": "1"}']),
        ("foreign", "auto-j", lines),
        ("no-reply", "pandalm", [line.replace("reply", "text") for line in lines]),
        ("all-failed", "pandalm", failed),
        *(("judge-name", "pandalm", [json.dumps(first), *failed[1:]]) for first in named),
    ):
        file.write_text("\n".join(changed), encoding="utf-8")
        with refused(code):
            judging.read_replies(JUDGES[judge], pairs, [file], "m")
    # A service writes the requests that failed to another file.
    errors = tmp_path / "errors.jsonl"
    errors.write_text("\n".join(failed[:3]))
    file.write_text("\n".join(lines[3:]))
    replies = [
        r for row in judging.read_replies(judge_of, pairs, [file, errors], "m")[0] for r in row["replies"]
    ]
    assert [reply.get("failed") for reply in replies] == ["expired"] * 3 + [None] * (len(lines) - 3)


@pytest.mark.parametrize(
    "asked, replied, by",
    [
        (None, ["gpt-4o-mini-2024-07-18"], "gpt-4o-mini-2024-07-18"),
        ("gpt-4o-mini", ["gpt-4o-mini-2024-07-18"], "gpt-4o-mini-2024-07-18"),
        ("openai/gpt-4", ["gpt-4-1106-preview"], "gpt-4-1106-preview"),
        ("my-judge", [None], "my-judge"),
        ("gpt-4o", ["gpt-4o-mini"], "other-judge"),
        (None, ["gpt-4o", "llama-3-70b"], "mixed-judges"),
        (None, ["gpt-4o", None], "mixed-judges"),
        (None, [None], "unnamed-judge"),
    ],
)
def test_replies_identify_their_author(
    asked: str | None, replied: list[str | None], by: str, world: Path, tmp_path: Path
) -> None:
    pairs, lines = pair_answers(world / "a.json", world / "b.json"), []
    judge = JUDGES["pandalm"]
    for i, key in enumerate(key for keys in judging._prompt_ids(judge, pairs) for key in keys):
        model = replied[i % len(replied)]
        body = {"choices": [{"text": "1", "finish_reason": "stop"}]} | ({"model": model} if model else {})
        lines.append({"custom_id": key, "response": {"body": body}} if i % 2 else {"id": key, "reply": "1"})
        lines[-1] |= {"model": model} if model and i % 2 == 0 else {}
    lines[1] = {"custom_id": lines[1]["custom_id"], "error": {"code": "expired"}}  # a failure has no model
    file = write_lines(tmp_path / "r.jsonl", lines)
    if by.split("-")[-1] in ("judge", "judges") and by != "my-judge":
        with refused(by):
            judging.read_replies(judge, pairs, [file], asked)
    else:
        assert judging.read_replies(judge, pairs, [file], asked)[1] == by


@pytest.mark.parametrize("second, why", [("1", "changed"), ("?", "unreadable")])
def test_undecided_verdicts_are_not_a_tie(second: str, why: str, world: Path, tmp_path: Path) -> None:
    rows = exported(world, tmp_path, "pandalm")
    replies = [{"id": r["id"], "reply": second if r["id"].endswith("ba") else "1"} for r in rows]
    file = write_lines(tmp_path / "r.jsonl", replies)
    out = judge(world, tmp_path, "--replies", file, "--ask_for", "some/m", expected=2)
    assert read(tmp_path)[0]["counts"][why] == 9 and read(tmp_path)[0]["by"] == "some/m"
    assert "no verdict" in next(line for line in out.splitlines() if "judged by" in line)
    page = document(Report([tmp_path]))
    assert "some/m gives no verdict" in page.answer[0] and "no clear difference" not in page.markdown()
    for reply in replies[:4]:  # two of nine pairs are decided, still fewer than the changed verdicts
        reply["reply"] = "2" if reply["id"].endswith("ba") else "1"
    write_lines(file, replies)
    assert "no verdict" in judge(world, tmp_path, "--replies", file, "--ask_for", "m")


def test_cut_off_answers_are_left_out_by_default(world: Path, tmp_path: Path) -> None:
    for name, cut in (("a", (0,)), ("b", (0, 2))):
        rows = json.loads((world / f"{name}.json").read_text())
        rows = [row | {"ended": NAMES.index(row["id"]) not in cut} for row in rows]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    for options, pairs, left_out, cut_off in (((), 8, 2, (0, 0)), (("--include_cut_off",), 10, 0, (1, 2))):
        rows = exported(tmp_path, tmp_path, "pandalm", "jsonl", *options, left_out=left_out)
        replies = [{"id": r["id"], "reply": "1" if r["id"].endswith("ab") else "2"} for r in rows]
        file = write_lines(tmp_path / "r.jsonl", replies)
        judge(tmp_path, tmp_path, "--replies", file, "--ask_for", "m", *options)
        numbers, judged = read(tmp_path)
        counts = numbers["counts"]
        assert (len(judged), numbers["pairs"], counts["left_out"]) == (pairs, pairs, left_out)
        assert (counts["cut_off_a"], counts["cut_off_b"]) == cut_off
        assert ("cut off" in document(Report([tmp_path])).markdown()) is True
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(
            json.dumps([row | {"ended": False} for row in json.loads((world / f"{name}.json").read_text())])
        )
    both = ("--a", tmp_path / "a.json", "--b", tmp_path / "b.json", "--write_prompts", tmp_path / "x")
    code, _, err = command("judge", "--judge", "pandalm", *both)
    assert code == 2 and "--include_cut_off" in err


def row(key: Any = None, instruction: str = "Why?", output: Any = "No.") -> dict[str, Any]:
    return {"instruction": instruction, "output": output} | ({} if key is None else {"id": key})


def test_bad_answers_are_rejected(tmp_path: Path) -> None:
    """Unmatched questions, reused ids, two models in one file and missing answers are rejected."""
    for a, b in (
        ([row(i) for i in range(6)], [row(i) for i in (0, 9)]),
        ([row(1)], [row(1, "Who?")]),
        ([row(1) | {"generator": "p"}, row(2) | {"generator": "q"}], [row(1)]),
        ([row(1, output=[])], [row(1)]),
    ):
        with pytest.raises(UserError):
            pair_answers(write_answers(tmp_path / "a.json", a), write_answers(tmp_path / "b.json", b))


def test_answers_with_and_without_ids_match_by_their_questions(tmp_path: Path) -> None:
    a = write_answers(tmp_path / "a.json", [row(1, "x", "a"), row(2, "y", "")])
    b = write_answers(tmp_path / "b.json", [row(None, "y", "b"), row(None, "x", None)])
    pairs = pair_answers(a, b)
    assert [(p.question.instruction, p.a, p.b) for p in pairs.rows] == [("x", "a", ""), ("y", "", "b")]
    assert pairs.a != pairs.b  # the generator is the same, so the files give the names


# sha256 of the prompts in the judges' repositories when they were copied to prompts.yaml.
WORD_FOR_WORD = {
    "auto_j": "351b6608af86df022a86bfffb9d343c3264f7e3a98863fb6a96854e78aa813a6",
    "auto_j_frame": "26cc13c9d66e8f84c45a4a4f8a5bd678e06f670f360ef8fcdd495c1ff44cde33",
    "pandalm": "2c46d3fbded041808b7b52767ff333cb8063cef180d6d630c30396ecd7d777f8",
    "pandalm_input": "fa1023585369f9be4d6965985b9d025a39339c010900c5abf2b03109a5405a34",
    "alpaca_eval": "cf4bace43fa6ac71944b9ca2506587ad7c509478a219e98a3950abf9d5b42a98",
}
EVIL = '{output_1} {prompt} {0} %s <|im_end|> [/INST] """ \\n {'


def test_prompts_equal_the_published_ones_and_answers_are_unchanged() -> None:
    for prompt, digest in WORD_FOR_WORD.items():
        assert hashlib.sha256(judges.PROMPTS[prompt].encode()).hexdigest() == digest
    for judge in JUDGES.values():
        text = judge.prompt(Question("", "Say it", EVIL), f"{EVIL} first", f"second {EVIL}")
        assert text.count(EVIL) == 3
        assert text.index("Say it") < text.index(f"{EVIL} first") < text.index(f"second {EVIL}")
        if judge.chat:
            assert [message["role"] for message in judges.messages(text)] == ["system", "user"]
    plain = JUDGES["pandalm"].prompt(Question("", "a"), " b </s>c[PAD]\n", "<pad>")
    assert "### Response 1:\nb c\n\n### Response 2:\n\n\n### Eval" in plain


REPLIES: dict[str, dict[str, str | None]] = {
    "auto-j": {
        "... So, the final decision is Response 1.": "a",
        "the final decision is  response 2 because": "b",
        "final decision is Response 1 ... So, the final decision is Tie.": "tie",  # the last verdict counts
        "final decision is Response 1, yet the final decision is neither": None,
        "The final decision: Response 1": None,
    },
    "pandalm": {
        "1\n\n### Reason: Response 1 is better.\n\n### Reference: x\n": "a",
        "  2\n": "b",
        "</s>tie\nmore": "tie",
        "1 \n### Reason": None,  # PandaLM's code compares the complete first line
        "Response 1": None,
    },
    "alpaca_eval": {
        "[{'model': 'model_1', 'rank': 1}, {'model': 'model_2', 'rank': 2}]": "a",
        "({'model': 'model_2', 'rank': 1}, {'model': 'model_1', 'rank': 2, 'n': -1})": "b",
        "[{'model': 'model_1', 'rank': 3}, {'model': 'model_2', 'rank': 1}]": None,
        "Sure: [{'model': 'model_1', 'rank': 1}]": None,
        "[{'model': 'model_1', 'rank': __import__('os').getpid()}]": None,  # never executed
        "[" * 50_000: None,
    },
}


def test_replies_are_read_by_the_judges_rules() -> None:
    for name, replies in REPLIES.items():
        for text, verdict in replies.items():
            assert JUDGES[name].verdict(text) == verdict, (name, text[:80])


def answer(world: Path, out: Path, *options: object) -> tuple[int, str, str]:
    common = ["--model", world / "tuned", "--questions", world / "questions.jsonl", "--output_path", out]
    return command("answer", *common, *options)


def outputs(out: Path, name: str = "questions-greedy") -> list[dict[str, Any]]:
    return json.loads((out / "models" / "tuned" / "answers" / name / "model_outputs.json").read_text())


def test_answers_equal_greedy_decoding_in_the_format_of_alpaca_eval(world: Path, tmp_path: Path) -> None:
    """Each answer equals a plain argmax loop after BOS and Stanford Alpaca's prompt, written out here."""
    assert answer(world, tmp_path, "--max_new_tokens", 6)[0] == 0
    rows = outputs(tmp_path)
    assert [row["instruction"] for row in rows] == [q["instruction"] for q in QUESTIONS]
    assert {(row["generator"], row["dataset"]) for row in rows} == {("tuned", "questions")}
    model, tokenizer = load(world / "tuned")
    prompt = (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        f"Write a response that appropriately completes the request.\n\n### Instruction:\n"
        f"{QUESTIONS[1]['instruction']}\n\n### Input:\nIt is.\n\n### Response:"
    )
    ids = [tokenizer.bos_token_id, *tokenizer(prompt, add_special_tokens=False).input_ids]
    start = len(ids)
    while len(ids) < start + 6 and (len(ids) == start or ids[-1] != tokenizer.eos_token_id):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    whole, before = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids, ids[:start]))
    assert rows[1]["output"] == whole[len(before) :].strip()


def test_answers_are_compared_with_those_in_the_file_of_questions(world: Path, tmp_path: Path) -> None:
    """ROUGE against the model's own answers is 1, against other words 0, and without answers it is absent."""

    def measure(name: str, known: list[str]) -> dict[str, Any]:
        rows = [q | {"output": text} for q, text in zip(QUESTIONS, known, strict=False)]
        file = write_lines(tmp_path / f"{name}.jsonl", rows)
        assert answer(world, tmp_path, "--questions", file, "--max_new_tokens", 6)[0] == 0
        about = tmp_path / "models" / "tuned" / "answers" / f"{name}-greedy" / "about.json"
        return json.loads(about.read_text())

    assert answer(world, tmp_path, "--max_new_tokens", 6)[0] == 0
    own = [row["output"] for row in outputs(tmp_path)]
    same, other = measure("own", own), measure("other", ["zebra"] * len(own))
    one_empty = measure("empty", ["", *own[1:]])
    assert same["rouge1"] == same["rougeL"] == 1 and other["rouge1"] == 0 and "rouge1" not in one_empty
    assert same["words"] == pytest.approx(sum(len(text.split()) for text in own) / len(own), rel=0.2)


def test_templates_are_found_and_mismatches_are_reported(world: Path, tmp_path: Path) -> None:
    def choose(path: Path, template: str) -> tuple[str, int]:
        messages: list[str] = []
        return answers.choose_template(EvaluatedModel(str(path)), template, messages.append), len(messages)

    assert choose(world / "tuned", "auto") == ("alpaca", 0) and choose(world / "tuned", "chat") == ("chat", 1)
    bare = tiny_model(tmp_path / "bare", tokenizer=EvaluatedModel(str(world / "tuned")).tokenizer)
    assert choose(bare, "auto") == ("alpaca", 1)
    (bare / "chat_template.jinja").write_text(CHAT)
    assert choose(bare, "auto") == ("chat_template", 0) and choose(bare, "alpaca") == ("alpaca", 1)
    (bare / "export.json").write_text(json.dumps({"step": 1, "tokens": 1, "template": "alpaca/0"}))
    assert choose(bare, "auto") == ("alpaca", 1)
    (bare / "export.json").write_text(json.dumps({"step": 1, "tokens": 1, "template": "alpaca/1"}))
    assert choose(bare, "auto") == ("alpaca", 0)  # the export's chat template equals it


def test_questions_without_room_for_an_answer_are_counted(world: Path, tmp_path: Path) -> None:
    """A question that exceeds the context has an empty answer. One that nearly does has a short one."""
    file = write_lines(tmp_path / "long.jsonl", [{"text": "why " * n} for n in (300, 90, 1)])
    code, out, _ = answer(world, tmp_path, "--questions", file, "--max_new_tokens", 400)
    rows = outputs(tmp_path, "long-greedy")
    assert code == 0 and [row["fits"] for row in rows] == [False, True, True]
    assert rows[0]["output"] == "" and 0 < rows[1]["tokens"] < 400
    assert "1 of 3 answers had no room" in out


WRONG_QUESTIONS = (
    [{"id": 1, "instruction": "a"}, {"id": 1, "instruction": "b"}], [{"id": 1, "text": "a"}, {"text": "b"}],
    [{"instruction": " "}], [{"text": 3}], [],
)  # fmt: skip
WRONG_OPTIONS = (
    "--questions nothing.jsonl", "--max_new_tokens 0", "--limit 0", "--top_p 0.5", "--temperature 0",
    "--engine llama.cpp", "--batch_size 0", "--template vicuna", "--template chat_template",
)  # fmt: skip
WRONG_JUDGES = (
    "gpt-5", "auto-j", "alpaca_eval BOTH", "auto-j BOTH --write_prompts p --format x", "auto-j --from a.json",
    "pandalm BOTH --write_prompts p --format openai", "auto-j BOTH --write_prompts .",
    "pandalm --labelled a.json",    "pandalm BOTH --model judge --max_new_tokens 2000",
    "auto-j BOTH --ask_for gpt-4o", "auto-j BOTH --format openai", "pandalm --from a.json --include_cut_off",
    "auto-j BOTH --write_prompts p --max_new_tokens -5",
)  # fmt: skip


def test_wrong_questions_and_options_are_rejected(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world)
    common = ["answer", "--model", "tuned", "--questions", "questions.jsonl", "--output_path", "nothing"]
    for rows in WRONG_QUESTIONS:
        assert is_mistake(*common, "--questions", write_lines(tmp_path / "q.jsonl", rows)), rows
    for options in WRONG_OPTIONS:
        assert is_mistake(*common, *options.split()), options
    for options in WRONG_JUDGES:
        arguments = options.replace("BOTH", "--a a.json --b b.json").split()
        assert is_mistake("judge", "--judge", *arguments, "--output_path", "nothing"), options
    assert not (world / "nothing").exists() and not (world / "p").exists()


def test_the_sets_are_found_by_name(shared_data: Path) -> None:
    for name, count in (("alpaca_eval", 403), ("vicuna", 40), ("sinstruct", 85)):
        for directory in (shared_data, shared_data / "instruct"):
            actual, questions = read_questions(name, str(directory))
            assert actual == name and len({q.id or q.text for q in questions}) == len(questions) == count


# --- win rates and agreement ------------------------------------------------------------------------------

# Length-controlled win rate in per cent of each file of annotations, computed with alpaca_eval 0.6.6 (its
# make_dmatrix_for_model and fit_LogisticRegressionCV, with the formula of length_controlled_minimal).
CONTROLLED = {"alpaca-7b": 26.297722, "falcon-7b-instruct": 39.521650, "recycled-wizardlm-7b-v2.0": 50.0}


@pytest.fixture(scope="module")
def instruct(shared_data: Path) -> Path:
    return shared_data / "instruct"


def plain_rows(path: Path) -> list[dict[str, Any]]:
    """Read rows without any code of this project."""
    with zstandard.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("name", CONTROLLED)
def test_alpaca_eval_win_rates(instruct: Path, name: str) -> None:
    """The win rate is (n_2 + n_0 / 2) / n, counted here. Lengths and the controlled rate also agree."""
    path = instruct / "alpaca_eval" / "annotations_gpt4_vs_davinci003" / f"{name}.jsonl.zst"
    rows, (judged,) = plain_rows(path), read_verdicts([path], None, "alpaca_eval")
    actual, n = summarise_judgement(judged, name), Counter(int(row["preference"]) for row in rows)
    rate = actual["win_rate"]
    assert rate["value"] == pytest.approx((n[2] + n[0] / 2) / len(rows))
    assert rate["low"] < rate["value"] < rate["high"]
    assert [actual["counts"][outcome] for outcome in ("tie", "a", "b")] == [n[0], n[1], n[2]]
    assert judged.b == rows[0]["generator_2"]  # falcon-7b-instruct's answers are falcon-40b-instruct's
    assert abs(100 * actual["length_controlled"] - CONTROLLED[name]) < 0.01
    assert actual["lengths"]["b"] == pytest.approx(sum(len(r["output_2"]) for r in rows) / len(rows))


def test_pandalm_labels_and_verdicts(instruct: Path, tmp_path: Path) -> None:
    path = instruct / "pandalm" / "test.jsonl.zst"
    rows, names = plain_rows(path), {"tie": 0, "a": 1, "b": 2, "unreadable": None}
    votes = [[row[f"annotator{i}"] for i in (1, 2, 3)] for row in rows]
    gold = [max(sorted(set(v), key=v.index), key=v.count) for v in votes]
    assert [names[results.majority_label(pair.human)] for pair in read_labelled(path).rows] == gold
    by = {judged.by: judged for judged in read_verdicts([path], path, "pandalm")}
    assert set(by) == {"pandalm_7b", "gpt_3_5_turbo"}
    for column, judged in by.items():
        verdicts = [{"0": 0, "1": 1, "2": 2, "tie": 0}.get(str(row[column]).lower()) for row in rows]
        assert [names[row["outcome"]] for row in judged.rows] == verdicts
        actual, ties = summarise_judgement(judged, column)["human"], [verdict or 0 for verdict in verdicts]
        assert actual["agreement"]["value"] == pytest.approx(np.mean(np.equal(gold, verdicts)))
        assert actual["unreadable_as_ties"] == pytest.approx(np.mean(np.equal(gold, ties)))
    assert summarise_judgement(by["gpt_3_5_turbo"], "g")["counts"]["unreadable"] == 9
    other = write_lines(tmp_path / "v.jsonl", [{"idx": -1, "pandalm_result": 1}])
    with refused("unmatched"):
        read_verdicts([other], path, "pandalm")


def test_auto_js_agreement_and_consistency(instruct: Path, tmp_path: Path) -> None:
    """As in its script, agreement needs two right verdicts, and consistency needs two equal ones."""
    path = instruct / "auto_j" / "pairwise.jsonl.zst"
    rows, draw = plain_rows(path), random.Random(0)
    straight = [draw.choice([row["label"], 0, 1, 2]) for row in rows]
    second = [v if draw.random() < 0.8 else draw.choice([0, 1, 2]) for v in straight]
    files = [tmp_path / "o.jsonl", tmp_path / "e.jsonl"]
    for file, values in zip(files, (straight, [(1, 0, 2)[v] for v in second]), strict=True):
        write_lines(file, [{"output": v} for v in values])
    (judged,) = read_verdicts(files, path, "auto-j")
    actual = summarise_judgement(judged, "x")
    alike = np.equal(straight, second)
    right = alike & np.equal(straight, [row["label"] for row in rows])
    assert actual["consistency"] == pytest.approx(alike.mean())
    assert actual["human"]["agreement"]["value"] == pytest.approx(right.mean())
    assert actual["counts"]["changed"] == sum(~alike)


def test_length_control_removes_the_effect_of_length(capfd: pytest.CaptureFixture[str]) -> None:
    """If a judge only counts characters, the plain rate follows length and the controlled rate is 0.5."""
    rng, a = np.random.default_rng(0), np.full(600, 1000)
    b = (1000 + rng.normal(60, 100, 600)).round().astype(int)  # B is longer
    p = 1 / (1 + np.exp(-3 * np.tanh((b - a) / (b - a).std())))
    scores = (rng.random(600) < p).astype(float)
    assert scores.mean() > 0.62
    assert length_controlled(scores.tolist(), a.tolist(), b.tolist()) == pytest.approx(0.5, abs=0.06)
    assert length_controlled([1.0] * 20, [5] * 20, [5] * 20) is None  # nothing can be fitted
    for score in (0.0, 1.0):  # one side always wins, and warnings of liblinear must not be printed
        actual = length_controlled([score] * 40, range(1, 41), range(40, 0, -1))
        assert actual == pytest.approx(score, abs=1e-3)
    assert capfd.readouterr() == ("", "")


def test_kappas_equal_textbook_values() -> None:
    """Cohen's example has 50 applications. Fleiss' table has 10 subjects and 14 raters."""
    first = ["y"] * 25 + ["n"] * 25
    second = ["y"] * 20 + ["n"] * 5 + ["y"] * 10 + ["n"] * 15
    assert results.cohen(first, second) == pytest.approx(0.4)
    table = [[0, 0, 0, 0, 14], [0, 2, 6, 4, 2], [0, 0, 3, 5, 6], [0, 3, 9, 2, 0], [2, 2, 8, 1, 1],
             [7, 7, 0, 0, 0], [3, 2, 6, 3, 0], [2, 5, 3, 2, 2], [6, 5, 2, 1, 0], [0, 2, 2, 3, 7]]  # fmt: skip
    ratings = [[str(i) for i, count in enumerate(row) for _ in range(count)] for row in table]
    assert results.fleiss(ratings) == pytest.approx(0.2099, abs=1e-4)
    assert results.cohen(["a"] * 3, ["a"] * 3) is None and results.fleiss([["a", "a"]] * 3) is None


def annotations(path: Path, preferences: dict[int, Any]) -> Path:
    row = {"output_1": "x", "output_2": "y", "generator_1": "a", "generator_2": "b"}
    return write_lines(path, [row | {"instruction": f"{i}", "preference": p} for i, p in preferences.items()])


def test_preferences_of_one_and_of_several_files(tmp_path: Path) -> None:
    """Preferences between 1 and 2, as in AlpacaEval 2, are averaged. Invalid ones are unreadable."""
    values: list[Any] = [1.2, 1.9, 1.5, 0, 2, 1, math.nan, 7, None, "2", True, 10**400]
    file = annotations(tmp_path / "w.jsonl", dict(enumerate(values)))
    actual = summarise_judgement(read_verdicts([file], None, "alpaca_eval")[0], "w")
    assert actual["read"] == 6 and actual["counts"]["unreadable"] == 6
    assert actual["win_rate"]["value"] == pytest.approx((0.2 + 0.9 + 0.5 + 0.5 + 1 + 0) / 6)
    assert actual["win"]["value"] == pytest.approx(2 / 6) and actual["tie"]["value"] == pytest.approx(2 / 6)
    files = [annotations(tmp_path / "1.jsonl", dict.fromkeys(range(6), 2)), tmp_path / "2.jsonl"]
    annotations(files[1], {6: 1, 7: 1})
    (judged,) = read_verdicts(files, None, "alpaca_eval")
    assert judged.facts == {"from": ["1.jsonl", "2.jsonl"]}
    assert summarise_judgement(judged, "n")["win_rate"]["value"] == 6 / 8
    annotations(files[1], {5: 2, 6: 2})
    for same in (files, [files[0], files[0]]):
        with refused("twice"):
            read_verdicts(same, None, "alpaca_eval")


def keep_judgement(out: Path, b: str, sides: str, text: str = "", questions: str = "") -> None:
    """Write a judgement with one pair for each letter. Its verdict is the letter (a or b) in both orders."""
    pairs = [Pair(f"q{i}", Question("", f"{text}ask {i}"), f"A {i}", f"B {i}") for i in range(len(sides))]
    rows = [judged_row(pair, [letter, letter]) for pair, letter in zip(pairs, sides, strict=True)]  # type: ignore[list-item]
    judged = Judged("auto-j", "judge", "mle", b, 2, rows, questions=questions)
    results.write_judgement(judged, results.default_title(judged), out)


def test_sets_of_questions_stay_apart(tmp_path: Path) -> None:
    """Models on two sets have two judgements. Questions with equal ids are not the same questions."""
    for i, name in enumerate(("vicuna", "koala")):
        for b in ("emo", "dpo"):
            keep_judgement(tmp_path, b, "ab" * (i + 2), name, name)
    report = document(Report([tmp_path]))
    data = json.loads(report.json())
    pairs = [(pair["questions"], pair["n"]) for pair in data["paired_judgements"]]
    assert pairs == [("koala", 6), ("vicuna", 4)] and len(data["judgements"]) == 4
    rows = {row["B"]: " ".join(row.values()) for row in Page(report.html()).table("B", "Verdict")}
    for judgement in data["judgements"]:
        name = f"{judgement['b']} against mle on {judgement['questions']}"
        assert f"{100 * judgement['win_rate']['value']:.1f}" in rows[name]
    for b, text in (("emo", "one "), ("dpo", "other ")):
        keep_judgement(tmp_path / "apart", b, "abab", text)
    apart = document(Report([tmp_path / "apart"]))
    assert json.loads(apart.json())["paired_judgements"] == []


def test_win_rates_are_compared_only_against_the_same_answers(tmp_path: Path) -> None:
    """Of four questions, A answered the last one anew between the two judgements."""

    def judgement(b: str, scores: list[float], last: str) -> results.Judgement:
        answers_of_a = ["one", "two", "three", last]
        rows = [
            {"id": str(i), "question": f"why {i}", "a": a, "score": score}
            for i, (a, score) in enumerate(zip(answers_of_a, scores, strict=True))
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{b}.jsonl").write_text(text)
        numbers: Any = {"judge": "j", "by": "j", "facts": {}, "a": "BASE", "b": b, "questions": "q"}
        numbers["rows_digest"] = store.digest_json(text)
        return results.Judgement(numbers, tmp_path / f"{b}.json")

    skipped: list[str] = []
    first, second = (
        judgement("MLE", [0.0, 0.5, 1.0, 0.0], "four"),
        judgement("EMO", [0.5, 0.5, 1.0, 1.0], "4"),
    )
    (pair,) = compare_judgements([first, second], skipped)
    assert pair["n"] == 3 and pair["difference"] == pytest.approx(0.5 / 3)
    assert len(skipped) == 1 and "1 of 4" in skipped[0]
