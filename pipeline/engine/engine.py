"""A model and its optimizer under DeepSpeed: step, evaluate, save, load.

A step descends the gradient of  (sum of token losses) / (supervised tokens of the global batch),  for any
number of ranks, micro-batch size and accumulation. A token of weight w counts as w tokens. The loss of each
micro-batch is a sum, and the divisor is known before the first one.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import deepspeed
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from emo.common.errors import UserError

from ..control.world import World, gather_objects
from ..loss import TopK
from ..loss.models.head import BOUNDS, DOMAIN, TOP_K, WEIGHTS, MicroBatch, sum_by_document
from .average import AVERAGED, WeightAverage, local_values, zero_padding
from .device.pace import OwnTime
from .ds_config import (
    EIGHT_BIT,
    UNIFORM,
    DsConfig,
    Grouping,
    build_8bit,
    build_muon,
    import_muon,
    page_states,
    parameter_groups,
    zero_stage,
)
from .freezing import Freezing
from .sequence import cut_bounds
from .snapshots import Snapshots, only_data
from .totals import StepTotals, TotalsVector

TAG = "state"  # directory of DeepSpeed's state in a checkpoint


class Engine:
    """A model and its optimizer under DeepSpeed."""

    average: WeightAverage | None = None  # of a teacher that averages the weights

    def __init__(
        self,
        model: nn.Module,
        ds_config: DsConfig,
        world: World,
        compiled: bool = False,
        grouping: Grouping = UNIFORM,
        only_steps: int | None = None,
    ) -> None:
        """Initialise DeepSpeed; all ranks must call.

        Args:
            model: A fused causal LM. Under ZeRO-3 it was built partitioned.
            ds_config: The resolved DeepSpeed configuration.
            world: This process among the ranks.
            compiled: Compile the model (ZeRO-1, 2) or each of its layers (ZeRO-3).
            grouping: Parts of the model that the optimizer treats differently.
            only_steps: Number of steps in which only embeddings that are apart train, or None for all.

        Raises UserError for a model without layers that ZeRO-3 could compile.
        """
        self.world = world
        self._stage = zero_stage(ds_config)
        settings = ds_config["optimizer"]["params"]
        uses_muon = ds_config["optimizer"]["type"] == "Muon"
        groups = parameter_groups(model, settings["weight_decay"], uses_muon, grouping)
        # Part of a checkpoint's layout. DeepSpeed replaces the parameters in the groups by its own below.
        self.groups = [len(group["params"]) for group in groups]
        if not uses_muon or get_accelerator().device_name() == "cpu":
            import_muon()
        build: Callable[..., torch.optim.Optimizer] | None = None
        if uses_muon:
            build = functools.partial(build_muon, params=settings)
        elif ds_config["optimizer"]["type"] in EIGHT_BIT.values():
            build = functools.partial(build_8bit, ds_config=ds_config)
        layers = _compiled_layers(model) if compiled and self._stage == 3 else []
        self.ds, *_ = deepspeed.initialize(
            model=model,
            model_parameters=groups,
            config=ds_config,
            optimizer=build,
        )
        if self._stage == 3:
            zero_padding(self.model, self.ds.optimizer, world.rank)
        groups = self.ds.optimizer.param_groups
        self.rates = [group["lr"] / settings["lr"] * group.get("ratio", 1.0) for group in groups]
        freezes = grouping.embeddings_apart
        self.freezing = Freezing(self.model, self.ds.optimizer, only_steps) if freezes else None
        # It identifies the weights that adapters belong to.
        self.frozen = sum(gather_objects(frozen_sum(self.model, world.rank))) % 2**64
        for layer in layers:
            layer.forward = torch.compile(layer.forward)
        if compiled and not layers:
            self.ds.compile()
        self.own = OwnTime(self.model.get_output_embeddings())  # type: ignore[operator]
        self.files = Snapshots(self.ds._config)
        self.ds.checkpoint_engine = self.files
        # The export replaces this script, and a snapshot must not write to disk.
        self.ds._copy_recovery_script = lambda _: None

    @property
    def model(self) -> nn.Module:
        """Return the model inside the engine."""
        return self.ds.module

    def train_step(
        self,
        micro_batches: Iterable[MicroBatch],
        valid: float,
        lr: float,
        seed: int,
        stop: bool,
        domains: Sequence[float] = (),
    ) -> StepTotals:
        """Take one optimizer step; all ranks must call.

        Args:
            micro_batches: This rank's part of the global batch.
            valid: Supervised tokens of the global batch, or the sum of their weights.
            lr: Learning rate of groups without a ratio.
            seed: Seed of dropout. Each rank derives its own, so that a resumed run needs no generator state.
            stop: Whether this rank got a stop request.
            domains: The part of each domain in `valid`, to sum losses by domain. Micro-batches then hold the
                domain of each row, and the head reports losses by token.
        """
        for i, (group, rate) in enumerate(zip(self.ds.optimizer.param_groups, self.rates, strict=True)):
            group["lr"] = lr * rate * (1.0 if self.freezing is None else self.freezing.scale(i))
        torch.manual_seed(seed * 1_000_003 + self.world.rank)
        if not self.ds.module.training:
            self.ds.train()
        vector = TotalsVector(self.world.device, domains, self.world.ranks)
        self.own.start_compute()
        for micro in micro_batches:
            inputs = self.to_device(micro)
            domain = inputs.pop(DOMAIN, None)
            sums = self.ds(**inputs)
            vector.add(sums, domain)
            # DeepSpeed averages over ranks, and the loss is a share of a sum over all of them. A loss that is
            # not finite makes its gradient so, too. DeepSpeed then does not apply the step.
            share = self.world.ranks / (valid or 1) + 0 * sums.loss.detach()
            self.ds.backward(sums.loss * share, scale_wrt_gas=False)
            self.ds.step()
        if stop:
            vector.request_stop()
        vector.set_seconds(self.world.rank, self.own.last)
        totals = vector.reduce()
        self.own.end_step()
        norm = self.ds.get_global_grad_norm()
        applied = self.ds.was_step_applied()
        if self.average is not None and applied:
            self.average.update()
        grad_norm = math.nan if norm is None else float(norm)
        return totals._replace(applied=applied, grad_norm=grad_norm, weight=valid)

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> tuple[StepTotals, np.ndarray, np.ndarray]:
        """Return totals over all ranks, and NLL and supervised tokens of each of this rank's documents.

        In data with weights, the tokens of a document are the sum of their weights, float64. Every rank must
        bring equally many micro-batches. The head must report losses by token (`measuring`). Ranks that share
        rows have the same documents, and each returns the sums of its part.
        """
        self.ds.eval()
        vector = TotalsVector(self.world.device)
        tokens = [np.zeros(0, np.int64)]
        nll = [vector.values.new_zeros(0)]  # stays on the device until the last micro-batch
        for micro in micro_batches:
            inputs = self.to_device(micro)
            sums = self.ds(**inputs)
            vector.add(sums)
            bounds = micro[BOUNDS]
            if (parts := self.world.sequence) > 1:
                length = micro["position_ids"].shape[1] * parts
                bounds = cut_bounds(bounds, length, self.world.part, parts)
            nll.append(sum_by_document(sums.by_token[1], bounds.to(self.world.device, non_blocking=True)))
            tokens.append(micro["labels"].per_document(bounds, micro.get(WEIGHTS)))
        return vector.reduce(), torch.cat(nll).cpu().numpy(), np.concatenate(tokens)

    @torch.no_grad()
    def most_likely(self, micro_batches: Iterable[MicroBatch], k: int) -> Iterator[TopK]:
        """Yield the k most likely tokens at the supervised positions of each micro-batch.

        All ranks must call, with equally many micro-batches.
        """
        self.ds.eval()
        for micro in micro_batches:
            yield self.ds(**self.to_device(micro), **{TOP_K: k})

    def snapshot(self, directory: Path) -> None:
        """Copy this rank's part of the state, to be written below `directory`; all ranks must call."""
        self.ds.save_checkpoint(str(directory), tag=TAG, save_latest=False, exclude_frozen_parameters=True)
        if self.average is not None and (averages := self.average.state()):
            self.files.save(averages, str(self.average.file(directory / TAG)))

    def load(self, directory: Path) -> None:
        """Read the state that as many ranks saved; all ranks must call."""
        groups = self.ds.optimizer.param_groups
        keys = ("lr", "betas", "eps", "momentum", "weight_decay")  # which no checkpoint decides
        recipe_settings = [{key: group[key] for key in keys if key in group} for group in groups]
        with only_data(directory):
            path, _ = self.ds.load_checkpoint(str(directory), tag=TAG, load_module_strict=False)
        assert path is not None, directory
        # A universal checkpoint brings the first group's settings to all of them: norms would decay, too.
        for group, settings in zip(self.ds.optimizer.param_groups, recipe_settings, strict=True):
            group.update(settings)
        # And it gives one count of steps to all parts of the state, which would count it up once each.
        optimizer = getattr(self.ds.optimizer, "optimizer", self.ds.optimizer)
        for parameter, state in optimizer.state.items():
            if isinstance(state.get("step"), Tensor):  # bitsandbytes counts in a plain number
                count = torch.as_tensor(state["step"], dtype=torch.float32).clone()
                state["step"] = count.to(parameter.device)
        page_states(optimizer)
        if self.freezing is not None and self.ds.load_universal_checkpoint() and self._stage == 3:
            self.freezing.correct_counts()

    def to_device(self, micro: MicroBatch) -> MicroBatch:
        """Return a micro-batch with its tensors on this rank's device."""
        device = self.world.device
        return {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in micro.items()}


def frozen_sum(model: nn.Module, rank: int = 0) -> int:
    """Return a sum of the bits of this rank's part of all parameters that do not train.

    The sum over all ranks modulo 2**64 is the same for any number of ranks. 4-bit weights count with the
    checksum of the files that they come from, because a CPU may round them differently from a GPU.
    """
    total = sum(getattr(module, "quantized_from", 0) for module in model.modules()) if rank == 0 else 0
    for name, parameter in model.named_parameters():
        if f".{AVERAGED}" in name or hasattr(parameter, "quant_state"):  # adapters of a teacher change
            continue
        if not parameter.requires_grad and (hasattr(parameter, "ds_tensor") or rank == 0):
            values = local_values(parameter, rank)
            bits = values.view({2: torch.int16, 4: torch.int32}[values.element_size()])
            total += int(bits.sum(dtype=torch.int64)) * zlib.crc32(name.encode())
    return total


def _compiled_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers to compile one by one under ZeRO-3, marked to be gathered as a whole."""
    layers: list[nn.Module] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        problem = f"model.compile=true under ZeRO-3 finds no layers in {type(model).__name__}"
        raise UserError(f"{problem}; set it to false", code="compile-layers")
    set_z3_leaf_modules(model, list({type(layer) for layer in layers}))  # no hook inside a compiled layer
    return layers
