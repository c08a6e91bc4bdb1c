"""One model on some tasks: retrieval, scoring in chunks, result. May be killed, and run many times at once.

Work is cut into chunks of rows. Every process takes chunks that nobody holds, so starting the same command on
more ranks, nodes or schedulers shares the work, and a chunk that is done is never done again. What computes
is imported where something is computed: a result that is known already costs no seconds of imports.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from emo.common.errors import UserError
from emo.common.lease import held
from emo.eval import store
from emo.eval.icl.encoder import Encoder
from emo.eval.icl.scores import NotFiniteError
from emo.eval.icl.settings import BUDGET, CANDIDATES, DENSE, RETRIEVERS, SEED, VERSION, Settings
from emo.eval.icl.task_data import TaskData, load_data
from emo.eval.icl.tasks import GROUP, LABEL, ROW, Task
from emo.eval.model import EvaluatedModel
from emo.eval.quiet import quiet_libraries
from emo.eval.results import MODELS, claim_name, only_answer

if TYPE_CHECKING:
    from emo.eval.icl.records import Record, Recorder

CHUNK = 256  # rows; what a killed job loses at most

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
        """The sentence model that demonstrations are chosen with."""
        openicl = self.settings.retriever in RETRIEVERS
        return Encoder(self.settings.encoder if openicl else self.settings.retriever, say=self.say)

    @cached_property
    def recorder(self) -> Recorder:
        """Return the maker of records, its model loaded. Raises UserError for a limit that it cannot keep."""
        self.say(f"{self.model.name}: loading {self.model.given}")
        quiet_libraries()
        from emo.eval.icl.prefix_scorer import PrefixScorer
        from emo.eval.icl.records import Recorder

        context, limit = self.model.context_length(), self.settings.max_tokens
        if context is not None and limit is not None and limit > context:
            raise UserError(f"--max_tokens {limit} exceeds the model's context of {context} tokens")
        if self.settings.inferencer == "ppl":
            return Recorder(self.model, self.settings, None)
        scorer = PrefixScorer(self.model.model, self._budget(limit or context), self.say)
        return Recorder(self.model, self.settings, scorer)

    def _budget(self, longest: int | None) -> int:
        """Return the tokens of a batch for prompts of at most `longest` tokens."""
        count = self.settings.batch_size
        return BUDGET if count is None else count * (longest or BUDGET)

    def run(self, task: Task) -> dict[str, Any]:
        """Return the result of a task, computed or found."""
        data = load_data(task, self.settings.data, self.settings.limit, self.settings.shots)
        if "channel" in self.settings.extras:
            task.require_channel()
        indices, retrieval = self._retrieve(task, data)
        conditions = self._conditions(task, data, retrieval, indices)
        identity = {
            "weights": self.model.digest,
            "tokenizer": self.model.tokenizer_digest,
            "task": task.identity() | {"name": task.name},
            "scores": self.settings.scores,
            "conditions": conditions,
        }
        entry = store.Entry(self.out / store.STORE, identity, self.say)
        result = entry.result()
        if result is None or not entry.is_whole(len(indices), CHUNK):
            from emo.eval.icl.task_metrics import summarise, worst

            records = self._records(task, data, indices, entry)
            dtype = str(self.model.model.dtype).removeprefix("torch.")  # where it was `auto`, too
            computed = conditions | {"compared": conditions["compared"] | {"dtype": dtype}}
            score = self.settings.score
            result = summarise(task, records, score, self.settings.scores, computed)
            entry.finish(result | {"worst": worst(task, data, records, score)})
            result = entry.result()
            assert result is not None
        self._show(task, entry.key, result)
        return result

    def _show(self, task: Task, key: str, result: dict[str, Any]) -> None:
        """Make a result the one that is shown under the model's name, and say so if another one was."""
        path = self.out / MODELS / self.model.name / f"{task.name}.json"
        stored, weights = store.read_json(path), self.model.digest
        if isinstance(stored, dict) and stored.get("weights") == weights and stored.get("key") != key:
            self.say(
                f"{self.model.name}  {task.spec.title}: shown from now on with the settings of this run, no "
                "longer with those of an earlier one; give another --name to keep both"
            )
        # The origin of the test rows is no part of the identity, which their content is.
        hub = task.spec.hub and task.spec.hub.model_dump()
        rows = {"from_hub": self.settings.data == "hub", "hub": hub, "split": task.spec.splits.test}
        view = {"key": key, "weights": weights, "rows": rows, "result": result}
        store.replace(path, store.dump(view))

    def _conditions(
        self, task: Task, data: TaskData, retrieval: dict[str, Any], indices: list[list[int]]
    ) -> dict[str, Any]:
        """Return what a result depends on. Two may be compared when all of `compared` is equal."""
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
            "dtype": self.model.dtype,
            "scorer": VERSION,
        }
        noted = {"prompt_version": task.version, "demonstrations": store.digest(indices)[:16]}
        return {"compared": compared, "noted": noted}

    def _retrieve(self, task: Task, data: TaskData) -> tuple[list[list[int]], dict[str, Any]]:
        """Demonstrations of every test row, and what they depend on. Kept in the store: found once."""
        name, count = self.settings.retriever, self.settings.shots
        count = task.spec.shots.count if count is None else count
        if count == 0:
            return [[] for _ in data.canonical["test"]], {"retriever": "none", "shots": 0}
        if task.spec.shots.by == "group":
            identity: dict[str, Any] = {"retriever": "group"}
        elif name in RETRIEVERS:
            identity = self._openicl_identity(task)
        else:
            identity = {"retriever": name, "encoder": self.encoder.digest}
        identity["shots"] = count
        folder = self.out / store.STORE / "retrieval"
        path = folder / f"{store.digest([identity, data.digests])[:32]}.json"
        while (indices := store.unsealed(path)) is None:
            with held(store.lease(folder / "leases", path.stem)) as acquired:
                if acquired and store.unsealed(path) is None:
                    if path.is_file():
                        self.say(f"{path} is damaged: computing it again")
                    store.replace(path, store.seal(self._find(task, data, count)))
            if not acquired:
                time.sleep(store.POLL_SECONDS)
        return indices, identity

    def _openicl_identity(self, task: Task) -> dict[str, Any]:
        """Return what the demonstrations of OpenICL's retriever depend on, data and their number aside."""
        name = self.settings.retriever
        identity: dict[str, Any] = {"retriever": f"openicl {name}"}
        if name in ("random", "votek", "mdl"):
            identity["seed"] = SEED
        if name in DENSE:
            # It passes texts through the evaluated model's tokenizer before it embeds them.
            identity |= {"encoder": self.encoder.digest, "tokenizer": self.model.tokenizer_digest}
        if name in ("dpp", "mdl"):
            identity["candidates"] = CANDIDATES
        if name == "mdl":
            model = {"weights": self.model.digest, "dtype": self.model.dtype}
            identity |= model | {"task": task.identity()}
        return identity

    def _find(self, task: Task, data: TaskData, count: int) -> list[list[int]]:
        quiet_libraries()
        from emo.eval.icl.retrieve import DenseRetriever, GroupRetriever, openicl_retrieve

        reader, name = data.reader(task), self.settings.retriever
        if task.spec.shots.by == "group":
            return GroupRetriever(reader, ice_num=count).retrieve()
        self.say(f"{task.name}: choosing {count} demonstrations per row")
        if name in RETRIEVERS:
            indices = openicl_retrieve(name, task, data, count, self.settings.encoder, self.model)
            if name in DENSE:
                self.encoder.require_unchanged()
            return indices
        return DenseRetriever(reader, ice_num=count, sentence_transformers_model_name=self.encoder).retrieve()

    def _records(
        self, task: Task, data: TaskData, indices: list[list[int]], entry: store.Entry
    ) -> list[Record]:
        """Return the records of all test rows: the missing chunks are scored here, or by other processes.

        Raises UserError when a score is not finite; nothing is published then.
        """
        from emo.eval.icl.task_metrics import row_texts

        pool = Counter(row_texts(task, data.rows["train"]))
        _ = None if entry.is_whole(len(indices), CHUNK) else self.recorder  # it speaks before the bar

        def score(rows: range) -> list[Record]:
            before = bar.n
            records = self._score_rows(task, data, indices, rows, pool, bar.update)
            self.computed += 1
            bar.update(before + len(records) - bar.n)
            return records

        label = f"{self.model.name} {task.name}"
        try:
            with tqdm(total=len(indices), desc=label, unit="row", disable=None) as bar:
                return store.complete(entry, len(indices), CHUNK, score, bar.update)
        except NotFiniteError as error:
            where = f"{self.model.given}, task {task.name}"
            raise UserError(f"{where}: {error}; nothing is published; try --dtype float32") from None

    def _score_rows(
        self,
        task: Task,
        data: TaskData,
        indices: list[list[int]],
        rows: range,
        pool: Counter[str],
        advance: Callable[[int], Any],
    ) -> list[Record]:
        """Return records of some test rows, by an OpenICL inferencer over an OpenICL retriever."""
        from datasets import DatasetDict

        from emo.eval.icl.task_metrics import row_text

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
        duration = f"{time.perf_counter() - began:.1f} s" if job.computed > before else "already known"
        low, high = (100 * result["interval"][end] for end in ("low", "high"))
        note = f", {result['rows_shortened']} shortened" if result["rows_shortened"] else ""
        answer = only_answer(result)
        note += f", answers {answer} only" if answer is not None else ""
        say(
            f"{model.name}  {task.spec.title:<15} {100 * result['accuracy']:5.1f}  [{low:.1f}, {high:.1f}]  "
            f"chance {100 * result['chance']:.1f}  n {result['n']}{note}  ({duration})"
        )
        if 2 * result["rows_shortened"] >= result["n"]:
            # Asking for the context loads the model: only where that has been done anyway.
            context = model.context_length() if job.computed > before else None
            limit = settings.max_tokens or context
            kinds = [(result["rows_shortened"], "demonstrations")] if result["shots"] else []
            kinds += [(result["rows_cut"], "text of the query")] if result["rows_cut"] else []
            lost = ", ".join(f"{rows:,} of {result['n']:,} prompts lost {kind}" for rows, kind in kinds)
            where = "the model's context" if limit is None else f"the context of {limit:,} tokens"
            say(f"{model.name}  {task.spec.title}: {lost} to {where}")
        results.append(result)
    return results
