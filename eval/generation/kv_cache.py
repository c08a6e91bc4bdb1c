"""Keys and values of a batch of sequences that start and end at different times.

All rows end in the same slot: a row with n tokens occupies the last n slots, and what lies before it is
masked. So a step writes one slot for everybody, a new row is put beside running ones by copying it to the
end, and rows that ended are dropped. Positions are the rows' own, whatever the slots.

Room is taken ahead and filled in place, where a cache that grows by one token per step is copied whole at
every step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicLayer

SPARE = 64  # slots taken ahead


class _Layer(DynamicLayer):
    """Buffers [B, heads, room, D] of which the first `used` slots count; `keys` and `values` show those."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.used = 0
        self.buffers = [states.new_empty((*states.shape[:2], 0, states.shape[3])) for states in
                        (key_states, value_states)]  # fmt: skip

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [B, heads, T, D]; returns everything so far, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.used + key_states.shape[2]
        if end > self.buffers[0].shape[2]:
            self.buffers = [_widened(b, self.used, end + SPARE) for b in self.buffers]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.used : end] = states
        return self._show(end)

    def _show(self, used: int) -> tuple[Tensor, Tensor]:
        self.used = used
        keys, values = (buffer[:, :, :used] for buffer in self.buffers)
        self.keys, self.values = keys, values
        return keys, values

    def rearrange(self, rows: Tensor | None, width: int) -> None:
        """Keep `rows` (None: all) and the last `width` slots, with empty ones in front of fewer."""
        copied = min(width, self.used)
        moved = []
        for buffer in self.buffers:
            live = buffer[:, :, self.used - copied : self.used]
            live = live if rows is None else live.index_select(0, rows)
            room = live.new_zeros((*live.shape[:2], width + SPARE, live.shape[3]))
            room[:, :, width - copied : width] = live
            moved.append(room)
        self.buffers = moved
        self._show(width)

    def append(self, other: _Layer) -> None:
        """Rows of `other`, which has the same width, behind those here."""
        pairs = zip(self.buffers, other.buffers, strict=True)
        self.buffers = [torch.cat([_widened(a, self.used, a.shape[2]), _widened(b, other.used, a.shape[2])])
                        for a, b in pairs]  # fmt: skip
        self._show(self.used)


def _widened(buffer: Tensor, used: int, room: int) -> Tensor:
    wide = buffer.new_zeros((*buffer.shape[:2], room, buffer.shape[3]))
    wide[:, :, :used] = buffer[:, :, :used]
    return wide


class RowCache(Cache):
    """A transformers cache whose rows can be dropped and added."""

    layers: list[_Layer]  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=_Layer)

    @property
    def width(self) -> int:
        """Slots in use."""
        return self.get_seq_length()

    def rearrange(self, rows: Tensor | None, width: int) -> None:
        """Keep `rows` (None: all), each in the last of `width` slots."""
        for layer in self.layers:
            layer.rearrange(rows, width)

    def append(self, other: RowCache) -> None:
        """Put the rows of a cache of the same width behind those here."""
        if not self.layers:
            self.layers = other.layers
            return
        for layer, added in zip(self.layers, other.layers, strict=True):
            layer.append(added)
