"""OpenICL's own retrievers and inferencer, by name, for comparison with ours.

They run as OpenICL wrote them (on its shims); `eval run --retriever bm25 --inferencer ppl` is plain OpenICL.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from eval.icl.encoder import checked_encoder
from eval.icl.openicl_compat import (
    BaseRetriever,
    BM25Retriever,
    DPPRetriever,
    MDLRetriever,
    RandomRetriever,
    TopkRetriever,
    VotekRetriever,
    quiet,
)
from eval.icl.settings import CANDIDATES, SEED
from eval.icl.task_data import TaskData
from eval.icl.tasks import Task
from eval.model import EvaluatedModel


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
