"""Results in Weights & Biases: points of the training run, over the tokens that it had seen.

    RUN_DIR/config.yaml             names the project
    RUN_DIR/wandb-id                the run there (pipeline/monitor/metrics.py)
    RUN_DIR/wandb-evaluations.json  digests of the points that were sent, with a model of each; and what is
                                    being sent

A run there takes one writer at a time, or loses lines of both: while the run trains, results wait. Its lock
is looked at and not kept, for W&B may take minutes to answer, and training comes first. A history there can
only grow: what was sent is noted, and not sent again.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emo.common.config.recipe import read_written
from emo.common.errors import UserError, one_line
from emo.common.io.files import write_text
from emo.common.io.lease import Lease, hold_if_free
from emo.common.io.untrusted import is_plain_name
from emo.common.text import counted
from emo.pipeline.control.run_dir import CONFIG, LOCK, LOCK_SECONDS, WANDB_ID

from ..results import store
from ..results.directory import Model, Say
from .figures import all_figures

SENT = "wandb-evaluations.json"
SENDING = "wandb-export"  # name of the lease that exports hold among themselves
AXIS = "eval/tokens"
OFFLINE = "offline-run-"  # how W&B begins the names of directories that it has not sent yet


class BusyError(UserError):
    """Somebody else writes into the run in W&B; results can be sent later."""


def send(models: Sequence[Model], run_dir: Path, say: Say) -> dict[str, UserError]:
    """Log the models of a run into its W&B run, each once; those of other runs are left out and named.

    Return which models' results cannot be trusted, and why: they are not sent. BusyError while the run
    trains, UserError when W&B is not installed or cannot be reached, or the run has no counterpart there.
    """
    try:
        train = read_written(run_dir / CONFIG)["train"]
        if "wandb" not in train["report_to"]:
            raise ValueError("it was trained without")
        project, run_id = train["project"], (run_dir / WANDB_ID).read_text(encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--output_path {run_dir} is no directory of a run with train.report_to=[wandb]: "
            f"{one_line(error, 120)}"
        ) from None
    points, faults = {}, {}
    for model in models:
        if Path(str(model.facts.get("run"))).name != run_dir.resolve().name:  # it may have been moved since
            say(f"{model.name}: not of the run {run_dir}, therefore not sent")
            continue
        try:
            points[model.name] = _point(model)
        except UserError as error:
            faults[model.name] = error
    if not points and not faults:
        raise UserError(
            f"none of these results is of the run {run_dir}; --output_path is the run that they are of"
        )
    with hold_if_free(Lease(run_dir, LOCK, LOCK_SECONDS)) as free:
        pass
    with hold_if_free(store.lease(run_dir, SENDING)) as acquired:
        if not (free and acquired):
            raise BusyError(
                f"{run_dir} trains, or another export sends its results: nobody else can write into its W&B "
                "run; export again when that has ended"
            )
        noted = store.read_json(run_dir / SENT) or {"sent": {}}
        # The last checkpoint and the run's export are one point: the same results after the same tokens.
        due = {store.digest(point): name for name, point in points.items()}
        due = {digest: name for digest, name in due.items() if digest not in noted["sent"]}
        begun = str(noted.get("sending", ""))  # W&B would send what a killed export left beside what follows
        if begun.startswith(OFFLINE) and is_plain_name(begun):
            shutil.rmtree(run_dir / "wandb" / begun, ignore_errors=True)
        elif begun:
            say("an export was killed while it was sending: W&B may show some of its points twice")
        if due:
            in_order = sorted((points[name] for name in due.values()), key=lambda point: point[AXIS])
            _log(in_order, run_dir, project, run_id, noted["sent"])
            write_text(run_dir / SENT, store.dump({"sent": noted["sent"] | due}))
    say(f"W&B: {counted(len(due), 'point')} of {counted(len(points), 'model')} sent, the others were there")
    return faults


def _point(model: Model) -> dict[str, Any]:
    """Return the values that are logged of a model."""
    all_of_model = all_figures(model)
    if model.facts.get("tokens") is None:
        raise UserError(f"{model.name} does not say after how many tokens it was saved")
    point: dict[str, Any] = {AXIS: model.facts["tokens"], "eval/step": model.facts.get("step")}
    for figures in all_of_model:
        point[f"eval/{figures.task}/accuracy"] = figures.accuracy.value
        point[f"eval/{figures.task}/accuracy_stderr"] = figures.accuracy.stderr
        point[f"eval/{figures.task}/macro_f1"] = figures.result["macro_f1"]
    point["eval/mean_accuracy"] = sum(figures.accuracy.value for figures in all_of_model) / len(all_of_model)
    return {name: value for name, value in point.items() if value is not None}


def _log(
    points: list[dict[str, Any]], run_dir: Path, project: str, run_id: str, sent: dict[str, str]
) -> None:
    try:
        import wandb
    except ImportError:
        raise UserError("--format wandb needs the package wandb: pip install wandb") from None
    # What the trainer said of its machine and program stays: this one is about results alone.
    options = {"x_disable_meta": True, "x_disable_stats": True, "x_save_requirements": False}
    settings = wandb.Settings(console="off", silent=True, **options)
    try:
        run = wandb.init(project=project, id=run_id, resume="allow", dir=run_dir, settings=settings)
        write_text(run_dir / SENT, store.dump({"sent": sent, "sending": Path(run.dir).parent.name}))
        run.define_metric(AXIS)
        run.define_metric("eval/*", step_metric=AXIS)
        for point in points:
            run.log(point)
        run.finish()
    except wandb.errors.Error as error:
        line = one_line(error, 200)
        raise UserError(f"W&B: {line}; set WANDB_API_KEY, or WANDB_MODE=offline") from None
