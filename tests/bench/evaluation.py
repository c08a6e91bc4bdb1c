"""In-context evaluation beside OpenICL and lm-evaluation-harness: CPU time, equality, memory, retrieval.

    python -m tests.bench.evaluation [--rounds 5] [--parts scoring retrieval memory] [--quick]

Scoring: a random LLaMA (6 layers, hidden 256, 32,000 pieces), real rows, demonstrations by MiniLM; every
round takes other rows. Everybody renders, tokenises and scores; retrieval is done before. OpenICL runs with
the batch size that is faster here. The floor is what a plain forward needs for the distinct tokens.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from emo.data_prep.tokenizer import load_tokenizer
from emo.eval.icl.encoder import Encoder
from emo.eval.icl.openicl_compat import StoredRetriever, Template, openicl, quiet
from emo.eval.icl.prefix_scorer import PrefixScorer, groups
from emo.eval.icl.prompts import PromptBuilder, Sample
from emo.eval.icl.records import score_samples
from emo.eval.icl.retrieve import DenseRetriever, GroupRetriever, reader, top_k
from emo.eval.icl.settings import winner
from emo.eval.icl.task_data import load_data
from emo.eval.icl.tasks import Row, Task, load_task
from emo.eval.model import quiet_libraries
from tests.bench import common

HARNESS = "lm_eval==0.4.13"
SHARED = common.SHARED
SCRATCH = Path(tempfile.gettempdir()) / f"bench-evaluation-{os.getuid()}"
POOL = 1500  # rows that demonstrations come from: enough for real ones, embedded in reasonable time
# The distinct tokens of TREC allow about 6.
TARGETS = {"trec": 5.5, "ag_news": 3.5, "mmlu": 12.0}
HARNESS_TARGET, FLOOR_TARGET, SCORE_TARGET = 6.0, 0.9, 1e-5


def language_model() -> tuple[Any, Any]:
    """The model that is timed, and its tokenizer."""
    tokenizer = load_tokenizer(SHARED / "tokenizers" / "llama" / "tokenizer.model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 8}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=4096, **sizes)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # labels of an untrained model would differ by rounding only
        model.lm_head.weight.mul_(20)
    return model, tokenizer


@dataclass
class Rows:
    """A task's rows with their demonstrations, cut into one part per round."""

    task: Task
    data: dict[str, list[Row]]
    indices: list[list[int]]
    size: int  # rows per round

    def part(self, number: int) -> tuple[list[Row], list[list[int]]]:
        """A round's rows and their demonstrations; another round, other rows."""
        start = (number % (len(self.indices) // self.size)) * self.size
        rows = slice(start, start + self.size)
        return self.data["test"][rows], self.indices[rows]

    def samples(self, number: int, tokenizer: Any) -> list[Sample]:
        """The prompts of a round, tokenised as an evaluation does."""
        return PromptBuilder(self.task, self.data["train"], tokenizer, 4096).build(*self.part(number))


def task_rows(name: str, size: int) -> Rows:
    """Real rows; for MMLU whole subjects one after the other, as they are in the test split."""
    task = load_task(name)
    rows = load_data(task, str(SHARED / "nlu"), None if name == "mmlu" else 400).rows
    count = task.spec.shots.count
    if name == "mmlu":
        return Rows(task, rows, GroupRetriever(reader(task, rows), ice_num=count).retrieve(), size)
    rows["train"] = rows["train"][:POOL]
    encoder = Encoder("minilm", SCRATCH / "cache")
    return Rows(task, rows, DenseRetriever(reader(task, rows), encoder, count).retrieve(), size)


class Contestants:
    """The evaluators on one task; what each predicts is kept for the comparison."""

    def __init__(self, rows: Rows, model: Any, tokenizer: Any, harness: Any) -> None:
        self.rows, self.model, self.tokenizer, self.harness = rows, model, tokenizer, harness
        self.predictions: dict[tuple[str, int], list[str]] = {}
        self.scores: dict[tuple[str, int], np.ndarray] = {}
        self.scorer, self.scratch = PrefixScorer(model), str(SCRATCH / "out")
        # OpenICL's better batch size of 1 and 8, by one measurement each.
        took = {b: common.seconds(lambda b=b: self.openicl(-1, b)) for b in (8, 1)}  # type: ignore[misc]
        self.openicl_batch = min(took, key=took.__getitem__)

    def ours(self, number: int) -> None:
        """The prefix scorer."""
        scores = score_samples(self.scorer, self.rows.samples(number, self.tokenizer))["openicl_ppl"]
        labels = self.rows.task.labels
        self.scores["ours", number] = scores
        self.predictions["ours", number] = [labels[winner(row)] for row in scores.tolist()]

    def openicl(self, number: int, batch: int | None = None) -> None:
        """OpenICL's PPLInferencer on the same loaded model."""
        inferencer = openicl.PPLInferencer(
            self.model,
            load_tokenizer(SHARED / "tokenizers" / "llama" / "tokenizer.model"),
            batch_size=batch or self.openicl_batch,
            output_json_filepath=self.scratch,
        )
        task, (rows, indices) = self.rows.task, self.rows.part(number)
        template = Template(task)
        retriever = StoredRetriever(task, self.rows.data | {"test": rows}, indices)
        with quiet(), torch.inference_mode():
            predictions = inferencer.inference(retriever, template, template)
        self.predictions["openicl", number] = predictions
        saved = json.loads((Path(self.scratch) / "predictions.json").read_text())
        self.scores["openicl", number] = np.array(
            [[row[f"label: {label}"]["PPL"] for label in task.labels] for row in saved.values()]
        )

    def lm_eval(self, number: int) -> None:
        """lm-evaluation-harness: the label's likelihood after the prompt, for every row and label."""
        from lm_eval.api.instance import Instance

        task, builder = self.rows.task, PromptBuilder(self.rows.task, self.rows.data["train"], None)
        requests = []
        for row, shots in zip(*self.rows.part(number), strict=True):
            ice = builder.ice(shots)
            for label in task.labels:
                prompt = builder.prompt(row, ice, label)
                at = prompt.rindex(f" {task.words(label)}")
                requests.append(Instance("loglikelihood", {}, (prompt[:at], prompt[at:]), len(requests)))
        scores = [x for x, _ in self.harness.loglikelihood(requests, disable_tqdm=True)]
        best = np.array(scores).reshape(-1, len(task.labels)).argmax(axis=1)
        self.predictions["lm-eval", number] = [task.labels[k] for k in best]


def floor_seconds(model: Any, tokens: int, length: int) -> float:
    """CPU time of the plainest forward for `tokens` tokens, in rows of `length`, logits included."""
    ids = torch.randint(3, 32000, (1, length))
    rows = max(1, round(2048 / length))

    def run() -> None:
        with torch.inference_mode():
            for _ in range(rows):
                model(input_ids=ids, use_cache=False)

    run()
    return statistics.median(common.seconds(run) for _ in range(3)) / (rows * length) * tokens


def scoring(report: common.Report, rounds: int, quick: bool) -> None:
    """Ours, OpenICL and (on TREC) the harness in turn."""
    if not (SHARED / "nlu").is_dir():
        report.note(f"scoring skipped: no real rows at {SHARED}; set SHARED_DATA")
        return
    model, tokenizer = language_model()
    harness = load_harness(report, model, tokenizer)
    for name in ("trec", "ag_news", "mmlu"):
        size = 6 if quick else {"trec": 24, "ag_news": 16, "mmlu": 32}[name]
        contestants = Contestants(task_rows(name, size), model, tokenizer, harness)
        racing = {"ours": contestants.ours, "openicl": contestants.openicl}
        if name == "trec" and harness is not None:
            racing["lm-eval"] = contestants.lm_eval
        slower = 8 if contestants.openicl_batch == 1 else 1
        racing[f"openicl at batch {slower}"] = lambda i, c=contestants, b=slower: c.openicl(i, b)
        # Whenever prompts get longer the scorer compares itself with the plain model, which takes as long as
        # these few rows, and nothing beside a whole task: every round's rows are scored once before.
        for i in range(-1, rounds):
            contestants.ours(i)
        times = common.race(racing, rounds)
        predictions, scores = contestants.predictions, contestants.scores
        total = sum(len(predictions["ours", i]) for i in range(rounds))
        for who in racing:
            key = "openicl" if who.startswith("openicl") else who
            same = sum(
                a == b
                for i in range(rounds)
                for a, b in zip(predictions[key, i], predictions["openicl", i], strict=True)
            )
            cells = {"rows like OpenICL": f"{same}/{total}"}
            cells |= {"OpenICL / this": common.ratio(times, "openicl", who)}
            shown = who + (f" (batch {contestants.openicl_batch})" if who == "openicl" else "")
            report.row(task=name, evaluator=shown, rows=size, seconds=statistics.median(times[who]), **cells)
            if who == "ours":
                report.ratio(f"{name}: rows that differ from OpenICL", total - same, at_most=0.5)
        difference = max(np.abs(scores["ours", i] - scores["openicl", i]).max() for i in range(rounds))
        report.ratio(f"{name}: largest score difference x 1e5", float(difference) / SCORE_TARGET, at_most=1.0)
        for who, what, target in (
            ("openicl", "OpenICL's time", TARGETS[name]),
            (f"openicl at batch {slower}", f"OpenICL's time at batch {slower}", None),
            ("lm-eval", "lm-eval's time", HARNESS_TARGET),
        ):
            if who in times:
                report.ratio(f"{name}: {what} / ours", common.ratio(times, who, "ours"), at_least=target)
        rounds_of_tokens = [distinct(contestants.rows.samples(i, tokenizer)) for i in range(rounds)]
        tokens = statistics.mean(rounds_of_tokens)
        floor = floor_seconds(model, round(tokens), max(16, round(tokens / size)))
        report.ratio(f"{name}: floor / ours", floor / statistics.median(times["ours"]), at_least=FLOOR_TARGET)
        fed = tokens_fed(model, lambda c=contestants: c.ours(0))  # type: ignore[misc]
        padding = rounds_of_tokens[0] / fed
        report.note(f"{name}: {tokens:.0f} distinct tokens a round, {100 * padding:.1f} % of what was fed")


def distinct(samples: list[Sample]) -> int:
    """Tokens of samples that have to be fed: tails, prefixes, and shared contexts once."""
    items = [item for sample in samples for item in sample.items()]
    parts = groups(items)
    return sum(context + sum(items[i].fed - context for i in members) for members, context in parts)


def tokens_fed(model: Any, run: Callable[[], object]) -> int:
    """Tokens that pass through the model while `run` runs, padding included."""
    counts: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: counts.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    run()
    hook.remove()
    return sum(counts)


def load_harness(report: common.Report, model: Any, tokenizer: Any) -> Any:
    """lm-evaluation-harness's model class around the same model, or None with the reason in the report."""
    try:
        common.import_peer(HARNESS, "lm_eval")
        from lm_eval.models.huggingface import HFLM

        return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8, device="cpu", max_length=4096)
    except ImportError as error:
        report.note(f"lm-evaluation-harness skipped: {error}")
        return None


def retrieval(report: common.Report, rounds: int, quick: bool) -> None:
    """Exact search beside faiss's flat index, and the embedding cache."""
    import faiss

    n, q = (10_000, 500) if quick else (100_000, 10_000)
    rng = np.random.default_rng(0)
    index = rng.standard_normal((n, 384), dtype=np.float32)
    queries = rng.standard_normal((q, 384), dtype=np.float32)
    index /= np.linalg.norm(index, axis=1, keepdims=True)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    faiss.omp_set_num_threads(1)
    flat = faiss.IndexFlatIP(384)
    flat.add(index)
    found: dict[str, np.ndarray] = {}
    searches = {"ours": lambda: top_k(queries, index, 8), "faiss": lambda: flat.search(queries, 8)[1]}
    contestants = {who: lambda _, who=who: found.update({who: searches[who]()}) for who in searches}
    times = report.race(contestants, rounds, "evaluator", task=f"search {q} in {n}", rows=q)
    value = common.ratio(times, "ours", "faiss")
    report.ratio("search: our time / faiss's", value, at_most=1.05)  # it is faiss and the order of ties
    same = (found["ours"] == found["faiss"]).all(axis=1).mean()
    report.note(f"search: {100 * same:.2f} % of the neighbour lists equal faiss's (it rounds in float32)")

    texts = [f"text number {i} about a {'cat' if i % 2 else 'dog'} and some more words" for i in range(400)]
    with tempfile.TemporaryDirectory() as cache:
        cold = common.seconds(lambda: Encoder("minilm", Path(cache))(texts))
        again = Encoder("minilm", Path(cache))
        warm = common.seconds(lambda: again(texts))
    for evaluator, took in (("cold", cold), ("cached", warm)):
        report.row(task=f"embed {len(texts)} texts", evaluator=evaluator, rows=len(texts), seconds=took)
    report.ratio("texts embedded again with a warm cache", again.computed, at_most=0.5)


def peak(budget: int) -> tuple[float, int]:
    """Memory while the longest MMLU prompts run with a budget, MiB; and their longest length."""
    quiet_libraries()
    common.settle()
    model, tokenizer = language_model()
    rows = task_rows("mmlu", 24)
    long = sorted(range(len(rows.indices)), key=lambda i: -len(rows.data["test"][i]["question"]))[:24]
    rows.data["test"] = [rows.data["test"][i] for i in long]
    rows.indices = [rows.indices[i] for i in long]
    scorer = PrefixScorer(model, budget)
    took = common.peak_memory_mb(lambda: score_samples(scorer, rows.samples(0, tokenizer)))
    return took, max(len(ids) for sample in rows.samples(0, tokenizer) for ids in sample.ids)


def memory(report: common.Report, quick: bool) -> None:
    """Peak memory follows the budget, not the number of rows or labels."""
    if not (SHARED / "nlu").is_dir():
        report.note(f"memory skipped: no real rows at {SHARED}; set SHARED_DATA")
        return
    peaks = {}
    for budget in (4096, 16384):
        peaks[budget], longest = common.in_child(peak, budget)
        task = f"longest MMLU prompts ({longest} tokens)"
        report.row(task=task, evaluator=f"budget {budget}", MiB=peaks[budget])
    report.ratio("memory: budget 4096 / budget 16384", peaks[4096] / peaks[16384], at_most=0.75)


def main() -> int:
    options = common.parser(__doc__)
    options.add_argument("--parts", nargs="+", default=["scoring", "retrieval", "memory"])
    args = options.parse_args()
    quiet_libraries()
    common.settle()
    began = time.perf_counter()
    report = common.Report("evaluation")
    rounds = 2 if args.quick else args.rounds
    if "scoring" in args.parts:
        scoring(report, rounds, args.quick)
    if "retrieval" in args.parts:
        retrieval(report, 1 if args.quick else min(rounds, 3), args.quick)
    if "memory" in args.parts:
        memory(report, args.quick)
    report.note(f"{time.perf_counter() - began:.0f} s in all")
    return report.finish(rounds=rounds, quick=args.quick, parts=args.parts)


if __name__ == "__main__":
    sys.exit(main())
