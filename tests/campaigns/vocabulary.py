"""Check that a model with new tokens trains under ZeRO-3 as on one rank: python -m tests.campaigns.vocabulary

A tiny LLaMA gets 200 new tokens from WikiText. It trains on one rank, on two ranks under ZeRO-3, and on two
ranks that are killed and resumed. Losses and exports must agree. The same model without new tokens trains on
the same text. Losses per character are measured with transformers on held-out text.

Prints a table. Exits with code 1 if runs differ, or if new tokens are not learned or shorten nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
import zstandard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from emo.data_prep.cli import main as prepare
from emo.pipeline.cli import main
from emo.pipeline.control.run_dir import EXPORT
from tests.campaigns.campaign import Campaign, conduct
from tests.helpers import launching

PIECES = 200
KILLED = 30  # step after which the run is killed
BOUND = 1e-5  # of losses, and ten times as large for weights, because two ranks sum in another order
HELD_OUT = 40  # paragraphs
ZERO3 = "deepspeed=ds_configs/zero3.json"


class Measure(NamedTuple):
    """Measurements of a model on held-out text."""

    tokens: float  # per character
    loss: float  # nats per character


def measure(model_dir: Path, texts: list[str]) -> Measure:
    """Return tokens and loss per character. The first token of each text is not predicted."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokens = loss = 0.0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=512)["input_ids"]
        with torch.no_grad():
            loss += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        tokens += ids.shape[1]
    characters = sum(map(len, texts))
    return Measure(tokens / characters, loss / characters)


def write_recipe(path: Path, text: Path, model: Path, tokenizer: Path, steps: int) -> Path:
    """Write a recipe that continues `model` on `text`, and prepare its data."""
    name = path.stem
    data = {
        "dir": str(path.parent / f"data-{name}"),
        "tokenizer": str(tokenizer),
        "sequence_len": 128,
        "shards": 1,
    }
    data |= {"sources": [{"files": str(text), "format": "lines"}], "validation_fraction": 0.02}
    train = {"max_steps": steps, "global_batch_size": 8, "micro_batch_size": 2, "learning_rate": 1e-3}
    train |= {"save_steps": KILLED // 2, "eval_steps": KILLED}
    recipe = {"output_dir": str(path.parent / f"run-{name}"), "data": data, "objective": {"name": "emo"}}
    recipe |= {"model": {"path": str(model), "dtype": "float32"}, "train": train}
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    assert prepare(["prepare", str(path), "--workers", "1"]) == 0
    return path


def largest_difference(left: Path, right: Path) -> float:
    """Return the largest difference between the weights of two exports."""
    first, second = (load_file(run_dir / EXPORT / "model.safetensors") for run_dir in (left, right))
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def run(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    data = Path(args.data)
    model = data / "models/stories260K"
    lines: dict[str, list[str]] = {}
    for name in ("train_head_lossy", "validation"):
        raw = (data / f"lm/wikitext-2-raw-v1/{name}.txt.zst").read_bytes()
        content = zstandard.ZstdDecompressor().stream_reader(raw).read().decode()
        lines[name] = [line.strip() for line in content.splitlines() if 200 < len(line) < 600]
    text = directory / "text.txt"
    text.write_text("\n".join(lines["train_head_lossy"][: args.rows]), encoding="utf-8")
    held_out = lines["validation"][:HELD_OUT]

    plain = write_recipe(directory / "plain.yaml", text, model, model, args.steps)
    extended = directory / "model"
    assert (
        main(["extend-vocabulary", str(plain), "--pieces", str(PIECES), "--output_path", str(extended)]) == 0
    )
    recipe = write_recipe(directory / "extended.yaml", text, extended, extended, args.steps)

    def train(name: str, path: Path, *options: str, ranks: int, killed: bool = False) -> Path:
        run_dir = directory / name
        command = ("launch/continual.sh", str(path), f"output_dir={run_dir}", *options)
        if killed:
            launching.kill_ranks(run_dir, KILLED, *command, ranks=ranks)
        done = launching.run_ranks(*command, ranks=ranks)
        assert done.returncode == 0, done.stdout[-5000:]
        assert not killed or "resumed from" in done.stdout, done.stdout[-5000:]
        return run_dir

    one = train("one", recipe, ranks=1)
    two = train("two", recipe, ZERO3, ranks=2)
    resumed = train("resumed", recipe, ZERO3, ranks=2, killed=True)
    old = train("old", plain, ZERO3, ranks=2)

    for name, other, bound in (
        ("2 ranks, ZeRO-3, and 1", one, BOUND),
        ("killed and undisturbed", resumed, 0.0),
    ):
        pairs = zip(launching.losses(two), launching.losses(other), strict=True)
        error = max(abs(a - b) for left, right in pairs for a, b in zip(left, right, strict=True))
        show("losses", name, f"at most {error:.1e}", error <= bound)
        error = largest_difference(two, other)
        show("export", name, f"at most {error:.1e}", error <= (10 * bound))
    measured = {
        "old vocabulary, base": measure(model, held_out),
        "new vocabulary, step 0": measure(extended, held_out),
        "old vocabulary, trained": measure(old / EXPORT, held_out),
        "new vocabulary, trained": measure(two / EXPORT, held_out),
    }
    for name, (tokens, loss) in measured.items():
        show("held-out text", name, f"{tokens:.3f} tokens, {loss:.3f} nats per character", True)
    base, start, _, end = measured.values()
    show(
        "new tokens", "shorten the text", f"{1 - start.tokens / base.tokens:.0%}", start.tokens < base.tokens
    )
    show(
        "new tokens", "are learned", f"{start.loss - end.loss:.3f} nats per character", end.loss < start.loss
    )


if __name__ == "__main__":
    defaults = {"data": str(launching.REPO.parent / "shared/data"), "rows": 1500, "steps": 60}
    sys.exit(conduct("vocabulary", run, __doc__, **defaults))
