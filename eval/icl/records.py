"""Records of test rows: prediction, demonstrations and scores, by our scorer or by OpenICL's inferencer.

OpenICL's score of label k is the NLL of the whole prompt divided by its number of tokens N_k:

    PPL_k = (S + s_k) / (P + n_k)          S, P: NLL and length of the shared prefix; s_k, n_k: of the tail

From the same forward follow  suffix_sum_k = s_k  and  suffix_mean_k = s_k / n_k.  A tail begins with the
label's first token, also where labels begin alike: of "good" and "good luck" no tail is empty. The smallest
score wins, the first label at a tie. Whole-prompt perplexity gives every extra label token a bonus of S / P
nats, which moves with the model; the other two do not, hence all three are recorded. Two further scores, each
a forward of its own, are computed when asked for:

channel      -log p(text | label, demonstrations), with the label before the text in query and demonstrations
calibrated   suffix_sum of the query less suffix_sum of a query without content: what the text adds to a label
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from emo.common.errors import UserError

from ..model import EvaluatedModel
from ..prefix_scorer import Advance, Item, PrefixScorer, common_prefix
from .openicl_compat import StoredRetriever, Template, openicl, quiet
from .prompts import OpenICLPromptBuilder, PromptBuilder, Sample
from .settings import BUDGET, SCORES, Settings, winner
from .tasks import LABEL_SLOT, Row, Task, fill

Record = dict[str, Any]
NO_CONTENT = "N/A"


class Recorder:
    """Makes the records of one model, which it loads, under some settings."""

    def __init__(self, model: EvaluatedModel, settings: Settings, say: Callable[[str], None]) -> None:
        self.model, self.settings = model, settings
        self.context, limit = model.context, settings.max_tokens
        if self.context is not None and limit is not None and limit > self.context:
            raise UserError(
                f"--max_tokens {limit} exceeds the model's context of {self.context} tokens", code="context"
            )
        self.limit = limit if settings.faithful else limit or self.context
        if settings.inferencer == "prefix":
            count, longest = settings.batch_size, limit or self.context or BUDGET
            self.scorer = PrefixScorer(model.model, BUDGET if count is None else count * longest, say)

    def records(
        self, task: Task, pool: list[Row], rows: list[Row], indices: list[list[int]], advance: Advance
    ) -> list[Record]:
        """Return one record per test row of `rows`, whose demonstrations are the rows `indices` of `pool`.

        advance: told how many rows are finished, as they are. Raises NotFiniteError.
        """
        if self.settings.inferencer == "ppl":
            scores = {"openicl_ppl": self._by_openicl(task, pool, rows, indices)}
            samples = [Sample(row, shots, []) for row, shots in zip(rows, indices, strict=True)]
        else:
            kind = OpenICLPromptBuilder if self.settings.faithful else PromptBuilder
            samples = kind(task, pool, self.model.tokenizer, self.limit).build(rows, indices)
            longest = max(len(ids) for sample in samples for ids in sample.ids)
            if self.context is not None and longest > self.context:
                raise self._too_long()
            # OpenICL pads with the end token, and neither counts nor scores padding.
            ignored = self.model.tokenizer.eos_token_id if self.settings.faithful else None
            scores = score_samples(self.scorer, samples, ignored, advance)
            if "channel" in self.settings.extras:
                scores["channel"] = self.channel(task, pool, rows, indices)
            if "calibrated" in self.settings.extras:
                scores["calibrated"] = scores["suffix_sum"] - self.without_content(task, pool, samples)
        records = []
        for n, sample in enumerate(samples):
            # Nine digits: more than float32 has, and files stay readable. These numbers decide.
            rounded = {name: [float(f"{x:.9g}") for x in values[n]] for name, values in scores.items()}
            prediction = task.labels[winner(rounded[self.settings.score])]
            record = {"prediction": prediction, "scores": rounded, "demonstrations": sample.demonstrations}
            records.append(record | {"dropped": sample.dropped, "cut": sample.cut})
        return records

    def _by_openicl(
        self, task: Task, pool: list[Row], rows: list[Row], indices: list[list[int]]
    ) -> np.ndarray:
        """Return OpenICL's perplexities [rows, labels]; what it drops or cuts it does not tell.

        Its record file is read and thrown away.
        """
        with tempfile.TemporaryDirectory() as scratch, quiet():
            inferencer = openicl.PPLInferencer(
                self.model.model,
                self.model.fresh_tokenizer(),
                max_model_token_num=self.settings.max_tokens,
                batch_size=8,
                output_json_filepath=scratch,
                labels=task.labels,
            )
            template = Template(task)
            retriever = StoredRetriever(task, {"train": pool, "test": rows}, indices)
            try:
                inferencer.inference(retriever, template, template)
            except IndexError:  # of the embeddings of positions
                if self.context is None:
                    raise
                raise self._too_long() from None
            saved = json.loads((Path(scratch) / "predictions.json").read_text(encoding="utf-8"))
        return np.array(
            [[saved[str(n)][f"label: {label}"]["PPL"] for label in task.labels] for n in range(len(saved))]
        )

    def _too_long(self) -> UserError:
        """OpenICL's ways know no limit but --max_tokens."""
        return UserError(
            f"a prompt exceeds the context of {self.context} tokens; give --max_tokens {self.context}",
            code="context",
        )

    def channel(self, task: Task, pool: list[Row], rows: list[Row], indices: list[list[int]]) -> np.ndarray:
        """Return -log p(text | label) of every row and label, float64 [rows, labels]."""
        task, tokenizer = task.channel(), self.model.tokenizer
        after_label = task.prompt.text.rsplit(LABEL_SLOT, 1)[1]
        items = []
        for sample in PromptBuilder(task, pool, tokenizer, self.limit, label_first=True).build(rows, indices):
            after = fill(after_label, sample.row)
            encoded = tokenizer(sample.prompts, padding=False, truncation=False, return_offsets_mapping=True)
            # A prompt without a common first token begins with one of its own, which is never a target.
            shared = max(common_prefix(sample.ids), 1)
            skip = []  # only the tokens after the label are scored
            for text, offsets in zip(sample.prompts, encoded["offset_mapping"], strict=True):
                border = len(text) - len(after)
                inside = [i for i, (begin, end) in enumerate(offsets) if begin < end and end > border]
                first = next((i for i in inside if offsets[i][0] >= border), inside[0])  # else across it
                skip.append(max(0, first - shared))
            items.append(Item(sample.ids[0][:shared], [ids[shared:] for ids in sample.ids], None, skip))
        return np.array([score.tails for score in self.scorer.score(items)])

    def without_content(self, task: Task, pool: list[Row], samples: list[Sample]) -> np.ndarray:
        """Return suffix_sum [rows, labels] of the prompts of `samples` with empty queries."""
        rows = [sample.row | dict.fromkeys(task.inputs, NO_CONTENT) for sample in samples]
        builder = PromptBuilder(task, pool, self.model.tokenizer, self.limit)
        blank = builder.build(rows, [sample.demonstrations for sample in samples])
        return score_samples(self.scorer, blank)["suffix_sum"]


def score_samples(
    scorer: PrefixScorer,
    samples: list[Sample],
    ignored: int | None = None,
    advance: Advance = lambda count: None,
) -> dict[str, np.ndarray]:
    """Return all SCORES of all samples, arrays [rows, labels].

    ignored: a token id that is not counted or scored; advance: told after every batch how many rows it
    finished.
    """

    def counted(ids: np.ndarray) -> int:
        return len(ids) if ignored is None else int((ids != ignored).sum())

    items = [sample.items() for sample in samples]
    flat = [item for of_sample in items for item in of_sample]
    item_scores = iter(scorer.score(flat, ignored, advance))
    scores: dict[str, list[np.ndarray]] = {name: [] for name in SCORES}
    for sample, parts in zip(samples, items, strict=True):
        results = [next(item_scores) for _ in parts]
        lengths = np.array([counted(ids) for ids in sample.ids])
        if len(parts) == 1:
            prefix, tails = results[0].prefix, results[0].tails
            tail_lengths = lengths - counted(parts[0].prefix)
        else:  # nothing shared: every prompt is an item
            prefix, tails, tail_lengths = 0.0, np.array([r.prefix for r in results]), lengths
        scores["openicl_ppl"].append((prefix + tails) / lengths)
        scores["suffix_sum"].append(tails)
        scores["suffix_mean"].append(tails / np.maximum(tail_lengths, 1))
    return {name: np.array(values) for name, values in scores.items()}
