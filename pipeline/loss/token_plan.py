"""The order in which the fused loss takes the tokens of a batch, made on the host.

Labels are on the host before they are on the GPU, and sorting a few thousand of them takes the host less than
a millisecond. The host then knows where a group of tokens begins and which costs it needs without asking the
device, whose queue never runs dry. Arrays on the host are NumPy's, on the device PyTorch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from common.labels import IGNORE


class OnDevice(NamedTuple):
    """A plan's arrays as tensors, int64."""

    positions: Tensor  # [T] in the flat batch
    labels: Tensor  # [T] ascending
    which: Tensor  # [T] index of each token's target
    targets: Tensor  # [U] ascending


@dataclass(frozen=True, eq=False)
class TokenPlan:
    """The valid tokens of a batch, sorted by label so that one row of costs serves all with the same target.

    It stands for the labels wherever a fused head or model takes them.
    """

    size: int  # labels in the batch, valid or not
    positions: np.ndarray  # [T] in the flat batch
    labels: np.ndarray  # [T] ascending
    which: np.ndarray  # [T] index of each token's target in `targets`
    targets: np.ndarray  # [U] the distinct targets, ascending
    counts: np.ndarray  # [U] tokens that have each
    packed: Tensor  # the memory of the first four, one after the other

    def __len__(self) -> int:
        """Return the number of valid tokens."""
        return len(self.positions)

    def check(self, vocab_size: int) -> None:
        """Check the labels. Raises UserError for one that has no row in a vocabulary of this size."""
        for label in (self.labels[:1], self.labels[-1:]):
            if len(label) and not 0 <= label[0] < vocab_size:
                raise UserError(
                    f"label {label[0]} lies outside the vocabulary of {vocab_size} tokens", code="label-range"
                )

    def per_document(self, bounds: Tensor) -> np.ndarray:
        """Return the valid tokens of each document, int64 [documents]; bounds on the host, of `segments`."""
        document = np.searchsorted(bounds.numpy(), self.positions, side="right") - 1
        return np.bincount(document, minlength=len(bounds) - 1)

    def on(self, device: torch.device) -> OnDevice:
        """Return the arrays on `device`, sent there by one asynchronous copy."""
        T, U = len(self.positions), len(self.targets)
        return OnDevice(*self.packed.to(device, non_blocking=True).split([T, T, T, U]))


Labels = Tensor | TokenPlan


def label_count(labels: Labels) -> int:
    """Return the number of labels in the batch, valid or not."""
    return labels.size if isinstance(labels, TokenPlan) else labels.numel()


def plan_tokens(labels: Tensor, pin: bool = False) -> TokenPlan:
    """Return the plan for integer `labels` [...]; -100 leaves a token out.

    Labels on a device are fetched first, the only wait for it. `pin`: hold the plan in pinned memory, from
    which it reaches a GPU without delay. Raises UserError for labels that are not integers.
    """
    if labels.is_floating_point() or labels.is_complex():
        raise UserError(f"labels must be whole numbers (given: {labels.dtype})", code="dtypes")
    flat = labels.detach().reshape(-1).cpu().numpy()
    positions = np.flatnonzero(flat != IGNORE)
    chosen = flat[positions]
    order = np.argsort(chosen, kind="stable")
    ordered = chosen[order]
    first = np.ones(len(ordered), dtype=bool)
    first[1:] = ordered[1:] != ordered[:-1]
    begins = np.flatnonzero(first)
    T, U = len(ordered), len(begins)
    packed = torch.empty(3 * T + U, dtype=torch.int64, pin_memory=pin)
    sorted_positions, sorted_labels, which, targets = np.split(packed.numpy(), [T, 2 * T, 3 * T])
    sorted_positions[:], sorted_labels[:] = positions[order], ordered
    which[:], targets[:] = np.cumsum(first) - 1, ordered[begins]
    counts = np.diff(begins, append=T)
    return TokenPlan(len(flat), sorted_positions, sorted_labels, which, targets, counts, packed)
