"""Answers to instructions: training's template, room, AlpacaEval's format, kills, bad questions."""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from emo.common.errors import UserError
from emo.data_prep.encode import EncodeSettings, RowEncoder
from emo.data_prep.templates import Chat, Conversation, Exchange
from emo.data_prep.templates.chat import ChatEncoder, read_template
from emo.data_prep.tokenizer import save_tokenizer
from emo.eval.generation.decoding import Decoding
from emo.eval.generation.sampling import Request
from emo.eval.judging import answers, engines
from emo.eval.judging.answers import Answering, Plan, Question, read_questions
from emo.eval.judging.engines import Transformers, Vllm, engine
from emo.eval.model import EvaluatedModel
from tests.helpers.evaluating import command, load, tiny_model
from tests.helpers.killing import undisturbed_and_killed
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
    os.environ["EVAL_CACHE"] = str(root / "cache")
    tiny_model(root / "tuned", max_position_embeddings=512)
    (root / "tuned" / "export.json").write_text(json.dumps({"step": 9, "tokens": 9, "template": "alpaca/1"}))
    write(root / "questions.jsonl", QUESTIONS)
    yield root
    del os.environ["EVAL_CACHE"]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def answer(world: Path, out: Path, *options: object) -> tuple[int, str, str]:
    common = ["--model", world / "tuned", "--questions", world / "questions.jsonl", "--output_path", out]
    return command("answer", *common, *options)


def outputs(out: Path, decoding: str = "greedy") -> Path:
    return out / "models" / "tuned" / "answers" / f"questions-{decoding}" / "model_outputs.json"


def test_answers_are_the_models_own_in_alpaca_evals_format(world: Path, tmp_path: Path) -> None:
    """Each greedy answer equals a plain argmax loop after BOS and the Alpaca prompt."""
    code, out, _ = answer(world, tmp_path, "--max_new_tokens", 6)
    rows = json.loads(outputs(tmp_path).read_text())
    assert code == 0 and "7 answers (0 already known)" in out
    assert all({"dataset", "instruction", "output", "generator"} <= row.keys() for row in rows)
    assert [row["instruction"] for row in rows] == [q["instruction"] for q in QUESTIONS]
    assert {(row["generator"], row["dataset"]) for row in rows} == {("tuned", "questions")}
    model, tokenizer = load(world / "tuned")
    for row, question in zip(rows[:3], QUESTIONS, strict=False):
        ids = [tokenizer.bos_token_id, *tokenizer(plain_prompt(question), add_special_tokens=False).input_ids]
        start = len(ids)
        for _ in range(6):
            if ids[-1] != tokenizer.eos_token_id or len(ids) == start:
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        whole, before = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids, ids[:start]))
        assert row["output"] == whole[len(before) :].strip()


def plain_prompt(question: dict[str, Any]) -> str:
    """Stanford Alpaca's prompt, written out."""
    if question["input"]:
        return (
            "Below is an instruction that describes a task, paired with an input that provides further "
            "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
            f"{question['instruction']}\n\n### Input:\n{question['input']}\n\n### Response:"
        )
    return (
        "Below is an instruction that describes a task. Write a response that appropriately completes the "
        f"request.\n\n### Instruction:\n{question['instruction']}\n\n### Response:"
    )


@pytest.mark.parametrize("template", ["alpaca", "chat"])
def test_a_question_is_put_as_in_training(world: Path, tmp_path: Path, template: str) -> None:
    """The ids of a prompt are those before the loss begins in the prepared example."""
    facts = save_tokenizer(world / "tuned", None, tmp_path / "tokenizer")
    encoder = RowEncoder(EncodeSettings(tmp_path / "tokenizer", facts, template, 512, "drop", None))
    model = EvaluatedModel(str(world / "tuned"))
    for q in QUESTIONS:
        exchange = Exchange(q["instruction"], "Because it is.", q["input"])
        actual = encoder.conversations([Conversation((exchange,))])
        begin = int(actual.spans[0][0][0])
        arguments = answers.prompt_ids(model, Question("", q["instruction"], q["input"]), template)
        assert arguments == actual.ids[:begin].tolist()


def test_a_question_is_put_as_in_training_by_the_tokenizers_template(world: Path, tmp_path: Path) -> None:
    directory = tiny_model(tmp_path / "chat", tokenizer=EvaluatedModel(str(world / "tuned")).tokenizer)
    (directory / "chat_template.jinja").write_text(CHAT)
    (directory / "export.json").write_text(
        json.dumps({"step": 1, "tokens": 1, "template": "chat_template/1"})
    )
    model, output = EvaluatedModel(str(directory)), []  # type: tuple[EvaluatedModel, list[str]]
    assert answers.choose_template(model, "auto", output.append) == "chat_template" and not output
    encoder = ChatEncoder(directory, read_template(directory, "it"))
    for q in QUESTIONS:
        question = Question("", q["instruction"], q["input"])
        messages = [{"role": "user", "content": question.text}, {"role": "assistant", "content": "It is."}]
        actual, spans = encoder.encode(Chat(json.dumps(messages)))
        assert answers.prompt_ids(model, question, "chat_template") == actual[: int(spans[0][0])]


def test_templates_are_found_and_mismatches_said(world: Path, tmp_path: Path) -> None:
    messages: list[str] = []

    def choose(path: Path, template: str) -> tuple[str, int]:
        messages.clear()
        return answers.choose_template(EvaluatedModel(str(path)), template, messages.append), len(messages)

    assert choose(world / "tuned", "auto") == ("alpaca", 0) and choose(world / "tuned", "chat") == ("chat", 1)
    bare = tiny_model(tmp_path / "bare", tokenizer=EvaluatedModel(str(world / "tuned")).tokenizer)
    assert choose(bare, "auto") == ("alpaca", 1)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ bos_token }}A:"
    (bare / "chat_template.jinja").write_text(template)
    assert choose(bare, "auto") == ("chat_template", 0) and choose(bare, "alpaca") == ("alpaca", 1)
    model = EvaluatedModel(str(bare))
    ids = answers.prompt_ids(model, Question("", "do", "this"), "chat_template")
    assert model.tokenizer.decode(ids).replace(" ", "") == "<user>do\n\nthis<s>A:" and ids.count(1) == 1
    (bare / "export.json").write_text(json.dumps({"step": 1, "tokens": 1, "template": "alpaca/0"}))
    assert choose(bare, "auto") == ("alpaca", 1)


def test_sampled_answers_depend_on_their_seed_only(world: Path, tmp_path: Path) -> None:
    texts = []
    for i, (seed, batch) in enumerate([(0, 64), (0, 2), (1, 64)]):
        options = [
            "--max_new_tokens",
            8,
            "--temperature",
            0.9,
            "--top_p",
            0.95,
            "--seed",
            seed,
            "--batch_size",
            batch,
        ]
        assert answer(world, tmp_path / str(i), *options)[0] == 0
        name = "t0.9-p0.95" + (f"-s{seed}" if seed else "")
        texts.append(outputs(tmp_path / str(i), name).read_text())
    assert texts[0] == texts[1] != texts[2]


def test_questions_that_leave_no_room_are_counted(world: Path, tmp_path: Path) -> None:
    """One question longer than the context, one that leaves a few tokens: kept, and said."""
    write(tmp_path / "long.jsonl", [{"text": "why " * 300}, {"text": "why " * 90}, {"text": "why?"}])
    common = ["--model", world / "tuned", "--output_path", tmp_path, "--max_new_tokens", 400]
    code, out, _ = command("answer", *common, "--questions", tmp_path / "long.jsonl")
    rows = json.loads((tmp_path / "models/tuned/answers/long-greedy/model_outputs.json").read_text())
    assert code == 0 and [row["fits"] for row in rows] == [False, True, True]
    assert rows[0]["output"] == "" and 0 < rows[1]["tokens"] < 400
    assert "1 of 3 answers had no room" in out and "1 of 3 answers are empty" in out


def run(world: Path, out: Path) -> None:
    """What `answer` does."""
    model = EvaluatedModel(str(world / "tuned"))
    _, questions = read_questions(str(world / "questions.jsonl"), "hub")
    plan = Plan(questions, "questions", "alpaca", 12, 5)
    Answering(model, engine("transformers", model, Decoding(0.8), 3), plan, out).run()


def test_killed_at_random_moments_the_same_answers(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quick form of tests/campaigns/judging.py, in chunks of two."""
    monkeypatch.setattr(answers, "CHUNK", 2)
    whole, killed = undisturbed_and_killed(run, world, tmp_path, 0)
    assert outputs(whole, "t0.8-s5").read_bytes() == outputs(killed, "t0.8-s5").read_bytes()


BAD = {
    "an id twice": [{"id": 1, "instruction": "a"}, {"id": 1, "instruction": "b"}],
    "half of the ids": [{"id": 1, "instruction": "a"}, {"instruction": "b"}],
    "blank": [{"instruction": " "}], "no field": [{"title": "x"}], "number": [{"text": 3}], "none": [],
    "no object": [["a"]],
}  # fmt: skip
OPTIONS = (
    ["--questions", "nothing.jsonl"], ["--questions", "vicuna"],
    ["--max_new_tokens", 0], ["--limit", 0], ["--top_p", 0.5], ["--temperature", 0],
    ["--engine", "llama.cpp"],
    ["--batch_size", 0], ["--template", "vicuna"], ["--template", "chat_template"],
)  # fmt: skip


@pytest.mark.parametrize("case", [*BAD, *OPTIONS], ids=str)
def test_bad_questions_and_options_are_refused(world: Path, tmp_path: Path, case: Any) -> None:
    options = case if isinstance(case, list) else ["--questions", write(tmp_path / "q.jsonl", BAD[case])]
    code, _, err = answer(world, tmp_path / "o", *options)
    assert code == 2 and len(lines(err)) == 1
    assert not (tmp_path / "o").exists()


def test_what_vllm_is_asked(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens are -1 for every version of vLLM: before 0.9 it refused 0. Versions share no answers."""
    if find_spec("vllm") is None:
        with pytest.raises(UserError):
            Vllm(EvaluatedModel(str(world / "tuned")), Decoding())
    vllm = ModuleType("vllm")
    vllm.__spec__ = ModuleSpec("vllm", None)
    vllm.SamplingParams = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(engines, "version", lambda name: f"{name} 0.9")
    arguments = Request([1], 3, 4)
    greedy, sampled = (
        Vllm(EvaluatedModel(str(world / "tuned")), setting)._sampling(arguments, 6)
        for setting in (Decoding(greedy=True), Decoding(0.7, 5, 0.9))
    )
    names = ("temperature", "top_k", "top_p", "max_tokens")
    assert [[settings[name] for name in names] for settings in (greedy, sampled)] == [
        [0.0, -1, 1.0, 4], [0.7, 5, 0.9, 4],
    ]  # fmt: skip
    assert Vllm(EvaluatedModel(str(world / "tuned")), Decoding()).identity["version"] == "vllm 0.9"


@pytest.mark.parametrize(
    ("name", "count"),
    [("alpaca_eval", 403), ("vicuna", 40), ("koala", 108), ("wizardlm", 217), ("sinstruct", 85)],
)
def test_the_sets_are_found_by_name(shared_data: Path, name: str, count: int) -> None:
    for directory in (shared_data, shared_data / "instruct"):
        actual, questions = read_questions(name, str(directory))
        assert actual == name and len(questions) == count
    assert len({q.id or q.text for q in questions}) == count
    assert all(q.instruction.strip() for q in questions)
    if name == "sinstruct":
        assert sum(bool(q.input) for q in questions) == 71
    assert len(read_questions(name, str(shared_data), 10)[1]) == 10


def test_beams_are_transformers_own(world: Path) -> None:
    """Beam search with a repetition penalty is asked of transformers with PandaLM's settings."""
    from emo.eval.judging.judges import JUDGES

    model = EvaluatedModel(str(world / "tuned"))
    prompt = answers.plain_ids(model, "the cat sat")
    actual = Transformers(model, JUDGES["pandalm"].decoding, 1).reply([Request(prompt, 0)], 8, lambda n: None)
    plain, tokenizer = load(world / "tuned")
    ids = torch.tensor([prompt])
    whole = plain.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=4, repetition_penalty=1.2, early_stopping=True,
        max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    assert actual[0].text == tokenizer.decode(whole[0], skip_special_tokens=True)[len(before) :]
