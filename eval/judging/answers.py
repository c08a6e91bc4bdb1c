"""Questions, how they are put to a model, and its answers, in files and on disk in AlpacaEval's format.

Answers are made in chunks that processes share, or read from files.

OUT/store/KEY/                                    chunks and leases, as evaluations have them
OUT/models/NAME/answers/QUESTIONS-DECODING/
    model_outputs.json    [{"dataset", "instruction", "output", "generator", ...}]
    about.json            model, template, engine, decoding, how many are empty or cut off

Files of questions, answers, verdicts and replies are a JSON array or JSON lines, maybe .zst.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from emo.common.errors import UserError, one_line
from emo.data_prep.inputs import read_text as content
from emo.data_prep.templates import VERSIONS, Conversation, Exchange, render
from emo.data_prep.tokenizer import chat_template as tokenizer_template
from emo.eval import store
from emo.eval.generation.decoding import context_of
from emo.eval.judging.engines import Transformers, Vllm
from emo.eval.model import EvaluatedModel

Row = dict[str, Any]
NAMED = 3  # ids that an error names
HALF = re.compile("[\ud800-\udfff]")


def read_rows(path: Path) -> list[Row]:
    """Return the objects of a file, at least one; UserError when it is cut off, or holds others."""
    text = content(path).removeprefix("\ufeff")  # the mark that some programs begin a file with
    where = f"{path}"
    try:
        if text.lstrip()[:1] == "[":
            rows = json.loads(text)
        else:
            rows = []
            for number, line in enumerate(text.split("\n"), start=1):
                where = f"{path} line {number}"
                rows += [json.loads(line)] if line.strip() else []
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", type(error).__name__)
        raise UserError(
            f"{where} is cut off or not JSON ({reason}); is the file half-written?", code="not-json"
        ) from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(f"{path} row {number} is not an object with fields", code="not-an-object")
    if not rows:
        raise UserError(f"{path} has no rows", code="no-rows")
    return rows


def text_of(row: Mapping[str, Any], names: Sequence[str], where: str) -> str:
    """The text of the first field in `names` that a row has; UserError where it has none."""
    for name in names:
        if isinstance(row.get(name), str):
            return whole_characters(row[name])
    raise UserError(f"{where}: no text in {' or '.join(names)}; its fields: {', '.join(map(str, row))}")


def answer_of(row: Mapping[str, Any], name: str, where: str) -> str:
    """A field's text. Published files also have null, an empty answer, and answers that became true or 3."""
    value = row.get(name)
    if name in row and value is None:
        return ""
    return str(value) if isinstance(value, bool | int | float) else text_of(row, (name,), where)


def whole_characters(text: str) -> str:
    """The text with halves of characters, which no file can hold, replaced one for one: lengths count."""
    return HALF.sub("\ufffd", text)


def named(ids: Iterable[str]) -> str:
    """The first ids of a list as an error shows them, and how many more there are."""
    all_ids = list(ids)
    text = ", ".join(repr(name if len(name) <= 60 else name[:57] + "...") for name in all_ids[:NAMED])
    return text + (f" and {len(all_ids) - NAMED} more" if len(all_ids) > NAMED else "")


def repeated(ids: Sequence[str]) -> list[str]:
    """The ids that come more than once, each once."""
    return [name for name, count in Counter(ids).items() if count > 1]


def evenly(count: int, limit: int | None) -> list[int]:
    """At most `limit` of the numbers below `count`, evenly spaced."""
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit} must be at least 1")
    if limit is None or limit >= count:
        return list(range(count))
    return [i * count // limit for i in range(limit)]


# Name -> files below --data, the first that exists.
SETS = {
    "alpaca_eval": ("alpaca_eval/alpaca_eval", "alpaca_eval/eval_davinci003", "alpaca_eval"),
    "vicuna": ("eval_prompts/vicuna", "vicuna"),
    "koala": ("eval_prompts/koala", "koala"),
    "wizardlm": ("eval_prompts/wizardlm", "wizardlm"),
    "sinstruct": ("eval_prompts/sinstruct", "sinstruct"),
}
HUB = ("tatsu-lab/alpaca_eval", "alpaca_eval.json")  # the one set that is on the hub
ENDINGS = (".json", ".jsonl", ".json.zst", ".jsonl.zst")
# How the sets call their fields.
INSTRUCTION = ("instruction", "Instruction", "prompt", "question", "text", "conversations")
ID = ("id", "question_id", "idx")


class Question(NamedTuple):
    """id: the file's own, "" where it gives none; input: what the instruction is about, often empty."""

    id: str
    instruction: str
    input: str = ""
    dataset: str = ""

    @property
    def text(self) -> str:
        """Instruction and input as one text, as AlpacaEval writes them."""
        return f"{self.instruction}\n\n{self.input}" if self.input else self.instruction


def read_questions(source: str, data: str, limit: int | None = None) -> tuple[str, list[Question]]:
    """(name of the set, questions) of a set in SETS or a file; at most `limit` of them, evenly spaced."""
    name = source if source in SETS else Path(source).name.split(".")[0]
    path = _find(source, data) if source in SETS else Path(source)
    if source not in SETS and not path.is_file():
        raise UserError(f"--questions {source} is neither a file nor one of {', '.join(SETS)}")
    rows = read_rows(path)
    questions = []
    for i, row in enumerate(rows, start=1):
        instruction, dataset = text_of(row, INSTRUCTION, f"{path} row {i}"), row.get("dataset")
        if not instruction.strip():
            raise UserError(f"{path} row {i}: the instruction is empty")
        dataset = dataset if isinstance(dataset, str) and dataset else name
        questions.append(Question(id_of(row), instruction, input_of(row), dataset))
    ids = [q.id for q in questions if q.id]
    if ids and len(ids) < len(questions):
        raise UserError(f"{path}: {len(questions) - len(ids)} of {len(questions)} questions have no id")
    if twice := repeated(ids):
        raise UserError(f"{path}: ids that stand for two questions: {named(twice)}")
    return name, [questions[i] for i in evenly(len(questions), limit)]


def id_of(row: Row) -> str:
    """A row's own id, or ""."""
    value = next((row[name] for name in ID if isinstance(row.get(name), str | int)), "")
    return whole_characters(str(value))


def input_of(row: Row) -> str:
    """The input of a row in Alpaca's form, or of its first instance in Self-Instruct's; else ""."""
    instances = row.get("instances")
    holder: Any = instances[0] if isinstance(instances, list) and instances else row
    value = holder.get("input") if isinstance(holder, dict) else None
    return whole_characters(value) if isinstance(value, str) else ""


def _find(name: str, data: str) -> Path:
    if data == "hub":
        if name != "alpaca_eval":
            raise UserError(
                f"--questions {name} is not on the hub; give --data DIR with {SETS[name][0]}.jsonl"
            )
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(*HUB, repo_type="dataset"))
        except Exception as error:  # hub errors come in many kinds; all mean that it cannot be had
            cause = one_line(error, 200)
            raise UserError(f"cannot load {HUB[0]} from the hub ({cause}); give --data DIR") from None
    if not Path(data).is_dir():
        raise UserError(f"--data {data} is not a directory")
    for folder in (Path(data), *sorted(p for p in Path(data).iterdir() if p.is_dir())):
        for stem in SETS[name]:
            for ending in ENDINGS:
                if (folder / f"{stem}{ending}").is_file():
                    return folder / f"{stem}{ending}"
    raise UserError(f"--questions {name}: no {' or '.join(SETS[name])} ({', '.join(ENDINGS)}) under {data}")


AUTO, OWN = "auto", "chat_template"  # OWN: the template that comes with the tokenizer
TEMPLATE_CHOICES = (AUTO, *VERSIONS)

Say = Callable[[str], None]


def choose_template(model: EvaluatedModel, template: str, say: Say) -> str:
    """Return the template to use, one of TEMPLATE_CHOICES but `auto`. A mismatch with its tuning is said."""
    if template not in TEMPLATE_CHOICES:
        raise UserError(f"--template {template!r} is not known; known: {', '.join(TEMPLATE_CHOICES)}")
    tuned, of_model = model.facts.get("template"), chat_template(model)
    if template == OWN and of_model is None:
        raise UserError(f"--template {OWN}: {model.given} comes without a chat template")
    if template != AUTO:
        if tuned and VERSIONS.get(template) != tuned:
            say(f"{model.name}: was tuned with the template {tuned}, but --template {template} was given")
        elif not tuned and of_model is not None and template != OWN:
            say(f"{model.name}: comes with a chat template, but --template {template} was given")
        return template
    if tuned:
        name = str(tuned).partition("/")[0]
        if name not in VERSIONS:
            raise UserError(f"{model.given}: export.json names a template {tuned!r}; set --template")
        if VERSIONS[name] != tuned:
            say(f"{model.name}: was tuned with the template {tuned}, which is {VERSIONS[name]} now")
        return name
    if of_model is not None:
        return OWN
    say(f"{model.name}: nothing says which template it was tuned with; Alpaca's is used (--template)")
    return "alpaca"


def chat_template(model: EvaluatedModel) -> str | None:
    """The chat template beside a model's tokenizer, if there is one."""
    return tokenizer_template(model.path)


def prompt_ids(model: EvaluatedModel, question: Question, template: str) -> list[int]:
    """Token ids of a question, up to where the answer begins: those that training showed the model."""
    if template == OWN:
        return chat_ids(model, [{"role": "user", "content": question.text}])
    # BOS and the prompt alone, as emo.data_prep.encode writes them.
    (turn,) = render(Conversation((Exchange(question.instruction, "", question.input),)), template)
    return plain_ids(model, turn.text)


def plain_ids(model: EvaluatedModel, text: str) -> list[int]:
    """Token ids of a prompt, after BOS where the tokenizer has one."""
    tokenizer = model.tokenizer
    ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    return ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids]


def chat_ids(model: EvaluatedModel, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of messages in the tokenizer's own chat template, up to where the reply begins."""
    try:
        ids = model.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # whatever the template's author wrote
        raise UserError(f"{model.given}: its chat template refuses a prompt ({one_line(error)})") from None
    return list(ids)


CHUNK = 64  # answers; what a killed process loses at most
VERSION = 1  # of everything that decides what an answer is
OUTPUTS, ABOUT = "model_outputs.json", "about.json"


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
            raise UserError(f"--max_new_tokens {self.tokens} must be at least 1")


class Answering:
    """Writes the answers to the questions of a plan; `computed` counts those that this process made."""

    def __init__(self, model: EvaluatedModel, engine: Transformers | Vllm, plan: Plan, out: Path) -> None:
        self.model, self.engine, self.plan, self.out = model, engine, plan, out
        self.computed = 0
        self.context = context_of(model)

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Token ids of every question in its template."""
        return [prompt_ids(self.model, q, self.plan.template) for q in self.plan.questions]

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
        rows = []
        for question, record in zip(self.plan.questions, records, strict=True):
            row = {"dataset": question.dataset, "instruction": question.instruction}
            row |= {"id": question.id} if question.id else {}
            row |= {"input": question.input} if question.input else {}
            row |= {"output": record["text"].strip(), "generator": self.model.name}
            rows.append(row | {name: record[name] for name in ("ended", "tokens", "fits")})
        store.replace(self.directory / OUTPUTS, store.dump(rows))
        about = {
            "model": self.model.name,
            "path": self.model.given,
            "questions": self.plan.name,
            "template": self.plan.template,
            "tokens": self.plan.tokens,
            "seed": self.plan.seed,
        }
        store.replace(self.directory / ABOUT, store.dump(about | self.engine.identity | counts(rows)))
        return rows

    def _answer(self, rows: range, bar: Any) -> list[Row]:
        from emo.eval.generation.sampling import Request

        context = self.context or 1 << 30
        room = {row: min(self.plan.tokens, context - len(self.prompts[row])) for row in rows}
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
        dataset = dataset if isinstance(dataset, str) else ""
        question = Question(id_of(row), instruction, input_of(row), dataset)
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
    numbers: Counter[str] = Counter()
    rows = []
    for question, text in answers:
        numbers[question.text] += 1
        number = numbers[question.text]
        rows.append(Answer(question.text if number == 1 else f"{question.text} #{number}", question, text))
    return rows
