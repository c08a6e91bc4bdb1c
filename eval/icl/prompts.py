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
from emo.eval.icl.layout import Item, common_prefix
from emo.eval.icl.openicl_compat import Template
from emo.eval.icl.retrieve import StoredRetriever


@dataclass
class Sample:
    """The prompts of one test row. ids: token ids per label."""

    row: int
    demonstrations: list[int]  # those left, most similar first
    prompts: list[str]
    ids: list[np.ndarray] = field(default_factory=list)
    dropped: int = 0  # demonstrations
    cut: int = 0  # tokens of the query

    def items(self) -> list[Item]:
        """Return prefix and tails; prompts without a common first token are items of their own."""
        shared = common_prefix(self.ids)
        if shared == 0:
            return [Item(ids, [np.empty(0, dtype=np.int64)]) for ids in self.ids]
        group = tuple(self.demonstrations) or None
        return [Item(self.ids[0][:shared], [ids[shared:] for ids in self.ids], group)]


@dataclass
class PromptBuilder:
    """Renders and tokenises the prompts of a retriever's test rows.

    limit: longest prompt in tokens (None: unlimited). label_first: the label comes before the query's text,
    so that a bare query is cut at its end.
    """

    retriever: StoredRetriever
    tokenizer: Any
    labels: list[str]
    demonstration: Template
    template: Template
    limit: int | None = None
    label_first: bool = False

    def __post_init__(self) -> None:
        self._demonstrations: dict[int, str] = {}

    def build(self) -> list[Sample]:
        """Return the samples of all test rows."""
        indices = self.retriever.indices
        samples = [self._render(row, shots) for row, shots in enumerate(indices)]
        self._tokenise(samples)
        long = {n: sample for n, sample in enumerate(samples) if self._excess(sample) > 0}
        counts = self._most_that_fit(long)
        while counts:
            trial = {n: self._render(n, indices[n][:count]) for n, count in counts.items()}
            self._tokenise(list(trial.values()))
            samples = [trial.get(n, sample) for n, sample in enumerate(samples)]
            # Rarely another label's prompt has become the longest one.
            counts = {n: counts[n] - 1 for n in trial if counts[n] > 0 and self._excess(trial[n]) > 0}
        for n in long:
            samples[n].dropped = len(indices[n]) - len(samples[n].demonstrations)
            if self._excess(samples[n]) > 0:
                self._cut(samples[n])
        return samples

    def _most_that_fit(self, long: dict[int, Sample]) -> dict[int, int]:
        """Return how many demonstrations the longest label's prompt has room for, by sample that is too long.

        By bisection over all samples together: length grows with the demonstrations.
        """
        low = dict.fromkeys(long, 0)  # known to fit, or 0
        high = {n: len(self.retriever.indices[n]) for n in long}  # known not to fit
        while opened := [n for n in long if low[n] + 1 < high[n]]:
            middle = {n: (low[n] + high[n]) // 2 for n in opened}
            trial = []
            for n in opened:
                longest = self.labels[int(np.argmax([len(ids) for ids in long[n].ids]))]
                trial.append(self._render(n, self.retriever.indices[n][: middle[n]], [longest]))
            self._tokenise(trial)
            for n, sample in zip(opened, trial, strict=True):
                (high if self._excess(sample) > 0 else low)[n] = middle[n]
        return low

    def ice(self, indices: list[int]) -> str:
        """Return demonstrations as text."""
        for index in indices:
            if index not in self._demonstrations:
                whole = self.retriever.generate_ice([index], ice_template=self.demonstration)
                self._demonstrations[index] = whole.removesuffix(self.retriever.ice_eos_token)
        parts = [self._demonstrations[index] for index in indices]
        return self.retriever.ice_separator.join(parts) + self.retriever.ice_eos_token if parts else ""

    def prompt(self, row: int, ice: str, label: str) -> str:
        """Return the prompt of a test row under a label, after demonstrations `ice`."""
        return self.retriever.generate_label_prompt(row, ice, label, prompt_template=self.template)

    def _render(self, row: int, indices: list[int], labels: list[str] | None = None) -> Sample:
        ice = self.ice(indices)
        return Sample(row, list(indices), [self.prompt(row, ice, label) for label in labels or self.labels])

    def _excess(self, sample: Sample) -> int:
        """Return how many tokens its longest prompt has beyond the limit."""
        return 0 if self.limit is None else max(map(len, sample.ids)) - self.limit

    def _cut(self, sample: Sample) -> None:
        """Remove the same tokens of the query from every label's prompt until the longest fits."""
        sample.cut = self._excess(sample)
        shortest, start = min(map(len, sample.ids)), common_prefix(sample.ids)
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

    def _tokenise(self, samples: list[Sample], truncate: bool = False) -> None:
        """Fill in the ids of whole prompts: exactly those of an evaluator that knows no prefixes."""
        texts = [prompt for sample in samples for prompt in sample.prompts]
        if texts:
            encoded = self.tokenizer(texts, truncation=truncate, padding=False, verbose=False)["input_ids"]
            ids = iter(encoded)
            for sample in samples:
                sample.ids = [np.asarray(next(ids), dtype=np.int64) for _ in sample.prompts]


class OpenICLPromptBuilder(PromptBuilder):
    """OpenICL's own way, for comparison: demonstrations dropped label by label and for good (so that later
    labels may see fewer), and prompts cut at their end where the tokenizer says so.

    limit: OpenICL's max_model_token_num; None (its default) drops nothing.
    """

    def build(self) -> list[Sample]:
        """Return samples in which every label may have other demonstrations."""
        indices = self.retriever.indices
        samples = [Sample(row, list(shots), []) for row, shots in enumerate(indices)]
        for label in self.labels:
            for sample in samples:
                while True:
                    ice = self.retriever.generate_ice(sample.demonstrations, ice_template=self.demonstration)
                    prompt = self.prompt(sample.row, ice, label)
                    if (
                        not sample.demonstrations
                        or self.limit is None
                        or len(self.tokenizer(prompt, verbose=False)["input_ids"]) <= self.limit
                    ):
                        break
                    sample.demonstrations.pop()
                sample.prompts.append(prompt)
        self._tokenise(samples, truncate=True)
        for sample, demonstrations in zip(samples, indices, strict=True):
            sample.dropped = len(demonstrations) - len(sample.demonstrations)
        return samples
