"""Questions, how they are put to a model, and its answers, in files and on disk in AlpacaEval's format.

Answers are made in chunks that processes share, or read from files.

OUT/store/KEY/                                    chunks and leases, as evaluations have them
OUT/models/NAME/answers/QUESTIONS-DECODING/
    model_outputs.json    [{"dataset", "instruction", "output", "generator", ...}]
    about.json            model, template, engine, decoding, how many are empty or cut off

Files of questions, answers, verdicts and replies are a JSON array or JSON lines, maybe .zst.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from emo.common.errors import UserError
from emo.data_prep.config import VERSIONS, by_chat_template
from emo.data_prep.encoding.chat_templates import BUILT_IN, RefusedError
from emo.data_prep.encoding.templates import Conversation, Exchange, render
from emo.data_prep.encoding.tokenizer import chat_template, text_ids

from ..generation.decoding import Decoding, Request
from ..generation.engines import Record, TextJob, Transformers
from ..generation.prefixes import Row, evenly, find_file, from_hub, read_rows
from ..model import EvaluatedModel
from ..results import store
from ..results.directory import MODELS

Say = Callable[[str], None]

FEW = 3  # ids that an error names
# Name -> files below --data, the first that exists.
SETS = {
    "alpaca_eval": ("alpaca_eval/alpaca_eval", "alpaca_eval/eval_davinci003", "alpaca_eval"),
    **{name: (f"eval_prompts/{name}", name) for name in ("vicuna", "koala", "wizardlm", "sinstruct")},
}
HUB = ("tatsu-lab/alpaca_eval", "alpaca_eval.json")  # the one set that is on the hub
# How the sets call their fields.
INSTRUCTION = ("instruction", "Instruction", "prompt", "question", "text", "conversations")
ID = ("id", "question_id", "idx")


def shortened(ids: Collection[str]) -> str:
    """Return the first ids of a list as an error shows them, and how many more there are."""
    text = ", ".join(repr(name if len(name) <= 60 else name[:57] + "...") for name in list(ids)[:FEW])
    return text + (f" and {len(ids) - FEW} more" if len(ids) > FEW else "")


def require_once(ids: Iterable[str], subject: str) -> None:
    """Raise a UserError that begins with `subject` where an id comes more than once."""
    if twice := [name for name, count in Counter(ids).items() if count > 1]:
        raise UserError(f"{subject} more than once: {shortened(twice)}", code="twice")


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


def question_of(row: Row, *names: str, dataset: str = "") -> Question:
    """Return the question of a row in Alpaca's form, or Self-Instruct's (input in its first instance).

    names: fields that may hold the instruction; dataset: the set, where the row does not say.
    """
    instances, of_row = row.get("instances"), row.get("dataset")
    holder: Any = instances[0] if isinstance(instances, list) and instances else row
    context = holder.get("input") if isinstance(holder, dict) else None
    context = context if isinstance(context, str) else ""
    dataset = of_row if isinstance(of_row, str) and of_row else dataset
    return Question(id_of(row), row.text(*names), context, dataset)


def id_of(row: Row) -> str:
    """Return a row's own id, or ""."""
    return next((str(row[name]) for name in ID if isinstance(row.get(name), str | int)), "")


def answer_of(row: Row, name: str = "output") -> str:
    """Return a field's text. Published files also have null, an empty answer, and answers like true or 3."""
    value = row.get(name, ...)
    if value is None:
        return ""
    return str(value) if isinstance(value, bool | int | float) else row.text(name)


def read_questions(source: str, data: str, limit: int | None = None) -> tuple[str, list[Question]]:
    """Return (name of the set, questions) of a set in SETS or a file; at most `limit`, evenly spaced."""
    path, name = Path(source), Path(source).name.split(".")[0]
    if source in SETS:
        path, name = _find(source, data), source
    elif not path.is_file():
        raise UserError(f"--questions {source} is neither a file nor one of {', '.join(SETS)}")
    questions = [question_of(row, *INSTRUCTION, dataset=name) for row in read_rows(path)]
    if empty := [i for i, question in enumerate(questions, start=1) if not question.instruction.strip()]:
        raise UserError(f"{path} row {empty[0]}: the instruction is empty")
    ids = [q.id for q in questions if q.id]
    if ids and len(ids) < len(questions):
        raise UserError(f"{path}: {len(questions) - len(ids)} of {len(questions)} questions have no id")
    require_once(ids, f"{path}: ids come")
    return name, evenly(questions, limit)


def _find(name: str, data: str) -> Path:
    if data != "hub":
        endings = (".json", ".jsonl", ".json.zst", ".jsonl.zst")
        return find_file(f"--questions {name}", data, SETS[name], endings)
    if name != "alpaca_eval":
        raise UserError(f"--questions {name} is not on the hub; give --data DIR with {SETS[name][0]}.jsonl")
    from huggingface_hub import hf_hub_download

    return Path(from_hub(HUB[0], lambda: hf_hub_download(*HUB, repo_type="dataset")))


AUTO, OWN = "auto", "chat_template"  # OWN: the template that comes with the tokenizer
TEMPLATE_CHOICES = (AUTO, *(name for name in VERSIONS if name not in BUILT_IN))


def choose_template(model: EvaluatedModel, template: str, say: Say) -> str:
    """Return the template to use, one of TEMPLATE_CHOICES but `auto`. A mismatch with its tuning is said."""
    if template not in TEMPLATE_CHOICES:
        raise UserError(f"--template {template!r} is not known; known: {', '.join(TEMPLATE_CHOICES)}")
    tuned, has_template = str(model.facts.get("template") or ""), chat_template(model.path) is not None
    name = template
    if template == AUTO:
        name = tuned.partition("/")[0] or (OWN if has_template else "alpaca")
    if name not in VERSIONS:
        raise UserError(f"{model.given}: export.json names a template {tuned!r}; set --template")
    if by_chat_template(name) and name == template and not has_template:
        raise UserError(f"--template {name}: {model.given} comes without a chat template")
    if tuned and VERSIONS[name] != tuned:
        say(f"{model.name}: was tuned with the template {tuned}, and {VERSIONS[name]} is used (--template)")
    elif not tuned and has_template and name != OWN:
        say(f"{model.name}: comes with a chat template, but --template {template} was given")
    elif not tuned and not has_template and template == AUTO:
        say(f"{model.name}: nothing says which template it was tuned with; Alpaca's is used (--template)")
    return OWN if name in BUILT_IN else name  # the tokenizer of the export has it


class Exchanged(NamedTuple):
    """A question, and the ids and the text of the answer that the model gave."""

    question: Question
    ids: list[int]
    text: str

    @property
    def message(self) -> dict[str, str]:
        """Return the answer for a chat template, its reasoning apart, which most templates then leave out."""
        reasoning, tag, content = self.text.rpartition("</think>")
        thought = {"reasoning_content": reasoning.removeprefix("<think>").strip()} if tag else {}
        return {"role": "assistant", "content": content.lstrip() if tag else content, **thought}


def prompt_ids(model: EvaluatedModel, question: Question, template: str) -> list[int]:
    """Return the token ids of a question, up to where the answer begins: those that training showed it."""
    return conversation_ids(model, template, [], question)


def conversation_ids(
    model: EvaluatedModel, template: str, history: Sequence[Exchanged], question: Question, system: str = ""
) -> list[int]:
    """Return the token ids of a conversation, up to where the answer begins, as training showed it."""
    questions = [*(exchanged.question for exchanged in history), question]
    if by_chat_template(template):
        messages = [{"role": "system", "content": system}] if system else []
        for asked, answered in zip(questions, [*history, None], strict=True):
            messages.append({"role": "user", "content": asked.text})
            messages += [answered.message] if answered else []
        return chat_ids(model, messages)
    # As data_prep.shards.encode writes them: the start of a text once, EOS after each answer, and the names
    # of special tokens as text.
    exchanges = tuple(Exchange(asked.instruction, "", asked.input) for asked in questions)
    first, *later = (turn.text for turn in render(Conversation(exchanges, system), template))
    tokenizer, options = model.tokenizer, {"add_special_tokens": False, "split_special_tokens": True}
    ids = text_ids(tokenizer, first, split_special_tokens=True)
    for prompt, answered in zip(later, history, strict=True):
        ended = (answered.ids[-1:] and answered.ids[-1] in model.ends) or tokenizer.eos_token_id is None
        ids += answered.ids if ended else [*answered.ids, tokenizer.eos_token_id]
        ids += tokenizer(prompt, **options).input_ids
    return ids


def chat_ids(model: EvaluatedModel, messages: list[dict[str, str]]) -> list[int]:
    """Return the token ids of messages in the tokenizer's own template, up to where the reply begins."""
    try:
        return model.chat_encoder.prompt(messages)
    except RefusedError as error:
        raise UserError(
            f"{model.given}: its chat template rejects a prompt ({error.detail})", code="chat-template"
        ) from None


VERSION = 1  # of everything that decides what an answer is
OUTPUTS = "model_outputs.json"
# Counts -> how a user is told about them.
REMARKS = {
    "empty": "are empty; they are kept",
    "cut_off": "were cut off; --max_new_tokens, or the context, is the limit",
    "no_room": "had no room after their question in the context",
}


class Answering(TextJob):
    """A model's answers to questions, which `directory` shows; name: of the set; seed: of sampled ones."""

    unit = "answer"

    def __init__(
        self, engine: Transformers, questions: list[Question], name: str, template: str, tokens: int,
        seed: int, out: Path,
    ) -> None:  # fmt: skip
        super().__init__(engine, tokens, out)
        assert isinstance(engine.decoding, Decoding)
        self.questions, self.name, self.template, self.seed = questions, name, template, seed
        suffix = f"-s{seed}" if seed and not engine.decoding.greedy else ""
        folder = f"{name}-{engine.decoding.name}{suffix}"
        self.directory = out / MODELS / self.model.name / "answers" / folder
        self.prompts = [prompt_ids(self.model, question, template) for question in questions]

    def run(self, say: Say) -> None:
        """Make or read all answers, write them, and say how many are empty or cut off."""
        model, settings = self.model, {"tokens": self.tokens, "seed": self.seed, **self.engine.identity}
        decides = {"answers": VERSION, "prompts": store.digest(self.prompts), "context": self.context}
        records = self.complete(decides | settings, len(self.prompts), f"{model.name} {self.name}")
        rows = []
        for question, record in zip(self.questions, records, strict=True):
            row = {"dataset": question.dataset, "instruction": question.instruction}
            row |= {name: value for name in ("id", "input") if (value := getattr(question, name))}
            row |= {"output": record["text"].strip(), "generator": model.name}
            rows.append(row | {name: record[name] for name in ("ended", "tokens", "fits")})
        counts = {"empty": sum(not row["output"] for row in rows)}
        counts["cut_off"] = sum(row["fits"] and not row["ended"] for row in rows)
        counts["no_room"] = sum(not row["fits"] for row in rows)
        about: Record = {"model": model.name, "path": model.given, "questions": self.name}
        store.replace(self.directory / OUTPUTS, store.dump(rows))
        about |= {"template": self.template, **settings, "answers": len(rows), **counts}
        for name, remark in REMARKS.items():
            if counts[name]:
                say(f"{model.name}: {counts[name]} of {len(rows)} answers {remark}")
        self.show(len(rows), about, ("path", "answers", *counts), say)

    def prepare(self, row: int) -> tuple[Record, list[Request]]:
        """Return a question as it is asked, if the context has room for an answer."""
        prompt = self.prompts[row]
        room = self.tokens if self.context is None else min(self.tokens, self.context - len(prompt))
        requests = [Request(prompt, [self.seed, row], room)] if room > 0 else []
        return {"text": "", "ended": False, "tokens": 0, "fits": bool(requests)}, requests


class Answer(NamedTuple):
    """ended: False where the answer was cut off at the token limit, or had no space in the context."""

    question: Question
    text: str
    ended: bool = True


class Answers(NamedTuple):
    """The answers of a model, from a file."""

    path: Path
    generator: str
    rows: list[Answer]


def read_answers(path: Path) -> Answers:
    """Return answers in AlpacaEval's format, or those in the directory that `answer` wrote."""
    file = path / OUTPUTS if path.is_dir() else path
    rows = read_rows(file)
    generators = {row["generator"] for row in rows if isinstance(row.get("generator"), str)} - {""}
    if len(generators) > 1:
        models = shortened(sorted(generators))
        raise UserError(f"{file}: answers of several models: {models}; give one file of each")
    answers = [
        Answer(question_of(row, "instruction"), answer_of(row), row.get("ended") is not False) for row in rows
    ]
    ids = [answer.question.id for answer in answers]
    require_once(ids if all(ids) else [], f"{file}: ids come")
    return Answers(file, generators.pop() if generators else file.name.split(".")[0], answers)
