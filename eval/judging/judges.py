"""The judges: what each is asked, how its replies are read, and how it decodes. One table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.errors import UserError, nearest
from eval.generation.decoding import Decoding
from eval.judging import prompts, verdicts
from eval.judging.engines import Beams
from eval.judging.verdicts import Shown


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
    "auto-j": Judge("auto-j", "GAIR/autoj-13b", prompts.auto_j, verdicts.auto_j, Decoding(greedy=True), 1024),
    "pandalm": Judge(
        "pandalm", "WeOpenML/PandaLM-7B-v1", prompts.pandalm, verdicts.pandalm, Beams(4, 1.2), 512
    ),
    "alpaca_eval": Judge(
        "alpaca_eval",
        None,
        prompts.alpaca_eval,
        verdicts.alpaca_eval,
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
