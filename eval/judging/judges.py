"""The judges, in one table: their prompts, how their replies are read, and how they decode.

The prompts are the judges' own, word for word. Protocol constants: never edited.

auto-j       GAIR-NLP/auto-j 2ae17a3, codes/usage/constants_prompt.py:
             PROMPT_INPUT_WO_SYSTEM around pairwise_tie
pandalm      WeOpenML/PandaLM 3871806, pandalm/utils/pandalm_inference.py: build_pandalm_prompt
alpaca_eval  alpaca_eval 0.6.6, evaluators_configs/alpaca_eval_gpt4/alpaca_eval.txt: ChatML

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
from typing import Any, Literal

from common.errors import UserError, nearest
from eval.generation.decoding import Decoding
from eval.judging.engines import Beams

AUTO_J_FRAME = "[INST] {input} [/INST]"

AUTO_J = """\
You are assessing two submitted responses on a given user's query and judging which response is better or they are tied. Here is the data:

[BEGIN DATA]
***
[Query]: {prompt}
***
[Response 1]: {response}
***
[Response 2]: {response_another}
***
[END DATA]

Here are the instructions to assess and compare the two responses:

1. Pinpoint the key factors to distinguish these two responses.
2. Conclude your comparison by providing a final decision on which response is better, or they are tied. Begin your final decision statement with "So, the final decision is Response 1 / Response 2 / Tie". Ensure that your decision aligns coherently with the comprehensive evaluation and comparison you've provided."""  # noqa: E501

ALPACA_EVAL = """\
<|im_start|>system
You are a helpful assistant, that ranks models by the quality of their answers.
<|im_end|>
<|im_start|>user
I want you to create a leaderboard of different of large-language models. To do so, I will give you the instructions (prompts) given to the models, and the responses of two models. Please rank the models based on which responses would be preferred by humans. All inputs and outputs should be python dictionaries.

Here is the prompt:
{
    "instruction": \"""{instruction}\""",
}

Here are the outputs of the models:
[
    {
        "model": "model_1",
        "answer": \"""{output_1}\"""
    },
    {
        "model": "model_2",
        "answer": \"""{output_2}\"""
    }
]

Now please rank the models by the quality of their answers, so that the model with rank 1 has the best output. Then return a list of the model names and ranks, i.e., produce the following output:
[
    {'model': <model-name>, 'rank': <model-rank>},
    {'model': <model-name>, 'rank': <model-rank>}
]

Your response must be a valid Python dictionary and should contain nothing else because we will directly execute it in Python. Please provide the ranking that the majority of humans would give.
<|im_end|>"""  # noqa: E501

PANDALM = """\
Below are two responses for a given task. The task is defined by the Instruction. Evaluate the responses and generate a reference answer for the task.

### Instruction:
{instruction}

### Response 1:
{response1}

### Response 2:
{response2}

### Evaluation:
"""  # noqa: E501

PANDALM_INPUT = """\
Below are two responses for a given task. The task is defined by the Instruction with an Input that provides further context. Evaluate the responses and generate a reference answer for the task.

### Instruction:
{instruction}

### Input:
{input}

### Response 1:
{response1}

### Response 2:
{response2}

### Evaluation:
"""  # noqa: E501

# What PandaLM's code takes out of responses, and out of its model's replies.
SPECIAL = re.compile(
    r"<unk>|<pad>|<s>|</s>|\[PAD\]|<\|endoftext\|>|\[UNK\]|\[CLS\]|\[MASK\]"
    r"|<\|startofpiece\|>|<\|endofpiece\|>|\[gMASK\]|\[sMASK\]"
)
_PLACE = re.compile(r"\{(\w+)\}")


def auto_j_prompt(instruction: str, context: str, first: str, second: str) -> str:
    """Auto-J's pairwise prompt. An input follows its instruction, as in AlpacaEval's questions."""
    prompt = _filled(AUTO_J, prompt=_joined(instruction, context), response=first, response_another=second)
    return _filled(AUTO_J_FRAME, input=prompt)


def pandalm_prompt(instruction: str, context: str, first: str, second: str) -> str:
    """PandaLM's prompt; special tokens in the responses are left out."""
    first, second = without_special(first), without_special(second)
    frame = PANDALM_INPUT if context else PANDALM
    return _filled(frame, instruction=instruction, input=context, response1=first, response2=second)


def alpaca_eval_prompt(instruction: str, context: str, first: str, second: str) -> str:
    """The prompt of the annotator alpaca_eval_gpt4, in ChatML."""
    return _filled(ALPACA_EVAL, instruction=_joined(instruction, context), output_1=first, output_2=second)


def without_special(text: str) -> str:
    """A text without special tokens and the blanks around it."""
    return SPECIAL.sub("", text.strip()).strip()


def messages(chatml: str) -> list[dict[str, str]]:
    """The messages that AlpacaEval makes of its prompt; answers may hold the marks of ChatML."""
    system, _, user = chatml.partition("<|im_start|>user\n")
    instruction = system.removeprefix("<|im_start|>system\n").removesuffix("<|im_end|>\n")
    request = user.removesuffix("<|im_end|>")
    return [{"role": "system", "content": instruction.strip()}, {"role": "user", "content": request.strip()}]


def _joined(instruction: str, context: str) -> str:
    return f"{instruction}\n\n{context}" if context else instruction


def _filled(frame: str, **texts: str) -> str:
    """A frame with its {places} filled in, in one pass: texts may contain braces, even {places}."""
    return _PLACE.sub(lambda match: texts[match.group(1)], frame)


Shown = Literal["first", "second", "tie"]  # by their order in the prompt
Side = Literal["a", "b", "tie"]  # whose answer is better
Outcome = Literal["a", "b", "tie", "changed", "unreadable"]

DECISION = "final decision is "  # of Auto-J
LONGEST = 100_000  # characters of a reply that are read as a literal; a verdict of AlpacaEval has about 80
SWAPPED: dict[str, Side] = {"first": "b", "second": "a", "tie": "tie"}
STRAIGHT: dict[str, Side] = {"first": "a", "second": "b", "tie": "tie"}


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
    return None if position is None else (SWAPPED if swapped else STRAIGHT)[position]


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
