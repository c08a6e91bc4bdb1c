"""Near duplicates: MinHash signatures of rows, compared if they agree in a complete band.

A text has one signature. An instruction row has two, of the prompts and of the responses, and both must be
similar. Rows that share a system message, a passage or examples are no duplicates if they teach other
responses. A response of fewer than MIN_RESPONSE words is too short to compare: then the prompts must be
equal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ..encoding.templates import Chat, Conversation
from ..sources.rows import plain_text
from ..sources.spec import Row
from .arrow import array_of, bytes_of, lists_of, numbers_of
from .grams import WORD, mixed, split

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

PERMUTATIONS = 128
SHINGLE = 5  # words
MIN_RESPONSE = 10  # words
UNLIMITED = 1 << 40  # words in a shingle that is a complete text
BATCH = 1 << 12  # pairs that are compared at once, with up to 1 KiB of signatures each
# Factors, odd, and summands, uint64 [PERMUTATIONS, 2].
_PERMUTED = mixed(np.arange(1, 2 * PERMUTATIONS + 1, dtype=np.uint64)).reshape(-1, 2)
_PERMUTED[:, 0] |= np.uint64(1)


def signatures(rows: Sequence[Row], kind: str) -> np.ndarray:
    """Return MinHash signatures of rows: uint32 [rows, 1 (text) or 2 (instruct), PERMUTATIONS]."""
    if kind == "text":
        return _signatures([plain_text(row) for row in rows], SHINGLE)[:, None]
    prompts, responses = zip(*map(_prompt_and_response, rows), strict=True) if rows else ((), ())
    comparable = split(responses).totals(len(rows)) >= MIN_RESPONSE * WORD
    signed = _signatures(prompts, np.where(comparable, SHINGLE, UNLIMITED))
    return np.stack([signed, _signatures(responses, SHINGLE, salt=1)], axis=1)


def _prompt_and_response(row: Row) -> tuple[str, str]:
    """Return the text of the user and the text of the assistant in an instruction row."""
    if isinstance(row, Conversation):
        prompts = "\n".join(f"{exchange.prompt}\n{exchange.input}" for exchange in row.exchanges)
        return prompts, "\n".join(exchange.response for exchange in row.exchanges)
    assert isinstance(row, Chat)
    texts: dict[str, list[str]] = {"user": [], "assistant": []}
    for message in json.loads(row.messages):
        parts = [message.get("reasoning_content"), message.get("content"), message.get("tool_calls")]
        texts.setdefault(message["role"], []).extend(
            part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts if part
        )
    return "\n".join(texts["user"]), "\n".join(texts["assistant"])


def _signatures(texts: Sequence[str], words: int | np.ndarray, salt: int = 0) -> np.ndarray:
    """Return the MinHash of each text's runs of `words` words, uint32 [texts, PERMUTATIONS]."""
    hashes, text = split(texts, punctuation=True).grams(words, short=True)
    hashes = mixed(hashes + np.uint64(salt))
    minima = np.full((len(texts), PERMUTATIONS), 2**32 - 1, np.uint32)
    if len(hashes):
        owners, begins = np.unique(text, return_index=True)
        for number, (factor, summand) in enumerate(_PERMUTED):
            values = ((hashes * factor + summand) >> np.uint64(32)).astype(np.uint32)
            minima[owners, number] = np.minimum.reduceat(values, begins)
    return minima


def band_keys(signed: np.ndarray, threshold: float) -> np.ndarray:
    """Return a hash of each band of rows, uint64 [rows, bands].

    The salt makes the shingles of prompts and responses different, so the minimum of both signatures is the
    signature of both together.
    """
    both = np.min(signed, axis=1)
    bands, width = band_shape(threshold)
    keys = np.zeros((len(both), bands), np.uint64)
    for number in range(width):
        keys = mixed((keys ^ both[:, number : bands * width : width]) + np.uint64(0x9E3779B97F4A7C15))
    return keys


def near_columns(signed: np.ndarray, usable: np.ndarray, threshold: float) -> dict[str, pa.Array]:
    """Return the columns by which rows are compared, empty for rows that are not usable.

    signed: signatures of the usable rows; usable: bool [rows].
    """
    keys = band_keys(signed, threshold)
    before = np.append(0, np.cumsum(usable))
    return {
        "signature": bytes_of(before * signed[:1].nbytes, signed.tobytes()),
        "bands": lists_of(before * keys.shape[1], keys.ravel()),
    }


def near_groups(db: DuckDBPyConnection, parts: str, threshold: float) -> None:
    """Make the table near(row, head) of the rows in `live` similar to others, directly or by a chain.

    parts: a query of row, signature and bands of all rows. Rows that agree in a complete band are compared
    with the first such row and with the one before. Pairs whose estimated Jaccard similarity reaches the
    threshold belong to one group, which is named by its head.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    db.execute(f"""
        CREATE TEMP TABLE keys AS
            SELECT row, unnest(bands) AS key, generate_subscripts(bands, 1) AS band
            FROM ({parts}) WHERE row IN (SELECT row FROM live);
        CREATE TEMP TABLE pairs AS
            WITH agreeing AS (
                SELECT row, min(row) OVER (PARTITION BY band, key) AS head,
                    lag(row) OVER (PARTITION BY band, key ORDER BY row) AS before
                FROM keys
                WHERE (band, key) IN (SELECT (band, key) FROM keys GROUP BY band, key HAVING count(*) > 1))
            SELECT head AS first, row AS second FROM agreeing WHERE row > head
            UNION SELECT before, row FROM agreeing WHERE before > head""")
    compared = f"""
        SELECT first, second, a.signature, b.signature FROM pairs
        JOIN ({parts}) a ON a.row = first JOIN ({parts}) b ON b.row = second"""
    edges = [np.zeros((0, 2), np.int64)]
    for batch in db.sql(compared).to_arrow_reader(BATCH):
        pairs = np.stack([numbers_of(batch.column(number)) for number in (0, 1)], axis=1)
        signed, other = (
            np.frombuffer(b"".join(batch.column(number).to_pylist()), np.uint32) for number in (2, 3)
        )
        same = (signed == other).reshape(len(pairs), -1, PERMUTATIONS).mean(axis=2)
        edges.append(pairs[(same >= threshold).all(axis=1)])
    db.execute("DROP TABLE keys; DROP TABLE pairs")
    rows, ends = np.unique(np.concatenate(edges), return_inverse=True)
    first, second = ends.reshape(-1, 2).T
    graph = coo_array((np.ones(len(first), bool), (first, second)), (len(rows), len(rows)))
    groups = connected_components(graph, directed=False)[1] if len(rows) else rows
    db.register("groups", pa.Table.from_arrays([array_of(rows), array_of(groups)], names=["row", "head"]))
    db.execute("CREATE TEMP TABLE near AS SELECT * FROM groups")


@cache
def band_shape(threshold: float) -> tuple[int, int]:
    """Return the number of bands, and of values in each, with the fewest wrong and missed candidates.

    A pair of similarity s agrees in a band with probability 1 - (1 - s**width)**bands. The error is
    integrated on both sides of the threshold, with all similarities equally likely.
    """
    below = (np.arange(0, threshold, 0.001) + 0.0005)[:, None]
    above = (np.arange(threshold, 1, 0.001) + 0.0005)[:, None]
    best = (np.inf, 1, PERMUTATIONS)
    for bands in range(1, PERMUTATIONS + 1):
        widths = np.arange(1, PERMUTATIONS // bands + 1)
        wrong = (1 - (1 - below**widths) ** bands).sum(axis=0)
        missed = ((1 - above**widths) ** bands).sum(axis=0)
        index = int(np.argmin(wrong + missed))
        best = min(best, (float((wrong + missed)[index]), bands, int(widths[index])))
    return best[1:]
