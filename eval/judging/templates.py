"""How a question is put to a model: with the template that it was tuned with, as its export says."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from common.errors import UserError
from data_prep.templates import VERSIONS, Conversation, Exchange, render
from eval.judging.questions import Question
from eval.model import EvaluatedModel

AUTO, OWN = "auto", "chat_template"  # OWN: the chat template that comes with the tokenizer
CHOICES = (AUTO, *VERSIONS)

Say = Callable[[str], None]


def choose(model: EvaluatedModel, asked: str, say: Say) -> str:
    """The template to use, one of CHOICES but `auto`. A mismatch with its tuning is said."""
    if asked not in CHOICES:
        raise UserError(f"--template {asked!r} is not known; known: {', '.join(CHOICES)}")
    tuned, own = model.facts.get("template"), chat_template(model)
    if asked == OWN and own is None:
        raise UserError(f"--template {OWN}: {model.given} comes without a chat template")
    if asked == AUTO:
        return _found(model, tuned, own, say)
    if tuned and VERSIONS.get(asked) != tuned:
        say(f"{model.name}: was tuned with the template {tuned}, but --template {asked} was given")
    elif not tuned and own is not None and asked != OWN:
        say(f"{model.name}: comes with a chat template, but --template {asked} was given")
    return asked


def _found(model: EvaluatedModel, tuned: Any, own: str | None, say: Say) -> str:
    if tuned:
        name = str(tuned).partition("/")[0]
        if name not in VERSIONS:
            raise UserError(f"{model.given}: export.json names a template {tuned!r}; set --template")
        if VERSIONS[name] != tuned:
            say(f"{model.name}: was tuned with the template {tuned}, which is {VERSIONS[name]} now")
        return name
    if own is not None:
        return OWN
    say(f"{model.name}: nothing says which template it was tuned with; Alpaca's is used (--template)")
    return "alpaca"


def chat_template(model: EvaluatedModel) -> str | None:
    """The chat template beside a model's tokenizer, if there is one."""
    file = model.path / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    try:
        found = json.loads((model.path / "tokenizer_config.json").read_text()).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    if isinstance(found, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) and found else None


def ids(model: EvaluatedModel, question: Question, template: str) -> list[int]:
    """Token ids of a question, up to where the answer begins: those that training showed the model."""
    if template == OWN:
        return chat_ids(model, [{"role": "user", "content": question.text}])
    (turn,) = render(
        Conversation((Exchange(question.instruction, "", question.input),)), template
    )  # BOS and the prompt on its own, as data_prep.encode writes them
    return plain_ids(model, turn.text)


def plain_ids(model: EvaluatedModel, text: str) -> list[int]:
    """Token ids of a prompt, after BOS where the tokenizer has one."""
    tokenizer = model.tokenizer
    found = list(tokenizer(text, add_special_tokens=False).input_ids)
    return found if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *found]


def chat_ids(model: EvaluatedModel, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of messages in the tokenizer's own chat template, up to where the reply begins."""
    try:
        text = model.tokenizer.apply_chat_template(
            messages, chat_template=chat_template(model), add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # whatever the template's author wrote
        raise UserError(f"{model.given}: its chat template refuses a prompt ({error})") from None
    return list(model.tokenizer(text, add_special_tokens=False).input_ids)
