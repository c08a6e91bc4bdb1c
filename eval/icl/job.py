"""One model on some tasks: retrieval, scoring in chunks, result. May be killed, and run many times at once.

Work is cut into chunks of rows. Every process takes chunks that nobody holds, so starting the same command on
more ranks, nodes or schedulers shares the work, and a chunk that is done is never done again.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from datasets import DatasetDict
from tqdm import tqdm

from common.errors import UserError
from eval import store
from eval.icl.extra_scores import calibrated, channel
from eval.icl.inferencer import VERSION, PrefixPPLInferencer
from eval.icl.openicl_baselines import DENSE, INFERENCERS, RETRIEVERS, openicl_identity, openicl_retrieve
from eval.icl.openicl_compat import DatasetReader, PPLInferencer, quiet
from eval.icl.prefix_scorer import PrefixScorer
from eval.icl.retrieve import DenseRetriever, Encoder, GroupRetriever, StoredRetriever, indices_digest
from eval.icl.task_metrics import row_text, summarise, worst
from eval.icl.tasks import GROUP, LABEL, ROW, Task, TaskData, load_data
from eval.model import EvaluatedModel
from eval.names import EXTRA_SCORES, SCORES
from eval.results import claim_name

CHUNK = 256  # rows; what a killed job loses at most
POLL_SECONDS = 0.2

Record = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What may be chosen about an evaluation; all of it is part of the result's key except `budget`."""

    data: str
    retriever: str = "minilm"  # a sentence model, or the name of one of OpenICL's retrievers
    encoder: str = "minilm"  # sentence model of OpenICL's dense retrievers
    inferencer: str = "prefix"  # or ppl: OpenICL's own
    faithful: bool = False  # prompts and token counts as OpenICL makes them, faults included
    shots: int | None = None  # None: the task's own number
    limit: int | None = None
    score: str = "openicl_ppl"
    extra: tuple[str, ...] = ()  # further scores
    max_tokens: int | None = None  # longest prompt; None: the model's context
    budget: int = 8192  # tokens per batch

    def __post_init__(self) -> None:
        _known("--inferencer", self.inferencer, INFERENCERS)
        _known("--score", self.score, (*SCORES, *EXTRA_SCORES))
        for name in self.extra:
            _known("--extra-scores", name, EXTRA_SCORES)
        if self.inferencer == "ppl" and (self.score != "openicl_ppl" or self.extra):
            raise UserError("--inferencer ppl gives openicl_ppl only")
        if self.shots is not None and self.shots < 0:
            raise UserError("--shots must not be negative")
        for name in ("limit", "max_tokens", "budget"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1")

    @property
    def extras(self) -> tuple[str, ...]:
        """Further scores, the deciding one included."""
        return tuple(name for name in EXTRA_SCORES if name in (*self.extra, self.score))

    @property
    def scores(self) -> tuple[str, ...]:
        """All scores that records hold."""
        return ("openicl_ppl",) if self.inferencer == "ppl" else (*SCORES, *self.extras)


def _known(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f"{option} {value!r}; known: {', '.join(known)}")


class Job:
    """Evaluations of one model; `out` holds the store and, by model name, views on it."""

    def __init__(self, model: EvaluatedModel, settings: Settings, out: Path) -> None:
        self.model = model
        self.settings = settings
        self.out = out
        self.computed = 0  # chunks that this process scored

    @cached_property
    def encoder(self) -> Encoder:
        own = self.settings.retriever in RETRIEVERS
        return Encoder(self.settings.encoder if own else self.settings.retriever)

    @cached_property
    def scorer(self) -> PrefixScorer:
        return PrefixScorer(self.model.model, self.settings.budget)

    def run(self, task: Task) -> dict[str, Any]:
        """The result of a task, computed or found."""
        data = load_data(task, self.settings.data, self.settings.limit)
        indices, retrieval = self._retrieve(task, data)
        entry = store.Entry(self.out / "store", self._identity(task, data, retrieval, indices))
        result = entry.result()
        if result is None:
            ranges = [range(i, min(i + CHUNK, len(indices))) for i in range(0, len(indices), CHUNK)]
            self._score(task, data, indices, entry, ranges)
            records = [r for i in range(len(ranges)) for r in entry.chunk(i) or []]
            result = summarise(task, records, self.settings.score, self.settings.scores, retrieval)
            result["conditions"] = self._conditions(task, data, retrieval, indices)
            entry.finish(result | {"worst": worst(task, data, records, self.settings.score)})
            result = entry.result()
            assert result is not None
        view = {"key": entry.key, "weights": self.model.digest, "result": result}
        store.replace(self.out / "models" / self.model.name / f"{task.name}.json", store.dump(view))
        return result

    def _conditions(
        self, task: Task, data: TaskData, retrieval: dict[str, Any], indices: list[list[int]]
    ) -> dict[str, Any]:
        s = self.settings
        compared = {
            "test_rows": store.digest(list(data.rows["test"]))[:16],
            "pool_rows": store.digest(list(data.rows["train"]))[:16],
            "prompt": store.digest(task.identity())[:16],
            "shots": retrieval["shots"],
            "retriever": retrieval["retriever"],
            "encoder": retrieval.get("encoder", ""),
            "inferencer": s.inferencer,
            "faithful": s.faithful,
            "score": s.score,
            "max_tokens": s.max_tokens,
            "scorer": VERSION,
        }
        noted = {
            "prompt_version": task.version,
            "dtype": self.model.dtype,
            "demonstrations": indices_digest(indices)[:16],
        }
        return {"compared": compared, "noted": noted}

    def _identity(
        self, task: Task, data: TaskData, retrieval: dict[str, Any], indices: list[list[int]]
    ) -> dict[str, Any]:
        return {
            "weights": self.model.digest,
            "dtype": self.model.dtype,
            "tokenizer": self.model.tokenizer_digest,
            "task": task.identity(),
            "data": data.digest,
            "retrieval": retrieval | {"indices": indices_digest(indices)},
            "max_tokens": self.settings.max_tokens,
            "score": self.settings.score,
            "scores": self.settings.scores,
            "inferencer": self.settings.inferencer,
            "faithful": self.settings.faithful,
            "scorer": VERSION,
        }

    def _retrieve(self, task: Task, data: TaskData) -> tuple[list[list[int]], dict[str, Any]]:
        """Demonstrations of every test row, and what they depend on. Kept in the store: found once."""
        name, count = self.settings.retriever, self.settings.shots
        count = task.spec.shots.count if count is None else count
        if count == 0:
            return [[] for _ in range(len(data.rows["test"]))], {"retriever": "none", "shots": 0}
        if task.spec.shots.by == "group":
            identity: dict[str, Any] = {"retriever": "group"}
        elif name in RETRIEVERS:
            digest = self.encoder.digest if name in DENSE else ""
            identity = openicl_identity(name, self.settings.encoder, digest, self.model)
        else:
            identity = {"retriever": name, "encoder": self.encoder.digest}
        identity["shots"] = count
        folder = self.out / "store" / "retrieval"
        path = folder / f"{store.digest([identity, data.digest])[:32]}.json"
        while not path.is_file():
            with store.held(store.Lease(folder / "leases", path.stem)) as mine:
                if mine and not path.is_file():
                    store.replace(path, json.dumps(self._find(task, data, count)))
            if not mine:
                time.sleep(POLL_SECONDS)
        return json.loads(path.read_text()), identity

    def _find(self, task: Task, data: TaskData, count: int) -> list[list[int]]:
        reader, name = data.reader(task), self.settings.retriever
        if task.spec.shots.by == "group":
            return GroupRetriever(reader, ice_num=count).retrieve()
        if count > len(data.rows["train"]):
            raise UserError(f"task {task.name}: {count} demonstrations of {len(data.rows['train'])} rows")
        if name in RETRIEVERS:
            return openicl_retrieve(name, task, data, count, self.settings.encoder, self.model)
        return DenseRetriever(reader, ice_num=count, sentence_transformers_model_name=self.encoder).retrieve()

    def _score(
        self,
        task: Task,
        data: TaskData,
        indices: list[list[int]],
        entry: store.Entry,
        ranges: list[range],
    ) -> None:
        """Score the missing chunks that nobody else is at, until all are there."""
        done = sum(len(r) for i, r in enumerate(ranges) if entry.has_chunk(i))
        label = f"{self.model.name} {task.name}"
        bar = tqdm(total=len(indices), initial=done, desc=label, unit="row", disable=None)
        pool = Counter(row_text(task, row) for row in data.rows["train"])
        with bar:
            while pending := [i for i in range(len(ranges)) if not entry.has_chunk(i)]:
                worked = False
                for i in pending:
                    with store.held(entry.lease(f"chunk-{i:05d}")) as mine:
                        if not mine or entry.has_chunk(i):
                            continue
                        records = self._score_rows(task, data, indices, ranges[i], pool)
                        self.computed += entry.finish_chunk(i, records)
                    worked = True
                    bar.update(len(ranges[i]))
                if not worked:
                    time.sleep(POLL_SECONDS)

    def _score_rows(
        self, task: Task, data: TaskData, indices: list[list[int]], rows: range, pool: Counter[str]
    ) -> list[Record]:
        """Records of some test rows, by an OpenICL inferencer over an OpenICL retriever."""
        part = DatasetDict({"train": data.rows["train"], "test": data.rows["test"].select(rows)})
        reader = DatasetReader(part, input_columns=task.inputs, output_column=LABEL)
        found = [indices[r] for r in rows]
        retriever = StoredRetriever(reader, found, ice_num=max(map(len, found)))
        infer = self._infer_openicl if self.settings.inferencer == "ppl" else self._infer
        records = infer(task, part, retriever)
        for record, row, entry in zip(records, rows, part["test"], strict=True):
            record |= {"row": row, "id": entry[ROW], "gold": entry[LABEL], "group": entry[GROUP]}
            record["leaked"] = pool[row_text(task, entry)] > 0
        return records

    def _infer(self, task: Task, part: DatasetDict, retriever: StoredRetriever) -> list[Record]:
        """Prediction, demonstrations and scores of every row, by ours."""
        with tempfile.TemporaryDirectory() as scratch, quiet():
            inferencer = PrefixPPLInferencer(
                tokenizer_name=self.model.tokenizer,
                max_model_token_num=self.settings.max_tokens,
                output_json_filepath=scratch,
                labels=task.labels,
                scorer=self.scorer,
                faithful=self.settings.faithful,
            )
            inferencer.inference(retriever, task.demonstration_template, task.template)
        scores = dict(inferencer.scores)
        samples, limit = inferencer.samples, inferencer.max_model_token_num
        common = (self.scorer, self.model.tokenizer, limit)
        if "channel" in self.settings.extras:
            scores["channel"] = channel(task, part, retriever.indices, *common)
        if "calibrated" in self.settings.extras:
            scores["calibrated"] = calibrated(task, part, samples, scores["suffix_sum"], *common)
        # What is recorded is what decides, to the last digit.
        kept = {name: [[_rounded(x) for x in row] for row in values] for name, values in scores.items()}
        best = [min(range(len(row)), key=row.__getitem__) for row in kept[self.settings.score]]
        return [
            {
                "prediction": task.labels[best[n]],
                "demonstrations": sample.demonstrations,
                "dropped": sample.dropped,
                "cut": sample.cut,
                "scores": {name: values[n] for name, values in kept.items()},
            }
            for n, sample in enumerate(samples)
        ]

    def _infer_openicl(self, task: Task, part: DatasetDict, retriever: StoredRetriever) -> list[Record]:
        """The same by OpenICL's PPLInferencer; what it drops or cuts it does not tell."""
        with tempfile.TemporaryDirectory() as scratch, quiet():
            inferencer = PPLInferencer(
                self.model.model,
                self.model.fresh_tokenizer(),
                max_model_token_num=self.settings.max_tokens,
                batch_size=8,
                output_json_filepath=scratch,
                labels=task.labels,
            )
            predictions = inferencer.inference(retriever, task.demonstration_template, task.template)
            saved = json.loads((Path(scratch) / "predictions.json").read_text())
        records = []
        for n, prediction in enumerate(predictions):
            ppl = [_rounded(saved[str(n)][f"label: {label}"]["PPL"]) for label in task.labels]
            records.append(
                {
                    "prediction": prediction,
                    "demonstrations": retriever.indices[n],
                    "dropped": 0,
                    "cut": 0,
                    "scores": {"openicl_ppl": ppl},
                }
            )
        return records


def _rounded(value: float) -> float:
    """Nine digits: more than float32 has, and files stay readable."""
    return float(f"{value:.9g}")


def run_all(
    model: EvaluatedModel,
    tasks: list[Task],
    settings: Settings,
    out: Path,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """All tasks of a model, which is described first, so that a partial run can be reported."""
    claim_name(model, out, say)
    job = Job(model, settings, out)
    results = []
    for task in tasks:
        began, before = time.perf_counter(), job.computed
        result = job.run(task)
        how = f"{time.perf_counter() - began:.1f} s" if job.computed > before else "already known"
        low, high = (100 * result["interval"][end] for end in ("low", "high"))
        note = f", {result['rows_shortened']} shortened" if result["rows_shortened"] else ""
        say(
            f"{model.name}  {task.spec.title:<15} {100 * result['accuracy']:5.1f}  [{low:.1f}, {high:.1f}]  "
            f"chance {100 * result['chance']:.1f}  n {result['n']}{note}  ({how})"
        )
        results.append(result)
    return results
