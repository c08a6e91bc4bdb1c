"""How tokens are chosen, as a user says it. Light: mistakes in it are told before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from emo.common.errors import UserError


@dataclass(frozen=True)
class Decoding:
    """The way in which tokens are chosen. The default is the model's own distribution, unchanged."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    greedy: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise UserError(f"--temperature {self.temperature} must be above 0")
        if self.top_k < 0:
            raise UserError(f"--top_k {self.top_k} must not be negative (0: all tokens)")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top_p {self.top_p} must be above 0 and at most 1")
        if self.greedy and (self.temperature, self.top_k, self.top_p) != (1.0, 0, 1.0):
            raise UserError(
                "--greedy takes the likeliest token; leave out --temperature, --top_k and --top_p"
            )

    @property
    def unbiased(self) -> bool:
        """Return whether samples follow the model's own distribution."""
        return self == Decoding()

    @property
    def name(self) -> str:
        """unbiased, greedy, or what differs: t0.8-k50-p0.95."""
        if self.greedy or self.unbiased:
            return "greedy" if self.greedy else "unbiased"
        parts = [f"t{self.temperature:g}"] if self.temperature != 1 else []
        parts += [f"k{self.top_k}"] if self.top_k else []
        return "-".join(parts + ([f"p{self.top_p:g}"] if self.top_p < 1 else []))
