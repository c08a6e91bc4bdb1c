"""Records of test rows (prediction, demonstrations, scores), by our scorer or OpenICL's inferencer.

OpenICL's score of label k is the NLL of the full prompt divided by its number of tokens N_k:

    PPL_k = (S + s_k) / (P + n_k)          S, P: NLL and length of the shared prefix. s_k, n_k: of tail k.

The same forward also gives  suffix_sum_k = s_k  and  suffix_mean_k = s_k / n_k.  A tail begins with the first
token of the label, also if labels begin with the same tokens, so no tail is empty ("good" and "good luck").
The smallest score wins, and the first label wins a tie. The perplexity of the full prompt gives every extra
label token a bonus of S / P nats, which depends on the model. The other two scores do not, so records contain
all three. Two further scores need a separate forward each:

channel      -log p(text | label, demonstrations), with the label before the text in query and demonstrations
calibrated   suffix_sum of the query minus suffix_sum of a query without content
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Protocol

import numpy as np

from emo.common.errors import UserError

from ..models.base import BUDGET, Advance, Item, ItemScore, LanguageModel, Say
from ..models.model import EvaluatedModel
from ..models.prefix_scorer import common_prefix
from ..results.directory import Record
from .openicl_compat import StoredRetriever, Template, openicl, quiet
from .prompts import OpenICLPromptBuilder, PromptBuilder, Sample
from .settings import SCORES, Settings, best_label
from .tasks import LABEL_SLOT, Row, Task, fill

NO_CONTENT = "N/A"


class Scorer(Protocol):
    """Scores items: a LanguageModel, or a PrefixScorer."""

    def score(
        self, items: list[Item], *, ignored: int | None = None, advance: Advance = lambda count: None
    ) -> list[ItemScore]: ...


class Recorder:
    """Makes the records of one model, which it loads, under some settings."""

    def __init__(self, model: LanguageModel, settings: Settings, say: Say) -> None:
        self.model = model
        self.settings = settings
        self.context = model.context
        limit = settings.max_tokens
        if self.context is not None and limit is not None and limit > self.context:
            raise UserError(
                f"--max_tokens {limit} exceeds the model's context of {self.context} tokens", code="context"
            )
        self.limit = limit if settings.faithful else limit or self.context
        if settings.inferencer == "prefix":
            count = settings.batch_size
            longest = limit or self.context or BUDGET
            model.prepare(BUDGET if count is None else count * longest, say)

    @property
    def _hugging_face(self) -> EvaluatedModel:
        assert isinstance(self.model, EvaluatedModel)  # `Job` checks Settings.needs_hugging_face
        return self.model

    def records(
        self, task: Task, pool: list[Row], rows: list[Row], indices: list[list[int]], advance: Advance
    ) -> list[Record]:
        """Return a record for each test row. Raises NotFiniteError for NaN or infinite scores.

        Args:
            task: The task.
            pool: Rows that demonstrations come from.
            rows: Test rows.
            indices: Demonstrations of each test row, as numbers of pool rows.
            advance: Receives the number of rows that were just finished.
        """
        if self.settings.inferencer == "ppl":
            scores = {"openicl_ppl": self._openicl_ppl(task, pool, rows, indices)}
            samples = [Sample(row, shots, []) for row, shots in zip(rows, indices, strict=True)]
        else:
            samples = self._samples(task, pool, rows, indices)
            longest = max(len(ids) for sample in samples for ids in sample.ids)
            if self.context is not None and longest > self.context:
                raise self._too_long()
            # OpenICL pads with the end token, and neither counts nor scores padding.
            ignored = self._hugging_face.tokenizer.eos_token_id if self.settings.faithful else None
            scores = score_samples(self.model, samples, ignored, advance)
            if "channel" in self.settings.extras:
                scores["channel"] = self.channel(task, pool, rows, indices)
            if "calibrated" in self.settings.extras:
                scores["calibrated"] = scores["suffix_sum"] - self.without_content(task, pool, samples)
        records = []
        for n, sample in enumerate(samples):
            # Nine digits are more than float32 has, and keep files readable. The rounded numbers decide.
            rounded = {name: [float(f"{x:.9g}") for x in values[n]] for name, values in scores.items()}
            prediction = task.labels[best_label(rounded[self.settings.score])]
            record = {"prediction": prediction, "scores": rounded, "demonstrations": sample.demonstrations}
            records.append(record | {"dropped": sample.dropped, "cut": sample.cut})
        return records

    def _samples(
        self, task: Task, pool: list[Row], rows: list[Row], indices: list[list[int]]
    ) -> list[Sample]:
        builder = PromptBuilder(task, pool, self.model.encode, self.limit)
        if self.settings.faithful:
            builder = OpenICLPromptBuilder(task, pool, self._hugging_face.tokenizer, self.limit)
        return builder.build(rows, indices)

    def _openicl_ppl(
        self, task: Task, pool: list[Row], rows: list[Row], indices: list[list[int]]
    ) -> np.ndarray:
        """Return OpenICL's perplexities [rows, labels]. It does not report what it drops or cuts."""
        with tempfile.TemporaryDirectory() as scratch, quiet():
            inferencer = openicl.PPLInferencer(
                self._hugging_face.model,
                self._hugging_face.fresh_tokenizer(),
                max_model_token_num=self.settings.max_tokens,
                batch_size=8,
                output_json_filepath=scratch,
                labels=task.labels,
            )
            template = Template(task)
            retriever = StoredRetriever(task, {"train": pool, "test": rows}, indices)
            try:
                inferencer.inference(retriever, template, template)
            except IndexError:  # of position embeddings
                if self.context is None:
                    raise
                raise self._too_long() from None
            saved = json.loads((Path(scratch) / "predictions.json").read_text(encoding="utf-8"))
        return np.array(
            [[saved[str(n)][f"label: {label}"]["PPL"] for label in task.labels] for n in range(len(saved))]
        )

    def _too_long(self) -> UserError:
        """Return the error for OpenICL's prompts, which only --max_tokens limits."""
        return UserError(
            f"a prompt exceeds the context of {self.context} tokens. Set --max_tokens {self.context}.",
            code="context",
        )

    def channel(self, task: Task, pool: list[Row], rows: list[Row], indices: list[list[int]]) -> np.ndarray:
        """Return -log p(text | label) of every row and label, float64 [rows, labels]."""
        task = task.channel()
        tokenizer = self._hugging_face.tokenizer
        after_label = task.prompt.text.rsplit(LABEL_SLOT, 1)[1]
        builder = PromptBuilder(task, pool, self.model.encode, self.limit, label_first=True)
        items = []
        for sample in builder.build(rows, indices):
            after = fill(after_label, sample.row)
            encoded = tokenizer(sample.prompts, padding=False, truncation=False, return_offsets_mapping=True)
            # Without a common first token each prompt keeps its first token, which is never a target.
            shared = max(common_prefix(sample.ids), 1)
            skip = []  # only the tokens after the label are scored
            for text, offsets in zip(sample.prompts, encoded["offset_mapping"], strict=True):
                border = len(text) - len(after)
                skip.append(max(0, _first_token_after(border, offsets) - shared))
            items.append(Item(sample.ids[0][:shared], [ids[shared:] for ids in sample.ids], None, skip))
        return np.array([score.tails for score in self.model.score(items)])

    def without_content(self, task: Task, pool: list[Row], samples: list[Sample]) -> np.ndarray:
        """Return suffix_sum [rows, labels] of the prompts of `samples` with empty queries."""
        rows = [sample.row | dict.fromkeys(task.inputs, NO_CONTENT) for sample in samples]
        builder = PromptBuilder(task, pool, self.model.encode, self.limit)
        blank = builder.build(rows, [sample.demonstrations for sample in samples])
        return score_samples(self.model, blank)["suffix_sum"]


def _first_token_after(border: int, offsets: list[tuple[int, int]]) -> int:
    """Return the number of the first token at or after a character, or else of the token across it."""
    inside = [i for i, (begin, end) in enumerate(offsets) if begin < end and end > border]
    return next((i for i in inside if offsets[i][0] >= border), inside[0])


def score_samples(
    scorer: Scorer, samples: list[Sample], ignored: int | None = None, advance: Advance = lambda count: None
) -> dict[str, np.ndarray]:
    """Return all SCORES of all samples, arrays [rows, labels].

    Args:
        scorer: The model.
        samples: Prompts.
        ignored: A token id that is neither counted nor scored.
        advance: Receives the number of rows that were just finished.
    """

    def count_tokens(ids: np.ndarray) -> int:
        return len(ids) if ignored is None else int((ids != ignored).sum())

    items = [sample.items() for sample in samples]
    flat = [item for items_of_sample in items for item in items_of_sample]
    item_scores = iter(scorer.score(flat, ignored=ignored, advance=advance))
    scores: dict[str, list[np.ndarray]] = {name: [] for name in SCORES}
    for sample, parts in zip(samples, items, strict=True):
        results = [next(item_scores) for _ in parts]
        lengths = np.array([count_tokens(ids) for ids in sample.ids])
        if len(parts) == 1:
            prefix = results[0].prefix
            tails = results[0].tails
            tail_lengths = lengths - count_tokens(parts[0].prefix)
        else:  # nothing is shared, so every prompt is an item
            prefix = 0.0
            tails = np.array([r.prefix for r in results])
            tail_lengths = lengths
        scores["openicl_ppl"].append((prefix + tails) / lengths)
        scores["suffix_sum"].append(tails)
        scores["suffix_mean"].append(tails / np.maximum(tail_lengths, 1))
    return {name: np.array(values) for name, values in scores.items()}
