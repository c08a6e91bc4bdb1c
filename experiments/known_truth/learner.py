"""A learner made of a trained model: its embedding and nothing else, or all of it but some tokens' rows.

    python -m emo.experiments.known_truth.learner --model DIR --output_path DIR [--seed N] [--new_rows N]

Without `--new_rows` all but the embeddings (tied or not) is drawn from `--seed`. With it N tokens, drawn from
`--seed`, have the mean of the others' rows, as tokens that are added to a model do.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from emo.common.errors import ExitCode, UserError, outcome
from emo.eval.models.model import EvaluatedModel


def main(argv: list[str] | None = None) -> int:
    """Write the learner. Exit codes: 0 done, 2 a mistake in the input."""
    parser = argparse.ArgumentParser(
        prog="python -m emo.experiments.known_truth.learner", description=__doc__
    )
    parser.add_argument("--model", required=True, help="model directory or hub id")
    parser.add_argument("--new_rows", type=int, metavar="N", help="tokens whose rows begin anew")
    parser.add_argument("--output_path", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    args = parser.parse_args(argv)
    trained = EvaluatedModel(args.model)
    model = trained.model
    torch.manual_seed(args.seed)
    learner = with_embedding_of(model) if args.new_rows is None else with_new_rows(model, args.new_rows)
    learner.save_pretrained(args.output_path)
    trained.tokenizer.save_pretrained(args.output_path)
    return ExitCode.DONE


@torch.no_grad()
def with_embedding_of(model: Any) -> Any:
    """Return a learner of a model's architecture and embeddings; the rest is drawn from torch's seed."""
    learner = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    for name in ("get_input_embeddings", "get_output_embeddings"):
        getattr(learner, name)().weight.copy_(getattr(model, name)().weight)
    return learner


@torch.no_grad()
def with_new_rows(model: Any, count: int) -> Any:
    """Return a model whose rows of `count` tokens, drawn from torch's seed, are the mean of the others'."""
    tokens = model.config.vocab_size
    if not 0 < count < tokens:
        problem = f"--new_rows {count} must lie between 1 and {tokens - 1}, one less than the model's tokens"
        raise UserError(problem, code="new-rows")
    order = torch.randperm(tokens)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.weight[order[:count]] = module.weight[order[count:]].mean(0)
    return model


if __name__ == "__main__":
    sys.exit(outcome(main))
