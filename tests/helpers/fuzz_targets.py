"""The parsers of untrusted files, each with valid files to damage.

To add a parser, decorate a function of a directory with `@target("judges' replies", files(a__txt="..."))`.
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

from emo.data_prep.encoding.templates import Conversation, render
from emo.data_prep.encoding.tokenizer import save_tokenizer
from emo.data_prep.sources.inputs import open_inputs
from emo.data_prep.sources.rows import parse
from emo.data_prep.sources.spec import Rejected
from emo.eval.generation.prefixes import from_file
from emo.eval.icl.openicl_compat import Template
from emo.eval.icl.task_data import load_data
from emo.eval.icl.tasks import load_task, select_tasks
from emo.eval.judging import judging, pairs, results
from emo.eval.judging.answers import read_questions
from emo.eval.judging.judges import JUDGES
from emo.eval.models.model import EvaluatedModel
from emo.eval.watch import IncompleteError, Target
from emo.experiments.sweeps.design import choose_runs, expand, find_trials, read_experiment
from emo.pipeline.batches.config import Batch
from emo.pipeline.config import dump_config, load_config
from emo.pipeline.engine.ds_config import deepspeed_config
from emo.pipeline.loss.cost_files import load_cost
from tests.conftest import REPO
from tests.helpers.corpus import alpaca_rows, data_config, texts, tiny_tokenizer
from tests.helpers.fuzzing import target

LONG = "x" * 300


def files(**content: Any) -> Callable[[Path], None]:
    """Return a function that writes files. `__` in a name is a dot. Other values than text become JSON."""

    def make(directory: Path) -> None:
        for name, value in content.items():
            if not isinstance(value, str | bytes):
                value = rows(value) if name.endswith("jsonl") else json.dumps(value)
            path = directory / name.replace("__", ".")
            path.write_bytes(value if isinstance(value, bytes) else value.encode())

    return make


def rows(values: list[Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def zipped(values: list[Any]) -> bytes:
    return zstandard.compress(rows(values).encode())


RECIPE = REPO / "launch/recipes/paper/llama-7b-wikitext103.yaml"


@target(
    "recipe",
    files(a__yaml=RECIPE.read_text(), b__yaml="extends: a.yaml\ntrain: {learning_rate: 1.0e-3}\n"),
    crashes=(("b.yaml", {"extends": LONG}), ("a.yaml", b"a: &a {b: *a}")),
)
def recipe(directory: Path) -> None:
    overrides = ["train.global_batch_size=32", "objective.params.ratio_cap=2"]
    dump_config(load_config(directory / "b.yaml", overrides))


@target("experiment", files(a__yaml=(REPO / "experiments/configs/oracle.yaml").read_text()))
def experiment(directory: Path) -> None:
    design = read_experiment(directory / "a.yaml", [])
    runs = expand(design)
    choose_runs(design, runs, dict.fromkeys((run.name for run in find_trials(design, runs)), 0.0))


@target("task file", files(a__yaml=(REPO / "eval/icl/tasks/sst2.yaml").read_text()))
def task_file(directory: Path) -> None:
    for task in select_tasks(str(directory / "a.yaml")):
        template, row, _ = Template(task), dict.fromkeys(task.inputs, "x"), task.identity()
        for label in task.labels:
            template.generate_label_prompt_item(row, template.generate_ice_item(row, label), label)


DS_CONFIG = (REPO / "ds_configs/zero3_offload.json").read_text()
LONG_KEY = {"zero_optimization": {"stage": 3, f"stage3_{LONG * 6}": 1}}


@target("DeepSpeed file", files(a__json=DS_CONFIG), crashes=(("a.json", LONG_KEY),))
def deepspeed_file(directory: Path) -> None:
    config = load_config(RECIPE, [f"deepspeed={directory / 'a.json'}"])
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed_config(config, Batch(16, 4, 1, 4))


TEXTS = [{"text": text, "id": i} for i, text in enumerate(texts(4))]
CHATS: list[Any] = [
    {"messages": [{"role": role, "content": f"{role} says"} for role in ("system", "user", "assistant")]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    *alpaca_rows(2),
    {"instruction": "a", "output": "b", "history": [["c", "d"]], "system": "e"},
]
TOKENS = [{"ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
FORMS = ("auto", "document", "lines", "paragraphs", "wikitext")
PLAIN = "\n = A title = \n\nSome text .\n\n = = Part = = \n\nMore .\n\n = Another = \n\nThe end .\n"


def _read_all(directory: Path, kind: str, name: str, *forms: str) -> None:
    """Read all rows of files like a worker, in each of `forms`, and render the conversations."""
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


def make_parquet(directory: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TEXTS), directory / "a.parquet")


GZIPPED, ZIPPED = gzip.compress(PLAIN.encode(), mtime=0), zstandard.compress(PLAIN.encode())
for name, make, *arguments in (
    ("rows of text", files(a__jsonl=TEXTS), "text", "a.jsonl"),
    ("rows of instructions", files(a__jsonl=CHATS), "instruct", "a.jsonl", "auto", "alpaca", "messages"),
    ("rows of tokens", files(a__jsonl=TOKENS), "text", "a.jsonl", "tokens"),
    ("text files", files(a__txt=PLAIN, b__txt__gz=GZIPPED, c__txt__zst=ZIPPED), "text", "*.txt*", *FORMS),
    ("JSON", files(a__json={"version": 1, "data": TEXTS}), "text", "a.json"),
    ("a list in JSON", files(a__json=TEXTS), "text", "a.json"),
    ("parquet", make_parquet, "text", "a.parquet"),
):
    target(name, make)(lambda directory, arguments=arguments: _read_all(directory, *arguments))


VOCABULARY = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}


def make_tokenizers(directory: Path) -> None:
    shutil.copytree(tiny_tokenizer(), directory / "whole")
    for name in ("model", "bytes"):
        (directory / name).mkdir()
    shutil.copy(tiny_tokenizer() / "model/tokenizer.model", directory / "model")
    files(vocab__json=VOCABULARY, merges__txt="#version: 0.2\na b\n")(directory / "bytes")


TOKENIZERS = ("whole/tokenizer.json", "whole/tokenizer_config.json", "model/tokenizer.model")
TOKENIZERS += ("bytes/vocab.json", "bytes/merges.txt")
TOKENIZER_CRASHES = (
    ("bytes/vocab.json", VOCABULARY | {"b": 7885472806622122365}),
    ("whole/tokenizer_config.json", {"bos_token": ["<s>"], "eos_token": "</s>", "unk_token": "<unk>"}),
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
INDEX = "model.safetensors.index.json"
MODEL_FILES = ("config.json", INDEX, "generation_config.json", "model-00001-of-00004.safetensors")
MODEL_CRASHES = (
    ("config.json", MODEL | {"vocab_size": [[]]}),
    ("config.json", MODEL | {"architectures": "a\0b", "vocab_size": -1410185927}),
    ("config.json", MODEL | {"torch_dtype": "caf\u00e9"}),
    (INDEX, {"weight_map": {"lm_head.weight": LONG}}),
)


def make_model(directory: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(directory, max_shard_size="1KB")
    files(config__json=MODEL, trainer_state__json={})(directory)


@target("model directory", make_model, *MODEL_FILES, crashes=MODEL_CRASHES)
def model_directory(directory: Path) -> None:
    with contextlib.suppress(IncompleteError):
        Target("model", directory, foreign=True).require_complete(directory, settled=True)
    EvaluatedModel(str(directory), "model")
    load_cost(str(directory), 16)


def make_costs(directory: Path) -> None:
    save_file({"head": torch.randn(8, 4)}, directory / "a.safetensors")
    torch.save(torch.randn(8, 4), directory / "b.pt")


@target("cost file", make_costs)
def cost_file(directory: Path) -> None:
    for name in ("a.safetensors", "b.pt"):
        load_cost(str(directory / name), 8)


SHORT = "one two three four\nfive six seven\n"


@target("prefixes", files(a__jsonl=TEXTS, b__txt=SHORT, c__jsonl__zst=zipped(TEXTS)))
def prefixes(directory: Path) -> None:
    for name in ("a.jsonl", "b.txt", "c.jsonl.zst"):
        _ = from_file(directory / name), from_file(directory / name, 2, 3)


SST2 = [{"text": f"text {i}", "label_text": ("negative", "positive")[i % 2]} for i in range(12)]
QUESTION = {"question": "q", "choices": ["a", "b", "c", "d"], "subject": "s"}
MMLU = [QUESTION | {"answer": "ABCD"[i % 4]} for i in range(6)]


def make_task_rows(directory: Path) -> None:
    for name, splits, content in (("sst2", ("train", "test"), SST2), ("mmlu", ("dev", "test"), MMLU)):
        (directory / name).mkdir()
        files(**{f"{split}__jsonl": content for split in splits})(directory / name)


@target("rows of tasks", make_task_rows, "sst2/train.jsonl", "sst2/test.jsonl", "mmlu/test.jsonl")
def task_rows(directory: Path) -> None:
    for name in ("sst2", "mmlu"):
        load_data(load_task(name), str(directory))


QUESTIONS = [{"id": i, "instruction": f"Say {i}.", "input": "It." * i, "dataset": "d"} for i in range(3)]
PROMPTS = [{"prompt": "a"}, {"Instruction": "b"}]
ASKED = zipped([{"text": "a", "question_id": 1}])


@target("questions", files(a__jsonl=QUESTIONS, b__json=PROMPTS, c__jsonl__zst=ASKED))
def questions(directory: Path) -> None:
    for name in ("a.jsonl", "b.json", "c.jsonl.zst"):
        assert all(question.text.encode() for question in read_questions(str(directory / name), "hub", 2)[1])


REPLIES = {
    "auto-j": "Both fit. So, the final decision is Response 2.",
    "pandalm": "1\n\n### Reason: it is better.\n\n### Reference: it\n",
    "alpaca_eval": repr([{"model": "model_1", "rank": 1}, {"model": "model_2", "rank": 2}]),
}


@target("judges' replies", files(**{f"{name}__txt": text for name, text in REPLIES.items()}))
def judges_replies(directory: Path) -> None:
    """Check that every judge's parser returns a verdict or None for any text."""
    for name in REPLIES:
        text = (directory / f"{name}.txt").read_bytes().decode("utf-8", "surrogateescape")
        assert all(judge.verdict(text) in ("a", "b", "tie", None) for judge in JUDGES.values())


def answers_of(name: str) -> list[Any]:
    return [q | {"output": f"{name} {q['id']}", "generator": name} for q in QUESTIONS]


make_answers = files(a__json=answers_of("a"), b__jsonl=answers_of("b"))


@target("answers", make_answers)
def answers(directory: Path) -> pairs.Judged:
    """Pair two files of answers, and write the prompts for every judge."""
    judged = pairs.pair_answers(directory / "a.json", directory / "b.jsonl")
    try:
        for judge in JUDGES.values():
            judging.write_prompts(judge, judged, directory / "prompts", "jsonl", None, None)
    finally:
        (directory / "prompts").unlink(missing_ok=True)
    return judged


def make_replies(directory: Path) -> None:
    make_answers(directory)
    choice = {"message": {"role": "assistant", "content": REPLIES["alpaca_eval"]}, "finish_reason": "stop"}
    response = {"status_code": 200, "body": {"model": "x", "choices": [choice]}}
    contents = {
        "jsonl": ("id", {"reply": REPLIES["alpaca_eval"], "model": "x"}),
        "openai": ("custom_id", {"response": response, "error": None}),
    }
    for form, (key, content) in contents.items():
        path = directory / f"{form}.jsonl"
        judging.write_prompts(JUDGES["alpaca_eval"], answers(directory), path, form, None, None)
        prompts = map(json.loads, path.read_text().splitlines())
        path.write_text(rows([{key: prompt[key]} | content for prompt in prompts]))


def _summarise(judged: pairs.Judged) -> None:
    numbers = results.summarise_judgement(judged, results.default_title(judged))
    assert 0 <= numbers["read"] <= numbers["pairs"] == len(judged.rows)
    _ = list(results.describe_judgement(numbers))


@target("replies", make_replies, "jsonl.jsonl", "openai.jsonl")
def replies(directory: Path) -> None:
    judged, judge = pairs.pair_answers(directory / "a.json", directory / "b.jsonl"), JUDGES["alpaca_eval"]
    for form in judging.FORMATS:
        read, author = judging.read_replies(judge, judged, [directory / f"{form}.jsonl"], "x")
        _summarise(judging.judge_pairs(judge, author, judged, read, {}))


ANNOTATED = {"output_2": "b", "generator_1": "a", "generator_2": "b", "annotator": "x"}
LABELLED = {"instruction": "Say it.", "input": "", "response1": "a", "response2": "b"}
LABELLED |= {"annotator1": 1, "annotator2": 2, "annotator3": 0}
SCENE = {"scenario": "s", "response 1": "a", "response 2": "b"}
PREFERENCES = enumerate((1, 2, 0, 1.5, None, 2.0))
VERDICTS = {
    "a__json": [
        ANNOTATED | {"instruction": f"Say {i}.", "output_1": "a" * i, "preference": value}
        for i, value in PREFERENCES
    ],
    "b__json": [{"idx": i, "pandalm_result": value} for i, value in enumerate((1, "2", "Tie"))],
    "c__json": [{"idx": i} | LABELLED for i in range(3)],
    "d__jsonl": [{"output": i} for i in range(3)],
    "e__jsonl": [{"output": i} for i in (1, 0, 0)],
    "f__jsonl": [SCENE | {"label": i, "prompt": f"Say {i}."} for i in range(3)],
}


@target("published verdicts", files(**VERDICTS))
def published_verdicts(directory: Path) -> None:
    """Read AlpacaEval's annotations, and the verdicts of PandaLM and Auto-J with human labels."""
    for judge, labels, *verdicts in (
        ("alpaca_eval", None, "a.json"),
        ("pandalm", "c.json", "b.json"),
        ("auto-j", "f.jsonl", "d.jsonl", "e.jsonl"),
    ):
        paths = [directory / name for name in verdicts]
        for judged in pairs.read_verdicts(paths, directory / labels if labels else None, judge):
            _summarise(judged)
