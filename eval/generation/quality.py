"""How good sampled texts are: one record of every measure with its interval, and paired differences.

    closeness     MAUVE beside its ceiling; ROUGE-1 and ROUGE-L with the human continuation
    precision     PPL_oracle: the oracle's perplexity of the samples, beside its perplexity of its own (floor)
    recall        PPL_test: the model's perplexity of the human texts
    both          forward and reverse cross-entropy per token against a reference model, on the human texts
    text          distinct n-grams, repetition, length; the same of the human texts

PPL_oracle counts continuations only. Cross-entropies are averaged over the tokens of a text, then over
texts. The unit of an interval is the prefix, after which texts stay together, so that two models are compared
on the same ones; measures of whole sets of texts (MAUVE, distinct n-grams) have intervals over seeds alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from emo.common.errors import UserError, nearest
from emo.eval import store
from emo.eval.generation import closeness, likelihood
from emo.eval.generation.decoding import Decoding
from emo.eval.generation.likelihood import Likelihood
from emo.eval.generation.prefixes import Prefixes
from emo.eval.generation.records import Generation, Plan, Record, read_records
from emo.eval.generation.tokens import context_of, split_ids
from emo.eval.model import EvaluatedModel
from emo.eval.stats import Estimate, Interval, ratio, student

ROUGE = ("rouge1", "rougeL")
PROTOCOLS = ("paper", "released")
QUALITY = "quality.json"
FEW = 20  # units below which a reader is told how many there were: Student's interval trusts the bell curve
VERSION = 2

Say = Callable[[str], None]


def ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    """The n-grams of a text's words, in order, repeated ones repeatedly."""
    words = text.split()
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def distinct(texts: Sequence[str], n: int) -> float:
    """Different n-grams of all texts together by the number of n-grams; 0 when there are none.

    It falls with the amount of text: compare equal numbers of texts of equal length only.
    """
    counts = Counter(gram for text in texts for gram in ngrams(text, n))
    return len(counts) / counts.total() if counts else 0.0


def repetition(text: str, n: int) -> float | None:
    """Return the share of a text's n-grams that it has had before; None where it has no n-gram."""
    grams = ngrams(text, n)
    return 1 - len(set(grams)) / len(grams) if grams else None


def rouge(texts: Sequence[str], references: Sequence[str]) -> dict[str, list[float]]:
    """Return F-measures of ROUGE-1 and ROUGE-L of every pair, as rouge-score computes them; from 0 to 1."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE))
    scores = [scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)]
    return {name: [float(score[name].fmeasure) for score in scores] for name in ROUGE}


@dataclass(frozen=True)
class Wanted:
    """The measures beside the text metrics; None leaves a measure out."""

    oracle: str | None = None
    reference: str | None = None
    mauve: str | None = None  # a featurizer's name
    test: list[str] | None = None  # texts for PPL_test; None: the human texts of the records
    protocol: str = "paper"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise UserError(f"--protocol {self.protocol!r} is not known; {nearest(self.protocol, PROTOCOLS)}")
        if self.mauve is not None:
            closeness.require_mauve()


@dataclass(frozen=True)
class Sampled:
    """Records of one model, corpus and decoding, as `generate` left them."""

    directory: Path
    about: dict[str, Any]
    records: list[Record]

    @classmethod
    def read(cls, directory: Path) -> Sampled:
        return cls(directory, *read_records(directory))

    @property
    def clusters(self) -> list[int]:
        """Return the cluster of every text [n]: its prefix, or itself where all have the same."""
        numbers = [record["prefix_number"] for record in self.records]
        return numbers if self.unit == "prefixes" else list(range(len(numbers)))

    @property
    def unit(self) -> str:
        """Return what an interval counts."""
        return "prefixes" if len({record["prefix_number"] for record in self.records}) > 1 else "texts"

    @property
    def has_humans(self) -> bool:
        return "reference" in self.records[0]

    @property
    def humans(self) -> list[Record]:
        """One record per prefix, in order."""
        return list({r["prefix_number"]: r for r in reversed(self.records)}.values())[::-1]

    def draws(self) -> list[tuple[int, list[Record]]]:
        """(seed, one text per prefix) for every seed and sample number."""
        texts: dict[tuple[int, int], list[Record]] = {}
        for record in self.records:
            texts.setdefault((record["seed"], record["sample"]), []).append(record)
        return [(seed, records) for (seed, _), records in texts.items()]


def pair(record: Record, protocol: str, words: int, tokens: int) -> tuple[str, str]:
    """(sampled text, human text) as they are compared.

    paper: continuations only, the human one cut to as many tokens. released: as the authors' scripts do,
    with the prefix on both sides, a second space before the sampled continuation, and the human text cut to
    as many *words* as the model may write tokens.
    """
    if protocol == "paper":
        return record["text"].strip(), record["human"].strip()
    human = (record["prefix"] + record["reference"]).split()
    return f"{record['prefix']} {record['text']}", " ".join(human[: words + tokens])


def by_seed(seeds: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    """Return the mean with Student's interval over seeds, none for a single one; first averaged in each."""
    means = [
        float(np.mean([v for s, v in zip(seeds, values, strict=True) if s == seed]))
        for seed in dict.fromkeys(seeds)
    ]
    return _described(float(np.mean(means)), student(means), len(means), "seeds")


def shown(estimate: Estimate, unit: str, transform: Callable[[float], float] = float) -> dict[str, Any]:
    """Return an estimate with its interval over prefixes or texts. transform: what of it is meant."""
    return _described(estimate.value, estimate.interval(), len(estimate.parts), unit, transform)


def _described(
    value: float, interval: Interval | None, n: int, unit: str, transform: Callable[[float], float] = float
) -> dict[str, Any]:
    low, high = (transform(interval.low), transform(interval.high)) if interval else (None, None)
    return {"mean": transform(value), "low": low, "high": high, "n": n, "unit": unit}


@dataclass(frozen=True)
class Measured:
    """The measures of a set of texts, and those of them that have a value for every prefix."""

    result: dict[str, Any]
    prefixes: list[str]
    estimates: dict[str, Estimate]


def measure(sampled: Sampled, request: Wanted, out: Path, say: Say) -> Measured:
    """Return every measure that was asked for and that the records allow."""
    if (request.mauve or request.protocol == "released") and not sampled.has_humans:
        raise UserError(
            f"{sampled.directory}: no human continuations to compare with; generate with --corpus"
        )
    if request.mauve:
        closeness.require_texts(len(sampled.humans), len(sampled.humans))
    texts, estimates = _texts(sampled)
    result: dict[str, Any] = {"version": VERSION, "protocol": request.protocol, "of": sampled.about} | texts
    if request.mauve:
        result["mauve"] = _mauve(sampled, request.mauve, request)
    if sampled.has_humans:
        overlaps = rouge(*_pairs(sampled, sampled.records, request.protocol))
        shares = {name: ratio(values, None, sampled.clusters) for name, values in overlaps.items()}
        result["rouge"] = {name: shown(estimate, sampled.unit) for name, estimate in shares.items()}
        estimates |= shares
    if request.oracle:
        of_oracle, estimates["nats_per_token"] = _oracle(sampled, request.oracle, request.dtype, out, say)
        result |= of_oracle
    human = request.test
    if human is None and sampled.has_humans:
        human = [record["prefix"] + record["reference"] for record in sampled.humans]
    if human:
        result |= _recall(sampled, request, human)
    elif request.reference:
        raise UserError("--reference needs human texts: generate with --corpus, or give --test FILE")
    if (bad := _not_a_number(result)) is not None:
        raise UserError(f"{sampled.directory}: {bad} is not a number; nothing is reported")
    return Measured(result, [r["prefix"] for r in sampled.humans], estimates)


def compared(first: Measured, other: Measured) -> dict[str, Any] | str:
    """Return differences other - first on the same prefixes by measure, or why there are none."""
    a, b = first.result["of"], other.result["of"]
    if first.prefixes != other.prefixes:
        return "their prefixes are not the same"
    if len(first.prefixes) < 2:
        return "there is one prefix only"
    for name in ("tokens", "samples"):
        if a[name] != b[name]:
            return f"--{name} is {a[name]} and {b[name]}"
    names = [name for name in first.estimates if name in other.estimates]
    if a["tokenizer"] != b["tokenizer"]:
        names = [name for name in names if name not in ("tokens", "nats_per_token")]
    return {name: shown(other.estimates[name] - first.estimates[name], "prefixes") for name in names}


def write(measured: Sequence[Measured], directories: Sequence[Path]) -> list[str]:
    """Write DIRECTORY/quality.json of every set of texts; return the lines that tell all of them.

    The others are compared with the first.
    """
    lines = _table("texts of", [(_title(current.result), _cells(current.result)) for current in measured])
    rows = []
    for number, (current, directory) in enumerate(zip(measured, directories, strict=True)):
        result = current.result
        if number:
            differences = compared(measured[0], current)
            result = result | {"baseline": measured[0].result["of"], "differences": differences}
            if isinstance(differences, str):
                lines.append(f"{_title(current.result)} is not compared with the first: {differences}")
            else:
                rows.append((_title(current.result), {k: _show(v, sign="+") for k, v in differences.items()}))
        store.replace(directory / QUALITY, store.dump(result))
    return lines + (_table("less the first, paired by prefix", rows) if rows else [])


def _texts(sampled: Sampled) -> tuple[dict[str, Any], dict[str, Estimate]]:
    """Return (variety, repetition and length; of the human texts too; the estimates among them by name)."""
    records, clusters = sampled.records, sampled.clusters
    estimates = {
        name: ratio([float(r[name]) for r in records], None, clusters) for name in ("tokens", "ended")
    }
    estimates["words"] = ratio([len(r["text"].split()) for r in records], None, clusters)
    for n in (2, 3, 4):
        shares = [repetition(r["text"], n) for r in records]
        weights = [float(share is not None) for share in shares]
        if any(weights):
            estimates[f"repetition_{n}"] = ratio([share or 0.0 for share in shares], weights, clusters)
    draws = [(seed, [r["text"] for r in part]) for seed, part in sampled.draws()]
    text = {
        f"distinct_{n}": by_seed([s for s, _ in draws], [distinct(t, n) for _, t in draws]) for n in (1, 2, 3)
    }
    result: dict[str, Any] = {"text": text | {k: shown(e, sampled.unit) for k, e in estimates.items()}}
    if sampled.has_humans:
        humans = [r["human"] for r in sampled.humans]
        of_people = {f"distinct_{n}": distinct(humans, n) for n in (1, 2, 3)}
        for n in (2, 3, 4):
            shares = [repetition(human, n) for human in humans]
            counted = [share for share in shares if share is not None]
            of_people[f"repetition_{n}"] = float(np.mean(counted)) if counted else 0.0
        of_people["words"] = float(np.mean([len(human.split()) for human in humans]))
        result["human_text"] = of_people
    return result, estimates


def _pairs(sampled: Sampled, records: list[Record], protocol: str) -> tuple[list[str], list[str]]:
    words, tokens = sampled.about["prefix_words"], sampled.about["tokens"]
    both = [pair(record, protocol, words, tokens) for record in records]
    return [text for text, _ in both], [human for _, human in both]


def _mauve(sampled: Sampled, featurizer: str, request: Wanted) -> dict[str, Any]:
    features, draws = closeness.featurizer(featurizer, request.dtype), sampled.draws()
    human = features(_pairs(sampled, draws[0][1], request.protocol)[1])
    texts = [features(_pairs(sampled, records, request.protocol)[0]) for _, records in draws]
    result = closeness.beside_ceiling(human, texts)
    seeds = [seed for seed, _ in draws]
    return (
        result
        | {name: by_seed(seeds, result[name]) for name in ("score", "half")}
        | {"featurizer": featurizer}
    )


def _oracle(sampled: Sampled, path: str, dtype: str, out: Path, say: Say) -> tuple[dict[str, Any], Estimate]:
    """Return PPL_oracle of the samples and of as many of the oracle's own after the same prefixes."""
    oracle = EvaluatedModel(path, dtype=dtype)
    about = sampled.about
    prefixes = Prefixes(about["corpus"], [r["prefix"] for r in sampled.humans], None)
    plan = Plan(prefixes, Decoding(), about["tokens"], about["samples"], tuple(about["seeds"]))
    say(f"{oracle.name}: samples of its own, for the floor of PPL_oracle")
    floor = Generation(oracle, plan, out).run(publish=False)
    of_samples, of_floor = (
        continuations_under(oracle, records, tokenizer).estimate(sampled.clusters)
        for records, tokenizer in ((sampled.records, about["tokenizer"]), (floor, oracle.tokenizer_digest))
    )
    result = {
        "oracle": {"path": path, "weights": oracle.digest},
        "ppl_oracle": _perplexity(of_samples, sampled.unit),
        "ppl_oracle_floor": _perplexity(of_floor, sampled.unit),
    }
    return result, of_samples


def _perplexity(nats: Estimate, unit: str) -> dict[str, Any]:
    return {
        "nats_per_token": shown(nats, unit),
        "perplexity": shown(nats, unit, lambda value: math.exp(min(value, 700.0))),
    }


def continuations_under(model: EvaluatedModel, records: list[Record], tokenizer: str) -> Likelihood:
    """-log p of continuations: of the very tokens where the tokenizer is the same, else of the text's.

    tokenizer: `tokenizer_digest` of the model that wrote the records.
    """
    if tokenizer == model.tokenizer_digest:
        starts = {
            p: split_ids(model.tokenizer, p, "")[0] if p else None for p in {r["prefix"] for r in records}
        }
        begin = split_ids(model.tokenizer, "", "a")[0]
        pairs = [(starts[r["prefix"]] or begin, r["ids"]) for r in records]
    else:
        pairs = [split_ids(model.tokenizer, r["prefix"], r["text"]) for r in records]
        pairs = [(start, continuation) for start, continuation in pairs]
    return likelihood.continuations(model, pairs)


def _recall(sampled: Sampled, request: Wanted, human: list[str]) -> dict[str, Any]:
    """PPL_test, and cross-entropies against the reference model."""
    model = EvaluatedModel(sampled.about["path"], dtype=request.dtype)
    if model.digest != sampled.about["weights"]:
        raise UserError(
            f"{model.given} has other weights than those that wrote {sampled.directory}; generate again"
        )
    likelihoods = likelihood.texts(model, human)
    nats = likelihoods.estimate(range(len(human)))
    perplexity = _perplexity(nats, "texts")["perplexity"]
    result: dict[str, Any] = {
        "ppl_test": {
            "nats_per_token": nats.value,
            "perplexity": perplexity["mean"],
            "interval": perplexity,
            "tokens": int(likelihoods.tokens.sum()),
            "texts": len(human),
        }
    }
    if request.reference:
        result["cross_entropy"] = _cross_entropy(model, request.reference, request.dtype, human)
    return result


def _cross_entropy(model: EvaluatedModel, path: str, dtype: str, human: list[str]) -> dict[str, Any]:
    reference = EvaluatedModel(path, dtype=dtype)
    if reference.tokenizer_digest != model.tokenizer_digest:
        raise UserError(
            f"--reference {path} has another tokenizer than {model.given}; their next-token "
            "distributions cannot be compared"
        )
    limit = min(context_of(model) or 1 << 30, context_of(reference) or 1 << 30)
    rows = [[*start, *ids][:limit] for start, ids in (split_ids(model.tokenizer, "", t) for t in human)]
    rows = [row for row in rows if len(row) > 1]
    measures = likelihood.side_by_side(reference.model, model.model, rows, likelihood.cross_entropies)
    intervals = {
        way: shown(ratio(measures[f"{way}_ce"].tolist(), None, range(len(rows))), "texts")
        for way in ("forward", "reverse")
    }
    return {
        "forward": intervals["forward"]["mean"],
        "reverse": intervals["reverse"]["mean"],
        "intervals": intervals,
        "reference": {"path": path, "weights": reference.digest},
        "texts": len(rows),
    }


def _not_a_number(value: Any, name: str = "") -> str | None:
    """The name of the first value that is not finite."""
    if isinstance(value, dict):
        names = (_not_a_number(v, f"{name}.{k}".lstrip(".")) for k, v in value.items())
    elif isinstance(value, list):
        names = (_not_a_number(v, name) for v in value)
    else:
        return name if isinstance(value, float) and not math.isfinite(value) else None
    return next((bad for bad in names if bad), None)


def _title(result: dict[str, Any]) -> str:
    about = result["of"]
    return f"{about['model']} {about['corpus']}-{about['decoding']['name']}"


def _table(head: str, rows: Sequence[tuple[str, dict[str, str]]]) -> list[str]:
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    lines = [[head, *names]] + [[title, *(row.get(n, "") for n in names)] for title, row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]


def _cells(result: dict[str, Any]) -> dict[str, str]:
    cells: dict[str, str] = {}
    if "mauve" in result:
        mauve = result["mauve"]
        cells |= {
            "MAUVE": _show(mauve["score"]),
            "half": _show(mauve["half"]),
            "ceiling": f"{mauve['ceiling']:.3f}",
        }
    cells |= {name: _show(value) for name, value in result.get("rouge", {}).items()}
    if "ppl_oracle" in result:
        cells["PPL_oracle"] = _show(result["ppl_oracle"]["perplexity"], 2)
        cells["floor"] = _show(result["ppl_oracle_floor"]["perplexity"], 2)
    if "ppl_test" in result:
        cells["PPL_test"] = _show(result["ppl_test"]["interval"], 2)
    if "cross_entropy" in result:
        cells |= {f"{way} CE": _show(value, 4) for way, value in result["cross_entropy"]["intervals"].items()}
    names = [name for name in ("distinct_2", "repetition_4", "tokens") if name in result["text"]]
    return cells | {name: _show(result["text"][name]) for name in names}


def _show(value: dict[str, Any], digits: int = 3, sign: str = "-") -> str:
    """Return a value with its interval, and over how few units that is; no interval where there is none."""
    text = f"{value['mean']:{sign}.{digits}f}"
    if value["low"] is None:
        return text
    few = f" ({value['n']} {value['unit']})" if value["n"] < FEW else ""
    return f"{text} [{value['low']:{sign}.{digits}f}, {value['high']:{sign}.{digits}f}]{few}"
