"""The temperature that suits a text best."""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy import optimize

WIDEST = 3.0  # of the logarithm of a temperature, up and down


def best_temperature(nats: Callable[[float], float]) -> float:
    """Return the temperature with the fewest `nats` per token, between exp(-WIDEST) and exp(WIDEST)."""
    result = optimize.minimize_scalar(
        lambda log_t: nats(math.exp(log_t)),
        bounds=(-WIDEST, WIDEST),
        method="bounded",
        options={"xatol": 1e-9},
    )
    return math.exp(result.x)
