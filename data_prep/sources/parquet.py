"""Reader of .parquet files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from emo.common.errors import UserError, one_line

from .addresses import RemoteFile
from .reader import PIECE_ROWS, TableReader


class ParquetReader(TableReader):
    """Reads a parquet file. Reading can begin at any row group."""

    _read_share = 0.0  # from 0 to 1
    _group_ends: tuple[int, ...] = ()  # the row after the last of each row group

    def rows(self, start: int) -> Iterator[Any]:
        import pyarrow.parquet

        number = start
        try:
            opened = self.path.open(at_random=True) if isinstance(self.path, RemoteFile) else self.path
            file = pyarrow.parquet.ParquetFile(opened)
            groups = range(file.num_row_groups)
            self._group_ends = tuple(accumulate(file.metadata.row_group(i).num_rows for i in groups))
            first = bisect_right(self._group_ends, start)
            start -= self._group_ends[first - 1] if first else 0
            for batch in file.iter_batches(PIECE_ROWS, row_groups=groups[first:]):
                yield from batch.slice(start).to_pylist(maps_as_pydicts="strict")
                number += max(0, batch.num_rows - start)
                start = max(0, start - batch.num_rows)
                self._read_share = number / file.metadata.num_rows
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:
            raise UserError(
                f"{self.name} is not a readable parquet file ({one_line(error, 200)})", code="damaged-file"
            ) from None

    def position(self) -> int:
        return int(self._read_share * self.size)

    def can_skip(self, end: int, start: int) -> bool:
        return bisect_right(self._group_ends, start) > bisect_right(self._group_ends, end)
