"""samples.jsonl: how the model continues `train.sample_prompts`, before the first step and at every save.

Decoding is greedy, so that differences between two checkpoints come from the model.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist

from emo.data_prep.config import TRAIN
from emo.data_prep.encoding.tokenizer import load_tokenizer
from emo.data_prep.shards.format import read_manifest

from ...config import RunConfig
from ...control.run_dir import SAMPLES, append_records, drop_records
from ...engine.engine import Engine
from ...model.export import keeps_logits
from ..component import Component, RunState
from ..launches import Launch


class Samples(Component):
    """Continues the prompts of a run and records the texts."""

    def __init__(
        self, config: RunConfig, engine: Engine, launch: Launch, prompts: list[list[int]], start: RunState
    ) -> None:
        """Drop the texts of later steps, which will come again.

        Args:
            config: The configuration of the run.
            engine: The engine of the model that writes.
            launch: Shows the first text.
            prompts: Token ids of train.sample_prompts.
            start: Where this launch begins.
        """
        self.prompts = config.train.sample_prompts
        self._ids = prompts
        self._tokens = config.train.sample_tokens
        self._path = config.output_dir / SAMPLES
        self._engine = engine
        self._launch = launch
        self._tokenizer: Any = load_tokenizer(config.data.dir / "tokenizer") if self.prompts else None
        if self._tokenizer is not None:
            self._ends = {self._tokenizer.eos_token_id, *read_manifest(config.data.dir / TRAIN).answer_ends}
        if engine.world.is_main:
            drop_records(self._path, start.step)

    def before_training(self, state: RunState) -> None:
        """Sample from a model that was not trained yet."""
        if state.step == 0:
            self.sample(state)

    def after_save(self, state: RunState) -> None:
        self.sample(state)

    def sample(self, state: RunState) -> None:
        """Continue every prompt and record the texts. All ranks must call."""
        if self._tokenizer is None:
            return
        rows = self._continue_prompts()
        if not self._engine.world.is_main:
            return
        records = []
        for prompt, ids, new in zip(self.prompts, self._ids, rows, strict=True):
            # Without the prompt, the decoded tokens could lose their first space.
            before, full = (self._tokenizer.decode(i, skip_special_tokens=True) for i in (ids, ids + new))
            text = full[len(before) :]
            records.append({"step": state.step, "tokens": state.tokens, "prompt": prompt, "text": text})
        append_records(self._path, records)
        self._launch.log_sample(state.step, f"{records[0]['prompt']}{records[0]['text']}")

    @torch.no_grad()
    def _continue_prompts(self) -> list[list[int]]:
        """Return the most likely next tokens after each prompt, up to the end of the text.

        Every rank makes the same number of forward passes over rank 0's tokens, because under ZeRO-3 all
        ranks take part in each pass. No random number is drawn.
        """
        engine = self._engine
        lengths = torch.tensor([len(ids) for ids in self._ids], device=engine.world.device)
        rows = torch.arange(len(lengths), device=lengths.device)
        longest = int(lengths.max())
        # Causal attention ignores the zeros after a text.
        ids = lengths.new_zeros((len(lengths), longest + self._tokens))
        for row, prompt in enumerate(self._ids):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        keeps = keeps_logits(engine.model)
        engine.ds.eval()
        with torch.compiler.set_stance("force_eager"):  # the length differs at every pass
            for last in range(longest - 1, longest - 1 + self._tokens):  # position in the longest row
                before = ids[:, : last + 1]
                ends = lengths + (last - longest)
                if keeps:  # the head can skip the other positions
                    positions, which = ends.unique(return_inverse=True)
                    logits = engine.ds(input_ids=before, logits_to_keep=positions).logits[rows, which]
                else:
                    logits = engine.ds(input_ids=before).logits[rows, ends]
                chosen = logits.argmax(-1)
                dist.broadcast(chosen, 0)
                ids[rows, ends + 1] = chosen
        new = [row[n : n + self._tokens] for row, n in zip(ids.tolist(), lengths.tolist(), strict=True)]
        return [list(takewhile(lambda token: token not in self._ends, row)) for row in new]
