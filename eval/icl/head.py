"""The language model head, run only where something is predicted, and NLLs in float64 from its logits."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

HEAD_BYTES = 64 << 20  # logits alive at once


class Head:
    """A model's output embeddings, with the scale and soft cap that its configuration names.

    What else a family does to its logits is not known here; `probe` compares with the model's own.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.head: nn.Linear = model.get_output_embeddings()
        parameter = self.head.weight
        self._device, self._dtype = parameter.device, parameter.dtype
        config = model.config.get_text_config()
        self._softcap = _number(config, "final_logit_softcapping")
        divisor = _number(config, "logits_scaling")  # Granite
        self._scale = _number(config, "logit_scale") or (1 / divisor if divisor else None)  # Cohere
        self._plain = (
            type(self.head) is nn.Linear
            and self.head.bias is None
            and self._dtype == torch.float32
            and self._softcap is None
            and self._scale is None
        )
        self._buffer: Tensor | None = None

    def pairs(
        self, hidden: Tensor, source: np.ndarray, target: np.ndarray, ignored: int | None = None
    ) -> np.ndarray:
        """-log p(target | state at source), float64 [Q]; hidden [B, T, H], source: flat positions."""
        # The state before the tails predicts one token per tail: its logits are computed once.
        states, pair_state = np.unique(source, return_inverse=True)
        flat = hidden.reshape(-1, hidden.shape[-1])[torch.from_numpy(states).to(self._device)]
        order = np.argsort(pair_state, kind="stable")
        rows = torch.from_numpy(pair_state[order]).to(self._device)
        targets = torch.from_numpy(target[order]).to(self._device)
        nll = np.empty(len(source))
        nll[order] = self.nll(flat, rows, targets, ignored).cpu().numpy()
        return nll

    def nll(self, states: Tensor, rows: Tensor, targets: Tensor, ignored: int | None = None) -> Tensor:
        """-log p(targets[q] | states[rows[q]]), float64 [Q]; rows ascending, states [M, H].

        ignored: targets with this id cost nothing.
        """
        vocab = self.head.weight.shape[0]
        step = max(1, HEAD_BYTES // (4 * vocab))
        starts = torch.arange(0, len(states) + step, step, device=rows.device)
        cuts = torch.searchsorted(rows, starts).tolist()
        parts = []
        for i, (lo, hi) in enumerate(itertools.pairwise(cuts)):
            if lo < hi:
                log_p = self._log_softmax(states[i * step : (i + 1) * step], step)
                parts.append(-log_p[rows[lo:hi] - i * step, targets[lo:hi]].double())
        nll = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=self._device)
        return nll if ignored is None else nll.masked_fill(targets == ignored, 0.0)

    def _log_softmax(self, states: Tensor, rows: int) -> Tensor:
        """log p over the vocabulary, float32 [M, V], M <= rows. On a CPU it is overwritten by the next call.

        There every large new tensor costs as much in page faults as in arithmetic, so one buffer serves all:
        matrix product and softmax together take less than half the time.
        """
        if self._device.type != "cpu":
            return self._logits(self.head(states)).log_softmax(dim=-1)
        if self._buffer is None:
            self._buffer = torch.empty(rows, self.head.weight.shape[0])
        logits = self._buffer[: len(states)]
        if self._plain:
            torch.mm(states, self.head.weight.t(), out=logits)
        else:
            logits.copy_(self._logits(self.head(states)))
        return torch.ops.aten._log_softmax.out(logits, -1, False, out=logits)

    def _logits(self, scores: Tensor) -> Tensor:
        """The head's output as the model would return it, in float32."""
        if self._scale is not None:
            scores = scores * self._scale
        if self._softcap is not None:
            scores = torch.tanh(scores / self._softcap) * self._softcap
        return scores.float()


def own_nll(model: Any, ids: np.ndarray, ignored: int | None = None) -> np.ndarray:
    """-log p of tokens 2..N of one prompt by the model's own forward, float64 [N - 1]: always right."""
    row = torch.from_numpy(ids)[None].to(next(model.parameters()).device)
    logits = model(input_ids=row, use_cache=False).logits[0, :-1]
    targets = row[0, 1:]
    step = max(1, HEAD_BYTES // (4 * logits.shape[-1]))
    parts = [
        -part.float().log_softmax(dim=-1).gather(1, labels[:, None])[:, 0].double()
        for part, labels in zip(logits.split(step), targets.split(step), strict=True)
    ]
    nll = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
    return (nll if ignored is None else nll.masked_fill(targets == ignored, 0.0)).cpu().numpy()


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
