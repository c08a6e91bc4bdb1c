"""Choose the coefficient of a merge by the loss on a prepared development set."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from emo.common.causal_lm import IGNORE
from emo.common.cli.progress import show_activity
from emo.common.errors import UserError
from emo.common.io.weights import load_causal_lm, load_model_config
from emo.data_prep.shards.format import TokenDataset

from ...engine.device.devices import on_gpu
from ...loss.models.head import WEIGHTS
from ...model.build import check_fits
from ...model.config import ModelConfig
from ...model.merging import Merge, merge_models
from ..documents import Change, Documents, compute_change, group_by_document

COEFFICIENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
ROWS = 512  # of the set, as in validation


class Trial(NamedTuple):
    """A coefficient and the loss of its merged model."""

    coefficient: float
    nll: float  # nats per token
    change: Change | None  # from the best trial, paired by document. None for the best


def choose_merge(
    models: Sequence[Path], base: Path | None, make: Callable[[float], Merge], data: Path, target: Path
) -> list[Trial]:
    """Merge with each coefficient, and keep the model with the lowest loss as `target`.

    Args:
        models: As in `merge_models`.
        base: As in `merge_models`.
        make: Returns the merge of a coefficient.
        data: Directory of a prepared set with the tokenizer of the models.
        target: Directory to create.

    Raises the errors of `merge_models`, and UserError if the data do not fit the models.
    """
    if target.exists():
        raise UserError(f"{target} exists. Give a new directory", code="export-target")
    rows = TokenDataset(data)
    model = ModelConfig.model_validate({"path": str(models[-1]), "dtype": "float32"})
    check_fits(load_model_config(models[-1]), model, rows.manifest)
    measured: dict[float, Documents] = {}
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as work:
        candidate, kept = Path(work, "candidate"), Path(work, "best")
        for coefficient in COEFFICIENTS:
            shutil.rmtree(candidate, ignore_errors=True)
            merge_models(models, base, make(coefficient), candidate)
            measured[coefficient] = measure_model(candidate, rows)
            if min(measured, key=lambda c: _loss(measured[c])) == coefficient:
                shutil.rmtree(kept, ignore_errors=True)
                candidate.rename(kept)
        kept.rename(target)
    best = min(measured, key=lambda c: _loss(measured[c]))
    return [
        Trial(c, _loss(found), None if c == best else compute_change(measured[best], found))
        for c, found in measured.items()
    ]


def _loss(measured: Documents) -> float:
    return float(measured.nll.sum() / measured.tokens.sum())


@torch.no_grad()
def measure_model(directory: Path, data: TokenDataset) -> Documents:
    """Return the NLL of each document in the first rows of a prepared set."""
    model: Any = load_causal_lm(directory, dtype="auto").model.eval()
    if on_gpu():
        model.cuda()
    sources, nll, tokens = [], [], []
    count = min(ROWS, len(data))
    with show_activity("measuring", count, "row") as advance:
        for row in range(count):
            batch = data.batch(np.array([row]))
            batch.setdefault(WEIGHTS, np.ones(batch["labels"].shape, np.float32))
            start = 0
            for ids, source in zip(data.documents_of(row), data.sources_of(row), strict=True):
                part = slice(start, start + len(ids))
                start += len(ids)
                inputs, labels, weights = (
                    torch.from_numpy(batch[key][:, part]).to(model.device)
                    for key in ("input_ids", "labels", WEIGHTS)
                )
                logits = model(input_ids=inputs, use_cache=False).logits[0].float()
                loss = torch.nn.functional.cross_entropy(
                    logits, labels[0], ignore_index=IGNORE, reduction="none"
                )
                sources.append(source)
                nll.append(torch.dot(loss, weights[0]).item())
                tokens.append(weights[labels != IGNORE].sum().item())
            advance(1)
    return group_by_document(data.fingerprint, np.array(sources, np.uint64), np.array(nll), np.array(tokens))
