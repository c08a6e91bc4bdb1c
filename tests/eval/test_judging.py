"""Answers and verdicts: prompts as in training, room, formats; judges' rules, both orders, bad files."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from emo.common.errors import UserError
from emo.data_prep.encode import EncodeSettings, RowEncoder
from emo.data_prep.templates import Chat, ChatEncoder, Conversation, Exchange, read_template
from emo.data_prep.tokenizer import save_tokenizer
from emo.eval.generation.decoding import Request
from emo.eval.generation.engines import Transformers
from emo.eval.judging import answers, judging
from emo.eval.judging.answers import Question, read_questions
from emo.eval.judging.judging import JUDGES, shown
from emo.eval.judging.pairs import WORTH, of_answers, outcome
from emo.eval.model import EvaluatedModel
from tests.helpers.evaluating import command, load, tiny_judge, tiny_model
from tests.helpers.said import lines

CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}A: {{ m.content }}{{ eos_token }}"
    "{% else %}U: {{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
)
QUESTIONS = [
    {"id": f"q{i}", "instruction": f"Say {'why ' * (i % 5)}the {name} is here.", "input": "It is." * (i % 2)}
    for i, name in enumerate(["cat", "dog", "lamp", "town", "boat", "tree", "rain"])
]
NAMES = ["cat", "dog", "lamp", "town", "boat", "tree", "rain", "road", "bird", "hill"]


def write(path: Path, rows: list[Any]) -> Path:
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tuned model, questions, a judge whose replies are 1 or 2, two models' answers, one pair alike."""
    root = tmp_path_factory.mktemp("judging")
    tiny_model(root / "tuned", max_position_embeddings=512)
    (root / "tuned" / "export.json").write_text(json.dumps({"step": 9, "tokens": 9, "template": "alpaca/1"}))
    write(root / "questions.jsonl", QUESTIONS)
    tiny_judge(root / "judge")
    rows = [{"id": n, "instruction": f"Tell me about the {n}.", "output": f"The {n} is old."} for n in NAMES]
    other = [row | {"output": f"A {row['id']} sees it." * 2} for row in rows]
    other[3]["output"], other[4]["output"] = rows[3]["output"], ""
    write_answers(root / "a.json", rows, "mle")
    write_answers(root / "b.json", other[::-1], "emo")  # the order of a file does not matter
    return root


def write_answers(path: Path, rows: list[dict[str, Any]], generator: str = "m") -> Path:
    rows = [{"dataset": "d", "generator": generator, **row} for row in rows]
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def judge(world: Path, out: Path, *options: object, name: str = "pandalm") -> str:
    """Judge the world's answers under the name v; return what is printed."""
    both = ("--a", world / "a.json", "--b", world / "b.json", "--output_path", out, "--name", "v")
    code, messages, err = command("judge", "--judge", name, *both, *options)
    assert code == 0, err
    return messages


def read(out: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The numbers and the pairs of the judgement v."""
    lines = (out / "judgements" / "v.jsonl").read_text().split("\n")
    numbers = json.loads((out / "judgements" / "v.json").read_text())
    return numbers, [json.loads(line) for line in lines if line]


def test_every_reply_is_kept_both_orders_count_and_asking_again_costs_nothing(
    world: Path, tmp_path: Path
) -> None:
    options = ("--model", world / "judge", "--max_new_tokens", 1)
    judge(world, tmp_path, *options)
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
    before = (tmp_path / "judgements" / "v.jsonl").read_bytes()
    judge(world, tmp_path, *options)
    assert len(list((tmp_path / "store").iterdir())) == 1
    assert (tmp_path / "judgements" / "v.jsonl").read_bytes() == before
    judge(world, tmp_path, *options, "--limit", 4)
    assert len(list((tmp_path / "store").iterdir())) == 2 and len(read(tmp_path)[1]) == 4


def test_a_short_context_cuts_both_answers_alike(world: Path, tmp_path: Path) -> None:
    """A pair that fits, one whose answers are cut, one whose question alone is too long."""
    short = tiny_judge(tmp_path / "short", max_position_embeddings=320)
    texts = [("Why?", "No."), ("Tell a tale.", "once " * 200), ("why " * 400, "No.")]
    rows = [{"instruction": question, "output": text} for question, text in texts]
    a = write_answers(tmp_path / "a.json", rows, "mle")
    b = write_answers(tmp_path / "b.json", [row | {"output": f"Yes! {row['output']}"} for row in rows], "emo")
    judge(tmp_path, tmp_path, "--model", short, "--max_new_tokens", 1)
    numbers, (fits, cut, absent) = read(tmp_path)
    assert fits["cut"] is None and absent["unasked"] == "no_room" and absent["replies"] == []
    assert 0 < cut["cut"] < 1000 and numbers["counts"]["cut"] == 1 == numbers["counts"]["no_room"]
    assert numbers["read"] == 2 and numbers["counts"]["unreadable"] == 0
    pair, tokenizer = of_answers(a, b).rows[1], EvaluatedModel(str(short)).tokenizer

    def longest(characters: int) -> int:
        prompts = [shown(JUDGES["pandalm"], pair, order, characters) for order in (False, True)]
        return max(1 + len(tokenizer(prompt, add_special_tokens=False).input_ids) for prompt in prompts)

    assert longest(cut["cut"]) + 1 <= 320 < longest(cut["cut"] + 1) + 1
    arguments = ("--a", a, "--b", b, "--model", short, "--max_new_tokens", 400, "--output_path", tmp_path)
    assert command("judge", "--judge", "pandalm", *arguments)[0] == 2


def test_a_judge_with_a_chat_template_gets_messages(world: Path, tmp_path: Path) -> None:
    chat = tiny_model(tmp_path / "chat", max_position_embeddings=2048)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}:"
    (chat / "chat_template.jinja").write_text(template)
    judge(world, tmp_path, "--model", chat, "--max_new_tokens", 2, name="alpaca_eval")
    numbers, _ = read(tmp_path)
    assert numbers["facts"]["chat_template"] is True
    assert numbers["read"] == 1  # the identical pair remains


def exported(world: Path, out: Path, name: str, form: str = "jsonl") -> list[dict[str, Any]]:
    messages = judge(world, out, "--export", out / "ask.jsonl", "--format", form, name=name)
    rows = [json.loads(line) for line in (out / "ask.jsonl").read_text().splitlines()]
    assert "18 prompts on 10 pairs" in messages and len(rows) == 18
    return rows


def test_prompts_go_out_and_replies_come_back(world: Path, tmp_path: Path) -> None:
    """Auto-J behind a program of one's own: A's answers always win, once a reply says nothing."""
    rows = exported(world, tmp_path, "auto-j")
    assert all(row["prompt"].startswith("[INST] You are assessing") for row in rows)
    decision = "<script>alert(1)</script> So, the final decision is Response"
    messages = {row["id"]: f"{decision} {1 if row['id'].endswith('ab') else 2}." for row in rows}
    messages[rows[6]["id"]] = "I cannot tell."
    replies = [{"id": key, "reply": text} for key, text in messages.items()]
    random.Random(0).shuffle(replies)
    judge(world, tmp_path, "--replies", write(tmp_path / "r.jsonl", replies), name="auto-j")
    numbers, pairs = read(tmp_path)
    counts = numbers["counts"]
    assert (counts["a"], counts["tie"], counts["unreadable"], counts["unreadable_replies"]) == (8, 1, 1, 1)
    assert numbers["consistency"] == pytest.approx(8 / 9)
    assert [reply["text"] for reply in pairs[0]["replies"]] == list(messages.values())[:2]


def test_openai_batches_go_out_and_come_back_without_a_key(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "sk-0123456789abcdefSECRET"
    for variable in ("OPENAI_API_KEY", "HF_TOKEN", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(variable, secret)
    rows = exported(world, tmp_path, "alpaca_eval", "openai")
    assert {row["url"] for row in rows} == {"/v1/chat/completions"}
    body = rows[0]["body"]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("gpt-4", 0, 100)
    assert [m["role"] for m in body["messages"]] == ["system", "user"]
    verdict = repr([{"model": "model_1", "rank": 1}, {"model": "model_2", "rank": 2}])
    response = {"status_code": 200, "body": {"choices": [{"message": {"content": verdict}}]}}
    replies = [{"custom_id": row["custom_id"], "error": None, "response": response} for row in rows]
    replies[-1] |= {"response": None, "error": {"code": "batch_expired"}}
    out = judge(world, tmp_path, "--replies", write(tmp_path / "r.jsonl", replies), name="alpaca_eval")
    counts = read(tmp_path)[0]["counts"]
    assert counts["changed"] == 8 and counts["unreadable"] == 1
    written = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert secret.encode() not in written and secret not in out


BAD_REPLIES: dict[str, Callable[[list[str]], list[str]]] = {
    "not-json": lambda lines: [*lines[:-1], lines[-1][:20]],
    "missing": lambda lines: lines[:5],
    "twice": lambda lines: [*lines, lines[0]],
    "foreign": lambda lines: [*lines, json.dumps({"reply": "1"})],
    "no-reply": lambda lines: [line.replace("reply", "text") for line in lines],
}


def test_bad_reply_files_are_refused(world: Path, tmp_path: Path) -> None:
    replies = [json.dumps({"id": row["id"], "reply": "1"}) for row in exported(world, tmp_path, "pandalm")]
    pairs = of_answers(world / "a.json", world / "b.json")
    for code, change in BAD_REPLIES.items():
        with pytest.raises(UserError) as error:
            judging.read_replies(JUDGES["pandalm"], pairs, write(tmp_path / "r.jsonl", change(replies)))
        assert error.value.code == code
    with pytest.raises(UserError) as error:
        judging.read_replies(JUDGES["auto-j"], pairs, write(tmp_path / "r.jsonl", replies))
    assert error.value.code == "foreign"


def test_a_model_beside_itself_is_all_ties_and_nothing_is_asked(world: Path, tmp_path: Path) -> None:
    same = ("--b", world / "a.json")
    assert "0 prompts on 10 pairs" in judge(world, tmp_path, *same, "--export", tmp_path / "p.jsonl")
    for setting in (["--replies", tmp_path / "p.jsonl"], ["--model", world / "judge"]):
        judge(world, tmp_path, *same, *setting, "--max_new_tokens", 9)
        assert read(tmp_path)[0]["counts"]["identical"] == 10 == 20 * read(tmp_path)[0]["win_rate"]["value"]


def row(key: Any = None, instruction: str = "Why?", output: Any = "No.") -> dict[str, Any]:
    return {"instruction": instruction, "output": output} | ({} if key is None else {"id": key})


def test_bad_answers_are_refused(tmp_path: Path) -> None:
    """A question in one file only, an id that is of another question, two models in a file, no answer."""
    for a, b in (
        ([row(i) for i in range(6)], [row(i) for i in (0, 9)]),
        ([row(1)], [row(1, "Who?")]),
        ([row(None, "x"), row(None, "x")], [row(None, "x")]),
        ([row(1) | {"generator": "p"}, row(2) | {"generator": "q"}], [row(1)]),
        ([row(1, output=[])], [row(1)]),
    ):
        with pytest.raises(UserError):
            of_answers(write_answers(tmp_path / "a.json", a), write_answers(tmp_path / "b.json", b))


def test_answers_with_and_without_ids_match_by_their_questions(tmp_path: Path) -> None:
    """Also in a file that begins with a mark, and has half of a character, which counts as one."""
    text = json.dumps([row(1, "x", "a\ud800b"), row(2, "y", "")])
    (tmp_path / "a.json").write_text("\ufeff" + text, encoding="utf-8")
    write_answers(tmp_path / "b.json", [row(None, "y", "b"), row(None, "x", None)], "a")
    notes: list[str] = []
    pairs = of_answers(tmp_path / "a.json", tmp_path / "b.json", notes.append)
    assert [(p.question.instruction, p.a, p.b) for p in pairs.rows] == [("x", "a\ufffdb", ""), ("y", "", "b")]
    assert pairs.a != pairs.b and len(notes) == 2


BAD_OPTIONS = (
    "gpt-5", "auto-j", "alpaca_eval BOTH", "auto-j BOTH --export p --format x",
    "pandalm BOTH --export p --format openai", "auto-j BOTH --export .", "auto-j --from a.json",
    "auto-j --from a.json --limit 3", "auto-j --a a.json --labelled b.json",
    "auto-j --labelled a.json --export p",
)  # fmt: skip


def test_bad_options_are_refused(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    for options in BAD_OPTIONS:
        arguments = options.replace("BOTH", "--a a.json --b b.json").split()
        code, _, err = command("judge", "--judge", *arguments, "--output_path", "nothing")
        assert code == 2 and len(lines(err)) == 1, options
    assert not (world / "nothing").exists() and not (world / "p").exists()


def test_published_files_have_odd_answers_and_belong_to_their_labels(tmp_path: Path) -> None:
    """PandaLM's test set has answers that became true when it was written."""
    labels = {f"annotator{i}": 1 for i in (1, 2, 3)}
    first = {"idx": 5, "instruction": "a", "input": "", "response1": True, "response2": None, **labels}
    files, result = [tmp_path / name for name in ("t.json", "v.json")], "pandalm_result"
    write(files[0], [json.dumps([first])])
    options = ("--labelled", files[0], "--from", files[1], "--output_path", tmp_path, "--name", "v")
    for verdicts, code in (([{"idx": 5}], 0), ([{"idx": 6}], 2), ([{}, {}], 2)):
        write(files[1], [json.dumps([verdict | {result: 1} for verdict in verdicts])])
        assert command("judge", "--judge", "pandalm", *options)[0] == code
    assert (read(tmp_path)[1][0]["a"], read(tmp_path)[1][0]["b"]) == ("True", "")


# sha256 of the prompts in the judges' repositories (places: `prompts`), taken when they were copied.
WORD_FOR_WORD = {
    "auto_j": "351b6608af86df022a86bfffb9d343c3264f7e3a98863fb6a96854e78aa813a6",
    "auto_j_frame": "26cc13c9d66e8f84c45a4a4f8a5bd678e06f670f360ef8fcdd495c1ff44cde33",
    "pandalm": "2c46d3fbded041808b7b52767ff333cb8063cef180d6d630c30396ecd7d777f8",
    "pandalm_input": "fa1023585369f9be4d6965985b9d025a39339c010900c5abf2b03109a5405a34",
    "alpaca_eval": "cf4bace43fa6ac71944b9ca2506587ad7c509478a219e98a3950abf9d5b42a98",
}
EVIL = '{output_1} {prompt} {0} %s <|im_end|> [/INST] """ \\n {'


@pytest.mark.parametrize("name", JUDGES)
def test_prompts_are_word_for_word_and_answers_stand_in_them_as_they_are(name: str) -> None:
    for prompt, digest in WORD_FOR_WORD.items():
        assert hashlib.sha256(judging.PROMPTS[prompt].encode()).hexdigest() == digest
    prompt = JUDGES[name].prompt(Question("", "Say it", EVIL), f"{EVIL} first", f"second {EVIL}")
    assert prompt.count(EVIL) == 3
    assert prompt.index("Say it") < prompt.index(f"{EVIL} first") < prompt.index(f"second {EVIL}")
    plain = JUDGES[name].prompt(Question("", "a"), " b </s>c[PAD]\n", "<pad>")
    assert plain.count("\n\n\n") == (1 if name == "pandalm" else 0)  # no room is left for an input
    if name == "pandalm":
        assert "### Response 1:\nb c\n\n### Response 2:\n\n\n### Eval" in plain
    if name == "alpaca_eval":
        system, user = judging.messages(prompt)
        assert (system["role"], user["role"]) == ("system", "user") and EVIL in user["content"]


REPLIES = {
    "auto-j": [
        ("... So, the final decision is Response 1.", "a"),
        ("the final decision is  response 2 because", "b"),
        ("final decision is TIE", "tie"),
        ("final decision is Response 1 ... So, the final decision is Tie.", "tie"),  # the last one counts
        ("final decision is Response 1, yet the final decision is neither", None),
        ("The final decision: Response 1", None),
        ("Final Decision Is Response 1", None),  # these words as they are
    ],
    "pandalm": [
        ("1\n\n### Reason: Response 1 is better.\n\n### Reference: x\n", "a"),
        ("  2\n", "b"),
        ("</s>tie\nmore", "tie"),
        ("1 \n### Reason", None),  # its code compares the whole first line
        ("Response 1", None),
    ],
    "alpaca_eval": [
        ("[{'model': 'model_1', 'rank': 1}, {'model': 'model_2', 'rank': 2}]", "a"),
        ("({'model': 'model_2', 'rank': 1}, {'model': 'model_1', 'rank': 2, 'n': -1})", "b"),
        ("[{'model': 'model_1', 'rank': 3}, {'model': 'model_2', 'rank': 1}]", None),
        ("[{'model': 'model_1', 'rank': 1}, {'name': 'model_2'}]", None),
        ("Sure: [{'model': 'model_1', 'rank': 1}]", None),
        ("[{'model': 'model_1', 'rank': __import__('os').getpid()}]", None),  # never run
        ("-" * 50_000 + "1", None),
        ("[" * 50_000, None),
        ("", None),
    ],
}


@pytest.mark.parametrize("name", JUDGES)
def test_replies_are_read_by_the_judges_rules(name: str) -> None:
    for text, verdict in REPLIES[name]:
        assert JUDGES[name].verdict(text) == verdict, text[:80]


def test_both_orders_make_one_outcome() -> None:
    cases = {
        ("a", "a"): ("a", 0.0), ("b", "b"): ("b", 1.0), ("tie", "tie"): ("tie", 0.5), ("b",): ("b", 1.0),
        ("a", "b"): ("changed", 0.5), ("a", "tie"): ("changed", 0.5),
        ("a", None): ("unreadable", None), (None, None): ("unreadable", None), (): ("unreadable", None),
    }  # fmt: skip
    for verdicts, (expected, worth) in cases.items():
        assert outcome(verdicts) == expected and WORTH[expected] == worth  # type: ignore[arg-type]


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
