"""data.limit_tokens: the training rows that fit into a number of tokens, and their shards."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from emo.common.errors import UserError
from emo.common.parallel import WorkerPool

from ..config import TRAIN, DataConfig
from ..sources.reader import SourceReader
from .plan import COLUMNS, ROWS, Plan, PlannedRows, write_table


class _Selection(NamedTuple):
    """The training rows within the limit."""

    row: np.ndarray  # int64 [rows], in the order of `in_turn`
    copies: np.ndarray  # int64 [rows]
    shard: np.ndarray  # int64 [rows]
    blocks: np.ndarray  # int64 [shards]: complete blocks in each shard
    surplus: int  # text: blocks that are above the limit


def limit_tokens(config: DataConfig, plan: Plan, inputs: list[SourceReader], workers: WorkerPool) -> Plan:
    """Replace the rows of a plan by the first training rows of all sources, up to data.limit_tokens.

    The sources are used in proportion. Rows are assigned to the shards again, by their tokens. For text the
    summary then has a quota of tokens for each shard, whose sum is the limit in complete blocks. Instructions
    are not cut: less than one example is missing. All rows are held in memory, about 50 bytes each.

    Args:
        config: the data section of the recipe.
        plan: the plan without the limit. Its summary is changed.
        inputs: the readers of the sources.
        workers: count tokens, see `encode.counting`.
    """
    training = _all_rows(plan, 0, config.shards)
    turns = in_turn(np.unique(plan.inputs_of(training.row), return_inverse=True)[1])
    order = training.row[turns]
    copies = training.copies[turns].astype(np.int64)
    selected = _select(config, plan, inputs, workers, order, copies)
    if config.kind == "text":
        quotas = _trim(selected.blocks, selected.surplus) * config.sequence_len
        plan.summary["token_quotas"] = quotas.tolist()
    copies[: len(selected.row)] = selected.copies
    copies[len(selected.row) :] = 0
    _update_counts(plan, order, copies)
    used = np.flatnonzero(selected.copies)
    used = used[np.argsort(selected.row[used])]
    kept = PlannedRows(selected.row[used], selected.shard[used], selected.copies[used])
    others = plan.rows(config.shards, config.shards * len(config.splits))
    write_table(plan.path.with_name(ROWS), COLUMNS, itertools.chain([kept], others))
    return Plan(plan.path, plan.summary)


def _all_rows(plan: Plan, first: int, last: int) -> PlannedRows:
    """Return the rows of the shards from `first` to before `last`."""
    return PlannedRows(*map(np.concatenate, zip(*plan.rows(first, last), strict=True)))


def _select(
    config: DataConfig,
    plan: Plan,
    inputs: list[SourceReader],
    workers: WorkerPool,
    order: np.ndarray,
    copies: np.ndarray,
) -> _Selection:
    """Return the first rows of an order whose tokens fit into the limit. Raises UserError if none does.

    order, copies: int64 [rows], training rows and how often each is used.
    """
    limit = config.limit_tokens
    block = config.sequence_len
    is_text = config.kind == "text"
    assert limit is not None
    wanted = target = limit // block * block if is_text else limit
    step = max(256, 3 * limit * int(copies.sum()) // max(1, plan.summary["chars"][TRAIN]))
    tokens = np.zeros(0, np.int64)  # of one copy of each of the first rows
    while True:
        while len(tokens) < len(order) and int((tokens * copies[: len(tokens)]).sum()) < target:
            rows = order[len(tokens) : len(tokens) + step]
            counted = np.concatenate(list(workers.map(plan.read_once(inputs, np.sort(rows)))))
            tokens = np.append(tokens, counted[np.argsort(np.argsort(rows))])
        ends = np.cumsum(tokens * copies[: len(tokens)])
        if is_text:
            count = min(int(np.searchsorted(ends, target)) + 1, len(tokens))
            used = copies[:count]
        else:
            count, used = _fit_examples(limit, ends, tokens, copies)
        shard, blocks = _assign_shards(config, plan, inputs, order[:count], tokens[:count] * used)
        missing = wanted - int(blocks.sum()) * block
        if not is_text or missing <= 0 or count == len(order):
            break
        target = int(ends[count - 1]) + missing  # tokens lost at the ends of shards and domains
    if not used.any() or limit < (block if is_text else 1):
        required = f"a block has {block:,}" if is_text else f"the first example has {int(tokens[0]):,}"
        raise UserError(
            f"data.limit_tokens={limit} is too small: {required} tokens. Set that or more",
            code="limit-takes-nothing",
        )
    return _Selection(order[:count], used, shard, blocks, max(0, -missing // block))


def _fit_examples(
    limit: int, ends: np.ndarray, tokens: np.ndarray, copies: np.ndarray
) -> tuple[int, np.ndarray]:
    """Return how many examples are used, and the copies of each. The last may have fewer copies.

    ends, tokens: int64 [counted], the end of each example with its copies, and tokens of one copy.
    """
    count = int(np.searchsorted(ends, limit, side="right"))
    used = copies[: min(count + 1, len(tokens))].copy()
    if count < len(tokens):
        used[count] = (limit - (ends[count - 1] if count else 0)) // tokens[count]
    return len(used), used


def _update_counts(plan: Plan, rows: np.ndarray, copies: np.ndarray) -> None:
    """Update the summary of a plan. copies: int64 [rows], 0: the row is beyond the limit."""
    sources = plan.summary["sources"]
    numbers = plan.inputs_of(rows)
    dropped = np.bincount(numbers[copies == 0], minlength=len(sources)).tolist()
    used = np.bincount(numbers, copies, len(sources)).astype(np.int64).tolist()
    for source, fewer, count in zip(sources, dropped, used, strict=True):
        source[TRAIN] = count
        for rejected in (source["rejected"], plan.summary["rejected"]) if fewer else ():
            rejected["limit"] = rejected.get("limit", 0) + fewer


def _assign_shards(
    config: DataConfig, plan: Plan, inputs: list[SourceReader], rows: np.ndarray, amount: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the shard of each row, and the complete blocks in each shard.

    Each shard gets consecutive rows with about the same number of tokens.

    amount: int64 [rows], tokens of each row, copies included.
    """
    ascending = np.argsort(rows)
    begins = np.cumsum(amount[ascending]) - amount[ascending]
    shard = np.empty(len(rows), np.int64)
    # Rows without tokens may come last.
    shard[ascending] = np.minimum(begins * config.shards // max(1, int(amount.sum())), config.shards - 1)
    names = config.domains_of(TRAIN)
    domains = np.array([names.index(i.source.domain_name) if i.split == 0 else 0 for i in inputs])
    count = int(domains.max()) + 1
    group = shard * count + domains[plan.inputs_of(rows)]
    totals = np.bincount(group, amount, config.shards * count).astype(np.int64)
    return shard, (totals // config.sequence_len).reshape(config.shards, count).sum(axis=1)


def _trim(blocks: np.ndarray, surplus: int) -> np.ndarray:
    """Return the blocks of each shard, in total `surplus` fewer, removed from the longest shards."""
    total = int(blocks.sum()) - surplus
    levels = range(int(blocks.max()) + 1)
    level = bisect_right(levels, total, key=lambda x: int(np.minimum(blocks, x).sum())) - 1
    trimmed = np.minimum(blocks, level)
    trimmed[np.flatnonzero(blocks > level)[: total - int(trimmed.sum())]] += 1
    return trimmed


def in_turn(source: np.ndarray) -> np.ndarray:
    """Return an order of rows, int64 [rows], in which the sources take turns in proportion.

    Every beginning of the order has the first rows of each source. source: int [rows], ascending.
    """
    count = np.bincount(source)
    rank = np.arange(len(source)) - (np.cumsum(count) - count)[source]
    return np.argsort((rank + 0.5) / count[source], kind="stable")
