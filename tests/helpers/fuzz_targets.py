"""The parsers of files that others write, each with sound files of its kind.

A further one is a function of a directory: `@target("judges' replies", files(a__txt="..."))`.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
import zstandard
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from emo.data_prep.inputs import open_inputs
from emo.data_prep.rows import Rejected, RowSpec, parse
from emo.data_prep.templates import Conversation, render
from emo.data_prep.tokenizer import save_tokenizer
from emo.eval.generation.prefixes import from_file
from emo.eval.icl.openicl_compat import Template
from emo.eval.icl.task_data import load_data
from emo.eval.icl.tasks import load_task, select_tasks
from emo.eval.judging import judging, pairs, results
from emo.eval.judging.answers import read_questions
from emo.eval.judging.judging import JUDGES
from emo.eval.model import EvaluatedModel
from emo.eval.watch import NotWholeError, Target
from emo.experiments.design import chosen, expand, read_experiment, trials
from emo.pipeline.config import Batch, dump_config, load_config
from emo.pipeline.loss.cost_files import load_cost
from emo.pipeline.planning.ds_file import deepspeed_config
from tests.conftest import REPO
from tests.helpers.corpus import alpaca_rows, data_config, texts, tiny_tokenizer
from tests.helpers.fuzzing import target

LONG = "x" * 300


def files(**content: bytes | str) -> Callable[[Path], None]:
    """Return a maker of files; `__` in a name stands for a dot."""

    def make(directory: Path) -> None:
        for name, value in content.items():
            path = directory / name.replace("__", ".")
            path.write_bytes(value if isinstance(value, bytes) else value.encode())

    return make


def rows(values: list[Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


# --- recipes and files written like them ------------------------------------------------------------------

RECIPE = REPO / "launch/recipes/llama-7b-wikitext103.yaml"


@target(
    "recipe",
    files(a__yaml=RECIPE.read_text(), b__yaml="extends: a.yaml\ntrain: {learning_rate: 1.0e-3}\n"),
    crashes=(("b.yaml", f"extends: {LONG}\n".encode()), ("a.yaml", b"a: &a {b: *a}")),
)
def recipe(directory: Path) -> None:
    overrides = ["train.global_batch_size=32", "objective.params.ratio_cap=2"]
    dump_config(load_config(directory / "b.yaml", overrides))


@target("experiment", files(a__yaml=(REPO / "experiments/oracle.yaml").read_text()))
def experiment(directory: Path) -> None:
    design = read_experiment(directory / "a.yaml", [])
    runs = expand(design)
    chosen(design, runs, dict.fromkeys((run.name for run in trials(design, runs)), 0.0))


@target("task file", files(a__yaml=(REPO / "eval/icl/tasks/sst2.yaml").read_text()))
def task_file(directory: Path) -> None:
    for task in select_tasks(str(directory / "a.yaml")):
        template, row, _ = Template(task), dict.fromkeys(task.inputs, "x"), task.identity()
        for label in task.labels:
            template.generate_label_prompt_item(row, template.generate_ice_item(row, label), label)


DS_CONFIG = (REPO / "ds_configs/zero3_offload.json").read_text()
LONG_KEY = json.dumps({"zero_optimization": {"stage": 3, f"stage3_{LONG * 6}": 1}})


@target("DeepSpeed file", files(a__json=DS_CONFIG), crashes=(("a.json", LONG_KEY.encode()),))
def deepspeed_file(directory: Path) -> None:
    config = load_config(RECIPE, [f"deepspeed={directory / 'a.json'}"])
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed_config(config, Batch(16, 4, 1, 4))


# --- text and instructions --------------------------------------------------------------------------------

TEXTS = [{"text": text, "id": i} for i, text in enumerate(texts(4))]
CHATS: list[Any] = [
    {"messages": [{"role": role, "content": f"{role} says"} for role in ("system", "user", "assistant")]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    *alpaca_rows(2),
    {"instruction": "a", "output": "b", "history": [["c", "d"]], "system": "e"},
]
TOKENS = [{"ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
CHAT_FORMS = ("auto", "alpaca", "messages")
FORMS = ("auto", "document", "lines", "paragraphs", "wikitext")
PLAIN = "\n = A title = \n\nSome text .\n\n = = Part = = \n\nMore .\n\n = Another = \n\nThe end .\n"


def make_parquet(directory: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TEXTS), directory / "a.parquet")


def _read_all(directory: Path, kind: str, name: str, *forms: str) -> None:
    """Read all rows of files as a worker reads them, in every format, and render conversations."""
    for form in forms or ("auto",):
        source = {"files": name, "format": form}
        config = data_config(directory, kind=kind, sources=[source], strict=False, max_chars=10_000)
        for opened in open_inputs(config):
            opened.probe()
            pieces = [piece for piece in opened.pieces() if piece.payload is not None]
            for piece in pieces:
                for row in parse(piece.payload, opened.spec):
                    if isinstance(row, Conversation):
                        _ = [render(row, template) for template in ("alpaca", "chat")]
                    elif isinstance(row, Rejected):
                        _ = f"{row.reason} {row.detail}"
            list(opened.read([piece.extent for piece in pieces]))


GZIPPED, ZIPPED = gzip.compress(PLAIN.encode(), mtime=0), zstandard.compress(PLAIN.encode())
for name, make, *given in (
    ("rows of text", files(a__jsonl=rows(TEXTS)), "text", "a.jsonl"),
    ("rows of instructions", files(a__jsonl=rows(CHATS)), "instruct", "a.jsonl", *CHAT_FORMS),
    ("rows of tokens", files(a__jsonl=rows(TOKENS)), "text", "a.jsonl", "tokens"),
    ("text files", files(a__txt=PLAIN, b__txt__gz=GZIPPED, c__txt__zst=ZIPPED), "text", "*.txt*", *FORMS),
    ("JSON", files(a__json=json.dumps({"version": 1, "data": TEXTS})), "text", "a.json"),
    ("a list in JSON", files(a__json=json.dumps(TEXTS)), "text", "a.json"),
    ("parquet", make_parquet, "text", "a.parquet"),
):
    target(name, make)(lambda directory, given=given: _read_all(directory, *given))


@target("payloads", files(a__txt=PLAIN))
def payloads(directory: Path) -> None:
    for kind, form in (("text", "auto"), ("instruct", "auto"), ("text", "wikitext")):
        spec = RowSpec(kind, form, form == "auto", None, "ag_news", 10_000)
        list(parse((directory / "a.txt").read_bytes(), spec))


# --- tokenizers and models --------------------------------------------------------------------------------


def make_tokenizers(directory: Path) -> None:
    shutil.copytree(tiny_tokenizer(), directory / "whole")
    (directory / "model").mkdir()
    shutil.copy(tiny_tokenizer() / "model/tokenizer.model", directory / "model")
    (directory / "bytes").mkdir()
    (directory / "bytes/vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (directory / "bytes/merges.txt").write_text("#version: 0.2\na b\n")


TOKENIZERS = ("whole/tokenizer.json", "whole/tokenizer_config.json", "model/tokenizer.model")
TOKENIZERS += ("bytes/vocab.json", "bytes/merges.txt")
TOKENIZER_CRASHES = (
    ("bytes/vocab.json", b'{"a": 0, "b": 7885472806622122365, "ab": 2, "<|endoftext|>": 3}'),
    ("whole/tokenizer_config.json", b'{"bos_token": ["<s>"], "eos_token": "</s>", "unk_token": "<unk>"}'),
)


@target("tokenizer", make_tokenizers, *TOKENIZERS, crashes=TOKENIZER_CRASHES)
def tokenizer(directory: Path) -> None:
    out = directory.with_name(f"{directory.name}-out")
    try:
        for name in ("whole", "model", "bytes"):
            save_tokenizer(directory / name, None, out / name)
    finally:
        shutil.rmtree(out, ignore_errors=True)


MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 8,
    "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 16, "max_position_embeddings": 32,
    "torch_dtype": "float32", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
CHANGES = ({"vocab_size": [[]]}, {"architectures": "a\0b", "vocab_size": -1410185927})
CHANGES += ({"torch_dtype": "caf\u00e9"},)
MODEL_CRASHES = [("config.json", json.dumps(MODEL | change).encode()) for change in CHANGES]
LONG_NAME = json.dumps({"weight_map": {"lm_head.weight": LONG}}).encode()
MODEL_CRASHES.append(("model.safetensors.index.json", LONG_NAME))
MODEL_FILES = ("config.json", "model.safetensors.index.json", "generation_config.json")


def make_model(directory: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(directory, max_shard_size="1KB")
    (directory / "config.json").write_text(json.dumps(MODEL))
    (directory / "trainer_state.json").write_text("{}")


@target(
    "model directory", make_model, *MODEL_FILES, "model-00001-of-00004.safetensors",
    crashes=tuple(MODEL_CRASHES),
)  # fmt: skip
def model_directory(directory: Path) -> None:
    with contextlib.suppress(NotWholeError):
        Target("model", directory, foreign=True).require_whole(directory, settled=True)
    EvaluatedModel(str(directory), "model")
    load_cost(str(directory), 16)


def make_costs(directory: Path) -> None:
    save_file({"head": torch.randn(8, 4)}, directory / "a.safetensors")
    torch.save(torch.randn(8, 4), directory / "b.pt")


@target("cost file", make_costs)
def cost_file(directory: Path) -> None:
    for name in ("a.safetensors", "b.pt"):
        load_cost(str(directory / name), 8)


# --- evaluation -------------------------------------------------------------------------------------------


@target(
    "prefixes",
    files(
        a__jsonl=rows(TEXTS),
        b__txt="one two three four\nfive six seven\n",
        c__jsonl__zst=zstandard.compress(rows(TEXTS).encode()),
    ),
)
def prefixes(directory: Path) -> None:
    for name in ("a.jsonl", "b.txt", "c.jsonl.zst"):
        _ = from_file(directory / name), from_file(directory / name, 2, 3)


def make_task_rows(directory: Path) -> None:
    sst2 = [{"text": f"text {i}", "label_text": ("negative", "positive")[i % 2]} for i in range(12)]
    question = {"question": "q", "choices": ["a", "b", "c", "d"], "subject": "s"}
    mmlu = [question | {"answer": "ABCD"[i % 4]} for i in range(6)]
    for name, splits, content in (("sst2", ("train", "test"), sst2), ("mmlu", ("dev", "test"), mmlu)):
        (directory / name).mkdir()
        for split in splits:
            (directory / name / f"{split}.jsonl").write_text(rows(content))


@target("rows of tasks", make_task_rows, "sst2/train.jsonl", "sst2/test.jsonl", "mmlu/test.jsonl")
def task_rows(directory: Path) -> None:
    for name in ("sst2", "mmlu"):
        load_data(load_task(name), str(directory))


# --- judging ----------------------------------------------------------------------------------------------

QUESTIONS = [{"id": i, "instruction": f"Say {i}.", "input": "It." * i, "dataset": "d"} for i in range(3)]
ANSWERS = {
    name: [question | {"output": f"{name} {question['id']}", "generator": name} for question in QUESTIONS]
    for name in "ab"
}
REPLIES = {
    "auto-j": "Both fit. So, the final decision is Response 2.",
    "pandalm": "1\n\n### Reason: it is better.\n\n### Reference: it\n",
    "alpaca_eval": repr([{"model": "model_1", "rank": 1}, {"model": "model_2", "rank": 2}]),
}
make_answers = files(a__json=json.dumps(ANSWERS["a"]), b__jsonl=rows(ANSWERS["b"]))


def _summarise(judged: pairs.Judged) -> None:
    numbers = results.summary(judged, results.default_title(judged))
    assert 0 <= numbers["read"] <= numbers["pairs"] == len(judged.rows)
    _ = list(results.lines(numbers))


@target("judges' replies", files(**{f"{name}__txt": text for name, text in REPLIES.items()}))
def judges_replies(directory: Path) -> None:
    """Any text, to every judge's parser: a verdict, or none."""
    for name in REPLIES:
        text = (directory / f"{name}.txt").read_bytes().decode("utf-8", "surrogateescape")
        for judge in JUDGES.values():
            assert judge.verdict(text) in ("a", "b", "tie", None)


@target(
    "questions",
    files(
        a__jsonl=rows(QUESTIONS),
        b__json=json.dumps([{"prompt": "a"}, {"Instruction": "b"}]),
        c__jsonl__zst=zstandard.compress(rows([{"text": "a", "question_id": 1}]).encode()),
    ),
)
def questions(directory: Path) -> None:
    for name in ("a.jsonl", "b.json", "c.jsonl.zst"):
        assert all(question.text.encode() for question in read_questions(str(directory / name), "hub", 2)[1])


@target("answers", make_answers)
def answers(directory: Path) -> None:
    """Two files of answers, and the prompts that are made of them."""
    judged = pairs.of_answers(directory / "a.json", directory / "b.jsonl")
    try:
        for judge in JUDGES.values():
            judging.write_prompts(judge, judged, directory / "prompts", "jsonl", None, None)
    finally:
        (directory / "prompts").unlink(missing_ok=True)


def make_replies(directory: Path) -> None:
    make_answers(directory)
    judged = pairs.of_answers(directory / "a.json", directory / "b.jsonl")
    choice = {"message": {"role": "assistant", "content": REPLIES["alpaca_eval"]}, "finish_reason": "stop"}
    response = {"status_code": 200, "body": {"choices": [choice]}}
    for form in judging.FORMATS:
        path = directory / f"{form}.jsonl"
        judging.write_prompts(JUDGES["alpaca_eval"], judged, path, form, None, None)
        replies = []
        for prompt in map(json.loads, path.read_text().splitlines()):
            if "id" in prompt:
                replies.append({"id": prompt["id"], "reply": REPLIES["alpaca_eval"]})
            else:
                replies.append({"custom_id": prompt["custom_id"], "response": response, "error": None})
        path.write_text(rows(replies))


@target("replies", make_replies, "jsonl.jsonl", "openai.jsonl")
def replies(directory: Path) -> None:
    judged, judge = pairs.of_answers(directory / "a.json", directory / "b.jsonl"), JUDGES["alpaca_eval"]
    for form in judging.FORMATS:
        read = judging.read_replies(judge, judged, directory / f"{form}.jsonl")
        _summarise(judging.of_replies(judge, "x", judged, read, {}))


ANNOTATED = [
    {"instruction": f"Say {i}.", "output_1": "a" * i, "output_2": "b", "generator_1": "a", "generator_2": "b",
     "annotator": "x", "preference": value}
    for i, value in enumerate((1, 2, 0, 1.5, None, 2.0))
]  # fmt: skip
LABELLED = [
    {"idx": i, "instruction": "Say it.", "input": "", "response1": "a", "response2": "b",
     "annotator1": 1, "annotator2": 2, "annotator3": 0}
    for i in range(3)
]  # fmt: skip
SCENES = [
    {"scenario": "s", "label": i, "prompt": f"Say {i}.", "response 1": "a", "response 2": "b"}
    for i in range(3)
]
VERDICTS = {
    "a__json": json.dumps(ANNOTATED),
    "b__json": json.dumps([{"idx": i, "pandalm_result": value} for i, value in enumerate((1, "2", "Tie"))]),
    "c__json": json.dumps(LABELLED),
    "d__jsonl": rows([{"output": i} for i in range(3)]),
    "e__jsonl": rows([{"output": i} for i in (1, 0, 0)]),
    "f__jsonl": rows(SCENES),
}


@target("published verdicts", files(**VERDICTS))
def published_verdicts(directory: Path) -> None:
    """AlpacaEval's annotations, and the verdicts of PandaLM and Auto-J with the labels of people."""
    for verdicts, labels, judge in (
        (["a.json"], None, "alpaca_eval"),
        (["b.json"], "c.json", "pandalm"),
        (["d.jsonl", "e.jsonl"], "f.jsonl", "auto-j"),
    ):
        paths = [directory / name for name in verdicts]
        for judged in pairs.read_existing(paths, directory / labels if labels else None, judge):
            _summarise(judged)
