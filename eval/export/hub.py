"""Evaluation results for the hub: `.eval_results/*.yaml`, and `model-index` in the model card of a directory.

The formats are huggingface_hub's EvalResultEntry and EvalResult. The rest of the card stays unchanged, byte
by byte. The files contain no local paths.
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
from emo.common.io.hub import HUB_ID
from emo.common.io.untrusted import read_bytes
from emo.common.io.weights import CONFIG, has_only_adapter
from emo.common.text import publishable

from ..models.model import EvaluatedModel
from ..results.directory import Model, Say
from .figures import Figures, read_figures

CARD = "README.md"
ENTRIES = ".eval_results"
OUR_FILE = "emo-pipeline-"  # beginning of the names of our files in it
INDEX = "model-index"
CARD_BYTES = 4 << 20
# Names of our entries of a model-index, for tasks of this project and of lm-evaluation-harness.
OURS = "In-context classification (emo-pipeline)"
HARNESS = "lm-evaluation-harness (emo-pipeline)"
_FRONT = re.compile(r"\A(\ufeff?\s*---[ \t]*\r?\n)(.*?)(^---[ \t]*(?:\r?\n|\Z))", re.S | re.M)


def write_hub(model: Model, directory: Path, say: Say, card: str | None = None) -> None:
    """Write a model's results into a directory.

    Results on data that is not on the hub are only in the card. Raises UserError before writing anything if
    results are damaged, the directory has another model, or its card cannot be read.

    Args:
        model: The model.
        directory: Its files, or a new directory.
        say: Receives remarks.
        card: The model card for a directory without one.
    """
    all_of_model = read_figures(model)
    weights = model.description["weights"]
    has_model = (directory / CONFIG).is_file() or has_only_adapter(directory)
    if has_model and EvaluatedModel(str(directory)).digest != weights:
        raise UserError(
            f"{directory} does not have the weights with which {model.name} was evaluated",
            code="other-weights",
        )
    before = None
    try:
        if (directory / CARD).exists():
            before = read_bytes(directory / CARD, CARD_BYTES).decode()
    except ValueError as error:
        raise UserError(
            f"{directory / CARD} is not a model card: {one_line(error, 120)}", code="model-card"
        ) from None
    results = model_index(model, all_of_model)
    after = add_index(before or card or f"# {publishable(model.name)}\n", model.name, results)
    if publishable(after) != after:
        say(f"{directory / CARD} may contain a local path or a secret. Check it before you publish it.")
    directory.mkdir(parents=True, exist_ok=True)
    stale = {*(directory / ENTRIES).glob(f"{OUR_FILE}*.yaml")}  # of tasks that have no result now
    for figures in all_of_model:
        dataset = _dataset(figures)
        hub = figures.rows["hub"] or {}
        if dataset is None:
            unknown = (
                "the hub id of its data is unknown" if figures.by_harness else "its data is not on the hub"
            )
            say(f"{figures.task}: {unknown}, so it gets no entry in {ENTRIES}")
            continue
        entry = EvalResultEntry(
            dataset_id=dataset,
            task_id=hub["name"] or "default",
            value=figures.accuracy.value,
            dataset_revision=hub["revision"] if figures.rows["from_hub"] else None,
            date=datetime.fromtimestamp(figures.finished, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            notes=_notes(figures),
        )
        path = directory / ENTRIES / f"{OUR_FILE}{figures.task}.yaml"
        path.parent.mkdir(exist_ok=True)
        write_text(path, _yaml(eval_result_entries_to_yaml([entry])))
        stale.discard(path)
    for path in stale:
        path.unlink()
    if after != before:
        write_text(directory / CARD, after)


def add_index(card: str, name: str, results: list[dict[str, Any]]) -> str:
    """Return a card whose model-index has `results` instead of our earlier results.

    name: of the model, for a card without a model-index. Raises UserError if the front matter cannot be read.
    """
    match = _FRONT.search(card)
    head, front, foot = match.groups() if match else ("---\n", "", "---\n")
    newline = "\r\n" if "\r\n" in head else "\n"
    lines = list[str]()
    inside = False
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
        foreign = [r for r in ours["results"] if (r.get("task") or {}).get("name") not in (OURS, HARNESS)]
        index = [entry | {"results": foreign + results} if entry is ours else entry for entry in index]
        block = _yaml({INDEX: index}).replace("\n", newline)
        if yaml.safe_load(others + block) != values | {INDEX: index}:
            raise ValueError(f"it cannot be changed without loss. Remove {INDEX}.")
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = f"{type(error).__name__}: {one_line(error, 120)}"
        raise UserError(
            f"{CARD}: its front matter, or {INDEX} in it, cannot be read ({reason})", code="model-card"
        ) from None
    return f"{head}{others}{block}{foot}{card[match.end() :] if match else card}"


def model_index(model: Model, all_of_model: list[Figures]) -> list[dict[str, Any]]:
    """Return the results for a model-index: accuracy and macro F1 of every task."""
    index = []
    for figures in all_of_model:
        result = figures.result
        rows = figures.rows
        accuracy = figures.accuracy
        hub = rows["hub"] or {}
        fields = {
            "task_type": "text-generation",
            "task_name": HARNESS if figures.by_harness else OURS,
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
            if value is not None
        ]
        # One task at a time, because results on the same data set would be merged.
        index += eval_results_to_model_index(model.name, results)[0]["results"]
    return index


def _notes(figures: Figures) -> str:
    """Return how the value was computed, and whether the rows were verified to be those of the data set."""
    mean = f"{figures.mean}, " if figures.mean else ""
    stderr = "" if figures.accuracy.stderr is None else f"stderr {figures.accuracy.stderr:.4f}, "
    from_hub = figures.rows["from_hub"]
    origin = "rows from the hub" if from_hub else "rows from files, not checked against the hub"
    if figures.by_harness:
        origin = "rows loaded by lm-evaluation-harness"
    return publishable(f"accuracy, {mean}{stderr}n {figures.accuracy.n}; {figures.setting}; {origin}")


def _dataset(figures: Figures) -> str | None:
    """Return the hub id of a task's data set, or None."""
    name = (figures.rows["hub"] or {}).get("path", "")
    return name if HUB_ID.fullmatch(name) else None


def _yaml(value: Any) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1000)
    return text
