"""From test rows to token ids: one prompt per label, all with the same demonstrations, none cut at its label.

A prompt longer than the model's context loses its farthest demonstrations first, for all labels together.
If even the bare query is too long, tokens after the first are removed from its beginning, the same for all
labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from emo.common.errors import UserError
from emo.eval.icl.layout import Item, common_prefix
from emo.eval.icl.openicl_compat import BaseRetriever, PromptTemplate, Template


@dataclass
class Sample:
    """The prompts of one test row. ids: token ids per label."""

    row: int
    demonstrations: list[int]  # those left, most similar first
    ice: list[str]  # demonstrations as text; one per label (equal, except in OpenICL's own mode)
    prompts: list[str]
    ids: list[np.ndarray] = field(default_factory=list)
    dropped: int = 0  # demonstrations
    cut: int = 0  # tokens of the query

    def items(self) -> list[Item]:
        """Prefix and tails; prompts without a common first token are items of their own."""
        shared = common_prefix(self.ids)
        if shared == 0:
            return [Item(ids, [np.empty(0, dtype=np.int64)]) for ids in self.ids]
        group = tuple(self.demonstrations) or None
        return [Item(self.ids[0][:shared], [ids[shared:] for ids in self.ids], group)]


@dataclass
class PromptBuilder:
    """Renders and tokenises the prompts of a retriever's test rows.

    limit: longest prompt in tokens (None: unlimited). label_first: the label comes before the query's text,
    so that a bare query is cut at its end. Stock templates are repaired (see Template).
    """

    retriever: BaseRetriever
    tokenizer: Any
    labels: list[Any]
    ice_template: PromptTemplate | None
    prompt_template: PromptTemplate | None
    limit: int | None = None
    label_first: bool = False

    def __post_init__(self) -> None:
        self.ice_template = None if self.ice_template is None else Template.of(self.ice_template)
        self.prompt_template = None if self.prompt_template is None else Template.of(self.prompt_template)
        self._demonstrations: dict[int, str] = {}

    def build(self, rows: Sequence[int], indices: list[list[int]]) -> list[Sample]:
        """Samples of test rows `rows`, whose demonstrations are `indices`."""
        samples = [self._render(row, shots) for row, shots in zip(rows, indices, strict=True)]
        tokenise(self.tokenizer, samples)
        long = {n: sample for n, sample in enumerate(samples) if self._too_long(sample)}
        counts = self._most_that_fit(long, indices)
        while counts:
            trial = {n: self._render(rows[n], indices[n][:count]) for n, count in counts.items()}
            tokenise(self.tokenizer, list(trial.values()))
            samples = [trial.get(n, sample) for n, sample in enumerate(samples)]
            # Rarely another label's prompt has become the longest one.
            counts = {n: counts[n] - 1 for n in trial if counts[n] > 0 and self._too_long(trial[n])}
        for n in long:
            samples[n].dropped = len(indices[n]) - len(samples[n].demonstrations)
            samples[n] = self._cut(samples[n])
        return samples

    def _most_that_fit(self, long: dict[int, Sample], indices: list[list[int]]) -> dict[int, int]:
        """For samples that are too long, how many demonstrations the longest label's prompt leaves room for.

        By bisection over all samples together: length grows with the demonstrations.
        """
        low = dict.fromkeys(long, 0)  # known to fit, or 0
        high = {n: len(indices[n]) for n in long}  # known not to fit
        while opened := [n for n in long if low[n] + 1 < high[n]]:
            middle = {n: (low[n] + high[n]) // 2 for n in opened}
            trial = []
            for n in opened:
                longest = int(np.argmax([len(ids) for ids in long[n].ids]))
                trial.append(self._render(long[n].row, indices[n][: middle[n]], [self.labels[longest]]))
            tokenise(self.tokenizer, trial)
            for n, sample in zip(opened, trial, strict=True):
                (high if self._too_long(sample) else low)[n] = middle[n]
        return low

    def ice(self, indices: list[int]) -> str:
        """The demonstrations as text."""
        if not indices:
            return ""
        for index in indices:
            if index not in self._demonstrations:
                whole = self.retriever.generate_ice([index], ice_template=self.ice_template)
                self._demonstrations[index] = whole.removesuffix(self.retriever.ice_eos_token)
        parts = [self._demonstrations[index] for index in indices]
        return self.retriever.ice_separator.join(parts) + self.retriever.ice_eos_token

    def prompt(self, row: int, ice: str, label: Any) -> str:
        """Return the prompt of a test row under a label, after demonstrations `ice`."""
        return self.retriever.generate_label_prompt(
            row, ice, label, ice_template=self.ice_template, prompt_template=self.prompt_template
        )

    def _render(self, row: int, indices: list[int], labels: list[Any] | None = None) -> Sample:
        ice = self.ice(indices)
        prompts = [self.prompt(row, ice, label) for label in labels or self.labels]
        return Sample(row, list(indices), [ice] * len(prompts), prompts)

    def _too_long(self, sample: Sample) -> bool:
        return self.limit is not None and max(map(len, sample.ids)) > self.limit

    def _cut(self, sample: Sample) -> Sample:
        """Remove the same tokens of the query from every label's prompt until the longest fits."""
        if self._too_long(sample):
            assert self.limit is not None
            sample.cut = max(map(len, sample.ids)) - self.limit
            shortest, start = min(map(len, sample.ids)), common_prefix(sample.ids)
            removable = shortest - start if self.label_first else start - 1
            if sample.cut > removable:
                raise UserError(
                    f"the labels of a prompt need more than {self.limit} tokens, the longest that "
                    "--max_tokens or the model's context allow"
                )
            keep = slice(None, -sample.cut) if self.label_first else slice(1 + sample.cut, None)
            first = 0 if self.label_first else 1
            sample.ids = [np.concatenate([ids[:first], ids[keep]]) for ids in sample.ids]
        return sample


class OpenICLPromptBuilder(PromptBuilder):
    """OpenICL's own way, for comparison: templates as they are, demonstrations dropped label by label and for
    good (so that later labels may see fewer), and prompts cut at their end where the tokenizer says so.

    limit: OpenICL's max_model_token_num; None (its default) drops nothing.
    """

    def __post_init__(self) -> None:
        self._demonstrations = {}

    def build(self, rows: Sequence[int], indices: list[list[int]]) -> list[Sample]:
        """Samples in which every label may have other demonstrations."""

        def length(prompt: str) -> int:
            return len(self.tokenizer(prompt, verbose=False)["input_ids"])

        left = [list(demonstrations) for demonstrations in indices]
        generate_ice = partial(self.retriever.generate_ice, ice_template=self.ice_template)
        ices = [generate_ice(demonstrations) for demonstrations in left]
        samples = [Sample(row, shots, [], []) for row, shots in zip(rows, left, strict=True)]
        for label in self.labels:
            for n, sample in enumerate(samples):
                prompt = self.prompt(sample.row, ices[n], label)
                while left[n] and self.limit is not None and length(prompt) > self.limit:
                    left[n].pop()
                    ices[n] = generate_ice(left[n])
                    prompt = self.prompt(sample.row, ices[n], label)
                sample.prompts.append(prompt)
                sample.ice.append(ices[n])
        tokenise(self.tokenizer, samples, truncate=True)
        for sample, demonstrations in zip(samples, indices, strict=True):
            sample.dropped = len(demonstrations) - len(sample.demonstrations)
        return samples


def tokenise(tokenizer: Any, samples: list[Sample], truncate: bool = False) -> None:
    """Fill in the ids of whole prompts: exactly those of an evaluator that knows no prefixes."""
    texts = [prompt for sample in samples for prompt in sample.prompts]
    if not texts:
        return
    encode: Callable[..., Any] = tokenizer
    ids = iter(encode(texts, truncation=truncate, padding=False, verbose=False)["input_ids"])
    for sample in samples:
        sample.ids = [np.asarray(next(ids), dtype=np.int64) for _ in sample.prompts]
