"""Chats by the tokenizer's own chat_template: their text, what in it the assistant says, and its token ids.

What the assistant says is where the template marks it ({% generation %}), or else found by rendering: message
i of the assistant begins where the messages before it end when the template asks for an answer
(add_generation_prompt), and ends with the special token that ends its turn. Both renderings must be the
beginning of the whole, or the row is refused: a template that writes earlier turns in another way as soon as
later ones follow cannot be searched like that.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from emo.common.errors import UserError, one_line
from emo.data_prep.templates import Chat
from emo.data_prep.tokenizer import chat_template, special_names
from emo.data_prep.words import encoder, markup_encoder, special_tokens

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# The date of the day would make other data every day: templates have one of their own for want of it.
NO_CLOCK = "{% set strftime_now = todays_date %}"
PROBE = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "World"})


class ChatTemplate(NamedTuple):
    """A chat_template and the tokens that it may write."""

    text: str
    names: tuple[tuple[str, str], ...]  # bos_token, eos_token ... and what they are
    specials: tuple[str, ...]  # tokens that are the template's alone: in what people say they are text

    @property
    def digest(self) -> str:
        """Identity by content, 64 hex digits."""
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()


class Rendered(NamedTuple):
    """A chat as text, up to the end of what the assistant says last.

    Special tokens that people wrote stand between two private signs, see `_marks`.
    """

    text: str
    spans: list[tuple[int, int]]  # what the assistant says, each with the token that ends its turn


class RefusedError(Exception):
    """A chat that a template does not write, or in which the assistant's part cannot be told."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def read_template(directory: Path, name: str) -> ChatTemplate:
    """The chat_template of a saved tokenizer, called `name` by the user. Raises UserError if it has none."""
    text = chat_template(directory)
    if text is None:
        raise UserError(
            f"tokenizer {name} has no chat_template, for which data.template=chat_template asks; name one "
            "that has, put a chat_template.jinja into its directory, or set data.template to chat or alpaca"
        )
    specials = tuple(sorted(special_tokens(directory), key=len, reverse=True))  # the longest that fits counts
    return ChatTemplate(text, tuple(sorted(special_names(directory).items())), specials)


def check_template(template: ChatTemplate) -> list[str]:
    """Notes for the user: about a date, and about a turn that ends with another token than EOS."""
    try:
        rendered = render(Chat(json.dumps(PROBE)), template)
    except RefusedError as error:
        raise UserError(f"the tokenizer's chat_template cannot be used: {error.detail}") from None
    notes = []
    if "strftime_now" in template.text:
        notes.append("note: the chat_template writes today's date; the data get the one that it has without")
    if (end := _last(rendered.text, template)) != (eos := dict(template.names).get("eos_token")):
        notes.append(f"note: the chat_template ends a turn with {end}, not {eos}: generate until {end}")
    return notes


def render(chat: Chat, template: ChatTemplate) -> Rendered:
    """A chat as text, and what of it is supervised. Raises RefusedError."""
    from transformers.utils.chat_template_utils import mark_control_tokens

    pattern = _marks(template.specials)[0]
    messages = mark_control_tokens(json.loads(chat.messages), pattern)
    if "developer" not in template.text:  # older templates know one name for it
        for message in messages:
            message["role"] = "system" if message["role"] == "developer" else message["role"]
    tools = mark_control_tokens(json.loads(chat.tools), pattern) if chat.tools else None
    numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    text, stretches = _write(messages, tools, template, marked=bool(MARKED.search(template.text)))
    for i in [] if MARKED.search(template.text) else numbers:
        before, _ = _write(messages[:i], tools, template, prompt=True)
        after = _write(messages[: i + 1], tools, template)[0].rstrip()
        if not after.startswith(before):
            raise _not_found("it writes an answer in another way than it asks for one")
        if not text.startswith(after):
            raise _not_found("it writes an answer in another way when messages follow")
        stretches.append((len(before), len(after)))
    answers, count = [], len(numbers)
    # An answer ends with a special token, which may come right after its stretch.
    for start, end in stretches:
        answer = text[start:end].rstrip()
        special = _last(answer, template)
        if not answer.removesuffix(special).strip():
            raise _not_found("it leaves an answer out")
        stop = start + len(answer)
        if not special:
            follows = (token for token in template.specials if text.startswith(token, end))
            stop = end + len(next(follows, ""))
            if stop == end:
                raise _not_found("no special token ends an answer in it, so that no end would be learned")
        answers.append((start, stop))
    if len(answers) < count or any(after[0] < before[1] for before, after in pairwise(answers)):
        raise _not_found(f"it marks {len(answers)} of {count} answers")
    if chat.unsupervised and len(answers) != count:
        raise _not_found(f"it marks {len(answers)} stretches of {count} answers, of which some carry no loss")
    return Rendered(text[: answers[-1][1]], answers)


def _last(text: str, template: ChatTemplate) -> str:
    """The special token that ends a text, or ''."""
    return next((special for special in template.specials if text.endswith(special)), "")


def _not_found(why: str) -> RefusedError:
    return RefusedError(
        "response_not_found",
        f"the chat_template does not tell what the assistant says: {why}; mark that in the template with "
        "{% generation %}, or set data.template to chat",
    )


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


def _marks(specials: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns of the special tokens in what people say, and of the same once they are protected."""
    from transformers.utils.chat_template_utils import _get_control_token_patterns

    patterns: tuple[re.Pattern[str], re.Pattern[str]] = _get_control_token_patterns(specials)
    return patterns


class ChatEncoder:
    """Encodes chats with a saved tokenizer: special tokens of the template are such, people's are text.

    Answers are encoded apart from what is before them, so that no token belongs to both, and the first prompt
    has the very ids that `apply_chat_template` gives at generation.
    """

    def __init__(self, directory: Path, template: ChatTemplate) -> None:
        self.template = template
        self.beginning, self.continuing = (
            markup_encoder(directory),
            markup_encoder(directory, continuing=True),
        )
        self.spoken = encoder(directory, continuing=True)

    def encode(self, chat: Chat) -> tuple[list[int], np.ndarray]:
        """Ids of a chat, and int64 [answers, 2], which of them are supervised."""
        text, spans = render(chat, self.template)
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
            done, end = stop, _last(text[:stop], self.template)
        return ids, np.array(supervised, np.int64)

    def _ids(self, text: str, tokenizer: Any) -> list[int]:
        """Ids of a stretch; the special tokens that people wrote in it are encoded as text."""
        ids: list[int] = []
        for i, piece in enumerate(_marks(self.template.specials)[1].split(text)):
            if piece:
                by = self.spoken if i % 2 else tokenizer if i == 0 else self.continuing
                ids += by.encode(piece, add_special_tokens=False).ids
        return ids
