"""Quality of sampled texts: every measure with its interval, and paired differences between models.

    closeness     MAUVE with its ceiling, ROUGE-1 and ROUGE-L with the human continuation
    precision     PPL_oracle: the oracle's perplexity of the samples, of its own samples (floor) and of human
    texts
    recall        PPL_test: the model's perplexity of the human texts
    both          forward and reverse cross-entropy per token between a reference model and the model
    text          distinct n-grams, repetition and length, also of the human texts

PPL_oracle covers continuations only. Cross-entropies are averaged over the tokens of a text, then over texts.
The unit of intervals is the prefix: all texts after it stay together, so two models are compared on the same
prefixes. Measures of sets of texts (MAUVE, distinct n-grams) have intervals over seeds only.
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
from typing import Any, TypedDict

import numpy as np
import torch

from emo.common.cli.progress import show_activity
from emo.common.errors import UserError
from emo.common.text import align, counted
from emo.data_prep.encoding.tokenizer import text_ids, tokenizer_fingerprint
from emo.data_prep.selection.similarity.grams import tokens, units

from ..models.encoder import Encoder
from ..models.model import EvaluatedModel
from ..results import store
from ..results.directory import Record
from ..results.stats import Estimate, ratio
from . import likelihood
from .decoding import first_ids, prompt_ids, split_ids
from .engines import Transformers
from .prefixes import Prefixes
from .records import Generation, read_generated

QUALITY = "quality.json"
SHARES = ("ended", "rouge", "repetition", "distinct")  # prefixes of the names of measures between 0 and 1
FEW = 20  # the table shows the number of units below this, where Student's interval relies on normality
VERSION = 4
MIN_TEXTS = 100  # for MAUVE: halves of 50 form five clusters
MAX_TOKENS = 256  # of a text that MAUVE embeds, as in the paper
MAUVE: dict[str, Any] = {"mauve_scaling_factor": 5, "seed": 25}  # the paper's settings
MAUVE |= {"kmeans_num_redo": 5, "kmeans_max_iter": 500, "kmeans_explained_var": 0.9}
KMEANS = 5  # seeds of the clusters for the spread of a score
BATCH = 16  # texts

Featurizer = Callable[[Sequence[str]], np.ndarray]  # texts to vectors [n, H]


@dataclass(frozen=True)
class QualityOptions:
    """Which measures are computed. A measure whose option is None is left out."""

    out: Path  # results directory, for the oracle's texts
    oracle: str | None = None
    reference: str | None = None
    mauve: str | None = None  # the featurizer
    test: list[str] | None = None  # texts for PPL_test. None: the human texts of the records.
    protocol: str = "paper"
    dtype: str = "auto"
    batch: int = 64  # of the oracle's samples


class Summary(TypedDict):
    """A mean with its interval, which is null for a single unit."""

    mean: float
    low: float | None
    high: float | None
    n: int
    unit: str


class Sampled:
    """The texts that `generate` left in a directory, for one model, corpus and decoding, with their measures.

    humans: one record per prefix, in order. draws: one text per prefix, for every seed and sample number.
    clusters: the unit of intervals of each record, called `unit`: its prefix, or the text if there is only
    one prefix. result: all requested measures. estimates: the measures with a value for every cluster.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.about, self.records = read_generated(directory)
        numbers = [record["prefix_number"] for record in self.records]
        self.humans = list({r["prefix_number"]: r for r in reversed(self.records)}.values())[::-1]
        several = len(self.humans) > 1
        self.unit = "prefixes" if several else "texts"
        self.clusters = numbers if several else list(range(len(numbers)))
        self.has_humans = "reference" in self.records[0]
        draws: dict[tuple[int, int], list[Record]] = {}
        for record in self.records:
            draws.setdefault((record["seed"], record["sample"]), []).append(record)
        self.seeds = [seed for seed, _ in draws]
        self.draws = list(draws.values())
        self.title = f"{self.about['model']} {self.about['corpus']}-{self.about['decoding']['name']}"
        self.result: dict[str, Any] = {"version": VERSION, "of": self.about}
        self.estimates: dict[str, Estimate] = {}

    def require_humans(self, options: QualityOptions) -> None:
        """Raise UserError if a requested measure needs human texts, and there are none."""
        if self.has_humans:
            return
        if options.mauve or options.protocol == "released":
            raise UserError(
                f"{self.directory} has no human continuations. Generate with --corpus or --prefix_words.",
                code="no-references",
            )
        if options.reference and not options.test:
            raise UserError(
                f"--reference needs human texts, but {self.directory} has none. Generate with --corpus, or "
                "set --test FILE.",
                code="no-references",
            )

    def measure(self, options: QualityOptions, say: Callable[[str], None]) -> None:
        """Compute the requested measures, as far as the records allow them."""
        protocol = options.protocol
        dtype = options.dtype
        test = options.test
        if test is None and self.has_humans:
            test = [record["prefix"] + record["reference"] for record in self.humans]
        self.result["protocol"] = protocol
        self._measure_text()
        if options.mauve:
            features = featurizer(options.mauve, dtype)
            with show_activity(f"{self.title}: MAUVE"):
                self._measure_mauve(features, protocol)
            self.result["mauve"]["featurizer"] = options.mauve
        if self.has_humans:
            overlaps = rouge([self._pair(record, protocol) for record in self.records])
            estimates = {name: ratio(values, None, self.clusters) for name, values in overlaps.items()}
            self.result["rouge"] = self._summarise(estimates)
        if options.oracle:
            self._measure_oracle(EvaluatedModel(options.oracle, dtype=dtype), options, say)
        if test:
            model = self._measure_ppl(test, dtype, say)
            if options.reference:
                self._measure_cross_entropy(test, model, EvaluatedModel(options.reference, dtype=dtype), say)
        try:
            json.dumps(self.result, allow_nan=False)
        except ValueError:
            raise UserError(
                f"{self.directory}: a measure is NaN or infinite. Nothing is reported.", code="not-finite"
            ) from None

    def _summarise(self, estimates: dict[str, Estimate]) -> dict[str, Summary]:
        """Return estimates with their intervals, and keep them for comparisons."""
        self.estimates |= estimates
        return {name: summarise(e, self.unit, high=maximum(name)) for name, e in estimates.items()}

    def _measure_text(self) -> None:
        """Measure variety, repetition and length, also of the human texts."""
        records = self.records
        clusters = self.clusters
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
        self.result["text"] = variety | self._summarise(estimates)
        if self.has_humans:
            self.result["human_text"] = _human_text([record["human"] for record in self.humans])

    def _pair(self, record: Record, protocol: str) -> tuple[str, str]:
        return pair(record, protocol, self.about["prefix_words"], self.about["tokens"])

    def _measure_mauve(self, features: Featurizer, protocol: str) -> None:
        """Measure MAUVE of every draw with its ceiling. The score depends on the number of texts."""
        if len(self.humans) < MIN_TEXTS:
            raise UserError(
                f"--mauve needs at least {MIN_TEXTS} prefixes for its clusters, but there are "
                f"{len(self.humans)}. Generate with more prefixes, or remove --mauve.",
                code="too-few-rows",
            )
        pairs = [[self._pair(record, protocol) for record in records] for records in self.draws]
        human = features([human for _, human in pairs[0]])
        result = mauve_with_ceiling(human, [features([text for text, _ in draw]) for draw in pairs])
        self.result["mauve"] = result | {key: by_seed(self.seeds, result[key]) for key in ("score", "half")}

    def _measure_oracle(
        self, oracle: EvaluatedModel, options: QualityOptions, say: Callable[[str], None]
    ) -> None:
        """Measure PPL_oracle of the samples, of equally many samples of the oracle, and of the human texts.

        Continuations are scored by their ids if the tokenizer is the same, else by the ids of their text,
        without the end token in both cases.
        """
        about = self.about
        tokenizer = oracle.tokenizer
        own = oracle.tokenizer_digest
        prefixes = Prefixes(about["corpus"], [record["prefix"] for record in self.humans])
        size = (about["tokens"], about["samples"], tuple(about["seeds"]))
        say(f"{oracle.name}: generating samples for the floor of PPL_oracle")
        engine = Transformers(oracle, batch=options.batch)
        floor = Generation(engine, prefixes, *size, options.out).run()
        starts = {text: prompt_ids(oracle, text) for text in prefixes.texts}
        estimates = {}
        for name, records, digest in (("", self.records, about["tokenizer"]), ("_floor", floor, own)):
            if digest == own:
                pairs = [(starts[r["prefix"]], r["ids"][:-1] if r["ended"] else r["ids"]) for r in records]
            else:
                pairs = [split_ids(tokenizer, record["prefix"], record["text"]) for record in records]
            estimates[f"ppl_oracle{name}"] = likelihood.continuations(oracle, pairs).estimate(self.clusters)
        if self.has_humans:
            pairs = [split_ids(tokenizer, record["prefix"], record["human"]) for record in self.humans]
            human = likelihood.continuations(oracle, pairs)
            estimates["ppl_oracle_human"] = human.estimate(range(len(pairs)))
        self.estimates["nats_per_token"] = estimates["ppl_oracle"]
        self.result["oracle"] = {"path": oracle.source, "weights": oracle.digest}
        for name, nats in estimates.items():
            self.result[name] = {"nats_per_token": summarise(nats, self.unit)}
            self.result[name]["perplexity"] = summarise(nats, self.unit, perplexity)

    def _measure_ppl(self, human: list[str], dtype: str, say: Callable[[str], None]) -> EvaluatedModel:
        """Measure PPL_test, and return the model that wrote the texts."""
        model = EvaluatedModel(self.about["path"], dtype=dtype)
        if model.digest != self.about["weights"]:
            raise UserError(
                f"{model.source} does not have the weights that generated {self.directory}. Generate again.",
                code="other-weights",
            )
        likelihoods = likelihood.score_texts(model, human)
        nats = likelihoods.estimate(range(len(human)))
        interval = summarise(nats, "texts", perplexity)
        test = {"nats_per_token": nats.value, "perplexity": interval["mean"], "interval": interval}
        if likelihoods.split:
            texts = counted(likelihoods.split, "text")
            say(f"{self.title}: {texts} of --test exceed the context and are scored in parts")
        counts = {"tokens": int(likelihoods.tokens.sum()), "texts": len(human), "split": likelihoods.split}
        self.result["ppl_test"] = test | counts
        return model

    def _measure_cross_entropy(
        self, human: list[str], model: EvaluatedModel, reference: EvaluatedModel, say: Callable[[str], None]
    ) -> None:
        # The fingerprint ignores the end token, which tuning may change.
        if len({tokenizer_fingerprint(m.tokenizer, None) for m in (reference, model)}) > 1:
            raise UserError(
                f"--reference {reference.source} and {model.source} have different tokenizers, so their "
                "next-token distributions cannot be compared",
                code="other-tokenizer",
            )
        limit = min(model.context or 1 << 30, reference.context or 1 << 30)
        full = [ids for text in human if len(ids := text_ids(model.tokenizer, text)) > 1]
        rows = [ids[:limit] for ids in full]
        if cut := sum(len(ids) > limit for ids in full):
            texts = counted(cut, "text")
            say(f"{self.title}: {texts} of --test are cut to {limit} tokens for the cross-entropies")
        models = reference.model, model.model
        with show_activity(f"{self.title}: cross-entropies of {counted(len(rows), 'text')}"):
            both = likelihood.mean_cross_entropies(*models, rows)
        intervals = {
            way: summarise(ratio(values.tolist(), None, range(len(rows))), "texts")
            for way, values in zip(("forward", "reverse"), both, strict=True)
        }
        about = {"path": reference.source, "weights": reference.digest}
        result = {"intervals": intervals, "reference": about, "texts": len(rows), "cut": cut}
        self.result["cross_entropy"] = result | {way: x["mean"] for way, x in intervals.items()}

    def write(self, say: Callable[[str], None]) -> None:
        """Write quality.json. Measures of an earlier command that were not requested now are kept."""
        path = self.directory / QUALITY
        before = store.read_json_or_none(path)
        if before is not None:
            if all(before.get(name) == self.result[name] for name in ("version", "of", "protocol")):
                compared = ("baseline", "differences")
                kept = {name: value for name, value in before.items() if name not in compared}
                self.result = kept | self.result
            else:
                say(f"{path} replaces measures of other texts or by another protocol")
        store.replace(path, store.dump(self.result))

    def compare(self, other: Sampled) -> dict[str, Summary] | str:
        """Return the differences other - self on the same prefixes by measure, or why there are none."""
        a = self.about
        b = other.about
        prefixes = [[record["prefix"] for record in x.humans] for x in (self, other)]
        if prefixes[0] != prefixes[1]:
            return "their prefixes differ"
        if len(prefixes[0]) < 2:
            return "there is only one prefix"
        for name in ("tokens", "samples"):
            if a[name] != b[name]:
                return f"--{name} is {a[name]} and {b[name]}"
        excluded = () if a["tokenizer"] == b["tokenizer"] else ("tokens", "nats_per_token")
        names = [name for name in self.estimates if name in other.estimates and name not in excluded]
        differences = {name: other.estimates[name] - self.estimates[name] for name in names}
        return {
            name: summarise(difference, "prefixes", low=-maximum(name), high=maximum(name))
            for name, difference in differences.items()
        }


def _human_text(texts: list[str]) -> dict[str, float]:
    measures = {f"distinct_{n}": distinct(texts, n) for n in (1, 2, 3)}
    for n in (2, 3, 4):
        shares = [share for text in texts if (share := repetition(text, n)) is not None]
        measures[f"repetition_{n}"] = float(np.mean(shares)) if shares else 0.0
    return measures | {"words": float(np.mean([len(units(text)) for text in texts]))}


def compare_all(sampled: Sequence[Sampled]) -> list[str]:
    """Compare all texts with the first set, write the differences, and return tables of the measures."""
    first, *others = sampled
    lines = _table("texts of", {texts.title: _cells(texts.result) for texts in sampled})
    rows = {}
    for texts in others:
        differences = first.compare(texts)
        texts.result |= {"baseline": first.about, "differences": differences}
        if isinstance(differences, str):
            lines.append(f"{texts.title} is not compared with the first: {differences}")
        else:
            rows[texts.title] = {name: _cell(value, sign="+") for name, value in differences.items()}
        store.replace(texts.directory / QUALITY, store.dump(texts.result))
    return lines + (_table("minus the first, paired by prefix", rows) if rows else [])


def by_seed(seeds: Sequence[int], values: Sequence[float]) -> Summary:
    """Return the mean of shares with Student's interval over seeds. Values of a seed are averaged first."""
    means = [
        float(np.mean([v for s, v in zip(seeds, values, strict=True) if s == seed]))
        for seed in dict.fromkeys(seeds)
    ]
    return summarise(ratio(means, None, range(len(means))), "seeds", high=1.0)


def maximum(name: str) -> float:
    """Return the largest possible value of a measure. The smallest is always 0."""
    return 1.0 if name.startswith(SHARES) else math.inf


def summarise(
    estimate: Estimate,
    unit: str,
    transform: Callable[[float], float] = float,
    low: float = 0.0,
    high: float = math.inf,
) -> Summary:
    """Return an estimate with its interval.

    Args:
        estimate: The estimate over clusters.
        unit: Name of a cluster.
        transform: Applied to the value and to the limits.
        low: Smallest possible value, before `transform`.
        high: Largest possible value, before `transform`.
    """
    interval = estimate.interval()
    limits: list[float | None] = [None, None]
    if interval:
        limits = [transform(min(max(x, low), high)) for x in (interval.low, interval.high)]
    n = len(estimate.parts)
    return {"mean": transform(estimate.value), "low": limits[0], "high": limits[1], "n": n, "unit": unit}


def perplexity(nats: float) -> float:
    """Return e^nats, finite."""
    return math.exp(min(nats, 700.0))


def distinct(texts: Sequence[str], n: int) -> float:
    """Return the number of different n-grams of all texts divided by the number of n-grams (0 for none).

    It decreases with the amount of text, so compare only equal numbers of texts of equal length.
    """
    counts = Counter(gram for text in texts for gram in _ngrams(text, n))
    return len(counts) / counts.total() if counts else 0.0


def repetition(text: str, n: int) -> float | None:
    """Return the share of a text's n-grams that occurred before in it, or None if it has no n-gram."""
    grams = _ngrams(text, n)
    return 1 - len(set(grams)) / len(grams) if grams else None


def _ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    words = units(text)
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def rouge(pairs: Sequence[tuple[str, str]]) -> dict[str, list[float]]:
    """Return F-measures of ROUGE-1 and ROUGE-L of pairs (text, reference), from 0 to 1.

    The tokenizer of rouge-score handles only the letters a to z. This one handles all scripts, and counts
    single characters in scripts without spaces. For ASCII text the scores are those of rouge-score.
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
    """Return the sampled and the human text as they are compared.

    Args:
        record: A text.
        protocol: `paper` compares continuations, with the human one cut to as many tokens. `released` follows
            the authors' scripts: the prefix on both sides, a second space before the sampled continuation,
            and the human text cut to as many *words* as the model may generate tokens.
        words: Words of the prefix.
        tokens: Longest continuation in tokens.
    """
    if protocol == "paper":
        return record["text"].strip(), record["human"].strip()
    human = (record["prefix"] + record["reference"]).split()
    return f"{record['prefix']} {record['text']}", " ".join(human[: words + tokens])


def featurizer(name: str, dtype: str = "auto") -> Featurizer:
    """Return a function that embeds texts: a sentence encoder, or a language model's last hidden state.

    name: `minilm`, a sentence model's directory or id, or a language model's (closer to the paper's
    GPT-2-large). The state belongs to the last of at most MAX_TOKENS tokens.
    """
    is_sentence_model = name == "minilm" or name.startswith("sentence-transformers/")
    if is_sentence_model or (Path(name) / "modules.json").is_file():
        return Encoder(name)
    evaluated = EvaluatedModel(name, dtype=dtype)
    model = evaluated.model
    tokenizer = evaluated.tokenizer

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
            raise UserError(
                f"{name} produced NaN or infinite hidden states. Check its weights.", code="not-finite"
            )
        return states

    return last_states


def mauve_with_ceiling(human: np.ndarray, sampled: Sequence[np.ndarray], splits: int = 5) -> dict[str, Any]:
    """Return MAUVE of each set of samples, the same at half the size, and its ceiling.

    `half` compares one half of the human texts with the samples of the other half's prefixes. `ceiling`
    compares the two halves of the human texts. `kmeans` is the range of the first set's score over KMEANS
    cluster seeds.

    Args:
        human: Features [n, d].
        sampled: Sets of features [n, d] that continue the same prefixes.
        splits: Number of random splits into halves.
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
    """Return MAUVE of two sets of features [n, d], from 0 to 1. seed: of its clusters."""
    import mauve as package  # GPL-3.0, therefore an extra

    sys.stderr.flush()
    stderr = os.dup(2)
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, 2)  # faiss warns about small clusters, which MAUVE intends
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            settings = MAUVE | {"seed": seed}
            return float(package.compute_mauve(p_features=human, q_features=sampled, **settings).mauve)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(devnull)


def _table(head: str, rows: dict[str, dict[str, str]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [[head, *names]] + [[title, *(row.get(n, "") for n in names)] for title, row in rows.items()]
    return align(lines)


def _cells(result: dict[str, Any]) -> dict[str, str]:
    cells: dict[str, str] = {}
    if mauve := result.get("mauve"):
        cells = {"MAUVE": _cell(mauve["score"]), "half": _cell(mauve["half"])}
        cells["ceiling"] = f"{mauve['ceiling']:.3f}"
        cells["over k-means seeds"] = f"{mauve['kmeans']['low']:.3f} to {mauve['kmeans']['high']:.3f}"
    cells |= {name: _cell(value) for name, value in result.get("rouge", {}).items()}
    for column, key in {"PPL_oracle": "", "floor": "_floor", "human": "_human"}.items():
        if f"ppl_oracle{key}" in result:
            cells[column] = _cell(result[f"ppl_oracle{key}"]["perplexity"], 2)
    if "ppl_test" in result:
        cells["PPL_test"] = _cell(result["ppl_test"]["interval"], 2)
    if "cross_entropy" in result:
        cells |= {f"{way} CE": _cell(value, 4) for way, value in result["cross_entropy"]["intervals"].items()}
    names = [name for name in ("distinct_2", "repetition_4", "tokens") if name in result["text"]]
    return cells | {name: _cell(result["text"][name]) for name in names}


def _cell(value: Summary, digits: int = 3, sign: str = "-") -> str:
    """Return a value with its interval, and the number of units if there are few."""
    text = f"{value['mean']:{sign}.{digits}f}"
    low, high = value["low"], value["high"]
    if low is None or high is None:
        return text
    few = f" ({value['n']} {value['unit']})" if value["n"] < FEW else ""
    return f"{text} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]{few}"
