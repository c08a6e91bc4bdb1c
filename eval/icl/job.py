"""One model on some tasks: retrieval, scoring in chunks, result. May be killed, and run many times at once.

Work is cut into chunks of rows. Every process takes chunks that nobody holds, so starting the same command on
more ranks, nodes or schedulers shares the work, and a chunk that is done is never done again. What computes
is imported where something is computed: a result that is known already costs no seconds of imports.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emo.common.cli.progress import show_activity
from emo.common.errors import UserError
from emo.common.io.lease import hold_if_free
from emo.data_prep.selection.grams import folded

from ..model import EvaluatedModel, quiet_libraries
from ..results import store
from ..results.directory import MODELS, claim_name, only_answer
from .encoder import Encoder
from .settings import CANDIDATES, RETRIEVERS, SEED, VERSION, NotFiniteError, Settings
from .task_data import TaskData, load_data
from .tasks import GROUP, LABEL, ROW, Task

if TYPE_CHECKING:
    from .records import Recorder

CHUNK = 256  # rows; what a killed job loses at most

Say = Callable[[str], None]


class Job:
    """Evaluations of one model; `out` holds the store and, by model name, views on it."""

    def __init__(
        self, model: EvaluatedModel, settings: Settings, out: Path, say: Say = lambda text: None
    ) -> None:
        self.model, self.settings, self.out, self.say = model, settings, out, say
        self.computed = 0  # chunks that this process scored

    @cached_property
    def encoder(self) -> Encoder:
        """The sentence model that demonstrations are chosen with."""
        assert self.settings.sentence_model is not None
        return Encoder(self.settings.sentence_model, say=self.say)

    @cached_property
    def recorder(self) -> Recorder:
        """The maker of records, its model loaded."""
        self.say(f"{self.model.name}: loading {self.model.given}")
        quiet_libraries()
        from .records import Recorder

        with show_activity(f"{self.model.name}: loading"):
            return Recorder(self.model, self.settings, self.say)

    def run(self, task: Task) -> dict[str, Any]:
        """Return the result of a task, which is computed unless it is known."""
        settings = self.settings
        data = load_data(task, settings.data, settings.limit, settings.shots)
        if "channel" in settings.extras:  # before anything takes long
            task.channel().require_text(data.rows["test"])
        if len(data.rows["train"]) < data.pool:
            self.say(
                f"{task.name}: with --limit {settings.limit} demonstrations come from "
                f"{len(data.rows['train']):,} of {data.pool:,} rows, evenly spaced"
            )
        indices, retrieval = self._retrieve(task, data)
        # Two results may be compared when all of `compared` is equal.
        compared = {
            "test_rows": data.digests["test"][:16],
            "pool_rows": data.digests["train"][:16],
            "prompt": store.digest(task.identity())[:16],
            "shots": retrieval["shots"],
            "retriever": retrieval["retriever"],
            "encoder": retrieval.get("encoder", "")[:16],
            **{name: getattr(settings, name) for name in ("inferencer", "faithful", "score", "max_tokens")},
            "dtype": self.model.dtype,
            "scorer": VERSION,
        }
        noted = {"prompt_version": task.version, "demonstrations": store.digest(indices)[:16]}
        noted["pool"] = f"{len(data.rows['train'])} of {data.pool}"
        identity = {
            "weights": self.model.digest,
            "tokenizer": self.model.tokenizer_digest,
            "task": task.identity() | {"name": task.name},
            "scores": settings.scores,
            "conditions": {"compared": compared, "noted": noted},
        }
        entry = store.Entry(self.out / store.STORE, identity, self.say)
        result = entry.result()
        if result is None or not entry.is_whole(len(indices), CHUNK):
            from .task_metrics import summarise

            records = self._records(task, data, indices, entry)
            dtype = str(self.model.model.dtype).removeprefix("torch.")  # where it was `auto`, too
            conditions = {"compared": compared | {"dtype": dtype}, "noted": noted}
            entry.finish(summarise(task, data, records, settings, conditions))
            result = entry.result()
            assert result is not None
        path = self.out / MODELS / self.model.name / f"{task.name}.json"
        stored, weights = store.read_json(path), self.model.digest
        if isinstance(stored, dict) and stored.get("weights") == weights and stored.get("key") != entry.key:
            self.say(
                f"{self.model.name}  {task.spec.title}: shown from now on with the settings of this run, no "
                "longer with those of an earlier one; give another --name to keep both"
            )
        # The origin of the test rows is no part of the identity, which their content is.
        hub = task.spec.hub and task.spec.hub.model_dump()
        rows = {"from_hub": settings.data == "hub", "hub": hub, "split": task.spec.splits.test}
        view = {"key": entry.key, "weights": weights, "rows": rows, "result": result}
        store.replace(path, store.dump(view))
        return result

    def _retrieve(self, task: Task, data: TaskData) -> tuple[list[list[int]], dict[str, Any]]:
        """Return the demonstrations of every test row, and what they depend on besides the rows."""
        name, model = self.settings.retriever, self.model
        count = task.spec.shots.count if self.settings.shots is None else self.settings.shots
        if count == 0:
            return [[] for _ in data.rows["test"]], {"retriever": "none", "shots": 0}
        identity: dict[str, Any] = {"shots": count}
        if task.spec.shots.by == "group":
            identity["retriever"] = "group"
        elif name not in RETRIEVERS:
            identity |= {"retriever": name, "encoder": self.encoder.digest}
        else:
            facts: dict[str, Callable[[], Any]] = {
                "seed": lambda: SEED,
                "candidates": lambda: CANDIDATES,
                "encoder": lambda: self.encoder.digest,
                "tokenizer": lambda: model.tokenizer_digest,
                "weights": lambda: model.digest,
                "dtype": lambda: model.dtype,
                "task": task.identity,
            }
            identity["retriever"] = f"openicl {name}"
            identity |= {fact: facts[fact]() for fact in RETRIEVERS[name]}
        folder = self.out / store.STORE / "retrieval"
        path = folder / f"{store.digest([identity, data.digests])[:32]}.json"
        while (indices := store.unsealed(path)) is None:
            with hold_if_free(store.lease(folder / "leases", path.stem)) as acquired:
                if acquired and store.unsealed(path) is None:
                    if path.is_file():
                        self.say(f"{path} is damaged: computing it again")
                    with show_activity(f"{task.name}: choosing demonstrations"):
                        chosen = self._choose(task, data, count)
                    store.replace(path, store.seal(chosen))
            if not acquired:
                time.sleep(store.POLL_SECONDS)
        return indices, identity

    def _choose(self, task: Task, data: TaskData, count: int) -> list[list[int]]:
        quiet_libraries()
        from .retrieve import DenseRetriever, GroupRetriever, openicl_retrieve, reader

        name = self.settings.retriever
        if task.spec.shots.by == "group":
            return GroupRetriever(reader(task, data.rows), ice_num=count).retrieve()
        self.say(f"{task.name}: choosing {count} demonstrations per row")
        if name not in RETRIEVERS:
            return DenseRetriever(reader(task, data.rows), self.encoder, count).retrieve()
        indices = openicl_retrieve(name, task, data.rows, count, self.settings.encoder, self.model)
        if self.settings.sentence_model is not None:
            self.encoder.require_unchanged()
        return indices

    def _records(
        self, task: Task, data: TaskData, indices: list[list[int]], entry: store.Entry
    ) -> list[dict[str, Any]]:
        """Return the records of all test rows: the missing chunks are scored here, or by other processes.

        Raises UserError when a score is not finite; nothing is published then.
        """
        pool = {folded(task.text(row)) for row in data.rows["train"]}
        _ = None if entry.is_whole(len(indices), CHUNK) else self.recorder  # it speaks before the bar

        def score(rows: range) -> list[dict[str, Any]]:
            told = 0

            def count(finished: int) -> None:
                nonlocal told
                told += finished
                advance(finished)

            records = self.score_rows(task, data, indices, rows, pool, count)
            self.computed += 1
            advance(len(records) - told)
            return records

        desc = f"{self.model.name} {task.name}"
        try:
            with show_activity(desc, len(indices), "row") as advance:
                return store.complete(entry, len(indices), CHUNK, score, advance)
        except NotFiniteError as error:
            text = f"{self.model.given}, task {task.name}: {error}; nothing is published"
            raise UserError(f"{text}; try --dtype float32", code="not-finite") from None

    def score_rows(
        self,
        task: Task,
        data: TaskData,
        indices: list[list[int]],
        numbers: range,
        pool: set[str],
        advance: Callable[[int], Any],
    ) -> list[dict[str, Any]]:
        """Return records of some test rows. pool: folded texts that demonstrations are chosen from."""
        rows = [data.rows["test"][number] for number in numbers]
        shots = [indices[number] for number in numbers]
        records = self.recorder.records(task, data.rows["train"], rows, shots, advance)
        for number, row, record in zip(numbers, rows, records, strict=True):
            record |= {"row": number, "id": row[ROW], "gold": row[LABEL], "group": row[GROUP]}
            record |= {"leaked": folded(task.text(row)) in pool, "text": data.texts[number]}
        return records


def run_all(
    model: EvaluatedModel, tasks: list[Task], settings: Settings, out: Path, say: Say
) -> list[dict[str, Any]]:
    """Return the results of all tasks; the model is described first: a partial run can be reported."""
    claim_name(model, out, say)
    job = Job(model, settings, out, say)
    results = []
    for task in tasks:
        began, before = time.perf_counter(), job.computed
        result = job.run(task)
        duration = f"{time.perf_counter() - began:.1f} s" if job.computed > before else "already known"
        low, high = (100 * result["interval"][end] for end in ("low", "high"))
        shortened, answer = result["rows_shortened"], only_answer(result)
        note = f", {shortened} shortened" if shortened else ""
        note += f", answers {answer} only" if answer is not None else ""
        say(
            f"{model.name}  {task.spec.title:<15} {100 * result['accuracy']:5.1f}  [{low:.1f}, {high:.1f}]  "
            f"chance {100 * result['chance']:.1f}  n {result['n']}{note}  ({duration})"
        )
        if 2 * shortened >= result["n"]:
            kinds = [(shortened, "demonstrations")] if result["shots"] else []
            kinds += [(result["rows_cut"], "text of the query")] if result["rows_cut"] else []
            lost = ", ".join(f"{rows:,} of {result['n']:,} prompts lost {kind}" for rows, kind in kinds)
            limit = settings.max_tokens or (job.recorder.context if job.computed > before else None)
            where = "the model's context" if limit is None else f"the context of {limit:,} tokens"
            say(f"{model.name}  {task.spec.title}: {lost} to {where}")
        results.append(result)
    return results
