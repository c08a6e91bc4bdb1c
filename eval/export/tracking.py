"""Results in Weights & Biases, as points of the training run over its training tokens.

    RUN_DIR/config.yaml             the project
    RUN_DIR/wandb-id                the W&B run (pipeline/monitor/loggers/)
    RUN_DIR/wandb-evaluations.json  digests of the sent points with a model of each, and the transfer in
    progress

A W&B run supports a single writer, so results wait while the run trains. The lock of the run is only checked
and not held, because W&B may take minutes to answer and training has priority. A W&B history cannot be
changed, so sent points are recorded and never sent again.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from emo.common.config.recipe import read_written
from emo.common.errors import UserError, one_line
from emo.common.io.files import write_text
from emo.common.io.lease import Lease, hold_if_free
from emo.common.io.untrusted import is_plain_name
from emo.common.text import counted
from emo.pipeline.control.run_dir import CONFIG, LOCK, LOCK_SECONDS, WANDB_ID

from ..results import store
from ..results.directory import Model, Say
from .figures import read_figures

SENT = "wandb-evaluations.json"
SENDING = "wandb-export"  # name of the lease between exports
AXIS = "eval/tokens"
OFFLINE = "offline-run-"  # prefix of W&B directories that are not synced


class BusyError(UserError):
    """Another process writes to the W&B run. Results can be sent later."""


def send(models: Sequence[Model], run_dir: Path, say: Say) -> dict[str, UserError]:
    """Log the models of a run to its W&B run, each once, and skip models of other runs.

    Return the errors of models whose results are damaged, which are not sent. Raises BusyError while the run
    trains, and UserError if W&B is not installed or cannot be reached, or if the run does not report to W&B.
    """
    try:
        train = read_written(run_dir / CONFIG)["train"]
        if "wandb" not in train["report_to"]:
            raise ValueError("it does not report to W&B")
        project = train["project"]
        run_id = (run_dir / WANDB_ID).read_text(encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--output_path {run_dir} is not the directory of a run with train.report_to=[wandb]: "
            f"{one_line(error, 120)}",
            code="tracking",
        ) from None
    points = {}
    faults = {}
    for model in models:
        if Path(str(model.facts.get("run"))).name != run_dir.resolve().name:  # it may have been moved since
            say(f"{model.name}: not of the run {run_dir}, so it is not sent")
            continue
        try:
            points[model.name] = _point(model)
        except UserError as error:
            faults[model.name] = error
    if not points and not faults:
        raise UserError(
            f"no result is of the run {run_dir}. Set --output_path to the run of the results.",
            code="no-results",
        )
    free = Lease(run_dir, LOCK, LOCK_SECONDS).is_free()
    with hold_if_free(store.lease(run_dir, SENDING)) as acquired:
        if not (free and acquired):
            raise BusyError(
                f"{run_dir} is training, or another export is sending its results. Its W&B run supports a "
                "single writer, so export again later.",
                code="run-in-use",
            )
        noted = store.read_json_or_none(run_dir / SENT) or {"sent": {}}
        # The last checkpoint and the run's export have the same results and tokens, so they are one point.
        due = {store.digest_json(point): name for name, point in points.items()}
        due = {digest: name for digest, name in due.items() if digest not in noted["sent"]}
        begun = str(noted.get("sending", ""))  # W&B would also send what a killed export left
        if begun.startswith(OFFLINE) and is_plain_name(begun):
            shutil.rmtree(run_dir / "wandb" / begun, ignore_errors=True)
        elif begun:
            say("an export was killed while sending, so W&B may show some points twice")
        if due:
            in_order = sorted((points[name] for name in due.values()), key=lambda point: point[AXIS])
            _log(in_order, run_dir, project, run_id, noted["sent"])
            write_text(run_dir / SENT, store.dump({"sent": noted["sent"] | due}))
    say(
        f"W&B: {counted(len(due), 'point')} of {counted(len(points), 'model')} sent, the others already exist"
    )
    return faults


def _point(model: Model) -> dict[str, float]:
    """Return the values to log for a model."""
    all_of_model = read_figures(model) if model.results or not model.measures else []
    if model.facts.get("tokens") is None:
        raise UserError(f"{model.name} does not record its number of training tokens", code="tracking")
    point: dict[str, float | None] = {AXIS: model.facts["tokens"], "eval/step": model.facts.get("step")}
    for figures in all_of_model:
        point[f"eval/{figures.task}/accuracy"] = figures.accuracy.value
        point[f"eval/{figures.task}/accuracy_stderr"] = figures.accuracy.stderr
        point[f"eval/{figures.task}/macro_f1"] = figures.result["macro_f1"]
    for task, result in model.all_results.items():
        point |= {f"eval/{task}/{metric}": number for metric, number in result.get("metrics", {}).items()}
    if all_of_model:
        point["eval/mean_accuracy"] = sum(f.accuracy.value for f in all_of_model) / len(all_of_model)
    return {name: value for name, value in point.items() if value is not None}


def _log(
    points: list[dict[str, float]], run_dir: Path, project: str, run_id: str, sent: dict[str, str]
) -> None:
    try:
        import wandb
    except ImportError:
        raise UserError(
            "--format wandb needs the package wandb: pip install wandb", code="missing-extra"
        ) from None
    # Keep the trainer's metadata on machine and program.
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
        raise UserError(f"W&B: {line}. Set WANDB_API_KEY, or WANDB_MODE=offline.", code="tracking") from None
