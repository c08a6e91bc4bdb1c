"""Retrievers of demonstrations: an exact dense search with cached embeddings, and OpenICL's retrievers.

The dense search orders equal scores by row, because repeated texts are common. Its result does not depend on
batch sizes, thread counts or the machine. OpenICL's retrievers run unchanged.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from emo.common.errors import UserError

from ..models.encoder import Encoder, checked_encoder
from ..models.model import EvaluatedModel
from .openicl_compat import openicl, quiet, reader
from .settings import RETRIEVERS, SEED
from .tasks import GROUP, Row, Task

QUERIES = 1024  # per search
SPARE = 8  # extra neighbours that show where ties end
MARGIN = 1e-5  # float32 dot products of equal vectors differ by less than this

Indices = list[list[int]]  # numbers of pool rows for each test row, most similar first


class DenseRetriever(openicl.TopkRetriever):
    """OpenICL's TopkRetriever with a cached encoder and an exact index.

    It embeds texts unchanged. OpenICL passes them through a language model's tokenizer first, which alters
    them.
    """

    def __init__(self, dataset_reader: openicl.DatasetReader, encoder: Encoder, ice_num: int) -> None:
        openicl.BaseRetriever.__init__(self, dataset_reader, ice_num=ice_num)
        self.encoder = encoder

    def retrieve(self) -> Indices:
        """Return the demonstrations of every test row."""
        index, queries = (
            self.encoder(self.dataset_reader.generate_input_field_corpus(split))
            for split in (self.index_ds, self.test_ds)
        )
        return top_k(queries, index, self.ice_num).tolist()


class GroupRetriever(openicl.BaseRetriever):
    """Fixed demonstrations: the first rows of the index split with the test row's `group` (MMLU)."""

    def retrieve(self) -> Indices:
        """Return the demonstrations of every test row."""
        first: dict[str, list[int]] = {}
        for row, group in enumerate(self.index_ds[GROUP]):
            first.setdefault(group, []).append(row)
        for group in self.test_ds[GROUP]:
            if (available := len(first.get(group, []))) < self.ice_num:
                raise UserError(
                    f"group {group!r} has {available} demonstrations, but needs {self.ice_num}",
                    code="too-few-rows",
                )
        return [first[group][: self.ice_num] for group in self.test_ds[GROUP]]


def top_k(queries: np.ndarray, index: np.ndarray, k: int) -> np.ndarray:
    """Return the rows of `index` [n, d], n >= k, with the largest inner products, best first: int64 [q, k].

    faiss finds slightly more than k rows in float32. They are scored again in float64 with one order of
    summation, so equal vectors get equal scores and the row number decides. If ties may extend beyond those
    rows, all rows near the k-th score are scored.
    """
    import faiss

    def best(vectors: np.ndarray, rows: np.ndarray) -> np.ndarray:
        exact = np.einsum("qwd,qd->qw", index[rows].astype(np.float64), vectors.astype(np.float64))
        return np.take_along_axis(rows, np.lexsort((rows, -exact), axis=1)[:, :k], axis=1)

    flat = faiss.IndexFlatIP(index.shape[1])
    flat.add(np.ascontiguousarray(index))
    wide = min(len(index), k + SPARE)
    result = np.empty((len(queries), k), dtype=np.int64)
    for start in range(0, len(queries), QUERIES):
        batch = np.ascontiguousarray(queries[start : start + QUERIES])
        scores, rows = flat.search(batch, wide)
        result[start : start + QUERIES] = best(batch, rows)
        if wide < len(index):
            for i in np.flatnonzero(scores[:, -1] >= scores[:, k - 1] - MARGIN):
                near = np.flatnonzero(index @ batch[i] >= scores[i, k - 1] - MARGIN)
                result[start + i] = best(batch[i : i + 1], near[None])[0]
    return result


def openicl_retrieve(
    name: str, task: Task, rows: dict[str, list[Row]], count: int, encoder: str, model: EvaluatedModel
) -> Indices:
    """Return the demonstrations that an OpenICL retriever chooses for every test row.

    Args:
        name: A key of RETRIEVERS.
        task: The task.
        rows: Its canonical rows by split.
        count: Demonstrations per row.
        encoder: Sentence model of retrievers that embed texts: minilm, a directory or a hub id.
        model: The evaluated model.
    """
    needs = RETRIEVERS[name]
    options: dict[str, Any] = {"ice_num": count}
    if "encoder" in needs:
        options |= {"sentence_transformers_model_name": checked_encoder(encoder), "batch_size": 32}
        options["tokenizer_name"] = model.fresh_tokenizer()
    if "seed" in needs:
        options["seed"] = SEED
    kind = getattr(openicl, f"{'BM25' if name == 'bm25' else name.capitalize()}Retriever")
    with quiet(), torch.inference_mode():
        return [[int(i) for i in row] for row in kind(reader(task, rows), **options).retrieve()]
