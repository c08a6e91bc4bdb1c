"""Packed rows as the trainer gets them, and the documents in them."""

from __future__ import annotations

import torch
from torch import Tensor

from emo.common.causal_lm import IGNORE
from tests.helpers.families import VOCAB

ROWS = ([5, 9, 1, 7], [13, 4], [22])  # tokens of each document. The rest of a row is padding
WIDTH = 22


def packed_rows() -> tuple[Tensor, Tensor, Tensor]:
    """Return the ids, shifted labels and positions of packed rows, each [b, L]."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.zeros(len(ROWS), WIDTH, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORE)
    positions = torch.empty_like(ids)
    for row, lengths in enumerate(ROWS):
        start = 0
        for length in lengths:
            document = torch.randint(1, VOCAB, (length,), generator=generator)
            ids[row, start : start + length] = document
            labels[row, start : start + length - 1] = document[1:]
            positions[row, start : start + length] = torch.arange(length)
            start += length
        positions[row, start:] = torch.arange(WIDTH - start)
    return ids, labels, positions


def documents(ids: Tensor) -> list[Tensor]:
    """Return the documents of `packed_rows` that have more than one token, without padding."""
    parts: list[Tensor] = []
    for row, lengths in zip(ids, ROWS, strict=True):
        parts += row[: sum(lengths)].split_with_sizes(lengths)
    return [part for part in parts if len(part) > 1]
