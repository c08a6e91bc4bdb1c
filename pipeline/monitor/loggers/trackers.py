"""The loggers for TensorBoard, W&B, MLflow and Trackio."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping

from emo.common.errors import FailureError, UserError, one_line
from emo.common.io.files import write_once
from emo.common.io.untrusted import number

from ...config import RunConfig, flatten
from ...control.run_dir import MLFLOW_ID, TRACKIO_ID, WANDB_ID
from .logger import Logger

# Error codes of MLflow for requests that cannot succeed later.
MISTAKES = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "PERMISSION_DENIED", "UNAUTHENTICATED")


def _explain(tracker: str, error: Exception, cure: str, mistaken: bool) -> UserError:
    """Return the error for a tracker that cannot be opened. If not `mistaken`, it may work later."""
    problem = f"train.report_to=[{tracker}]: {one_line(error, 200)}"
    return (UserError if mistaken else FailureError)(f"{problem}. {cure}", code="tracking")


class TensorBoard(Logger):
    """Writes event files to `tensorboard/` of the run directory."""

    def __init__(self, config: RunConfig, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = first_step + 1 if first_step else 0
        self._writer = SummaryWriter(str(config.output_dir / "tensorboard"), purge_step=purge)

    def log(self, values: Mapping[str, float | None], step: int) -> None:
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
            mistaken = isinstance(error, wandb.errors.UsageError | wandb.errors.AuthenticationError)
            raise _explain("wandb", error, "Set WANDB_API_KEY, or WANDB_MODE=offline", mistaken) from None
        self._last: dict[str, float] = {}  # last logged step of each group, -1 before the first

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        """Log a record with its own step, because W&B also counts the results that `emo export` adds.

        Records that a resumed run repeats are left out.
        """
        group = next(iter(values)).partition("/")[0]
        if group not in self._last:
            self._run.define_metric(f"{group}/*", step_metric=f"{group}/step")
            last = number(self._run.summary.get(f"{group}/step"))
            self._last[group] = -1 if last is None else last
        if step > self._last[group]:
            self._run.log({**values, f"{group}/step": step})
            self._last[group] = step

    def close(self) -> None:
        self._run.finish()


class MLflow(Logger):
    """Logs to the MLflow run that belongs to the run directory, on the server of MLFLOW_TRACKING_URI."""

    def __init__(self, config: RunConfig, first_step: int) -> None:
        # A server that does not answer must not stop the run for longer than its ranks wait for each other.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        import mlflow

        run_dir = config.output_dir
        file = run_dir / MLFLOW_ID
        try:
            mlflow.set_experiment(config.train.project)
            self._known: Mapping[str, float] = {}  # last values of a resumed run
            if file.is_file():
                run = mlflow.start_run(run_id=file.read_text(encoding="utf-8"))
                self._known = run.data.metrics
            else:
                run = mlflow.start_run(run_name=run_dir.name)
                write_once(file, run.info.run_id)
                settings = flatten(config.model_dump(mode="json"), ".")
                mlflow.log_params({key: value for key, value in settings if value not in (None, [], "")})
        except (mlflow.exceptions.MlflowException, OSError) as error:
            mistaken = getattr(error, "error_code", "") in MISTAKES
            cure = "Set MLFLOW_TRACKING_URI to a server or directory"
            raise _explain("mlflow", error, cure, mistaken) from None
        self._mlflow = mlflow

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        """Log a record, unless the resumed run has logged its step before."""
        named = ((re.sub(r"[^\w\-. :/]", "_", key), value) for key, value in values.items())
        numbers = {key: float(value) for key, value in named if value is not None}
        group = next(iter(numbers), "").partition("/")[0]
        if step > self._known.get(f"{group}/step", -1):
            self._mlflow.log_metrics({**numbers, f"{group}/step": step}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class Trackio(Logger):
    """Logs to the Trackio run of the same name, also after a restart."""

    def __init__(self, config: RunConfig, first_step: int) -> None:
        import trackio

        run_dir = config.output_dir
        write_once(run_dir / TRACKIO_ID, f"{run_dir.name}-{secrets.token_hex(4)}")
        try:
            self._run = trackio.init(
                config.train.project,
                name=(run_dir / TRACKIO_ID).read_text(encoding="utf-8"),
                resume="allow",
                config=config.model_dump(mode="json"),
                embed=False,
            )
        except Exception as error:  # a database or a server, which raise many kinds
            raise _explain("trackio", error, "Remove trackio", mistaken=False) from None

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        self._run.log({key: v for key, v in values.items() if v is not None}, step=step)

    def close(self) -> None:
        self._run.finish()
