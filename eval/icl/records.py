"""Records of test rows: prediction, demonstrations and scores, by our inferencer or by OpenICL's.

Two further scores, each a forward of its own, are computed when asked for:

channel      -log p(text | label, demonstrations), with the label before the text in query and demonstrations
calibrated   suffix_sum of the query less suffix_sum of a query without content: what the text adds to a label
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from datasets import DatasetDict

from emo.common.errors import UserError
from emo.eval.icl.inferencer import score_samples
from emo.eval.icl.layout import Item, common_prefix
from emo.eval.icl.openicl_compat import PPLInferencer, quiet
from emo.eval.icl.prefix_scorer import Advance, PrefixScorer
from emo.eval.icl.prompts import OpenICLPromptBuilder, PromptBuilder, Sample
from emo.eval.icl.retrieve import StoredRetriever, stored_retriever
from emo.eval.icl.scores import winner
from emo.eval.icl.settings import Settings
from emo.eval.icl.tasks import Task
from emo.eval.model import EvaluatedModel

Record = dict[str, Any]


class Recorder:
    """Makes the records of one model under some settings."""

    def __init__(self, model: EvaluatedModel, settings: Settings, scorer: PrefixScorer | None) -> None:
        self.model, self.settings, self.scorer = model, settings, scorer

    def records(
        self, task: Task, part: DatasetDict, indices: list[list[int]], advance: Advance
    ) -> list[Record]:
        """Return one record per test row of `part`, whose demonstrations are `indices`.

        advance: told how many rows are finished, as they are. Raises NotFiniteError.
        """
        retriever = stored_retriever(task, part, indices)
        if self.scorer is None:
            return self._by_openicl(task, retriever)
        settings, tokenizer = self.settings, self.model.tokenizer
        limit, ignored = settings.max_tokens, None
        if settings.faithful:
            ignored = tokenizer.eos_token_id  # OpenICL pads with it, and neither counts nor scores padding
        elif limit is None:
            limit = self.model.context_length()
        builder = (OpenICLPromptBuilder if settings.faithful else PromptBuilder)(
            retriever, tokenizer, task.labels, task.demonstration_template, task.template, limit
        )
        samples = builder.build(range(len(indices)), indices)
        self._require_context(max(len(ids) for sample in samples for ids in sample.ids))
        scores = score_samples(self.scorer, samples, ignored, advance)
        if "channel" in settings.extras:
            scores["channel"] = channel(task, part, indices, self.scorer, tokenizer, limit)
        if "calibrated" in settings.extras:
            plain = scores["suffix_sum"]
            scores["calibrated"] = calibrated(task, part, samples, plain, self.scorer, tokenizer, limit)
        return [
            self._record(task, {name: values[n].tolist() for name, values in scores.items()})
            | {"demonstrations": sample.demonstrations, "dropped": sample.dropped, "cut": sample.cut}
            for n, sample in enumerate(samples)
        ]

    def _by_openicl(self, task: Task, retriever: StoredRetriever) -> list[Record]:
        """OpenICL does not tell what it drops or cuts; its record file is read and thrown away."""
        with tempfile.TemporaryDirectory() as scratch, quiet():
            inferencer = PPLInferencer(
                self.model.model,
                self.model.fresh_tokenizer(),
                max_model_token_num=self.settings.max_tokens,
                batch_size=8,
                output_json_filepath=scratch,
                labels=task.labels,
            )
            try:
                inferencer.inference(retriever, task.demonstration_template, task.template)
            except IndexError:
                self._require_context(None)
                raise
            saved = json.loads((Path(scratch) / "predictions.json").read_text(encoding="utf-8"))
        ppl = [[saved[str(n)][f"label: {label}"]["PPL"] for label in task.labels] for n in range(len(saved))]
        return [
            self._record(task, {"openicl_ppl": values}) | {"demonstrations": shots, "dropped": 0, "cut": 0}
            for values, shots in zip(ppl, retriever.indices, strict=True)
        ]

    def _record(self, task: Task, scores: dict[str, list[float]]) -> Record:
        """Record the numbers that decide, to the last digit."""
        # Nine digits: more than float32 has, and files stay readable.
        rounded = {name: [float(f"{value:.9g}") for value in values] for name, values in scores.items()}
        return {"prediction": task.labels[winner(rounded[self.settings.score])], "scores": rounded}

    def _require_context(self, longest: int | None) -> None:
        """OpenICL's ways know no limit but --max_tokens. longest: None when it is not known, but too long."""
        context = self.model.context_length()
        if context is not None and (longest is None or longest > context):
            raise UserError(
                f"a prompt exceeds the model's context of {context} tokens; give --max_tokens {context}"
            )


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
    retriever = stored_retriever(task, rows, indices)
    builder = PromptBuilder(retriever, tokenizer, task.labels, demonstration, prompt, limit, label_first=True)
    samples = builder.build(range(len(indices)), indices)
    items = [_channel_item(task, sample, rows["test"][sample.row], tokenizer) for sample in samples]
    return np.array([score.tails for score in scorer.score(items)])


def _channel_item(task: Task, sample: Sample, row: Record, tokenizer: Any) -> Item:
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
    nothing = dict.fromkeys(task.inputs, NO_CONTENT)
    blank = rows["test"].map(lambda row: row | nothing, load_from_cache_file=False)
    emptied = DatasetDict({"train": rows["train"], "test": blank})
    indices = [sample.demonstrations for sample in samples]
    templates = task.demonstration_template, task.template
    retriever = stored_retriever(task, emptied, indices)
    builder = PromptBuilder(retriever, tokenizer, task.labels, *templates, limit)
    return suffix_sum - score_samples(scorer, builder.build(range(len(indices)), indices))["suffix_sum"]
