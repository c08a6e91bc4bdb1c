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
from emo.eval.icl.openicl_compat import (
    BaseRetriever,
    BM25Retriever,
    DatasetReader,
    DPPRetriever,
    MDLRetriever,
    RandomRetriever,
    TopkRetriever,
    VotekRetriever,
    quiet,
)
from emo.eval.icl.settings import CANDIDATES, SEED
from emo.eval.icl.task_data import TaskData, reader
from emo.eval.icl.tasks import Task
from emo.eval.model import EvaluatedModel

QUERIES = 1024  # searched together
SPARE = 8  # neighbours beyond those wanted, to see where ties end
MARGIN = 1e-5  # float32 dot products of equal vectors differ by less than this


def top_k(queries: np.ndarray, index: np.ndarray, k: int) -> np.ndarray:
    """Rows of `index` [n, d] with the largest inner products, best first, equal ones by row: int64 [q, k].

    faiss picks a few more than k in float32. They are scored again in float64 with one order of summation,
    so that equal vectors get equal scores. Where ties may reach further than that, all rows are looked at.
    """
    import faiss

    n = len(index)
    if k > n:
        raise ValueError(f"{k} neighbours wanted of {n} rows")
    nearest = np.empty((len(queries), k), dtype=np.int64)
    if k == 0 or len(queries) == 0:
        return nearest
    flat = faiss.IndexFlatIP(index.shape[1])
    flat.add(np.ascontiguousarray(index))
    wide = min(n, k + SPARE)
    for start in range(0, len(queries), QUERIES):
        batch = np.ascontiguousarray(queries[start : start + QUERIES])
        scores, rows = flat.search(batch, wide)
        nearest[start : start + QUERIES] = _best(batch, index, rows, k)
        tied = scores[:, -1] >= scores[:, k - 1] - MARGIN if wide < n else np.zeros(len(batch), bool)
        for i in np.flatnonzero(tied):
            near = np.flatnonzero(index @ batch[i] >= scores[i, k - 1] - MARGIN)
            nearest[start + i] = _best(batch[i : i + 1], index, near[None], k)[0]
    return nearest


def _best(queries: np.ndarray, index: np.ndarray, rows: np.ndarray, k: int) -> np.ndarray:
    """Return the k best of each query among the candidate `rows` [q, w], scored in float64: [q, k]."""
    exact = np.einsum("qwd,qd->qw", index[rows].astype(np.float64), queries.astype(np.float64))
    return np.take_along_axis(rows, np.lexsort((rows, -exact), axis=1)[:, :k], axis=1)


class DenseRetriever(TopkRetriever):
    """OpenICL's TopkRetriever with a cached encoder and an exact index.

    Constructor arguments are TopkRetriever's; `sentence_transformers_model_name` may also be `minilm` or an
    Encoder. The tokenizer arguments are accepted and unused: OpenICL round-trips texts through that tokenizer
    before it embeds them, which changes them.
    """

    def __init__(
        self,
        dataset_reader: DatasetReader,
        ice_separator: str = "\n",
        ice_eos_token: str = "\n",
        prompt_eos_token: str = "",
        sentence_transformers_model_name: str | Encoder = "minilm",
        ice_num: int = 1,
        index_split: str = "train",
        test_split: str = "test",
        tokenizer_name: str | None = None,
        batch_size: int = 1,
        accelerator: Any = None,
    ) -> None:
        BaseRetriever.__init__(
            self,
            dataset_reader,
            ice_separator,
            ice_eos_token,
            prompt_eos_token,
            ice_num,
            index_split,
            test_split,
            accelerator,
        )
        name = sentence_transformers_model_name
        self.encoder = name if isinstance(name, Encoder) else Encoder(name)

    def retrieve(self) -> list[list[int]]:
        """For every test row the indices of its demonstrations, most similar first."""
        reader = self.dataset_reader
        index = self.encoder(reader.generate_input_field_corpus(self.index_ds))
        queries = self.encoder(reader.generate_input_field_corpus(self.test_ds))
        return top_k(queries, index, self.ice_num).tolist()


class GroupRetriever(BaseRetriever):
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


class StoredRetriever(BaseRetriever):
    """Demonstrations found before, for a slice of the test rows; what jobs hand to an inferencer."""

    def __init__(self, dataset_reader: DatasetReader, indices: list[list[int]], ice_num: int) -> None:
        super().__init__(dataset_reader, ice_num=ice_num)
        self.indices = indices

    def retrieve(self) -> list[list[int]]:
        return [list(row) for row in self.indices]


def stored_retriever(task: Task, rows: DatasetDict, indices: list[list[int]]) -> StoredRetriever:
    """Return a retriever that gives the test rows of a task the demonstrations `indices`."""
    return StoredRetriever(reader(task, rows), indices, ice_num=max(map(len, indices)))


def openicl_retriever(
    name: str, task: Task, data: TaskData, count: int, encoder: str, model: EvaluatedModel
) -> BaseRetriever:
    """An OpenICL retriever; dense ones embed with `encoder` (minilm, a directory or a hub id)."""
    reader = data.reader(task)
    if name == "random":
        return RandomRetriever(reader, ice_num=count, seed=SEED)
    if name == "bm25":
        return BM25Retriever(reader, ice_num=count)
    common: dict[str, Any] = {
        "sentence_transformers_model_name": checked_encoder(encoder),
        "ice_num": count,
        "tokenizer_name": model.fresh_tokenizer(),
        "batch_size": 32,
    }
    if name == "topk":
        return TopkRetriever(reader, **common)
    if name == "votek":
        return VotekRetriever(reader, **common)
    candidates = min(max(CANDIDATES, count), len(data.rows["train"]))
    if name == "dpp":
        return DPPRetriever(reader, candidate_num=candidates, **common)
    return MDLRetriever(
        reader,
        candidate_num=candidates,
        ce_model_name=model.model,
        ice_template=task.demonstration_template,
        prompt_template=task.template,
        labels=task.labels,
        seed=SEED,
        **common,
    )


def openicl_retrieve(
    name: str, task: Task, data: TaskData, count: int, encoder: str, model: EvaluatedModel
) -> list[list[int]]:
    """Its demonstrations of every test row. Vote-k draws from Python's generator, which is seeded here."""
    state = random.getstate()
    try:
        random.seed(SEED)
        with quiet(), torch.inference_mode():
            retriever = openicl_retriever(name, task, data, count, encoder, model)
            return [[int(i) for i in row] for row in retriever.retrieve()]
    finally:
        random.setstate(state)
