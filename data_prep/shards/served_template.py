"""The chat template of data that a plain template writes, so that servers prompt the model as in training."""

from __future__ import annotations

from pathlib import Path

from ..encoding.chat_templates import RefusedError, with_tokens
from ..encoding.chats import ChatEncoder
from ..encoding.templates import Conversation, Exchange, as_jinja
from ..encoding.tokenizer import read_tokenizer
from .encode import EncodeSettings, RowEncoder

EXCHANGES = (Exchange("Who sat\non it?", "A cat."), Exchange("Where?", "On a mat."), Exchange("Why?", "So."))
SYSTEM = "Be brief."


def served_template(template: str, directory: Path) -> str | None:
    """Return a chat template that gives the ids of data.template=alpaca or chat.

    Returns None if the saved tokenizer in `directory` has no such template.
    """
    backend, facts = read_tokenizer(directory)
    if facts.eos_id is None:
        return None
    start = "".join(str(backend.id_to_token(number)) for number in facts.start)
    rows = RowEncoder(EncodeSettings(directory, facts, template, 1 << 20, "drop", None, by_words=False))
    # Some tokenizers begin only a text with a space, and prepared data have one after a special token, too.
    for text in (as_jinja(template, start, gap) for gap in ("", " ")):
        if _agrees(ChatEncoder(directory, with_tokens(text, directory)), rows):
            return text
    return None


def _agrees(encoder: ChatEncoder, rows: RowEncoder) -> bool:
    """Return whether prompts of one and of several turns have the ids that they have in prepared rows."""
    for turns in (1, len(EXCHANGES)):
        for system in ("", SYSTEM):
            messages = [{"role": "system", "content": system}] if system else []
            for prompt, response, _ in EXCHANGES[:turns]:
                messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            encoded = rows.conversations([Conversation(EXCHANGES[:turns], system)])
            prompt_ids = encoded.ids[: int(encoded.spans[0]["start"][-1])].tolist()
            try:
                if encoder.prompt(messages[:-1]) != prompt_ids:
                    return False
            except RefusedError:
                return False
    return True
