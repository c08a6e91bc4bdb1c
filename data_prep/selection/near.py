"""Which rows resemble each other: MinHash signatures, compared where they agree in a whole band.

A text has one signature. An instruction row has two, of what the user says and of the responses, and
resembles another where both do: rows that share a system message, a passage or examples are no duplicates of
each other as long as they teach other responses. A response of fewer than TELLING words says too little to
know a row by: then the user must say the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ..encoding.templates import Chat, Conversation
from ..sources.rows import Row, plain_text
from .arrow import array_of, bytes_of, lists_of, numbers_of
from .grams import WORD, mixed, split

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

PERMUTATIONS = 128
SHINGLE = 5  # words
TELLING = 10  # words
WHOLE = 1 << 40  # words in a shingle that is a whole text
BATCH = 1 << 12  # signatures that are held at once, half a KiB or one each
# Factors, odd, and summands, uint64 [PERMUTATIONS, 2].
_PERMUTED = mixed(np.arange(1, 2 * PERMUTATIONS + 1, dtype=np.uint64)).reshape(-1, 2)
_PERMUTED[:, 0] |= np.uint64(1)


def signatures(rows: Sequence[Row], kind: str) -> np.ndarray:
    """Return MinHash signatures of rows: uint32 [rows, 1 (text) or 2 (instruct), PERMUTATIONS]."""
    if kind == "text":
        return _signatures([plain_text(row) for row in rows], SHINGLE)[:, None]
    prompts, responses = zip(*map(_sides, rows), strict=True) if rows else ((), ())
    telling = split(responses).totals(len(rows)) >= TELLING * WORD
    signed = _signatures(prompts, np.where(telling, SHINGLE, WHOLE))
    return np.stack([signed, _signatures(responses, SHINGLE, salt=1)], axis=1)


def _sides(row: Row) -> tuple[str, str]:
    """Return what the user says and what the assistant says in an instruction row."""
    if isinstance(row, Conversation):
        prompts = "\n".join(f"{exchange.prompt}\n{exchange.input}" for exchange in row.exchanges)
        return prompts, "\n".join(exchange.response for exchange in row.exchanges)
    assert isinstance(row, Chat)
    texts: dict[str, list[str]] = {"user": [], "assistant": []}
    for message in json.loads(row.messages):
        parts = [message.get("reasoning_content"), message.get("content"), message.get("tool_calls")]
        spoken = [
            part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts if part
        ]
        texts.setdefault(message["role"], []).extend(spoken)
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

    Tagged by its salt, no shingle of a prompt is one of a response: the least of both is the signature of
    both together, which resemble each other where each does.
    """
    both = np.min(signed, axis=1)
    bands, width = band_shape(threshold)
    keys = np.zeros((len(both), bands), np.uint64)
    for number in range(width):
        keys = mixed((keys ^ both[:, number : bands * width : width]) + np.uint64(0x9E3779B97F4A7C15))
    return keys


def near_columns(signed: np.ndarray, usable: np.ndarray, threshold: float) -> dict[str, pa.Array]:
    """Return the columns of a part that rows are compared by, empty for those that are not usable.

    signed: signatures of the usable rows; usable: bool [rows].
    """
    keys, before = band_keys(signed, threshold), np.append(0, np.cumsum(usable))
    return {
        "signature": bytes_of(before * signed[:1].nbytes, signed.tobytes()),
        "bands": lists_of(before * keys.shape[1], keys.ravel()),
    }


def near_groups(db: DuckDBPyConnection, parts: str, threshold: float) -> None:
    """Make the table near(row, head) of the rows in `live` that resemble others, by chains too.

    parts: what selects row, signature and bands of all rows. Rows that agree in one whole band are compared,
    each with the first of its kind and with the one before; pairs whose estimated Jaccard similarity reaches
    the threshold belong to one group, named by its head.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    db.execute(f"""
        CREATE TEMP TABLE keys AS
            SELECT row, unnest(bands) AS key, generate_subscripts(bands, 1) AS band
            FROM ({parts}) WHERE row IN (SELECT row FROM live);
        CREATE TEMP TABLE pairs AS
            WITH alike AS (
                SELECT row, min(row) OVER (PARTITION BY band, key) AS head,
                    lag(row) OVER (PARTITION BY band, key ORDER BY row) AS before
                FROM keys
                WHERE (band, key) IN (SELECT (band, key) FROM keys GROUP BY band, key HAVING count(*) > 1))
            SELECT head AS first, row AS second FROM alike WHERE row > head
            UNION SELECT before, row FROM alike WHERE before > head""")
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
    """Return the number of bands and of values in each for which wrong and missed candidates are fewest.

    A pair of similarity s agrees in a band with probability 1 - (1 - s**width)**bands; the integrals of what
    is wrong of it on the two sides of the threshold are added, over similarities that are equally likely.
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
