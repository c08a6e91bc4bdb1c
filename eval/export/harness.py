"""lm-evaluation-harness' files: results_DATE.json and samples_TASK_DATE.jsonl in a directory per model.

The layout is that of release 0.4.13 (lm_eval/result_schema.py and loggers/evaluation_tracker.py). A task with
groups is a group of subtasks, as MMLU is there. DATE is when the results were finished, so that exporting
again writes the same files. Nothing says where on this machine the model lies.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from emo.common.errors import UserError
from emo.common.files import write_text
from emo.eval import store
from emo.eval.export.figures import Accuracy, Figures, Source, all_figures
from emo.eval.icl.prompts import PromptBuilder
from emo.eval.icl.retrieve import stored_retriever
from emo.eval.icl.task_data import load_data
from emo.eval.icl.tasks import GROUP, LABEL, load_task
from emo.eval.results import Model

SOURCE = "emo-pipeline"  # what stands for the name of a model class there: whose figures these are
FILTER = "none"  # there: an answer is taken from the responses as they are


def write_harness(model: Model, out: Path, source: Source | None) -> Path:
    """Write a model's files under `out`; the path of its results, which are written last.

    source: where the rows are; without it there are no samples. UserError when results cannot be trusted, or
    the rows are other ones; nothing is written then.
    """
    figures_of_tasks = all_figures(model)
    value = _results(model, figures_of_tasks)
    texts = {}
    if source is not None:
        texts = {figures.task: prompted(source, figures) for figures in figures_of_tasks}
    stamp = datetime.fromtimestamp(value["date"], UTC).replace(tzinfo=None).isoformat().replace(":", "-")
    directory = out / value["model_name_sanitized"]
    directory.mkdir(parents=True, exist_ok=True)
    for figures in figures_of_tasks if texts else []:
        full, prompts = texts[figures.task]
        by_task: dict[str, list[dict[str, Any]]] = {}
        for name, sample in _samples(figures, prompts):
            by_task.setdefault(name, []).append(sample)
        for group, name in _names(figures).items():
            samples = by_task[name]
            lines = "".join(json.dumps(sample) + "\n" for sample in samples)
            write_text(directory / f"samples_{name}_{stamp}.jsonl", lines)
            hashes = "".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in samples)
            value.setdefault("task_hashes", {})[name] = _hash(hashes)
            counts = {"original": full[group], "effective": len(samples)}
            value.setdefault("n-samples", {})[name] = counts
    path = directory / f"results_{stamp}.json"
    write_text(path, json.dumps(value, indent=2) + "\n")
    return path


def _results(model: Model, figures_of_tasks: list[Figures]) -> dict[str, Any]:
    """lm_eval.result_schema.EvalResults, as far as it is known. UserError when two tasks have one name."""
    value: dict[str, Any] = {"results": {}, "groups": {}, "group_subtasks": {}, "configs": {}}
    value |= {"versions": {}, "n-shot": {}, "higher_is_better": {}}
    for figures in figures_of_tasks:
        result, names = figures.result, _names(figures)
        whole = _entry(figures.task, result["title"], figures.accuracy)
        whole |= {f"macro_f1,{FILTER}": result["macro_f1"], f"macro_f1_stderr,{FILTER}": "N/A"}
        entries = {figures.task: whole}
        if figures.groups:
            value["groups"][figures.task] = whole
            value["group_subtasks"][figures.task] = list(names.values())
            entries |= {n: _entry(n, group, figures.groups[group]) for group, n in names.items()}
            if len(entries) <= len(names):
                raise UserError(f"{model.name}, {figures.task}: two groups would be called alike")
        if twice := entries.keys() & value["results"].keys():
            raise UserError(f"{model.name}: two tasks would be called {min(twice)}; rename a task file")
        value["results"] |= entries
        value["configs"] |= {name: _config(figures, name) for name in names.values()}
        for name in entries:
            value["versions"][name] = result["version"]
            value["n-shot"][name] = result["shots"]
            value["higher_is_better"][name] = {"acc": True}
        value["higher_is_better"][figures.task]["macro_f1"] = True
    if not value["groups"]:
        del value["groups"]
    date = max(figures.finished for figures in figures_of_tasks)
    # How the model was evaluated and, under `metadata`, trained; null where nothing was set.
    trained = {key: model.facts.get(key) for key in ("step", "tokens", "objective")}
    config = {
        "model": SOURCE,
        "model_args": {"pretrained": model.name, "dtype": model.description["dtype"]},
        "model_dtype": model.description["dtype"],
        "model_sha": model.description["weights"],
        **dict.fromkeys(("batch_size", "device", "use_cache", "limit", "gen_kwargs")),
        "batch_sizes": [],
        "bootstrap_iters": 0,
        **dict.fromkeys(("random_seed", "numpy_seed", "torch_seed", "fewshot_seed")),
        "metadata": {"trained": trained, "settings": {f.task: f.setting for f in figures_of_tasks}},
    }
    return value | {
        "config": config,
        "date": date,
        "model_source": SOURCE,
        "model_name": model.name,
        "model_name_sanitized": re.sub(r'["<>:/|\\?*\[\]]+', "__", model.name),
        "system_instruction": None,
        "system_instruction_sha": None,
        "fewshot_as_multiturn": False,
        "chat_template": None,
        "chat_template_sha": None,
    }


def _entry(name: str, alias: str, accuracy: Accuracy) -> dict[str, Any]:
    stderr = "N/A" if accuracy.stderr is None else accuracy.stderr
    counted = {"name": name, "alias": alias, "sample_len": accuracy.n}
    return counted | {f"acc,{FILTER}": accuracy.value, f"acc_stderr,{FILTER}": stderr}


def _names(figures: Figures) -> dict[str, str]:
    """Return a task's names there by group: the task, or its groups as MMLU's subjects are called."""
    if not figures.groups:
        return {"": figures.task}
    return {group: f"{figures.task}_" + re.sub(r"\W", "_", group) for group in figures.groups}


def _config(figures: Figures, name: str) -> dict[str, Any]:
    """Return the known part of a task's configuration; the rest of it has no counterpart there."""
    result = figures.result
    metric = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
    conditions = result["conditions"]["compared"] | result["conditions"]["noted"]
    return {
        "task": name,
        "task_alias": name.removeprefix(f"{figures.task}_") if figures.groups else result["title"],
        "output_type": "multiple_choice",
        "doc_to_choice": result["labels"],
        "num_fewshot": result["shots"],
        "metric_list": [metric],
        "metadata": {"version": result["version"], "score": result["score"], "conditions": conditions},
    }


def _samples(figures: Figures, texts: Iterable[Prompted]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(task or subtask, lm_eval.result_schema.SampleResult) of every row.

    A response is the logarithm that decides, the score with its sign turned, so that the largest is the
    prediction. Whether it would be the greedy continuation too is not known: None.
    """
    labels, score, names = figures.result["labels"], figures.result["score"], _names(figures)
    for record, text in zip(figures.records, texts, strict=True):
        target = str(labels.index(record["gold"]))
        responses = [[str(-value), "None"] for value in record["scores"][score]]
        doc = text.doc | ({"group": record["group"]} if figures.groups else {})
        yield (
            names[record["group"] if figures.groups else ""],
            {
                "doc_id": record["id"],
                "doc": doc,
                "target": target,
                "arguments": {
                    f"gen_args_{k}": {"arg_0": text.context, "arg_1": continuation}
                    for k, continuation in enumerate(text.continuations)
                },
                "resps": [[response] for response in responses],
                "filtered_resps": responses,
                "filter": FILTER,
                "metrics": ["acc"],
                "doc_hash": _hash(json.dumps(doc, indent=2, ensure_ascii=False)),
                "prompt_hash": _hash(text.context),
                "target_hash": _hash(target),
                "acc": float(record["prediction"] == record["gold"]),
            },
        )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class Prompted:
    """A test row: its inputs and, per label, what was shown before the label and what was scored after it."""

    doc: dict[str, Any]
    context: str  # demonstrations and query, up to the label
    continuations: list[str]  # in the order of the labels


def prompted(source: Source, figures: Figures) -> tuple[Counter[str], Iterator[Prompted]]:
    """Return the rows of the full split by group, and those of a result in order, with their prompts.

    Prompts are not stored with results; they follow from the rows, the task and the demonstrations that were
    noted. What was cut from a query that is longer than the model's context is not.
    UserError when these are not the rows, the pool or the prompts that the result was made with.
    """
    task = load_task(source.tasks.get(figures.task, figures.task), figures.result["version"])
    shots, count = figures.result["shots"], figures.result["n"]
    data = load_data(task, source.data, shots=shots)
    full = Counter(data.rows["test"][GROUP])
    if count < full.total():
        data = load_data(task, source.data, limit=count, shots=shots)
    compared = figures.result["conditions"]["compared"]
    checks = {
        "test_rows": (data.digests["test"][:16], f"the test rows in {source.data}", "--data"),
        "pool_rows": (data.digests["train"][:16], f"the rows of demonstrations in {source.data}", "--data"),
        "prompt": (store.digest(task.identity())[:16], "its prompts", "--tasks"),
    }
    for name, (current, subject, option) in checks.items():
        if current != compared[name]:
            raise UserError(
                f"task {task.name}: {subject} are not those of its evaluation; give the {option} that it had"
            )
    indices = [record["demonstrations"] for record in figures.records]
    retriever = stored_retriever(task, data.rows, indices)
    builder = PromptBuilder(retriever, None, task.labels, task.demonstration_template, task.template)

    def render() -> Iterator[Prompted]:
        for record, row in zip(figures.records, data.rows["test"], strict=True):
            query = (record["row"], builder.ice(record["demonstrations"]))
            context = retriever.generate_label_prompt(
                *query,
                task.labels[0],
                ice_template=builder.ice_template,
                prompt_template=task.context_template,
            )
            prompts = [builder.prompt(*query, label) for label in task.labels]
            doc = {name: row[name] for name in task.inputs} | {LABEL: row[LABEL]}
            yield Prompted(doc, context, [prompt[len(context) :] for prompt in prompts])

    return full, render()
