"""The hub's evaluation results: `.eval_results/*.yaml`, and `model-index` in the model card of a directory.

Formats: huggingface_hub's EvalResultEntry and EvalResult. All of the card that is not ours stays as it is,
byte by byte. Nothing that is written names a folder of this machine.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, eval_result_entries_to_yaml
from huggingface_hub.repocard_data import eval_results_to_model_index

from emo.common.errors import UserError, one_line
from emo.common.io.files import write_text
from emo.common.io.untrusted import read_bytes
from emo.common.text import publishable

from ..model import EvaluatedModel
from ..results.directory import Model, Say
from .figures import Figures, all_figures

CARD, ENTRIES, INDEX = "README.md", ".eval_results", "model-index"
CARD_BYTES = 4 << 20
OURS = "In-context classification (emo-pipeline)"  # how our entries of a model-index are known again
_FRONT = re.compile(r"\A(\ufeff?\s*---[ \t]*\r?\n)(.*?)(^---[ \t]*(?:\r?\n|\Z))", re.S | re.M)
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def write_hub(model: Model, directory: Path, say: Say, card: str | None = None) -> None:
    """Write a model's results into `directory`, a model's files or a new one; `card` for one without a card.

    Results about no data set of the hub are in the card alone. UserError when results cannot be trusted, the
    directory holds another model, or its card cannot be read; nothing is written then.
    """
    all_of_model = all_figures(model)
    weights = model.description["weights"]
    if (directory / "config.json").is_file() and EvaluatedModel(str(directory)).digest != weights:
        raise UserError(f"{directory} holds other weights than {model.name} was evaluated with")
    before = None
    try:
        if (directory / CARD).exists():
            before = read_bytes(directory / CARD, CARD_BYTES).decode()
    except ValueError as error:
        raise UserError(f"{directory / CARD} is no model card: {one_line(error, 120)}") from None
    results = index_of(model, all_of_model)
    after = with_index(before or card or f"# {publishable(model.name)}\n", model.name, results)
    if publishable(after) != after:
        say(f"{directory / CARD} names an absolute path or a secret; look at it before you publish it")
    directory.mkdir(parents=True, exist_ok=True)
    for figures in all_of_model:
        dataset, rows = _dataset(figures), figures.rows
        if dataset is None:
            say(f"{figures.task}: no data set of the hub, therefore no entry in {ENTRIES}")
            continue
        entry = EvalResultEntry(
            dataset_id=dataset,
            task_id=rows["hub"]["name"] or "default",
            value=figures.accuracy.value,
            dataset_revision=rows["hub"]["revision"] if rows["from_hub"] else None,
            date=datetime.fromtimestamp(figures.finished, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            notes=_notes(figures),
        )
        path = directory / ENTRIES / f"emo-pipeline-{figures.task}.yaml"
        path.parent.mkdir(exist_ok=True)
        write_text(path, _yaml(eval_result_entries_to_yaml([entry])))
    if after != before:
        write_text(directory / CARD, after)


def with_index(card: str, name: str, results: list[dict[str, Any]]) -> str:
    """Return a card whose model-index also has `results`; ours of before go, all else stays.

    name: of the model, where the card has no model-index yet. UserError when the front matter cannot be read.
    """
    match = _FRONT.search(card)
    head, front, foot = match.groups() if match else ("---\n", "", "---\n")
    newline, lines, inside = "\r\n" if "\r\n" in head else "\n", list[str](), False
    for line in front.splitlines(keepends=True):  # without those of the model-index
        if re.match(r"[^\s#-]", line):
            inside = re.match(rf"['\"]?{INDEX}['\"]?\s*:", line) is not None
        if not inside or line.startswith("#"):
            lines.append(line)
    others = "".join(lines)
    others += newline if others and not others.endswith("\n") else ""
    try:
        values = yaml.safe_load(front) or {}
        index = values.get(INDEX) or [{"name": name, "results": []}]
        ours = next((entry for entry in index if entry["name"] == name), index[0])
        foreign = [r for r in ours["results"] if (r.get("task") or {}).get("name") != OURS]
        index = [entry | {"results": foreign + results} if entry is ours else entry for entry in index]
        block = _yaml({INDEX: index}).replace("\n", newline)
        if yaml.safe_load(others + block) != values | {INDEX: index}:
            raise ValueError(f"it cannot be changed without loss; remove {INDEX}")
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = f"{type(error).__name__}: {one_line(error, 120)}"
        raise UserError(f"{CARD}: its front matter, or {INDEX} in it, cannot be read ({reason})") from None
    return f"{head}{others}{block}{foot}{card[match.end() :] if match else card}"


def index_of(model: Model, all_of_model: list[Figures]) -> list[dict[str, Any]]:
    """Return the results of a model-index: accuracy and macro F1 of every task."""
    index = []
    for figures in all_of_model:
        result, rows, accuracy = figures.result, figures.rows, figures.accuracy
        hub = rows["hub"] or {}
        fields = {
            "task_type": "text-generation",
            "task_name": OURS,
            "dataset_type": _dataset(figures) or figures.task,
            "dataset_name": publishable(f"{result['title']} ({result['shots']}-shot)"),
            "dataset_config": hub.get("name"),
            "dataset_split": rows["split"],
            "dataset_revision": hub.get("revision") if rows["from_hub"] else None,
            "dataset_args": {"num_few_shot": result["shots"], "retriever": result["retriever"]},
        }
        facts = {"n": accuracy.n, "setting": _notes(figures)}
        facts |= {} if accuracy.stderr is None else {"stderr": accuracy.stderr}
        average = {"average": "macro", "n": accuracy.n}
        name = f"accuracy, {figures.mean}" if figures.mean else "accuracy"
        results = [
            EvalResult(**fields, metric_type=kind, metric_name=name, metric_value=value, metric_args=args)
            for kind, name, value, args in (
                ("accuracy", name, accuracy.value, facts),
                ("f1", "macro F1 over the labels", result["macro_f1"], average),
            )
        ]
        # A task at a time: results about the same data set would be joined.
        index += eval_results_to_model_index(model.name, results)[0]["results"]
    return index


def _notes(figures: Figures) -> str:
    """Return how the value was made, and whether the rows are surely those of the data set."""
    mean = f"{figures.mean}, " if figures.mean else ""
    stderr = "" if figures.accuracy.stderr is None else f"stderr {figures.accuracy.stderr:.4f}, "
    from_hub = figures.rows["from_hub"]
    came = "rows from the hub" if from_hub else "rows from files, not checked against the hub"
    return publishable(f"accuracy, {mean}{stderr}n {figures.accuracy.n}; {figures.setting}; {came}")


def _dataset(figures: Figures) -> str | None:
    """Return the id of a task's data set on the hub, if it has one."""
    name = (figures.rows["hub"] or {}).get("path", "")
    return name if _REPOSITORY.fullmatch(name) else None


def _yaml(value: Any) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1000)
    return text
