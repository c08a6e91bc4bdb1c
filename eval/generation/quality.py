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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError, nearest
from eval import store
from eval.generation import closeness, likelihood, text_metrics
from eval.generation.decoding import Decoding
from eval.generation.likelihood import Likelihood
from eval.generation.prefixes import Prefixes
from eval.generation.records import Generation, Plan, Record, read_records
from eval.generation.tokens import context_of, split_ids
from eval.model import EvaluatedModel
from eval.stats import Estimate, ratio, student

PROTOCOLS = ("paper", "released")
QUALITY = "quality.json"
FEW = 20  # units below which a reader is told how many there were: Student's interval trusts the bell curve
VERSION = 2

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """What is measured beside the text metrics; None leaves a measure out."""

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
        """What the texts [n] have in common: their prefix, or nothing where all have the same."""
        numbers = [record["prefix_number"] for record in self.records]
        return numbers if self.unit == "prefixes" else list(range(len(numbers)))

    @property
    def unit(self) -> str:
        """What an interval counts."""
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
        found: dict[tuple[int, int], list[Record]] = {}
        for record in self.records:
            found.setdefault((record["seed"], record["sample"]), []).append(record)
        return [(seed, records) for (seed, _), records in found.items()]


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
    found = student(means)
    low, high = (found.low, found.high) if found else (None, None)
    return {"mean": float(np.mean(means)), "low": low, "high": high, "n": len(means), "unit": "seeds"}


def shown(estimate: Estimate, unit: str, of: Callable[[float], float] = float) -> dict[str, Any]:
    """Return an estimate with its interval over prefixes or texts. of: what of it is meant."""
    found = estimate.interval()
    low, high = (of(found.low), of(found.high)) if found else (None, None)
    return {"mean": of(estimate.value), "low": low, "high": high, "n": len(estimate.parts), "unit": unit}


@dataclass(frozen=True)
class Measured:
    """The measures of a set of texts, and those of them that have a value for every prefix."""

    result: dict[str, Any]
    prefixes: list[str]
    estimates: dict[str, Estimate]


def measure(sampled: Sampled, wanted: Wanted, out: Path, say: Say) -> Measured:
    """Return every measure that was asked for and that the records allow."""
    if (wanted.mauve or wanted.protocol == "released") and not sampled.has_humans:
        raise UserError(
            f"{sampled.directory}: no human continuations to compare with; generate with --corpus"
        )
    if wanted.mauve:
        closeness.require_texts(len(sampled.humans), len(sampled.humans))
    estimates = _of_texts(sampled)
    result: dict[str, Any] = {"version": VERSION, "protocol": wanted.protocol, "of": sampled.about}
    result |= _texts(sampled, estimates)
    if wanted.mauve:
        result["mauve"] = _mauve(sampled, wanted)
    if sampled.has_humans:
        scores = text_metrics.rouge(*_pairs(sampled, sampled.records, wanted.protocol))
        found = {name: ratio(values, None, sampled.clusters) for name, values in scores.items()}
        result["rouge"] = {name: shown(estimate, sampled.unit) for name, estimate in found.items()}
        estimates |= found
    if wanted.oracle:
        result |= _oracle(sampled, wanted, out, say, estimates)
    human = wanted.test or (
        [r["prefix"] + r["reference"] for r in sampled.humans] if sampled.has_humans else None
    )
    if human:
        result |= _recall(sampled, wanted, human)
    elif wanted.reference:
        raise UserError("--reference needs human texts: generate with --corpus, or give --test FILE")
    if (bad := _not_a_number(result)) is not None:
        raise UserError(f"{sampled.directory}: {bad} is not a number; nothing is reported")
    return Measured(result, [r["prefix"] for r in sampled.humans], estimates)


def compared(first: Measured, other: Measured) -> dict[str, Any] | str:
    """Return differences other - first on the same prefixes by measure, or why there are none."""
    one, two = first.result["of"], other.result["of"]
    if first.prefixes != other.prefixes:
        return "their prefixes are not the same"
    if len(first.prefixes) < 2:
        return "there is one prefix only"
    for name in ("tokens", "samples"):
        if one[name] != two[name]:
            return f"--{name} is {one[name]} and {two[name]}"
    names = [name for name in first.estimates if name in other.estimates]
    if one["tokenizer"] != two["tokenizer"]:
        names = [name for name in names if name not in ("tokens", "nats_per_token")]
    return {name: shown(other.estimates[name] - first.estimates[name], "prefixes") for name in names}


def write(measured: Sequence[Measured], directories: Sequence[Path]) -> list[str]:
    """Write DIRECTORY/quality.json of every set of texts; return the lines that tell all of them.

    The others are compared with the first.
    """
    lines = table([one.result for one in measured])
    rows = []
    for number, (one, directory) in enumerate(zip(measured, directories, strict=True)):
        result = one.result
        if number:
            found = compared(measured[0], one)
            result = result | {"baseline": measured[0].result["of"], "differences": found}
            if isinstance(found, str):
                lines.append(f"{_title(one.result)} is not compared with the first: {found}")
            else:
                rows.append((_title(one.result), {k: _show(v, sign="+") for k, v in found.items()}))
        store.replace(directory / QUALITY, store.dump(result))
    return lines + (_table("less the first, paired by prefix", rows) if rows else [])


def _of_texts(sampled: Sampled) -> dict[str, Estimate]:
    """Return the measures that every text has a value of."""
    records, clusters = sampled.records, sampled.clusters
    found = {name: ratio([float(r[name]) for r in records], None, clusters) for name in ("tokens", "ended")}
    found["words"] = ratio([len(r["text"].split()) for r in records], None, clusters)
    for n in (2, 3, 4):
        shares = [text_metrics.repetition(r["text"], n) for r in records]
        weights = [float(share is not None) for share in shares]
        if any(weights):
            found[f"repetition_{n}"] = ratio([share or 0.0 for share in shares], weights, clusters)
    return found


def _texts(sampled: Sampled, estimates: dict[str, Estimate]) -> dict[str, Any]:
    """Return variety, repetition and length; of the human texts variety and repetition too."""
    draws = [(seed, [r["text"] for r in records]) for seed, records in sampled.draws()]
    text = {
        f"distinct_{n}": by_seed([s for s, _ in draws], [text_metrics.distinct(t, n) for _, t in draws])
        for n in (1, 2, 3)
    }
    result: dict[str, Any] = {"text": text | {k: shown(e, sampled.unit) for k, e in estimates.items()}}
    if sampled.has_humans:
        humans = [r["human"] for r in sampled.humans]
        result["human_text"] = {f"distinct_{n}": text_metrics.distinct(humans, n) for n in (1, 2, 3)}
        for n in (2, 3, 4):
            shares = [share for text in humans if (share := text_metrics.repetition(text, n)) is not None]
            result["human_text"][f"repetition_{n}"] = float(np.mean(shares)) if shares else 0.0
        result["human_text"]["words"] = float(np.mean([len(text.split()) for text in humans]))
    return result


def _pairs(sampled: Sampled, records: list[Record], protocol: str) -> tuple[list[str], list[str]]:
    words, tokens = sampled.about["prefix_words"], sampled.about["tokens"]
    both = [pair(record, protocol, words, tokens) for record in records]
    return [text for text, _ in both], [human for _, human in both]


def _mauve(sampled: Sampled, wanted: Wanted) -> dict[str, Any]:
    assert wanted.mauve is not None
    features = closeness.featurizer(wanted.mauve, wanted.dtype)
    draws = sampled.draws()
    seeds = [seed for seed, _ in draws]
    human = features(_pairs(sampled, draws[0][1], wanted.protocol)[1])
    found = closeness.beside_ceiling(
        human, [features(_pairs(sampled, records, wanted.protocol)[0]) for _, records in draws]
    )
    return found | {
        "score": by_seed(seeds, found["score"]),
        "half": by_seed(seeds, found["half"]),
        "featurizer": wanted.mauve,
    }


def _oracle(
    sampled: Sampled, wanted: Wanted, out: Path, say: Say, estimates: dict[str, Estimate]
) -> dict[str, Any]:
    """Return PPL_oracle of the samples, and of as many of the oracle's own after the same prefixes."""
    assert wanted.oracle is not None
    oracle = EvaluatedModel(wanted.oracle, dtype=wanted.dtype)
    about = sampled.about
    prefixes = Prefixes(about["corpus"], [r["prefix"] for r in sampled.humans], None)
    plan = Plan(prefixes, Decoding(), about["tokens"], about["samples"], tuple(about["seeds"]))
    say(f"{oracle.name}: samples of its own, for the floor of PPL_oracle")
    floor = Generation(oracle, plan, out).run(publish=False)
    found, of_floor = (
        continuations_under(oracle, records, tokenizer).estimate(sampled.clusters)
        for records, tokenizer in ((sampled.records, about["tokenizer"]), (floor, oracle.tokenizer_digest))
    )
    estimates["nats_per_token"] = found
    return {
        "oracle": {"path": wanted.oracle, "weights": oracle.digest},
        "ppl_oracle": _perplexity(found, sampled.unit),
        "ppl_oracle_floor": _perplexity(of_floor, sampled.unit),
    }


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
        pairs = [(start, rest) for start, rest in pairs]
    return likelihood.continuations(model, pairs)


def _recall(sampled: Sampled, wanted: Wanted, human: list[str]) -> dict[str, Any]:
    """PPL_test, and cross-entropies against the reference model."""
    model = EvaluatedModel(sampled.about["path"], dtype=wanted.dtype)
    if model.digest != sampled.about["weights"]:
        raise UserError(
            f"{model.given} has other weights than those that wrote {sampled.directory}; generate again"
        )
    found = likelihood.texts(model, human)
    nats = found.estimate(range(len(human)))
    perplexity = _perplexity(nats, "texts")["perplexity"]
    result: dict[str, Any] = {
        "ppl_test": {
            "nats_per_token": nats.value,
            "perplexity": perplexity["mean"],
            "interval": perplexity,
            "tokens": int(found.tokens.sum()),
            "texts": len(human),
        }
    }
    if wanted.reference:
        result["cross_entropy"] = _cross_entropy(model, wanted, human)
    return result


def _cross_entropy(model: EvaluatedModel, wanted: Wanted, human: list[str]) -> dict[str, Any]:
    assert wanted.reference is not None
    reference = EvaluatedModel(wanted.reference, dtype=wanted.dtype)
    if reference.tokenizer_digest != model.tokenizer_digest:
        raise UserError(
            f"--reference {wanted.reference} has another tokenizer than {model.given}; their next-token "
            "distributions cannot be compared"
        )
    limit = min(context_of(model) or 1 << 30, context_of(reference) or 1 << 30)
    rows = [[*start, *rest][:limit] for start, rest in (split_ids(model.tokenizer, "", t) for t in human)]
    rows = [row for row in rows if len(row) > 1]
    found = likelihood.side_by_side(reference.model, model.model, rows, likelihood.cross_entropies)
    intervals = {
        way: shown(ratio(found[f"{way}_ce"].tolist(), None, range(len(rows))), "texts")
        for way in ("forward", "reverse")
    }
    return {
        "forward": intervals["forward"]["mean"],
        "reverse": intervals["reverse"]["mean"],
        "intervals": intervals,
        "reference": {"path": wanted.reference, "weights": reference.digest},
        "texts": len(rows),
    }


def _not_a_number(value: Any, name: str = "") -> str | None:
    """The name of the first value that is not finite."""
    if isinstance(value, dict):
        found = (_not_a_number(v, f"{name}.{k}".lstrip(".")) for k, v in value.items())
    elif isinstance(value, list):
        found = (_not_a_number(v, name) for v in value)
    else:
        return name if isinstance(value, float) and not math.isfinite(value) else None
    return next((bad for bad in found if bad), None)


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a table: one row per set of texts, one column per measure that any of them has."""
    return _table("texts of", [(_title(result), _cells(result)) for result in results])


def _title(result: dict[str, Any]) -> str:
    of = result["of"]
    return f"{of['model']} {of['corpus']}-{of['decoding']['name']}"


def _table(head: str, rows: Sequence[tuple[str, dict[str, str]]]) -> list[str]:
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    lines = [[head, *names]] + [[title, *(row.get(n, "") for n in names)] for title, row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]


def _cells(result: dict[str, Any]) -> dict[str, str]:
    cells: dict[str, str] = {}
    if "mauve" in result:
        found = result["mauve"]
        cells |= {
            "MAUVE": _show(found["score"]),
            "half": _show(found["half"]),
            "ceiling": f"{found['ceiling']:.3f}",
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
