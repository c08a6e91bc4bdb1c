"""DeepSpeed's engine: start, initialise, step, save, load.

Gradients are those of  sum of token losses / valid tokens of the global batch,  whatever the number of ranks,
the micro-batch or the accumulation: each micro-batch's loss is a sum, and the divisor is known beforehand.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import math
import os
import pickle
import re
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import set_z3_leaf_modules
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.modeling_layers import GradientCheckpointingLayer

from emo.common.errors import FailureError, UserError, one_line
from emo.common.parallel import environment

from ..control.stop import CHOSEN_PORT, die_with_parent
from ..control.world import PATIENCE, World, gather_objects
from ..loss.fused import BINS
from ..loss.models.head import BOUNDS, DOMAIN, sum_by_document
from .devices import bind_near, check_gpus, on_gpu, threads
from .ds_config import import_muon, muon, parameter_groups, zero_stage
from .pace import OwnTime


class DomainSums(NamedTuple):
    """Sums over the valid tokens of one domain."""

    tokens: int
    loss: float
    nll: float


class Sums(NamedTuple):
    """Sums over the valid tokens of a global batch, and what the ranks agreed on."""

    loss: float
    nll: float
    demd: float  # nan without a cost embedding
    tokens: int
    stop: bool
    applied: bool = True  # whether the weights were updated
    weights: tuple[float, ...] = ()  # histogram of the objective's weights (loss/fused.py)
    domains: tuple[DomainSums, ...] = ()  # of each domain, where there are several
    divergence: float = math.nan  # from a teacher, without weights
    seconds: tuple[float, ...] = ()  # that each rank worked alone in the step before (pace.py)


def start_world(timeout_minutes: float = PATIENCE) -> World:
    """Join the process group that the launcher describes; alone when there is none."""
    check_gpus()
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        # its store keeps the addresses of dead ranks, and restarted ones would call them
        raise UserError("torchrun --max-restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 set")
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if on_gpu():
        gpu: Any = torch.cuda.get_device_properties()
        bind_near(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")
    # On a CPU DeepSpeed would compile a shared-memory all-reduce here. Only inference uses it, the first
    # start would wait half a minute, and one killed meanwhile leaves a lock that hangs every later one.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "gloo" if accelerator.device_name() == "cpu" else accelerator.communication_backend_name()
    timeout = datetime.timedelta(minutes=timeout_minutes)
    try:
        deepspeed.init_distributed(dist_backend=backend, timeout=timeout, verbose=False)
    except torch.distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ["MASTER_PORT"]
        kind = FailureError if os.environ.get(CHOSEN_PORT) == port else UserError  # by launch/supervise.py
        way = "launch/continual.sh --master_port N -- RECIPE names another one"
        raise kind(f"port {port} of this host is taken; {way}", code="port") from None
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads())
    device = torch.device(accelerator.current_device_name())
    return World(dist.get_rank(), dist.get_world_size(), device)


# DeepSpeed's states are pickles, which could run any program. They are read as tensors and plain values, and
# besides these classes of its own, which do nothing when they are made, name no other.
STATE_CLASSES = (LossScaler, ZeroStageEnum, fragment_address)
ONLY_DATA = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}  # DeepSpeed itself asks for the contrary


class Engine:
    """A model and its optimizer under DeepSpeed."""

    def __init__(
        self, model: nn.Module, ds_config: dict[str, Any], world: World, compiled: bool = False,
        head_lr_ratio: float = 1.0,
    ) -> None:  # fmt: skip
        self.world = world
        params, with_muon = ds_config["optimizer"]["params"], ds_config["optimizer"]["type"] == "Muon"
        groups = parameter_groups(model, params["weight_decay"], with_muon, head_lr_ratio)
        # Part of a checkpoint's layout; DeepSpeed then replaces the parameters in the groups by its own.
        self.groups = [len(group["params"]) for group in groups]
        if not with_muon or get_accelerator().device_name() == "cpu":
            import_muon()
        layers: list[nn.Module] = []
        if compiled and zero_stage(ds_config) == 3:
            layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
            if not layers:
                problem = f"model.compile=true under ZeRO-3 finds no layers in {type(model).__name__}"
                raise UserError(f"{problem}; set it to false", code="compile-layers")
            # gathered whole, so that no hook lies within a layer
            set_z3_leaf_modules(model, list({type(layer) for layer in layers}))
        self.ds, *_ = deepspeed.initialize(
            model=model,
            model_parameters=groups,
            config=ds_config,
            optimizer=functools.partial(muon, params=params) if with_muon else None,
        )
        groups = self.ds.optimizer.param_groups
        self.rates = [group["lr"] / params["lr"] * group.get("ratio", 1.0) for group in groups]
        self.frozen = self._frozen_sum()  # what adapters belong to
        for layer in layers:
            layer.forward = torch.compile(layer.forward)
        if compiled and not layers:
            self.ds.compile()
        self.own = OwnTime(self.model.get_output_embeddings())  # type: ignore[operator]
        self.files = Snapshots(self.ds._config)
        self.ds.checkpoint_engine = self.files
        self.ds._copy_recovery_script = lambda _: None  # it would write now, and the export does its job

    @property
    def model(self) -> nn.Module:
        """Return the model inside the engine."""
        return self.ds.module

    def train_step(
        self,
        micro_batches: Iterable[dict[str, Any]],
        valid: int,
        lr: float,
        seed: int,
        stop: bool,
        domains: Sequence[int] = (),
    ) -> Sums:
        """Take an optimizer step on this rank's micro-batches; `valid` counts the tokens of the global batch.

        domains: those of each domain, where losses are to be summed apart; the head must then tell them by
        token, and the micro-batches which rows are of which.
        """
        for group, rate in zip(self.ds.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = lr * rate
        # Dropout follows from (seed, rank) alone, so a resumed run needs no saved generator state.
        torch.manual_seed(seed * 1_000_003 + self.world.rank)
        if not self.ds.module.training:
            self.ds.train()
        totals = self._zeros(len(domains))
        totals[4] = float(stop)
        self.own.computes()
        for micro in micro_batches:
            inputs = self._to_device(micro)
            domain = inputs.pop(DOMAIN, None)
            sums = self.ds(**inputs)
            totals += _detached(sums, domain, len(domains))
            # DeepSpeed averages over ranks; the loss is a share of a sum over all of them. One that is not
            # finite makes its gradient so, too, and then the step is not applied.
            share = self.world.ranks / max(1, valid) + 0 * sums.loss.detach()
            self.ds.backward(sums.loss * share, scale_wrt_gas=False)
            self.ds.step()
        alone = totals.new_zeros(self.world.ranks)
        alone[self.world.rank] = self.own.last
        sums = self.share(torch.cat((totals, alone)), domains)
        self.own.ends()
        return sums._replace(applied=self.ds.was_step_applied())

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[dict[str, Any]]) -> tuple[Sums, np.ndarray, np.ndarray]:
        """Return sums over all ranks' micro-batches, and NLL and valid tokens of this rank's documents.

        Every rank must bring equally many micro-batches, and the head tell its losses by token (`measuring`).
        """
        self.ds.eval()
        totals, tokens = self._zeros(), [np.zeros(0, np.int64)]
        nll = [totals.new_zeros(0)]  # left on the device until all is computed
        for micro in micro_batches:
            on_device = self._to_device(micro)
            sums = self.ds(**on_device)
            totals += _detached(sums)
            nll.append(sum_by_document(sums.by_token[1], on_device[BOUNDS]))
            tokens.append(micro["labels"].per_document(micro[BOUNDS]))
        return self.share(totals), torch.cat(nll).cpu().numpy(), np.concatenate(tokens)

    def share(self, totals: Tensor, domains: Sequence[int] = ()) -> Sums:
        """Add the sums of `_detached`, then *losses, *nlls and *seconds, over all ranks."""
        dist.all_reduce(totals)
        loss, nll, demd, tokens, stop, divergence, *details = totals.tolist()
        weights, n = details[: BINS + 1], BINS + 1 + len(domains)
        end = n + len(domains)
        apart = tuple(
            DomainSums(*sums) for sums in zip(domains, details[BINS + 1 : n], details[n:end], strict=True)
        )
        seconds = tuple(details[end:])
        return Sums(loss, nll, demd, int(tokens), stop > 0, True, tuple(weights), apart, divergence, seconds)

    def snapshot(self, directory: Path) -> None:
        """Copy this rank's part of the state, to be written below `directory`; all ranks must call."""
        self.ds.save_checkpoint(
            str(directory), tag="state", save_latest=False, exclude_frozen_parameters=True
        )

    def load(self, directory: Path) -> None:
        """Read the state that as many ranks saved; all ranks must call."""
        groups = self.ds.optimizer.param_groups
        keys = ("lr", "betas", "eps", "momentum", "weight_decay")  # which no checkpoint decides
        recipe_settings = [{key: group[key] for key in keys if key in group} for group in groups]
        with _only_data(directory):
            path, _ = self.ds.load_checkpoint(str(directory), tag="state", load_module_strict=False)
        assert path is not None, directory
        # A universal checkpoint brings the first group's settings to all of them: norms would decay, too.
        for group, settings in zip(self.ds.optimizer.param_groups, recipe_settings, strict=True):
            group.update(settings)
        # And it gives one count of steps to all parts of the state, which would count it up once each.
        optimizer = getattr(self.ds.optimizer, "optimizer", self.ds.optimizer)
        for parameter, state in optimizer.state.items():
            if "step" in state:
                count = torch.as_tensor(state["step"], dtype=torch.float32).clone()
                state["step"] = count.to(parameter.device)

    def _frozen_sum(self) -> int:
        """Return a sum of the bits of all parameters that do not train, the same for any number of ranks."""
        total = 0
        for name, parameter in self.model.named_parameters():
            values: Any = parameter
            if (part := getattr(parameter, "ds_tensor", None)) is not None:  # this rank's under ZeRO-3
                size = getattr(parameter, "ds_numel", 0)  # without the padding behind the last rank's values
                values = part[: max(0, size - self.world.rank * part.numel())]
            if not parameter.requires_grad and (part is not None or self.world.is_main):
                bits = values.detach().view({2: torch.int16, 4: torch.int32}[values.element_size()])
                total += int(bits.sum(dtype=torch.int64)) * zlib.crc32(name.encode())
        return sum(gather_objects(total)) % 2**64

    def _zeros(self, domains: int = 0) -> Tensor:
        return torch.zeros(6 + BINS + 1 + 2 * domains, dtype=torch.float64, device=self.world.device)

    def _to_device(self, micro: dict[str, Any]) -> dict[str, Any]:
        device = self.world.device
        return {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in micro.items()}


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


def _detached(sums: Any, domain: Tensor | None = None, domains: int = 0) -> Tensor:
    """Return [loss, nll, demd, tokens, 0, divergence, *weights] of a micro-batch, float64, on the device.

    With the `domain` [b] of its rows the losses and NLLs of all `domains` follow.
    """
    parts = [
        sums.loss.detach(),
        sums.nll,
        sums.demd,
        sums.tokens,
        torch.zeros_like(sums.nll),
        sums.divergence,
    ]
    apart = torch.zeros(2, domains, dtype=torch.float64, device=sums.weights.device)
    if domain is not None:
        by_row = sums.by_token.view(2, len(domain), -1).sum(2, dtype=torch.float64)
        apart.index_add_(1, domain, by_row)
    return torch.cat((torch.stack([p.to(torch.float64) for p in parts]), sums.weights, apart.flatten()))


@contextlib.contextmanager
def _only_data(directory: Path) -> Iterator[None]:
    """Refuse a state for which `torch.load` would run anything within the block, whatever its caller asks."""
    try:
        with environment(ONLY_DATA), torch.serialization.safe_globals(list(STATE_CLASSES)):
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
