"""Chats -> token ids, by a saved tokenizer and its chat_template."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from emo.common.errors import UserError

from .chat_templates import ChatTemplate, Message, RefusedError, fixed_date
from .chat_writer import ChatWriter
from .message_forms import PROBE
from .templates import Chat
from .weights import weighted_answer

NEAR = 64  # characters on either side of the border between prompt and answer that decide its tokens


def check_template(template: ChatTemplate) -> list[str]:
    """Return notes for the user about a fixed date, and about an answer that does not end with EOS.

    Raises UserError for a template that cannot be learned from.
    """
    try:
        ((text, _),) = ChatWriter(template).examples(Chat(json.dumps(PROBE)))
    except RefusedError as error:
        raise UserError(
            f"the tokenizer's chat_template cannot be used: {error.detail}", code="template-unusable"
        ) from None
    notes = []
    if "strftime_now" in template.text:
        day = fixed_date(json.loads(template.variables))
        notes.append(
            f"note: the chat_template writes the current date. The data get {day}. To change it set "
            "data.template_variables={date: YYYY-MM-DD}"
        )
    if (end := template.last(text)) != (eos := dict(template.names).get("eos_token")):
        notes.append(f"note: the chat_template ends an answer with {end}, not with EOS ({eos})")
    return notes


class _Stretch(NamedTuple):
    """A stretch of text as tokens."""

    ids: list[int]
    offsets: list[tuple[int, int]]  # where each token begins and ends, in characters, if requested


class EncodedExample(NamedTuple):
    """An example as tokens."""

    ids: list[int]
    spans: list[tuple[int, int, float]]  # start, stop and weight of supervised tokens
    ends: list[int]  # tokens that end its answers


class ChatEncoder:
    """Encodes chats with a saved tokenizer.

    Special tokens that the template writes become special tokens. The same names in messages are text.
    Answers are encoded separately from the text before them. No token belongs to both, and a prompt has the
    ids that `apply_chat_template` gives at generation.
    """

    def __init__(self, directory: Path, template: ChatTemplate) -> None:
        from .words import encoder

        self.writer = ChatWriter(template)
        self._beginning = encoder(directory, markup=True)
        self._continuing = encoder(directory, continuing=True, markup=True)
        self._plain = encoder(directory, continuing=True)
        tokens = "|".join(map(re.escape, template.specials))  # the longest first
        self._specials = re.compile(tokens) if tokens else None

    def encode(self, chat: Chat) -> list[EncodedExample]:
        """Return the examples of a chat."""
        encoded: list[EncodedExample] = []
        for example in self.writer.examples(chat):
            ids: list[int] = []
            spans: list[tuple[int, int, float]] = []
            ends: list[int] = []
            done = 0  # end of the encoded text
            end = ""  # special token before it
            for number, answer in enumerate(example.answers, 1):
                # Some tokenizers add a space after a special token, so it is encoded with the context.
                context = self._encode_stretch(end + example.text[done : answer.start], self._beginning).ids
                prompt = ids + context[bool(end) :]
                text = example.text[answer.start : answer.stop]
                with_offsets = answer.masked > 0 or answer.weights is not None
                stretch = self._encode_stretch(text, self._continuing, with_offsets)
                masked = sum(stop <= answer.masked for _, stop in stretch.offsets)
                starts = [start for start, _ in stretch.offsets[masked:]]
                begin, stop = len(prompt) + masked, len(prompt) + len(stretch.ids)
                spans += weighted_answer(begin, stop, starts, answer.weights)
                if self.writer.template.last(text):  # a template may mark less than the end as supervised
                    ends += stretch.ids[-1:]
                if number < len(example.answers) and self._merges(example.text[: answer.start], text):
                    # Later prompts have other ids for this answer, so they become another example.
                    encoded.append(EncodedExample(prompt + stretch.ids, spans, ends))
                    spans, ends = [], []
                    continue
                ids = prompt + stretch.ids
                done = answer.stop
                end = self.writer.template.last(example.text[: answer.stop])
            encoded.append(EncodedExample(ids, spans, ends))
        return encoded

    def prompt(self, messages: list[Message]) -> list[int]:
        """Return the ids of messages up to the beginning of an answer, as in training."""
        return self._encode_stretch(self.writer.prompt(messages), self._beginning).ids

    def _merges(self, prompt: str, answer: str) -> bool:
        """Return whether the ids of a prompt change if the answer follows in the same text."""
        tail = prompt[-NEAR:]
        if self._specials:
            tail = tail[max((match.start() for match in self._specials.finditer(tail)), default=0) :]
        alone = self._encode_stretch(tail, self._beginning).ids
        both = self._encode_stretch(tail + answer[:NEAR], self._beginning).ids
        return both[: len(alone)] != alone

    def _encode_stretch(self, text: str, tokenizer: Any, with_offsets: bool = False) -> _Stretch:
        """Return the tokens of a text. Special tokens in the messages are encoded as text.

        `tokenizer` encodes the first piece. `with_offsets`: return the offsets of the tokens.
        """
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        position = 0
        for i, piece in enumerate(self.writer.renderer.patterns[False][1].split(text)):
            position += i % 2  # a mark
            if not piece:  # None for a lone mark
                continue
            first = self._plain if i % 2 else tokenizer if i == 0 else self._continuing
            # After a special token of the template the tokenizer begins a text again.
            special = self._specials.search(piece) if first is self._continuing and self._specials else None
            cut = special.start() if special else len(piece)
            for start, part, encodes in ((0, piece[:cut], first), (cut, piece[cut:], self._beginning)):
                if part:
                    encoding = encodes.encode(part, add_special_tokens=False)
                    ids += encoding.ids
                    if with_offsets:
                        base = position + start
                        offsets += [(base + begin, base + stop) for begin, stop in encoding.offsets]
            position += len(piece) + i % 2
        return _Stretch(ids, offsets)
