"""How good sampled texts are: one record of every measure with its interval, and paired differences.

    closeness     MAUVE beside its ceiling; ROUGE-1 and ROUGE-L with the human continuation
    precision     PPL_oracle: the oracle's perplexity of the samples, beside its own (floor) and human texts
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
from pathlib import Path
from typing import Any

import numpy as np
import torch

from emo.common.cli.progress import show_activity
from emo.common.errors import UserError
from emo.common.text import counted
from emo.data_prep.encoding.tokenizer import text_ids, tokenizer_fingerprint
from emo.data_prep.selection.grams import tokens, units

from ..model import EvaluatedModel
from ..results import store
from ..results.stats import Estimate, ratio
from . import likelihood
from .decoding import first_ids, prompt_ids, split_ids
from .engines import Transformers
from .prefixes import Prefixes
from .records import Generation, Record, read_records

QUALITY = "quality.json"
SHARES = ("ended", "rouge", "repetition", "distinct")  # how the names of measures from 0 to 1 begin
FEW = 20  # units below which a reader is told how many there were: Student's interval trusts the bell curve
VERSION = 3
MIN_TEXTS = 100  # of MAUVE: halves of 50 make five clusters; with fewer the score says nothing
MAX_TOKENS = 256  # of a text that MAUVE's features are taken of, as in the paper
MAUVE: dict[str, Any] = {"mauve_scaling_factor": 5, "seed": 25}  # the paper's settings
MAUVE |= {"kmeans_num_redo": 5, "kmeans_max_iter": 500, "kmeans_explained_var": 0.9}
KMEANS = 5  # seeds of the clusters that a score is also taken with
BATCH = 16  # texts


class Sampled:
    """The texts of one model, corpus and decoding that `generate` left in a directory, and their measures.

    humans: one record per prefix, in order. draws: one text per prefix for every one of `seeds` and sample
    number. clusters: what intervals are over, `unit` in words: prefixes, or texts where all have the same.
    result: every measure that was asked for; estimates: those of them that have a value for every cluster.
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
        draws: dict[tuple[int, int], list[Record]] = {}
        for record in self.records:
            draws.setdefault((record["seed"], record["sample"]), []).append(record)
        self.seeds, self.draws = [seed for seed, _ in draws], list(draws.values())
        self.title = f"{self.about['model']} {self.about['corpus']}-{self.about['decoding']['name']}"
        self.result: dict[str, Any] = {"version": VERSION, "of": self.about}
        self.estimates: dict[str, Estimate] = {}

    def measure(
        self, out: Path, say: Callable[[str], None], oracle: str | None = None, reference: str | None = None,
        mauve: str | None = None, test: list[str] | None = None, protocol: str = "paper", dtype: str = "auto",
    ) -> None:  # fmt: skip
        """Take every measure that the records allow; None leaves one out.

        out: for the oracle's texts; mauve: a featurizer; test: texts for PPL_test (the records' human ones).
        """
        if (mauve or protocol == "released") and not self.has_humans:
            raise UserError(
                f"{self.directory}: no human continuations to compare with; generate with --corpus"
            )
        if test is None and self.has_humans:
            test = [record["prefix"] + record["reference"] for record in self.humans]
        if reference and not test:
            raise UserError("--reference needs human texts: generate with --corpus, or give --test FILE")
        self.result["protocol"] = protocol
        self._text()
        if mauve:
            features = featurizer(mauve, dtype)
            with show_activity(f"{self.title}: MAUVE"):
                self._mauve(features, protocol)
            self.result["mauve"]["featurizer"] = mauve
        if self.has_humans:
            overlaps = rouge([self._pair(record, protocol) for record in self.records])
            estimates = {name: ratio(values, None, self.clusters) for name, values in overlaps.items()}
            self.result["rouge"] = self._shown(estimates)
        if oracle:
            self._oracle(EvaluatedModel(oracle, dtype=dtype), out, say)
        if test:
            self._recall(test, EvaluatedModel(reference, dtype=dtype) if reference else None, dtype)
        try:
            json.dumps(self.result, allow_nan=False)
        except ValueError:
            raise UserError(f"{self.directory}: a measure is not a number; nothing is reported") from None

    def _shown(self, estimates: dict[str, Estimate]) -> dict[str, Any]:
        """Return estimates with their intervals; they are kept for comparisons."""
        self.estimates |= estimates
        return {name: shown(e, self.unit, most=largest(name)) for name, e in estimates.items()}

    def _text(self) -> None:
        """Take variety, repetition and length; of the human texts too."""
        records, clusters = self.records, self.clusters
        columns = {name: [float(record[name]) for record in records] for name in ("tokens", "ended")}
        columns["words"] = [len(units(record["text"])) for record in records]
        estimates = {name: ratio(values, None, clusters) for name, values in columns.items()}
        for n in (2, 3, 4):
            shares = [repetition(record["text"], n) for record in records]
            weights = [float(share is not None) for share in shares]
            if any(weights):
                estimates[f"repetition_{n}"] = ratio([share or 0.0 for share in shares], weights, clusters)
        texts = [[record["text"] for record in draw] for draw in self.draws]
        variety = {f"distinct_{n}": by_seed(self.seeds, [distinct(t, n) for t in texts]) for n in (1, 2, 3)}
        self.result["text"] = variety | self._shown(estimates)
        if self.has_humans:
            humans = [record["human"] for record in self.humans]
            of_humans = {f"distinct_{n}": distinct(humans, n) for n in (1, 2, 3)}
            for n in (2, 3, 4):
                counted = [share for human in humans if (share := repetition(human, n)) is not None]
                of_humans[f"repetition_{n}"] = float(np.mean(counted)) if counted else 0.0
            of_humans["words"] = float(np.mean([len(units(human)) for human in humans]))
            self.result["human_text"] = of_humans

    def _pair(self, record: Record, protocol: str) -> tuple[str, str]:
        return pair(record, protocol, self.about["prefix_words"], self.about["tokens"])

    def _mauve(self, features: Callable[[Sequence[str]], np.ndarray], protocol: str) -> None:
        """Take MAUVE of every draw beside its ceiling. The score depends on the number of texts."""
        if len(self.humans) < MIN_TEXTS:
            raise UserError(
                f"MAUVE needs at least {MIN_TEXTS} human and as many sampled texts for its clusters; there "
                f"are {len(self.humans)}; take more prefixes, or leave out --mauve"
            )
        pairs = [[self._pair(record, protocol) for record in records] for records in self.draws]
        human = features([human for _, human in pairs[0]])
        result = beside_ceiling(human, [features([text for text, _ in draw]) for draw in pairs])
        self.result["mauve"] = result | {key: by_seed(self.seeds, result[key]) for key in ("score", "half")}

    def _oracle(self, oracle: EvaluatedModel, out: Path, say: Callable[[str], None]) -> None:
        """Take PPL_oracle of the samples, of as many of the oracle's own, and of the human texts.

        Continuations are scored by their very tokens where the tokenizer is the same, else by their text's.
        """
        about, tokenizer, same = self.about, oracle.tokenizer, oracle.tokenizer_digest
        prefixes = Prefixes(about["corpus"], [record["prefix"] for record in self.humans])
        size = (about["tokens"], about["samples"], tuple(about["seeds"]))
        say(f"{oracle.name}: samples of its own, for the floor of PPL_oracle")
        floor = Generation(Transformers(oracle), prefixes, *size, out).run()
        starts = {text: prompt_ids(oracle, text) for text in prefixes.texts}
        estimates = {}
        for name, records, wrote in (("", self.records, about["tokenizer"]), ("_floor", floor, same)):
            if wrote == same:
                pairs = [(starts[record["prefix"]], record["ids"]) for record in records]
            else:
                pairs = [split_ids(tokenizer, record["prefix"], record["text"]) for record in records]
            estimates[f"ppl_oracle{name}"] = likelihood.continuations(oracle, pairs).estimate(self.clusters)
        if self.has_humans:
            pairs = [split_ids(tokenizer, record["prefix"], record["human"]) for record in self.humans]
            of_humans = likelihood.continuations(oracle, pairs)
            estimates["ppl_oracle_human"] = of_humans.estimate(range(len(pairs)))
        self.estimates["nats_per_token"] = estimates["ppl_oracle"]
        self.result["oracle"] = {"path": oracle.given, "weights": oracle.digest}
        for name, nats in estimates.items():
            self.result[name] = {"nats_per_token": shown(nats, self.unit)}
            self.result[name]["perplexity"] = shown(nats, self.unit, perplexity)

    def _recall(self, human: list[str], reference: EvaluatedModel | None, dtype: str) -> None:
        """Take PPL_test, and cross-entropies against the reference model."""
        model = EvaluatedModel(self.about["path"], dtype=dtype)
        if model.digest != self.about["weights"]:
            raise UserError(
                f"{model.given} has other weights than those that wrote {self.directory}; generate again"
            )
        likelihoods = likelihood.texts(model, human)
        nats = likelihoods.estimate(range(len(human)))
        interval = shown(nats, "texts", perplexity)
        test = {"nats_per_token": nats.value, "perplexity": interval["mean"], "interval": interval}
        test |= {"tokens": int(likelihoods.tokens.sum()), "texts": len(human)}
        self.result["ppl_test"] = test
        if reference is None:
            return
        # A tuned model may name another end than its base.
        if len({tokenizer_fingerprint(m.tokenizer, None) for m in (reference, model)}) > 1:
            raise UserError(
                f"--reference {reference.given} has another tokenizer than {model.given}; their next-token "
                "distributions cannot be compared"
            )
        limit = min(model.context or 1 << 30, reference.context or 1 << 30)
        rows = [row for t in human if len(row := text_ids(model.tokenizer, t)[:limit]) > 1]
        models = reference.model, model.model
        with show_activity(f"{self.title}: cross-entropies of {counted(len(rows), 'text')}"):
            both = likelihood.side_by_side(*models, rows)
        intervals = {
            way: shown(ratio(values.tolist(), None, range(len(rows))), "texts")
            for way, values in zip(("forward", "reverse"), both, strict=True)
        }
        about = {"path": reference.given, "weights": reference.digest}
        result = {"intervals": intervals, "reference": about, "texts": len(rows)}
        result |= {way: interval["mean"] for way, interval in intervals.items()}
        self.result["cross_entropy"] = result

    def compared(self, other: Sampled) -> dict[str, Any] | str:
        """Return differences other - this on the same prefixes by measure, or why there are none."""
        a, b = self.about, other.about
        prefixes = [[record["prefix"] for record in x.humans] for x in (self, other)]
        if prefixes[0] != prefixes[1]:
            return "their prefixes are not the same"
        if len(prefixes[0]) < 2:
            return "there is one prefix only"
        for name in ("tokens", "samples"):
            if a[name] != b[name]:
                return f"--{name} is {a[name]} and {b[name]}"
        uneven = () if a["tokenizer"] == b["tokenizer"] else ("tokens", "nats_per_token")
        names = [name for name in self.estimates if name in other.estimates and name not in uneven]
        differences = {name: other.estimates[name] - self.estimates[name] for name in names}
        return {
            name: shown(difference, "prefixes", least=-largest(name), most=largest(name))
            for name, difference in differences.items()
        }


def write(sampled: Sequence[Sampled]) -> list[str]:
    """Write quality.json beside every set of texts; return the lines that tell all of them.

    The others are compared with the first.
    """
    first, *others = sampled
    lines = _table("texts of", {texts.title: _cells(texts.result) for texts in sampled})
    rows = {}
    for texts in others:
        differences = first.compared(texts)
        texts.result |= {"baseline": first.about, "differences": differences}
        if isinstance(differences, str):
            lines.append(f"{texts.title} is not compared with the first: {differences}")
        else:
            rows[texts.title] = {name: _cell(value, sign="+") for name, value in differences.items()}
    for texts in sampled:
        store.replace(texts.directory / QUALITY, store.dump(texts.result))
    return lines + (_table("less the first, paired by prefix", rows) if rows else [])


def by_seed(seeds: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    """Return the mean of shares with Student's interval over seeds, none for a single one.

    Values of one seed are averaged first.
    """
    means = [
        float(np.mean([v for s, v in zip(seeds, values, strict=True) if s == seed]))
        for seed in dict.fromkeys(seeds)
    ]
    return shown(ratio(means, None, range(len(means))), "seeds", most=1.0)


def largest(name: str) -> float:
    """Return the largest value that a measure can have; the smallest is 0 for all of them."""
    return 1.0 if name.startswith(SHARES) else math.inf


def shown(
    estimate: Estimate,
    unit: str,
    transform: Callable[[float], float] = float,
    least: float = 0.0,
    most: float = math.inf,
) -> dict[str, Any]:
    """Return an estimate with its interval, none over a single unit.

    transform: applied to the value and to the limits. least, most: the range of the values, which limits the
    interval.
    """
    interval, n = estimate.interval(), len(estimate.parts)
    low = high = None
    if interval:
        low, high = (transform(min(max(x, least), most)) for x in (interval.low, interval.high))
    return {"mean": transform(estimate.value), "low": low, "high": high, "n": n, "unit": unit}


def perplexity(nats: float) -> float:
    """Return e^nats, finite."""
    return math.exp(min(nats, 700.0))


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
    words = units(text)
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def rouge(pairs: Sequence[tuple[str, str]]) -> dict[str, list[float]]:
    """Return F-measures of ROUGE-1 and ROUGE-L of pairs (text, reference) by rouge-score; from 0 to 1.

    rouge-score's own tokenizer knows the letters a to z alone. Words here are of any script, and characters
    count by themselves where words are written without spaces; of ASCII text the scores are rouge-score's.
    """
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import Tokenizer

    class Words(Tokenizer):
        def tokenize(self, text: str) -> list[str]:
            return tokens(text)

    names = ["rouge1", "rougeL"]
    scorer = RougeScorer(names, tokenizer=Words())
    scores = [scorer.score(reference, text) for text, reference in pairs]
    return {name: [float(score[name].fmeasure) for score in scores] for name in names}


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


def featurizer(name: str, dtype: str = "auto") -> Callable[[Sequence[str]], np.ndarray]:
    """Return what makes vectors [n, H] of texts: a sentence encoder, or a language model's last hidden state.

    name: `minilm` or a sentence model's directory or id (topical), else a language model's (closer to the
    paper's GPT-2-large), which counts at the last of at most MAX_TOKENS tokens.
    """
    is_sentence_model = name == "minilm" or name.startswith("sentence-transformers/")
    if is_sentence_model or (Path(name) / "modules.json").is_file():
        from ..icl.encoder import Encoder

        return Encoder(name)
    evaluated = EvaluatedModel(name, dtype=dtype)
    model, tokenizer = evaluated.model, evaluated.tokenizer

    @torch.inference_mode()
    def last_states(texts: Sequence[str]) -> np.ndarray:
        rows = [text_ids(tokenizer, text)[:MAX_TOKENS] or first_ids(tokenizer) or [0] for text in texts]
        states = np.empty((len(rows), model.config.get_text_config().hidden_size), dtype=np.float32)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        for part in (order[i : i + BATCH] for i in range(0, len(order), BATCH)):
            width = len(rows[part[-1]])
            ids = torch.tensor([rows[i] + [0] * (width - len(rows[i])) for i in part], device=model.device)
            lengths = torch.tensor([len(rows[i]) for i in part], device=model.device)
            mask = (torch.arange(width, device=model.device) < lengths[:, None]).long()
            out = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            states[part] = out[torch.arange(len(part)), lengths - 1].float().cpu().numpy()
        if not np.isfinite(states).all():
            raise UserError(f"{name}: hidden states that are not numbers (NaN or infinite weights?)")
        return states

    return last_states


def beside_ceiling(human: np.ndarray, sampled: Sequence[np.ndarray], splits: int = 5) -> dict[str, Any]:
    """Return MAUVE of each set of samples, and at half the size of both sides beside the ceiling.

    human: features [n, d]; sampled: sets of [n, d] that continue the same prefixes. `half` compares one half
    of the human texts with the samples after the other half's prefixes, `ceiling` compares the two halves.
    `kmeans`: the smallest and the largest score of the first set over KMEANS seeds of its clusters.
    """
    n = len(human)
    orders = [np.random.default_rng(seed).permutation(n) for seed in range(splits)]
    halves = [(order[: n // 2], order[n // 2 : n // 2 * 2]) for order in orders]
    ceiling = [mauve(human[a], human[b]) for a, b in halves]
    half = [float(np.mean([mauve(human[a], f[b]) for a, b in halves])) for f in sampled]
    scores = [mauve(human, features) for features in sampled]
    spread = [scores[0], *(mauve(human, sampled[0], MAUVE["seed"] + i) for i in range(1, KMEANS))]
    result: dict[str, Any] = {"score": scores, "half": half, "texts": n}
    result["kmeans"] = {"low": min(spread), "high": max(spread), "seeds": KMEANS}
    return result | {"ceiling": float(np.mean(ceiling)), "ceiling_std": float(np.std(ceiling, ddof=1))}


def mauve(human: np.ndarray, sampled: np.ndarray, seed: int = MAUVE["seed"]) -> float:
    """Return MAUVE of two sets of features [n, d]: from 0 to 1, 1 for equal ones. seed: of its clusters."""
    import mauve as package  # GPL-3.0, therefore an extra

    sys.stderr.flush()
    stderr, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)  # faiss warns there that clusters are small, which is how MAUVE wants them
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            settings = MAUVE | {"seed": seed}
            return float(package.compute_mauve(p_features=human, q_features=sampled, **settings).mauve)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nothing)


def _table(head: str, rows: dict[str, dict[str, str]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [[head, *names]] + [[title, *(row.get(n, "") for n in names)] for title, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]


def _cells(result: dict[str, Any]) -> dict[str, str]:
    cells: dict[str, str] = {}
    if mauve := result.get("mauve"):
        cells = {"MAUVE": _cell(mauve["score"]), "half": _cell(mauve["half"])}
        cells["ceiling"] = f"{mauve['ceiling']:.3f}"
        cells["over k-means seeds"] = f"{mauve['kmeans']['low']:.3f} to {mauve['kmeans']['high']:.3f}"
    cells |= {name: _cell(value) for name, value in result.get("rouge", {}).items()}
    if "ppl_oracle" in result:
        cells["PPL_oracle"] = _cell(result["ppl_oracle"]["perplexity"], 2)
        columns = {"floor": "ppl_oracle_floor", "human": "ppl_oracle_human"}
        cells |= {
            column: _cell(result[key]["perplexity"], 2) for column, key in columns.items() if key in result
        }
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
