"""Make a learner from a trained model: keep its embeddings only, or reset the rows of some tokens.

    python -m emo.experiments.known_truth.learner --model DIR --output_path DIR [--seed N] [--new_rows N]

Without `--new_rows` all weights except the embeddings (tied or not) are drawn from `--seed`. With it, the
rows of N random tokens are set to the mean of the others, like those of tokens that are added to a model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from emo.common.errors import ExitCode, UserError, exit_code_of
from emo.eval.models.model import EvaluatedModel


def main(argv: list[str] | None = None) -> int:
    """Write the learner. Exit codes: 0 done, 2 invalid input."""
    parser = argparse.ArgumentParser(
        prog="python -m emo.experiments.known_truth.learner", description=__doc__
    )
    parser.add_argument("--model", required=True, help="model directory or Hub id")
    parser.add_argument("--new_rows", type=int, metavar="N", help="number of tokens whose rows are reset")
    parser.add_argument("--output_path", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    args = parser.parse_args(argv)
    trained = EvaluatedModel(args.model)
    model = trained.model
    torch.manual_seed(args.seed)
    learner = build_with_embedding(model) if args.new_rows is None else reset_rows(model, args.new_rows)
    learner.save_pretrained(args.output_path)
    trained.tokenizer.save_pretrained(args.output_path)
    return ExitCode.DONE


@torch.no_grad()
def build_with_embedding(model: Any) -> Any:
    """Return a new model with the architecture and embeddings of `model`."""
    learner = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    for name in ("get_input_embeddings", "get_output_embeddings"):
        getattr(learner, name)().weight.copy_(getattr(model, name)().weight)
    return learner


@torch.no_grad()
def reset_rows(model: Any, count: int) -> Any:
    """Set the rows of `count` random tokens to the mean of the others."""
    tokens = model.config.vocab_size
    if not 0 < count < tokens:
        raise UserError(f"--new_rows {count} must be between 1 and {tokens - 1}", code="new-rows")
    order = torch.randperm(tokens)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.weight[order[:count]] = module.weight[order[count:]].mean(0)
    return model


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
