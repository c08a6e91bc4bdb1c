"""The tokenizer of prepared data: saved or trained, with the chat template of data.template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..config import TRAIN, DataConfig, context_of
from ..encoding.tokenizer import (
    TRAINING_CHARS,
    TokenizerFacts,
    chat_template,
    save_tokenizer,
    set_chat_template,
    tokenizer_facts,
    train_sentencepiece,
)
from ..selection.plan import Plan
from ..sources.reader import SourceReader
from ..sources.rows import plain_text, take
from .served_template import served_template


def save(config: DataConfig, directory: Path, say: Callable[[str], None]) -> None:
    """Save the recipe's tokenizer, and warn about rows that are too long for its model."""
    assert config.tokenizer is not None
    local = config.root / config.tokenizer
    if (context := context_of(local)) is not None and config.sequence_len > context:
        say(
            f"note: blocks of {config.sequence_len} tokens are longer than the context of {context} "
            f"of the model in {local}, which cannot be trained on them"
        )
    source = local if local.exists() else config.tokenizer
    save_tokenizer(source, config.tokenizer_revision, directory)


def set_served_template(config: DataConfig, name: str, directory: Path, say: Callable[[str], None]) -> None:
    """Give the saved tokenizer a chat template that equals data.template=alpaca or chat.

    name: the tokenizer in the recipe, for notes.
    """
    template = config.template
    if config.kind != "instruct" or config.by_chat_template:
        return
    existing = chat_template(directory)
    served = served_template(template, directory)
    if existing not in (None, served):
        say(
            f"note: tokenizer {name} has a chat template, but data.template={template} writes the "
            "prompts. To use the template of the tokenizer set data.template=chat_template"
        )
    if served is None:
        say(
            f"note: no chat template gives the tokens of data.template={template} with tokenizer {name}, "
            "so exports have no chat template"
        )
    if existing != served:
        set_chat_template(directory, served)


def train_or_read(
    config: DataConfig, plan: Plan, inputs: list[SourceReader], directory: Path, say: Callable[[str], None]
) -> TokenizerFacts:
    """Return the facts of the tokenizer. It may be trained on the planned rows."""
    if config.train_tokenizer is None:
        return tokenizer_facts(directory)
    say(f"training a tokenizer of {config.train_tokenizer} pieces")
    # An even sample of the rows if there is much text. Other rows are not parsed.
    step = 1 + plan.summary["chars"][TRAIN] // TRAINING_CHARS
    parts = plan.training_sample(inputs, config.shards, step)
    rows = (row for part in parts for row in take(part.payload, part.spec, part.copies.tolist()))
    model = directory / "tokenizer.model"
    train_sentencepiece(map(plain_text, rows), config.train_tokenizer, model)
    facts = save_tokenizer(model, None, directory)
    set_served_template(config, "that was trained", directory, say)
    return facts
