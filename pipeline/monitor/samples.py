"""samples.jsonl: how the model goes on with `train.sample_prompts`, at every save.

Greedily, so that what differs between two checkpoints is the model.
"""

from __future__ import annotations

import json
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist

from emo.common.errors import UserError
from emo.data_prep.config import TRAIN
from emo.data_prep.encoding.tokenizer import load_tokenizer, text_ids
from emo.data_prep.shards.format import read_manifest

from ..config import RunConfig
from ..control.run_dir import SAMPLES, drop_records
from ..engine.engine import Engine
from ..model.export import unwrap


class Samples:
    """The prompts of a run as token ids, and the file of their continuations."""

    def __init__(self, config: RunConfig, step: int, writes: bool) -> None:
        """step: after which the run goes on; what was sampled later is dropped, as in metrics.jsonl."""
        self.prompts, self._tokens = config.train.sample_prompts, config.train.sample_tokens
        self._path, self._writes = config.output_dir / SAMPLES, writes
        self._ids = prompt_ids(config)
        self._tokenizer: Any = load_tokenizer(config.data.dir / "tokenizer") if self.prompts else None
        if self._tokenizer is not None:
            self._ends = {self._tokenizer.eos_token_id, *read_manifest(config.data.dir / TRAIN).answer_ends}
        if writes:
            drop_records(self._path, step)

    def take(self, trainer: Engine, step: int, tokens: int) -> str | None:
        """Continue every prompt and write it down; return the first text on rank 0. All ranks must call."""
        if self._tokenizer is None:
            return None
        rows = self._continued(trainer)
        if not self._writes:
            return None
        records = []
        for prompt, ids, new in zip(self.prompts, self._ids, rows, strict=True):
            # Alone the new tokens could lose their first space.
            before, whole = (self._tokenizer.decode(i, skip_special_tokens=True) for i in (ids, ids + new))
            text = whole[len(before) :]
            records.append({"step": step, "tokens": tokens, "prompt": prompt, "text": text})
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        return f"{records[0]['prompt']}{records[0]['text']}"

    @torch.no_grad()
    def _continued(self, trainer: Engine) -> list[list[int]]:
        """Return the likeliest next tokens after each prompt; what follows the end of a text is cut off.

        Every rank makes the same number of forward passes over the same tokens, those of rank 0, because
        under ZeRO-3 all take part in each. No random number is drawn.
        """
        lengths = torch.tensor([len(ids) for ids in self._ids], device=trainer.world.device)
        rows, widest = torch.arange(len(lengths), device=lengths.device), int(lengths.max())
        ids = lengths.new_zeros(
            (len(lengths), widest + self._tokens)
        )  # attention is causal: all later is unseen
        for row, prompt in enumerate(self._ids):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        keeps = "logits_to_keep" in getattr(unwrap(trainer.model), "order", ())
        trainer.ds.eval()
        with torch.compiler.set_stance("force_eager"):  # another length at every pass
            for last in range(widest - 1, widest - 1 + self._tokens):  # of the longest prompt
                before, ends = ids[:, : last + 1], lengths + (last - widest)
                if keeps:  # the head need not see the other positions
                    positions, which = ends.unique(return_inverse=True)
                    logits = trainer.ds(input_ids=before, logits_to_keep=positions).logits[rows, which]
                else:
                    logits = trainer.ds(input_ids=before).logits[rows, ends]
                chosen = logits.argmax(-1)
                dist.broadcast(chosen, 0)
                ids[rows, ends + 1] = chosen
        new = [row[n : n + self._tokens] for row, n in zip(ids.tolist(), lengths.tolist(), strict=True)]
        return [list(takewhile(lambda token: token not in self._ends, row)) for row in new]


def prompt_ids(config: RunConfig) -> list[list[int]]:
    """Return the ids of the prompts, which begin as the documents of the data do.

    Raises UserError for a prompt without any token, and for one that with what is to follow does not fit into
    data.sequence_len.
    """
    train, room = config.train, config.data.sequence_len
    if not train.sample_prompts:
        return []
    tokenizer = load_tokenizer(config.data.dir / "tokenizer")
    prompts = [text_ids(tokenizer, prompt) for prompt in train.sample_prompts]
    for number, ids in enumerate(prompts):
        if not ids or len(ids) + train.sample_tokens > room:
            raise UserError(
                f"train.sample_prompts[{number}] has {len(ids)} tokens; it needs at least one, and with "
                f"train.sample_tokens={train.sample_tokens} at most data.sequence_len={room}",
                code="sample-prompts",
            )
    return prompts
