"""The judges, in one table: their prompts (`prompts.yaml`), how their replies are read, and how they decode.

Replies are read by the rules of the judge's own code. A parser takes any text and gives a verdict on the
answers in the order in which the prompt shows them, or None: the reply is unreadable. Replies are data: they
are searched and read as literals, never run.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from emo.common.errors import UserError, nearest
from emo.eval.generation.decoding import Decoding
from emo.eval.judging.engines import Beams

PROMPTS: dict[str, str] = yaml.safe_load((Path(__file__).parent / "prompts.yaml").read_text(encoding="utf-8"))

# What PandaLM's code takes out of responses, and out of its model's replies.
SPECIAL = re.compile(
    r"<unk>|<pad>|<s>|</s>|\[PAD\]|<\|endoftext\|>|\[UNK\]|\[CLS\]|\[MASK\]"
    r"|<\|startofpiece\|>|<\|endofpiece\|>|\[gMASK\]|\[sMASK\]"
)


def auto_j_prompt(instruction: str, context: str, first: str, second: str) -> str:
    """Auto-J's pairwise prompt. An input follows its instruction, as in AlpacaEval's questions."""
    query = f"{instruction}\n\n{context}" if context else instruction
    prompt = _filled("auto_j", prompt=query, response=first, response_another=second)
    return _filled("auto_j_frame", input=prompt)


def pandalm_prompt(instruction: str, context: str, first: str, second: str) -> str:
    """PandaLM's prompt; special tokens in the responses are left out."""
    first, second = without_special(first), without_special(second)
    frame = "pandalm_input" if context else "pandalm"
    return _filled(frame, instruction=instruction, input=context, response1=first, response2=second)


def alpaca_eval_prompt(instruction: str, context: str, first: str, second: str) -> str:
    """The prompt of the annotator alpaca_eval_gpt4, in ChatML."""
    query = f"{instruction}\n\n{context}" if context else instruction
    return _filled("alpaca_eval", instruction=query, output_1=first, output_2=second)


def without_special(text: str) -> str:
    """A text without special tokens and the blanks around it."""
    return SPECIAL.sub("", text.strip()).strip()


def messages(chatml: str) -> list[dict[str, str]]:
    """The messages that AlpacaEval makes of its prompt; answers may hold the marks of ChatML."""
    system, _, user = chatml.partition("<|im_start|>user\n")
    instruction = system.removeprefix("<|im_start|>system\n").removesuffix("<|im_end|>\n")
    request = user.removesuffix("<|im_end|>")
    return [{"role": "system", "content": instruction.strip()}, {"role": "user", "content": request.strip()}]


def _filled(name: str, **texts: str) -> str:
    """Return a prompt with its {slots} filled in, in one pass: texts may contain braces, even {slots}."""
    return re.sub(r"\{(\w+)\}", lambda match: texts[match.group(1)], PROMPTS[name])


Shown = Literal["first", "second", "tie"]  # by their order in the prompt
Side = Literal["a", "b", "tie"]  # whose answer is better
Outcome = Literal["a", "b", "tie", "changed", "unreadable"]

DECISION = "final decision is "  # of Auto-J
LONGEST = 100_000  # characters of a reply that are read as a literal; a verdict of AlpacaEval has about 80


def auto_j_verdict(reply: str) -> Shown | None:
    """Return what follows the last "final decision is "; extract_pariwise_result of GAIR-NLP/auto-j."""
    _, marker, decision = reply.strip().rpartition(DECISION)
    verdict = decision.strip().lower() if marker else ""
    if verdict.startswith("response 1"):
        return "first"
    if verdict.startswith("response 2"):
        return "second"
    return "tie" if verdict.startswith("tie") else None


def pandalm_verdict(reply: str) -> Shown | None:
    """The first line; parse_pandalm_response of WeOpenML/PandaLM, which makes a tie of what is unreadable."""
    line = without_special(reply).split("\n")[0]
    if line in ("1", "2"):
        return "first" if line == "1" else "second"
    return "tie" if line.lower() == "tie" else None


def alpaca_eval_verdict(reply: str) -> Shown | None:
    """The rank of model_1 in a Python list of dictionaries; ranking_parser of alpaca_eval 0.6.6."""
    if len(reply) > LONGEST:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a literal may look odd to Python
            ranked: Any = ast.literal_eval(reply)
        rank = next(entry["rank"] for entry in [entry for entry in ranked if entry["model"] == "model_1"])
        return {1: "first", 2: "second"}.get(rank)  # type: ignore[return-value]
    except Exception:  # whatever a text can do to a parser: it is no verdict
        return None


def side(position: Shown | None, swapped: bool) -> Side | None:
    """Whose answer a verdict prefers; swapped: the prompt showed B's first."""
    if position is None or position == "tie":
        return position
    return "a" if (position == "first") != swapped else "b"


def outcome(sides: Sequence[Side | None]) -> Outcome:
    """Return what the verdicts in both orders, or in the only one, come to.

    `changed`: they differ, which counts as a tie; `unreadable`: one of them cannot be read.
    """
    if not sides or any(side is None for side in sides):
        return "unreadable"
    distinct = set(sides)
    return distinct.pop() if len(distinct) == 1 else "changed"  # type: ignore[return-value]


def score(result: Outcome) -> float | None:
    """Return what an outcome counts for B: 1, 0, 1/2 for a tie or a changed verdict; None for no verdict."""
    return {"a": 0.0, "b": 1.0, "tie": 0.5, "changed": 0.5, "unreadable": None}[result]


@dataclass(frozen=True)
class Judge:
    """model: its own weights, which a run may replace; None: they are not public. chat: the prompt is ChatML.

    prompt: (instruction, input, first answer, second answer) -> text. tokens: the longest reply.
    """

    name: str
    model: str | None
    prompt: Callable[[str, str, str, str], str]
    verdict: Callable[[str], Shown | None]
    decoding: Decoding | Beams
    tokens: int
    chat: bool = False
    remote: str = ""  # what a batch file asks for


JUDGES = {
    "auto-j": Judge("auto-j", "GAIR/autoj-13b", auto_j_prompt, auto_j_verdict, Decoding(greedy=True), 1024),
    "pandalm": Judge(
        "pandalm", "WeOpenML/PandaLM-7B-v1", pandalm_prompt, pandalm_verdict, Beams(4, 1.2), 512
    ),
    "alpaca_eval": Judge(
        "alpaca_eval",
        None,
        alpaca_eval_prompt,
        alpaca_eval_verdict,
        Decoding(greedy=True),
        100,
        chat=True,
        remote="gpt-4",
    ),
}


def judge(name: str) -> Judge:
    """The judge called `name`."""
    if name not in JUDGES:
        raise UserError(f"--judge {name!r} is not known; {nearest(name, JUDGES)}")
    return JUDGES[name]
