"""A run that continues from a checkpoint of another run and lets its learning rate decay: `train.decay_from`.

The checkpoint is copied into the run directory. The other run, the trunk, may continue, prune it or end.
"""

from __future__ import annotations

import math
import re
import tempfile
from pathlib import Path

from emo.common.errors import UserError
from emo.common.io.files import write_text

from ..batches.config import count_steps
from ..config import RunConfig, TrainConfig
from ..control.run_dir import CONFIG, TRUNK, checkpoints, step_directory
from ..control.world import World, raise_on_all_ranks
from ..engine.schedule import ScheduleConfig, lr_at
from .claims import IDENTITY, compare_keys, read_recorded
from .copies import RunCopy
from .identity import Identity, check_unchanged
from .saver import Saved, fetch, remove

# Keys in which a branch may differ from its trunk, besides the keys that are always free.
BRANCH_KEYS = {f"train.{key}" for key in ScheduleConfig.model_fields if key != "learning_rate"}
BRANCH_KEYS |= {"train.max_steps", "train.num_train_epochs"}

# Records of the validation before the first step, with which later ones are compared.
FIRST_VALIDATION = re.compile(r"/(step-0+\.npz|base-\d+-\d+\.npy)$")


def _open_trunk(config: RunConfig) -> tuple[RunCopy, str]:
    """Return the run directory of the trunk, and the name of the checkpoint."""
    trunk = (config.train.decay_from or "").rstrip("/").rpartition("/")[0] or "."
    name = step_directory(Path(), config.train.branch_step or 0).name
    return RunCopy(trunk, key="train.decay_from"), name


def check_branch(config: RunConfig, identity: Identity, rows: int) -> None:
    """Compare a new run with the trunk that its recipe names, and keep the trunk's configuration.

    Args:
        config: The recipe.
        identity: What this run has read.
        rows: Number of training rows.

    Raises:
        UserError: the trunk is another kind of run, or its learning rate is not at its peak.
    """
    step = config.train.branch_step
    if step is None or (config.output_dir / CONFIG).is_file():
        return
    for directory in checkpoints(config.output_dir):  # fetched by a launch that never claimed the run
        remove(directory)
    trunk, name = _open_trunk(config)
    content = trunk.read_record(CONFIG)
    if content is None or name not in trunk.checkpoints():
        problem = f"train.decay_from={config.train.decay_from} is not a complete checkpoint of a run"
        available = ", ".join(trunk.checkpoints()) or "none"
        raise UserError(f"{problem} (complete ones in {trunk.target}: {available})", code="decay-from")
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / CONFIG
        file.write_bytes(content)
        recorded = read_recorded(file)
    compare_keys(trunk.target, recorded, step, config, BRANCH_KEYS)
    check_unchanged(trunk.target, recorded.get(IDENTITY), identity)
    _check_rate(f"{trunk.target}/{name}", TrainConfig.model_validate(recorded["train"]), step, rows)
    for record in trunk.list_validation():
        if FIRST_VALIDATION.search(record):
            trunk.fetch_record(record, config.output_dir)
    write_text(config.output_dir / TRUNK, content.decode("utf-8"))


def _check_rate(address: str, trunk: TrainConfig, step: int, rows: int) -> None:
    """Raise UserError unless the learning rate of the trunk was at its peak until `step`."""
    rate = lr_at(trunk, step - 1, count_steps(trunk, rows))
    if not math.isclose(rate, trunk.learning_rate):  # the last step of the warm-up is rounded
        problem = f"train.decay_from={address}: the learning rate there is {rate:g}, below its peak"
        cure = "Name a checkpoint after its warm-up and before its decay"
        raise UserError(f"{problem}. {cure}", code="decay-from")


def fetch_branch(config: RunConfig, world: World) -> Saved:
    """Copy the checkpoint that a new branch continues from. All ranks must call.

    Raises UserError if it is damaged.
    """
    trunk, name = raise_on_all_ranks(lambda: _open_trunk(config))
    saved = fetch(name, config.output_dir, trunk, world)
    if saved is None:
        problem = f"train.decay_from={config.train.decay_from} is damaged or no longer there"
        raise UserError(f"{problem}. Name another checkpoint", code="decay-from")
    return saved
