"""data.limit_tokens: the training rows that fit into a number of tokens, decided with the tokenizer."""

from __future__ import annotations

import json
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from emo.common.parallel import Workers
from emo.data_prep.arrow import array_of
from emo.data_prep.config import TRAIN, DataConfig
from emo.data_prep.inputs import Input
from emo.data_prep.plan import GROUP, ROWS, Plan


def limit_tokens(config: DataConfig, plan: Plan, inputs: list[Input], workers: Workers, path: Path) -> Plan:
    """Return the plan with the training rows that data.limit_tokens takes: of each source its first ones, in
    proportion; its rows are written to `path`.

    `workers` count, see `encode.counting`. Rows are dealt to the shards anew, by their tokens. For text the
    summary then has a quota of tokens for each shard, whose sum is the limit in whole blocks. Instructions
    are not cut: less than one example is missing. The plan is held in memory, some 50 bytes a row.
    """
    limit = config.limit_tokens
    assert limit is not None
    training = plan.rows(0, config.shards)
    turns = in_turn(np.unique(plan.inputs_of(training.row), return_inverse=True)[1])
    order, copies = training.row[turns], training.copies[turns].astype(np.int64)
    step = max(256, 3 * limit * int(copies.sum()) // max(1, plan.summary["chars"][TRAIN]))
    tokens = np.zeros(0, np.int64)  # of one copy of the first rows in this order
    want = target = limit // config.sequence_len * config.sequence_len if config.kind == "text" else limit
    quotas = None
    while True:
        while len(tokens) < len(order) and int((tokens * copies[: len(tokens)]).sum()) < target:
            rows = order[len(tokens) : len(tokens) + step]
            counted = np.concatenate(list(workers.map(plan.once(inputs, np.sort(rows)))))
            tokens = np.append(tokens, counted[np.argsort(np.argsort(rows))])
        ends = np.cumsum(tokens * copies[: len(tokens)])
        if config.kind == "instruct":
            count = int(np.searchsorted(ends, limit, side="right"))
            if count < len(tokens):  # some copies of the next
                copies[count] = (limit - (ends[count - 1] if count else 0)) // tokens[count]
            count = min(count + 1, len(tokens))
            shard, _ = _dealt(config, plan, inputs, order[:count], (tokens * copies[: len(tokens)])[:count])
            break
        count = min(int(np.searchsorted(ends, target)) + 1, len(tokens))
        shard, blocks = _dealt(config, plan, inputs, order[:count], (tokens * copies[: len(tokens)])[:count])
        short = want - int(blocks.sum()) * config.sequence_len
        if short <= 0 or count == len(order):
            quotas = (_trimmed(blocks, max(0, -short // config.sequence_len)) * config.sequence_len).tolist()
            break
        target = int(ends[count - 1]) + short  # what the ends of shards and domains lose
    copies[count:] = 0
    summary = _restricted(plan, order, copies)
    if quotas is not None:
        summary["token_quotas"] = quotas
    used = np.flatnonzero(copies[:count])
    used = used[np.argsort(order[used])]
    others = plan.rows(config.shards, config.shards * len(config.splits))
    columns = zip(
        (order[used], shard[used].astype(np.int32), copies[used].astype(np.uint16)), others, strict=True
    )
    table = pa.Table.from_arrays([array_of(np.concatenate(pair)) for pair in columns], list(ROWS))
    pq.write_table(table, path, row_group_size=GROUP)
    return Plan(path, plan.pieces, summary)


def _dealt(
    config: DataConfig, plan: Plan, inputs: list[Input], rows: np.ndarray, amount: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the shard of each row, dealt by their amounts of tokens, and the whole blocks in each shard."""
    ascending = np.argsort(rows)
    dealt = np.empty(len(rows), np.int64)
    # Rows without tokens may come last.
    dealt[ascending] = np.minimum(deal(amount[ascending], config.shards), config.shards - 1)
    names = config.domains_of(TRAIN)
    domains = np.array([names.index(i.source.domain_name) if i.split == 0 else 0 for i in inputs])
    count = int(domains.max()) + 1
    group = dealt * count + domains[plan.inputs_of(rows)]
    whole = np.bincount(group, amount, config.shards * count).astype(np.int64)
    return dealt, (whole // config.sequence_len).reshape(config.shards, count).sum(axis=1)


def _restricted(plan: Plan, rows: np.ndarray, copies: np.ndarray) -> dict[str, Any]:
    """Return the plan's summary when training rows are used `copies` times, those with none left out."""
    summary: dict[str, Any] = json.loads(json.dumps(plan.summary))
    sources, inputs = summary["sources"], plan.inputs_of(rows)
    gone = np.bincount(inputs[copies == 0], minlength=len(sources)).tolist()
    times = np.bincount(inputs, copies, len(sources)).tolist()
    for source, fewer, used in zip(sources, gone, times, strict=True):
        source[TRAIN] = int(used)
        for rejected in (source["rejected"], summary["rejected"]) if fewer else ():
            rejected["limit"] = rejected.get("limit", 0) + fewer
    return summary


def _trimmed(blocks: np.ndarray, surplus: int) -> np.ndarray:
    """Return the blocks of each shard with `surplus` less in all, taken from the longest."""
    total = int(blocks.sum()) - surplus
    level = (
        bisect_right(range(int(blocks.max()) + 1), total, key=lambda x: int(np.minimum(blocks, x).sum())) - 1
    )
    trimmed = np.minimum(blocks, level)
    trimmed[np.flatnonzero(blocks > level)[: total - int(trimmed.sum())]] += 1
    return trimmed


def deal(amount: np.ndarray, shards: int) -> np.ndarray:
    """Return the shard of each row, int64 [rows]: consecutive rows of about equal amounts in all.

    amount: int64 [rows], characters or tokens.
    """
    begins = np.cumsum(amount) - amount
    return begins * shards // max(1, int(amount.sum()))


def in_turn(source: np.ndarray) -> np.ndarray:
    """Return an order of rows, int64 [rows]: any beginning has each source's first rows in proportion.

    source: int [rows], ascending.
    """
    have = np.bincount(source)
    rank = np.arange(len(source)) - (np.cumsum(have) - have)[source]
    return np.argsort((rank + 0.5) / have[source], kind="stable")
