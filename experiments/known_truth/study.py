"""Objectives where the truth is known: their fixed points (A0), and learners fitted to samples (A).

    python -m emo.experiments.known_truth.study FILE.yaml [key=value ...]

FILE says which truths, sample sizes, objectives and costs; `results.json` is written to its `out`. A cell is
one share of geometry and one size of sample: `truths` of them are drawn at random, each with one sample.
Cells that are done are not done again, unless the code or the parameters that made them have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from emo.common.errors import ExitCode, outcome
from emo.common.files import sha256, write_text
from emo.common.provenance import code_version
from emo.common.recipe import Section, load_section
from emo.eval.generation import distributions
from emo.experiments.code import code_digest, plugin_file
from emo.experiments.design import RESULTS
from emo.experiments.known_truth import bigram
from emo.experiments.known_truth.expected import Costs, settle
from emo.experiments.statistics import at_an_end, best_temperature, estimate, verdict
from emo.pipeline.loss import Objective, get_objective

DEV_SEED, TRUTH_SEED, PERMUTATION = 10_000, 77, 5  # streams that must not meet those of the samples


class Contestant(Section):
    """An objective with its parameters, its costs, and what its learner's head knows."""

    name: str
    params: dict[str, float] = {}
    cost: Literal["true", "constant", "permuted"] = "true"
    # embedding: the learner's output matrix is the embedding that the truth was made with, not trained.
    head: Literal["free", "embedding"] = "free"

    @property
    def objective(self) -> Objective:
        """Return the objective with its parameters."""
        return get_objective(self.name, **self.params)

    def costs(self, embedding: Tensor) -> Costs:
        """Return the transport costs, from the embedding that the truth was made with."""
        if self.cost == "constant":
            return Costs(torch.eye(embedding.shape[-2], dtype=embedding.dtype))
        costs, generator = Costs(embedding), torch.Generator().manual_seed(PERMUTATION)
        return costs.permuted(generator) if self.cost == "permuted" else costs


class Study(Section):
    """The whole file."""

    out: Path
    contestants: dict[str, Contestant] = Field(min_length=1)
    baseline: str = "mle"
    vocabularies: list[int] = [20, 100]
    shares: list[float] = [0.0, 0.5, 1.0]  # of geometry in the truth
    tokens: list[int] = [500, 5_000, 50_000]  # of a training sample; a tenth more is for development
    # Drawn for each cell, with one sample of each; all contestants have the same samples and first weights.
    truths: int = Field(10, gt=1)
    steps: int = Field(600, gt=0)
    rates: list[float] = [1e-3, 3e-3, 9e-3]  # learning rates; each contestant takes its best on dev
    outcome: str = "js"
    questions: dict[str, dict[str, Any]] = {}  # name: {better: label, than: [labels], tempered: bool}

    @model_validator(mode="after")
    def _labels_exist(self) -> Study:
        labels = [label for q in self.questions.values() for label in (q["better"], *q["than"])]
        for label in (self.baseline, *labels):
            if label not in self.contestants:
                raise ValueError(f"{label} is not one of the contestants: {', '.join(self.contestants)}")
        return self


def fixed_points(study: Study, V: int = 50, truths: int = 20) -> list[dict[str, Any]]:
    """Return what each contestant would make of known truths with unlimited data (A0): means over truths."""
    generator = torch.Generator().manual_seed(TRUTH_SEED)
    rows = bigram.dirichlet(truths, V, 0.5, generator)
    embedding = torch.randn(V, 16, generator=generator, dtype=torch.float64)
    log_p, points = rows.log(), []
    for label, contestant in study.contestants.items():
        if contestant.head != "free":  # a fixed point is one of distributions, without a learner
            continue
        q, residual = settle(rows, contestant.objective, contestant.costs(embedding))
        log_q = q.clamp_min(1e-300).log()
        pairs = zip(log_p, distributions.entropy(log_q).tolist(), strict=True)
        temperatures = [distributions.matching_temperature(p[None], entropy) for p, entropy in pairs]
        tempered = [distributions.log_probs(p, t) for p, t in zip(log_p, temperatures, strict=True)]
        point = {k: float(v.mean()) for k, v in distributions.measures(log_p, log_q).items()}
        point["temperature"] = sum(temperatures) / len(temperatures)
        point["kl_from_tempered_truth"] = float(distributions.kl(log_q, torch.stack(tempered)).mean())
        point["settled"] = float((residual < 1e-9).double().mean())
        points.append({"contestant": label, **point})
    return points


def measure_cell(study: Study, V: int, share: float, tokens: int) -> dict[str, Any]:
    """Return, for A, `values`: of each contestant by measure one for each truth; and `rates`, as chosen.

    Beside the measures of the learner as it was trained: `temperature`, which suits its development sample
    best, and `tempered_js` at that; `gap_*`: the difference from the baseline at the temperature of equal
    entropy.
    """
    truths = []
    for number in range(study.truths):  # no two cells have one in common, so that they are independent
        name = f"{TRUTH_SEED} {V} {share} {tokens} {number}"
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]))
        truths.append(bigram.geometric_truth(V, share, generator))
    seeds = list(range(study.truths))
    train, dev = (
        torch.cat([bigram.sample_counts(t, size, [first + i]) for i, t in enumerate(truths)])
        for size, first in ((tokens, 0), (max(200, tokens // 10), DEV_SEED))
    )
    embedding = torch.stack([truth.embedding for truth in truths]).float()
    logits: dict[str, Tensor] = {}
    rates: dict[str, float] = {}
    for label, contestant in study.contestants.items():
        costs, head = contestant.costs(embedding), embedding if contestant.head == "embedding" else None
        fits = {
            rate: bigram.fit(train, dev, contestant.objective, costs, seeds, rate, study.steps, head)
            for rate in study.rates
        }
        rates[label] = min(fits, key=lambda rate: float(fits[rate].nll.mean()))
        logits[label] = fits[rates[label]].logits.double()
    values: dict[str, dict[str, list[float]]] = {}
    for label, learned in logits.items():
        learners = zip(truths, learned, logits[study.baseline], dev, strict=True)
        measured = [_measure(*learner) for learner in learners]
        values[label] = {name: [row[name] for row in measured] for name in measured[0]}
    return {"values": values, "rates": rates}


def _measure(truth: bigram.Truth, learned: Tensor, base: Tensor, dev: Tensor) -> dict[str, float]:
    """Return a learner's measures from logits [V, V], its baseline's, and counts of development [V, V]."""

    def weighted(logits: Tensor, t: float = 1.0) -> dict[str, float]:
        """Return measures at a temperature, contexts weighted as a long text has them."""
        measured = distributions.measures(truth.rows.log(), distributions.log_probs(logits, t))
        return {name: float(values @ truth.contexts) for name, values in measured.items()}

    def entropy(t: float) -> float:
        return float(distributions.entropy(distributions.log_probs(base, t)) @ truth.contexts)

    values = weighted(learned)
    # the baseline at the temperature at which its mean entropy is the learner's
    matched = weighted(base, distributions.solve_temperature(entropy, values["entropy_q"]))
    values |= {f"gap_{name}": values[name] - matched[name] for name in matched}
    values["temperature"] = best_temperature(lambda t: float(bigram.nats_per_token(learned / t, dev)))
    values["tempered_js"] = weighted(learned, values["temperature"])["js"]
    return values


def run(study: Study) -> dict[str, Any]:
    """Return the results of all cells, after writing them; finished cells are read."""
    (study.out / "cells").mkdir(parents=True, exist_ok=True)
    files = (plugin_file(contestant.name) for contestant in study.contestants.values())
    keys = {"contestants", "baseline", "truths", "steps", "rates"}
    identity = {  # what every cell depends on: parameters, and the code that makes it
        "study": study.model_dump(mode="json", include=keys),
        "code": code_digest("emo.experiments.known_truth.study"),
        "plug-ins": [sha256(file) for file in files if file is not None and file.is_file()],
        "torch": torch.__version__,
    }
    results, rows = [], []
    for V, share, tokens in itertools.product(study.vocabularies, study.shares, study.tokens):
        key = json.dumps({**identity, "cell": [V, share, tokens]}, sort_keys=True)
        digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        path = study.out / "cells" / f"{digest}-{V}-{share:g}-{tokens}.json"
        if not path.is_file():
            write_text(path, json.dumps(measure_cell(study, V, share, tokens)))
        cell = {"V": V, "share": share, "tokens": tokens, **json.loads(path.read_text(encoding="utf-8"))}
        results.append(cell)
        contestants = {
            label: {metric: estimate(values) for metric, values in measured.items()}
            for label, measured in cell["values"].items()
        }
        ends = [label for label, rate in cell["rates"].items() if at_an_end(rate, study.rates)]
        verdicts = {name: answer(study, name, [cell]) for name in study.questions}
        row = {key: cell[key] for key in ("V", "share", "tokens", "rates")}
        rows.append(row | {"at_end": ends, "contestants": contestants, "verdicts": verdicts})
        means = (f"{label} {sum(v[study.outcome]) / study.truths:.4f}" for label, v in cell["values"].items())
        print(f"V {V}, share {share:g}, {tokens} tokens: {', '.join(means)}", flush=True)
    verdicts = {name: answer(study, name, results) for name in study.questions}
    code, points = code_version(), fixed_points(study)
    summary = {"code": code, "fixed_points": points, "rows": rows, "verdicts": verdicts}
    write_text(study.out / RESULTS, json.dumps(summary, indent=1))
    return summary


def answer(study: Study, name: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the verdict over cells, each of which is one unit with its mean over truths.

    However many truths a cell has, they say little about other cells. Of a single cell each truth is a unit.
    """
    question = study.questions[name]
    tempered = question.get("tempered", False)  # the gap is already the difference from the tempered baseline
    measure = f"gap_{study.outcome}" if tempered else study.outcome

    def units(label: str) -> list[float]:
        values: list[list[float]] = [cell["values"][label][measure] for cell in results]
        return values[0] if len(values) == 1 else [sum(v) / len(v) for v in values]

    better = units(question["better"])
    others = [[0.0] * len(better)] if tempered else [units(label) for label in question["than"]]
    return {"outcome": study.outcome, **verdict(better, others, least=True)}


def main(argv: list[str] | None = None) -> int:
    """Run a study. Exit codes: 0 done, 1 a failure, 2 a mistake in the input."""
    parser = argparse.ArgumentParser(prog="python -m emo.experiments.known_truth.study", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    args = parser.parse_intermixed_args(argv)
    torch.set_num_threads(1)  # the matrices are small: a second thread costs more than it gives
    study = load_section(Study, args.file, args.overrides, "experiment")
    results = run(study)
    for name, result in results["verdicts"].items():
        limits = f"[{result['low']:.4g}, {result['high']:.4g}], n {result['n']}"
        print(f"all cells: {name}: {result['answer']} ({result['effect']:.4g} {limits})")
    ends = sorted({label for row in results["rows"] for label in row["at_end"]})
    if ends:
        print(f"learning rates, chosen by nats per token, lie at an end of their grid: {', '.join(ends)}")
    print(study.out / RESULTS)
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(outcome(main))
