"""Small synthetic corpora, a small tokenizer and shortcuts to prepare data, for the tests of data_prep."""

from __future__ import annotations

import atexit
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from emo.common.config.recipe import parse_section
from emo.data_prep.config import DEFAULT_DOMAIN, FORMAT, DataConfig
from emo.data_prep.encoding.pack import PackedRows
from emo.data_prep.encoding.tokenizer import save_tokenizer, train_sentencepiece
from emo.data_prep.prepare import prepare
from emo.data_prep.selection.plan import Plan
from emo.data_prep.shards import format as shards
from emo.data_prep.shards.format import TokenDataset
from emo.data_prep.shards.write import ShardWriter, totals
from emo.data_prep.sources.inputs import open_inputs
from emo.data_prep.sources.rows import parse, plain_text
from emo.data_prep.sources.spec import Rejected

WORDS = (
    *("the", "a", "one", "two", "red", "green", "old", "new", "small", "river", "house", "tree", "bird"),
    *("cat", "dog", "boat", "song", "rain", "light", "road", "runs", "sings", "sees", "finds", "takes"),
    *("keeps", "under", "over", "near", "with", "and", "but", "then", "never", "slowly", "Anna", "Ben"),
)


def sentence(rng: random.Random, low: int = 4, high: int = 14) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high))) + "."


def texts(count: int, seed: int = 0, sentences: int = 6) -> list[str]:
    rng = random.Random(seed)
    paragraphs = (" ".join(sentence(rng) for _ in range(rng.randint(1, sentences))) for _ in range(count))
    return [f"{i}. {text}" for i, text in enumerate(paragraphs)]


def alpaca_rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    rng = random.Random(seed)
    return [
        {
            "instruction": f"{i}: {sentence(rng)}",
            "input": sentence(rng) if rng.random() < 0.4 else "",
            "output": " ".join(sentence(rng) for _ in range(rng.randint(1, 5))),
        }
        for i in range(count)
    ]


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Write rows as JSON lines. A string becomes a row of text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    trees = ({"text": row} if isinstance(row, str) else row for row in rows)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in trees), encoding="utf-8")
    return path


def lasting_directory() -> Path:
    """Return a new directory that exists until this process ends."""
    directory = Path(tempfile.mkdtemp(prefix="emo-tests-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


@cache
def tiny_tokenizer() -> Path:
    """Return a saved tokenizer of 400 sentencepiece pieces. `model/tokenizer.model` in it is the original."""
    directory = lasting_directory()
    model = directory / "model" / "tokenizer.model"
    train_sentencepiece([*texts(300, seed=99), "### Instruction: Response: Input:"], 400, model)
    save_tokenizer(model, None, directory)
    return directory


def word_tokenizer(directory: Path, words: list[str]) -> str:
    """Save a tokenizer with fixed ids for "</s>" and each word. Other words become "?", one of `words`."""
    vocab = {token: i for i, token in enumerate(("</s>", *words))}
    backend = Tokenizer(WordLevel(vocab, unk_token="?"))
    backend.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(directory)
    return str(directory)


def data_config(root: Path, **data: Any) -> DataConfig:
    """Return a configuration to read root/a.jsonl with a tiny tokenizer and write to root/prepared."""
    default: dict[str, Any] = {"dir": str(root / "prepared"), "root": str(root), "sequence_len": 32}
    default |= {"shards": 2, "sources": [{"files": "a.jsonl"}]}
    if "train_tokenizer" not in data:
        default["tokenizer"] = str(tiny_tokenizer())
    return parse_section(DataConfig, default | data, "data")


def run(config: DataConfig, shard: tuple[int, int] = (0, 1), workers: int = 1, **flags: bool) -> list[str]:
    """Prepare data in this process and return the messages. flags: `force` and `finish`."""
    messages: list[str] = []
    prepare(config, shard, workers, flags.get("force", False), flags.get("finish", False), messages.append)
    return messages


def prepared(root: Path, **data: Any) -> DataConfig:
    """Prepare data and return its configuration."""
    config = data_config(root, **data)
    run(config)
    return config


def train_set(config: DataConfig) -> TokenDataset:
    return TokenDataset(config.dir / "train")


def rows_of(config: DataConfig, split: int = 0) -> list[str]:
    """Return the texts that the plan assigns to a split, in order and with their copies."""
    plan, inputs, rows = Plan.load(config.dir / "plan.parquet"), open_inputs(config), []
    for shard in range(split * config.shards, (split + 1) * config.shards):
        for part in plan.parts(inputs, shard):
            for row, copies in zip(parse(part.payload, part.spec), part.copies, strict=True):
                rows += [] if isinstance(row, Rejected) else [plain_text(row)] * int(copies)
    return rows


def rejected(config: DataConfig) -> dict[str, int]:
    """Return the number of unused rows by reason."""
    return Plan.load(config.dir / "plan.parquet").summary["rejected"]


def segments(data: TokenDataset) -> list[tuple[list[int], list[int]]]:
    """Return the ids and shifted labels of every segment of every row, without padding."""
    results = []
    for row in range(len(data)):
        batch = data.batch(np.array([row]))
        ids, labels, positions = (batch[key][0] for key in ("input_ids", "labels", "position_ids"))
        starts = [*np.flatnonzero(positions == 0).tolist(), len(ids)]
        end = data.tokens_of(row)
        for a, b in pairwise(starts):
            if a < end:
                results.append((ids[a:b].tolist(), labels[a:b].tolist()))
    return results


def file_bytes(directory: Path) -> dict[str, bytes]:
    splits = (directory / "train", *directory.glob("validation*"))
    files = (p for split in splits for p in split.rglob("*") if p.is_file())
    return {str(p.relative_to(directory)): p.read_bytes() for p in files}


def random_dataset(directory: Path, rows: int, block: int) -> TokenDataset:
    """Write a text data set of random tokens, two segments per row, with the writer that `prepare` uses."""
    directory.mkdir(parents=True)
    rng, infos = np.random.default_rng(1), []
    none, two, full = np.zeros(0, np.int64), np.full(1000, 2), np.full(1000, block)
    halves = np.tile([block // 2, block - block // 2], 1000)
    for name in (shards.shard_name(0, 2), shards.shard_name(1, 2)):
        with (directory / name).open("w+b") as file:
            writer = ShardWriter(file, "text", np.dtype(np.uint16), (DEFAULT_DOMAIN,))
            for _ in range(rows // 2000):
                ids = rng.integers(0, 1000, 1000 * block, dtype=np.uint16)
                zeros = np.zeros(1000, np.int64)
                each = rng.integers(0, 1 << 63, 2000, dtype=np.uint64)
                writer.add(PackedRows(ids, full, halves, two, each, none, zeros, full - 2, 0))
            infos.append(writer.finish(directory / name, Counter({DEFAULT_DOMAIN: rows}), Counter()))
    counts = totals(infos)
    facts: dict[str, Any] = {"format": FORMAT, "tool": "test", "kind": "text", "split": "train"}
    facts |= dict.fromkeys(("bos_id", "eos_id", "template"))
    facts |= {"config": {}, "sources": [], "rejected": {}, "counts": {}, "vocab_size": 1000, "shards": infos}
    facts |= {"tokenizer_fingerprint": "none", "block": block, "waste": 0.0}
    facts |= {"fingerprint": shards.content_fingerprint("text", block, "none", infos), **counts}
    manifest = shards.Manifest(**facts, domains=[shards.DomainCounts(name=DEFAULT_DOMAIN, **counts)])
    (directory / shards.MANIFEST).write_text(shards.manifest_text(manifest))
    return TokenDataset(directory)
