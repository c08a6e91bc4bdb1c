"""The judges: their prompts, and how their replies are read.

Replies are read by the rules of each judge's published code. A parser takes any text and returns a verdict,
or None if the reply is unreadable. In a verdict, "a" is the answer that the prompt shows first. Replies are
untrusted data: they are searched and read as literals, and never executed.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..generation.decoding import Beams, Decoding
from .answers import Question
from .pairs import Pair, Side

PROMPTS: dict[str, str] = yaml.safe_load((Path(__file__).parent / "prompts.yaml").read_text(encoding="utf-8"))
# The special tokens that PandaLM's code removes from responses and from its model's replies.
SPECIAL = re.compile(
    r"<unk>|<pad>|<s>|</s>|\[PAD\]|<\|endoftext\|>|\[UNK\]|\[CLS\]|\[MASK\]"
    r"|<\|startofpiece\|>|<\|endofpiece\|>|\[gMASK\]|\[sMASK\]"
)
MAX_LITERAL = (
    100_000  # characters of a reply that is read as a literal. A verdict of AlpacaEval has about 80.
)

VERDICTS: dict[str, Side] = {"1": "a", "2": "b", "tie": "tie"}


@dataclass(frozen=True)
class Judge:
    """A judge model with its prompt and the parser of its replies."""

    name: str
    model: str | None  # hub id of its weights, which --model may replace. None: not public.
    prompt: Callable[[Question, str, str], str]  # of a question, the first and the second answer
    verdict: Callable[[str], Side | None]
    decoding: Decoding | Beams
    tokens: int  # of the longest reply
    chat: bool = False  # the prompt is ChatML
    remote: str = ""  # model that a batch file requests

    @property
    def default_model(self) -> str:
        """The model that the judge is meant for."""
        return self.remote or self.model or self.name

    def pair_prompt(self, pair: Pair, swapped: bool, characters: int | None = None) -> str:
        """Return the prompt of a pair.

        swapped: B's answer comes first. characters: both answers are cut to this length.
        """
        first, second = (pair.b, pair.a) if swapped else (pair.a, pair.b)
        return self.prompt(pair.question, first[:characters], second[:characters])


def auto_j_prompt(question: Question, first: str, second: str) -> str:
    """Return Auto-J's pairwise prompt. An input follows its instruction, as in AlpacaEval's questions."""
    prompt = _fill("auto_j", prompt=question.text, response=first, response_another=second)
    return _fill("auto_j_frame", input=prompt)


def auto_j_verdict(reply: str) -> Side | None:
    """Return the verdict after the last "final decision is " (extract_pariwise_result of GAIR-NLP/auto-j)."""
    _, marker, decision = reply.strip().rpartition("final decision is ")
    verdict = re.match("response 1|response 2|tie", decision.strip().lower()) if marker else None
    return VERDICTS[verdict.group().removeprefix("response ")] if verdict else None


def pandalm_prompt(question: Question, first: str, second: str) -> str:
    """Return PandaLM's prompt, with responses without special tokens."""
    texts = {"instruction": question.instruction, "input": question.input}
    texts |= {"response1": _without_special(first), "response2": _without_special(second)}
    return _fill("pandalm_input" if question.input else "pandalm", **texts)


def pandalm_verdict(reply: str) -> Side | None:
    """Return the verdict in the first line (parse_pandalm_response of WeOpenML/PandaLM makes others ties)."""
    return VERDICTS.get(_without_special(reply).split("\n")[0].lower())


def alpaca_eval_prompt(question: Question, first: str, second: str) -> str:
    """Return the prompt of the annotator alpaca_eval_gpt4, in ChatML."""
    return _fill("alpaca_eval", instruction=question.text, output_1=first, output_2=second)


def alpaca_eval_verdict(reply: str) -> Side | None:
    """Return the rank of model_1 in a Python list of dictionaries (ranking_parser of alpaca_eval 0.6.6)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SyntaxWarning of odd literals
            ranked: Any = ast.literal_eval(reply if len(reply) <= MAX_LITERAL else "")
        (rank, *_) = [entry["rank"] for entry in ranked if entry["model"] == "model_1"]
        return {1: "a", 2: "b"}.get(rank)  # type: ignore[return-value]
    except Exception:  # a text can make a parser raise anything
        return None


def messages(chatml: str) -> list[dict[str, str]]:
    """Return the messages that AlpacaEval makes of its prompt. Answers may contain ChatML markers."""
    system, _, user = chatml.partition("<|im_start|>user\n")
    instruction = system.removeprefix("<|im_start|>system\n").removesuffix("<|im_end|>\n")
    request = user.removesuffix("<|im_end|>")
    return [{"role": "system", "content": instruction.strip()}, {"role": "user", "content": request.strip()}]


def _without_special(text: str) -> str:
    return SPECIAL.sub("", text.strip()).strip()


def _fill(name: str, **texts: str) -> str:
    """Return a prompt with its {slots} filled in one pass, because texts may contain braces and slots."""
    return re.sub(r"\{(\w+)\}", lambda match: texts[match.group(1)], PROMPTS[name])


GREEDY = Decoding(greedy=True)
JUDGES = {
    judge.name: judge
    for judge in (
        Judge("auto-j", "GAIR/autoj-13b", auto_j_prompt, auto_j_verdict, GREEDY, 1024),
        Judge("pandalm", "WeOpenML/PandaLM-7B-v1", pandalm_prompt, pandalm_verdict, Beams(4, 1.2), 512),
        Judge("alpaca_eval", None, alpaca_eval_prompt, alpaca_eval_verdict, GREEDY, 100, True, "gpt-4"),
    )
}
