"""How fast a run goes and how long it will take, from the seconds of its steps and pauses. Arithmetic."""

from __future__ import annotations

from collections import deque

RECENT = 20  # steps that tell how fast it goes now


class Pace:
    """Counts this launch's steps. The first, which compiles and warms up, counts until there are others."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=RECENT)
        self._training = self._pausing = 0.0  # seconds, since the first step
        self._counted = 0

    def step(self, seconds: float, tokens: int) -> None:
        """Count a step of so many supervised tokens, which took `seconds` of training."""
        if self._counted == 1:
            self._steps.clear()
            self._training = 0.0
        self._counted += 1
        self._steps.append((seconds, tokens))
        self._training += seconds

    def pause(self, seconds: float) -> None:
        """Saving, validation or sampling took `seconds`. What came before the first step does not count."""
        if self._counted:
            self._pausing += seconds

    @property
    def tokens_per_s(self) -> float | None:
        """Return supervised tokens per second of training over the last steps; None before the first."""
        seconds = sum(s for s, _ in self._steps)
        return sum(n for _, n in self._steps) / seconds if seconds > 0 else None

    def left(self, steps: int) -> float | None:
        """Return seconds that so many steps will take, pauses included as often as they came so far."""
        if not self._steps or self._training <= 0:
            return None
        each = sum(s for s, _ in self._steps) / len(self._steps)
        return steps * each * (1 + self._pausing / self._training)


def duration(seconds: float) -> str:
    """Return a time as `45 s`, `12 min`, `3 h 05 min` or `2 d 3 h`."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def upcoming(step: int, steps: int, every: dict[str, int]) -> str:
    """Return what comes next, as in `validation at 200`; every: steps between them by name, 0 for none.

    Empty when nothing comes before the last step.
    """
    due = {name: (step // n + 1) * n for name, n in every.items() if n > 0}
    first = min(due.values(), default=steps)
    if first >= steps:
        return ""
    return f"{' and '.join(name for name, next_step in due.items() if next_step == first)} at {first:,}"
