"""Instruction examples as text, by the built-in plain templates alpaca and chat.

A conversation becomes turns. A turn is a prompt followed by a response. An encoded example is BOS, then the
text of each turn and EOS. Only the tokens of the response and EOS carry loss.

A Chat is written by a chat_template instead, see chat_writer.py.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from .weights import AnswerWeights


class Exchange(NamedTuple):
    """A prompt and the response to it. `input` is Alpaca's additional context, often empty."""

    prompt: str
    response: str
    input: str = ""


class Conversation(NamedTuple):
    """The exchanges of an instruction row."""

    exchanges: tuple[Exchange, ...]
    system: str = ""
    unused: int = 0  # messages left out before the first prompt and after the last response
    unsupervised: tuple[int, ...] = ()  # numbers of the responses that the row marks as without loss
    weights: tuple[AnswerWeights, ...] = ()  # of each response; empty: all are 1


class Chat(NamedTuple):
    """The messages of an instruction row, for a tokenizer's chat_template."""

    messages: str  # JSON: [{role: system, developer, user, assistant or tool; content, tool_calls}]
    tools: str = ""  # JSON: schemas of the tools
    unused: int = 0  # messages left out before the first prompt and after the last response
    unsupervised: tuple[int, ...] = ()  # numbers of the answers that the row marks as without loss
    weights: tuple[AnswerWeights, ...] = ()  # of each answer; empty: all are 1
    variables: str = ""  # JSON: variables of the template for this chat, over data.template_variables


class Turn(NamedTuple):
    """Rendered text of one exchange."""

    text: str
    start: int  # character at which the response, and the loss, begins


ANSWER_FOLLOWS = ("### Response:", "ASSISTANT:")  # how prompts end
_ALPACA = "Below is an instruction that describes a task"
_ALPACA_PLAIN = _ALPACA + ". Write a response that appropriately completes the request."
_ALPACA_INPUT = (
    _ALPACA + ", paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)

# `render` as Jinja: how messages of the system and the user are written, and what begins an answer.
_AS_JINJA = {
    "alpaca": (
        r"{% if message.role == 'system' %}{{ (message.content or PREFACE) + '\n\n' }}"
        r"{% elif message.role == 'user' %}{% if loop.first %}{{ PREFACE + '\n\n' }}{% endif %}"
        r"{{ '### Instruction:\n' + message.content + '\n\n' }}",
        r"'### Response:'",
    ),
    "chat": (
        r"{% if message.role == 'system' %}{% if message.content %}{{ message.content + '\n\n' }}{% endif %}"
        r"{% elif message.role == 'user' %}{{ 'USER: ' + message.content + '\n' }}",
        r"'ASSISTANT:\n'",
    ),
}


def as_jinja(template: str, start: str, gap: str) -> str:
    """Return a chat template that writes messages as `render` does, for programs that serve a model.

    Args:
        template: alpaca or chat.
        start: The special tokens before every text.
        gap: The text between a special token and the text after it.
    """
    turns, answer = _AS_JINJA[template]
    begin = f"{{{{ {json.dumps(start + gap, ensure_ascii=False)} }}}}" if start else ""
    between = f"{{% if not loop.last %}}{{{{ '{gap}' }}}}{{% endif %}}" if gap else ""
    return (
        f"{begin}{{% for message in messages %}}{turns.replace('PREFACE', repr(_ALPACA_PLAIN))}"
        f"{{% else %}}{{{{ {answer} + message.content + eos_token }}}}{between}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {answer} }}}}{{% endif %}}"
    )


def render(conversation: Conversation, template: str) -> list[Turn]:
    """Return the turns of a conversation by a template: `alpaca`, or `chat` for a plain transcript.

    In alpaca a system message replaces the preface, and later turns have no preface.
    """
    turns = []
    system = conversation.system
    for i, (prompt, response, context) in enumerate(conversation.exchanges):
        if template == "alpaca":
            preface = system or (_ALPACA_INPUT if context else _ALPACA_PLAIN)
            block = f"### Input:\n{context}\n\n" if context else ""
            text = f"### Instruction:\n{prompt}\n\n{block}### Response:"
        else:
            preface = system
            block = f"\n\n{context}" if context else ""
            text = f"USER: {prompt}{block}\nASSISTANT:\n"
        if i == 0 and preface:
            text = f"{preface}\n\n{text}"
        turns.append(Turn(text + response, len(text)))
    return turns
