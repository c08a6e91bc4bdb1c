"""How a question is put to a model: with the template that it was tuned with, as its export says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.errors import UserError, one_line
from data_prep.templates import VERSIONS, Conversation, Exchange, render
from data_prep.tokenizer import chat_template as tokenizer_template
from eval.judging.questions import Question
from eval.model import EvaluatedModel

AUTO, OWN = "auto", "chat_template"  # OWN: the template that comes with the tokenizer
CHOICES = (AUTO, *VERSIONS)

Say = Callable[[str], None]


def choose(model: EvaluatedModel, template: str, say: Say) -> str:
    """The template to use, one of CHOICES but `auto`. A mismatch with its tuning is said."""
    if template not in CHOICES:
        raise UserError(f"--template {template!r} is not known; known: {', '.join(CHOICES)}")
    tuned, of_model = model.facts.get("template"), chat_template(model)
    if template == OWN and of_model is None:
        raise UserError(f"--template {OWN}: {model.given} comes without a chat template")
    if template == AUTO:
        return _found(model, tuned, of_model, say)
    if tuned and VERSIONS.get(template) != tuned:
        say(f"{model.name}: was tuned with the template {tuned}, but --template {template} was given")
    elif not tuned and of_model is not None and template != OWN:
        say(f"{model.name}: comes with a chat template, but --template {template} was given")
    return template


def _found(model: EvaluatedModel, tuned: Any, of_model: str | None, say: Say) -> str:
    if tuned:
        name = str(tuned).partition("/")[0]
        if name not in VERSIONS:
            raise UserError(f"{model.given}: export.json names a template {tuned!r}; set --template")
        if VERSIONS[name] != tuned:
            say(f"{model.name}: was tuned with the template {tuned}, which is {VERSIONS[name]} now")
        return name
    if of_model is not None:
        return OWN
    say(f"{model.name}: nothing says which template it was tuned with; Alpaca's is used (--template)")
    return "alpaca"


def chat_template(model: EvaluatedModel) -> str | None:
    """The chat template beside a model's tokenizer, if there is one."""
    return tokenizer_template(model.path)


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
    ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    return ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids]


def chat_ids(model: EvaluatedModel, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of messages in the tokenizer's own chat template, up to where the reply begins."""
    try:
        ids = model.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # whatever the template's author wrote
        raise UserError(f"{model.given}: its chat template refuses a prompt ({one_line(error)})") from None
    return list(ids)
