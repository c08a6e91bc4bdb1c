"""Compare in-context evaluation with OpenICL and lm-evaluation-harness: CPU time, scores, memory, retrieval.

    python -m tests.bench.evaluation [--rounds 5] [--parts scoring retrieval memory] [--quick]

A random LLaMA (6 layers, hidden size 256, 32,000 tokens) scores real rows, with demonstrations found by
MiniLM and other rows in every round. All contestants render, tokenise and score, after retrieval. OpenICL
runs with two batch sizes, and the shorter time of each round counts. The floor is a plain forward of the
distinct tokens.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch

from emo.data_prep.encoding.tokenizer import load_tokenizer
from emo.eval.icl.openicl_compat import StoredRetriever, Template, openicl, quiet
from emo.eval.icl.prompts import PromptBuilder, Sample
from emo.eval.icl.records import score_samples
from emo.eval.icl.retrieve import DenseRetriever, GroupRetriever, reader, top_k
from emo.eval.icl.task_data import load_data
from emo.eval.icl.tasks import Row, load_task
from emo.eval.models.base import BUDGET
from emo.eval.models.encoder import Encoder
from emo.eval.models.model import quiet_libraries
from emo.eval.models.prefix_scorer import PrefixScorer, groups
from tests.bench import common

HARNESS = "lm_eval==0.4.13"
TOKENIZER = common.SHARED / "tokenizers" / "llama" / "tokenizer.model"
ROWS = common.SHARED / "nlu"
SCRATCH = Path(tempfile.gettempdir()) / f"bench-evaluation-{os.getuid()}"
POOL = 1500  # rows that demonstrations come from, few enough to embed in reasonable time
SIZES = {"trec": 24, "ag_news": 16, "mmlu": 32}  # rows per round
# OpenICL's time / ours. The distinct tokens of TREC allow about 6.
TARGETS = {"trec": 5.5, "ag_news": 3.5, "mmlu": 12.0}
HARNESS_TARGET, FLOOR_TARGET, SCORE_TARGET = 6.0, 0.9, 1e-5


def language_model() -> tuple[Any, Any]:
    """Return the model that is timed, and its tokenizer."""
    tokenizer = load_tokenizer(TOKENIZER)
    model = common.random_llama(len(tokenizer), 4096)
    with torch.no_grad():  # an untrained model's labels would differ only by rounding
        model.lm_head.weight.mul_(20)
    return model, tokenizer


class Evaluators:
    """A task's rows with their demonstrations, and the evaluators that score them. Each round has other rows.

    MMLU has the complete test split, one subject after the other.
    """

    def __init__(self, name: str, size: int, model: Any, tokenizer: Any, budget: int = BUDGET) -> None:
        self.task, self.size, self.model, self.tokenizer = load_task(name), size, model, tokenizer
        self.rows = rows = load_data(self.task, str(ROWS), None if name == "mmlu" else 400).rows
        count = self.task.spec.shots.count
        if name == "mmlu":
            self.indices = GroupRetriever(reader(self.task, rows), ice_num=count).retrieve()
        else:
            rows["train"] = rows["train"][:POOL]
            encoder = Encoder("minilm", SCRATCH / "cache")
            self.indices = DenseRetriever(reader(self.task, rows), encoder, count).retrieve()
        self.scorer = PrefixScorer(model, budget)
        self.scores: dict[tuple[str, int], np.ndarray] = {}  # [rows, labels], the lowest wins
        self.distinct: dict[int, int] = {}  # by round, for the floor

    def part(self, number: int) -> tuple[list[Row], list[list[int]]]:
        start = (number % (len(self.indices) // self.size)) * self.size
        rows = slice(start, start + self.size)
        return self.rows["test"][rows], self.indices[rows]

    def samples(self, number: int) -> list[Sample]:
        """Return the prompts of a round, tokenised as in an evaluation."""
        encode = lambda texts: self.tokenizer(texts, verbose=False)["input_ids"]  # noqa: E731
        return PromptBuilder(self.task, self.rows["train"], encode, 4096).build(*self.part(number))

    def ours(self, number: int) -> None:
        """Score a round with the prefix scorer."""
        self.scores["ours", number] = score_samples(self.scorer, self.samples(number))["openicl_ppl"]

    def openicl(self, number: int, batch: int) -> None:
        """Score a round with OpenICL's PPLInferencer on the same loaded model."""
        options = {"batch_size": batch, "output_json_filepath": str(SCRATCH / "out")}
        inferencer = openicl.PPLInferencer(self.model, load_tokenizer(TOKENIZER), **options)
        rows, indices = self.part(number)
        template = Template(self.task)
        retriever = StoredRetriever(self.task, self.rows | {"test": rows}, indices)
        with quiet(), torch.inference_mode():
            inferencer.inference(retriever, template, template)
        saved = json.loads((SCRATCH / "out" / "predictions.json").read_text()).values()
        scores = [[row[f"label: {label}"]["PPL"] for label in self.task.labels] for row in saved]
        self.scores["openicl", number] = np.array(scores)

    def lm_eval(self, harness: Any, number: int) -> None:
        """Score a round with lm-evaluation-harness, by the likelihood of each label after the prompt."""
        from lm_eval.api.instance import Instance

        builder = PromptBuilder(self.task, self.rows["train"], None)
        requests: list[Instance] = []
        for row, shots in zip(*self.part(number), strict=True):
            ice = builder.render_demonstrations(shots)
            for label in self.task.labels:
                prompt = builder.prompt(row, ice, label)
                cut = prompt.rindex(f" {self.task.words(label)}")
                requests.append(Instance("loglikelihood", {}, (prompt[:cut], prompt[cut:]), len(requests)))
        scores = [-x for x, _ in harness.loglikelihood(requests, disable_tqdm=True)]
        self.scores["lm-eval", number] = np.array(scores).reshape(-1, len(self.task.labels))

    def table(self, way: str, rounds: int) -> np.ndarray:
        """Return the scores of the rows of all rounds."""
        return np.vstack([self.scores[way, number] for number in range(rounds)])

    def distinct_tokens(self, number: int) -> int:
        """Return the number of tokens that a round must feed, with shared contexts once."""
        items = [item for sample in self.samples(number) for item in sample.items()]
        parts = groups(items)
        return sum(context + sum(items[i].fed - context for i in members) for members, context in parts)

    @torch.inference_mode()
    def floor(self, number: int) -> None:
        """Compute the logits of as many tokens as are distinct, in rows of about equal length."""
        for ids in torch.randint(3, 32000, (1, self.distinct[number])).tensor_split(self.size, dim=1):
            self.model(input_ids=ids, use_cache=False)

    def tokens_fed(self) -> int:
        """Return the number of tokens that the model processes while we score a round, with padding."""
        counts: list[int] = []
        hook = self.model.model.register_forward_pre_hook(
            lambda module, args, kwargs: counts.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        self.ours(0)
        hook.remove()
        return sum(counts)


def scoring(report: common.Report, rounds: int, quick: bool) -> None:
    """Compare our scorer with OpenICL and (on TREC) the harness, in turn."""
    model, tokenizer = language_model()
    harness = load_harness(report, model, tokenizer)
    for name, rows in SIZES.items():
        size = 6 if quick else rows
        evaluators = Evaluators(name, size, model, tokenizer)
        openicl = {f"openicl at batch {n}": functools.partial(evaluators.openicl, batch=n) for n in (8, 1)}
        racing: common.Contestants = {"ours": evaluators.ours, **openicl, "floor": evaluators.floor}
        if name == "trec" and harness is not None:
            racing["lm-eval"] = functools.partial(evaluators.lm_eval, harness)
        # The scorer compares itself with the plain model whenever prompts get longer. This takes as long as
        # these few rows, but little of a complete task. Therefore every round is scored once before.
        for i in range(-1, rounds):
            evaluators.ours(i)
            evaluators.distinct[i] = evaluators.distinct_tokens(i)
        times = common.race(racing, rounds)
        times["openicl"] = [min(pair) for pair in zip(*(times[way] for way in openicl), strict=True)]
        reference = evaluators.table("openicl", rounds)
        for way, took in times.items():
            cells: dict[str, Any] = {"OpenICL / this": common.ratio(times, "openicl", way)}
            if way in ("ours", "lm-eval"):
                scores = evaluators.table(way, rounds)
                same = int((scores.argmin(axis=1) == reference.argmin(axis=1)).sum())
                cells["rows like OpenICL"] = f"{same}/{len(reference)}"
            report.row(task=name, evaluator=way, rows=size, seconds=statistics.median(took), **cells)
            if way == "ours":
                report.ratio(f"{name}: rows that differ from OpenICL", len(reference) - same, at_most=0.5)
                apart = float(np.abs(scores - reference).max()) / SCORE_TARGET
                report.ratio(f"{name}: largest score difference x 1e5", apart, at_most=1.0)
        for way, label, target in (
            ("openicl", "OpenICL's time", TARGETS[name]),
            ("lm-eval", "lm-eval's time", HARNESS_TARGET),
        ):
            if way in times or name == "trec":  # the only task for the harness
                value = common.ratio(times, way, "ours") if way in times else None
                report.ratio(f"{name}: {label} / ours", value, at_least=target)
        report.ratio(f"{name}: floor / ours", common.ratio(times, "floor", "ours"), at_least=FLOOR_TARGET)
        tokens = statistics.mean(evaluators.distinct[i] for i in range(rounds))
        fed = 100 * evaluators.distinct[0] / evaluators.tokens_fed()
        report.note(f"{name}: {tokens:.0f} distinct tokens a round, {fed:.1f} % of what was fed")


def load_harness(report: common.Report, model: Any, tokenizer: Any) -> Any:
    """Return lm-evaluation-harness with the same model, or None with the reason in the report."""
    try:
        harness = common.import_peer(HARNESS, "lm_eval.models.huggingface").HFLM
        return harness(pretrained=model, tokenizer=tokenizer, batch_size=8, device="cpu", max_length=4096)
    except ImportError as error:
        report.note(f"lm-evaluation-harness skipped: {error}")
        return None


def retrieval(report: common.Report, rounds: int, quick: bool) -> None:
    """Compare exact search with faiss's flat index, and check the embedding cache."""
    import faiss

    n, q = (10_000, 500) if quick else (100_000, 10_000)
    vectors = np.random.default_rng(0).standard_normal((n + q, 384), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index, queries = vectors[:n], vectors[n:]
    faiss.omp_set_num_threads(1)
    flat = faiss.IndexFlatIP(384)
    flat.add(index)
    neighbours: dict[str, np.ndarray] = {}
    contestants: common.Contestants = {
        "ours": lambda _: neighbours.update(ours=top_k(queries, index, 8)),
        "faiss": lambda _: neighbours.update(faiss=flat.search(queries, 8)[1]),
    }
    rounds = 1 if quick else min(rounds, 3)
    times = report.race(contestants, rounds, "evaluator", task=f"search {q} in {n}", rows=q)
    value = common.ratio(times, "ours", "faiss")
    report.ratio("search: our time / faiss's", value, at_most=1.05)  # ours is faiss and an order of ties
    same = 100 * (neighbours["ours"] == neighbours["faiss"]).all(axis=1).mean()
    report.note(f"search: {same:.2f} % of the neighbour lists equal faiss's (it rounds in float32)")

    texts = [f"text number {i} about a {'cat' if i % 2 else 'dog'} and some more words" for i in range(400)]
    with tempfile.TemporaryDirectory() as cache:
        for evaluator in ("cold", "cached"):
            encoder = Encoder("minilm", Path(cache))
            took = common.seconds(functools.partial(encoder, texts))
            report.row(task=f"embed {len(texts)} texts", evaluator=evaluator, rows=len(texts), seconds=took)
    report.ratio("texts embedded again with a warm cache", encoder.computed, at_most=0.5)


def peak(budget: int) -> tuple[float, int]:
    """Return the peak MiB while the longest MMLU prompts run with a budget, and their longest length."""
    quiet_libraries()
    evaluators = Evaluators("mmlu", 24, *language_model(), budget)
    test = evaluators.rows["test"]
    long = sorted(range(len(test)), key=lambda i: -len(test[i]["question"]))[:24]
    evaluators.rows["test"] = [test[i] for i in long]
    evaluators.indices = [evaluators.indices[i] for i in long]
    took = common.peak_memory_mb(lambda: evaluators.ours(0))
    return took, max(len(ids) for sample in evaluators.samples(0) for ids in sample.ids)


def memory(report: common.Report, rounds: int, quick: bool) -> None:
    """Check that peak memory follows the budget."""
    peaks = {}
    for budget in (4096, 16384):
        peaks[budget], longest = common.in_child(peak, budget)
        task = f"longest MMLU prompts ({longest} tokens)"
        report.row(task=task, evaluator=f"budget {budget}", MiB=peaks[budget])
    report.ratio("memory: budget 4096 / budget 16384", peaks[4096] / peaks[16384], at_most=0.75)


PARTS = {"scoring": scoring, "retrieval": retrieval, "memory": memory}


def main() -> int:
    args = common.parser(__doc__, parts=PARTS).parse_args()
    quiet_libraries()
    began = time.perf_counter()
    report = common.Report("evaluation", judged=not args.quick)
    rounds = 2 if args.quick else args.rounds
    for part in args.parts:
        if part == "retrieval" or ROWS.is_dir():
            PARTS[part](report, rounds, args.quick)
        else:
            report.skip(part, f"no real rows at {common.SHARED}; set SHARED_DATA")
    report.note(f"{time.perf_counter() - began:.0f} s in all")
    return report.finish(rounds=rounds, quick=args.quick, parts=args.parts)


if __name__ == "__main__":
    sys.exit(main())
