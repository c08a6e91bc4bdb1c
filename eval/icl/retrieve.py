"""Demonstrations of test rows: the nearest texts, the first of the row's group, or what OpenICL chooses.

The dense search is exact; equal scores (repeated texts are common) are ordered by row, so that the result
never depends on batch sizes, thread counts or the machine. OpenICL's retrievers run as OpenICL wrote them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from emo.common.errors import UserError
from emo.common.lease import held
from emo.eval import store
from emo.eval.icl.encoder import Encoder, checked_encoder
from emo.eval.icl.settings import RETRIEVERS, Settings
from emo.eval.icl.task_data import TaskData
from emo.eval.icl.tasks import GROUP, Row, Task
from emo.eval.model import EvaluatedModel, quiet_libraries

SEED = 43  # OpenICL's default for random demonstrations
CANDIDATES = 30  # nearest rows that dpp and mdl choose among
QUERIES = 1024  # searched together
SPARE = 8  # neighbours beyond those wanted, to see where ties end
MARGIN = 1e-5  # float32 dot products of equal vectors differ by less than this

Indices = list[list[int]]  # of pool rows by test row, most similar first


class Retriever:
    """Chooses demonstrations for one model under some settings; `folder` keeps what was chosen."""

    def __init__(
        self, model: EvaluatedModel, settings: Settings, folder: Path, say: Callable[[str], None]
    ) -> None:
        self.model, self.settings, self.folder, self.say = model, settings, folder, say

    @cached_property
    def encoder(self) -> Encoder:
        """The sentence model that demonstrations are chosen with."""
        assert self.settings.sentence_model is not None
        return Encoder(self.settings.sentence_model, say=self.say)

    def retrieve(self, task: Task, data: TaskData) -> tuple[Indices, dict[str, Any]]:
        """Return the demonstrations of every test row, and what they depend on besides the rows."""
        name, model = self.settings.retriever, self.model
        count = task.spec.shots.count if self.settings.shots is None else self.settings.shots
        if count == 0:
            return [[] for _ in data.rows["test"]], {"retriever": "none", "shots": 0}
        identity: dict[str, Any] = {"shots": count}
        if task.spec.shots.by == "group":
            identity["retriever"] = "group"
        elif name not in RETRIEVERS:
            identity |= {"retriever": name, "encoder": self.encoder.digest}
        else:
            facts: dict[str, Callable[[], Any]] = {
                "seed": lambda: SEED,
                "candidates": lambda: CANDIDATES,
                "encoder": lambda: self.encoder.digest,
                "tokenizer": lambda: model.tokenizer_digest,
                "weights": lambda: model.digest,
                "dtype": lambda: model.dtype,
                "task": task.identity,
            }
            identity["retriever"] = f"openicl {name}"
            identity |= {fact: facts[fact]() for fact in RETRIEVERS[name]}
        path = self.folder / f"{store.digest([identity, data.digests])[:32]}.json"
        while (indices := store.unsealed(path)) is None:
            with held(store.lease(self.folder / "leases", path.stem)) as acquired:
                if acquired and store.unsealed(path) is None:
                    if path.is_file():
                        self.say(f"{path} is damaged: computing it again")
                    store.replace(path, store.seal(self._choose(task, data, count)))
            if not acquired:
                time.sleep(store.POLL_SECONDS)
        return indices, identity

    def _choose(self, task: Task, data: TaskData, count: int) -> Indices:
        if task.spec.shots.by == "group":
            return first_of_group(data, count)
        self.say(f"{task.name}: choosing {count} demonstrations per row")
        quiet_libraries()
        name = self.settings.retriever
        if name not in RETRIEVERS:
            return nearest(task, data, self.encoder, count)
        indices = openicl_retrieve(name, task, data, count, self.settings.encoder, self.model)
        if self.settings.sentence_model is not None:
            self.encoder.require_unchanged()
        return indices


def first_of_group(data: TaskData, count: int) -> Indices:
    """Return the first rows of the pool with every test row's `group` (MMLU)."""
    first: dict[str, list[int]] = {}
    for number, row in enumerate(data.rows["train"]):
        first.setdefault(row[GROUP], []).append(number)
    for group in dict.fromkeys(row[GROUP] for row in data.rows["test"]):
        if (available := len(first.get(group, []))) < count:
            raise UserError(f"group {group!r} has {available} demonstrations, {count} wanted")
    return [first[row[GROUP]][:count] for row in data.rows["test"]]


def nearest(task: Task, data: TaskData, encoder: Callable[[list[str]], np.ndarray], count: int) -> Indices:
    """Return the rows of the pool whose texts are most similar to every test row's.

    OpenICL's TopkRetriever, but for an exact index and texts that are embedded as they are: OpenICL passes
    them through a language model's tokenizer first, which changes them.
    """

    def embedded(rows: list[Row]) -> np.ndarray:
        return encoder([" ".join(row[name] for name in task.inputs) for row in rows])

    index = embedded(data.rows["train"])
    return top_k(embedded(data.rows["test"]), index, count).tolist()


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
    name: str, task: Task, data: TaskData, count: int, encoder: str, model: EvaluatedModel
) -> Indices:
    """Return an OpenICL retriever's demonstrations of every test row.

    encoder: minilm, a directory or a hub id, for those that embed texts.
    """
    import torch

    from emo.eval.icl.openicl_compat import Template, openicl, quiet, reader

    needs = RETRIEVERS[name]
    options: dict[str, Any] = {"ice_num": count}
    if "encoder" in needs:
        options |= {"sentence_transformers_model_name": checked_encoder(encoder), "batch_size": 32}
        options["tokenizer_name"] = model.fresh_tokenizer()
    if "candidates" in needs:
        options["candidate_num"] = min(max(CANDIDATES, count), len(data.rows["train"]))
    if "seed" in needs and name != "votek":  # vote-k draws from Python's generator
        options["seed"] = SEED
    if "weights" in needs:
        template = Template(task)
        options |= {"ce_model_name": model.model, "labels": task.labels}
        options |= {"ice_template": template, "prompt_template": template}
    kinds = {"bm25": "BM25", "dpp": "DPP", "mdl": "MDL"}
    kind = getattr(openicl, f"{kinds.get(name, name.capitalize())}Retriever")
    random.seed(SEED)
    with quiet(), torch.inference_mode():
        return [[int(i) for i in row] for row in kind(reader(task, data.rows), **options).retrieve()]
