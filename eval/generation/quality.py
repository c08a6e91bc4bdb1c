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

import json
import math
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from emo.common.errors import UserError
from emo.eval import store
from emo.eval.generation import likelihood
from emo.eval.generation.decoding import Decoding, context_of, first_id, split_ids
from emo.eval.generation.prefixes import Prefixes
from emo.eval.generation.records import Generation, Plan, Record, read_records
from emo.eval.model import EvaluatedModel
from emo.eval.stats import Estimate, Interval, ratio, student

ROUGE, WAYS = ("rouge1", "rougeL"), ("forward", "reverse")
QUALITY = "quality.json"
FEW = 20  # units below which a reader is told how many there were: Student's interval trusts the bell curve
VERSION = 2
MIN_TEXTS = 100  # of MAUVE: halves of 50 make five clusters; with fewer the score says nothing
MAX_TOKENS = 256  # of a text that MAUVE's features are taken of, as in the paper
MAUVE: dict[str, Any] = {"mauve_scaling_factor": 5, "seed": 25}  # the paper's settings
MAUVE |= {"kmeans_num_redo": 5, "kmeans_max_iter": 500, "kmeans_explained_var": 0.9}
BATCH = 16  # texts

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """The measures beside the text metrics; None leaves a measure out."""

    oracle: str | None = None
    reference: str | None = None
    mauve: str | None = None  # a featurizer's name
    test: list[str] | None = None  # texts for PPL_test; None: the human texts of the records
    protocol: str = "paper"
    dtype: str = "auto"


class Sampled:
    """Records of one model, corpus and decoding, as `generate` left them in a directory.

    humans: one record per prefix, in order. draws: (seed, one text per prefix) for every seed and sample
    number. clusters: what intervals are over, `unit` in words: prefixes, or texts where all have the same.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.about, self.records = read_records(directory)
        numbers = [record["prefix_number"] for record in self.records]
        self.humans = list({r["prefix_number"]: r for r in reversed(self.records)}.values())[::-1]
        several = len(self.humans) > 1
        self.unit = "prefixes" if several else "texts"
        self.clusters = numbers if several else list(range(len(numbers)))
        self.has_humans = "reference" in self.records[0]
        texts: dict[tuple[int, int], list[Record]] = {}
        for record in self.records:
            texts.setdefault((record["seed"], record["sample"]), []).append(record)
        self.draws = [(seed, records) for (seed, _), records in texts.items()]
        self.title = f"{self.about['model']} {self.about['corpus']}-{self.about['decoding']['name']}"


@dataclass(frozen=True)
class Measured:
    """The measures of a set of texts, and those of them that have a value for every prefix."""

    sampled: Sampled
    result: dict[str, Any]
    estimates: dict[str, Estimate]


def measure(sampled: Sampled, request: Wanted, out: Path, say: Say) -> Measured:
    """Return every measure that was asked for and that the records allow."""
    if (request.mauve or request.protocol == "released") and not sampled.has_humans:
        raise UserError(
            f"{sampled.directory}: no human continuations to compare with; generate with --corpus"
        )
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
    try:
        json.dumps(result, allow_nan=False)
    except ValueError:
        raise UserError(f"{sampled.directory}: a measure is not a number; nothing is reported") from None
    return Measured(sampled, result, estimates)


def compared(first: Measured, other: Measured) -> dict[str, Any] | str:
    """Return differences other - first on the same prefixes by measure, or why there are none."""
    a, b = first.sampled.about, other.sampled.about
    prefixes = [[record["prefix"] for record in x.sampled.humans] for x in (first, other)]
    if prefixes[0] != prefixes[1]:
        return "their prefixes are not the same"
    if len(prefixes[0]) < 2:
        return "there is one prefix only"
    for name in ("tokens", "samples"):
        if a[name] != b[name]:
            return f"--{name} is {a[name]} and {b[name]}"
    names = [name for name in first.estimates if name in other.estimates]
    if a["tokenizer"] != b["tokenizer"]:
        names = [name for name in names if name not in ("tokens", "nats_per_token")]
    return {name: shown(other.estimates[name] - first.estimates[name], "prefixes") for name in names}


def write(measured: Sequence[Measured]) -> list[str]:
    """Write quality.json beside every set of texts; return the lines that tell all of them.

    The others are compared with the first.
    """
    lines = _table("texts of", [(current.sampled.title, _cells(current.result)) for current in measured])
    rows = []
    for number, current in enumerate(measured):
        title, result = current.sampled.title, current.result
        if number:
            differences = compared(measured[0], current)
            result = result | {"baseline": measured[0].sampled.about, "differences": differences}
            if isinstance(differences, str):
                lines.append(f"{title} is not compared with the first: {differences}")
            else:
                rows.append((title, {name: _cell(v, sign="+") for name, v in differences.items()}))
        store.replace(current.sampled.directory / QUALITY, store.dump(result))
    return lines + (_table("less the first, paired by prefix", rows) if rows else [])


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


def distinct(texts: Sequence[str], n: int) -> float:
    """Return the different n-grams of all texts together by the number of n-grams; 0 when there are none.

    It falls with the amount of text: compare equal numbers of texts of equal length only.
    """
    counts = Counter(gram for text in texts for gram in _ngrams(text, n))
    return len(counts) / counts.total() if counts else 0.0


def repetition(text: str, n: int) -> float | None:
    """Return the share of a text's n-grams that it has had before; None where it has no n-gram."""
    grams = _ngrams(text, n)
    return 1 - len(set(grams)) / len(grams) if grams else None


def _ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    words = text.split()
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def rouge(texts: Sequence[str], references: Sequence[str]) -> dict[str, list[float]]:
    """Return F-measures of ROUGE-1 and ROUGE-L of every pair, as rouge-score computes them; from 0 to 1."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE))
    scores = [scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)]
    return {name: [float(score[name].fmeasure) for score in scores] for name in ROUGE}


def _texts(sampled: Sampled) -> tuple[dict[str, Any], dict[str, Estimate]]:
    """Return (variety, repetition and length; of the human texts too; the estimates among them by name)."""
    records, clusters = sampled.records, sampled.clusters
    columns = {name: [float(record[name]) for record in records] for name in ("tokens", "ended")}
    columns["words"] = [len(record["text"].split()) for record in records]
    estimates = {name: ratio(values, None, clusters) for name, values in columns.items()}
    for n in (2, 3, 4):
        shares = [repetition(record["text"], n) for record in records]
        weights = [float(share is not None) for share in shares]
        if any(weights):
            estimates[f"repetition_{n}"] = ratio([share or 0.0 for share in shares], weights, clusters)
    seeds, draws = [s for s, _ in sampled.draws], [[r["text"] for r in part] for _, part in sampled.draws]
    text = {f"distinct_{n}": by_seed(seeds, [distinct(texts, n) for texts in draws]) for n in (1, 2, 3)}
    result: dict[str, Any] = {"text": text | {k: shown(e, sampled.unit) for k, e in estimates.items()}}
    if sampled.has_humans:
        humans = [record["human"] for record in sampled.humans]
        result["human_text"] = {f"distinct_{n}": distinct(humans, n) for n in (1, 2, 3)}
        for n in (2, 3, 4):
            counted = [share for human in humans if (share := repetition(human, n)) is not None]
            result["human_text"][f"repetition_{n}"] = float(np.mean(counted)) if counted else 0.0
        result["human_text"]["words"] = float(np.mean([len(human.split()) for human in humans]))
    return result, estimates


def pair(record: Record, protocol: str, words: int, tokens: int) -> tuple[str, str]:
    """Return (sampled text, human text) as they are compared.

    paper: continuations only, the human one cut to as many tokens. released: as the authors' scripts do,
    with the prefix on both sides, a second space before the sampled continuation, and the human text cut to
    as many *words* as the model may write tokens.
    """
    if protocol == "paper":
        return record["text"].strip(), record["human"].strip()
    human = (record["prefix"] + record["reference"]).split()
    return f"{record['prefix']} {record['text']}", " ".join(human[: words + tokens])


def _pairs(sampled: Sampled, records: list[Record], protocol: str) -> tuple[list[str], list[str]]:
    about = sampled.about
    both = [pair(record, protocol, about["prefix_words"], about["tokens"]) for record in records]
    return [text for text, _ in both], [human for _, human in both]


def _mauve(sampled: Sampled, name: str, request: Wanted) -> dict[str, Any]:
    """Return MAUVE of every draw beside its ceiling. The score depends on the number of texts."""
    if len(sampled.humans) < MIN_TEXTS:
        raise UserError(
            f"MAUVE needs at least {MIN_TEXTS} human and {MIN_TEXTS} sampled texts for its clusters; there "
            f"are {len(sampled.humans)}; take more prefixes, or leave out --mauve"
        )
    features = featurizer(name, request.dtype)
    human = features(_pairs(sampled, sampled.draws[0][1], request.protocol)[1])
    texts = [features(_pairs(sampled, records, request.protocol)[0]) for _, records in sampled.draws]
    result, seeds = beside_ceiling(human, texts), [seed for seed, _ in sampled.draws]
    averaged = {name: by_seed(seeds, result[name]) for name in ("score", "half")}
    return result | averaged | {"featurizer": name}


def featurizer(name: str, dtype: str = "auto") -> Callable[[Sequence[str]], np.ndarray]:
    """Return what makes one vector of a text: a sentence encoder, or a language model's last hidden state.

    name: `minilm` or a sentence model's directory or id (topical), else a language model's (closer to the
    paper's GPT-2-large).
    """
    if (
        name == "minilm"
        or name.startswith("sentence-transformers/")
        or (Path(name) / "modules.json").is_file()
    ):
        from emo.eval.icl.encoder import Encoder

        return Encoder(name)
    model = EvaluatedModel(name, dtype=dtype)
    return lambda texts: _hidden_states(model, texts)


@torch.inference_mode()
def _hidden_states(model: Any, texts: Sequence[str]) -> np.ndarray:
    """Return the last layer's state at the last of MAX_TOKENS tokens of every text: float32 [n, H]."""
    device, tokenizer = model.model.device, model.tokenizer
    rows = [list(tokenizer(text).input_ids)[:MAX_TOKENS] or [first_id(tokenizer) or 0] for text in texts]
    states = np.empty((len(rows), model.model.config.get_text_config().hidden_size), dtype=np.float32)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for part in (order[i : i + BATCH] for i in range(0, len(order), BATCH)):
        width = len(rows[part[-1]])
        ids = torch.tensor([rows[i] + [0] * (width - len(rows[i])) for i in part], device=device)
        lengths = torch.tensor([len(rows[i]) for i in part], device=device)
        mask = (torch.arange(width, device=device) < lengths[:, None]).long()
        out = model.model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        states[part] = out[torch.arange(len(part)), lengths - 1].float().cpu().numpy()
    if not np.isfinite(states).all():
        raise UserError(f"{model.given}: hidden states that are not numbers (NaN or infinite weights?)")
    return states


def beside_ceiling(human: np.ndarray, sampled: Sequence[np.ndarray], splits: int = 5) -> dict[str, Any]:
    """Return MAUVE of each set of samples, and at half the size of both sides beside the ceiling.

    human: features [n, d]; sampled: sets of [n, d] that continue the same prefixes. `half` compares one half
    of the human texts with the samples after the other half's prefixes, `ceiling` compares the two halves.
    """
    n, halves = len(human), []
    for seed in range(splits):
        order = np.random.default_rng(seed).permutation(n)
        halves.append((order[: n // 2], order[n // 2 : n // 2 * 2]))
    ceiling = [mauve(human[a], human[b]) for a, b in halves]
    half = [float(np.mean([mauve(human[a], f[b]) for a, b in halves])) for f in sampled]
    result = {"score": [mauve(human, features) for features in sampled], "half": half, "texts": n}
    return result | {"ceiling": float(np.mean(ceiling)), "ceiling_std": float(np.std(ceiling, ddof=1))}


def mauve(human: np.ndarray, sampled: np.ndarray) -> float:
    """Return MAUVE of two sets of features [n, d]: from 0 to 1, 1 for equal ones."""
    import mauve as package  # GPL-3.0, therefore an extra

    sys.stderr.flush()
    stderr, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)  # faiss warns there that clusters are small, which is how MAUVE wants them
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(package.compute_mauve(p_features=human, q_features=sampled, **MAUVE).mauve)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nothing)


def _oracle(sampled: Sampled, path: str, dtype: str, out: Path, say: Say) -> tuple[dict[str, Any], Estimate]:
    """Return PPL_oracle of the samples and of as many of the oracle's own after the same prefixes.

    Continuations are scored by their very tokens where the tokenizer is the same, else by their text's.
    """
    oracle, about = EvaluatedModel(path, dtype=dtype), sampled.about
    prefixes = Prefixes(about["corpus"], [record["prefix"] for record in sampled.humans], None)
    plan = Plan(prefixes, Decoding(), about["tokens"], about["samples"], tuple(about["seeds"]))
    say(f"{oracle.name}: samples of its own, for the floor of PPL_oracle")
    floor = Generation(oracle, plan, out).run(publish=False)
    tokenizer, estimates = oracle.tokenizer, []
    starts = {p: split_ids(tokenizer, p, "" if p else "a")[0] for p in prefixes.texts}
    for records, wrote in ((sampled.records, about["tokenizer"]), (floor, oracle.tokenizer_digest)):
        if wrote == oracle.tokenizer_digest:
            pairs = [(starts[record["prefix"]], record["ids"]) for record in records]
        else:
            pairs = [split_ids(tokenizer, record["prefix"], record["text"]) for record in records]
        estimates.append(likelihood.continuations(oracle, pairs).estimate(sampled.clusters))
    of_samples, of_floor = (_perplexity(nats, sampled.unit) for nats in estimates)
    result = {"oracle": {"path": path, "weights": oracle.digest}, "ppl_oracle": of_samples}
    return result | {"ppl_oracle_floor": of_floor}, estimates[0]


def _perplexity(nats: Estimate, unit: str) -> dict[str, Any]:
    perplexity = shown(nats, unit, lambda value: math.exp(min(value, 700.0)))
    return {"nats_per_token": shown(nats, unit), "perplexity": perplexity}


def _recall(sampled: Sampled, request: Wanted, human: list[str]) -> dict[str, Any]:
    """Return PPL_test, and cross-entropies against the reference model."""
    model = EvaluatedModel(sampled.about["path"], dtype=request.dtype)
    if model.digest != sampled.about["weights"]:
        raise UserError(
            f"{model.given} has other weights than those that wrote {sampled.directory}; generate again"
        )
    likelihoods = likelihood.texts(model, human)
    nats = likelihoods.estimate(range(len(human)))
    perplexity = _perplexity(nats, "texts")["perplexity"]
    counts = {"tokens": int(likelihoods.tokens.sum()), "texts": len(human)}
    shares = {"nats_per_token": nats.value, "perplexity": perplexity["mean"], "interval": perplexity}
    result: dict[str, Any] = {"ppl_test": shares | counts}
    if request.reference:
        reference = EvaluatedModel(request.reference, dtype=request.dtype)
        if reference.tokenizer_digest != model.tokenizer_digest:
            raise UserError(
                f"--reference {request.reference} has another tokenizer than {model.given}; their next-token "
                "distributions cannot be compared"
            )
        limit = min(context_of(model) or 1 << 30, context_of(reference) or 1 << 30)
        rows = [[*start, *ids][:limit] for start, ids in (split_ids(model.tokenizer, "", t) for t in human)]
        rows = [row for row in rows if len(row) > 1]
        means = likelihood.side_by_side(reference.model, model.model, rows, likelihood.cross_entropies)
        estimates = {way: ratio(means[f"{way}_ce"].tolist(), None, range(len(rows))) for way in WAYS}
        intervals = {way: shown(estimate, "texts") for way, estimate in estimates.items()}
        about = {"reference": {"path": request.reference, "weights": reference.digest}, "texts": len(rows)}
        of_ways = {way: interval["mean"] for way, interval in intervals.items()}
        result["cross_entropy"] = of_ways | {"intervals": intervals} | about
    return result


def _table(head: str, rows: Sequence[tuple[str, dict[str, str]]]) -> list[str]:
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    lines = [[head, *names]] + [[title, *(row.get(n, "") for n in names)] for title, row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]


def _cells(result: dict[str, Any]) -> dict[str, str]:
    cells: dict[str, str] = {}
    if mauve := result.get("mauve"):
        cells = {"MAUVE": _cell(mauve["score"]), "half": _cell(mauve["half"])}
        cells["ceiling"] = f"{mauve['ceiling']:.3f}"
    cells |= {name: _cell(value) for name, value in result.get("rouge", {}).items()}
    if "ppl_oracle" in result:
        cells["PPL_oracle"] = _cell(result["ppl_oracle"]["perplexity"], 2)
        cells["floor"] = _cell(result["ppl_oracle_floor"]["perplexity"], 2)
    if "ppl_test" in result:
        cells["PPL_test"] = _cell(result["ppl_test"]["interval"], 2)
    if "cross_entropy" in result:
        cells |= {f"{way} CE": _cell(value, 4) for way, value in result["cross_entropy"]["intervals"].items()}
    names = [name for name in ("distinct_2", "repetition_4", "tokens") if name in result["text"]]
    return cells | {name: _cell(result["text"][name]) for name in names}


def _cell(value: dict[str, Any], digits: int = 3, sign: str = "-") -> str:
    """Return a value with its interval, and over how few units that is; no interval where there is none."""
    text = f"{value['mean']:{sign}.{digits}f}"
    if value["low"] is None:
        return text
    few = f" ({value['n']} {value['unit']})" if value["n"] < FEW else ""
    return f"{text} [{value['low']:{sign}.{digits}f}, {value['high']:{sign}.{digits}f}]{few}"
