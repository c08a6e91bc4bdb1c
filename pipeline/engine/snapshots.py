"""DeepSpeed's state on disk: written from host memory, read as plain data, converted for other ranks."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor
from torch.utils import _pytree as pytree

from emo.common.errors import FailureError, UserError, one_line
from emo.common.parallel import set_environment

from ..control.stop import die_with_parent

# DeepSpeed's states are pickles, which could run any program. They are read as tensors and plain values, and
# besides these classes of its own, which do nothing when they are made, name no other.
STATE_CLASSES = (LossScaler, ZeroStageEnum, fragment_address)
ONLY_DATA = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}  # DeepSpeed itself asks for the contrary


class Snapshots(TorchCheckpointEngine):
    """Copies in host memory of what DeepSpeed saves; `write` writes them to disk while training continues.

    The memory is kept for the next save, pinned where it is filled by a GPU: pages that are new take longer
    to get than to fill. So a snapshot must be written before the next is taken.
    """

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._waiting: list[tuple[Any, str]] = []
        self._memory: dict[tuple[str, int], Tensor] = {}  # by file, and the order of tensors in it

    def save(self, state_dict: Any, path: str) -> None:
        """Copy `state_dict`; every tensor becomes its own storage on the host."""
        numbers = itertools.count()

        def copy(leaf: Any) -> Any:
            if isinstance(leaf, ZeroStageEnum):  # a number: Python up to 3.11.3 pickles a call
                return int(leaf)
            if not isinstance(leaf, Tensor):
                return leaf
            return self._copied(leaf.detach(), (Path(path).name, next(numbers)))

        # A shape stays what it is: as a plain tuple DeepSpeed's own zero_to_fp32 could not read it.
        copied = pytree.tree_map(copy, state_dict, is_leaf=lambda n: isinstance(n, torch.Size))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._waiting.append((copied, path))

    def _copied(self, tensor: Tensor, key: tuple[str, int]) -> Tensor:
        """Return the memory of `key` once a copy to it has begun."""
        memory = self._memory.get(key)
        if memory is None or (memory.shape, memory.dtype) != (tensor.shape, tensor.dtype):
            memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._memory[key] = memory
        return memory.copy_(tensor, non_blocking=True)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: a snapshot does not touch the disk."""

    def write(self) -> list[Path]:
        """Write what was copied and return the files.

        Raises UserError before anything is written where weights or the optimizer's state are not finite; a
        run that resumed from them could only go on so. Only a model's buffers may hold infinity.
        """
        waiting, self._waiting = self._waiting, []
        for state, _ in waiting:
            buffers = set(state.get("buffer_names") or ())
            for keys, leaf in pytree.tree_leaves_with_path(state):
                if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.numel():
                    continue
                finite = bool(torch.isfinite(torch.stack(leaf.aminmax())).all())
                if not finite and getattr(keys[-1], "key", None) not in buffers:
                    problem = f"{pytree.keystr(keys)[-120:]} holds NaN or infinity"
                    cure = "lower train.learning_rate, and look at the last losses"
                    raise UserError(f"{problem}; {cure}", code="not-finite")
        for state, path in waiting:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            super().save(state, path)
        return [Path(path) for _, path in waiting]


@contextlib.contextmanager
def only_data(directory: Path) -> Iterator[None]:
    """Refuse a state for which `torch.load` would run anything within the block, whatever its caller asks."""
    try:
        with set_environment(ONLY_DATA), torch.serialization.safe_globals(list(STATE_CLASSES)):
            yield
    except pickle.UnpicklingError as error:
        raise _more_than_data(directory, str(error)) from None


def _more_than_data(directory: Path, message: str) -> UserError:
    """Return the error for torch's refusal to read a pickle; its `message` names a class or function."""
    (reason,) = re.findall(r"GLOBAL (\S+)", message)[:1] or [one_line(message, 120)]
    problem = f"{directory} holds a state that is more than data ({reason}), and is not loaded"
    return UserError(f"{problem}; delete it to use an older checkpoint")


def to_universal(state: Path, target: Path) -> None:
    """Rewrite a saved state so that any number of ranks can load it; one process, no process group.

    Raises UserError with the converter's last line when it fails, FailureError where another try may succeed.
    """
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **ONLY_DATA}
    program = [
        "import torch",
        *(f"from {cls.__module__} import {cls.__name__}" for cls in STATE_CLASSES),
        f"torch.serialization.add_safe_globals([{', '.join(cls.__name__ for cls in STATE_CLASSES)}])",
        "from deepspeed.checkpoint import ds_to_universal",
        "ds_to_universal.main(ds_to_universal.parse_arguments())",
    ]
    command = [sys.executable, "-c", "; ".join(program)]
    # DeepSpeed wants a description of tensor-parallel layouts; there are none, and it can say so itself.
    command += ["--input_folder", str(state), "--output_folder", str(target), "--inject_missing_state"]
    # It inherits blocked signals, and must not outlive this process and write beside the next start's.
    done = subprocess.run(
        command, env=os.environ | alone, capture_output=True, encoding="utf-8", preexec_fn=die_with_parent
    )
    if "Weights only load failed" in done.stderr:
        raise _more_than_data(state, done.stderr)
    if done.returncode:  # killed, or a full disk, or an input that is not what it should be
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        kind = FailureError if done.returncode < 0 or "No space left" in last else UserError
        raise kind(f"{state} cannot be converted for another number of ranks: {last}")
