"""Requests for text: how tokens are chosen, and prefixes and texts as token ids.

This module loads no library of models, so wrong options are reported immediately.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from emo.common.errors import UserError
from emo.data_prep.encoding.chat_templates import CLOSING, OPENING
from emo.data_prep.encoding.tokenizer import text_ids

from ..models.model import EvaluatedModel

THINK, END_THINK = "<think>", "</think>"  # around the reasoning of most models
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"  # of GPT-OSS
NOT_IN_NAMES = re.compile(r"[^\w.+-]+")  # characters that names of directories do not contain


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen. The default is the model's own distribution."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    greedy: bool = False
    objective: str = ""  # tokens come from its fixed point (`fixed_point`). Empty: from the model.
    cost: str = ""  # of that objective: a model, a file or "constant". Empty: the model's own head.

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (0 < self.temperature < math.inf, "above 0"),
            "top_k": (self.top_k >= 0, "0 (all tokens) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
        }
        for name, (valid, text) in ranges.items():
            if not valid:
                raise UserError(f"--{name} {getattr(self, name)} must be {text}", code="option-value")
        if self.greedy and (self.temperature, self.top_k, self.top_p) != (1.0, 0, 1.0):
            raise UserError(
                "--greedy cannot be combined with --temperature, --top_k or --top_p", code="options-clash"
            )
        if self.cost and not self.objective:
            raise UserError("--cost needs --decode OBJECTIVE", code="cost-alone")

    @property
    def deterministic(self) -> bool:
        """Whether each prefix has only one continuation."""
        return self.greedy

    @property
    def name(self) -> str:
        """`unbiased`, `greedy`, or the differences from the model's distribution: emo-t0.8-k50-p0.95."""
        parts = [f"t{self.temperature:g}"] if self.temperature != 1 else []
        parts += [f"k{self.top_k}"] if self.top_k else []
        parts += [f"p{self.top_p:g}"] if self.top_p < 1 else []
        parts += ["greedy"] if self.greedy else []
        sources = [self.objective, *Path(self.cost).parts[-2:]]  # the run's name precedes `export`
        return "-".join([NOT_IN_NAMES.sub("_", source) for source in sources if source] + parts) or "unbiased"


@dataclass(frozen=True)
class Beams:
    """Beam search with a repetition penalty."""

    beams: int
    penalty: float = 1.0
    deterministic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.beams < 2:
            raise UserError(
                f"--beams {self.beams} must be at least 2. Use --greedy for one beam.", code="option-value"
            )

    @property
    def name(self) -> str:
        """`beam4`, or `beam4-r1.2` with a penalty."""
        return f"beam{self.beams}" + (f"-r{self.penalty:g}" if self.penalty != 1 else "")


class Request(NamedTuple):
    """A request for one text. prompt: token ids, at least one. seed: any JSON value. limit: of new tokens."""

    prompt: Sequence[int]
    seed: Any
    limit: int | None = None


def prompt_ids(model: EvaluatedModel, prefix: str) -> list[int]:
    """Return the token ids of a prefix, as a training row begins. An empty prefix is BOS, or else EOS."""
    if not (ids := text_ids(model.tokenizer, prefix) or first_ids(model.tokenizer)):
        raise UserError(
            f"{model.source}: its tokenizer has no BOS or EOS token to begin with. Set --prefix TEXT.",
            code="no-beginning",
        )
    return ids


def split_ids(tokenizer: Any, prefix: str, text: str) -> tuple[list[int], list[int]]:
    """Return the ids of prefix + text as a prompt of at least one id, and the rest."""
    ids = text_ids(tokenizer, prefix + text)
    start = text_ids(tokenizer, prefix)
    if not start:
        ids = [*first_ids(tokenizer), *ids]
    common = next((i for i, (a, b) in enumerate(zip(ids, start, strict=False)) if a != b), len(start))
    common = max(1, min(common, len(ids)))
    return ids[:common], ids[common:]


def text_after(tokenizer: Any, start: list[int], ids: list[int]) -> str:
    """Return the text of `ids` after a prompt, without special tokens.

    Reasoning is between `<think>` and `</think>`, whatever tokens the model has for this. In the channels of
    GPT-OSS, all but the final one is reasoning.
    """
    added = tokenizer.get_added_vocab()
    if added.get(CHANNEL, -1) in ids and MESSAGE in added:
        return _text_of_channels(tokenizer, ids, added[CHANNEL], added[MESSAGE])

    def decode(count: int) -> str:
        return tokenizer.decode([*start, *ids[:count]], skip_special_tokens=True)

    before = decode(0)
    text = decode(len(ids))
    markers = thinking_tokens(tokenizer)
    for number in reversed([number for number, token in enumerate(ids) if token in markers]):
        name, tag = markers[ids[number]]
        place = len(decode(number))
        rest = text[place:].removeprefix(name)
        text = text[:place] + tag + (rest.removeprefix("thought\n") if name == "<|channel>" else rest)
    return text[len(before) :]


def thinking_tokens(tokenizer: Any) -> dict[int, tuple[str, str]]:
    """Return the tokens of a tokenizer that begin or end reasoning: their text, and THINK or END_THINK."""
    added = tokenizer.get_added_vocab()
    tags = dict.fromkeys(OPENING, THINK) | dict.fromkeys(CLOSING, END_THINK)
    return {added[name]: (name, tag) for name, tag in tags.items() if name in added}


def hides_thinking(tokenizer: Any) -> bool:
    """Return whether decoding does not show the reasoning of a model as THINK and END_THINK."""
    special = {*tokenizer.all_special_ids}
    return any(token in special or name != tag for token, (name, tag) in thinking_tokens(tokenizer).items())


def begins_in_thinking(tokenizer: Any, prompt: Sequence[int]) -> bool:
    """Return whether a prompt ends inside of reasoning, as some chat templates open it."""
    markers = thinking_tokens(tokenizer)
    place = next((i for i in reversed(range(len(prompt))) if prompt[i] in markers), None)
    if place is None or markers[prompt[place]][1] != THINK:
        return False
    return not tokenizer.decode(list(prompt[place + 1 :])).strip()  # a question may mention the tag


def _text_of_channels(tokenizer: Any, ids: list[int], channel: int, message: int) -> str:
    """Return the text of a reply whose parts are <|channel|>NAME<|message|>TEXT<|end|>."""
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    starts = [i for i, token in enumerate(ids) if token == channel]
    thoughts = []
    final = None
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        part = ids[start + 1 : end]
        if message not in part:  # its header is incomplete
            continue
        header = part.index(message)
        content = list(takewhile(lambda token: token not in special, part[header + 1 :]))
        text = tokenizer.decode(content)
        if tokenizer.decode(part[:header]).strip().startswith("final"):
            final = text
        else:
            thoughts.append(text)
    reasoning = THINK + "\n".join(thoughts) if thoughts else ""
    return reasoning + (END_THINK if thoughts and final is not None else "") + (final or "")


def split_reasoning(text: str) -> tuple[str, str]:
    """Return the reasoning in a reply, or "", and the answer after it. Unfinished reasoning has no answer."""
    reasoning, end, answer = text.rpartition(END_THINK)
    if not end and text.lstrip().startswith(THINK):
        reasoning, answer = text, ""
    return reasoning.strip().removeprefix(THINK).strip(), answer.lstrip() if end else answer


def until_end(ids: list[int], ends: Sequence[int]) -> tuple[list[int], bool]:
    """Return new ids up to and including the first end token, and whether there is one."""
    end = next((i for i, token in enumerate(ids) if token in ends), None)
    return (ids, False) if end is None else (ids[: end + 1], True)


def first_ids(tokenizer: Any) -> list[int]:
    """Return BOS, or else EOS, or else nothing: the prompt of an empty text."""
    return [i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None][:1]
