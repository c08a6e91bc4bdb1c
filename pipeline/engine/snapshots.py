"""DeepSpeed's state on disk: write it from host memory, read it as plain data, convert it for other ranks."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
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

# DeepSpeed's states are pickles, which could run any code. So they are read as tensors, plain values and
# instances of these DeepSpeed classes, whose constructors have no side effects.
STATE_CLASSES = (LossScaler, ZeroStageEnum, fragment_address)
ONLY_DATA = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}  # DeepSpeed itself requests the opposite


class Snapshots(TorchCheckpointEngine):
    """Copies DeepSpeed's state to host memory, and writes it to disk while training continues, or at once.

    The memory is reused for the next snapshot, because allocating pages takes longer than filling them. So a
    snapshot must be written before the next one is taken. Memory that a GPU fills is pinned.
    """

    copies = True  # False if a snapshot is written before training continues

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._waiting: list[tuple[Any, str]] = []
        self._memory: dict[tuple[str, int], Tensor] = {}  # by file name and index of the tensor in the file

    def save(self, state_dict: Any, path: str) -> None:
        """Copy `state_dict` to the host, with a separate storage for every tensor."""
        indices = itertools.count()

        def copy(leaf: Any) -> Any:
            if isinstance(leaf, ZeroStageEnum):  # Python up to 3.11.3 would pickle it as a call
                return int(leaf)
            if not isinstance(leaf, Tensor):
                return leaf
            return self._start_copy(leaf.detach(), (Path(path).name, next(indices)))

        # Keep torch.Size, which DeepSpeed's zero_to_fp32 needs. tree_map would turn it into a tuple.
        copied = pytree.tree_map(copy, state_dict, is_leaf=lambda node: isinstance(node, torch.Size))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._waiting.append((copied, path))

    def _start_copy(self, tensor: Tensor, key: tuple[str, int]) -> Tensor:
        """Start to copy a tensor into the host memory of `key`, and return that memory.

        Without `copies` return the tensor if it is in host memory, or a copy that is freed after writing.
        """
        if not self.copies:
            whole = not tensor.is_cuda and tensor.untyped_storage().nbytes() == tensor.nbytes
            return tensor if whole else tensor.to("cpu", copy=True)
        memory = self._memory.get(key)
        if memory is None or (memory.shape, memory.dtype) != (tensor.shape, tensor.dtype):
            memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._memory[key] = memory
        return memory.copy_(tensor, non_blocking=True)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing, because taking a snapshot does not touch the disk."""

    def write(self) -> list[Path]:
        """Write the snapshot and return its files.

        Raises UserError before writing if weights or the optimizer's state are not finite, because no run
        could recover from them. A model's buffers may hold infinity.
        """
        waiting = self._waiting
        self._waiting = []
        for state, _ in waiting:
            _check_finite(state)
        for state, path in waiting:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            super().save(state, path)
        return [Path(path) for _, path in waiting]


def _check_finite(state: Mapping[str, Any]) -> None:
    buffers = set(state.get("buffer_names") or ())
    for keys, leaf in pytree.tree_leaves_with_path(state):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.numel():
            continue
        finite = bool(torch.isfinite(torch.stack(leaf.aminmax())).all())
        if not finite and getattr(keys[-1], "key", None) not in buffers:
            problem = f"{pytree.keystr(keys)[-120:]} holds NaN or infinity"
            cure = "Lower train.learning_rate, and check the last losses"
            raise UserError(f"{problem}. {cure}", code="not-finite")


@contextlib.contextmanager
def only_data(directory: Path) -> Iterator[None]:
    """Reject states that would run code within the block, whatever the caller of `torch.load` requests."""
    try:
        with set_environment(ONLY_DATA), torch.serialization.safe_globals(list(STATE_CLASSES)):
            yield
    except pickle.UnpicklingError as error:
        raise _unsafe_state(directory, str(error)) from None


def _unsafe_state(directory: Path, message: str) -> UserError:
    """Return the error for a pickle that PyTorch rejects. Its `message` names a class or function."""
    (reason,) = re.findall(r"GLOBAL (\S+)", message)[:1] or [one_line(message, 120)]
    problem = f"{directory} is not loaded, because its state holds more than data ({reason})"
    return UserError(f"{problem}. Delete it to use an older checkpoint", code="checkpoint-damaged")


def read_weights(checkpoint: Path) -> dict[str, Any]:
    """Return the trained parameters and buffers of a checkpoint by name, as tensors or their partitions.

    `.contiguous()` gives the tensor, in float32 under ZeRO-3. Raises UserError for a state that holds more
    than data, or that DeepSpeed cannot gather.
    """
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    replicated = checkpoint / "state" / "mp_rank_00_model_states.pt"  # under ZeRO-1 and 2
    printed = io.StringIO()
    try:
        with only_data(checkpoint), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            if replicated.is_file():
                return dict(torch.load(replicated, map_location="cpu", mmap=True)["module"])
            return dict(
                get_fp32_state_dict_from_zero_checkpoint(
                    str(checkpoint), tag="state", exclude_frozen_parameters=True, lazy_mode=True
                )
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        problem = f"the weights of {checkpoint} cannot be read ({one_line(error, 160)})"
        raise UserError(problem, code="checkpoint-state") from None


def to_universal(state: Path, target: Path) -> None:
    """Convert a saved state so that any number of ranks can load it. This needs no process group.

    Raises UserError with the last line of DeepSpeed's converter, FailureError if a second try may succeed.
    """
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **ONLY_DATA}
    program = [
        "import torch",
        *(f"from {cls.__module__} import {cls.__name__}" for cls in STATE_CLASSES),
        f"torch.serialization.add_safe_globals([{', '.join(cls.__name__ for cls in STATE_CLASSES)}])",
        "from deepspeed.checkpoint import ds_to_universal",
        "ds_to_universal.main(ds_to_universal.parse_arguments())",
    ]
    command = [sys.executable, "-c", "; ".join(program)]
    # The last option makes DeepSpeed add the description of tensor-parallel layouts, of which there are none.
    command += ["--input_folder", str(state), "--output_folder", str(target), "--inject_missing_state"]
    # The converter inherits blocked signals. If it outlived this process, two converters could write at once.
    done = subprocess.run(
        command, env=os.environ | single, capture_output=True, encoding="utf-8", preexec_fn=die_with_parent
    )
    if "Weights only load failed" in done.stderr:
        raise _unsafe_state(state, done.stderr)
    if done.returncode:  # killed, a full disk or a damaged state
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        kind = FailureError if done.returncode < 0 or "No space left" in last else UserError
        raise kind(
            f"{state} cannot be converted for another number of ranks: {last}", code="checkpoint-state"
        )
