"""The exponential average of the weights that train, held in the parameters of a teacher.

After each optimizer step, average = decay * average + (1 - decay) * weights. It is computed in float32 from
the weights in the dtype of the model. The parameters of the teacher receive it in their dtype. Under ZeRO-3
each rank holds the average of its partition. Otherwise each rank holds all of it, and rank 0 saves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from emo.common.errors import UserError

from ..control.world import World, gather_objects

AVERAGED = "averaged_weights"  # PEFT's name of averaged adapters
FILES = "average_rank_*.pt"  # in the directory of DeepSpeed's state


def local_values(parameter: nn.Parameter, rank: int) -> Tensor:
    """Return the values of a parameter that this rank holds, flat: its partition under ZeRO-3, or all."""
    part: Tensor | None = getattr(parameter, "ds_tensor", None)
    if part is None:
        return parameter.detach().view(-1)
    size: int = parameter.ds_numel  # type: ignore[attr-defined]  # without the padding of the last partition
    return part[: max(0, size - rank * part.numel())]


@torch.no_grad()
def zero_padding(model: nn.Module, optimizer: Any, rank: int) -> None:
    """Set the padding of the partitions of ZeRO-3 to zero.

    DeepSpeed leaves it uninitialised. NaN there would look like damaged weights in every checkpoint.
    """

    def padding(parameter: Any, part: Tensor) -> Tensor:
        return part[max(0, parameter.ds_numel - rank * parameter.partition_numel()) :]

    for parameter in model.parameters():
        padding(parameter, parameter.ds_tensor).zero_()  # type: ignore[attr-defined]
    for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        if not flat.numel():  # the values are on NVMe
            continue
        for parameter, part in zip(group, flat.split([p.partition_numel() for p in group]), strict=True):
            padding(parameter, part).zero_()


class WeightAverage:
    """The average of the trained weights of a model. All ranks create it and call its methods."""

    def __init__(
        self, model: nn.Module, copies: Mapping[str, nn.Parameter], decay: float, world: World
    ) -> None:
        """Start from the weights before training, which the teacher must have, too.

        Args:
            model: The model inside the engine.
            copies: The teacher's parameters, by the name of the model's parameter.
            decay: Share of the average that each step keeps.
            world: This process among the ranks.

        Raises UserError, on all ranks, if the teacher's weights differ from those of the model.
        """
        self.pairs = {name: (p, copies[name]) for name, p in model.named_parameters() if p.requires_grad}
        self.decay = decay
        self.world = world
        self._partitioned = any(hasattr(copy, "ds_tensor") for _, copy in self.pairs.values())
        # Only for teachers in another dtype than float32. Others hold the average in their parameters.
        self._wide: dict[str, Tensor] = {}
        differing = ""
        for name, weights, values in self._local_pairs():
            if not torch.equal(weights, values):
                differing = differing or name
            if values.dtype != torch.float32:
                self._wide[name] = values.float()
        differing = next(filter(None, gather_objects(differing)), "")
        if differing:
            problem = (
                f"objective.teacher.ema does not start from the weights of the model: {differing} differs"
            )
            cure = "Start again, or remove unusual settings from the DeepSpeed configuration"
            raise UserError(f"{problem}. {cure}", code="teacher-start")

    def _local_pairs(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield name, trained values and teacher's values of each parameter, as this rank holds them."""
        for name, pair in self.pairs.items():
            trained, held = (local_values(parameter, self.world.rank) for parameter in pair)
            yield name, trained, held

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after an optimizer step."""
        for name, weights, values in self._local_pairs():
            average = self._wide.get(name, values)
            average.mul_(self.decay).add_(weights, alpha=1 - self.decay)
            if average is not values:
                values.copy_(average)
        self._gather_again()

    def _gather_again(self) -> None:
        """Replace the parameters of the teacher that ZeRO-3 keeps gathered between passes."""
        copies: list[Any] = [copy for _, copy in self.pairs.values()]
        gathered = [c for c in copies if getattr(c, "ds_status", None) is ZeroParamStatus.AVAILABLE]
        if gathered:
            gathered[0].partition(gathered)
            gathered[0].all_gather(gathered)

    def state(self) -> dict[str, Tensor]:
        """Return the values that this rank saves, float32, by name."""
        if not self._partitioned and not self.world.is_main:
            return {}
        return {name: self._wide.get(name, values) for name, _, values in self._local_pairs()}

    def file(self, directory: Path) -> Path:
        """Return this rank's file in the directory of DeepSpeed's state."""
        return directory / FILES.replace("*", f"{self.world.rank:05d}")

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Read the average that any number of ranks saved in a directory of DeepSpeed's state.

        Raises UserError if it has other parameters than the model.
        """
        files = sorted(directory.glob(FILES))
        same = self._partitioned and len(files) == self.world.ranks  # then each rank needs only its file
        read = [self.file(directory)] if same else files
        parts = [torch.load(file, map_location="cpu", mmap=True, weights_only=True) for file in read]
        for name, _, values in self._local_pairs():
            average = torch.cat([part[name] for part in parts if name in part] or [torch.zeros(0)])
            if self._partitioned and not same:
                size: int = self.pairs[name][1].ds_tensor.numel()  # type: ignore[attr-defined]
                average = average[self.world.rank * size :][: values.numel()]
            if average.numel() != values.numel():
                problem = f"{directory} has no complete average of {name}"
                raise UserError(f"{problem}. Delete it to use an older checkpoint", code="checkpoint-damaged")
            values.copy_(average)
            if name in self._wide:
                self._wide[name].copy_(average)
        self._gather_again()
