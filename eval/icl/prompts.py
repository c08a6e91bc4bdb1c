"""From test rows to token ids. All labels of a row share the same demonstrations, and no label is cut.

A prompt longer than the model's context loses its farthest demonstrations first, for all labels together. If
the query alone is too long, tokens after the first are removed from its beginning, the same for all labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emo.common.errors import UserError

from ..models.base import Item
from ..models.prefix_scorer import common_prefix
from .openicl_compat import Template
from .tasks import LABEL, Row, Task

Encode = Callable[[Sequence[str]], list[list[int]]]  # texts to token ids


@dataclass
class Sample:
    """The prompts of one test row. ids: token ids by label."""

    row: Row
    demonstrations: list[int]  # that remain, most similar first
    prompts: list[str]
    ids: list[np.ndarray] = field(default_factory=list)
    dropped: int = 0  # demonstrations
    cut: int = 0  # tokens of the query
    start: int | None = None  # tokens before the labels. None: no two labels share a first token.

    def items(self) -> list[Item]:
        """Return the prompts as items, whose tails begin at the label, or where labels differ.

        Prompts without a common first token become separate items.
        """
        shared = common_prefix(self.ids)
        if self.start is not None and shared:
            shared = max(1, min(shared, self.start - self.cut))
        if shared == 0:
            return [Item(ids, [np.empty(0, dtype=np.int64)]) for ids in self.ids]
        group = tuple(self.demonstrations) or None
        return [Item(self.ids[0][:shared], [ids[shared:] for ids in self.ids], group)]


class PromptBuilder:
    """Renders and tokenises prompts with demonstrations.

    Args:
        task: The task.
        pool: Rows that demonstrations come from.
        encode: Returns the token ids of texts. It may be None for callers that only render text.
        limit: Longest prompt in tokens, or None for no limit.
        label_first: The label precedes the query's text, so a query that is too long loses its end.
    """

    def __init__(
        self, task: Task, pool: list[Row], encode: Encode | None, limit: int | None = None,
        label_first: bool = False,
    ) -> None:  # fmt: skip
        self.template = Template(task)
        self.pool = pool
        self.encode = encode
        self.labels = task.labels
        self.limit = limit
        self.label_first = label_first
        first_bytes = {task.words(label).encode()[:1] for label in self.labels}
        self.may_share = len(first_bytes) < len(self.labels) and not label_first  # tokens of two labels
        self._demonstrations: dict[int, str] = {}

    def build(self, rows: list[Row], indices: list[list[int]]) -> list[Sample]:
        """Return the samples of test rows. indices: demonstrations of each row, as numbers of pool rows."""
        samples = self._samples(rows, indices)
        long = [n for n, sample in enumerate(samples) if self._excess(sample) > 0]
        fitting = self._fitting_counts(rows, indices, {n: samples[n] for n in long})
        remaining = long
        while remaining:  # once, unless another label's prompt has become the longest one
            shorter = [indices[n][: fitting[n]] for n in remaining]
            trials = self._samples([rows[n] for n in remaining], shorter)
            for n, sample in zip(remaining, trials, strict=True):
                samples[n] = sample
            remaining = [n for n in remaining if fitting[n] > 0 and self._excess(samples[n]) > 0]
            fitting |= {n: fitting[n] - 1 for n in remaining}
        self._mark_labels(samples)
        for n in long:
            samples[n].dropped = len(indices[n]) - len(samples[n].demonstrations)
            if self._excess(samples[n]) > 0:
                self._cut(samples[n])
        return samples

    def _fitting_counts(
        self, rows: list[Row], indices: list[list[int]], long: dict[int, Sample]
    ) -> dict[int, int]:
        """Return how many demonstrations fit into the longest label's prompt of each row in `long`.

        It bisects over all rows together, because the length grows with the demonstrations.
        """
        longest = {n: [self.labels[int(np.argmax([len(i) for i in s.ids]))]] for n, s in long.items()}
        fitting = dict.fromkeys(long, 0)
        too_many = {n: len(indices[n]) for n in long}
        while opened := [n for n in long if fitting[n] + 1 < too_many[n]]:
            shorter = [indices[n][: (fitting[n] + too_many[n]) // 2] for n in opened]
            trials = self._samples([rows[n] for n in opened], shorter, [longest[n] for n in opened])
            for n, trial in zip(opened, trials, strict=True):
                (too_many if self._excess(trial) > 0 else fitting)[n] = len(trial.demonstrations)
        return fitting

    def render_demonstrations(self, indices: list[int]) -> str:
        """Return demonstrations as text."""
        for index in indices:
            if index not in self._demonstrations:
                row = self.pool[index]
                self._demonstrations[index] = self.template.generate_ice_item(row, row[LABEL]) + "\n"
        return "".join(self._demonstrations[index] for index in indices)

    def prompt(self, row: Row, demonstrations: str, label: str) -> str:
        """Return the prompt of a test row under a label, after the text of its demonstrations."""
        return self.template.generate_label_prompt_item(row, demonstrations, label)

    def _samples(
        self, rows: list[Row], indices: list[list[int]], labels: list[list[str]] | None = None
    ) -> list[Sample]:
        """Return tokenised samples. labels: those to render for each row (default: all)."""
        samples = []
        for row, shots, chosen in zip(rows, indices, labels or [self.labels] * len(rows), strict=True):
            text = self.render_demonstrations(shots)
            samples.append(Sample(row, list(shots), [self.prompt(row, text, label) for label in chosen]))
        self._tokenise(samples)
        return samples

    def _mark_labels(self, samples: list[Sample]) -> None:
        """Set how many tokens precede the labels, if labels may share tokens."""
        if not self.may_share or not samples:
            return
        assert self.encode is not None
        texts = [
            self.template.shared_prompt(s.row, self.render_demonstrations(s.demonstrations)) for s in samples
        ]
        # An end token that the tokenizer adds to the shared text is no part of the common prefix.
        for sample, ids in zip(samples, self.encode(texts), strict=True):
            sample.start = common_prefix([np.asarray(ids, dtype=np.int64), *sample.ids]) if ids else 0

    def _tokenise(self, samples: list[Sample]) -> None:
        """Set the ids of full prompts, as an evaluator that ignores prefixes would tokenise them."""
        texts = [prompt for sample in samples for prompt in sample.prompts]
        if texts:
            assert self.encode is not None
            encoded = iter(self.encode(texts))
            for sample in samples:
                sample.ids = [np.asarray(next(encoded), dtype=np.int64) for _ in sample.prompts]

    def _excess(self, sample: Sample) -> int:
        """Return by how many tokens the longest prompt exceeds the limit."""
        return 0 if self.limit is None else max(map(len, sample.ids)) - self.limit

    def _cut(self, sample: Sample) -> None:
        """Remove the same tokens of the query from every label's prompt until the longest fits."""
        sample.cut = self._excess(sample)
        shortest = min(map(len, sample.ids))
        start = common_prefix(sample.ids)
        start = start if sample.start is None else min(start, sample.start)
        removable = shortest - start if self.label_first else start - 1
        if sample.cut > removable:
            raise UserError(
                f"the labels of a prompt need more than {self.limit} tokens, the limit that --max_tokens or "
                "the model's context sets. Raise --max_tokens, or use a model with a longer context.",
                code="context",
            )
        keep = slice(None, -sample.cut) if self.label_first else slice(1 + sample.cut, None)
        first = 0 if self.label_first else 1
        sample.ids = [np.concatenate([ids[:first], ids[keep]]) for ids in sample.ids]


class OpenICLPromptBuilder(PromptBuilder):
    """Builds prompts as OpenICL does, for comparison.

    Demonstrations are dropped label by label, so later labels may have fewer. Prompts are cut at their end if
    the tokenizer truncates. limit: OpenICL's max_model_token_num. None (its default) drops nothing.
    """

    def __init__(self, task: Task, pool: list[Row], tokenizer: Any, limit: int | None = None) -> None:
        def encode(texts: Sequence[str]) -> list[list[int]]:
            encoded = tokenizer(list(texts), truncation=True, padding=False, verbose=False)
            ids: list[list[int]] = encoded["input_ids"]
            return ids

        super().__init__(task, pool, encode, limit)
        self.tokenizer = tokenizer

    def build(self, rows: list[Row], indices: list[list[int]]) -> list[Sample]:
        """Return samples in which the labels may have different demonstrations."""
        samples = [Sample(row, list(shots), []) for row, shots in zip(rows, indices, strict=True)]
        for label in self.labels:
            for sample in samples:
                sample.prompts.append(self._fitting_prompt(sample, label))
        self._tokenise(samples)
        self._mark_labels(samples)
        for sample, shots in zip(samples, indices, strict=True):
            sample.dropped = len(shots) - len(sample.demonstrations)
        return samples

    def _fitting_prompt(self, sample: Sample, label: str) -> str:
        """Return the prompt of a label, after removing demonstrations of the sample until it fits."""
        while True:
            # OpenICL adds a line break even if there are no demonstrations.
            text = self.render_demonstrations(sample.demonstrations) or "\n"
            prompt = self.prompt(sample.row, text, label)
            if not sample.demonstrations or self.limit is None:
                return prompt
            if len(self.tokenizer(prompt, verbose=False)["input_ids"]) <= self.limit:
                return prompt
            sample.demonstrations.pop()
