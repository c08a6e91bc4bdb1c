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
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from emo.common.errors import UserError, one_line
from emo.data_prep.config import VERSIONS
from emo.data_prep.inputs import read_text
from emo.data_prep.templates import Conversation, Exchange, render
from emo.data_prep.tokenizer import chat_template
from emo.eval import store
from emo.eval.generation.decoding import context_of
from emo.eval.generation.prefixes import evenly, find_file
from emo.eval.judging.engines import Transformers
from emo.eval.model import EvaluatedModel

Row = dict[str, Any]
Say = Callable[[str], None]

NAMED = 3  # ids that an error names
HALF, ESCAPED_HALF = re.compile("[\ud800-\udfff]"), re.compile(r"\\u[dD][89a-fA-F]")


def read_rows(path: Path) -> list[Row]:
    """Return the objects of a file, at least one; UserError when it is cut off, or holds others.

    Halves of characters, which no file can hold, are replaced one for one: lengths count.
    """
    text = read_text(path).removeprefix("\ufeff")  # the mark that some programs begin a file with
    is_array = text.lstrip().startswith("[")
    rows: list[Any] = []
    for number, part in enumerate([text] if is_array else text.split("\n"), start=1):
        if not part.strip():
            continue
        try:
            value = json.loads(part)
            if ESCAPED_HALF.search(part):
                value = json.loads(HALF.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
        except (ValueError, RecursionError) as error:
            where = path if is_array else f"{path} line {number}"
            reason = getattr(error, "msg", type(error).__name__)
            raise UserError(
                f"{where} is cut off or not JSON ({reason}); is the file half-written?", code="not-json"
            ) from None
        rows += value if is_array else [value]
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(f"{path} row {number} is not an object with fields", code="not-an-object")
    if not rows:
        raise UserError(f"{path} has no rows", code="no-rows")
    return rows


def text_of(row: Mapping[str, Any], names: Iterable[str], where: str) -> str:
    """Return the text of the first field in `names` that a row has; UserError where it has none."""
    for name in names:
        if isinstance(row.get(name), str):
            return row[name]
    raise UserError(f"{where}: no text in {' or '.join(names)}; its fields: {', '.join(map(str, row))}")


def answer_of(row: Mapping[str, Any], name: str, where: str) -> str:
    """Return a field's text. Published files also have null, an empty answer, and answers like true or 3."""
    value = row.get(name, ...)
    if value is None:
        return ""
    return str(value) if isinstance(value, bool | int | float) else text_of(row, (name,), where)


def named(ids: Collection[str]) -> str:
    """Return the first ids of a list as an error shows them, and how many more there are."""
    text = ", ".join(repr(name if len(name) <= 60 else name[:57] + "...") for name in list(ids)[:NAMED])
    return text + (f" and {len(ids) - NAMED} more" if len(ids) > NAMED else "")


def require_once(ids: Iterable[str], what: str) -> None:
    """Raise a UserError that begins with `what` where an id comes more than once."""
    if twice := [name for name, count in Counter(ids).items() if count > 1]:
        raise UserError(f"{what} more than once: {named(twice)}", code="twice")


# Name -> files below --data, the first that exists.
SETS = {
    "alpaca_eval": ("alpaca_eval/alpaca_eval", "alpaca_eval/eval_davinci003", "alpaca_eval"),
    **{name: (f"eval_prompts/{name}", name) for name in ("vicuna", "koala", "wizardlm", "sinstruct")},
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
        """Return instruction and input as one text, as AlpacaEval writes them."""
        return f"{self.instruction}\n\n{self.input}" if self.input else self.instruction


def question_of(row: Row, where: str, names: Iterable[str] = ("instruction",), dataset: str = "") -> Question:
    """Return the question of a row in Alpaca's form, or Self-Instruct's (input in its first instance).

    names: fields that may hold the instruction; dataset: the set, where the row does not say.
    """
    instances = row.get("instances")
    holder: Any = instances[0] if isinstance(instances, list) and instances else row
    value = holder.get("input") if isinstance(holder, dict) else None
    return Question(
        id_of(row),
        text_of(row, names, where),
        value if isinstance(value, str) else "",
        row["dataset"] if isinstance(row.get("dataset"), str) and row["dataset"] else dataset,
    )


def id_of(row: Row) -> str:
    """Return a row's own id, or ""."""
    return str(next((row[name] for name in ID if isinstance(row.get(name), str | int)), ""))


def read_questions(source: str, data: str, limit: int | None = None) -> tuple[str, list[Question]]:
    """Return (name of the set, questions) of a set in SETS or a file; at most `limit`, evenly spaced."""
    path, name = Path(source), Path(source).name.split(".")[0]
    if source in SETS:
        path, name = _find(source, data), source
    elif not path.is_file():
        raise UserError(f"--questions {source} is neither a file nor one of {', '.join(SETS)}")
    questions = []
    for i, row in enumerate(read_rows(path), start=1):
        questions.append(question_of(row, f"{path} row {i}", INSTRUCTION, name))
        if not questions[-1].instruction.strip():
            raise UserError(f"{path} row {i}: the instruction is empty")
    ids = [q.id for q in questions if q.id]
    if ids and len(ids) < len(questions):
        raise UserError(f"{path}: {len(questions) - len(ids)} of {len(questions)} questions have no id")
    require_once(ids, f"{path}: ids come")
    return name, [questions[i] for i in evenly(len(questions), limit)]


def _find(name: str, data: str) -> Path:
    if data != "hub":
        if path := find_file(data, SETS[name], ENDINGS):
            return path
        files = f"{' or '.join(SETS[name])} ({', '.join(ENDINGS)})"
        raise UserError(f"--questions {name}: no {files} under --data {data}")
    if name != "alpaca_eval":
        raise UserError(f"--questions {name} is not on the hub; give --data DIR with {SETS[name][0]}.jsonl")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(*HUB, repo_type="dataset"))
    except Exception as error:  # hub errors come in many kinds; all mean that it cannot be had
        cause = one_line(error, 200)
        raise UserError(f"cannot load {HUB[0]} from the hub ({cause}); give --data DIR") from None


AUTO, OWN = "auto", "chat_template"  # OWN: the template that comes with the tokenizer
TEMPLATE_CHOICES = (AUTO, *VERSIONS)


def choose_template(model: EvaluatedModel, template: str, say: Say) -> str:
    """Return the template to use, one of TEMPLATE_CHOICES but `auto`. A mismatch with its tuning is said."""
    if template not in TEMPLATE_CHOICES:
        raise UserError(f"--template {template!r} is not known; known: {', '.join(TEMPLATE_CHOICES)}")
    tuned, has_template = model.facts.get("template"), chat_template(model.path) is not None
    if template == OWN and not has_template:
        raise UserError(f"--template {OWN}: {model.given} comes without a chat template")
    if template == AUTO and tuned:
        name = str(tuned).partition("/")[0]
        if name not in VERSIONS:
            raise UserError(f"{model.given}: export.json names a template {tuned!r}; set --template")
        if VERSIONS[name] != tuned:
            say(f"{model.name}: was tuned with the template {tuned}, which is {VERSIONS[name]} now")
        return name
    if template == AUTO and has_template:
        return OWN
    if template == AUTO:
        say(f"{model.name}: nothing says which template it was tuned with; Alpaca's is used (--template)")
        return "alpaca"
    if tuned and VERSIONS[template] != tuned:
        say(f"{model.name}: was tuned with the template {tuned}, but --template {template} was given")
    elif not tuned and has_template and template != OWN:
        say(f"{model.name}: comes with a chat template, but --template {template} was given")
    return template


def prompt_ids(model: EvaluatedModel, question: Question, template: str) -> list[int]:
    """Return the token ids of a question, up to where the answer begins: those that training showed it."""
    if template == OWN:
        return chat_ids(model, [{"role": "user", "content": question.text}])
    # BOS and the prompt alone, as emo.data_prep.encode writes them.
    (turn,) = render(Conversation((Exchange(question.instruction, "", question.input),)), template)
    return plain_ids(model, turn.text)


def plain_ids(model: EvaluatedModel, text: str) -> list[int]:
    """Return the token ids of a prompt, after BOS where the tokenizer has one."""
    tokenizer = model.tokenizer
    ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    return ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids]


def chat_ids(model: EvaluatedModel, messages: list[dict[str, str]]) -> list[int]:
    """Return the token ids of messages in the tokenizer's own template, up to where the reply begins."""
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


class Answering:
    """Writes a model's answers to questions into `directory`; `computed` counts those that this process made.

    name: of the set of questions; tokens: of the longest answer; seed: of sampled ones.
    """

    def __init__(
        self, engine: Transformers, questions: list[Question], name: str, template: str, tokens: int,
        seed: int, out: Path,
    ) -> None:  # fmt: skip
        if tokens < 1:
            raise UserError(f"--max_new_tokens {tokens} must be at least 1")
        self.engine, self.questions, self.tokens, self.seed, self.out = engine, questions, tokens, seed, out
        self.model, self.name, self.template, self.computed = engine.model, name, template, 0
        decoding: Any = engine.decoding
        suffix = f"-s{seed}" if seed and not decoding.greedy else ""
        self.directory = out / "models" / self.model.name / "answers" / f"{name}-{decoding.name}{suffix}"
        self.prompts = [prompt_ids(self.model, question, template) for question in questions]
        self.context = context_of(self.model)

    def run(self) -> list[Row]:
        """Return all answers, made or read, which are in their file too."""
        from tqdm import tqdm

        asked = {"tokens": self.tokens, "seed": self.seed}
        made_of = {"answers": VERSION, "prompts": store.digest(self.prompts), "context": self.context}
        entry = store.Entry(self.out / store.STORE, made_of | asked | self.engine.identity)
        count, label = len(self.prompts), f"{self.model.name} {self.name}"
        with tqdm(total=count, desc=label, unit="answer", disable=None) as bar:
            records = store.complete(entry, count, CHUNK, partial(self._answer, bar), bar.update)
        rows = []
        for question, record in zip(self.questions, records, strict=True):
            row = {"dataset": question.dataset, "instruction": question.instruction}
            row |= {"id": question.id} if question.id else {}
            row |= {"input": question.input} if question.input else {}
            row |= {"output": record["text"].strip(), "generator": self.model.name}
            rows.append(row | {name: record[name] for name in ("ended", "tokens", "fits")})
        about: Row = {"model": self.model.name, "path": self.model.given, "questions": self.name}
        about |= {"template": self.template, **asked, **self.engine.identity, **counts(rows)}
        store.replace(self.directory / OUTPUTS, store.dump(rows))
        store.replace(self.directory / ABOUT, store.dump(about))
        return rows

    def _answer(self, bar: Any, rows: range) -> list[Row]:
        from emo.eval.generation.sampling import Request

        context = self.context or 1 << 30
        room = {row: min(self.tokens, context - len(self.prompts[row])) for row in rows}
        answerable = [row for row in rows if room[row] > 0]
        requests = [Request(self.prompts[row], [self.seed, row], room[row]) for row in answerable]
        replies = self.engine.reply(requests, self.tokens, bar.update) if requests else []
        reply_of = dict(zip(answerable, replies, strict=True))
        self.computed += len(rows)
        bar.update(len(rows) - len(answerable))
        without = {"text": "", "ended": False, "tokens": 0}
        return [{"row": row, **reply_of.get(row, without), "fits": row in reply_of} for row in rows]


def counts(rows: list[Row]) -> dict[str, int]:
    """Return the numbers of answers: all, empty, cut off by a limit, without room in the context."""
    cut_off = sum(row["fits"] and not row["ended"] for row in rows)
    empty, no_room = (sum(not row[name] for row in rows) for name in ("output", "fits"))
    return {"answers": len(rows), "empty": empty, "cut_off": cut_off, "no_room": no_room}


class Answers(NamedTuple):
    """The answers of a model, from a file."""

    path: Path
    generator: str
    rows: list[tuple[Question, str]]

    def keyed(self, by_id: bool) -> dict[str, tuple[Question, str]]:
        """Return the rows by id, or by their questions' texts; one that comes again is another question."""
        if by_id:
            return {question.id: (question, text) for question, text in self.rows}
        numbers: Counter[str] = Counter()
        rows = {}
        for question, text in self.rows:
            numbers[question.text] += 1
            number = numbers[question.text]
            rows[question.text if number == 1 else f"{question.text} #{number}"] = (question, text)
        return rows


def read_answers(path: Path) -> Answers:
    """Return answers in AlpacaEval's format, or those in the directory that `answer` wrote."""
    file = path / OUTPUTS if path.is_dir() else path
    rows = read_rows(file)
    generators = {row["generator"] for row in rows if isinstance(row.get("generator"), str)} - {""}
    if len(generators) > 1:
        models = named(sorted(generators))
        raise UserError(f"{file}: answers of several models: {models}; give one file of each")
    answers = []
    for i, row in enumerate(rows, start=1):
        where = f"{file} row {i}"
        answers.append((question_of(row, where), answer_of(row, "output", where)))
    ids = [question.id for question, _ in answers]
    require_once(ids if all(ids) else [], f"{file}: ids come")
    return Answers(file, generators.pop() if generators else file.name.split(".")[0], answers)
