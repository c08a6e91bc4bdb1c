"""The interface of a program that receives metrics besides metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping

from ...config import RunConfig


class Logger:
    """Receives the metrics of a run on rank 0."""

    def __init__(self, config: RunConfig, first_step: int) -> None:
        """first_step: steps that earlier launches had taken. Records of later steps will come again."""

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        """Log the values of a record by path, such as `train/nll`. A value that is not finite is None."""
        raise NotImplementedError

    def close(self) -> None:
        """Write what is left."""
