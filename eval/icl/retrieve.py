"""Dense retrieval of demonstrations: an OpenICL retriever over an exact index with cached embeddings.

Search is exact; equal scores (repeated texts are common) are ordered by row, so that the result never depends
on batch sizes, thread counts or the machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from common.errors import UserError
from eval.icl.encoder import Encoder
from eval.icl.openicl_compat import BaseRetriever, DatasetReader, TopkRetriever

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
