"""The start-up check of rows that several ranks share: their losses are those of complete rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from emo.common.errors import UserError

from ..engine.engine import Engine
from ..engine.sequence import KEY
from ..loss.models.head import WEIGHTS
from ..loss.models.probe import evaluating_cross_entropy
from .loader import make_micro_batch

LENGTH = 1024  # tokens that are compared
TOLERANCE = {False: 1e-4, True: 2e-2}  # relative, of the losses by token; True: half precision


@torch.no_grad()
def check_shared_rows(engine: Engine, row: dict[str, np.ndarray]) -> None:
    """Raise UserError if the losses of a shared row differ from those of the complete row.

    All ranks must call with the same arrays [1, L].
    """
    world = engine.world
    n = world.sequence
    size = min(row["labels"].shape[1], LENGTH) // n
    arrays = {name: array[:, : size * n].copy() for name, array in row.items() if name != WEIGHTS}
    arrays["labels"] = np.roll(arrays["input_ids"], -1, axis=1)  # losses everywhere, also of prompts
    model: Any = engine.model
    head = model.get_output_embeddings()
    with evaluating_cross_entropy(engine.ds, model):
        head.spec = replace(head.spec, by_token=True)
        complete, part = (
            engine.ds(**engine.to_device(make_micro_batch(arrays, *cut))).by_token[1]
            for cut in ((0, 1), (world.part, n))
        )
    difference = part - complete[world.part * size :][:size]
    error = difference.norm() / complete.norm().clamp(min=1e-6)
    error = error.float().nan_to_num(nan=math.inf)
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    if float(error) > TOLERANCE[head.weight.element_size() == 2]:
        problem = f"{KEY}={n} changes the losses of this model by {float(error):.2g} of their size"
        raise UserError(f"{problem}. Set it to 1", code="sequence-differs")
