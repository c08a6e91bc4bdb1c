"""emo advise: where a recipe lies on the map of known truths, and what is known there.

The map (`known_truth/map.json`, from experiments/configs/known-truth.yaml) has three axes:

    vocabulary  tokens
    draws       supervised tokens for each of them: the contexts of a bigram are its tokens
    share       of geometry: how well the costs tell what the model confuses, as those of a known truth do

Costs tell what a model confuses where the mass that it does not give to the target y lies nearer to y than
the same mass would as the model spreads it over all positions t (D'):

    fit = 1 - sum_t D_t / sum_t D'_t,    D_t = sum_i q_ti c(y_t, i)
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from emo.common.cli.commands import Parser, parse_arguments
from emo.common.errors import ExitCode, UserError, outcome
from emo.common.labels import IGNORE
from emo.common.report.numbers import between, formatted
from emo.data_prep.shards.format import TokenDataset, open_prepared
from emo.pipeline.config import RunConfig, load_config
from emo.pipeline.loss.expected import CostOperator

from .known_truth import bigram

MAP = Path(__file__).parent / "known_truth" / "map.json"
POSITIONS = 1024  # of held-out text at which the model's confusions are looked at
BEYOND = 1.5  # times the last value of an axis: so far the cells at its end speak for a run
SHARES = np.linspace(0, 1, 11)  # of the known truths whose fit is compared
TRUTHS = 2  # of each share


class Position(NamedTuple):
    """A place on the map."""

    V: int
    draws: float
    share: float


def main(argv: list[str] | None = None) -> int:
    """Advise. Exit codes: 0 done, 2 a mistake in the input."""
    _, *words = sys.argv[1:] if argv is None else argv
    parser = Parser(prog="emo advise", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipe", type=Path, help="a recipe whose data are prepared")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    args = parse_arguments(parser, words)
    return outcome(lambda: _advise(load_config(args.recipe, args.overrides)))


def _advise(config: RunConfig) -> int:
    if config.model.path is None:
        problem = "set model.path: a model with fresh weights has no confusions to compare with the costs"
        raise UserError(problem, code="fresh-weights")
    data, held_out = open_prepared(config.data)
    cells = json.loads(MAP.read_text(encoding="utf-8"))
    V, tokens = data.manifest.vocab_size, data.manifest.valid_tokens
    if nearest_cell(cells["rows"], Position(V, tokens / V, 0)) is None:  # whatever the costs tell
        print(beyond(cells["rows"], V, tokens / V))
        return ExitCode.DONE
    name, text = next(((n, rows) for n, rows in held_out.items() if len(rows)), ("training data", data))
    print(f"the model reads {POSITIONS:,} tokens of {name}", file=sys.stderr, flush=True)
    fit = fit_of_recipe(config, text)
    largest = max(row["V"] for row in cells["rows"])
    position, cost = Position(V, tokens / V, share_of(fit, min(V, largest))), config.objective.cost
    begins = cost == "pretrained" or Path(cost).resolve() == Path(config.model.path).resolve()
    print(conclusion(nearest_cell(cells["rows"], position), begins))
    share = f"as known truths have with a share of geometry of {position.share:.2f}"
    print(f"data   {tokens:,} supervised tokens, {position.draws:,.1f} for each of the vocabulary's {V:,}")
    print(f"costs  {cost}: fit {fit:.3f} on {name}, {share}")
    print(f"map    {len(cells['rows'])} cells at commit {cells['code']}, whose intervals hold together")
    print("\n".join(expected(cells["rows"], position, begins)))
    return ExitCode.DONE


def beyond(rows: list[dict[str, Any]], V: int, draws: float) -> str:
    """Return the advice for data that are not on the map."""
    sizes, most = ([row[axis] for row in rows] for axis in ("V", "draws"))
    yours = f"Your data have a vocabulary of {V:,} tokens and {draws:,.0f} supervised tokens for each"
    most_draws = f"{min(most):,} to {max(most):,}"
    covered = f"the studies cover {min(sizes)} to {max(sizes)} tokens with {most_draws} for each"
    return (
        f"Whether EMO beats MLE here is not known. {yours}; {covered}. Compare both on a part of your "
        "data (docs/evidence.md)."
    )


def conclusion(row: dict[str, Any] | None, begins: bool) -> str:
    """Return the advice in a sentence; `begins`: see expected."""
    answer = None if row is None else row["verdicts"]["begins" if begins else "beyond-sharpening"]["answer"]
    if answer == "yes":
        return "EMO is expected to beat MLE here, also when MLE's distributions are sharpened alike."
    if answer == "no":
        return "EMO is not expected to beat MLE here, once MLE's distributions are sharpened alike."
    return "Whether EMO beats MLE here is not known: compare both objectives on a part of your data."


def expected(rows: list[dict[str, Any]], position: Position, begins: bool) -> list[str]:
    """Return lines: what the map's nearest cell says.

    begins: whether the head that is trained begins as the embedding that costs are made of.
    """
    row = nearest_cell(rows, position)
    assert row is not None
    lines = [f"cell   {row['V']} tokens, {row['draws']:,} draws, share {row['share']:g}"]
    names = {"geometry": "true costs beat constant and permuted ones"}
    names |= {"begins" if begins else "beyond-sharpening": "EMO beats MLE of the same entropy"}
    for name, text in names.items():
        verdict = row["verdicts"][name]
        effect = formatted(verdict["effect"], "{:+.4f}")
        limits = between(verdict["low"], verdict["high"], "{:.4f}")
        lines.append(f"       {text}: {verdict['answer']}, {effect} ({limits}) in {verdict['outcome']}")
    return lines


def nearest_cell(rows: list[dict[str, Any]], position: Position) -> dict[str, Any] | None:
    """Return the cell that is nearest by vocabulary, then draws, then share; None beyond the map's ends."""

    def ratio(axis: str, row: dict[str, Any]) -> float:
        return abs(math.log(row[axis] / max(getattr(position, axis), 1e-9)))

    row = min(
        rows, key=lambda row: (ratio("V", row), ratio("draws", row), abs(row["share"] - position.share))
    )
    for axis in ("V", "draws"):
        values = [row[axis] for row in rows]
        if not min(values) / BEYOND <= getattr(position, axis) <= max(values) * BEYOND:
            return None
    return row


def fit_of_recipe(config: RunConfig, text: TokenDataset) -> float:
    """Return how well a recipe's costs tell what its model confuses in a text."""
    from emo.pipeline.engine.devices import on_gpu, usable_attention
    from emo.pipeline.loss import CostEmbedding, get_objective
    from emo.pipeline.model.build import check_fits, load_pretrained, model_config
    from emo.pipeline.model.objectives import load_losses

    hf_config = model_config(config.model)
    check_fits(hf_config, config.model, text.manifest)
    cost = load_losses(config, get_objective("emo"), hf_config.vocab_size).cost
    if not isinstance(cost, CostEmbedding):
        raise UserError(
            f"objective.cost={config.objective.cost} is not known before training", code="live-cost"
        )
    attn = usable_attention(config.model, hf_config)
    model: Any = load_pretrained(*config.initial_weights(), config.model.dtype, attn).eval()
    if on_gpu():
        model.cuda()
    probabilities, targets = [], []
    for row in range(len(text)):
        arrays = text.batch(np.array([row]))
        inputs = {
            key: torch.from_numpy(arrays[key]).to(model.device) for key in ("input_ids", "position_ids")
        }
        labels = torch.from_numpy(arrays["labels"])[0]
        with torch.no_grad():
            logits = model(**inputs).logits[0].float().cpu()
        supervised = labels != IGNORE
        probabilities.append(logits[supervised].softmax(-1))
        targets.append(labels[supervised])
        if sum(map(len, targets)) >= POSITIONS:
            break
    q, y = torch.cat(probabilities)[:POSITIONS], torch.cat(targets)[:POSITIONS]
    return fit_of_costs(q, y, lambda tokens: cost.costs(tokens).float())


def fit_of_costs(q: Tensor, targets: Tensor, costs: Callable[[Tensor], Tensor]) -> float:
    """Return 1 - sum D / sum D' of models q [n, V] at targets [n]; costs: the rows [u, V] of tokens [u]."""
    mean, distances, spread = q.mean(0), 0.0, 0.0
    for rows, tokens in zip(q.split(64), targets.split(64), strict=True):
        c = costs(tokens)
        at_target = rows.gather(1, tokens[:, None])[:, 0]
        distances += float((rows * c).sum())
        spread += float(((1 - at_target) * (c @ mean) / (1 - mean[tokens])).sum())
    return 1 - distances / spread


def share_of(fit: float, V: int) -> float:
    """Return the share of geometry at which known truths over V tokens have a fit, between 0 and 1."""
    fits = []
    for share in tqdm(SHARES, "known truths", leave=False):
        generator = torch.Generator().manual_seed(V)
        truths = [bigram.geometric_truth(V, float(share), generator) for _ in range(TRUTHS)]
        fits.append(np.mean([fit_of_truth(truth) for truth in truths]))
    return float(np.interp(fit, np.maximum.accumulate(fits), SHARES))


def fit_of_truth(truth: bigram.Truth) -> float:
    """Return what `fit_of_costs` tends to with targets drawn from a truth, where the model is the truth."""
    costs, mean = CostOperator(truth.embedding), truth.contexts @ truth.rows
    distances = truth.contexts @ (truth.rows * costs.apply(truth.rows)).sum(-1)
    confused = truth.rows * (1 - truth.rows)  # P_xy (1 - P_xy), summed over contexts below
    spread = truth.contexts @ confused @ (costs.apply(mean[None])[0] / (1 - mean))
    return 1 - float(distances / spread)


if __name__ == "__main__":
    sys.exit(main())
