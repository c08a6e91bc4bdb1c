"""One model on some tasks: retrieval, scoring in chunks, result. May be killed, and run many times at once.

Work is cut into chunks of rows. Every process takes chunks that nobody holds, so starting the same command on
more ranks, nodes or schedulers shares the work, and a chunk that is done is never done again.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from datasets import DatasetDict
from tqdm import tqdm

from data_prep.config import UserError
from eval import stats, store
from eval.forward import PrefixScorer
from eval.model import EvaluatedModel
from eval.openicl_compat import AccEvaluator, DatasetReader, quiet
from eval.retrieve import DenseRetriever, Encoder, GroupRetriever, StoredRetriever, indices_digest
from eval.score import SCORES, VERSION, PrefixPPLInferencer
from eval.tasks import GROUP, LABEL, Task, TaskData, load_data

CHUNK = 256  # rows; what a killed job loses at most
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Settings:
    """What may be chosen about an evaluation; all of it is part of the result's key except `budget`."""

    data: str
    retriever: str = "minilm"
    shots: int | None = None  # None: the task's own number
    limit: int | None = None
    score: str = "openicl_ppl"
    max_tokens: int | None = None  # longest prompt; None: the model's context
    budget: int = 8192  # tokens per batch


class Job:
    """Evaluations of one model; `out` holds the store and, by model name, views on it."""

    def __init__(self, model: EvaluatedModel, settings: Settings, out: Path) -> None:
        self.model = model
        self.settings = settings
        self.out = out
        self.computed = 0  # chunks that this process scored

    @cached_property
    def encoder(self) -> Encoder:
        return Encoder(self.settings.retriever)

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
            result = summarise(task, records, self.settings.score, retrieval)
            entry.finish(result | {"worst": worst(task, data, records, self.settings.score)})
            result = entry.result()
            assert result is not None
        view = {"key": entry.key, "weights": self.model.digest, "result": result}
        store.replace(self.out / "models" / self.model.name / f"{task.name}.json", store.dump(view))
        return result

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
            "scorer": VERSION,
        }

    def _retrieve(self, task: Task, data: TaskData) -> tuple[list[list[int]], dict[str, Any]]:
        """Demonstrations of every test row, and what they depend on. Kept in the store: found once."""
        count = task.spec.shots.count if self.settings.shots is None else self.settings.shots
        by_group = task.spec.shots.by == "group"
        how = "group" if by_group else self.settings.retriever
        retrieval = {"retriever": how, "shots": count}
        if not by_group and count:
            retrieval["encoder"] = self.encoder.digest
        path = self.out / "store" / "retrieval" / f"{store.digest([retrieval, data.digest])[:32]}.json"
        if path.is_file():
            return json.loads(path.read_text()), retrieval
        reader = data.reader(task)
        if by_group:
            indices = GroupRetriever(reader, ice_num=count).retrieve()
        elif count == 0:
            indices = [[] for _ in range(len(data.rows["test"]))]
        else:
            indices = DenseRetriever(
                reader, ice_num=count, sentence_transformers_model_name=self.encoder
            ).retrieve()
        store.replace(path, json.dumps(indices))
        return indices, retrieval

    def _score(
        self, task: Task, data: TaskData, indices: list[list[int]], entry: store.Entry, ranges: list[range]
    ) -> None:
        """Score the missing chunks that nobody else is at, until all are there."""
        done = sum(len(r) for i, r in enumerate(ranges) if entry.has_chunk(i))
        bar = tqdm(
            total=len(indices), initial=done, desc=f"{self.model.name} {task.name}", unit="row", disable=None
        )
        pool = Counter(_text(task, row) for row in data.rows["train"])
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
    ) -> list[dict[str, Any]]:
        """Records of some test rows, by an OpenICL inferencer over an OpenICL retriever."""
        part = DatasetDict({"train": data.rows["train"], "test": data.rows["test"].select(rows)})
        reader = DatasetReader(part, input_columns=task.inputs, output_column=LABEL)
        retriever = StoredRetriever(reader, [indices[r] for r in rows], ice_num=max(map(len, indices)))
        with tempfile.TemporaryDirectory() as scratch, quiet():
            inferencer = PrefixPPLInferencer(
                tokenizer_name=self.model.tokenizer,
                max_model_token_num=self.settings.max_tokens,
                output_json_filepath=scratch,
                labels=task.labels,
                scorer=self.scorer,
                score=self.settings.score,
            )
            predictions = inferencer.inference(retriever, task.demonstration_template, task.template)
        records = []
        for n, (row, sample, entry) in enumerate(zip(rows, inferencer.samples, part["test"], strict=True)):
            scores = {name: [float(f"{x:.9g}") for x in inferencer.scores[name][n]] for name in SCORES}
            records.append(
                {
                    "row": row,
                    "gold": entry[LABEL],
                    "group": entry[GROUP],
                    "prediction": predictions[n],
                    "demonstrations": sample.demonstrations,
                    "dropped": sample.dropped,
                    "cut": sample.cut,
                    "leaked": pool[_text(task, entry)] > 0,
                    "scores": scores,
                }
            )
        return records


def _text(task: Task, row: dict[str, str]) -> str:
    """The inputs of a row; equal texts mean that a test row stands in the pool."""
    return "\n".join(row[name] for name in task.inputs)


def summarise(
    task: Task, records: list[dict[str, Any]], score: str, retrieval: dict[str, Any]
) -> dict[str, Any]:
    """Metrics of a task's records; a pure function of them."""
    gold = [r["gold"] for r in records]
    groups = [r["group"] for r in records] if task.spec.group else None
    by_score = {name: _metrics(records, task, name, groups) for name in SCORES}
    main = by_score[score]
    correct = [r["prediction"] == r["gold"] for r in records]
    # OpenICL's evaluator counts the rows; a task with groups then averages over them.
    pooled = AccEvaluator().score([r["prediction"] for r in records], gold)["accuracy"]
    assert abs(pooled - sum(correct) / len(correct)) < 1e-12
    clean = [i for i, r in enumerate(records) if not r["leaked"]]
    counts = stats.confusion(gold, [r["prediction"] for r in records], task.labels)
    per_group = {}
    for group in sorted(set(groups or [])):
        of_group = [c for c, g in zip(correct, groups or [], strict=True) if g == group]
        per_group[group] = {"accuracy": sum(of_group) / len(of_group), "n": len(of_group)}
    return {
        "task": task.name,
        "title": task.spec.title,
        "version": task.version,
        "retriever": retrieval["retriever"],
        "shots": retrieval["shots"],
        "labels": task.labels,
        "chance": 1 / len(task.labels),
        "majority": max(Counter(gold).values()) / len(gold),
        "score": score,
        **main,
        "openicl_accuracy": pooled,
        "scores": by_score,
        "macro_f1": stats.macro_f1(counts),
        "confusion": counts,
        "groups": per_group,
        "leaked": len(records) - len(clean),
        "clean": _accuracy([correct[i] for i in clean], groups and [groups[i] for i in clean]),
        "rows_shortened": sum(r["dropped"] > 0 for r in records),
        "rows_cut": sum(r["cut"] > 0 for r in records),
    }


def worst(
    task: Task, data: TaskData, records: list[dict[str, Any]], score: str, count: int = 5
) -> list[dict[str, Any]]:
    """The wrong rows whose right label lost by most, with what the model was shown."""

    def lost_by(record: dict[str, Any]) -> float:
        values = record["scores"][score]
        return values[task.labels.index(record["gold"])] - min(values)

    wrong = [r for r in records if r["prediction"] != r["gold"]]
    chosen = sorted(wrong, key=lambda r: (-lost_by(r), r["row"]))[:count]
    return [
        {
            "row": r["row"],
            "text": _text(task, data.rows["test"][r["row"]]),
            "gold": r["gold"],
            "prediction": r["prediction"],
            "scores": dict(zip(task.labels, r["scores"][score], strict=True)),
            "dropped": r["dropped"],
            "demonstrations": [
                {"text": _text(task, data.rows["train"][d]), "label": data.rows["train"][d][LABEL]}
                for d in r["demonstrations"]
            ],
        }
        for r in chosen
    ]


def _metrics(
    records: list[dict[str, Any]], task: Task, score: str, groups: list[str] | None
) -> dict[str, Any]:
    """Accuracy when the smallest value of `score` decides."""
    predicted = [
        task.labels[min(range(len(s)), key=s.__getitem__)] for s in (r["scores"][score] for r in records)
    ]
    return _accuracy([p == r["gold"] for p, r in zip(predicted, records, strict=True)], groups)


def _accuracy(correct: list[bool], groups: list[str] | None) -> dict[str, Any]:
    if not correct:
        return {"accuracy": None, "n": 0}
    found = stats.as_dict(stats.accuracy(correct, groups))
    return {"accuracy": found.pop("value"), **found}


def run_all(
    model: EvaluatedModel, tasks: list[Task], settings: Settings, out: Path, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """All tasks of a model, which is described first, so that a partial run can be reported."""
    claim_name(model, out, say)
    job = Job(model, settings, out)
    results = []
    for task in tasks:
        began, before = time.perf_counter(), job.computed
        result = job.run(task)
        how = f"{time.perf_counter() - began:.1f} s" if job.computed > before else "already known"
        low, high = (100 * result["bootstrap"][end] for end in ("low", "high"))
        say(
            f"{model.name}  {task.spec.title:<15} {100 * result['accuracy']:5.1f}  [{low:.1f}, {high:.1f}]  "
            f"chance {100 * result['chance']:.1f}  n {result['n']}  ({how})"
        )
        results.append(result)
    return results


def claim_name(model: EvaluatedModel, out: Path, say: Callable[[str], None]) -> None:
    """Describe the model under its name. Views of other weights under the same name are removed."""
    directory = out / "models" / model.name
    described = directory / "model.json"
    if described.is_file() and json.loads(described.read_text())["weights"] != model.digest:
        say(f"{model.name}: other weights than in the last run; its earlier results are not shown any more")
        for path in directory.glob("*.json"):
            path.unlink(missing_ok=True)
    facts = {
        "name": model.name,
        "path": model.given,
        "weights": model.digest,
        "tokenizer": model.tokenizer_digest,
        "dtype": model.dtype,
        "facts": model.facts,
    }
    store.replace(described, store.dump(facts))


def views(out: Path) -> Iterator[tuple[dict[str, Any], dict[str, dict[str, Any]]]]:
    """(model description, task -> view) of every model evaluated under `out`."""
    for described in sorted(out.glob("models/*/model.json")):
        model = json.loads(described.read_text())
        found = {}
        for path in sorted(described.parent.glob("*.json")):
            view = json.loads(path.read_text())
            if path.name not in ("model.json", "samples.json") and view["weights"] == model["weights"]:
                found[path.stem] = view
        yield model, found


def require_views(out: Path) -> list[tuple[dict[str, Any], dict[str, dict[str, Any]]]]:
    """`views`, or UserError when there are none."""
    found = list(views(out))
    if not found:
        raise UserError(
            f"no results in {out}; make them with: python -m eval run --model DIR --data DIR --out {out}"
        )
    return found
