"""Objectives where the truth is known: their fixed points (A0), and learners fitted to samples (A).

    python -m experiments.known_truth.study FILE.yaml [key=value ...]

FILE says which truths, sample sizes, objectives and costs; `results.json` is written to its `out`. Cells that
are done are not done again.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from common.exit_codes import ExitCode
from common.files import write_text
from common.outcome import outcome
from common.provenance import code_version
from common.recipe import Section, load_section
from eval.generation import distributions
from experiments import READERS
from experiments.design import RESULTS
from experiments.known_truth import bigram
from experiments.known_truth.expected import ConstantCosts, CosineCosts, Costs, settle
from experiments.statistics import estimate, verdict
from pipeline.loss import Objective, get_objective

DEV_SEED, TRUTH_SEED, PERMUTATION = 10_000, 77, 5  # streams that must not meet those of the samples


class Contestant(Section):
    """An objective with its parameters and its costs."""

    name: str
    params: dict[str, float] = {}
    cost: Literal["true", "constant", "permuted"] = "true"

    def objective(self) -> Objective:
        """The objective, its parameters bound."""
        return get_objective(self.name, **self.params)

    def costs(self, embedding: Tensor) -> Costs:
        """The transport costs, from the embedding that the truth was made with."""
        if self.cost == "constant":
            return ConstantCosts()
        true = CosineCosts(embedding)
        if self.cost == "permuted":
            return true.permuted(torch.Generator().manual_seed(PERMUTATION))
        return true


class Study(Section):
    """The whole file."""

    out: Path
    contestants: dict[str, Contestant] = Field(min_length=1)
    baseline: str = "mle"
    # geometric: tokens that are plausible together lie close together, to a share; sparse: MixCE's, half of
    # whose probabilities are zero and whose embedding says nothing.
    truth: Literal["geometric", "sparse"] = "geometric"
    vocabularies: list[int] = [20, 100]
    shares: list[float] = [0.0, 0.5, 1.0]  # of geometry in the truth
    tokens: list[int] = [500, 5_000, 50_000]  # of a training sample; a tenth more is for development
    runs: int = Field(10, gt=1)  # paired: run i of every contestant has the same sample and first weights
    steps: int = Field(600, gt=0)
    rates: list[float] = [1e-3, 3e-3, 9e-3]  # learning rates; each contestant takes its best on dev
    outcome: str = "js"
    questions: dict[str, dict[str, Any]] = {}  # name: {better: label, than: [labels], tempered: bool}

    @model_validator(mode="after")
    def _labels_exist(self) -> Study:
        asked = [x for q in self.questions.values() for x in (q["better"], *q["than"])]
        for label in (self.baseline, *asked):
            if label not in self.contestants:
                raise ValueError(f"{label} is not one of the contestants: {', '.join(self.contestants)}")
        if self.truth == "sparse" and self.shares != [0.0]:
            raise ValueError("a sparse truth has no geometry; set shares: [0.0]")
        return self


def fixed_points(study: Study, V: int = 50, truths: int = 20) -> list[dict[str, Any]]:
    """A0: what each contestant would make of known truths with unlimited data, in means over truths."""
    generator = torch.Generator().manual_seed(TRUTH_SEED)
    rows = bigram.dirichlet(truths, V, 0.5, generator)
    embedding = torch.randn(V, 16, generator=generator, dtype=torch.float64)
    found = []
    for label, contestant in study.contestants.items():
        settled = settle(rows, contestant.objective(), contestant.costs(embedding))
        log_p, log_q = rows.log(), settled.q.clamp_min(1e-300).log()
        entropy = distributions.entropy(log_q)
        temperatures = [
            distributions.matching_temperature(p[None], float(h)) for p, h in zip(log_p, entropy, strict=True)
        ]
        tempered = torch.stack(
            [distributions.log_probs(p, t) for p, t in zip(log_p, temperatures, strict=True)]
        )
        means = {k: float(v.mean()) for k, v in distributions.measures(log_p, log_q).items()}
        means["temperature"] = sum(temperatures) / len(temperatures)
        means["kl_from_tempered_truth"] = float(distributions.kl(log_q, tempered).mean())
        means["settled"] = float((settled.residual < 1e-9).double().mean())
        found.append({"contestant": label, **means})
    return found


def cells(study: Study) -> Iterator[tuple[int, float, int]]:
    """Vocabulary, share of geometry, and tokens of every cell."""
    return itertools.product(study.vocabularies, study.shares, study.tokens)


def measure_cell(study: Study, V: int, share: float, tokens: int) -> dict[str, dict[str, list[float]]]:
    """A: all contestants on one truth; per contestant and measure a value for each run.

    Beside the measures, `gap_*`: the difference from the baseline at the temperature of equal entropy.
    Measures that a zero in the truth makes infinite are left out.
    """
    generator = torch.Generator().manual_seed(TRUTH_SEED)
    if study.truth == "geometric":
        truth = bigram.geometric_truth(V, share, generator)
    else:
        truth = bigram.sparse_truth(V, generator)
    seeds = list(range(study.runs))
    train = bigram.sample_counts(truth, tokens, seeds)
    dev = bigram.sample_counts(truth, max(200, tokens // 10), [DEV_SEED + seed for seed in seeds])
    log_p = truth.rows.log()
    logits: dict[str, Tensor] = {}
    for label, contestant in study.contestants.items():
        costs = contestant.costs(truth.embedding.float())
        fits = [
            bigram.fit(train, dev, contestant.objective(), costs, seeds, rate, study.steps)
            for rate in study.rates
        ]
        logits[label] = min(fits, key=lambda fit: float(fit.nll.mean())).logits.double()
    base = logits[study.baseline]
    found: dict[str, dict[str, list[float]]] = {}
    for label, own in logits.items():
        found[label] = {}
        for run in seeds:
            values = _weighted(truth, log_p, own[run])
            matched = _at_entropy(truth, log_p, base[run], values["entropy_q"])
            values |= {f"gap_{name}": values[name] - matched[name] for name in matched}
            for name, value in values.items():
                found[label].setdefault(name, []).append(value)
    each = ((name, value) for measured in found.values() for name, v in measured.items() for value in v)
    infinite = {name for name, value in each if not math.isfinite(value)}
    return {label: {n: v for n, v in m.items() if n not in infinite} for label, m in found.items()}


def _weighted(truth: bigram.Truth, log_p: Tensor, logits: Tensor, t: float = 1.0) -> dict[str, float]:
    """Measures of one run, contexts weighted as a long text has them."""
    measured = distributions.measures(log_p, distributions.log_probs(logits, t))
    return {name: float(values @ truth.contexts) for name, values in measured.items()}


def _at_entropy(truth: bigram.Truth, log_p: Tensor, logits: Tensor, target: float) -> dict[str, float]:
    """Measures of the baseline at the temperature at which its mean entropy is `target`."""

    def mean_entropy(t: float) -> float:
        return float(distributions.entropy(distributions.log_probs(logits, t)) @ truth.contexts)

    return _weighted(truth, log_p, logits, distributions.solve_temperature(mean_entropy, target))


def run(study: Study) -> dict[str, Any]:
    """Everything, cell by cell; finished cells are read."""
    study.out.mkdir(parents=True, exist_ok=True)
    done = []
    for V, share, tokens in cells(study):
        path = study.out / "cells" / f"{_key(study)}-{V}-{share:g}-{tokens}.json"
        if not path.is_file():
            path.parent.mkdir(exist_ok=True)
            write_text(path, json.dumps(measure_cell(study, V, share, tokens)))
        done.append(
            {"V": V, "share": share, "tokens": tokens, "values": json.loads(path.read_text(encoding="utf-8"))}
        )
        print(f"V {V}, share {share:g}, {tokens} tokens: {_line(study, done[-1]['values'])}", flush=True)
    results = {
        "code": code_version(),
        "fixed_points": fixed_points(study),
        "rows": [_row(cell) for cell in done],
        "verdicts": {name: _answer(study, name, done) for name in study.questions},
    }
    write_text(study.out / RESULTS, json.dumps(results, indent=1))
    return results


def _key(study: Study) -> str:
    """What a cell depends on besides its own place."""
    tree = study.model_dump(
        mode="json", include={"contestants", "baseline", "truth", "runs", "steps", "rates"}
    )
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:12]


def _line(study: Study, values: dict[str, dict[str, list[float]]]) -> str:
    return ", ".join(f"{label} {sum(v[study.outcome]) / study.runs:.4f}" for label, v in values.items())


def _row(cell: dict[str, Any]) -> dict[str, Any]:
    means = {
        label: {name: estimate(each)._asdict() for name, each in measured.items()}
        for label, measured in cell["values"].items()
    }
    return {key: cell[key] for key in ("V", "share", "tokens")} | {"contestants": means}


def _answer(study: Study, name: str, done: list[dict[str, Any]]) -> dict[str, Any]:
    """The verdict over all cells: runs of all cells are pairs, each cell a block of equal weight."""
    question = study.questions[name]
    measure = study.outcome
    better: list[float] = []
    others: list[list[float]] = [[] for _ in question["than"]]
    for cell in done:
        values = cell["values"]
        if question.get("tempered"):  # the gap is already the difference from the tempered baseline
            better += values[question["better"]][f"gap_{measure}"]
            others[0] += [0.0] * study.runs
            continue
        better += values[question["better"]][measure]
        for place, label in enumerate(question["than"]):
            others[place] += values[label][measure]
    return {"outcome": measure, **verdict(better, others, least=True)._asdict()}


def main(argv: list[str] | None = None) -> int:
    """Run a study. Exit codes: 0 done, 1 a failure, 2 a mistake in the input."""
    parser = argparse.ArgumentParser(prog="python -m experiments.known_truth.study", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    args = parser.parse_intermixed_args(argv)
    torch.set_num_threads(1)  # the matrices are small: a second thread costs more than it gives
    return outcome(lambda: _main(load_section(Study, args.file, args.overrides, "experiment", READERS)))


def _main(study: Study) -> int:
    results = run(study)
    for name, found in results["verdicts"].items():
        print(f"{name}: {found['answer']} ({found['effect']:.4g} [{found['low']:.4g}, {found['high']:.4g}])")
    print(study.out / RESULTS)
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
