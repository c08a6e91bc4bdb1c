"""Scanned rows made from arrays, and a reference that selects rows in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from emo.data_prep.config import DataConfig
from emo.data_prep.selection.arrow import array_of
from emo.data_prep.selection.scan import PartNote, ScanPart, batch_of, draw_copies, read_part, write_part
from emo.data_prep.selection.similarity.near import band_shape, near_columns
from emo.data_prep.sources.spec import CODE


def parts_of(
    directory: Path, config: DataConfig, source: np.ndarray, hashes: np.ndarray, chars: np.ndarray,
    reasons: np.ndarray, signatures: np.ndarray, weights: list[int], splits: list[int], size: int,
) -> list[ScanPart]:  # fmt: skip
    """Write and return parts of `size` rows. A part has a piece for each source in it."""
    near = config.dedup == "near"
    parts = []
    for number, start in enumerate(range(0, len(hashes), size)):
        stretch = slice(start, start + size)
        inputs, begins = np.unique(source[stretch], return_index=True)
        bounds = [*(start + begins).tolist(), min(start + size, len(hashes))]
        note: PartNote = {"key": "", "broken": False, "pieces": [], "inputs": []}
        batches = []
        for i, first, last in zip(inputs.tolist(), bounds, bounds[1:], strict=False):
            member = hashes[first:last].astype(np.uint64)
            columns = draw_copies(i, member, member, weights[i], splits[i], config)
            columns |= {"hash": member, "chars": chars[first:last].astype(np.uint32)}
            columns |= {"reason": reasons[first:last].astype(np.uint8)}
            rows = {name: array_of(values) for name, values in columns.items()}
            if near:
                usable = reasons[first:last] == 0
                signed = signatures[first:last][usable].astype(np.uint32)
                rows |= near_columns(signed, usable, config.near_threshold)
            batches.append(batch_of(rows))
            note["pieces"].append([i, 0, 0, last - first, 0])
        path = directory / f"{number}.parquet"
        write_part(path, near, batches, note)
        part = read_part(path, "", strict=True)
        assert part is not None
        parts.append(part)
    return parts


def select_in_memory(
    config: DataConfig, weights: list[int], splits: list[int], source: np.ndarray, hashes: np.ndarray,
    chars: np.ndarray, reasons: np.ndarray, signatures: np.ndarray,
) -> tuple[list[tuple[int, int, int]], list[int]]:  # fmt: skip
    """Return shard, row and copies of each selected row, and the reasons of all rows, by definition."""
    reason = reasons.tolist()
    copies, split = ([values[number] for number in source] for values in (weights, splits))

    def live() -> list[int]:
        return [row for row in range(len(reason)) if not reason[row]]

    def keep_best(groups: dict[int, int], code: int) -> None:
        """Keep the best row of each group in the first split, or in every split if the first has none."""
        for group in set(groups.values()):
            members = sorted((split[row], -copies[row], row) for row in groups if groups[row] == group)
            first: set[int] = set()
            for number, _, row in members:
                if number in first or 0 in first:
                    reason[row] = code
                first.add(number)

    if config.dedup != "none":
        keep_best({row: int(hashes[row]) for row in live()}, CODE["duplicate"])
    if config.dedup == "near":
        keep_best(_components(live(), signatures, config.near_threshold), CODE["near_duplicate"])
    taken = []
    for number in range(len(config.splits)):
        rows = [row for row in live() if split[row] == number]
        total, before = sum(int(chars[row]) * copies[row] for row in rows), 0
        for row in rows:
            taken.append((number * config.shards + before * config.shards // max(1, total), row, copies[row]))
            before += int(chars[row]) * copies[row]
    return sorted(taken), reason


def _components(rows: list[int], signatures: np.ndarray, threshold: float) -> dict[int, int]:
    """Return the group of each row. Similar rows share a group.

    Each row is compared with the first and the last earlier row of equal values in a band. signatures: uint32
    [rows, 1 or 2, PERMUTATIONS]. Bands use the minimum over axis 1. All signatures of two rows must match.
    """
    both = signatures.min(axis=1)
    bands, width = band_shape(threshold)
    group = {row: row for row in rows}
    for band in range(bands):
        alike: dict[bytes, list[int]] = {}
        for row in rows:
            others = alike.setdefault(both[row, band * width : (band + 1) * width].tobytes(), [])
            for other in (others[0], others[-1]) if others else ():
                same = (signatures[row] == signatures[other]).mean(axis=1)
                if (same >= threshold).all() and group[row] != group[other]:
                    old, new = max(group[row], group[other]), min(group[row], group[other])
                    group = {member: new if number == old else number for member, number in group.items()}
            others.append(row)
    return group
