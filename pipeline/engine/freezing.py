"""Steps in which only the embeddings and the output head learn (`train.only`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)


def embedding_ids(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of a causal LM's token embedding and output head."""
    modules: list[Any] = [
        model.get_input_embeddings(),  # type: ignore[operator]
        model.get_output_embeddings(),  # type: ignore[operator]
    ]
    return {id(parameter) for module in modules for parameter in module.parameters()}


class Freezing:
    """Freezes all parameters but embeddings and head until a given step.

    Their gradients are zero and their learning rate is 0, so that neither weights nor moments change under
    any ZeRO stage. After the last frozen step AdamW counts their steps from 0, as for new moments.
    """

    def __init__(self, model: nn.Module, optimizer: Any, steps: int | None) -> None:
        """Prepare a model and its DeepSpeed optimizer with the groups of `parameter_groups`.

        steps: The number of steps to freeze, from the first step of the run. None: all.
        """
        self.active = False
        self._optimizer = optimizer
        self._steps = steps
        # Here, because loading a checkpoint may give all groups the keys of the first one.
        self._frozen = [i for i, group in enumerate(optimizer.param_groups) if not group["embedding"]]
        free = embedding_ids(model)
        for parameter in model.parameters():
            if parameter.requires_grad and id(parameter) not in free:
                parameter.register_hook(self._hide)

    def start_step(self, step: int) -> None:
        """Freeze or release the parameters for this step, counted from 0."""
        self.active = self._steps is None or step < self._steps
        if step == self._steps:
            log.info("step %d: from now on all weights learn", step + 1)
            self._count(lambda count: 0 * count)

    def scale(self, group: int) -> float:
        """Return the factor of the learning rate of a group in this step."""
        return 0.0 if self.active and group in self._frozen else 1.0

    def correct_counts(self) -> None:
        """Correct the counts of steps after a load that gave all groups the count of the first one."""
        steps = self._steps
        if steps is not None:
            self._count(lambda count: (count - steps).clamp_min(0))

    def _hide(self, gradient: Tensor) -> Tensor | None:
        return torch.zeros_like(gradient) if self.active else None

    def _count(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change AdamW's count of steps of each frozen parameter."""
        states = getattr(self._optimizer, "optimizer", self._optimizer).state
        for group, parameter in self._flat_parameters():
            if group in self._frozen and "step" in states.get(parameter, {}):
                states[parameter]["step"] = change(torch.as_tensor(states[parameter]["step"]))

    def _flat_parameters(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the group and the flat float32 partition of each part of the optimizer's state."""
        optimizer = self._optimizer
        if hasattr(optimizer, "sub_group_to_group_id"):  # ZeRO-3
            for part, parameter in enumerate(optimizer.fp32_partitioned_groups_flat):
                yield optimizer.sub_group_to_group_id[part], parameter
        else:
            for group, settings in enumerate(optimizer.param_groups):
                yield from ((group, parameter) for parameter in settings["params"])
