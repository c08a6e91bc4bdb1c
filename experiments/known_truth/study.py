"""Studies with known truths: fixed points of objectives (A0), and a map of fitted learners (A).

    python -m emo.experiments.known_truth.study FILE.yaml [key=value ...] [--jobs N]

FILE defines truths, sample sizes, objectives and costs. `results.json` is written to its `out`. A cell of the
map is a vocabulary, a share of geometry and a number of draws per context. Its units are random truths with
one sample each, which no other cell shares. Finished cells are not repeated, unless their code or parameters
have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypedDict

import torch
from pydantic import Field, model_validator
from torch import Tensor

from emo.common.config.recipe import Section, load_section
from emo.common.errors import ExitCode, exit_code_of
from emo.common.io.files import replace_nonfinite, sha256, write_text
from emo.common.parallel import WorkerPool
from emo.common.provenance import code_version
from emo.eval.generation import distributions
from emo.eval.results.stats import LEVEL
from emo.pipeline.loss.expected import settle

from ..sweeps.code import code_digest, find_plugin_sources
from ..sweeps.design import RESULTS
from ..sweeps.statistics import CellVerdict, Estimate, MapRow, estimate, find_best_temperature, paired_verdict
from . import bigram
from .contestants import Contestant

TRUTH_SEED = 77
FACTOR = 3.0  # between neighbouring learning rates
SLOWEST = 1e-5  # smallest learning rate
FASTEST = 1.0  # largest learning rate
MAP = "map.json"  # verdicts for `emo advise`
POST_HOC = "post-hoc "  # prefix of the labels of objectives that are applied to the baseline


class StudyQuestion(Section):
    """A claim that one contestant is closer to the truth than all others."""

    better: str
    than: list[str] = Field(min_length=1)
    tempered: bool = False  # compare at the temperature of equal entropy
    by_nll: bool = False  # choose rates and steps by development loss, without the truth


class Study(Section):
    """A study file."""

    out: Path
    contestants: dict[str, Contestant] = Field(min_length=1)
    baseline: str = "mle"
    # Contestants whose fixed point for the trained baseline's distributions is measured too.
    post_hoc: list[str] = []
    vocabularies: list[Annotated[int, Field(gt=1)]] = Field(min_length=1)
    shares: list[Annotated[float, Field(ge=0, le=1)]] = Field(min_length=1)  # of geometry in the truth
    # Per context in a training sample; a development sample has a tenth of it.
    draws: list[Annotated[int, Field(gt=0)]] = Field(min_length=1)
    truths: int = Field(20, gt=1)  # per cell; contestants share samples and initial weights
    selection: int = Field(4, gt=0)  # further truths per cell, for the choice of learning rates
    steps: int = Field(600, gt=0)  # maximum
    # Learning rates, extended while the best one is the first or last.
    rates: list[Annotated[float, Field(gt=0)]] = Field([3e-3, 9e-3, 2.7e-2], min_length=1)
    outcome: Literal["js", "kl_pq", "kl_qp", "tv"] = "js"
    questions: dict[str, StudyQuestion] = {}

    @model_validator(mode="after")
    def _labels_exist(self) -> Study:
        labels = [*self.contestants, *(POST_HOC + label for label in self.post_hoc)]
        questioned = [label for q in self.questions.values() for label in (q.better, *q.than)]
        against = [self.against(label) for label in self.contestants]
        for label in (self.baseline, *self.post_hoc, *questioned, *against):
            if label not in labels:
                raise ValueError(f"{label} is not one of the contestants: {', '.join(labels)}")
        for name, question in self.questions.items():
            if question.by_nll and not {question.better, *question.than} <= self.contestants.keys():
                raise ValueError(f"questions.{name}: a post-hoc contestant has no learning rate")
            if question.tempered and question.than != [self.against(question.better)]:
                raise ValueError(
                    f"questions.{name}: {question.better} has no gap from {question.than}; set against"
                )
        return self

    def against(self, label: str) -> str:
        """Return the contestant that the gaps of another one refer to."""
        contestant = self.contestants.get(label)
        return self.baseline if contestant is None else contestant.against or self.baseline

    @property
    def judged_by_nll(self) -> set[str]:
        """Return the contestants of questions `by_nll`, and the contestants that their gaps refer to."""
        asked = [question for question in self.questions.values() if question.by_nll]
        labels = {label for question in asked for label in (question.better, *question.than)}
        return labels | {self.against(label) for label in labels}


class Search(TypedDict):
    """How the contestants of a cell were trained. See `measure_cell`."""

    rates: dict[str, dict[str, float]]  # by contestant and score
    tried: dict[str, list[float]]
    steps: dict[str, int]
    at_end: list[str]


class CellResult(Search):
    """The content of a cell's file."""

    values: dict[str, dict[str, list[float]]]  # by contestant and measure, one per truth


class StudyRow(MapRow, Search):
    """A cell in results.json."""

    contestants: dict[str, dict[str, Estimate]]  # by measure


class MapVerdict(TypedDict):
    """The answer to a question over all cells."""

    answer: str  # that of all decided cells, `depends` if they differ, or undecided
    outcome: str
    cells: dict[str, list[str]]  # by answer
    least: float  # effect
    most: float
    n: int


class StudyResults(TypedDict):
    """The content of results.json."""

    code: str
    fixed_points: list[dict[str, str | float]]
    rows: list[StudyRow]
    verdicts: dict[str, MapVerdict]


class MapCell(NamedTuple):
    """A cell of the map."""

    V: int
    share: float
    draws: int

    def __str__(self) -> str:
        return f"{self.V} tokens, share {self.share:g}, {self.draws:,} draws per context"


def find_fixed_points(study: Study, V: int = 50, truths: int = 20) -> list[dict[str, str | float]]:
    """Return what each contestant would make of known truths with unlimited data (A0): means over truths."""
    generator = torch.Generator().manual_seed(TRUTH_SEED)
    rows = bigram.draw_dirichlet(truths, V, 0.5, generator)
    embedding = torch.randn(V, 16, generator=generator, dtype=torch.float64)
    log_p = rows.log()
    points: list[dict[str, str | float]] = []
    for label, contestant in study.contestants.items():
        if contestant.head != "free":  # a fixed point is one of distributions, without a learner
            continue
        q, residual = settle(contestant.targets(rows, embedding), contestant.gradient(embedding))
        measures = _measure_fixed_point(log_p, q.clamp_min(1e-300).log())
        measures["settled"] = float((residual < 1e-9).double().mean())
        points.append({"contestant": label, **measures})
    return points


def _measure_fixed_point(log_p: Tensor, log_q: Tensor) -> dict[str, float]:
    """Return the measures of a fixed point, also against the truth tempered to the same entropy."""
    pairs = zip(log_p, distributions.entropy(log_q).tolist(), strict=True)
    temperatures = [distributions.matching_temperature(p[None], entropy) for p, entropy in pairs]
    tempered = [distributions.log_probs(p, t) for p, t in zip(log_p, temperatures, strict=True)]
    point = {name: float(values.mean()) for name, values in distributions.measures(log_p, log_q).items()}
    point["temperature"] = sum(temperatures) / len(temperatures)
    point["kl_from_tempered_truth"] = float(distributions.kl(log_q, torch.stack(tempered)).mean())
    return point


def draw_truths(cell: MapCell, kind: str, count: int) -> tuple[list[bigram.Truth], bigram.BigramSample]:
    """Draw truths of a cell and a sample of each. Other kinds and cells have other truths."""
    truths = []
    train = []
    dev = []
    tokens = cell.V * cell.draws
    for number in range(count):
        name = f"{TRUTH_SEED} {cell.V} {cell.share} {cell.draws} {kind} {number}"
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]))
        truths.append(bigram.geometric_truth(cell.V, cell.share, generator))
        train.append(bigram.sample_counts(truths[-1], tokens, generator))
        dev.append(bigram.sample_counts(truths[-1], max(200, tokens // 10), generator))
    embedding = torch.stack([truth.embedding for truth in truths]).float()
    return truths, bigram.BigramSample(torch.stack(train), torch.stack(dev), embedding, list(range(count)))


def search_rates(
    score: Callable[[float], dict[str, float]], rates: list[float]
) -> dict[float, dict[str, float]]:
    """Score learning rates, and extend them until no best one is the first or last.

    score: scores of a rate by name; lower is better. The limits are SLOWEST and FASTEST.
    """
    scores: dict[float, dict[str, float]] = {}
    new = rates
    while new:
        scores |= {rate: score(rate) for rate in new}
        chosen = set(best_rates(scores).values())
        beyond = ((min(scores), min(scores) / FACTOR), (max(scores), max(scores) * FACTOR))
        new = [rate for end, rate in beyond if end in chosen and SLOWEST <= rate <= FASTEST]
    return dict(sorted(scores.items()))


def best_rates(scores: dict[float, dict[str, float]]) -> dict[str, float]:
    """Return the best learning rate by each score."""
    names = next(iter(scores.values()))
    return {name: min(scores, key=lambda rate: scores[rate][name]) for name in names}


def measure_cell(study: Study, cell: MapCell) -> CellResult:
    """Return `values` of each contestant by measure, one per truth, and how it was trained.

    Learning rate and steps minimise `outcome` over the selection truths. Further measures:

        temperature, tempered_js   best temperature on the development sample, and the divergence there
        gap_*                      difference from the contestant in `against` at equal entropy
        *_by_nll                   with rate and steps chosen by each truth's development loss

    `rates` has the best rates by score, `tried` all rates, and `steps` the best number of steps. `at_end`
    lists contestants whose best rate or steps is the last one tried ("... by nll": by development loss).
    """
    others, selection = draw_truths(cell, "selection", study.selection)
    truths, sample = draw_truths(cell, "measured", study.truths)
    trained = {
        label: train_contestant(study, label, others, selection, sample) for label in study.contestants
    }
    logits = {label: each.logits for label, each in trained.items()}
    base = logits[study.baseline]
    for label in study.post_hoc:
        logits[POST_HOC + label] = study.contestants[label].settled(sample, base.softmax(-1)).log()
    values: dict[str, dict[str, list[float]]] = {}
    for label, learned in logits.items():
        against = study.against(label)
        values[label] = _measures(truths, learned, logits[against], sample.dev)
        if label in study.judged_by_nll:
            by_nll = _measures(truths, trained[label].by_nll, trained[against].by_nll, sample.dev)
            names = (study.outcome, f"gap_{study.outcome}")
            values[label] |= {f"{name}_by_nll": by_nll[name] for name in names}
    return {
        "values": values,
        "rates": {label: each.rates for label, each in trained.items()},
        "tried": {label: each.tried for label, each in trained.items()},
        "steps": {label: each.steps for label, each in trained.items()},
        "at_end": [name for each in trained.values() for name in each.at_end],
    }


class Trained(NamedTuple):
    """The learners of a contestant in a cell, and how they were trained. See `measure_cell`."""

    logits: Tensor
    by_nll: Tensor  # empty unless a question needs it
    rates: dict[str, float]
    tried: list[float]
    steps: int
    at_end: list[str]


def train_contestant(
    study: Study,
    label: str,
    others: list[bigram.Truth],
    selection: bigram.BigramSample,
    sample: bigram.BigramSample,
) -> Trained:
    """Choose a contestant's learning rate and steps on `selection`, and train it on `sample`."""
    contestant = study.contestants[label]
    scores, best_steps = try_rates(study, label, others, selection)
    rates = best_rates(scores)
    tried = list(scores)
    rate = rates[study.outcome]
    ends = (min(scores), max(scores))
    at_end = [label] * (rate in ends or best_steps[rate] == study.steps)
    at_end += [f"{label} by nll"] * (rates.get("nll") in ends)
    logits = contestant.fit(sample, rate, best_steps[rate]).logits.double()
    by_nll = torch.empty(0)
    if label in study.judged_by_nll:
        by_nll = fit_by_nll(contestant, sample, tried, study.steps)
    return Trained(logits, by_nll, rates, tried, best_steps[rate], at_end)


def try_rates(
    study: Study, label: str, truths: list[bigram.Truth], sample: bigram.BigramSample
) -> tuple[dict[float, dict[str, float]], dict[float, int]]:
    """Return the scores of a contestant's learning rates, and the best number of steps of each."""
    contestant = study.contestants[label]
    nearest: dict[float, int] = {}

    def score(rate: float) -> dict[str, float]:
        totals: dict[int, float] = {}

        def look(part: bigram.BigramSample, step: int, learned: Tensor) -> None:
            pairs = zip(part.seeds, learned, strict=True)
            values = (measure_truth(truths[number], z)[study.outcome] for number, z in pairs)
            totals[step] = totals.get(step, 0.0) + sum(values)

        fitted = contestant.fit(sample, rate, study.steps, look)
        nearest[rate] = min(totals, key=lambda step: inf_if_nan(totals[step]))
        nll = {"nll": inf_if_nan(float(fitted.nll.sum()))} if label in study.judged_by_nll else {}
        return {study.outcome: inf_if_nan(totals[nearest[rate]]), **nll}

    return search_rates(score, study.rates), nearest


def fit_by_nll(contestant: Contestant, sample: bigram.BigramSample, rates: list[float], steps: int) -> Tensor:
    """Return the logits of learners with the rate and steps of their lowest development loss."""
    fits = [contestant.fit(sample, rate, steps, patient=False) for rate in rates]
    best_rate = torch.stack([fitted.nll for fitted in fits]).argmin(0).tolist()
    return torch.stack([fits[number].stopped[truth] for truth, number in enumerate(best_rate)]).double()


def inf_if_nan(value: float) -> float:
    """Return a score, infinite if learners diverged."""
    return math.inf if math.isnan(value) else value


def measure_truth(truth: bigram.Truth, logits: Tensor, temperature: float = 1.0) -> dict[str, float]:
    """Return all measures between logits [V, V] and a truth, weighted by the frequency of contexts."""
    measured = distributions.measures(truth.rows.log(), distributions.log_probs(logits, temperature))
    return {name: float(values @ truth.contexts) for name, values in measured.items()}


def _measures(
    truths: list[bigram.Truth], learned: Tensor, base: Tensor, dev: Tensor
) -> dict[str, list[float]]:
    """Return the measures of learners by name, one per truth."""
    rows = [_measure(*learner) for learner in zip(truths, learned, base, dev, strict=True)]
    return {name: [row[name] for row in rows] for name in rows[0]}


def _measure(truth: bigram.Truth, learned: Tensor, base: Tensor, dev: Tensor) -> dict[str, float]:
    """Return the measures of a learner, from its logits, those of `against`, and development counts."""

    def entropy(t: float) -> float:
        return float(distributions.entropy(distributions.log_probs(base, t)) @ truth.contexts)

    values = measure_truth(truth, learned)
    try:  # `base` at the temperature of equal mean entropy
        matched = measure_truth(truth, base, distributions.solve_temperature(entropy, values["entropy_q"]))
    except ValueError:  # the learner has collapsed
        matched = dict.fromkeys(values, math.nan)
    values |= {f"gap_{name}": values[name] - matched[name] for name in matched}
    values["temperature"] = find_best_temperature(lambda t: float(bigram.nats_per_token(learned / t, dev)))
    values["tempered_js"] = measure_truth(truth, learned, values["temperature"])["js"]
    return values


def _measuring(study: Study) -> Callable[[MapCell], CellResult]:
    """Return `measure_cell` of a study. It uses one thread, because small matrices do not gain from more."""
    torch.set_num_threads(1)
    return partial(measure_cell, study)


def run_study(study: Study, jobs: int = 1) -> StudyResults:
    """Measure all cells that are not done, write the results, and return them."""
    (study.out / "cells").mkdir(parents=True, exist_ok=True)
    paths = _cell_paths(study)
    missing = [cell for cell in paths if not paths[cell].is_file()]
    missing.sort(key=lambda cell: -cell.V)  # large cells first, so that no worker idles at the end
    with WorkerPool(min(jobs, len(missing)), _measuring, study) as workers:
        for cell, result in zip(missing, workers.map(missing), strict=True):
            write_text(paths[cell], json.dumps(result))
            means = {label: sum(v[study.outcome]) / study.truths for label, v in result["values"].items()}
            print(f"{cell}: {', '.join(f'{label} {mean:.4f}' for label, mean in means.items())}", flush=True)
    rows = [_summarize_cell(study, cell, path, len(paths)) for cell, path in paths.items()]
    summary: StudyResults = {
        "code": code_version(),
        "fixed_points": find_fixed_points(study),
        "rows": rows,
        "verdicts": {name: summarize_map(study, name, rows) for name in study.questions},
    }
    write_text(study.out / RESULTS, json.dumps(replace_nonfinite(summary), indent=1))
    cells: list[MapRow] = [
        {"V": row["V"], "share": row["share"], "draws": row["draws"], "verdicts": row["verdicts"]}
        for row in rows
    ]
    write_text(study.out / MAP, json.dumps({"code": summary["code"], "level": LEVEL, "rows": cells}))
    return summary


def _summarize_cell(study: Study, cell: MapCell, path: Path, cells: int) -> StudyRow:
    """Return the row of a measured cell."""
    result: CellResult = json.loads(path.read_text(encoding="utf-8"))
    return {
        "V": cell.V,
        "share": cell.share,
        "draws": cell.draws,
        "rates": result["rates"],
        "tried": result["tried"],
        "steps": result["steps"],
        "at_end": result["at_end"],
        "contestants": {
            label: {metric: estimate(values) for metric, values in measured.items()}
            for label, measured in result["values"].items()
        },
        "verdicts": {name: answer_cell(study, name, result, cells) for name in study.questions},
    }


def _cell_paths(study: Study) -> dict[MapCell, Path]:
    """Return the result file of each cell, named by a digest of its parameters and code."""
    files = [file for c in study.contestants.values() for file in find_plugin_sources(c.name)]
    keys = {"contestants", "baseline", "post_hoc", "truths", "selection", "steps", "rates", "outcome"}
    identity = {
        "study": study.model_dump(mode="json", include=keys) | {"by_nll": sorted(study.judged_by_nll)},
        "code": code_digest("emo.experiments.known_truth.study"),
        "plug-ins": [sha256(file) for file in files],
        "torch": torch.__version__,
    }
    paths = {}
    for cell in itertools.starmap(MapCell, itertools.product(study.vocabularies, study.shares, study.draws)):
        key = json.dumps({**identity, "cell": cell}, sort_keys=True)
        digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        paths[cell] = study.out / "cells" / f"{digest}-{cell.V}-{cell.share:g}-{cell.draws}.json"
    return paths


def answer_cell(study: Study, name: str, result: CellResult, cells: int) -> CellVerdict:
    """Return the verdict on a question in a cell, whose units are its truths.

    The level is LEVEL^(1 / cells), so that the intervals of all cells are simultaneous (Sidak).
    """
    question = study.questions[name]
    values = result["values"]
    measure = ("gap_" * question.tempered) + study.outcome + ("_by_nll" * question.by_nll)
    better = values[question.better][measure]
    if question.tempered:  # gaps are differences already
        others = [[0.0] * len(better)]
    else:
        others = [values[label][measure] for label in question.than]
    return {"outcome": study.outcome, **paired_verdict(better, others, True, LEVEL ** (1 / cells))}


def summarize_map(study: Study, name: str, rows: list[StudyRow]) -> MapVerdict:
    """Return the cells by answer, and the answer for the map.

    It is the answer of all decided cells, or `depends` if they differ. There is no mean over cells, because
    it would depend on their choice.
    """
    cells: dict[str, list[str]] = {"yes": [], "no": [], "undecided": []}
    for row in rows:
        cells[row["verdicts"][name]["answer"]].append(str(MapCell(row["V"], row["share"], row["draws"])))
    decided = [word for word in ("yes", "no") if cells[word]]
    effects = [row["verdicts"][name]["effect"] for row in rows]
    return {
        "answer": "depends" if len(decided) == 2 else [*decided, "undecided"][0],
        "outcome": study.outcome,
        "cells": cells,
        "least": min(effects),
        "most": max(effects),
        "n": study.truths,
    }


def main(argv: list[str] | None = None) -> int:
    """Run a study. Exit codes: 0 done, 1 a failure, 2 invalid input."""
    parser = argparse.ArgumentParser(prog="python -m emo.experiments.known_truth.study", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel cells (%(default)s)")
    args = parser.parse_intermixed_args(argv)
    study = load_section(Study, args.file, args.overrides, "experiment")
    results = run_study(study, args.jobs)
    for name, verdicts in results["verdicts"].items():
        counts = ", ".join(f"{word} in {len(cells)}" for word, cells in verdicts["cells"].items())
        print(f"{name}: {counts} cells; {verdicts['least']:+.4f} to {verdicts['most']:+.4f}")
    for row in results["rows"]:
        if row["at_end"]:
            cell = MapCell(row["V"], row["share"], row["draws"])
            print(f"{cell}: no end of rates or steps for {row['at_end']}")
    print(study.out / RESULTS)
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
