"""From test rows to token ids: one prompt per label, all with the same demonstrations, none cut at its label.

A prompt longer than the model's context loses its farthest demonstrations first, for all labels together.
If even the bare query is too long, tokens after the first are removed from its beginning, the same for all
labels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emo.common.errors import UserError

from ..prefix_scorer import Item, common_prefix
from .openicl_compat import Template
from .tasks import LABEL, Row, Task


@dataclass
class Sample:
    """The prompts of one test row. ids: token ids per label."""

    row: Row
    demonstrations: list[int]  # those left, most similar first
    prompts: list[str]
    ids: list[np.ndarray] = field(default_factory=list)
    dropped: int = 0  # demonstrations
    cut: int = 0  # tokens of the query
    start: int | None = None  # tokens before the labels; None: none of them is common to two labels

    def items(self) -> list[Item]:
        """Return prefix and tails, which begin where the labels do, or where they differ without `start`.

        Prompts without a common first token are items of their own.
        """
        shared = common_prefix(self.ids)
        if self.start is not None and shared:
            shared = max(1, min(shared, self.start - self.cut))
        if shared == 0:
            return [Item(ids, [np.empty(0, dtype=np.int64)]) for ids in self.ids]
        group = tuple(self.demonstrations) or None
        return [Item(self.ids[0][:shared], [ids[shared:] for ids in self.ids], group)]


class PromptBuilder:
    """Renders and tokenises prompts with demonstrations from the rows of `pool`.

    limit: longest prompt in tokens (None: unlimited). label_first: the label comes before the query's text,
    so that a bare query is cut at its end.
    """

    def __init__(
        self, task: Task, pool: list[Row], tokenizer: Any, limit: int | None = None, label_first: bool = False
    ) -> None:
        self.template, self.pool, self.tokenizer = Template(task), pool, tokenizer
        self.labels, self.limit, self.label_first = task.labels, limit, label_first
        begins = {task.words(label).encode()[:1] for label in self.labels}
        self.may_share = len(begins) < len(self.labels) and not label_first  # tokens of two labels
        self._demonstrations: dict[int, str] = {}

    def build(self, rows: list[Row], indices: list[list[int]]) -> list[Sample]:
        """Return the samples of test rows, whose demonstrations are the rows `indices` of the pool."""
        samples = self._samples(rows, indices)
        long = [n for n, sample in enumerate(samples) if self._excess(sample) > 0]
        # By bisection over all rows together: length grows with the demonstrations. One label's prompt tells.
        longest = {n: [self.labels[int(np.argmax([len(i) for i in samples[n].ids]))]] for n in long}
        fitting, too_many = dict.fromkeys(long, 0), {n: len(indices[n]) for n in long}
        while opened := [n for n in long if fitting[n] + 1 < too_many[n]]:
            shorter = [indices[n][: (fitting[n] + too_many[n]) // 2] for n in opened]
            trials = self._samples([rows[n] for n in opened], shorter, [longest[n] for n in opened])
            for n, trial in zip(opened, trials, strict=True):
                (too_many if self._excess(trial) > 0 else fitting)[n] = len(trial.demonstrations)
        left = long
        while left:  # once, unless another label's prompt has become the longest one
            shorter = [indices[n][: fitting[n]] for n in left]
            for n, sample in zip(left, self._samples([rows[n] for n in left], shorter), strict=True):
                samples[n] = sample
            left = [n for n in left if fitting[n] > 0 and self._excess(samples[n]) > 0]
            fitting |= {n: fitting[n] - 1 for n in left}
        self._mark_labels(samples)
        for n in long:
            samples[n].dropped = len(indices[n]) - len(samples[n].demonstrations)
            if self._excess(samples[n]) > 0:
                self._cut(samples[n])
        return samples

    def ice(self, indices: list[int]) -> str:
        """Return demonstrations as text."""
        for index in indices:
            if index not in self._demonstrations:
                row = self.pool[index]
                self._demonstrations[index] = self.template.generate_ice_item(row, row[LABEL]) + "\n"
        return "".join(self._demonstrations[index] for index in indices)

    def prompt(self, row: Row, ice: str, label: str) -> str:
        """Return the prompt of a test row under a label, after demonstrations `ice`."""
        return self.template.generate_label_prompt_item(row, ice, label)

    def _samples(
        self, rows: list[Row], indices: list[list[int]], labels: list[list[str]] | None = None
    ) -> list[Sample]:
        """Return tokenised samples, of some of the labels each where `labels` says so."""
        samples = []
        for row, shots, chosen in zip(rows, indices, labels or [self.labels] * len(rows), strict=True):
            ice = self.ice(shots)
            samples.append(Sample(row, list(shots), [self.prompt(row, ice, label) for label in chosen]))
        self._tokenise(samples)
        return samples

    def _mark_labels(self, samples: list[Sample]) -> None:
        """Note how many tokens precede the labels, where labels may have tokens in common."""
        if not self.may_share or not samples:
            return
        contexts = [self.template.shared_prompt(s.row, self.ice(s.demonstrations)) for s in samples]
        encoded = self.tokenizer(contexts, truncation=False, padding=False, verbose=False)["input_ids"]
        for sample, ids in zip(samples, encoded, strict=True):
            if ids and len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id:
                ids = ids[:-1]  # some tokenizers end every text
            sample.start = common_prefix([np.asarray(ids, dtype=np.int64), *sample.ids]) if ids else 0

    def _tokenise(self, samples: list[Sample], truncate: bool = False) -> None:
        """Fill in the ids of whole prompts: exactly those of an evaluator that knows no prefixes."""
        texts = [prompt for sample in samples for prompt in sample.prompts]
        if texts:
            encoded = self.tokenizer(texts, truncation=truncate, padding=False, verbose=False)["input_ids"]
            ids = iter(encoded)
            for sample in samples:
                sample.ids = [np.asarray(next(ids), dtype=np.int64) for _ in sample.prompts]

    def _excess(self, sample: Sample) -> int:
        """Return how many tokens its longest prompt has beyond the limit."""
        return 0 if self.limit is None else max(map(len, sample.ids)) - self.limit

    def _cut(self, sample: Sample) -> None:
        """Remove the same tokens of the query from every label's prompt until the longest fits."""
        sample.cut = self._excess(sample)
        shortest, start = min(map(len, sample.ids)), common_prefix(sample.ids)
        start = start if sample.start is None else min(start, sample.start)
        removable = shortest - start if self.label_first else start - 1
        if sample.cut > removable:
            raise UserError(
                f"the labels of a prompt need more than {self.limit} tokens, the longest that "
                "--max_tokens or the model's context allow",
                code="context",
            )
        keep = slice(None, -sample.cut) if self.label_first else slice(1 + sample.cut, None)
        first = 0 if self.label_first else 1
        sample.ids = [np.concatenate([ids[:first], ids[keep]]) for ids in sample.ids]


class OpenICLPromptBuilder(PromptBuilder):
    """OpenICL's own way, for comparison: demonstrations dropped label by label and for good (so that later
    labels may see fewer), and prompts cut at their end where the tokenizer says so.

    limit: OpenICL's max_model_token_num; None (its default) drops nothing.
    """

    def build(self, rows: list[Row], indices: list[list[int]]) -> list[Sample]:
        """Return samples in which every label may have other demonstrations."""
        samples = [Sample(row, list(shots), []) for row, shots in zip(rows, indices, strict=True)]
        for label in self.labels:
            for sample in samples:
                while True:
                    # It ends even no demonstrations with a line break.
                    prompt = self.prompt(sample.row, self.ice(sample.demonstrations) or "\n", label)
                    if (
                        not sample.demonstrations
                        or self.limit is None
                        or len(self.tokenizer(prompt, verbose=False)["input_ids"]) <= self.limit
                    ):
                        break
                    sample.demonstrations.pop()
                sample.prompts.append(prompt)
        self._tokenise(samples, truncate=True)
        self._mark_labels(samples)
        for sample, shots in zip(samples, indices, strict=True):
            sample.dropped = len(shots) - len(sample.demonstrations)
        return samples
