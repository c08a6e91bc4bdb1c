"""A corpus sampled from an oracle: training, development and test texts as token ids.

    python -m emo.experiments.known_truth.corpus --oracle DIR --output_path DIR
        [--train N] [--dev N] [--test N] [--max_new_tokens N]

A text is the oracle's start of text and at most `--max_new_tokens` tokens from its untruncated distribution.
Texts are stored as token ids (`format: tokens`), because tokenizing decoded text could give other tokens. A
larger corpus begins with the texts of a smaller one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from emo.common.errors import ExitCode, exit_code_of
from emo.common.io.files import write_text
from emo.eval.generation.decoding import prompt_ids
from emo.eval.generation.engines import Transformers
from emo.eval.generation.prefixes import from_texts
from emo.eval.generation.records import Generation
from emo.eval.models.model import EvaluatedModel

from ..sweeps.code import code_digest

SEEDS = {"train": 1, "dev": 2, "test": 3}


def main(argv: list[str] | None = None) -> int:
    """Sample and write. Exit codes: 0 done, 2 invalid input."""
    parser = argparse.ArgumentParser(prog="python -m emo.experiments.known_truth.corpus", description=__doc__)
    parser.add_argument("--oracle", required=True, help="model directory or hub id")
    parser.add_argument("--output_path", required=True, type=Path)
    for option, count in (("train", 1024), ("dev", 128), ("test", 128), ("max_new_tokens", 160)):
        parser.add_argument(f"--{option}", type=int, default=count, help="(%(default)s)")
    args = parser.parse_args(argv)
    oracle = EvaluatedModel(args.oracle)
    for split, seed in SEEDS.items():
        rows = sample_texts(oracle, getattr(args, split), args.max_new_tokens, seed, args.output_path)
        path = args.output_path / f"{split}.jsonl"
        write_text(path, "".join(json.dumps({"ids": row}) + "\n" for row in rows))
        print(f"{path}: {len(rows)} texts, {sum(map(len, rows)):,} tokens", flush=True)
    return ExitCode.DONE


def sample_texts(oracle: EvaluatedModel, texts: int, tokens: int, seed: int, out: Path) -> list[list[int]]:
    """Sample texts, including the start of text. Finished chunks are cached in `out` by code digest."""
    begin = prompt_ids(oracle, "")
    chunks = out / f"sampled-{code_digest('emo.experiments.known_truth.corpus')}"
    generation = Generation(Transformers(oracle), from_texts(None), tokens, texts, (seed,), chunks)
    return [[*begin, *record["ids"]] for record in generation.run()]


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
