"""Results of lm-evaluation-harness's tasks: its numbers, and per row what intervals and comparisons need."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import random
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple
from unittest import mock

import lm_eval
import numpy as np
import torch
from lm_eval.api import metrics
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

from emo.common.cli.progress import show_activity
from emo.common.errors import UserError, one_line

from ..icl.job import CHUNK, Job
from ..models.model import EvaluatedModel
from ..results import stats, store
from ..results.directory import Record, TaskResult
from .adapter import SCORER, Fate, StoredAnswers

BY = "lm-eval"  # that chooses the demonstrations
PREFERRED = ("acc_norm", "acc", "exact_match")  # metrics that rows decide as right or wrong
# Other metrics, such as F1, may be 0 or 1 in all rows of one model only.
RIGHT_OR_WRONG = re.compile(r"(^|_)(acc|em)(_|$)|match|pass")
# Errors that the code and templates of tasks raise.
FAULTS = (
    ValueError,
    ArithmeticError,
    AssertionError,
    LookupError,
    TypeError,
    ImportError,
    NotImplementedError,
)
# Aggregations of one number, or number and weight, per row -> scale of `stats.estimate_measure`.
SCALES = {
    metrics.mean: "mean",
    metrics.perplexity: "perplexity",
    metrics.weighted_perplexity: "perplexity",
    metrics.bits_per_byte: "bits",
}


class Run(NamedTuple):
    """What lm_eval.evaluate returned for a task or group."""

    tasks: Mapping[str, Any]  # lm-eval's, by name
    group: Any  # lm_eval's Group, or None
    samples: Mapping[str, Any]  # lists of rows, by task
    values: dict[str, float]  # lm-eval's numbers for the task or group, by "metric,filter"
    answers: StoredAnswers


def seed() -> None:
    """Seed all generators as lm_eval.simple_evaluate does."""
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)  # noqa: NPY002 - lm-eval's tasks use this generator
    torch.manual_seed(DEFAULT_OTHER_SEED)


def evaluate_harness_task(name: str, title: str, loaded: Any, job: Job) -> TaskResult:
    """Return the result of the job's model on a task or group, and write its view.

    Args:
        name: Name of the results.
        title: Title of the task in reports.
        loaded: Lm-eval's tasks and groups.
        job: The model and its settings.
    """
    if not isinstance(job.model, EvaluatedModel):
        raise UserError(
            f"{job.model.name} is not a Hugging Face model, so lm-eval's tasks are not available",
            code="model",
        )
    if any(getattr(part, "UNSAFE_CODE", False) for part in loaded["tasks"].values()):
        raise UserError(f"{title} runs code that the model writes, which is not supported", code="lm-eval")
    answers = StoredAnswers(job, name)
    try:
        run = _run(loaded, answers)
        records = _records(run, _deciding_metric(run))
        result = _summarise(job, run, name, title, records)
    except FAULTS as error:
        if isinstance(error, UserError):
            raise
        reason = f"{type(error).__name__}: {one_line(error, 200)}"
        raise UserError(f"lm-eval cannot evaluate {title}: {reason}", code="lm-eval") from error
    identity = {
        "task": name,
        "weights": job.model.digest,
        "version": SCORER,
        "answers": answers.contents,
        "result": store.digest_json(result),
        "records": store.digest_json(records),
    }
    entry = store.Entry(job.out / store.STORE, identity, job.say)
    if entry.result() is None or not entry.is_complete(len(records), CHUNK):
        store.complete(entry, len(records), CHUNK, lambda rows: [records[row] for row in rows])
        entry.finish(result)
    job.write_view(name, entry.key, result, {"from_hub": False, "hub": None, "split": "test"})
    return result


def _run(loaded: Any, answers: StoredAnswers) -> Run:
    """Run lm_eval.evaluate as lm_eval.simple_evaluate does, which would return nothing on some ranks."""
    settings = answers.job.settings
    for part in loaded["tasks"].values():
        shots = part.get_config("num_fewshot")
        if shots is None or (settings.shots is not None and shots != 0):  # 0 in a task's file is final
            part.set_config(key="num_fewshot", value=settings.shots or 0)
        part.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    no_bars = mock.patch("lm_eval.api.task.tqdm", lambda rows, **options: rows)  # while it makes prompts
    with show_activity(f"{answers.job.model.name} {answers.label}"), no_bars:
        results = lm_eval.evaluate(answers, loaded, limit=settings.limit, bootstrap_iters=0, log_samples=True)
    group = next(iter(loaded["groups"].values()), None)  # the outer one is first
    name = group.name if group else next(iter(loaded["tasks"]))
    values = {
        key: float(value)
        for key, value in results["results"][name].items()
        if "," in key and "_stderr," not in key and not isinstance(value, str) and math.isfinite(value)
    }
    return Run(loaded["tasks"], group, results["samples"], values, answers)


def _deciding_metric(run: Run) -> str:
    """Return the "metric,filter" that comparisons use: the first of PREFERRED, or else of the task."""
    if not run.values:
        names = ", ".join(run.tasks)
        raise ValueError(f"it has no metric for all its tasks. Name them instead: {names}")
    found = (key for name in PREFERRED for key in run.values if key.startswith(f"{name},"))
    return next(found, next(iter(run.values)))


def _records(run: Run, deciding: str) -> list[Record]:
    """Return a record for each row, with its value of all metrics and its part of the deciding one."""
    records: list[Record] = []
    for name in run.tasks:
        rows: dict[int, Record] = {}
        for sample in run.samples[name]:
            number = sample["doc_id"]
            fate = run.answers.fates.get((name, number), Fate())
            record = rows.setdefault(
                number,
                {"id": number, "group": name, "gold": str(sample["target"]), "metrics": {}, "answers": {}}
                | {"dropped": 0, "cut": fate.lost, "answer_cut": fate.cut, "choices": len(sample["resps"])},
            )
            record["answers"][sample["filter"]] = _plain(sample["filtered_resps"])
            values = {f"{m},{sample['filter']}": _plain(sample[m]) for m in sample["metrics"]}
            record["metrics"] |= values
        records += rows.values()
    for number, record in enumerate(records):
        record["row"] = number
        value = record["metrics"].get(deciding)
        weighted = isinstance(value, list) and len(value) == 2
        record["value"], record["weight"] = value if weighted else (value, 1.0)
        if record["value"] in (0, 1):
            record["correct"] = record["value"] == 1
    return records


def _plain(value: Any) -> Any:
    """Return a value as JSON stores it. Numbers and arrays of numpy become numbers and lists."""
    return json.loads(json.dumps(value, allow_nan=False, default=_listed))


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _scale(run: Run, deciding: str) -> str:
    """Return the scale on which rows add up to the deciding metric, or "" if they do not."""
    name = deciding.split(",")[0]
    found = {SCALES.get(part.aggregation().get(name), "") for part in run.tasks.values()}
    scale = found.pop() if len(found) == 1 else ""
    return scale if run.group is None or scale == "mean" else ""


def _unweighted(run: Run, deciding: str) -> bool:
    """Return whether the group's value is the mean over its tasks rather than over all rows."""
    wanted = deciding.split(",")[0]
    configs = run.group.aggregate_metric_list if run.group else []
    return any(config.metric == wanted and not config.weight_by_size for config in configs)


def _summarise(job: Job, run: Run, name: str, title: str, records: list[Record]) -> TaskResult:
    """Return the result. It has the keys of our own tasks, or `measure` if rows are not right or wrong."""
    deciding = _deciding_metric(run)
    shots = sorted({int(part.get_config("num_fewshot") or 0) for part in run.tasks.values()})
    versions = sorted({str(part.VERSION) for part in run.tasks.values()})
    kinds = {part.OUTPUT_TYPE for part in run.tasks.values()}
    max_tokens = job.settings.max_tokens
    if max_tokens is None and "loglikelihood_rolling" in kinds:  # longer windows lower a perplexity
        assert isinstance(job.model, EvaluatedModel)
        max_tokens = job.model.context
    compared = {
        "test_rows": store.digest_json([[r["group"], r["id"], r["gold"]] for r in records])[:16],
        "prompt": store.digest_json(run.answers.contents)[:16],
        "score": deciding,
        "metrics": store.digest_json({key: _define_metrics(part) for key, part in run.tasks.items()})[:16],
        "max_tokens": max_tokens,
        "dtype": run.answers.dtype,
        "scorer": SCORER,
    }
    result: TaskResult = {
        "task": name,
        "title": title,
        "version": ", ".join(versions),
        "retriever": BY,
        "shots": shots[-1],
        "conditions": {"compared": compared, "noted": {"prompt_version": ", ".join(versions)}},
        "score": deciding,
        "metrics": run.values,
        "n": len(records),
        "answers_cut": sum(r["answer_cut"] for r in records) if "generate_until" in kinds else None,
        "rows_shortened": sum(r["cut"] > 0 for r in records),
        "rows_cut": sum(r["cut"] > 0 for r in records),
    }
    scale = _scale(run, deciding) if all(r["value"] is not None for r in records) else ""
    unweighted = _unweighted(run, deciding)
    better = next(iter(run.tasks.values())).higher_is_better().get(deciding.split(",")[0])
    decides = RIGHT_OR_WRONG.search(deciding.split(",")[0]) and all("correct" in r for r in records)
    if scale == "mean" and better is not False and decides:
        _add_accuracy(result, run, records, unweighted)
        return result
    scale = "" if unweighted else scale
    interval = _interval(records, scale)
    value = run.values[deciding]
    result["measure"] = {"value": value, "scale": scale, "higher_is_better": better, "interval": interval}
    return result


def _define_metrics(part: Any) -> list[str]:
    """Return what decides how the answers to a task become values: its version, filters and metrics."""
    chosen = [part.get_config(key) for key in ("filter_list", "metric_list", "process_results")]
    return [str(part.VERSION), json.dumps(chosen, default=_source)]


def _source(value: Any) -> str:
    """Return the source of a function of a task, or its name without one."""
    with contextlib.suppress(TypeError, OSError):
        return inspect.getsource(value)
    return str(getattr(value, "__qualname__", type(value).__name__))


def _interval(records: list[Record], scale: str) -> dict[str, float] | None:
    """Return the interval of a measure, if rows add up to it."""
    if not scale:
        return None
    estimate = stats.estimate_measure([r["value"] for r in records], [r["weight"] for r in records], scale)
    if (interval := estimate.interval()) is None:
        return None
    ends = asdict(interval)
    # Up to the largest number that can be stored.
    return {end: math.exp(min(x, 700.0)) for end, x in ends.items()} if scale == "perplexity" else ends


def _add_accuracy(result: TaskResult, run: Run, records: list[Record], unweighted: bool) -> None:
    """Add the keys of a result that depend on which rows are right."""
    correct = [r["correct"] for r in records]
    groups = [r["group"] for r in records] if unweighted else None
    accuracy = stats.accuracy(correct, groups).to_json()
    by_group: dict[str, list[bool]] = {}
    for record in records if unweighted else ():
        by_group.setdefault(record["group"], []).append(record["correct"])
    choices = all(part.OUTPUT_TYPE == "multiple_choice" for part in run.tasks.values())
    gold = Counter(r["gold"] for r in records)
    result.update(
        {
            **accuracy,
            "labels": [],
            "chance": sum(1 / r["choices"] for r in records) / len(records) if choices else 0.0,
            "majority": max(gold.values()) / len(records),
            "scores": {},
            "macro_f1": None,
            "confusion": [],
            "groups": {n: {"accuracy": sum(c) / len(c), "n": len(c)} for n, c in by_group.items()},
            "leaked": 0,
            "clean": accuracy,
            "worst": [],
        }
    )
