"""Questions: the instruction sets that judges are used with, by name, or those of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError, one_line
from eval.judging.rows import Row, evenly, named, read_rows, repeated, text_of, whole_characters

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
    questions = [_question(row, name, f"{path} row {i}") for i, row in enumerate(rows, start=1)]
    ids = [q.id for q in questions if q.id]
    if ids and len(ids) < len(questions):
        raise UserError(f"{path}: {len(questions) - len(ids)} of {len(questions)} questions have no id")
    if twice := repeated(ids):
        raise UserError(f"{path}: ids that stand for two questions: {named(twice)}")
    return name, [questions[i] for i in evenly(len(questions), limit)]


def _question(row: Row, name: str, where: str) -> Question:
    instruction = text_of(row, INSTRUCTION, where)
    if not instruction.strip():
        raise UserError(f"{where}: the instruction is empty")
    dataset = row.get("dataset")
    return Question(
        id_of(row), instruction, input_of(row), dataset if isinstance(dataset, str) and dataset else name
    )


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
        return _from_hub(name)
    if not Path(data).is_dir():
        raise UserError(f"--data {data} is not a directory")
    for folder in (Path(data), *sorted(p for p in Path(data).iterdir() if p.is_dir())):
        for stem in SETS[name]:
            for ending in ENDINGS:
                if (folder / f"{stem}{ending}").is_file():
                    return folder / f"{stem}{ending}"
    raise UserError(f"--questions {name}: no {' or '.join(SETS[name])} ({', '.join(ENDINGS)}) under {data}")


def _from_hub(name: str) -> Path:
    if name != "alpaca_eval":
        raise UserError(f"--questions {name} is not on the hub; give --data DIR with {SETS[name][0]}.jsonl")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(*HUB, repo_type="dataset"))
    except Exception as error:  # hub errors come in many kinds; all mean that it cannot be had
        cause = one_line(error, 200)
        raise UserError(f"cannot load {HUB[0]} from the hub ({cause}); give --data DIR") from None
