"""The judges' prompts, word for word, and how answers are put into them. Protocol constants: never edited.

auto-j       GAIR-NLP/auto-j 2ae17a3, codes/usage/constants_prompt.py:
             PROMPT_INPUT_WO_SYSTEM around pairwise_tie
pandalm      WeOpenML/PandaLM 3871806, pandalm/utils/pandalm_inference.py: build_pandalm_prompt
alpaca_eval  alpaca_eval 0.6.6, evaluators_configs/alpaca_eval_gpt4/alpaca_eval.txt: ChatML
"""

from __future__ import annotations

import re

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


def auto_j(instruction: str, context: str, first: str, second: str) -> str:
    """Auto-J's pairwise prompt. An input follows its instruction, as in AlpacaEval's questions."""
    prompt = _filled(AUTO_J, prompt=_joined(instruction, context), response=first, response_another=second)
    return _filled(AUTO_J_FRAME, input=prompt)


def pandalm(instruction: str, context: str, first: str, second: str) -> str:
    """PandaLM's prompt; special tokens in the responses are left out."""
    first, second = without_special(first), without_special(second)
    frame = PANDALM_INPUT if context else PANDALM
    return _filled(frame, instruction=instruction, input=context, response1=first, response2=second)


def alpaca_eval(instruction: str, context: str, first: str, second: str) -> str:
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
