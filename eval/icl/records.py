"""Records of test rows: prediction, demonstrations and scores, by our inferencer or by OpenICL's."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from datasets import DatasetDict

from common.errors import UserError
from eval.icl.extra_scores import calibrated, channel
from eval.icl.inferencer import PrefixPPLInferencer
from eval.icl.openicl_compat import PPLInferencer, quiet
from eval.icl.prefix_scorer import Advance, PrefixScorer
from eval.icl.retrieve import StoredRetriever
from eval.icl.scores import winner
from eval.icl.settings import Settings
from eval.icl.task_data import reader
from eval.icl.tasks import Task
from eval.model import EvaluatedModel

Record = dict[str, Any]


class Recorder:
    """Makes the records of one model under some settings."""

    def __init__(self, model: EvaluatedModel, settings: Settings, scorer: PrefixScorer | None) -> None:
        self.model, self.settings, self.scorer = model, settings, scorer

    def records(
        self, task: Task, part: DatasetDict, indices: list[list[int]], advance: Advance
    ) -> list[Record]:
        """One record per test row of `part`, whose demonstrations are `indices`.

        advance: told how many rows are finished, as they are. Raises NotFiniteError.
        """
        retriever = StoredRetriever(reader(task, part), indices, ice_num=max(map(len, indices)))
        if self.scorer is None:
            return self._by_openicl(task, retriever)
        return self._by_prefixes(task, part, retriever, self.scorer, advance)

    def _by_prefixes(
        self,
        task: Task,
        part: DatasetDict,
        retriever: StoredRetriever,
        scorer: PrefixScorer,
        advance: Advance,
    ) -> list[Record]:
        with tempfile.TemporaryDirectory() as scratch, quiet():  # OpenICL makes its output directory at once
            inferencer = PrefixPPLInferencer(
                tokenizer_name=self.model.tokenizer,
                max_model_token_num=self.settings.max_tokens,
                output_json_filepath=scratch,
                labels=task.labels,
                scorer=scorer,
                faithful=self.settings.faithful,
            )
            inferencer.score_rows(retriever, task.demonstration_template, task.template, advance)
        self._require_context(max(len(ids) for sample in inferencer.samples for ids in sample.ids))
        scores, samples = dict(inferencer.scores), inferencer.samples
        common = (scorer, self.model.tokenizer, inferencer.max_model_token_num)
        if "channel" in self.settings.extras:
            scores["channel"] = channel(task, part, retriever.indices, *common)
        if "calibrated" in self.settings.extras:
            scores["calibrated"] = calibrated(task, part, samples, scores["suffix_sum"], *common)
        return [
            self._record(
                task,
                {name: values[n].tolist() for name, values in scores.items()},
                demonstrations=sample.demonstrations,
                dropped=sample.dropped,
                cut=sample.cut,
            )
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
            self._record(task, {"openicl_ppl": values}, demonstrations=retriever.indices[n], dropped=0, cut=0)
            for n, values in enumerate(ppl)
        ]

    def _record(self, task: Task, scores: dict[str, list[float]], **facts: Any) -> Record:
        """Record the numbers that decide, to the last digit."""
        rounded = {name: [_rounded(value) for value in values] for name, values in scores.items()}
        return {"prediction": task.labels[winner(rounded[self.settings.score])], **facts, "scores": rounded}

    def _require_context(self, longest: int | None) -> None:
        """OpenICL's ways know no limit but --max-tokens. longest: None when it is not known, but too long."""
        context = self.model.context_length()
        if context is not None and (longest is None or longest > context):
            raise UserError(
                f"a prompt exceeds the model's context of {context} tokens; give --max-tokens {context}"
            )


def _rounded(value: float) -> float:
    """Nine digits: more than float32 has, and files stay readable."""
    return float(f"{value:.9g}")
