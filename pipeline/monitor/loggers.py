"""Programs that receive metrics besides metrics.jsonl.

To add one, subclass `Logger`, list it in LOGGERS, and add its name to `train.report_to` (config.py).
"""

from __future__ import annotations

import secrets
from typing import Any

from emo.common.errors import UserError, one_line
from emo.common.io.files import write_once

from ..config import RunConfig
from ..control.run_dir import WANDB_ID


class Logger:
    """Receives the metrics of a run on rank 0."""

    def __init__(self, config: RunConfig, first_step: int) -> None:
        """first_step: steps that earlier launches had taken. Records of later steps will come again."""

    def log(self, values: dict[str, Any], step: int) -> None:
        """Log the values of a record by path, such as `train/nll`. A value that is not finite is None."""
        raise NotImplementedError

    def close(self) -> None:
        """Write what is left."""


class TensorBoard(Logger):
    """Writes event files to `tensorboard/` of the run directory."""

    def __init__(self, config: RunConfig, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = first_step + 1 if first_step else 0
        self._writer = SummaryWriter(str(config.output_dir / "tensorboard"), purge_step=purge)

    def log(self, values: dict[str, Any], step: int) -> None:
        for key, value in values.items():
            counts = key.count("/") == 1 and key.endswith(("/step", "/tokens"))
            if value is not None and not counts:
                self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Logger):
    """Logs to the W&B run that belongs to the run directory, also after a restart."""

    def __init__(self, config: RunConfig, first_step: int) -> None:
        import wandb

        run_dir = config.output_dir
        write_once(run_dir / WANDB_ID, secrets.token_hex(8))
        try:
            self._run = wandb.init(
                project=config.train.project,
                name=run_dir.name,
                dir=run_dir,
                id=(run_dir / WANDB_ID).read_text(encoding="utf-8"),
                resume="allow",
                config=config.model_dump(mode="json"),
            )
        except wandb.errors.Error as error:
            problem = f"train.report_to=[wandb]: {one_line(error, 200)}"
            raise UserError(f"{problem}. Set WANDB_API_KEY, or WANDB_MODE=offline", code="tracking") from None

    def log(self, values: dict[str, Any], step: int) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


LOGGERS: dict[str, type[Logger]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
