"""Check that rows, losses, exports and predictions do not change: python -m tests.campaigns.equality

The project's commands prepare recipes, train two of them and evaluate one model. Code that is independent of
the project digests the results, which are compared with equality.json.

--write   write that file again after an intended change. The commit message must give the reason.
--only    prepare only these recipes, without training and evaluation.

Losses and weights are compared bit by bit if the file was written with the same PyTorch and processor type.
Otherwise they are reported as not comparable, and everything else is compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import yaml
from safetensors.torch import load_file

from tests.campaigns.campaign import Campaign, conduct
from tests.conftest import REPO
from tests.helpers.corpus import write_jsonl
from tests.helpers.launching import BIN, ENVIRONMENT, PIPED, launch_command

EXPECTED = Path(__file__).with_suffix(".json")
IGNORE = -100
SUBJECTS = ("The miller", "Her aunt", "A tall soldier", "Nobody", "Der Müller", "Бабушка")
SUBJECTS += ("The old 🐈", "An ox")
VERBS = ("found", "sold", "painted", "lost", "carried", "forgot")
OBJECTS = ("a bell", "the red boat", "seven letters", "bread & salt", "ein Haus", "its tail", "the 3rd key")
# The `data` sections by name. The first trains the tokenizer that the others use.
RECIPES = """
text: {sources: [{files: documents.jsonl}], train_tokenizer: 420, validation_fraction: 0.05}
lines: {sources: [{files: lines.txt, format: lines}], shards: 3}
paragraphs: {sources: [{files: paragraphs.txt, format: paragraphs}], sequence_len: 48}
wikitext: {sources: [{files: wiki.txt, format: wikitext}]}
table: {sources: [{files: table.csv, column: text}], dedup: none}
ids: {sources: [{files: ids.jsonl, format: tokens}]}
world: {sources: [{embedded: world-abroad, limit: 300}]}
near: {sources: [{files: documents.jsonl}], dedup: near, near_threshold: 0.7}
weights: {sources: [{files: documents.jsonl, weight: 0.4}, {files: other.jsonl, weight: 2.5}], seed: 3}
limits: {sources: [{files: documents.jsonl, limit: 90}, {files: other.jsonl}], limit_tokens: 6000}
domains:
  sources:
    - {files: documents.jsonl, domain: home}
    - {files: other.jsonl, domain: abroad, weight: 1.5}
  validation: {near: [{files: lines.txt, format: lines, limit: 30}], far: [{files: wiki.txt}]}
  dedup: none
alpaca: &instruct
  {sources: [{files: alpaca.jsonl}], kind: instruct, validation_fraction: 0.1, sequence_len: 384}
split: {<<: *instruct, overlong: split, limit_rows: 150}
messages: {<<: *instruct, sources: [{files: messages.jsonl}], template: chat, overlong: drop}
"""
TRAINING = """
model:
  architecture:
    {model_type: llama, vocab_size: 420, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
     num_attention_heads: 2, max_position_embeddings: 512}
  dtype: float32
objective: {name: emo}
train: {max_steps: 12, global_batch_size: 8, micro_batch_size: 2, learning_rate: 0.002, logging_steps: 1,
  eval_steps: 6}
"""


def text(rng: random.Random, sentences: int) -> str:
    """Return a document of `sentences` sentences, whose words vary enough that few sentences are equal."""
    return " ".join(
        f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)} on day {rng.randrange(400)}."
        for _ in range(sentences)
    )


def write_sources(root: Path) -> None:
    """Write the files that the recipes name: plain text, JSON lines, tables and instructions."""
    rng = random.Random(17)
    documents = [text(rng, rng.randrange(1, 14)) for _ in range(400)]
    documents += documents[:40]  # exact duplicates
    documents += [f"{document} At last." for document in documents[:40] if len(document) > 200]  # near
    rng.shuffle(documents)
    other = [text(rng, rng.randrange(1, 6)) for _ in range(200)]
    alpaca = [
        {"instruction": f"Tell me about {rng.choice(OBJECTS)} and day {i}.",
         "input": "" if i % 3 else text(rng, 2), "output": text(rng, rng.randrange(1, 9))}
        for i in range(240)
    ]  # fmt: skip
    messages = []
    for i in range(160):
        turns = [("system", "Answer briefly.")] if i % 4 == 0 else []
        turns += [("user", f"Question {i}: {text(rng, 1)}"), ("assistant", text(rng, rng.randrange(1, 5)))]
        turns += [("user", "And then?"), ("assistant", text(rng, 2))]
        messages.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    ids = [{"input_ids": [rng.randrange(3, 380) for _ in range(rng.randrange(1, 90))]} for _ in other]
    write_jsonl(root / "documents.jsonl", documents)
    write_jsonl(root / "other.jsonl", ({"content": document} for document in other))
    write_jsonl(root / "alpaca.jsonl", alpaca)
    write_jsonl(root / "messages.jsonl", messages)
    write_jsonl(root / "ids.jsonl", ids)
    wiki = (f" = Title {i} = \n\n {document} \n\n" for i, document in enumerate(documents[:80]))
    texts = {
        "lines.txt": "\n".join(other) + "\n",
        "paragraphs.txt": "\n\n".join(documents[:120]) + "\n",
        "wiki.txt": "".join(wiki),
        "table.csv": "id,text\n" + "".join(f'{i},"{document}"\n' for i, document in enumerate(other)),
    }
    for name, content in texts.items():
        (root / name).write_text(content, encoding="utf-8")


def run(*command: str | Path) -> None:
    """Run a command. A failure shows the end of its output."""
    done = subprocess.run(command, cwd=REPO, env=ENVIRONMENT, **PIPED)
    assert done.returncode == 0, f"{command}: {done.stdout[-4000:]}"


def emo(*arguments: str | Path) -> None:
    run(BIN / "python", "-m", "emo", *arguments)


def write_recipe(root: Path, name: str, data: dict[str, Any]) -> Path:
    common = {"dir": str(root / "data" / name), "root": str(root), "sequence_len": 64, "shards": 2}
    if "train_tokenizer" not in data:
        common["tokenizer"] = str(root / "data" / "text" / "tokenizer")
    recipe = {"output_dir": str(root / "runs" / name), "data": common | data, **yaml.safe_load(TRAINING)}
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return path


def rows_of(split: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a prepared split in order, with labels made from the loss spans."""
    for shard in sorted(split.glob("shard-*.arrow")):
        for row in pa.ipc.open_stream(shard.read_bytes()).read_all().to_pylist():
            ids, spans, segments = row["input_ids"], row.get("loss_spans"), row["segment_lengths"]
            if spans is None:
                spans = [0, len(ids)]
            supervised = {
                i for start, end in zip(spans[::2], spans[1::2], strict=True) for i in range(start, end)
            }
            supervised -= {sum(segments[:i]) for i in range(len(segments))}  # the first of a document
            labels = [token if i in supervised else IGNORE for i, token in enumerate(ids)]
            yield {"ids": ids, "labels": labels, "segments": segments, "domain": row["domain"]}


def digest(items: Any) -> str:
    sha = hashlib.sha256()
    for item in items:
        sha.update(json.dumps(item, ensure_ascii=False, sort_keys=True).encode() + b"\n")
    return sha.hexdigest()[:16]


def prepared(root: Path, name: str) -> dict[str, str]:
    """Return the number of rows of each split, and a digest of its rows, labels and order."""
    digests = {}
    for path in sorted((root / "data" / name).glob("*/manifest.json")):
        rows = list(rows_of(path.parent))
        digests[f"{name}/{path.parent.name}"] = f"{len(rows)} rows {digest(rows)}"
    return digests


def trained(root: Path, name: str, script: str, ranks: int, *overrides: str) -> dict[str, str]:
    """Train a recipe and return bit-exact digests of its losses and of its exported tensors."""
    run(*launch_command(ranks, str(root / f"{name}.yaml"), *overrides, script=script))
    lines = (root / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [
        [record["step"], record.get("set"), key, record[key].hex()]
        for record in map(json.loads, lines)
        for key in ("loss", "nll")
        if isinstance(record.get(key), float)
    ]
    assert len(losses) >= 24, losses
    sha = hashlib.sha256()
    for file in sorted((root / "runs" / name / "export").glob("*.safetensors")):
        for key, tensor in sorted(load_file(file).items()):
            sha.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
            sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return {f"{name}/losses": digest(losses), f"{name}/export": sha.hexdigest()[:16]}


def predictions(root: Path, name: str) -> dict[str, str]:
    """Evaluate an export on the embedded tasks, and return a digest of each task's predictions in order."""
    emo("world", root / "tasks")
    model = ["--model", root / "runs" / name / "export", "--name", "m"]
    tasks = ["--tasks", "all", "--data", root / "tasks", "--limit", "12", "--output_path", root / "results"]
    emo("eval", *model, *tasks)
    digests = {}
    for identity in (root / "results").glob("store/*/identity.json"):
        task = json.loads(identity.read_text(encoding="utf-8"))["value"]["task"]["name"]
        chunks = sorted((identity.parent / "chunks").glob("*.json"))
        records = [row for file in chunks for row in json.loads(file.read_text(encoding="utf-8"))["value"]]
        digests[f"predictions/{task}"] = digest([r["row"], r["gold"], r["prediction"]] for r in records)
    assert len(digests) == 8, sorted(digests)
    return digests


def results(root: Path, recipes: dict[str, dict[str, Any]], only: list[str]) -> dict[str, str]:
    digests: dict[str, str] = {}
    write_sources(root)
    for name, data in recipes.items():
        path = write_recipe(root, name, data)
        if not only or name in only or "train_tokenizer" in data:
            emo("prepare", path)
            digests |= prepared(root, name)
    if not only:
        digests |= trained(root, "domains", "continual", 2)
        digests |= trained(root, "alpaca", "instruct", 1, "objective.name=mle")
        digests |= predictions(root, "domains")
    return digests


def compare(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    digests = results(directory, yaml.safe_load(RECIPES), args.only)
    # Bit-equal numbers need the same PyTorch and the same vector instructions.
    host = f"torch {torch.__version__} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if args.write:
        EXPECTED.write_text(json.dumps({"host": host, "digests": digests}, indent=1) + "\n", encoding="utf-8")
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))
    for name, value in expected["digests"].items():
        part, _, kind = name.partition("/")
        by_bit = kind in ("losses", "export")
        if args.only and (by_bit or part not in args.only):
            continue
        if by_bit and expected["host"] != host:
            show(part, name, "not comparable on this host", True)
        else:
            actual = digests.get(name, "missing")
            show(part, name, "equal", actual == value, f"{actual}, was {value}")


if __name__ == "__main__":
    sys.exit(conduct("equality", compare, __doc__, write=False, only=[]))
