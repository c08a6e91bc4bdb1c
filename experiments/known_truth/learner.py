"""A learner with fresh weights whose embedding, and tied or not its head, is an oracle's.

    python -m emo.experiments.known_truth.learner --oracle DIR --output_path DIR [--seed N]

Its architecture is the oracle's. Everything but the embeddings is drawn from `--seed`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from emo.common.errors import ExitCode, outcome
from emo.eval.model import EvaluatedModel


def main(argv: list[str] | None = None) -> int:
    """Write the learner. Exit codes: 0 done, 2 a mistake in the input."""
    parser = argparse.ArgumentParser(
        prog="python -m emo.experiments.known_truth.learner", description=__doc__
    )
    parser.add_argument("--oracle", required=True, help="model directory or hub id")
    parser.add_argument("--output_path", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    args = parser.parse_args(argv)
    oracle = EvaluatedModel(args.oracle)
    torch.manual_seed(args.seed)
    learner = AutoModelForCausalLM.from_config(oracle.model.config, dtype=torch.float32)
    with torch.no_grad():
        for name in ("get_input_embeddings", "get_output_embeddings"):
            getattr(learner, name)().weight.copy_(getattr(oracle.model, name)().weight)
    learner.save_pretrained(args.output_path)
    oracle.tokenizer.save_pretrained(args.output_path)
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(outcome(main))
