"""How a model is asked for text: how tokens are chosen, and prefixes and texts as token ids.

Light: mistakes in the options are refused before any library of models is loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from emo.common.errors import UserError
from emo.data_prep.encoding.tokenizer import text_ids

from ..model import EvaluatedModel

NOT_IN_NAMES = re.compile(r"[^\w.+-]+")  # of directories


@dataclass(frozen=True)
class Decoding:
    """The way in which tokens are chosen. The default is the model's own distribution, unchanged."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    greedy: bool = False
    objective: str = ""  # whose fixed point tokens are drawn from (`settled`); empty: the model itself
    cost: str = ""  # of that objective: a model, a file or "constant"; empty: the model's own head

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (0 < self.temperature < math.inf, "above 0"),
            "top_k": (self.top_k >= 0, "0 (all tokens) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
        }
        for name, (valid, text) in ranges.items():
            if not valid:
                raise UserError(f"--{name} {getattr(self, name)} must be {text}")
        if self.greedy and (self.temperature, self.top_k, self.top_p) != (1.0, 0, 1.0):
            raise UserError(
                "--greedy takes the likeliest token; leave out --temperature, --top_k and --top_p"
            )
        if self.cost and not self.objective:
            raise UserError("--cost goes with --decode OBJECTIVE", code="cost-alone")

    @property
    def deterministic(self) -> bool:
        """Return whether there is one text after each prefix."""
        return self.greedy

    @property
    def name(self) -> str:
        """Return unbiased, greedy, or what differs from the model's distribution: emo-t0.8-k50-p0.95."""
        parts = [f"t{self.temperature:g}"] if self.temperature != 1 else []
        parts += [f"k{self.top_k}"] if self.top_k else []
        parts += [f"p{self.top_p:g}"] if self.top_p < 1 else []
        parts += ["greedy"] if self.greedy else []
        words = [self.objective, *Path(self.cost).parts[-2:]]  # exports have their run's name
        return "-".join([NOT_IN_NAMES.sub("_", word) for word in words if word] + parts) or "unbiased"


@dataclass(frozen=True)
class Beams:
    """Beam search: the likeliest of `beams` texts, repeated tokens made less likely by `penalty`."""

    beams: int
    penalty: float = 1.0
    deterministic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.beams < 2:
            raise UserError(f"--beams {self.beams} must be at least 2; --greedy follows a single text")

    @property
    def name(self) -> str:
        """Return beam4, or with a penalty beam4-r1.2."""
        return f"beam{self.beams}" + (f"-r{self.penalty:g}" if self.penalty != 1 else "")


class Request(NamedTuple):
    """prompt: token ids, at least one; seed: any JSON value, one per text; limit: of its tokens."""

    prompt: Sequence[int]
    seed: Any
    limit: int | None = None


def prompt_ids(model: EvaluatedModel, prefix: str) -> list[int]:
    """Return the token ids of a prefix, which begin as training rows do; of an empty one BOS, else EOS."""
    if not (ids := text_ids(model.tokenizer, prefix) or first_ids(model.tokenizer)):
        raise UserError(
            f"{model.given}: its tokenizer has no BOS or EOS to begin with; give --prefix TEXT",
            code="no-beginning",
        )
    return ids


def split_ids(tokenizer: Any, prefix: str, text: str) -> tuple[list[int], list[int]]:
    """Return the ids of prefix + text as (those of the prefix as a prompt, at least one; the rest)."""
    whole, start = text_ids(tokenizer, prefix + text), text_ids(tokenizer, prefix)
    if not start:
        whole = [*first_ids(tokenizer), *whole]
    common = next((i for i, (a, b) in enumerate(zip(whole, start, strict=False)) if a != b), len(start))
    common = max(1, min(common, len(whole)))
    return whole[:common], whole[common:]


def text_after(tokenizer: Any, start: list[int], ids: list[int]) -> str:
    """Return the text of `ids` where it follows the ids of a prompt, special tokens left out."""
    before = tokenizer.decode(start, skip_special_tokens=True)
    return tokenizer.decode([*start, *ids], skip_special_tokens=True)[len(before) :]


def until_end(ids: list[int], ends: Sequence[int]) -> tuple[list[int], bool]:
    """Return new ids up to their first end token, which is kept, and whether there is one."""
    end = next((i for i, token in enumerate(ids) if token in ends), None)
    return (ids, False) if end is None else (ids[: end + 1], True)


def first_ids(tokenizer: Any) -> list[int]:
    """Return BOS, else EOS, else nothing: the prompt for an empty text if the tokenizer adds no BOS."""
    return [i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None][:1]
