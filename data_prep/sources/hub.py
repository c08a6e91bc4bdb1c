"""Reader of data sets of the `datasets` library: from the hub, or saved with `save_to_disk`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from emo.common.errors import UserError, one_line
from emo.common.io.files import sha256

from .reader import PIECE_ROWS, TableReader, convert_rows


def is_saved(path: Path) -> bool:
    """Return whether `save_to_disk` of a `datasets.Dataset` or `DatasetDict` wrote a directory."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


class DatasetReader(TableReader):
    """Reads a hub data set or, if it has a path, a data set that was saved there."""

    def rows(self, start: int) -> Iterator[Any]:
        names = self._dataset.column_names
        # Other columns may have images, which would be decoded.
        dataset = self._dataset.with_format(None).select_columns(self.spec.wanted(names))
        nulls = dict.fromkeys(names)

        def convert(begin: int, end: int) -> list[Any]:
            columns = dataset[begin:end]
            return [
                nulls | dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
            ]

        for begin in range(start, len(dataset), PIECE_ROWS):
            yield from convert_rows(convert, begin, min(begin + PIECE_ROWS, len(dataset)))

    def can_skip(self, end: int, start: int) -> bool:
        return start != end  # `skip` takes no time

    def pinned(self) -> dict[str, object]:
        if self.path is None:
            return {"revision": self.source.revision or "not pinned"}
        digests = [sha256(Path(file["filename"])) for file in self._dataset.cache_files]
        return {"sha256": hashlib.sha256("".join(digests).encode()).hexdigest()}

    @cached_property
    def _dataset(self) -> Any:
        import datasets

        source = self.source
        datasets.disable_progress_bars()
        try:
            if self.path is None:
                return datasets.load_dataset(
                    source.hub, source.config, split=source.split, revision=source.revision
                )
            return _take_split(datasets.load_from_disk(str(self.path)), source.split)
        except Exception as error:  # offline, unknown, gated, damaged, no such split: many classes
            kind = "hub data set" if self.path is None else "saved data set"
            raise UserError(
                f"{kind} {self.name} cannot be loaded ({one_line(error, 240)}). Check the name, config and "
                "split, connect to the network once, or use files instead",
                code="hub",
            ) from None


def _take_split(saved: Any, split: str) -> Any:
    """Return a split of a saved data set, or a slice of it such as train[:10%]."""
    import datasets

    if isinstance(saved, datasets.DatasetDict):
        splits = dict(saved)
    else:
        splits = dict.fromkeys(("train", str(saved.split)), saved)
    lengths = {name: len(part) for name, part in splits.items()}
    ranges = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    parts = [splits[part.splitname].select(range(part.from_, part.to)) for part in ranges]
    return datasets.concatenate_datasets(parts)
