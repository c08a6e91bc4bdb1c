"""How good sampled texts are: one record of every measure, with intervals over seeds.

    closeness     MAUVE beside its ceiling; ROUGE-1 and ROUGE-L with the human continuation
    precision     PPL_oracle: the oracle's perplexity of the samples, beside its perplexity of its own (floor)
    recall        PPL_test: the model's perplexity of the human texts
    both          forward and reverse cross-entropy per token against a reference model, on the human texts
    text          distinct n-grams, repetition, length; the same of the human texts

PPL_oracle counts continuations only. Cross-entropies are averaged over the tokens of a text, then over
texts.
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
from eval.stats import student

PROTOCOLS = ("paper", "released")
QUALITY = "quality.json"
VERSION = 1

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


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean with Student's interval over seeds: none for a single seed."""
    found = student(values)
    low, high = (found.low, found.high) if found else (None, None)
    mean = float(np.mean(values))
    return {"mean": mean, "low": low, "high": high, "n": len(values), "values": list(map(float, values))}


def by_seed(seeds: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    """The interval over seeds of values that are first averaged within each seed."""
    return interval([float(np.mean([v for s, v in zip(seeds, values, strict=True) if s == seed]))
                     for seed in dict.fromkeys(seeds)])  # fmt: skip


def measure(sampled: Sampled, wanted: Wanted, out: Path, say: Say) -> dict[str, Any]:
    """Every measure that was asked for and that the records allow; written to DIRECTORY/quality.json."""
    if (wanted.mauve or wanted.protocol == "released") and not sampled.has_humans:
        raise UserError(
            f"{sampled.directory}: no human continuations to compare with; generate with --corpus"
        )
    if wanted.mauve:
        closeness.require_texts(len(sampled.humans), len(sampled.humans))
    about = sampled.about
    result: dict[str, Any] = {"version": VERSION, "protocol": wanted.protocol, "of": about}
    result |= _texts(sampled, wanted)
    if wanted.mauve:
        result["mauve"] = _mauve(sampled, wanted)
    if sampled.has_humans:
        result["rouge"] = _rouge(sampled, wanted)
    if wanted.oracle:
        result |= _oracle(sampled, wanted, out, say)
    human = wanted.test or (
        [r["prefix"] + r["reference"] for r in sampled.humans] if sampled.has_humans else None
    )
    if human:
        result |= _recall(sampled, wanted, human)
    elif wanted.reference:
        raise UserError("--reference needs human texts: generate with --corpus, or give --test FILE")
    if (bad := _not_a_number(result)) is not None:
        raise UserError(f"{sampled.directory}: {bad} is not a number; nothing is reported")
    store.replace(sampled.directory / QUALITY, store.dump(result))
    return result


def _texts(sampled: Sampled, wanted: Wanted) -> dict[str, Any]:
    """Variety, repetition and length of each draw; of the human texts too."""
    draws = sampled.draws()
    seeds = [seed for seed, _ in draws]
    found: list[dict[str, float]] = [
        text_metrics.variety([r["text"] for r in records])
        | {
            "tokens": float(np.mean([r["tokens"] for r in records])),
            "ended": float(np.mean([r["ended"] for r in records])),
        }
        for _, records in draws
    ]
    result: dict[str, Any] = {"text": {name: by_seed(seeds, [f[name] for f in found]) for name in found[0]}}
    if sampled.has_humans:
        result["human_text"] = text_metrics.variety([r["human"] for r in sampled.humans])
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


def _rouge(sampled: Sampled, wanted: Wanted) -> dict[str, Any]:
    draws = sampled.draws()
    scores = [text_metrics.rouge(*_pairs(sampled, records, wanted.protocol)) for _, records in draws]
    return {
        name: by_seed([seed for seed, _ in draws], [s[name] for s in scores]) for name in text_metrics.ROUGE
    }


def _oracle(sampled: Sampled, wanted: Wanted, out: Path, say: Say) -> dict[str, Any]:
    """PPL_oracle of the samples, and of as many samples of the oracle's own after the same prefixes."""
    assert wanted.oracle is not None
    oracle = EvaluatedModel(wanted.oracle, dtype=wanted.dtype)
    about = sampled.about
    prefixes = Prefixes(about["corpus"], [r["prefix"] for r in sampled.humans], None)
    plan = Plan(prefixes, Decoding(), about["tokens"], about["samples"], tuple(about["seeds"]))
    say(f"{oracle.name}: samples of its own, for the floor of PPL_oracle")
    own = Generation(oracle, plan, out).run(publish=False)
    return {
        "oracle": {"path": wanted.oracle, "weights": oracle.digest},
        "ppl_oracle": _perplexity(oracle, sampled.records, about["tokenizer"]),
        "ppl_oracle_floor": _perplexity(oracle, own, oracle.tokenizer_digest),
    }


def _perplexity(oracle: EvaluatedModel, records: list[Record], tokenizer: str) -> dict[str, Any]:
    """Nats per token and perplexity of continuations under the oracle, with intervals over seeds."""
    found = continuations_under(oracle, records, tokenizer)
    seeds = np.array([r["seed"] for r in records])
    parts = [
        Likelihood(found.nll[seeds == s], found.tokens[seeds == s]) for s in dict.fromkeys(seeds.tolist())
    ]
    return {
        "nats_per_token": interval([part.per_token for part in parts]),
        "perplexity": interval([part.perplexity for part in parts]),
        "tokens": int(found.tokens.sum()),
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
    result: dict[str, Any] = {
        "ppl_test": {
            "nats_per_token": found.per_token,
            "perplexity": found.perplexity,
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
    return {
        "forward": float(found["forward_ce"].mean()),
        "reverse": float(found["reverse_ce"].mean()),
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
    """Lines of a table: one row per set of texts, one column per measure that any of them has."""
    rows = [_cells(result) for result in results]
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [["texts of", *names]]
    for result, row in zip(results, rows, strict=True):
        of = result["of"]
        lines.append(
            [f"{of['model']} {of['corpus']}-{of['decoding']['name']}", *(row.get(n, "") for n in names)]
        )
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
        cells["PPL_test"] = f"{result['ppl_test']['perplexity']:.2f}"
    if "cross_entropy" in result:
        cells |= {f"{way} CE": f"{result['cross_entropy'][way]:.4f}" for way in ("forward", "reverse")}
    shown = ("distinct_2", "repetition_4", "tokens")
    return cells | {name: _show(result["text"][name]) for name in shown}


def _show(value: dict[str, Any], digits: int = 3) -> str:
    if value["low"] is None:
        return f"{value['mean']:.{digits}f}"
    return f"{value['mean']:.{digits}f} ± {value['high'] - value['mean']:.{digits}f}"
