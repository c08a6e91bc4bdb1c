"""Answers on disk, in AlpacaEval's format: made in chunks that processes share, or read from files.

OUT/store/KEY/                                    chunks and leases, as evaluations have them
OUT/models/NAME/answers/QUESTIONS-DECODING/
    model_outputs.json    [{"dataset", "instruction", "output", "generator", ...}]
    about.json            model, template, engine, decoding, how many are empty or cut off
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.errors import UserError
from eval import store
from eval.generation.tokens import context_of
from eval.judging import templates
from eval.judging.engines import Transformers, Vllm
from eval.judging.questions import Question, id_of, input_of
from eval.judging.rows import Row, answer_of, named, read_rows, repeated, text_of

if TYPE_CHECKING:
    from eval.model import EvaluatedModel

CHUNK = 64  # answers; what a killed process loses at most
VERSION = 1  # of everything that decides what an answer is
OUTPUTS, ABOUT = "model_outputs.json", "about.json"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """The questions that are asked, and how. tokens: the longest answer."""

    questions: list[Question]
    name: str
    template: str
    tokens: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UserError(f"--tokens {self.tokens} must be at least 1")


class Answering:
    """Writes the answers to the questions of a plan; `computed` counts those that this process made."""

    def __init__(self, model: EvaluatedModel, engine: Transformers | Vllm, plan: Plan, out: Path) -> None:
        self.model, self.engine, self.plan, self.out = model, engine, plan, out
        self.computed = 0
        self.context = context_of(model)

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Token ids of every question in its template."""
        return [templates.ids(self.model, q, self.plan.template) for q in self.plan.questions]

    @property
    def directory(self) -> Path:
        """Return where the answers of this model to these questions are."""
        decoding: Any = self.engine.decoding
        seed = "" if decoding.greedy or not self.plan.seed else f"-s{self.plan.seed}"
        name = f"{self.plan.name}-{decoding.name}{seed}"
        return self.out / "models" / self.model.name / "answers" / name

    def run(self) -> list[Row]:
        """All answers, made or found, in their file too."""
        from tqdm import tqdm

        identity = {
            "answers": VERSION,
            **self.engine.identity,
            "prompts": store.digest(self.prompts),
            "tokens": self.plan.tokens,
            "context": self.context,
            "seed": self.plan.seed,
        }
        entry = store.Entry(self.out / store.STORE, identity)
        label = f"{self.model.name} {self.plan.name}"
        with tqdm(total=len(self.prompts), desc=label, unit="answer", disable=None) as bar:
            records = store.complete(
                entry, len(self.prompts), CHUNK, lambda rows: self._answer(rows, bar), bar.update
            )
        rows = [self._row(q, r) for q, r in zip(self.plan.questions, records, strict=True)]
        store.replace(self.directory / OUTPUTS, store.dump(rows))
        store.replace(self.directory / ABOUT, store.dump(self._about(rows)))
        return rows

    def _room(self, prompt: list[int]) -> int:
        """Tokens that an answer may have."""
        return self.plan.tokens if self.context is None else min(self.plan.tokens, self.context - len(prompt))

    def _answer(self, rows: range, bar: Any) -> list[Row]:
        from eval.generation.sampling import Request

        room = {row: self._room(self.prompts[row]) for row in rows}
        answerable = [row for row in rows if room[row] > 0]
        requests = [Request(self.prompts[row], [self.plan.seed, row], room[row]) for row in answerable]
        replies = self.engine.reply(requests, self.plan.tokens, bar.update) if requests else []
        reply_of = dict(zip(answerable, replies, strict=True))
        self.computed += len(rows)
        bar.update(len(rows) - len(answerable))
        return [
            {"row": row, "text": "", "ended": False, "tokens": 0, "fits": False}
            if row not in reply_of
            else {"row": row, **reply_of[row]._asdict(), "fits": True}
            for row in rows
        ]

    def _row(self, question: Question, record: Row) -> Row:
        row = {"dataset": question.dataset, "instruction": question.instruction}
        row |= {"id": question.id} if question.id else {}
        row |= {"input": question.input} if question.input else {}
        row |= {"output": record["text"].strip(), "generator": self.model.name}
        return row | {name: record[name] for name in ("ended", "tokens", "fits")}

    def _about(self, rows: list[Row]) -> dict[str, Any]:
        return {
            "model": self.model.name,
            "path": self.model.given,
            "questions": self.plan.name,
            "template": self.plan.template,
            "tokens": self.plan.tokens,
            "seed": self.plan.seed,
            **self.engine.identity,
            **counts(rows),
        }


def counts(rows: list[Row]) -> dict[str, int]:
    """Return the numbers of answers: all, empty, cut off by a limit, without room in the context."""
    return {
        "answers": len(rows),
        "empty": sum(not row["output"] for row in rows),
        "cut_off": sum(row["fits"] and not row["ended"] for row in rows),
        "no_room": sum(not row["fits"] for row in rows),
    }


class Answer(NamedTuple):
    """An answer from a file. key: what tells its question from the others."""

    key: str
    question: Question
    text: str


class Answers(NamedTuple):
    """The answers of a model. by_id: keys are the file's own ids; else they are the questions' texts."""

    path: Path
    generator: str
    rows: list[Answer]
    by_id: bool

    def by_text(self) -> Answers:
        """The same with the questions' texts as keys."""
        return self._replace(rows=_numbered([(r.question, r.text) for r in self.rows]), by_id=False)


def read_answers(path: Path) -> Answers:
    """Answers in AlpacaEval's format, or the directory that `answer` wrote them to.

    UserError for ids that come twice.
    """
    file = path / OUTPUTS if path.is_dir() else path
    answers, generators = [], []
    for i, row in enumerate(read_rows(file), start=1):
        where = f"{file} row {i}"
        instruction = text_of(row, ("instruction",), where)
        dataset = row.get("dataset")
        question = Question(
            id_of(row), instruction, input_of(row), dataset if isinstance(dataset, str) else ""
        )
        answers.append((question, answer_of(row, "output", where)))
        generators.append(row.get("generator"))
    names = {g for g in generators if isinstance(g, str) and g}
    if len(names) > 1:
        raise UserError(f"{file}: answers of several models: {named(sorted(names))}; give one file of each")
    generator = names.pop() if names else file.name.split(".")[0]
    ids = [question.id for question, _ in answers]
    if not all(ids):
        return Answers(file, generator, _numbered(answers), by_id=False)
    if twice := repeated(ids):
        raise UserError(f"{file}: ids that come more than once: {named(twice)}")
    return Answers(file, generator, [Answer(q.id, q, text) for q, text in answers], by_id=True)


def _numbered(answers: list[tuple[Question, str]]) -> list[Answer]:
    """Keys from the questions' texts; a text that comes again is another question."""
    counts: dict[str, int] = {}
    rows = []
    for question, text in answers:
        counts[question.text] = counts.get(question.text, 0) + 1
        number = counts[question.text]
        rows.append(Answer(question.text if number == 1 else f"{question.text} #{number}", question, text))
    return rows
