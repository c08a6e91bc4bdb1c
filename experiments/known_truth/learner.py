"""A learner with an oracle's embedding and nothing else, or a trained one with new rows in its vocabulary.

    python -m emo.experiments.known_truth.learner --embedding_of ORACLE --output_path DIR [--seed N]
    python -m emo.experiments.known_truth.learner --base MODEL --new N --output_path DIR [--seed N]

The first has the oracle's architecture; all but its embeddings (tied or not) is drawn from `--seed`. The
second is the base, but N tokens, drawn from `--seed`, have the mean of the others' rows, as tokens that are
added to a model do.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from emo.common.errors import ExitCode, UserError, outcome
from emo.eval.model import EvaluatedModel


def main(argv: list[str] | None = None) -> int:
    """Write the learner. Exit codes: 0 done, 2 a mistake in the input."""
    parser = argparse.ArgumentParser(
        prog="python -m emo.experiments.known_truth.learner", description=__doc__
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--embedding_of", metavar="ORACLE", help="model directory or hub id")
    source.add_argument("--base", metavar="MODEL", help="model directory or hub id")
    parser.add_argument("--new", type=int, default=0, metavar="N", help="tokens of --base to forget")
    parser.add_argument("--output_path", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    args = parser.parse_args(argv)
    source_model = EvaluatedModel(args.base or args.embedding_of)
    generator = torch.Generator().manual_seed(args.seed)
    if args.base:
        learner = with_new_rows(source_model.model, args.new, generator)
    else:
        torch.manual_seed(args.seed)
        learner = with_embedding_of(source_model.model)
    learner.save_pretrained(args.output_path)
    source_model.tokenizer.save_pretrained(args.output_path)
    return ExitCode.DONE


@torch.no_grad()
def with_embedding_of(oracle: Any) -> Any:
    """Return a model of the oracle's architecture and embeddings; the rest is drawn from torch's seed."""
    learner = AutoModelForCausalLM.from_config(oracle.config, dtype=torch.float32)
    for name in ("get_input_embeddings", "get_output_embeddings"):
        getattr(learner, name)().weight.copy_(getattr(oracle, name)().weight)
    return learner


@torch.no_grad()
def with_new_rows(model: Any, count: int, generator: torch.Generator) -> Any:
    """Return the model after giving so many of its tokens the mean of the others' rows."""
    tokens = model.config.vocab_size
    if not 0 < count < tokens:
        problem = f"--new {count} must lie between 1 and {tokens - 1}, one less than the base's tokens"
        raise UserError(problem, code="new-rows")
    order = torch.randperm(tokens, generator=generator)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.weight[order[:count]] = module.weight[order[count:]].mean(0)
    return model


if __name__ == "__main__":
    sys.exit(outcome(main))
