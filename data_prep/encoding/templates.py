"""Instruction examples as text, and which part of it carries loss.

A conversation becomes turns; a turn is a prompt directly followed by a response. Encoded, the example is BOS,
then for each turn its text and EOS. Loss is on the tokens of the response and on EOS, nothing else.

A Chat is written by the tokenizer's own chat_template instead, see chats.py.
"""

from __future__ import annotations

from typing import NamedTuple


class Exchange(NamedTuple):
    """A prompt and the response to it. `input` is Alpaca's additional context, often empty."""

    prompt: str
    response: str
    input: str = ""


class Conversation(NamedTuple):
    """The exchanges of an instruction row, whatever form it was in."""

    exchanges: tuple[Exchange, ...]
    system: str = ""
    unused: int = 0  # messages that were left out: before the first prompt, after the last response
    unsupervised: tuple[int, ...] = ()  # numbers of the responses that the row marks as carrying no loss


class Chat(NamedTuple):
    """The messages of an instruction row, for a tokenizer's chat_template."""

    messages: str  # JSON: [{role: system, developer, user, assistant or tool; content, tool_calls}]
    tools: str = ""  # JSON: schemas of what the assistant may call
    unused: int = 0  # messages that were left out: before the first prompt, after the last response
    unsupervised: tuple[int, ...] = ()  # numbers of the answers that the row marks as carrying no loss


class Turn(NamedTuple):
    """A stretch of rendered text; loss from `start` on."""

    text: str
    start: int  # character at which the response begins


_ALPACA = "Below is an instruction that describes a task"
_ALPACA_PLAIN = _ALPACA + ". Write a response that appropriately completes the request."
_ALPACA_INPUT = (
    _ALPACA + ", paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)


def render(conversation: Conversation, template: str) -> list[Turn]:
    """Return the turns of a conversation in `template`: Alpaca's prompts, or a transcript (chat).

    In alpaca a system message replaces the preface, and later turns have none.
    """
    turns, system = [], conversation.system
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
