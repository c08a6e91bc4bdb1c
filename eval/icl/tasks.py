"""Tasks: one YAML file each, and the templates that follow from it.

A new task is a new file in `eval/icl/tasks/` (or any file given by path to `--tasks`); README.md there has an
example. Labels are compared by name, never by number: copies of one data set number them differently.
OpenICL is imported only where a template is made: reports and mistakes need none of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emo.common.errors import UserError, nearest
from emo.common.provenance import shipped
from emo.common.recipe import load_section
from emo.eval.icl.task_file import GROUP, ICE, LABEL, ROW, SLOT, Column, Prompt, TaskSpec, token_of
from emo.eval.results import MODEL, SAMPLES

if TYPE_CHECKING:
    from emo.eval.icl.openicl_compat import PromptTemplate

__all__ = ["GROUP", "LABEL", "PAPER_ORDER", "ROW", "Task", "known_tasks", "load_task", "select_tasks"]

DIRECTORY = Path(__file__).parent / "tasks"
PAPER_ORDER = ("tweet_emotion", "sst2", "trec", "subj", "cr", "rotten_tomatoes", "ag_news", "mmlu")
# Results are called like their task, beside files of these names.
RESERVED = tuple(Path(name).stem for name in (MODEL, SAMPLES))


@dataclass(frozen=True)
class Task:
    """A task file together with the prompt version in use."""

    name: str
    spec: TaskSpec
    version: str

    @property
    def prompt(self) -> Prompt:
        return self.spec.prompts[self.version]

    @property
    def labels(self) -> list[str]:
        """Label names in the order that decides ties."""
        return self.prompt.order or list(self.spec.label.names)

    @property
    def inputs(self) -> list[str]:
        return list(self.spec.input)

    def words(self, label: str) -> str:
        """Return how a label is spelt in the prompt."""
        return self.prompt.words.get(label, label)

    @cached_property
    def template(self) -> PromptTemplate:
        """The prompt: demonstrations, then the query with a label."""
        return self._template(self.prompt.before, self.prompt.text, ice=True)

    @cached_property
    def context_template(self) -> PromptTemplate:
        """The prompt as far as all labels share it."""
        shared, _, _ = self.prompt.text.partition(f"{{{LABEL}}}")
        return self._template(self.prompt.before, shared, ice=True)

    @cached_property
    def demonstration_template(self) -> PromptTemplate:
        return self._template("", self.prompt.demonstration or self.prompt.text, ice=False)

    @cached_property
    def channel_templates(self) -> tuple[PromptTemplate, PromptTemplate]:
        """(prompt, demonstration) with the label before the text, for the channel score."""
        text = self.require_channel()
        return self._template(self.prompt.before, text, ice=True), self._template("", text, ice=False)

    def require_channel(self) -> str:
        """The text of the channel score, or UserError."""
        if self.prompt.channel is None:
            raise UserError(f"task {self.name}: prompts.{self.version} has no `channel` text")
        return self.prompt.channel

    def fill(self, text: str, row: dict[str, Any]) -> str:
        """`text` with {name} replaced by the inputs of a canonical row."""
        return SLOT.sub(lambda match: str(row[match.group(1)]), text)

    def _template(self, before: str, text: str, ice: bool) -> PromptTemplate:
        from emo.eval.icl.openicl_compat import Template

        tokens = {name: token_of(name) for name in self.inputs}

        def fill(part: str, label: str) -> str:
            slots = tokens | {LABEL: self.words(label)}
            return SLOT.sub(lambda match: slots[match.group(1)], part)

        middle = ICE if ice else ""
        by_label = {label: fill(before, label) + middle + fill(text, label) for label in self.labels}
        return Template(by_label, tokens, ice_token=ICE if ice else None)

    def identity(self) -> dict[str, Any]:
        """Return what of the task decides a score, data and retriever aside, in lists where order counts."""
        columns = {
            name: Column(column=column) if isinstance(column, str) else column
            for name, column in self.spec.input.items()
        }
        return {
            "prompt": self.prompt.model_dump(),
            "labels": [[label, self.words(label)] for label in self.labels],
            "inputs": [[name, c.column, list(c.replace.items())] for name, c in columns.items()],
            "group": self.spec.group,
        }


def known_tasks() -> list[str]:
    """Names of the built-in tasks, the paper's eight first and in its order."""
    names = {path.stem for path in DIRECTORY.glob("*.yaml")}
    return [n for n in PAPER_ORDER if n in names] + sorted(names - set(PAPER_ORDER))


def load_task(name: str, version: str = "paper") -> Task:
    """The built-in task `name`, or the task file at the path `name`.

    Raises UserError for an unknown name or version, or a malformed file.
    """
    path = shipped(Path(name)) if name.endswith((".yaml", ".yml")) else DIRECTORY / f"{name}.yaml"
    if not path.is_file():
        if path.parent != DIRECTORY:
            raise UserError(f"task file {path} does not exist")
        raise UserError(f"unknown task {name!r}; {nearest(name, known_tasks())}")
    if path.stem in RESERVED:
        raise UserError(f"task file {path}: results use the name {path.stem} themselves; rename the file")
    try:
        spec = load_section(TaskSpec, path, ())
    except UserError as error:
        raise UserError(f"task file {path}: {error}") from None
    if version not in spec.prompts:
        raise UserError(
            f"task {path.stem} has no prompt version {version!r}; it has {', '.join(spec.prompts)}"
        )
    return Task(path.stem, spec, version)


def select_tasks(names: str, version: str = "paper") -> list[Task]:
    """Tasks of a comma-separated list of names and files, or of `all`."""
    chosen = known_tasks() if names == "all" else [n.strip() for n in names.split(",") if n.strip()]
    if not chosen:
        raise UserError(f"--tasks is empty; known: all, {', '.join(known_tasks())}")
    tasks = [load_task(name, version) for name in chosen]
    if len({task.name for task in tasks}) != len(tasks):
        raise UserError(f"--tasks names a task twice: {names}")
    return tasks
