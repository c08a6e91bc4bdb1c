"""Files of lm-evaluation-harness: results_DATE.json and samples_TASK_DATE.jsonl in a directory per model.

The files follow release 0.4.13 (lm_eval/result_schema.py and loggers/evaluation_tracker.py). A task with
groups becomes a group of subtasks, like MMLU in the harness. DATE is when the results were finished, so
exporting again writes the same files. The files contain no local paths.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from emo.common.errors import UserError
from emo.common.io.files import write_text

from ..icl.prompts import PromptBuilder
from ..icl.task_data import load_data
from ..icl.tasks import GROUP, LABEL, Row, Task, load_task
from ..report.compare import DIGESTS, describe_lost
from ..results import store
from ..results.directory import Model, Record, TaskResult
from .figures import ExportedAccuracy, Figures, read_figures

SOURCE = "emo-pipeline"  # instead of a model class of the harness
FILTER = "none"  # the harness's name for unfiltered responses

Samples = dict[str, list[dict[str, Any]]]  # by group; lm_eval.result_schema.SampleResult


def describe_all_lost(models: Sequence[Model]) -> str:
    """Return a line on the tasks and models that lost demonstrations to the context, or ""."""
    parts = []
    for task in dict.fromkeys(task for model in models for task in model.results):
        lost = {}
        title = ""
        for model in models:
            with contextlib.suppress(UserError):  # the export of the model reports damaged records
                if task in model.results:
                    lost[model.name] = model.records(task).lost
                    title = model.results[task]["title"]
        if any(any(row) for rows in lost.values() for row in rows):
            parts.append(describe_lost(title, lost))
    return f"{'; '.join(parts)}; n-shot is the requested number" if parts else ""


def write_harness(model: Model, out: Path, data: str | None, tasks: str = "") -> Path:
    """Write a model's files, and return the path of its results, which are written last.

    Raises UserError before writing anything if results are damaged or the rows differ from those evaluated.

    Args:
        model: The model.
        out: Directory of all models.
        data: Source of the rows. Without it no samples are written.
        tasks: Comma-separated files of tasks that are not built in.
    """
    foreign = {task: r for task, r in model.all_results.items() if "metrics" in r}
    figures_of_tasks = [f for f in read_figures(model) if f.task not in foreign] if model.results else []
    value = _results(model, figures_of_tasks)
    for task, result in foreign.items():
        _add_foreign(value, model, task, result)
    samples = [_samples(data, tasks, figures) for figures in figures_of_tasks] if data else []
    stamp = datetime.fromtimestamp(value["date"], UTC).replace(tzinfo=None).isoformat().replace(":", "-")
    directory = out / value["model_name_sanitized"]
    directory.mkdir(parents=True, exist_ok=True)
    if samples:
        value |= {"task_hashes": {}, "n-samples": {}}
    for figures, (by_group, full) in zip(figures_of_tasks, samples, strict=False):
        for group, name in _names(figures).items():
            rows = by_group[group]
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            write_text(directory / f"samples_{name}_{stamp}.jsonl", lines)
            hashes = "".join(row["doc_hash"] + row["prompt_hash"] + row["target_hash"] for row in rows)
            value["task_hashes"][name] = _hash(hashes)
            value["n-samples"][name] = {"original": full[group], "effective": len(rows)}
    path = directory / f"results_{stamp}.json"
    write_text(path, json.dumps(value, indent=2) + "\n")
    return path


def _results(model: Model, figures_of_tasks: list[Figures]) -> dict[str, Any]:
    """Return the known part of lm_eval.result_schema.EvalResults.

    Raises UserError if two tasks or groups would have the same name.
    """
    value: dict[str, Any] = {"results": {}, "groups": {}, "group_subtasks": {}, "configs": {}}
    value |= {"versions": {}, "n-shot": {}, "higher_is_better": {}}

    def entry(name: str, alias: str, result: TaskResult, accuracy: ExportedAccuracy) -> dict[str, Any]:
        _require_free_name(value, model, name)
        stderr = "N/A" if accuracy.stderr is None else accuracy.stderr
        numbers = {"name": name, "alias": alias, "sample_len": accuracy.n}
        value["results"][name] = numbers | {f"acc,{FILTER}": accuracy.value, f"acc_stderr,{FILTER}": stderr}
        value["versions"][name] = result["version"]
        value["n-shot"][name] = result["shots"]
        value["higher_is_better"][name] = {"acc": True}
        return value["results"][name]

    for figures in figures_of_tasks:
        task = figures.task
        result = figures.result
        names = _names(figures)
        total = entry(task, result["title"], result, figures.accuracy)
        total |= {f"macro_f1,{FILTER}": result["macro_f1"], f"macro_f1_stderr,{FILTER}": "N/A"}
        value["higher_is_better"][task]["macro_f1"] = True
        if result["groups"]:
            value["groups"][task] = total
            value["group_subtasks"][task] = list(names.values())
            for group, name in names.items():
                entry(name, group, result, figures.groups[group])
        value["configs"] |= {name: _task_config(name, figures) for name in names.values()}
    if not value["groups"]:
        del value["groups"]
    return value | {
        "config": _model_config(model, figures_of_tasks),
        "date": max((figures.finished for figures in figures_of_tasks), default=0.0),
        "model_source": SOURCE,
        "model_name": model.name,
        "model_name_sanitized": re.sub(r'["<>:/|\\?*\[\]]+', "__", model.name),
        **dict.fromkeys(("system_instruction", "system_instruction_sha")),
        "fewshot_as_multiturn": False,
        **dict.fromkeys(("chat_template", "chat_template_sha")),
    }


def _require_free_name(value: dict[str, Any], model: Model, name: str) -> None:
    """Raise UserError if a task or group in `value` has the name."""
    if name in value["results"]:
        problem = f"{model.name}: two tasks or groups would have the name {name}"
        cure = "Rename a task file, or evaluate a task of lm-eval in another directory"
        raise UserError(f"{problem}. {cure}.", code="same-name")


def _add_foreign(value: dict[str, Any], model: Model, task: str, result: TaskResult) -> None:
    """Add the numbers that lm-eval computed itself, under its name of the task."""
    name = result["title"]
    _require_free_name(value, model, name)
    value["results"][name] = {"name": name, "alias": name, "sample_len": result["n"], **result["metrics"]}
    value["versions"][name] = result["version"]
    value["n-shot"][name] = result["shots"]
    value["configs"][name] = {"task": name, "num_fewshot": result["shots"]}
    key = (model.views.get(task) or model.measures[task])["key"]
    finished = (model.out / store.STORE / key / store.RESULT).stat().st_mtime
    value["date"] = max(value["date"], finished)


def _task_config(name: str, figures: Figures) -> dict[str, object]:
    """Return the known part of a task's configuration."""
    result = figures.result
    return {
        "task": name,
        "task_alias": name.removeprefix(f"{figures.task}_") if result["groups"] else result["title"],
        "output_type": "multiple_choice",
        "doc_to_choice": result["labels"],
        "num_fewshot": result["shots"],
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {
            "version": result["version"],
            "score": result["score"],
            "rows_shortened": result["rows_shortened"],
            "conditions": result["conditions"]["compared"] | result["conditions"]["noted"],
        },
    }


def _model_config(model: Model, figures_of_tasks: list[Figures]) -> dict[str, object]:
    """Return how the model was evaluated and trained, with null for settings that do not exist here."""
    trained = {key: model.facts.get(key) for key in ("step", "tokens", "objective")}
    dtype = model.description["dtype"]
    return {
        "model": SOURCE,
        "model_args": {"pretrained": model.name, "dtype": dtype},
        "model_dtype": dtype,
        "model_sha": model.description["weights"],
        **dict.fromkeys(("batch_size", "device", "use_cache", "limit", "gen_kwargs")),
        "batch_sizes": [],
        "bootstrap_iters": 0,
        **dict.fromkeys(("random_seed", "numpy_seed", "torch_seed", "fewshot_seed")),
        "metadata": {"trained": trained, "settings": {f.task: f.setting for f in figures_of_tasks}},
    }


def _names(figures: Figures) -> dict[str, str]:
    """Return the names of a task's groups in the harness, as for MMLU's subjects, or of the task.

    Groups whose names would be equal get numbers, in the order of their names.
    """
    if not figures.result["groups"]:
        return {"": figures.task}
    names: dict[str, str] = {}
    for group in sorted(figures.groups):
        name = f"{figures.task}_" + re.sub(r"\W", "_", group)
        number = next(i for i in count(1) if (name if i == 1 else f"{name}_{i}") not in names.values())
        names[group] = name if number == 1 else f"{name}_{number}"
    return {group: names[group] for group in figures.groups}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _samples(source: str, tasks: str, figures: Figures) -> tuple[Samples, Counter[str]]:
    """Return the samples of a result by group, in row order, and the number of rows of the full split.

    Prompts are not stored with results. They follow from the rows, the task and the stored demonstrations,
    except for text that was cut from a query longer than the context. Raises UserError if the rows, the pool
    or the prompts differ from those of the result.
    """
    result = figures.result
    files = {Path(name.strip()).stem: name.strip() for name in tasks.split(",")}
    task = load_task(files.get(figures.task, figures.task), result["version"])
    data = load_data(task, source, shots=result["shots"])
    full = Counter(row[GROUP] for row in data.rows["test"])
    if result["n"] < full.total():
        data = load_data(task, source, limit=result["n"], shots=result["shots"])
    for name, digest, option in (
        ("test_rows", data.digests["test"], "--data"),
        ("pool_rows", data.digests["train"], "--data"),
        ("prompt", store.digest_json(task.identity()), "--tasks"),
    ):
        if digest[:16] != result["conditions"]["compared"][name]:
            raise UserError(
                f"task {task.name} has different {DIGESTS[name]}. Set the {option} of its evaluation.",
                code="task-differs",
            )
    builder = PromptBuilder(task, data.rows["train"], None)
    samples: Samples = {}
    for record, row in zip(figures.records, data.rows["test"], strict=True):
        group = record["group"] if result["groups"] else ""
        samples.setdefault(group, []).append(_sample(task, builder, row, record, result))
    return samples, full


def _sample(
    task: Task, builder: PromptBuilder, row: Row, record: Record, result: TaskResult
) -> dict[str, Any]:
    """Return lm_eval.result_schema.SampleResult of a row.

    A response is the negated score, so the largest is the prediction. Whether it is also the greedy
    continuation is unknown (None).
    """
    ice = builder.render_demonstrations(record["demonstrations"])
    context = builder.template.shared_prompt(row, ice)
    prompts = [builder.prompt(row, ice, label) for label in task.labels]
    target = str(task.labels.index(record["gold"]))
    responses = [[str(-value), "None"] for value in record["scores"][result["score"]]]
    doc = {name: row[name] for name in task.inputs} | {LABEL: row[LABEL]}
    doc |= {"group": record["group"]} if result["groups"] else {}
    return {
        "doc_id": record["id"],
        "doc": doc,
        "target": target,
        "arguments": {
            f"gen_args_{k}": {"arg_0": context, "arg_1": prompt[len(context) :]}
            for k, prompt in enumerate(prompts)
        },
        "resps": [[response] for response in responses],
        "filtered_resps": responses,
        "filter": FILTER,
        "metrics": ["acc"],
        "doc_hash": _hash(json.dumps(doc, indent=2, ensure_ascii=False)),
        "prompt_hash": _hash(context),
        "target_hash": _hash(target),
        "acc": float(record["prediction"] == record["gold"]),
    }
