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
from emo.common.untrusted import read_json
from emo.eval.model import CONTEXT, EvaluatedModel

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


def context_of(model: EvaluatedModel) -> int | None:
    """Return the longest sequence of a model in tokens, if its configuration says so."""
    config = read_json(model.path / "config.json")
    config = config.get("text_config", config)
    return next((int(config[name]) for name in CONTEXT if config.get(name)), None)


def prompt_ids(model: EvaluatedModel, prefix: str) -> list[int]:
    """Return the token ids of a prefix, without an end token; an empty one begins with BOS (or EOS)."""
    ids = _without_end(model.tokenizer, prefix) or [first_id(model.tokenizer)]
    if ids[0] is None:
        raise UserError(f"{model.given}: its tokenizer has no BOS or EOS to begin with; give --prefix TEXT")
    return ids


def split_ids(tokenizer: Any, prefix: str, text: str) -> tuple[list[int], list[int]]:
    """Return the ids of prefix + text as (prefix, at least one: BOS or the first token; the rest)."""
    whole, start, first = list(tokenizer(prefix + text).input_ids), _without_end(tokenizer, prefix), None
    if not start and (first := first_id(tokenizer)) is not None and whole[:1] != [first]:
        whole = [first, *whole]
    common = next((i for i, (a, b) in enumerate(zip(whole, start, strict=False)) if a != b), len(start))
    common = max(1, min(common, len(whole)))
    return whole[:common], whole[common:]


def text_after(tokenizer: Any, start: list[int], ids: list[int]) -> str:
    """Return the text of `ids` where it follows the ids of a prompt, special tokens left out."""
    before = tokenizer.decode(start, skip_special_tokens=True)
    return tokenizer.decode([*start, *ids], skip_special_tokens=True)[len(before) :]


def first_id(tokenizer: Any) -> Any:
    """Return BOS, or EOS where it stands for it, or None."""
    return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id


def _without_end(tokenizer: Any, text: str) -> list[int]:
    ids = list(tokenizer(text).input_ids) if text else []
    while ids and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    return ids
