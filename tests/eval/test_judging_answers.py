"""Answers to instructions: training's template, room, AlpacaEval's format, kills, bad questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from emo.data_prep.encode import EncodeSettings, RowEncoder
from emo.data_prep.templates import Chat, Conversation, Exchange
from emo.data_prep.templates.chat import ChatEncoder, read_template
from emo.data_prep.tokenizer import save_tokenizer
from emo.eval.generation.engines import Request, Transformers
from emo.eval.judging import answers
from emo.eval.judging.answers import Question, read_questions
from emo.eval.judging.judging import JUDGES
from emo.eval.model import EvaluatedModel
from tests.helpers.evaluating import command, load, tiny_model
from tests.helpers.said import lines

CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}A: {{ m.content }}{{ eos_token }}"
    "{% else %}U: {{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
)
QUESTIONS = [
    {"id": f"q{i}", "instruction": f"Say {'why ' * (i % 5)}the {name} is here.", "input": "It is." * (i % 2)}
    for i, name in enumerate(["cat", "dog", "lamp", "town", "boat", "tree", "rain"])
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that was tuned with Alpaca's template, and questions."""
    root = tmp_path_factory.mktemp("answers")
    tiny_model(root / "tuned", max_position_embeddings=512)
    (root / "tuned" / "export.json").write_text(json.dumps({"step": 9, "tokens": 9, "template": "alpaca/1"}))
    write(root / "questions.jsonl", QUESTIONS)
    return root


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def answer(world: Path, out: Path, *options: object) -> tuple[int, str, str]:
    common = ["--model", world / "tuned", "--questions", world / "questions.jsonl", "--output_path", out]
    return command("answer", *common, *options)


def outputs(out: Path, name: str = "questions-greedy") -> list[dict[str, Any]]:
    return json.loads((out / "models" / "tuned" / "answers" / name / "model_outputs.json").read_text())


def test_answers_are_the_models_own_in_alpaca_evals_format(world: Path, tmp_path: Path) -> None:
    """Each greedy answer equals a plain argmax loop after BOS and Stanford Alpaca's prompt, written out."""
    code, out, _ = answer(world, tmp_path, "--max_new_tokens", 6)
    rows = outputs(tmp_path)
    assert code == 0 and "7 answers (0 already known)" in out
    assert [row["instruction"] for row in rows] == [q["instruction"] for q in QUESTIONS]
    assert {(row["generator"], row["dataset"]) for row in rows} == {("tuned", "questions")}
    model, tokenizer = load(world / "tuned")
    for row, question in zip(rows[:3], QUESTIONS, strict=False):
        context = ", paired with an input that provides further context" if question["input"] else ""
        shown = f"### Input:\n{question['input']}\n\n" if question["input"] else ""
        prompt = (
            f"Below is an instruction that describes a task{context}. Write a response that appropriately "
            f"completes the request.\n\n### Instruction:\n{question['instruction']}\n\n{shown}### Response:"
        )
        ids = [tokenizer.bos_token_id, *tokenizer(prompt, add_special_tokens=False).input_ids]
        start = len(ids)
        for _ in range(6):
            if ids[-1] != tokenizer.eos_token_id or len(ids) == start:
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        whole, before = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids, ids[:start]))
        assert row["output"] == whole[len(before) :].strip()


@pytest.mark.parametrize("template", ["alpaca", "chat", "chat_template"])
def test_a_question_is_put_as_in_training(world: Path, tmp_path: Path, template: str) -> None:
    """The ids of a prompt are those before the loss begins in the prepared example."""
    directory = tiny_model(tmp_path / "model", tokenizer=EvaluatedModel(str(world / "tuned")).tokenizer)
    (directory / "chat_template.jinja").write_text(CHAT)
    facts = save_tokenizer(world / "tuned", None, tmp_path / "tokenizer")
    settings = EncodeSettings(tmp_path / "tokenizer", facts, template, 512, "drop", None)
    for q in QUESTIONS:
        question = Question("", q["instruction"], q["input"])
        if template == "chat_template":
            roles = zip(("user", "assistant"), (question.text, "It is."), strict=True)
            chat = Chat(json.dumps([{"role": role, "content": content} for role, content in roles]))
            ids, spans = ChatEncoder(directory, read_template(directory, "it")).encode(chat)
            expected = ids[: int(spans[0][0])]
        else:
            exchange = Exchange(q["instruction"], "Because it is.", q["input"])
            rows = RowEncoder(settings).conversations([Conversation((exchange,))])
            expected = rows.ids[: int(rows.spans[0][0][0])].tolist()
        assert answers.prompt_ids(EvaluatedModel(str(directory)), question, template) == list(expected)


def test_templates_are_found_and_mismatches_said(world: Path, tmp_path: Path) -> None:
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


def test_questions_that_leave_no_room_are_counted(world: Path, tmp_path: Path) -> None:
    """One question longer than the context, one that leaves a few tokens: kept, and said."""
    file = write(tmp_path / "long.jsonl", [{"text": "why " * 300}, {"text": "why " * 90}, {"text": "why?"}])
    code, out, _ = answer(world, tmp_path, "--questions", file, "--max_new_tokens", 400)
    rows = outputs(tmp_path, "long-greedy")
    assert code == 0 and [row["fits"] for row in rows] == [False, True, True]
    assert rows[0]["output"] == "" and 0 < rows[1]["tokens"] < 400
    assert "1 of 3 answers had no room" in out and "1 of 3 answers are empty" in out


BAD = [
    [{"id": 1, "instruction": "a"}, {"id": 1, "instruction": "b"}], [{"id": 1, "text": "a"}, {"text": "b"}],
    [{"instruction": " "}], [{"title": "x"}], [{"text": 3}], [], [["a"]],
]  # fmt: skip
OPTIONS = (
    "--questions nothing.jsonl", "--questions vicuna", "--max_new_tokens 0", "--limit 0", "--top_p 0.5",
    "--temperature 0", "--engine llama.cpp", "--batch_size 0", "--template vicuna",
    "--template chat_template",
)  # fmt: skip


def test_bad_questions_and_options_are_refused(world: Path, tmp_path: Path) -> None:
    for case in (*BAD, *OPTIONS):
        options = (
            case.split() if isinstance(case, str) else ["--questions", write(tmp_path / "q.jsonl", case)]
        )
        code, _, err = answer(world, tmp_path / "o", *options)
        assert code == 2 and len(lines(err)) == 1, case
    assert not (tmp_path / "o").exists()


def test_the_sets_are_found_by_name(shared_data: Path) -> None:
    for name, count in (("alpaca_eval", 403), ("vicuna", 40), ("sinstruct", 85)):
        for directory in (shared_data, shared_data / "instruct"):
            actual, questions = read_questions(name, str(directory))
            assert actual == name and len({q.id or q.text for q in questions}) == len(questions) == count
        assert all(q.instruction.strip() for q in questions)
        assert name != "sinstruct" or sum(bool(q.input) for q in questions) == 71
        assert len(read_questions(name, str(shared_data), 10)[1]) == 10


def test_beams_are_transformers_own(world: Path) -> None:
    """Beam search with a repetition penalty is asked of transformers with PandaLM's settings."""
    model, (plain, tokenizer) = EvaluatedModel(str(world / "tuned")), load(world / "tuned")
    prompt = answers.plain_ids(model, "the cat sat")
    actual = Transformers(model, JUDGES["pandalm"].decoding, 1).reply([Request(prompt, 0)], 8, lambda n: None)
    ids = torch.tensor([prompt])
    whole = plain.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=4, repetition_penalty=1.2, early_stopping=True,
        max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    assert actual[0][1]["text"] == tokenizer.decode(whole[0], skip_special_tokens=True)[len(before) :]
