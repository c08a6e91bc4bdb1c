"""Score a model on tasks: choose demonstrations, score chunks of rows, store the result.

Every process takes chunks that no other process holds. Starting the same command on more ranks, nodes or
schedulers therefore shares the work, and a killed job resumes. Modules that compute are imported only when
something has to be computed, so a known result costs no import time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from emo.common.cli.progress import show_activity
from emo.common.errors import UserError
from emo.common.io.lease import wait_and_hold
from emo.common.text import counted
from emo.data_prep.selection.similarity.grams import folded

from ..models.base import LanguageModel, NotFiniteError, Say
from ..models.encoder import Encoder
from ..models.model import EvaluatedModel, quiet_libraries
from ..results import store
from ..results.directory import MODELS, Conditions, Record, RowSource, TaskResult, claim_name, only_answer
from .settings import RETRIEVERS, SEED, VERSION, Settings
from .task_data import TaskData, load_data
from .tasks import GROUP, LABEL, ROW, ForeignTask, Task

if TYPE_CHECKING:
    from .records import Recorder

CHUNK = 256  # rows, the most work that a killed job loses


class Retrieval(NamedTuple):
    """The demonstrations of every test row. encoder: digest of the sentence model that chose them, or ""."""

    indices: list[list[int]]
    shots: int = 0
    retriever: str = "none"
    encoder: str = ""


class Job:
    """Evaluations of one model. `out` contains the store and, by model name, views of it."""

    def __init__(
        self, model: LanguageModel, settings: Settings, out: Path, say: Say = lambda text: None
    ) -> None:
        if settings.needs_hugging_face and not isinstance(model, EvaluatedModel):
            raise UserError(
                f"{model.name} is not a Hugging Face model, so --faithful, --inferencer ppl, the score "
                "channel and retrievers that use its tokenizer are not available",
                code="model",
            )
        self.model = model
        self.settings = settings
        self.out = out
        self.say = say
        self.computed = 0  # chunks that this process scored

    @cached_property
    def encoder(self) -> Encoder:
        """The sentence model that chooses demonstrations."""
        assert self.settings.sentence_model is not None
        return Encoder(self.settings.sentence_model, say=self.say)

    @cached_property
    def recorder(self) -> Recorder:
        """The maker of records, with the model loaded."""
        self.say(f"{self.model.name}: loading {self.model.source}")
        quiet_libraries()
        from .records import Recorder

        with show_activity(f"{self.model.name}: loading"):
            return Recorder(self.model, self.settings, self.say)

    def run(self, task: Task | ForeignTask) -> TaskResult:
        """Return the result of a task. It is computed unless it is known."""
        if isinstance(task, ForeignTask):
            return task.evaluate(self)
        settings = self.settings
        data = load_data(task, settings.data, settings.limit, settings.shots)
        if "channel" in settings.extras:  # before any long computation
            task.channel().require_text(data.rows["test"])
        if len(data.rows["train"]) < data.pool:
            self.say(
                f"{task.name}: with --limit {settings.limit} demonstrations come from "
                f"{len(data.rows['train']):,} of {data.pool:,} rows, evenly spaced"
            )
        retrieval = self._retrieve(task, data)
        conditions = self._conditions(task, data, retrieval)
        identity = {
            "weights": self.model.digest,
            "tokenizer": self.model.tokenizer_digest,
            "task": task.identity() | {"name": task.name},
            "scores": settings.scores,
            "conditions": conditions,
        }
        entry = store.Entry(self.out / store.STORE, identity, self.say)
        result: TaskResult | None = entry.result()
        if result is None or not entry.is_complete(len(retrieval.indices), CHUNK):
            from .task_metrics import summarise_task

            records = self._records(task, data, retrieval.indices, entry)
            dtype = {"dtype": self.model.computed_dtype}  # also if it was `auto`
            conditions = {"compared": conditions["compared"] | dtype, "noted": conditions["noted"]}
            entry.finish(summarise_task(task, data, records, settings, conditions))
            result = entry.result()
            assert result is not None
        # The origin of the test rows is not part of the key, but their content is.
        hub = task.spec.hub.model_dump() if task.spec.hub else None
        rows: RowSource = {"from_hub": settings.data == "hub", "hub": hub, "split": task.spec.splits.test}
        self.write_view(task.name, entry.key, result, rows)
        return result

    def _conditions(self, task: Task, data: TaskData, retrieval: Retrieval) -> Conditions:
        settings = self.settings
        compared = {
            "test_rows": data.digests["test"][:16],
            "pool_rows": data.digests["train"][:16],
            "prompt": store.digest_json(task.identity())[:16],
            "shots": retrieval.shots,
            "retriever": retrieval.retriever,
            "encoder": retrieval.encoder[:16],
            **{name: getattr(settings, name) for name in ("inferencer", "faithful", "score", "max_tokens")},
            "dtype": self.model.dtype,
            "scorer": VERSION,
        }
        noted = {"prompt_version": task.version, "demonstrations": store.digest_json(retrieval.indices)[:16]}
        noted["pool"] = f"{len(data.rows['train'])} of {data.pool}"
        return {"compared": compared, "noted": noted}

    def write_view(self, task: str, key: str, result: TaskResult, rows: RowSource) -> None:
        """Show a stored result in reports. rows: the origin of the test rows."""
        path = self.out / MODELS / self.model.name / f"{task}.json"
        stored = store.read_json_or_none(path)
        weights = self.model.digest
        if isinstance(stored, dict) and stored.get("weights") == weights and stored.get("key") != key:
            self.say(
                f"{self.model.name}  {result['title']}: the settings of this run replace those of an earlier "
                "result in reports. Set another --name to keep both."
            )
        store.replace(path, store.dump({"key": key, "weights": weights, "rows": rows, "result": result}))

    def _retrieve(self, task: Task, data: TaskData) -> Retrieval:
        """Return the demonstrations of every test row, from the store if they are known."""
        count = task.spec.shots.count if self.settings.shots is None else self.settings.shots
        if count == 0:
            return Retrieval([[] for _ in data.rows["test"]])
        identity = {"shots": count} | self._retriever_identity(task)
        folder = self.out / store.STORE / "retrieval"
        path = folder / f"{store.digest_json([identity, data.digests])[:32]}.json"
        while (indices := store.unsealed(path)) is None:
            with wait_and_hold(store.lease(folder / "leases", path.stem), None):
                if store.unsealed(path) is None:
                    if path.is_file():
                        self.say(f"{path} is damaged. Computing it again.")
                    with show_activity(f"{task.name}: choosing demonstrations"):
                        chosen = self._choose(task, data, count)
                    store.replace(path, store.seal_json(chosen))
        return Retrieval(indices, count, str(identity["retriever"]), str(identity.get("encoder", "")))

    def _retriever_identity(self, task: Task) -> dict[str, object]:
        """Return the facts besides the rows that the demonstrations depend on."""
        name = self.settings.retriever
        model = self.model
        if task.spec.shots.by == "group":
            return {"retriever": "group"}
        if name not in RETRIEVERS:
            return {"retriever": name, "encoder": self.encoder.digest}
        facts: dict[str, Callable[[], object]] = {
            "seed": lambda: SEED,
            "encoder": lambda: self.encoder.digest,
            "tokenizer": lambda: model.tokenizer_digest,
        }
        return {"retriever": f"openicl {name}"} | {fact: facts[fact]() for fact in RETRIEVERS[name]}

    def _choose(self, task: Task, data: TaskData, count: int) -> list[list[int]]:
        quiet_libraries()
        from .retrieve import DenseRetriever, GroupRetriever, openicl_retrieve, reader

        name = self.settings.retriever
        if task.spec.shots.by == "group":
            return GroupRetriever(reader(task, data.rows), ice_num=count).retrieve()
        self.say(f"{task.name}: choosing {count} demonstrations per row")
        if name not in RETRIEVERS:
            return DenseRetriever(reader(task, data.rows), self.encoder, count).retrieve()
        indices = openicl_retrieve(name, task, data.rows, count, self.settings.encoder, self.model)  # type: ignore[arg-type]
        if self.settings.sentence_model is not None:
            self.encoder.require_unchanged()
        return indices

    def _records(
        self, task: Task, data: TaskData, indices: list[list[int]], entry: store.Entry
    ) -> list[Record]:
        """Return the records of all test rows. Missing chunks are scored here or by other processes.

        Raises UserError when a score is NaN or infinite. Nothing is published then.
        """
        pool = {folded(task.text(row)) for row in data.rows["train"]}
        if not entry.is_complete(len(indices), CHUNK):
            _ = self.recorder  # it logs lines, so load it before the bar appears

        def score(rows: range) -> list[Record]:
            shown = 0

            def count(finished: int) -> None:
                nonlocal shown
                shown += finished
                advance(finished)

            records = self.score_rows(task, data, indices, rows, pool, count)
            self.computed += 1
            advance(len(records) - shown)
            return records

        try:
            with show_activity(f"{self.model.name} {task.name}", len(indices), "row") as advance:
                return store.complete(entry, len(indices), CHUNK, score, advance)
        except NotFiniteError as error:
            raise UserError(
                f"{self.model.source}, task {task.name}: {error}. Nothing is published. Try --dtype float32.",
                code="not-finite",
            ) from None

    def score_rows(
        self, task: Task, data: TaskData, indices: list[list[int]], numbers: range, pool: set[str],
        advance: Callable[[int], Any],
    ) -> list[Record]:  # fmt: skip
        """Return the records of some test rows.

        Args:
            task: The task.
            data: Its rows.
            indices: Demonstrations of every test row, as numbers of pool rows.
            numbers: The test rows to score.
            pool: Folded texts of the rows that demonstrations come from.
            advance: Receives the number of rows that were just finished.
        """
        rows = [data.rows["test"][number] for number in numbers]
        shots = [indices[number] for number in numbers]
        records = self.recorder.records(task, data.rows["train"], rows, shots, advance)
        for number, row, record in zip(numbers, rows, records, strict=True):
            record |= {"row": number, "id": row[ROW], "gold": row[LABEL], "group": row[GROUP]}
            record |= {"leaked": folded(task.text(row)) in pool, "text": data.texts[number]}
        return records


def run_all(
    model: LanguageModel, tasks: Sequence[Task | ForeignTask], settings: Settings, out: Path, say: Say
) -> list[TaskResult]:
    """Return the results of all tasks. A partial run can already be reported.

    Args:
        model: The model to score.
        tasks: Tasks, for example from `select_tasks`.
        settings: How they are evaluated.
        out: Results directory.
        say: Receives a line for each result and notice.
    """
    claim_name(model.describe(), out, say)
    job = Job(model, settings, out, say)
    results = []
    for task in tasks:
        began = time.perf_counter()
        before = job.computed
        result = job.run(task)
        computed = job.computed > before
        duration = f"{time.perf_counter() - began:.1f} s" if computed else "already known"
        say(f"{model.name}  {result['title']:<15} {_describe_result(result)}  ({duration})")
        if 2 * result["rows_shortened"] >= result["n"]:
            limit = settings.max_tokens or (model.context if computed else None)
            where = "the model's context" if limit is None else f"the context of {limit:,} tokens"
            say(f"{model.name}  {result['title']}: {_describe_lost(result)} to {where}")
        results.append(result)
    return results


def _describe_result(result: TaskResult) -> str:
    shortened = result["rows_shortened"]
    note = f", {shortened} shortened" if shortened else ""
    if answers := result.get("answers_cut"):
        note += f", {answers} cut at the length limit"
    if measure := result.get("measure"):
        note += "".join(f"\n  {part['label']:>18}  {part['value']:.4g}" for part in result.get("lengths", ()))
        return f"{result['score']} {measure['value']:.4g}  n {result['n']}{note}"
    answer = only_answer(result)
    note += f", answers {answer} only" if answer is not None else ""
    low, high = (100 * result["interval"][end] for end in ("low", "high"))
    return (
        f"{100 * result['accuracy']:5.1f}  [{low:.1f}, {high:.1f}]  chance {100 * result['chance']:.1f}  "
        f"n {result['n']}{note}"
    )


def _describe_lost(result: TaskResult) -> str:
    kinds = [(result["rows_shortened"], "demonstrations")] if result["shots"] else []
    kinds += [(result["rows_cut"], "text of the query")] if result["rows_cut"] else []
    return ", ".join(f"{rows:,} of {result['n']:,} prompts lost {kind}" for rows, kind in kinds)


def mean_accuracy(results: Sequence[TaskResult]) -> tuple[float | None, str]:
    """Return the mean accuracy of the results that have one, and a description of the results."""
    values = [result["accuracy"] for result in results if "accuracy" in result]
    if not values:
        return None, counted(len(results), "result")
    mean = sum(values) / len(values)
    return mean, f"mean accuracy {100 * mean:.1f} on {counted(len(values), 'task')}"
