"""One model on some tasks: retrieval, scoring in chunks, result. May be killed, and run many times at once.

Work is cut into chunks of rows. Every process takes chunks that nobody holds, so starting the same command on
more ranks, nodes or schedulers shares the work, and a chunk that is done is never done again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from datasets import DatasetDict
from tqdm import tqdm

from common.errors import UserError
from common.lease import held
from eval import store
from eval.icl.inferencer import VERSION
from eval.icl.openicl_baselines import DENSE, RETRIEVERS, openicl_identity, openicl_retrieve
from eval.icl.prefix_scorer import PrefixScorer
from eval.icl.records import Record, Recorder
from eval.icl.retrieve import DenseRetriever, Encoder, GroupRetriever
from eval.icl.scores import NotFiniteError
from eval.icl.settings import Settings
from eval.icl.task_data import TaskData, load_data
from eval.icl.task_metrics import row_text, row_texts, summarise, worst
from eval.icl.tasks import GROUP, LABEL, ROW, Task
from eval.model import EvaluatedModel
from eval.results import MODELS, claim_name, only_answer

CHUNK = 256  # rows; what a killed job loses at most
POLL_SECONDS = 0.2

Say = Callable[[str], None]


class Job:
    """Evaluations of one model; `out` holds the store and, by model name, views on it."""

    def __init__(
        self, model: EvaluatedModel, settings: Settings, out: Path, say: Say = lambda text: None
    ) -> None:
        self.model = model
        self.settings = settings
        self.out = out
        self.say = say
        self.computed = 0  # chunks that this process scored

    @cached_property
    def encoder(self) -> Encoder:
        own = self.settings.retriever in RETRIEVERS
        return Encoder(self.settings.encoder if own else self.settings.retriever, say=self.say)

    @cached_property
    def recorder(self) -> Recorder:
        """Loads the model, and refuses a limit that it cannot keep."""
        self.say(f"{self.model.name}: loading {self.model.given}")
        context, limit = self.model.context_length(), self.settings.max_tokens
        if context is not None and limit is not None and limit > context:
            raise UserError(f"--max-tokens {limit} exceeds the model's context of {context} tokens")
        if self.settings.inferencer == "ppl":
            return Recorder(self.model, self.settings, None)
        scorer = PrefixScorer(self.model.model, self.settings.budget, self.say)
        return Recorder(self.model, self.settings, scorer)

    def run(self, task: Task) -> dict[str, Any]:
        """The result of a task, computed or found.

        Raises UserError when a score is not finite; nothing is published then.
        """
        data = load_data(task, self.settings.data, self.settings.limit, self.settings.shots)
        if "channel" in self.settings.extras:
            task.require_channel()
        indices, retrieval = self._retrieve(task, data)
        conditions = self._conditions(task, data, retrieval, indices)
        entry = store.Entry(self.out / store.STORE, self._identity(task, conditions), self.say)
        ranges = [range(i, min(i + CHUNK, len(indices))) for i in range(0, len(indices), CHUNK)]
        result = entry.result()
        if result is None or not all(entry.has_chunk(i, rows) for i, rows in enumerate(ranges)):
            try:
                self._score(task, data, indices, entry, ranges)
            except NotFiniteError as error:
                where = f"{self.model.given}, task {task.name}"
                raise UserError(f"{where}: {error}; nothing is published; try --dtype float32") from None
            records = [r for i in range(len(ranges)) for r in entry.chunk(i) or []]
            result = summarise(task, records, self.settings.score, self.settings.scores, conditions)
            entry.finish(result | {"worst": worst(task, data, records, self.settings.score)})
            result = entry.result()
            assert result is not None
        view = {"key": entry.key, "weights": self.model.digest, "rows": self._rows(task), "result": result}
        store.replace(self.out / MODELS / self.model.name / f"{task.name}.json", store.dump(view))
        return result

    def _rows(self, task: Task) -> dict[str, Any]:
        """Where the test rows come from; no part of the identity: the same rows give the same result."""
        hub = task.spec.hub and task.spec.hub.model_dump()
        return {"from_hub": self.settings.data == "hub", "hub": hub, "split": task.spec.splits.test}

    def _conditions(
        self, task: Task, data: TaskData, retrieval: dict[str, Any], indices: list[list[int]]
    ) -> dict[str, Any]:
        """Under what a result was found. Two results may be compared when all of `compared` is equal."""
        compared = {
            "test_rows": data.digests["test"][:16],
            "pool_rows": data.digests["train"][:16],
            "prompt": store.digest(task.identity())[:16],
            "shots": retrieval["shots"],
            "retriever": retrieval["retriever"],
            "encoder": retrieval.get("encoder", "")[:16],
            "inferencer": self.settings.inferencer,
            "faithful": self.settings.faithful,
            "score": self.settings.score,
            "max_tokens": self.settings.max_tokens,
            "scorer": VERSION,
        }
        noted = {
            "prompt_version": task.version,
            "dtype": self.model.dtype,
            "demonstrations": store.digest(indices)[:16],
        }
        return {"compared": compared, "noted": noted}

    def _identity(self, task: Task, conditions: dict[str, Any]) -> dict[str, Any]:
        return {
            "weights": self.model.digest,
            "tokenizer": self.model.tokenizer_digest,
            "task": task.identity() | {"name": task.name},
            "scores": self.settings.scores,
            "conditions": conditions,
        }

    # --- demonstrations -----------------------------------------------------------------------------------

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
        folder = self.out / store.STORE / "retrieval"
        path = folder / f"{store.digest([identity, data.digests])[:32]}.json"
        while (found := store.unsealed(path)) is None:
            with held(store.lease(folder / "leases", path.stem)) as mine:
                if mine and store.unsealed(path) is None:
                    if path.is_file():
                        self.say(f"{path} is damaged: computing it again")
                    store.replace(path, store.seal(self._find(task, data, count)))
            if not mine:
                time.sleep(POLL_SECONDS)
        return found, identity

    def _find(self, task: Task, data: TaskData, count: int) -> list[list[int]]:
        reader, name = data.reader(task), self.settings.retriever
        if task.spec.shots.by == "group":
            return GroupRetriever(reader, ice_num=count).retrieve()
        self.say(f"{task.name}: choosing {count} demonstrations per row")
        if name in RETRIEVERS:
            return openicl_retrieve(name, task, data, count, self.settings.encoder, self.model)
        return DenseRetriever(reader, ice_num=count, sentence_transformers_model_name=self.encoder).retrieve()

    # --- scores -------------------------------------------------------------------------------------------

    def _score(
        self,
        task: Task,
        data: TaskData,
        indices: list[list[int]],
        entry: store.Entry,
        ranges: list[range],
    ) -> None:
        """Score the missing chunks that nobody else is at, until all are there."""
        pool = Counter(row_texts(task, data.rows["train"]))

        def missing() -> list[int]:
            return [i for i, rows in enumerate(ranges) if not entry.has_chunk(i, rows)]

        def score_chunk(i: int) -> bool:
            with held(entry.lease(f"chunk-{i:05d}")) as mine:
                if not mine or entry.has_chunk(i, ranges[i]):
                    return mine
                before = bar.n
                records = self._score_rows(task, data, indices, ranges[i], pool, bar.update)
                self.computed += entry.finish_chunk(i, records)
                bar.update(before + len(records) - bar.n)
            return True

        left = sum(len(ranges[i]) for i in missing())
        _ = self.recorder if left else None  # what it says comes before the bar
        label = f"{self.model.name} {task.name}"
        bar = tqdm(total=len(indices), initial=len(indices) - left, desc=label, unit="row", disable=None)
        with bar:
            while pending := missing():
                tried = [score_chunk(i) for i in pending]
                if not any(tried):
                    time.sleep(POLL_SECONDS)

    def _score_rows(
        self,
        task: Task,
        data: TaskData,
        indices: list[list[int]],
        rows: range,
        pool: Counter[str],
        advance: Callable[[int], Any],
    ) -> list[Record]:
        """Records of some test rows, by an OpenICL inferencer over an OpenICL retriever."""
        part = DatasetDict({"train": data.rows["train"], "test": data.rows["test"].select(rows)})
        records = self.recorder.records(task, part, [indices[r] for r in rows], advance)
        for record, row, entry in zip(records, rows, part["test"], strict=True):
            record |= {"row": row, "id": entry[ROW], "gold": entry[LABEL], "group": entry[GROUP]}
            record["leaked"] = pool[row_text(task, entry)] > 0
        return records


def run_all(
    model: EvaluatedModel,
    tasks: list[Task],
    settings: Settings,
    out: Path,
    say: Say,
) -> list[dict[str, Any]]:
    """All tasks of a model, which is described first, so that a partial run can be reported."""
    claim_name(model, out, say)
    job = Job(model, settings, out, say)
    results = []
    for task in tasks:
        began, before = time.perf_counter(), job.computed
        result = job.run(task)
        how = f"{time.perf_counter() - began:.1f} s" if job.computed > before else "already known"
        low, high = (100 * result["interval"][end] for end in ("low", "high"))
        note = f", {result['rows_shortened']} shortened" if result["rows_shortened"] else ""
        answer = only_answer(result)
        note += f", answers {answer} only" if answer is not None else ""
        say(
            f"{model.name}  {task.spec.title:<15} {100 * result['accuracy']:5.1f}  [{low:.1f}, {high:.1f}]  "
            f"chance {100 * result['chance']:.1f}  n {result['n']}{note}  ({how})"
        )
        if 2 * result["rows_shortened"] >= result["n"]:
            # Asking for the context loads the model: only where that has been done anyway.
            context = model.context_length() if job.computed > before else None
            say(f"{model.name}  {task.spec.title}: {_lost(result, settings.max_tokens or context)}")
        results.append(result)
    return results


def _lost(result: dict[str, Any], limit: int | None) -> str:
    """What the prompts of a task lost to the limit on their length; None: it is not known."""
    kinds = [(result["rows_shortened"], "demonstrations")] if result["shots"] else []
    kinds += [(result["rows_cut"], "text of the query")] if result["rows_cut"] else []
    lost = ", ".join(f"{rows:,} of {result['n']:,} prompts lost {what}" for rows, what in kinds)
    return f"{lost} to " + ("the model's context" if limit is None else f"the context of {limit:,} tokens")
