"""The perplexity inferencer: OpenICL's contract, the prefix scorer's speed.

OpenICL's score of label k is the NLL of the whole prompt divided by its number of tokens N_k:

    PPL_k = (S + s_k) / (P + n_k)          S, P: NLL and length of the shared prefix; s_k, n_k: of the tail

From the same forward follow  suffix_sum_k = s_k  and  suffix_mean_k = s_k / n_k.  The smallest score wins,
the first label at a tie. Whole-prompt perplexity gives every extra label token a bonus of S / P nats, which
moves with the model; the other two do not, hence all three are recorded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from emo.eval.icl.openicl_compat import (
    BaseRetriever,
    PPLInferencer,
    PPLInferencerOutputHandler,
    PromptTemplate,
)
from emo.eval.icl.prefix_scorer import Advance, PrefixScorer
from emo.eval.icl.prompts import OpenICLPromptBuilder, PromptBuilder, Sample
from emo.eval.icl.scores import SCORES, winner
from emo.eval.icl.settings import BUDGET
from emo.eval.model import context_length


class PrefixPPLInferencer(PPLInferencer):
    """Drop-in PPLInferencer. Arguments are PPLInferencer's and

    scorer: a PrefixScorer to use, so that one loaded model serves many inferencers.
    budget: tokens per batch, instead of `batch_size`.
    score: which of SCORES decides the prediction.
    max_model_token_num: defaults to the model's context.
    faithful: build prompts, count tokens and write records exactly as OpenICL does, faults included: see
        OpenICLPromptBuilder; tokens with the id of the padding token (EOS) are neither counted nor scored.

    `samples` and `scores` hold the last call's prompts and, per score, an array [rows, labels].
    """

    def __init__(
        self,
        model_name: Any = "gpt2-xl",
        tokenizer_name: Any = None,
        max_model_token_num: int | None = None,
        model_config: Any = None,
        batch_size: int = 1,
        accelerator: Any = None,
        output_json_filepath: str = "./icl_inference_output",
        output_json_filename: str = "predictions",
        api_name: str | None = None,
        labels: list[Any] | None = None,
        model_parallel: bool = False,
        *,
        scorer: PrefixScorer | None = None,
        budget: int = BUDGET,
        score: str = "openicl_ppl",
        faithful: bool = False,
        **kwargs: Any,
    ) -> None:
        padding: dict[str, Any] = {}
        if not isinstance(tokenizer_name, str | None):  # the base class sets it; a caller gets its own back
            padding = {name: getattr(tokenizer_name, name) for name in ("pad_token", "padding_side")}
        super().__init__(
            scorer.model if scorer is not None else model_name,
            tokenizer_name,
            max_model_token_num,
            model_config,
            batch_size,
            accelerator,
            output_json_filepath,
            output_json_filename,
            api_name,
            labels,
            model_parallel,
            **kwargs,
        )
        self.pad_id = self.tokenizer.pad_token_id
        for name, value in padding.items():
            setattr(self.tokenizer, name, value)
        if self.call_api:
            raise ValueError("PrefixPPLInferencer scores local models; use PPLInferencer for an API")
        if score not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)}")
        self.faithful = faithful
        self.scorer = scorer or PrefixScorer(self.model, budget)
        self.score = score
        self.max_model_token_num: int | None = max_model_token_num
        if not faithful and max_model_token_num is None:
            self.max_model_token_num = context_length(self.model)
        self.samples: list[Sample] = []
        self.scores: dict[str, np.ndarray] = {}

    def inference(
        self,
        retriever: BaseRetriever,
        ice_template: PromptTemplate | None = None,
        prompt_template: PromptTemplate | None = None,
        output_json_filepath: str | None = None,
        output_json_filename: str | None = None,
        normalizing_str: str | None = None,
    ) -> list[Any]:
        """Predictions of all test rows of the retriever, written to JSON as PPLInferencer does."""
        if normalizing_str is not None:
            raise ValueError("normalizing_str: use the `calibrated` score of emo.eval.icl.records instead")
        labels = self.labels or retriever.get_labels(
            ice_template=ice_template, prompt_template=prompt_template
        )
        builder = (OpenICLPromptBuilder if self.faithful else PromptBuilder)(
            retriever, self.tokenizer, labels, ice_template, prompt_template, self.max_model_token_num
        )
        indices = retriever.retrieve()
        self.samples = builder.build(range(len(indices)), indices)
        self.scores = score_samples(self.scorer, self.samples, self.pad_id if self.faithful else None)
        chosen = [labels[winner(row)] for row in self.scores[self.score].tolist()]
        handler = self._records(retriever, ice_template, labels, chosen)
        path = output_json_filepath or self.output_json_filepath
        name = output_json_filename or self.output_json_filename
        handler.subprocess_write_to_json(path, name)
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()
        handler.merge_to_main_process(path, name)
        handler.write_to_json(path, name)
        return [record["prediction"] for record in handler.results_dict.values()]

    def _records(
        self,
        retriever: BaseRetriever,
        ice_template: PromptTemplate | None,
        labels: list[Any],
        chosen: list[Any],
    ) -> PPLInferencerOutputHandler:
        """OpenICL's record of every row, with the other scores beside PPL."""
        handler = PPLInferencerOutputHandler(self.accelerator)
        if self.faithful:  # it saves the demonstrations before it drops any
            ices = [retriever.generate_ice(i, ice_template=ice_template) for i in retriever.retrieve()]
        else:
            ices = [sample.ice[0] for sample in self.samples]
        handler.save_ice(ices)
        for k, label in enumerate(labels):
            for row, sample in enumerate(self.samples):
                prompt, ppl = sample.prompts[k], float(self.scores["openicl_ppl"][row, k])
                query = prompt.replace(sample.ice[k], "", 1)
                if self.faithful:  # it cuts off as many letters as its batch's first row has demonstrations
                    first = self.samples[row - row % self.batch_size]
                    query = prompt[len(first.ice[k]) :]
                handler.save_prompt_and_ppl(label, query, prompt, ppl, row)
        handler.save_predictions(chosen)
        for row, record in enumerate(handler.results_dict.values()):
            for k, label in enumerate(labels):
                extra = {name: float(self.scores[name][row, k]) for name in SCORES[1:]}
                record[f"label: {label}"].update(extra)
        return handler


def score_samples(
    scorer: PrefixScorer, samples: list[Sample], ignored: int | None = None, advance: Advance | None = None
) -> dict[str, np.ndarray]:
    """All SCORES of all samples, arrays [rows, labels].

    ignored: a token id that is not counted or scored; advance: told after every batch how many rows it
    finished.
    """

    def counted(ids: np.ndarray) -> int:
        return len(ids) if ignored is None else int((ids != ignored).sum())

    items = [sample.items() for sample in samples]
    flat = [item for of_sample in items for item in of_sample]
    if len(flat) != len(samples):
        advance = None  # what finishes is then not rows
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
