"""The rows of a finished result with their prompts, as its evaluation showed them to the model.

Prompts are not stored with results; they follow from the rows, the task and the demonstrations that were
noted. What was cut from a query that is longer than the model's context is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from common.errors import UserError
from eval import store
from eval.export.figures import Figures
from eval.export.source import Source
from eval.icl.prompts import PromptBuilder
from eval.icl.retrieve import StoredRetriever
from eval.icl.task_data import TaskData, load_data, reader
from eval.icl.tasks import GROUP, LABEL, Task, load_task


@dataclass(frozen=True)
class Prompted:
    """A test row: its inputs and, per label, what was shown before the label and what was scored after it."""

    doc: dict[str, Any]
    context: str  # demonstrations and query, up to the label
    continuations: list[str]  # in the order of the labels


def prompted(source: Source, figures: Figures) -> tuple[Counter[str], Iterator[Prompted]]:
    """Return the rows of the full split by group, and those of a result in order, with their prompts.

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
    pool = len(data.rows["train"])
    if any(index >= pool for record in figures.records for index in record["demonstrations"]):
        raise UserError(f"task {task.name}: its records name demonstrations that {source.data} does not have")
    return full, _render(task, data, figures)


def _render(task: Task, data: TaskData, figures: Figures) -> Iterator[Prompted]:
    indices = [record["demonstrations"] for record in figures.records]
    retriever = StoredRetriever(reader(task, data.rows), indices, ice_num=max(map(len, indices)))
    builder = PromptBuilder(retriever, None, task.labels, task.demonstration_template, task.template)
    for record, row in zip(figures.records, data.rows["test"], strict=True):
        ice = builder.ice(record["demonstrations"])
        query = (record["row"], ice)
        context = retriever.generate_label_prompt(
            *query, task.labels[0], ice_template=builder.ice_template, prompt_template=task.context_template
        )
        prompts = [
            retriever.generate_label_prompt(
                *query, label, ice_template=builder.ice_template, prompt_template=builder.prompt_template
            )
            for label in task.labels
        ]
        doc = {name: row[name] for name in task.inputs} | {LABEL: row[LABEL]}
        yield Prompted(doc, context, [prompt[len(context) :] for prompt in prompts])
