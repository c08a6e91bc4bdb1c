"""A learner beside its oracle: exact next-token distributions of both at every context of held-out text.

    python -m experiments.known_truth.oracle --oracle DIR --model DIR --texts FILE.jsonl --out FILE.json
        [--baseline DIR] [--dev FILE.jsonl]

With `--baseline` every measure is also reported as the difference from the baseline at the temperature at
which it is as certain as the model: what is left of an effect when sharpening alone is taken away.
With `--dev` the model is reported at the temperature that suits the development text best, too.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from scipy import optimize
from torch import Tensor

from common.errors import UserError
from common.exit_codes import ExitCode
from common.files import DiskFullError, write_text
from data_prep.inputs import open_text
from eval.generation import distributions
from eval.model import EvaluatedModel

CONTEXTS = 40_000  # at most; a row of logits each, three models
DECILES = 10


def main(argv: list[str] | None = None) -> int:
    """Measure and write. Exit codes: 0 done, 1 a failure, 2 a mistake in the input."""
    parser = argparse.ArgumentParser(prog="python -m experiments.known_truth.oracle", description=__doc__)
    for name in ("--oracle", "--model", "--texts", "--out"):
        parser.add_argument(name, required=True, type=Path)
    parser.add_argument("--baseline", type=Path)
    parser.add_argument("--dev", type=Path)
    args = parser.parse_args(argv)
    try:
        found = measure(args.oracle, args.model, args.texts, args.baseline, args.dev)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(args.out, json.dumps(found, indent=1))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.MISTAKE
    except DiskFullError as error:
        print(f"error: {error}, and run the same command again", file=sys.stderr)
        return ExitCode.FAILURE
    return ExitCode.DONE


def measure(
    oracle: Path, model: Path, texts: Path, baseline: Path | None = None, dev: Path | None = None
) -> dict[str, Any]:
    """Mean measures per context. Raises UserError for models whose vocabularies or tokenizers differ."""
    truth, learner = EvaluatedModel(str(oracle)), EvaluatedModel(str(model))
    if truth.tokenizer_digest != learner.tokenizer_digest:
        raise UserError(
            f"{model} and {oracle} have different tokenizers; their distributions cannot be compared"
        )
    rows = token_rows(truth.tokenizer, texts)
    targets = torch.tensor([token for row in rows for token in row[1:]])
    p, q = distributions.log_probs(logits_of(truth.model, rows)), logits_of(learner.model, rows)
    found: dict[str, Any] = {"contexts": len(targets), "at_1": summary(p, q, targets)}
    found["deciles"] = by_decile(p, distributions.log_probs(q))
    if dev is not None:
        fitted = fit_temperature(learner.model, token_rows(truth.tokenizer, dev))
        found["temperature"] = fitted
        found["tempered"] = summary(p, q / fitted, targets)
    if baseline is not None:
        base = logits_of(EvaluatedModel(str(baseline)).model, rows)
        matched = distributions.matching_temperature(base, found["at_1"]["entropy_q"])
        other = summary(p, base / matched, targets)
        found["baseline_temperature"] = matched
        found["over_tempered_baseline"] = {k: found["at_1"][k] - other[k] for k in other}
    return found


def summary(log_p: Tensor, q_logits: Tensor, targets: Tensor) -> dict[str, float]:
    """Means over contexts [n] of every measure, and the nats per token of the text itself."""
    log_q = distributions.log_probs(q_logits)
    means = {name: float(values.mean()) for name, values in distributions.measures(log_p, log_q).items()}
    means["test_nats"] = float(-log_q.gather(-1, targets[:, None]).mean())
    means["floor_nats"] = float(-log_p.gather(-1, targets[:, None]).mean())
    return means


def by_decile(log_p: Tensor, log_q: Tensor) -> list[dict[str, float]]:
    """log q - log p by decile of p over all tokens of all contexts: where a model errs (arXiv 2203.12788)."""
    order = log_p.flatten().argsort()
    gaps = (log_q - log_p).flatten()[order]
    parts = zip(gaps.chunk(DECILES), log_p.flatten()[order].chunk(DECILES), strict=True)
    return [{"log_p": float(p.mean()), "mean": float(g.mean()), "spread": float(g.std())} for g, p in parts]


def fit_temperature(model: Any, rows: list[list[int]]) -> float:
    """The temperature with the fewest nats per token of `rows`."""
    logits = logits_of(model, rows)
    targets = torch.tensor([token for row in rows for token in row[1:]])[:, None]

    def nats(log_t: float) -> float:
        scaled = distributions.log_probs(logits, float(torch.tensor(log_t).exp()))
        return float(-scaled.gather(-1, targets).mean())

    best = optimize.minimize_scalar(nats, bounds=(-1.5, 1.5), method="bounded", options={"xatol": 1e-4})
    return float(torch.tensor(best.x).exp())


def token_rows(tokenizer: Any, path: Path) -> list[list[int]]:
    """Texts of a jsonl file (column `text`) as token ids with the tokenizer's own beginning."""
    rows, contexts = [], 0
    with open_text(path) as lines:
        for line in lines:
            row = tokenizer(json.loads(line)["text"]).input_ids
            if len(row) > 1 and contexts + len(row) - 1 <= CONTEXTS:
                rows.append(row)
                contexts += len(row) - 1
    if not rows:
        raise UserError(f"{path} holds no text of two tokens or more")
    return rows


@torch.no_grad()
def logits_of(model: Any, rows: list[list[int]]) -> Tensor:
    """Logits of every context of every row that is followed by a token, [n, V] float32."""
    longest = model.config.max_position_embeddings
    parts = []
    for row in rows:
        if len(row) > longest:
            raise UserError(f"a text of {len(row)} tokens is longer than the model's context of {longest}")
        ids = torch.tensor([row[:-1]], device=model.device)
        parts.append(model(input_ids=ids).logits[0].float().cpu())
    logits = torch.cat(parts)
    if not torch.isfinite(logits).all():
        raise UserError("the model's logits are not finite")
    return logits


if __name__ == "__main__":
    sys.exit(main())
