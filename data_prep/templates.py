"""Instruction examples as text, and which part of it carries loss.

A conversation becomes turns; a turn is a prompt directly followed by a response. Encoded, the example is BOS,
then for each turn its text and EOS. Loss is on the tokens of the response and on EOS, nothing else.

A Chat is written by the tokenizer's own chat_template instead. What the assistant says is where the template
marks it ({% generation %}), or else found by rendering: message i of the assistant begins where the messages
before it end when the template asks for an answer (add_generation_prompt), and ends with the special token
that ends its turn. Both renderings must be the beginning of the whole, or the row is refused: a template that
writes earlier turns in another way as soon as later ones follow cannot be searched like that.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from emo.common.errors import UserError, one_line

if TYPE_CHECKING:  # rows are read without them, and commands shall start fast
    import numpy as np

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# The date of the day would make other data every day: templates have one of their own for want of it.
NO_CLOCK = "{% set strftime_now = todays_date %}"
PROBE = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "World"})


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


class ChatTemplate(NamedTuple):
    """A chat_template and the tokens that it may write."""

    text: str
    names: tuple[tuple[str, str], ...]  # bos_token, eos_token ... and what they are
    specials: tuple[str, ...]  # tokens that are the template's alone: in what people say they are text

    @property
    def digest(self) -> str:
        """Return the identity by content, 64 hex digits."""
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()

    @property
    def patterns(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Return patterns of the special tokens in what people say, and of the same once protected."""
        from transformers.utils.chat_template_utils import _get_control_token_patterns

        patterns: tuple[re.Pattern[str], re.Pattern[str]] = _get_control_token_patterns(self.specials)
        return patterns

    def last(self, text: str) -> str:
        """Return the special token that ends a text, or ''."""
        return next((special for special in self.specials if text.endswith(special)), "")


class RefusedError(Exception):
    """A chat that a template does not write, or in which the assistant's part cannot be told."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def read_template(directory: Path, name: str) -> ChatTemplate:
    """Return the chat_template of a saved tokenizer, called `name` by the user. Raises UserError."""
    from emo.data_prep.tokenizer import chat_template, special_names
    from emo.data_prep.words import special_tokens

    text = chat_template(directory)
    if text is None:
        raise UserError(
            f"tokenizer {name} has no chat_template, for which data.template=chat_template asks; name one "
            "that has, put a chat_template.jinja into its directory, or set data.template to chat or alpaca"
        )
    specials = tuple(sorted(special_tokens(directory), key=len, reverse=True))  # the longest that fits counts
    return ChatTemplate(text, tuple(sorted(special_names(directory).items())), specials)


def check_template(template: ChatTemplate) -> list[str]:
    """Return notes for the user: about a date, and about a turn that ends with another token than EOS."""
    try:
        text, _ = render_chat(Chat(json.dumps(PROBE)), template)
    except RefusedError as error:
        raise UserError(f"the tokenizer's chat_template cannot be used: {error.detail}") from None
    notes = []
    if "strftime_now" in template.text:
        notes.append("note: the chat_template writes today's date; the data get the one that it has without")
    if (end := template.last(text)) != (eos := dict(template.names).get("eos_token")):
        notes.append(f"note: the chat_template ends a turn with {end}, not {eos}: generate until {end}")
    return notes


def render_chat(chat: Chat, template: ChatTemplate) -> tuple[str, list[tuple[int, int]]]:
    """Return a chat as text, and what the assistant says in it, each with the token that ends its turn.

    The text goes up to the end of what the assistant says last; special tokens that people wrote are
    protected in it, see `ChatTemplate.patterns`. Raises RefusedError.
    """
    from transformers.utils.chat_template_utils import mark_control_tokens

    def refused(why: str) -> RefusedError:
        return RefusedError(
            "response_not_found",
            f"the chat_template does not tell what the assistant says: {why}; mark that in the template with "
            "{% generation %}, or set data.template to chat",
        )

    pattern, _ = template.patterns
    messages = mark_control_tokens(json.loads(chat.messages), pattern)
    if "developer" not in template.text:  # older templates know one name for it
        for message in messages:
            message["role"] = "system" if message["role"] == "developer" else message["role"]
    tools = mark_control_tokens(json.loads(chat.tools), pattern) if chat.tools else None
    numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    marked = bool(MARKED.search(template.text))
    text, stretches = _write(messages, tools, template, marked=marked)
    for i in [] if marked else numbers:
        before, _ = _write(messages[:i], tools, template, prompt=True)
        after = _write(messages[: i + 1], tools, template)[0].rstrip()
        if not after.startswith(before):
            raise refused("it writes an answer in another way than it asks for one")
        if not text.startswith(after):
            raise refused("it writes an answer in another way when messages follow")
        stretches.append((len(before), len(after)))
    answers, count = [], len(numbers)
    # An answer ends with a special token, which may come right after its stretch.
    for start, end in stretches:
        answer = text[start:end].rstrip()
        special = template.last(answer)
        if not answer.removesuffix(special).strip():
            raise refused("it leaves an answer out")
        stop = start + len(answer)
        if not special:
            follows = (token for token in template.specials if text.startswith(token, end))
            stop = end + len(next(follows, ""))
            if stop == end:
                raise refused("no special token ends an answer in it, so that no end would be learned")
        answers.append((start, stop))
    overlap = any(after[0] < before[1] for before, after in pairwise(answers))
    if overlap or len(answers) < count or (chat.unsupervised and len(answers) != count):
        raise refused(f"it marks {len(answers)} stretches of {count} answers")
    return text[: answers[-1][1]], answers


def _write(
    messages: Sequence[dict[str, Any]],
    tools: Any,
    template: ChatTemplate,
    prompt: bool = False,
    marked: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """Return what the template writes, and where it marks answers in it. Raises RefusedError."""
    from transformers.utils.chat_template_utils import render_jinja_template

    names: dict[str, Any] = dict(template.names)
    text = NO_CLOCK + template.text if "strftime_now" in template.text else template.text
    try:
        rendered: Any = render_jinja_template(
            conversations=[list(messages)],
            tools=tools,
            chat_template=text,
            return_assistant_tokens_mask=marked,
            add_generation_prompt=prompt,
            **names,
        )
    except Exception as error:  # a template raises what it likes
        raise RefusedError("refused_by_chat_template", one_line(error, 200)) from None
    (written,), spans = rendered
    return written, spans[0] if marked else []


class ChatEncoder:
    """Encodes chats with a saved tokenizer: special tokens of the template are such, people's are text.

    Answers are encoded apart from what is before them, so that no token belongs to both, and the first prompt
    has the very ids that `apply_chat_template` gives at generation.
    """

    def __init__(self, directory: Path, template: ChatTemplate) -> None:
        from emo.data_prep.words import encoder

        self.template = template
        self.beginning = encoder(directory, markup=True)
        self.continuing = encoder(directory, continuing=True, markup=True)
        self.spoken = encoder(directory, continuing=True)

    def encode(self, chat: Chat) -> tuple[list[int], np.ndarray]:
        """Return the ids of a chat, and int64 [answers, 2], which of them are supervised."""
        import numpy as np

        text, spans = render_chat(chat, self.template)
        ids: list[int] = []
        supervised = []
        done, end = 0, ""  # how far the text is encoded, and the special token before that
        for number, (start, stop) in enumerate(spans):
            # After a special token some tokenizers put a space, so that it must be seen.
            ids += self._ids(end + text[done:start], self.beginning)[bool(end) :]
            begin = len(ids)
            ids += self._ids(text[start:stop], self.continuing)
            if number not in chat.unsupervised:
                supervised.append((begin, len(ids)))
            done, end = stop, self.template.last(text[:stop])
        return ids, np.array(supervised, np.int64)

    def _ids(self, text: str, tokenizer: Any) -> list[int]:
        """Return the ids of a stretch; the special tokens that people wrote in it are encoded as text."""
        ids: list[int] = []
        for i, piece in enumerate(self.template.patterns[1].split(text)):
            if piece:
                by = self.spoken if i % 2 else tokenizer if i == 0 else self.continuing
                ids += by.encode(piece, add_special_tokens=False).ids
        return ids
