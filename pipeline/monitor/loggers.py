"""Programs that receive metrics besides metrics.jsonl.

To add one, subclass `Logger`, list it in LOGGERS, and add its name to `train.report_to` (config.py).
"""

from __future__ import annotations

import re
import secrets
from typing import Any

from emo.common.errors import UserError, one_line
from emo.common.io.files import write_once

from ..config import RunConfig
from ..control.run_dir import MLFLOW_ID, TRACKIO_ID, WANDB_ID


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


class MLflow(Logger):
    """Logs to the MLflow run that belongs to the run directory, on the server of MLFLOW_TRACKING_URI."""

    def __init__(self, config: RunConfig, first_step: int) -> None:
        import mlflow

        run_dir = config.output_dir
        file = run_dir / MLFLOW_ID
        try:
            mlflow.set_experiment(config.train.project)
            if file.is_file():
                mlflow.start_run(run_id=file.read_text(encoding="utf-8"))
            else:
                run = mlflow.start_run(run_name=run_dir.name)
                write_once(file, run.info.run_id)
                mlflow.log_params(_flatten(config.model_dump(mode="json")))
        except mlflow.exceptions.MlflowException as error:
            problem = f"train.report_to=[mlflow]: {one_line(error, 200)}"
            raise UserError(
                f"{problem}. Set MLFLOW_TRACKING_URI to a server or directory", code="tracking"
            ) from None
        self._mlflow = mlflow

    def log(self, values: dict[str, Any], step: int) -> None:
        named = ((re.sub(r"[^\w\-. :/]", "_", key), value) for key, value in values.items())
        numbers = {key: float(value) for key, value in named if isinstance(value, int | float)}
        self._mlflow.log_metrics(numbers, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class Trackio(Logger):
    """Logs to the Trackio run of the same name, also after a restart."""

    def __init__(self, config: RunConfig, first_step: int) -> None:
        import trackio

        run_dir = config.output_dir
        write_once(run_dir / TRACKIO_ID, f"{run_dir.name}-{secrets.token_hex(4)}")
        self._run = trackio.init(
            config.train.project,
            name=(run_dir / TRACKIO_ID).read_text(encoding="utf-8"),
            resume="allow",
            config=config.model_dump(mode="json"),
            embed=False,
        )

    def log(self, values: dict[str, Any], step: int) -> None:
        self._run.log({key: v for key, v in values.items() if v is not None}, step=step)

    def close(self) -> None:
        self._run.finish()


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a recipe by dotted key, without keys that are not set."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        elif value not in (None, [], ""):
            flat[f"{prefix}{key}"] = value
    return flat


LOGGERS: dict[str, type[Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}
