"""Retrievers of demonstrations: a dense one over an exact index with cached embeddings, and OpenICL's own.

The dense search is exact; equal scores (repeated texts are common) are ordered by row, so that the result
never depends on batch sizes, thread counts or the machine. OpenICL's retrievers run as OpenICL wrote them.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from datasets import DatasetDict

from emo.common.errors import UserError
from emo.eval.icl.encoder import Encoder, checked_encoder
from emo.eval.icl.openicl_compat import openicl, quiet
from emo.eval.icl.settings import CANDIDATES, SEED
from emo.eval.icl.tasks import LABEL, Task
from emo.eval.model import EvaluatedModel

QUERIES = 1024  # searched together
SPARE = 8  # neighbours beyond those wanted, to see where ties end
MARGIN = 1e-5  # float32 dot products of equal vectors differ by less than this


def top_k(queries: np.ndarray, index: np.ndarray, k: int) -> np.ndarray:
    """Return rows of `index` [n, d], n >= k, with the largest inner products, best first: int64 [q, k].

    faiss picks a few more than k in float32. They are scored again in float64 with one order of summation,
    so that equal vectors get equal scores, which the row decides. Where ties may reach further than that, all
    rows are looked at.
    """
    import faiss

    def best(vectors: np.ndarray, rows: np.ndarray) -> np.ndarray:
        exact = np.einsum("qwd,qd->qw", index[rows].astype(np.float64), vectors.astype(np.float64))
        return np.take_along_axis(rows, np.lexsort((rows, -exact), axis=1)[:, :k], axis=1)

    flat = faiss.IndexFlatIP(index.shape[1])
    flat.add(np.ascontiguousarray(index))
    wide = min(len(index), k + SPARE)
    nearest = np.empty((len(queries), k), dtype=np.int64)
    for start in range(0, len(queries), QUERIES):
        batch = np.ascontiguousarray(queries[start : start + QUERIES])
        scores, rows = flat.search(batch, wide)
        nearest[start : start + QUERIES] = best(batch, rows)
        if wide < len(index):
            for i in np.flatnonzero(scores[:, -1] >= scores[:, k - 1] - MARGIN):
                near = np.flatnonzero(index @ batch[i] >= scores[i, k - 1] - MARGIN)
                nearest[start + i] = best(batch[i : i + 1], near[None])[0]
    return nearest


def reader(task: Task, rows: DatasetDict) -> openicl.DatasetReader:
    """Return OpenICL's reader over canonical rows of a task."""
    return openicl.DatasetReader(rows, input_columns=task.inputs, output_column=LABEL)


class DenseRetriever(openicl.TopkRetriever):
    """OpenICL's TopkRetriever with a cached encoder, an exact index, and texts embedded as they are: OpenICL
    passes them through a language model's tokenizer first, which changes them.
    """

    def __init__(self, dataset_reader: openicl.DatasetReader, encoder: Encoder, ice_num: int) -> None:
        openicl.BaseRetriever.__init__(self, dataset_reader, ice_num=ice_num)
        self.encoder = encoder

    def retrieve(self) -> list[list[int]]:
        """Return for every test row the indices of its demonstrations, most similar first."""
        index = self.encoder(self.dataset_reader.generate_input_field_corpus(self.index_ds))
        queries = self.encoder(self.dataset_reader.generate_input_field_corpus(self.test_ds))
        return top_k(queries, index, self.ice_num).tolist()


class GroupRetriever(openicl.BaseRetriever):
    """Fixed demonstrations: the first rows of the index split with the test row's `group` (MMLU)."""

    def retrieve(self) -> list[list[int]]:
        first: dict[str, list[int]] = {}
        for row, group in enumerate(self.index_ds["group"]):
            first.setdefault(group, []).append(row)
        result = []
        for group in self.test_ds["group"]:
            rows = first.get(group, [])[: self.ice_num]
            if len(rows) < self.ice_num:
                raise UserError(f"group {group!r} has {len(rows)} demonstrations, {self.ice_num} wanted")
            result.append(rows)
        return result


class StoredRetriever(openicl.BaseRetriever):
    """Demonstrations that were chosen before, `indices` by test row."""

    def __init__(self, task: Task, rows: DatasetDict, indices: list[list[int]]) -> None:
        super().__init__(reader(task, rows), ice_num=max(map(len, indices)))
        self.indices = indices

    def retrieve(self) -> list[list[int]]:
        return [list(row) for row in self.indices]


def openicl_retrieve(
    name: str, task: Task, rows: DatasetDict, count: int, encoder: str, model: EvaluatedModel
) -> list[list[int]]:
    """Return an OpenICL retriever's demonstrations of every test row.

    encoder: minilm, a directory or a hub id, for those that embed texts. Vote-k draws from Python's
    generator, which is seeded here.
    """
    options: dict[str, Any] = {"ice_num": count}
    if name not in ("random", "bm25"):
        options |= {
            "sentence_transformers_model_name": checked_encoder(encoder),
            "tokenizer_name": model.fresh_tokenizer(),
            "batch_size": 32,
        }
    if name in ("dpp", "mdl"):
        options["candidate_num"] = min(max(CANDIDATES, count), len(rows["train"]))
    if name in ("random", "mdl"):
        options["seed"] = SEED
    if name == "mdl":
        options |= {"ce_model_name": model.model, "labels": task.labels}
        options |= {"ice_template": task.demonstration_template, "prompt_template": task.template}
    kind = {
        "random": openicl.RandomRetriever,
        "bm25": openicl.BM25Retriever,
        "topk": openicl.TopkRetriever,
        "votek": openicl.VotekRetriever,
        "dpp": openicl.DPPRetriever,
        "mdl": openicl.MDLRetriever,
    }[name]
    state = random.getstate()
    try:
        random.seed(SEED)
        with quiet(), torch.inference_mode():
            return [[int(i) for i in row] for row in kind(reader(task, rows), **options).retrieve()]
    finally:
        random.setstate(state)
