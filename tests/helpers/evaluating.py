"""Small models and task data for the tests of evaluation."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Iterable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from emo.common.errors import ExitCode
from emo.data_prep.encoding.tokenizer import load_tokenizer, train_sentencepiece
from emo.data_prep.sources.world import corpus, read_json_lines, task_rows
from emo.eval.cli import main
from emo.eval.icl.job import Job
from tests.helpers.said import lines


def tiny_model(directory: Path, seed: int = 0, tokenizer: Any = None, **config: Any) -> Path:
    """Save a random LLaMA and its tokenizer like an export. The same seed gives the same weights."""
    directory.mkdir(parents=True, exist_ok=True)
    if tokenizer is None:
        tokenizer = tiny_tokenizer(directory.parent / "tokenizer")
    settings = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64}
    settings |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 1024}
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(settings | config)))
    with torch.no_grad():  # sharpen predictions, so that the scores of labels differ by more than rounding
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def tiny_judge(directory: Path, seed: int = 7, **config: Any) -> Path:
    """Save a model that generates only `1` or `2`, depending on its input. Both are verdicts for PandaLM."""
    tiny_model(directory, seed, **config)
    model, tokenizer = load(directory)
    marks = tokenizer("12", add_special_tokens=False).input_ids[-2:]
    with torch.no_grad():
        rows = model.lm_head.weight[marks].clone()
        model.lm_head.weight.zero_()
        model.lm_head.weight[marks] = torch.stack([rows[0], -rows[0]]) * 1e4
    model.save_pretrained(directory)
    return directory


def tiny_tokenizer(directory: Path) -> Any:
    """Return a tokenizer of 384 sentencepiece pieces, trained on the embedded corpus."""
    path = directory / "tokenizer.model"
    if not path.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_tokenizer_model())
    return load_tokenizer(directory)


@cache
def _tokenizer_model() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokenizer.model"
        train_sentencepiece((row["text"] for row in islice(read_json_lines(corpus("world")), 300)), 384, path)
        return path.read_bytes()


def write_tasks(directory: Path, tasks: list[str], train: int = 40, test: int = 24) -> Path:
    """Write task rows from the embedded data in the layout of `--data`."""
    for task in tasks:
        splits = {"dev": 50, "test": test} if task == "mmlu" else {"train": train, "test": test}
        (directory / task).mkdir(parents=True, exist_ok=True)
        for split, n in splits.items():
            write_lines(directory / task / f"{split}.jsonl", task_rows(task, split, n))
    return directory


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def command(*arguments: object) -> tuple[int, str, str]:
    """Run `emo ARGUMENTS` in this process without new imports. Return the exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*map(str, arguments)])
    return code, out.getvalue(), err.getvalue()


def log_chunks(log: Path) -> None:
    """Patch this forked process to append a line to `log` for every chunk that it starts to score."""
    score_rows = Job.score_rows

    def logged(self: Job, *arguments: Any) -> Any:
        task, _, _, rows = arguments[:4]
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{self.model.name} {task.name} {rows.start}\n")
        return score_rows(self, *arguments)

    Job.score_rows = logged  # type: ignore[method-assign]


def is_mistake(*arguments: object) -> bool:
    """Return whether `emo` rejects the arguments with a one-line error."""
    code, _, err = command(*arguments)
    return code == ExitCode.MISTAKE and len(lines(err)) == 1


def load(directory: Path | str) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval(), load_tokenizer(directory)


@torch.no_grad()
def naive_nll(model: Any, ids: list[int]) -> np.ndarray:
    """Return -log p of tokens 2..N of one prompt, float64 [N - 1], from a plain forward pass."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
    picked = logits.log_softmax(dim=-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    return -picked.numpy()
