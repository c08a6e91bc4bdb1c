"""Two further scores, each a forward of its own; computed when asked for.

channel      -log p(text | label, demonstrations), with the label before the text in query and demonstrations
calibrated   suffix_sum of the query less suffix_sum of a query without content: what the text adds to a label
"""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import DatasetDict

from eval.icl.inferencer import score_samples
from eval.icl.layout import Item, common_prefix
from eval.icl.prefix_scorer import PrefixScorer
from eval.icl.prompts import PromptBuilder, Sample
from eval.icl.retrieve import StoredRetriever
from eval.icl.task_data import reader
from eval.icl.tasks import Task

NO_CONTENT = "N/A"


def channel(
    task: Task,
    rows: DatasetDict,
    indices: list[list[int]],
    scorer: PrefixScorer,
    tokenizer: Any,
    limit: int | None,
) -> np.ndarray:
    """-log p(text | label) of every row and label, float64 [rows, labels]."""
    prompt, demonstration = task.channel_templates
    retriever = _retriever(task, rows, indices)
    builder = PromptBuilder(retriever, tokenizer, task.labels, demonstration, prompt, limit, label_first=True)
    samples = builder.build(range(len(indices)), indices)
    items = [_channel_item(task, sample, rows["test"][sample.row], tokenizer) for sample in samples]
    return np.array([score.tails for score in scorer.score(items)])


def _channel_item(task: Task, sample: Sample, row: dict[str, Any], tokenizer: Any) -> Item:
    """The sample's prompts, of which only the tokens after the label are scored."""
    after = task.fill(task.require_channel().rsplit("{label}", 1)[1], row)
    encoded = tokenizer(sample.prompts, padding=False, truncation=False, return_offsets_mapping=True)
    # A prompt without a common first token begins with one of its own, which is never a target.
    shared = max(common_prefix(sample.ids), 1)
    skip = []
    for prompt, offsets in zip(sample.prompts, encoded["offset_mapping"], strict=True):
        start = len(prompt) - len(after)
        skip.append(max(0, next(i for i, (begin, _) in enumerate(offsets) if begin >= start) - shared))
    return Item(sample.ids[0][:shared], [ids[shared:] for ids in sample.ids], None, skip)


def calibrated(
    task: Task,
    rows: DatasetDict,
    samples: list[Sample],
    suffix_sum: np.ndarray,
    scorer: PrefixScorer,
    tokenizer: Any,
    limit: int | None,
) -> np.ndarray:
    """suffix_sum [rows, labels] of `samples` less that of the same prompts with empty queries."""
    blank = rows["test"].map(
        lambda row: row | dict.fromkeys(task.inputs, NO_CONTENT), load_from_cache_file=False
    )
    emptied = DatasetDict({"train": rows["train"], "test": blank})
    indices = [sample.demonstrations for sample in samples]
    builder = PromptBuilder(
        _retriever(task, emptied, indices),
        tokenizer,
        task.labels,
        task.demonstration_template,
        task.template,
        limit,
    )
    return suffix_sum - score_samples(scorer, builder.build(range(len(indices)), indices))["suffix_sum"]


def _retriever(task: Task, rows: DatasetDict, indices: list[list[int]]) -> StoredRetriever:
    return StoredRetriever(reader(task, rows), indices, ice_num=max(map(len, indices)))
