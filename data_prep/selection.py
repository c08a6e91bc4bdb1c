"""Which rows are used, how often, and in which shard: pure arithmetic on hashes and counts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from data_prep import dedup
from data_prep.config import DataConfig
from data_prep.rows import REASONS

CODE = {reason: code for code, reason in enumerate(REASONS)}
_SPLIT_SALT, _WEIGHT_SALT = 1, 2


class Looks(NamedTuple):
    """All rows of all sources, in order."""

    source: np.ndarray  # int64 [rows]: input that the row is from
    hashes: np.ndarray  # uint64 [rows]
    chars: np.ndarray  # int64 [rows]
    reasons: np.ndarray  # uint8 [rows]: index into REASONS; 0: usable. Changed in place by `choose`
    signatures: np.ndarray  # uint32 [usable rows, permutations], or [0, 0]


class Choice(NamedTuple):
    """What becomes of each row."""

    shard: np.ndarray  # int32 [rows]: training shards, then validation shards; -1: unused
    copies: np.ndarray  # uint16 [rows]


def choose(rows: Looks, config: DataConfig, weights: np.ndarray, held_out: np.ndarray) -> Choice:
    """Deduplicate, split, weigh, limit and deal out.

    weights: float [inputs]; held_out: bool [inputs], inputs of validation sources. Every decision is
    written into rows.reasons. Of equal rows the first stays, so that a validation row that also stands in
    the training sources is dropped.
    """
    reasons = rows.reasons
    if config.dedup == "near":
        usable = np.flatnonzero(reasons == 0)
        again = dedup.near_duplicates(rows.signatures, config.near_threshold)
        reasons[usable[again]] = CODE["near_duplicate"]
    if config.dedup != "none":
        usable = np.flatnonzero((reasons == 0) | (reasons == CODE["near_duplicate"]))
        _, first = np.unique(rows.hashes[usable], return_index=True)
        again = np.ones(len(usable), bool)
        again[first] = False
        reasons[usable[again]] = CODE["duplicate"]

    validation = held_out[rows.source]
    if config.validation_fraction:
        validation = _uniform(rows.hashes, config.seed, _SPLIT_SALT) < config.validation_fraction
    weight = weights[rows.source]
    draw = _uniform(rows.hashes, config.seed, _WEIGHT_SALT)
    copies = (np.floor(weight) + (draw < weight % 1)).astype(np.uint16)
    reasons[(reasons == 0) & (copies == 0)] = CODE["weight"]
    if config.limit_rows is not None:
        _limit(rows, reasons, ~validation, config.limit_rows)
    shard = np.full(len(reasons), -1, np.int32)
    for split, members in enumerate((~validation, validation)):
        used = np.flatnonzero((reasons == 0) & members)
        amount = rows.chars[used].astype(np.int64) * copies[used]
        before = np.cumsum(amount) - amount
        dealt = before * config.shards // max(1, int(amount.sum()))
        shard[used] = split * config.shards + dealt
    return Choice(shard, np.where(shard >= 0, copies, 0).astype(np.uint16))


def _limit(rows: Looks, reasons: np.ndarray, members: np.ndarray, limit: int) -> None:
    """Keep `limit` usable rows: of each source its first ones, in proportion to what it has."""
    used = np.flatnonzero((reasons == 0) & members)
    if len(used) <= limit:
        return
    have = np.bincount(rows.source[used])
    exact = have * (limit / len(used))
    keep = np.floor(exact).astype(int)
    for source in np.argsort(keep - exact, kind="stable")[: limit - keep.sum()]:
        keep[source] += 1
    rank = np.arange(len(used)) - (np.cumsum(have) - have)[rows.source[used]]
    reasons[used[rank >= keep[rows.source[used]]]] = CODE["limit"]


def _uniform(hashes: np.ndarray, seed: int, salt: int) -> np.ndarray:
    """A number in [0, 1) for each content hash, independent for each salt (splitmix64's finaliser)."""
    mixed = hashes + np.uint64((seed * 4 + salt) * 0x9E3779B97F4A7C15 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) / 2.0**64
