"""Measurement of a validation set."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...batches.loader import Batches, rank_rows
from ...control.world import gather_objects
from ...engine.engine import Engine
from ...engine.totals import StepTotals
from ...loss.models.head import MicroBatch
from ...model.objective.build import Losses, measuring
from ..documents import Documents, group_by_document

Base = Callable[[np.ndarray], MicroBatch]  # returns a model's inputs for its KL from the base, by rows


def measure_set(
    engine: Engine, losses: Losses, step: int, validation: Batches, max_rows: int, base: Base | None = None
) -> tuple[StepTotals, Documents]:
    """Measure the first rows of a validation set. Return totals, and the NLL of each document.

    All ranks must call. They read equally many micro-batches, so the rows of the ranks follow one another.

    Args:
        engine: The engine of the model.
        losses: The objective, and the costs for DEMD.
        step: The optimizer step whose objective is measured, counted from 0.
        validation: The rows of the set.
        max_rows: Largest number of rows to measure.
        base: Provides the model before training. None: do not measure the divergence from it.
    """
    world = engine.world
    data = validation.data
    rows = np.arange(min(len(data), max_rows))
    local, real = rank_rows(rows, world.replica, world.replicas, validation.micro)
    batches = validation.read(local, real)
    if base is not None:
        parts = np.split(np.arange(len(local)), range(validation.micro, len(local), validation.micro))
        batches = (batch | base(local[part][real[part]]) for batch, part in zip(batches, parts, strict=True))
    with measuring(engine.model, losses, step):
        totals, *columns = engine.evaluate(batches)
    totals = totals._replace(weight=data.weight[rows].sum().item())
    first = range(0, world.ranks, world.sequence)  # ranks that share rows have parts of the same documents
    nll, tokens = (
        np.concatenate([sum(parts[i : i + world.sequence]) for i in first])
        for parts in zip(*gather_objects(columns), strict=True)
    )
    sources = []  # document of each segment, in the order of the ranks
    ordered, _ = rank_rows(rows, 0, 1, world.replicas * validation.micro)
    for row in ordered.tolist():
        padding = int(data.tokens_of(row) < data.manifest.block)  # a segment without a document
        sources.append(np.append(data.sources_of(row), np.zeros(padding, np.uint64)))
    return totals, group_by_document(data.fingerprint, np.concatenate(sources), nll, tokens)
