"""Questions, the prompts for them, and a model's answers, stored in AlpacaEval's format.

Answers are generated in chunks that processes share, or read from files.

OUT/store/KEY/                                    chunks and leases, as for tasks
OUT/models/NAME/answers/QUESTIONS-DECODING/
    model_outputs.json    [{"dataset", "instruction", "output", "generator", ...}]
    about.json            model, template, engine, decoding, numbers of empty and cut-off answers, mean words,
                          and ROUGE against the answers in the file of questions

Files of questions, answers, verdicts and replies are a JSON array or JSON lines, maybe .zst.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from emo.common.errors import UserError
from emo.data_prep.config import VERSIONS, by_chat_template
from emo.data_prep.encoding.chat_templates import BUILT_IN, RefusedError
from emo.data_prep.encoding.templates import Conversation, Exchange, render
from emo.data_prep.encoding.tokenizer import PLAIN, chat_template, text_ids

from ..generation.decoding import THINK, Decoding, Request, begins_in_thinking, split_reasoning
from ..generation.engines import TextJob, Transformers
from ..models.model import EvaluatedModel
from ..results import store
from ..results.directory import MODELS, Record, Say
from ..results.rows import FileRow, evenly_spaced, find_file, load_from_hub, read_json_rows

FEW = 3  # ids that an error lists
# Name -> files under --data, of which the first that exists is used.
SETS = {
    "alpaca_eval": ("alpaca_eval/alpaca_eval", "alpaca_eval/eval_davinci003", "alpaca_eval"),
    **{name: (f"eval_prompts/{name}", name) for name in ("vicuna", "koala", "wizardlm", "sinstruct")},
}
HUB = ("tatsu-lab/alpaca_eval", "alpaca_eval.json")  # the only set on the hub
# The fields of the sets.
INSTRUCTION = ("instruction", "Instruction", "prompt", "question", "text", "conversations")
ID = ("id", "question_id", "idx")

AUTO = "auto"
OWN_TEMPLATE = "chat_template"  # the template of the tokenizer
TEMPLATE_CHOICES = (AUTO, *(name for name in VERSIONS if name not in BUILT_IN))

VERSION = 1  # of everything that affects an answer
OUTPUTS = "model_outputs.json"
# Counts of answers -> what is reported about them.
REMARKS = {
    "empty": "are empty. They are kept.",
    "cut_off": "were cut off at --max_new_tokens or the context",
    "no_room": "had no room after their question in the context",
}


def shorten(ids: Collection[str]) -> str:
    """Return the first ids of a list for an error message, and the number of others."""
    text = ", ".join(repr(name if len(name) <= 60 else name[:57] + "...") for name in list(ids)[:FEW])
    return text + (f" and {len(ids) - FEW} more" if len(ids) > FEW else "")


def require_unique(ids: Iterable[str], subject: str) -> None:
    """Raise a UserError that begins with `subject` if an id occurs more than once."""
    if repeated := [name for name, count in Counter(ids).items() if count > 1]:
        raise UserError(f"{subject} more than once: {shorten(repeated)}", code="twice")


class Question(NamedTuple):
    """id: from the file, or "". input: text that the instruction refers to. output: a known answer, or ""."""

    id: str
    instruction: str
    input: str = ""
    dataset: str = ""
    output: str = ""

    @property
    def text(self) -> str:
        """The instruction and input as one text, as AlpacaEval writes them."""
        return f"{self.instruction}\n\n{self.input}" if self.input else self.instruction


def question_of(row: FileRow, *names: str, dataset: str = "") -> Question:
    """Return the question of a row in the format of Alpaca or Self-Instruct (input in its first instance).

    names: fields that may contain the instruction. dataset: name of the set if the row does not name it.
    """
    instances = row.get("instances")
    own_dataset = row.get("dataset")
    holder: Any = instances[0] if isinstance(instances, list) and instances else row
    context = holder.get("input") if isinstance(holder, dict) else None
    context = context if isinstance(context, str) else ""
    dataset = own_dataset if isinstance(own_dataset, str) and own_dataset else dataset
    return Question(id_of(row), row.text(*names), context, dataset)


def id_of(row: FileRow) -> str:
    """Return the id in a row, or ""."""
    return next((str(row[name]) for name in ID if isinstance(row.get(name), str | int)), "")


def answer_of(row: FileRow, name: str = "output") -> str:
    """Return the answer in a row. Published files also contain null, and answers like true or 3."""
    value = row.get(name, ...)
    if value is None:
        return ""
    return str(value) if isinstance(value, bool | int | float) else row.text(name)


def read_questions(source: str, data: str, limit: int | None = None) -> tuple[str, list[Question]]:
    """Return the name and the questions of a set in SETS or a file, at most `limit`, evenly spaced.

    Questions from a file have the answers of its rows. In the named sets, another model wrote them.
    """
    path = Path(source)
    name = Path(source).name.split(".")[0]
    named = source in SETS
    if named:
        path = _find_set(source, data)
        name = source
    elif not path.is_file():
        raise UserError(
            f"--questions {source} is neither a file nor one of {', '.join(SETS)}", code="option-value"
        )
    rows = read_json_rows(path)
    questions = [question_of(row, *INSTRUCTION, dataset=name) for row in rows]
    if not named and all(isinstance(row.get("output"), str) for row in rows):
        pairs = zip(questions, rows, strict=True)
        questions = [question._replace(output=answer_of(row)) for question, row in pairs]
    if empty := [i for i, question in enumerate(questions, start=1) if not question.instruction.strip()]:
        raise UserError(f"{path} row {empty[0]}: the instruction is empty", code="question")
    ids = [q.id for q in questions if q.id]
    if ids and len(ids) < len(questions):
        raise UserError(
            f"{path}: {len(questions) - len(ids)} of {len(questions)} questions have no id", code="question"
        )
    require_unique(ids, f"{path}: ids occur")
    return name, evenly_spaced(questions, limit)


def _find_set(name: str, data: str) -> Path:
    if data != "hub":
        endings = (".json", ".jsonl", ".json.zst", ".jsonl.zst")
        return find_file(f"--questions {name}", data, SETS[name], endings)
    if name != "alpaca_eval":
        file = f"{SETS[name][0]}.jsonl"
        raise UserError(
            f"--questions {name} is not on the hub. Set --data to a directory with {file}.", code="hub"
        )
    from huggingface_hub import hf_hub_download

    return Path(load_from_hub(HUB[0], lambda: hf_hub_download(*HUB, repo_type="dataset")))


def add_template(add: Callable[..., Any]) -> None:
    """Add the option --template."""
    text = f"{', '.join(TEMPLATE_CHOICES)} (auto: the template of the model's tuning)"
    add("--template", default=AUTO, help=text)


def choose_template(model: EvaluatedModel, template: str, say: Say) -> str:
    """Return the template to use for one of TEMPLATE_CHOICES. Report a mismatch with the model's tuning."""
    if template not in TEMPLATE_CHOICES:
        raise UserError(
            f"--template {template!r} is not known. Choose from {', '.join(TEMPLATE_CHOICES)}.",
            code="option-value",
        )
    tuned = str(model.facts.get("template") or "")
    has_template = chat_template(model.path) is not None
    name = template
    if template == AUTO:
        name = tuned.partition("/")[0] or (OWN_TEMPLATE if has_template else "alpaca")
    if name not in VERSIONS:
        raise UserError(
            f"{model.source}: export.json names an unknown template {tuned!r}. Set --template.",
            code="template",
        )
    if by_chat_template(name) and name == template and not has_template:
        raise UserError(f"--template {name}: {model.source} has no chat template", code="template")
    if tuned and VERSIONS[name] != tuned:
        say(f"{model.name} was tuned with the template {tuned}, but --template selects {VERSIONS[name]}")
    elif not tuned and has_template and name != OWN_TEMPLATE:
        say(f"{model.name} has a chat template, but --template selects {template}")
    elif not tuned and not has_template and template == AUTO:
        say(
            f"{model.name} does not record the template of its tuning. Using alpaca; set --template to "
            "change it."
        )
    return OWN_TEMPLATE if name in BUILT_IN else name  # the export's tokenizer has built-in templates


class Exchanged(NamedTuple):
    """A question, with the ids and the text of the model's answer."""

    question: Question
    ids: list[int]
    text: str

    @property
    def message(self) -> dict[str, str]:
        """The answer for a chat template, with its reasoning separate, which most templates omit later."""
        reasoning, content = split_reasoning(self.text)
        thought = {"reasoning_content": reasoning} if content != self.text else {}
        return {"role": "assistant", "content": content, **thought}


def conversation_ids(
    model: EvaluatedModel, template: str, history: Sequence[Exchanged], question: Question, system: str = ""
) -> list[int]:
    """Return the token ids of a conversation up to the beginning of the next answer, as in training.

    Args:
        model: The model.
        template: A template from `choose_template`.
        history: Earlier exchanges, oldest first.
        question: The next question.
        system: The system message, or "".
    """
    questions = [*(exchanged.question for exchanged in history), question]
    if by_chat_template(template):
        messages = [{"role": "system", "content": system}] if system else []
        for asked, answered in zip(questions, [*history, None], strict=True):
            messages.append({"role": "user", "content": asked.text})
            messages += [answered.message] if answered else []
        return chat_ids(model, messages)
    # As data_prep.shards.encode writes them: BOS once, EOS after each answer, special tokens as plain text.
    exchanges = tuple(Exchange(asked.instruction, "", asked.input) for asked in questions)
    first, *later = (turn.text for turn in render(Conversation(exchanges, system), template))
    tokenizer = model.tokenizer
    ids = text_ids(tokenizer, first)
    for prompt, answered in zip(later, history, strict=True):
        ended = (answered.ids[-1:] and answered.ids[-1] in model.ends) or tokenizer.eos_token_id is None
        ids += answered.ids if ended else [*answered.ids, tokenizer.eos_token_id]
        ids += tokenizer(prompt, **PLAIN).input_ids
    return ids


def chat_ids(model: EvaluatedModel, messages: list[dict[str, str]]) -> list[int]:
    """Return the token ids of messages in the tokenizer's template up to the beginning of the reply."""
    try:
        return model.chat_encoder.prompt(messages)
    except RefusedError as error:
        raise UserError(
            f"{model.source}: its chat template rejects a prompt ({error.detail})", code="chat-template"
        ) from None


class Answering(TextJob):
    """A model's answers to questions, published in `directory`."""

    unit = "answer"

    def __init__(
        self, engine: Transformers, questions: list[Question], name: str, template: str, tokens: int,
        seed: int, out: Path,
    ) -> None:  # fmt: skip
        super().__init__(engine, tokens, out)
        assert isinstance(engine.decoding, Decoding)
        self.questions = questions
        self.name = name
        self.template = template
        self.seed = seed
        suffix = f"-s{seed}" if seed and not engine.decoding.greedy else ""
        folder = f"{name}-{engine.decoding.name}{suffix}"
        self.directory = out / MODELS / self.model.name / "answers" / folder
        self.prompts = [conversation_ids(self.model, template, [], question) for question in questions]

    def run(self, say: Say) -> None:
        """Generate or read all answers, write them, and report how many are empty or cut off."""
        from emo.data_prep.selection.similarity.grams import units

        model = self.model
        settings = {"tokens": self.tokens, "seed": self.seed, **self.engine.identity}
        identity = {"answers": VERSION, "prompts": store.digest_json(self.prompts), "context": self.context}
        records = self.complete(identity | settings, len(self.prompts), f"{model.name} {self.name}")
        rows = []
        for question, record, prompt in zip(self.questions, records, self.prompts, strict=True):
            row = {"dataset": question.dataset, "instruction": question.instruction}
            row |= {name: value for name in ("id", "input") if (value := getattr(question, name))}
            opened = begins_in_thinking(model.tokenizer, prompt)
            reasoning, text = split_reasoning(THINK * opened + record["text"])
            row |= {"output": text.strip(), "generator": model.name}
            row |= {"reasoning": reasoning} if reasoning else {}
            rows.append(row | {name: record[name] for name in ("ended", "tokens", "fits")})
        counts = {
            "empty": sum(not row["output"] for row in rows),
            "cut_off": sum(row["fits"] and not row["ended"] for row in rows),
            "no_room": sum(not row["fits"] for row in rows),
        }
        about: Record = {"model": model.name, "path": model.source, "questions": self.name}
        store.replace(self.directory / OUTPUTS, store.dump(rows))
        about |= {"question_texts": identity["prompts"], "template": self.template, **settings}
        about |= {"answers": len(rows), **counts}
        measures = self._compare(rows) | {"words": fmean(len(units(row["output"])) for row in rows)}
        about |= measures
        values = ", ".join(f"{name} {value:.3g}" for name, value in measures.items())
        say(f"{model.name} {self.name}: {values}")
        for name, remark in REMARKS.items():
            if counts[name]:
                say(f"{model.name}: {counts[name]} of {len(rows)} answers {remark}")
        self.write_about(len(rows), about, ("path", "answers", *counts, *measures), say)

    def _compare(self, rows: list[Record]) -> dict[str, float]:
        """Return the mean ROUGE of the answers against those in the file of questions, if it has any."""
        if not all(question.output for question in self.questions):
            return {}
        from ..generation.quality import rouge

        pairs = [(row["output"], q.output) for row, q in zip(rows, self.questions, strict=True)]
        return {name: fmean(values) for name, values in rouge(pairs).items()}

    def prepare(self, row: int) -> tuple[Record, list[Request]]:
        """Return the request of a question, if the context has room for an answer."""
        prompt = self.prompts[row]
        room = self.tokens if self.context is None else min(self.tokens, self.context - len(prompt))
        requests = [Request(prompt, [self.seed, row], room)] if room > 0 else []
        return {"text": "", "ended": False, "tokens": 0, "fits": bool(requests)}, requests


class ModelAnswer(NamedTuple):
    """ended: False if the answer was cut off at the token limit or had no room in the context."""

    question: Question
    text: str
    ended: bool = True


class Answers(NamedTuple):
    """The answers of a model, from a file."""

    path: Path
    generator: str
    rows: list[ModelAnswer]


def read_answers(path: Path) -> Answers:
    """Return answers in AlpacaEval's format from a file, or from a directory that `answer` wrote."""
    file = path / OUTPUTS if path.is_dir() else path
    rows = read_json_rows(file)
    generators = {row["generator"] for row in rows if isinstance(row.get("generator"), str)} - {""}
    if len(generators) > 1:
        models = shorten(sorted(generators))
        raise UserError(
            f"{file} has answers of several models: {models}. Use one file per model.", code="mixed-answers"
        )
    answers = [
        ModelAnswer(question_of(row, "instruction"), answer_of(row), row.get("ended") is not False)
        for row in rows
    ]
    ids = [answer.question.id for answer in answers]
    require_unique(ids if all(ids) else [], f"{file}: ids occur")
    return Answers(file, generators.pop() if generators else file.name.split(".")[0], answers)
