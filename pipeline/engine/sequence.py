"""Sequence parallelism: the ranks of a group share every row, and each computes a part of its positions.

Everything except attention works on single positions, so a rank needs only its part of a row. Attention works
on single heads. DeepSpeed's Ulysses exchanges the two: before attention each rank gets all positions of its
part of the heads, and afterwards all heads of its part of the positions.

Labels are shifted before rows are cut, losses are sums and their divisor is global. Therefore DeepSpeed's
ordinary reduction over all ranks gives the gradient, and a checkpoint does not depend on the groups.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from emo.common.context_length import context_length
from emo.common.errors import UserError
from emo.data_prep.config import MAX_TOKENS

from ..config import RunConfig
from ..control.world import World
from ..loss.models.head import SHARED, VARLEN

KEY = "train.sequence_parallel"
LENGTH_DEPENDENT = ("dynamic", "longrope")  # RoPE whose frequencies depend on the longest position


class SequenceAttention(UlyssesSPAttentionHF):
    """Attention over rows that a group of ranks shares.

    DeepSpeed's `forward` gathers positions in every layer, drops masks and changes the layer for good if keys
    are repeated. Here the inputs already have the bounds of the documents in complete rows. Other calls, as
    in generation, reach the original attention unchanged.
    """

    def __init__(self, attention: Any, group: dist.ProcessGroup) -> None:
        """Take an attention function of transformers that separates documents by their bounds."""
        heads = dist.get_world_size(group)  # placeholders: every call sets the sizes of its layer
        super().__init__(attention, 1, heads, 1, heads, 1, group, seq_length_is_variable=True)

    def forward(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return attention [b, l, H, D] for query [b, H, l, D], key and value [b, H', l, D].

        With SHARED among `kwargs`, l is this rank's part of the positions.
        """
        if not kwargs.pop(SHARED, False):
            return self.attn(module, query, key, value, attention_mask, *args, **kwargs)
        if key.shape != value.shape or key.shape[3] != query.shape[3]:
            problem = f"{type(module).__name__} has keys and values of different sizes"
            raise UserError(f"{KEY}: {problem}. Set it to 1", code="sequence-parallel")
        kwargs.pop("position_ids", None)  # of this rank's part
        self.batch_size, heads, self.local_seq_length, self.attn_head_size = query.shape
        self.attn_head_count = heads
        self.global_seq_length = self.local_seq_length * self.world_size
        self.local_q_head_count = heads // self.world_size
        self.kv_replication_factor = self.world_size // key.shape[1]
        self.local_kv_head_count = max(1, key.shape[1] // self.world_size)
        parts = self._combine_local_sequences(*(x.permute(2, 0, 1, 3) for x in (query, key, value)))
        q, k, v = (x.permute(1, 2, 0, 3) for x in parts)
        out, _ = self.attn(module, q, k, v, None, *args, **kwargs)
        out = self._partition_global_sequence(out.transpose(0, 1).flatten(2))
        return out.transpose(0, 1).unflatten(2, (heads, -1)), None


def share_rows(world: World) -> None:
    """Make attention work on rows that groups of `world.sequence` ranks share; all ranks must call."""
    ranks = range(world.ranks)
    groups = [dist.new_group(list(ranks[i : i + world.sequence])) for i in ranks[:: world.sequence]]
    for name in (VARLEN, "flash_attention_2"):
        original = ALL_ATTENTION_FUNCTIONS[name]
        ALL_ATTENTION_FUNCTIONS[name] = SequenceAttention(original, groups[world.replica])


def cut_bounds(bounds: Tensor, length: int, part: int, parts: int) -> Tensor:
    """Return the bounds of documents in a rank's part of rows of `length` tokens.

    Documents outside the part are empty, so that all ranks of a group count the same documents.
    """
    size = length // parts
    return bounds // length * size + (bounds % length - part * size).clamp(0, size)


def check_sequence_parallel(config: RunConfig, model: PretrainedConfig) -> None:
    """Raise UserError if the rows of a run cannot be shared by train.sequence_parallel ranks."""
    n = config.train.sequence_parallel
    if n == 1:
        return
    block = config.data.sequence_len
    if block % n:
        problem = f"{KEY}={n} does not divide data.sequence_len={block}"
        longest = min(context_length(model) or MAX_TOKENS, MAX_TOKENS)
        lengths = [str(m) for m in (block // n * n, block // n * n + n) if 1 < m <= longest]
        cure = f"Set data.sequence_len={' or '.join(lengths)} and prepare the data again, or set"
        cure = f"{cure if lengths else 'Set'} {KEY} to a divisor of {block}"
        raise UserError(f"{problem}. {cure}", code="sequence-parallel")
    stores_base = bool(config.train.kl_from_base) and not config.holds_base
    conflicts = {
        "model.compile=true": config.model.compile,
        "objective.on_policy": config.objective.on_policy is not None,
        "train.kl_from_base without model.lora or objective.teacher=base": stores_base,
    }
    for setting in (name for name, is_set in conflicts.items() if is_set):
        problem = f"{KEY}={n} does not work with {setting}"
        raise UserError(f"{problem}. Remove one of them", code="sequence-parallel")
    check_heads(model, n, "the model")


def check_heads(model: PretrainedConfig, n: int, name: str) -> None:
    """Raise UserError if `n` ranks cannot share the attention of a model, which messages call `name`."""
    if n == 1:
        return
    text = model.get_text_config()
    heads = text.num_attention_heads
    keys = getattr(text, "num_key_value_heads", None) or heads
    works = [m for m in range(1, heads + 1) if heads % m == 0 and (keys % m == 0 or m % keys == 0)]
    if n not in works:
        problem = f"{KEY}={n} does not divide the attention of {name}, which has {heads} heads"
        cure = f"Set it to one of {', '.join(map(str, works))}"
        raise UserError(f"{problem} and {keys} heads of keys. {cure}", code="sequence-parallel")
    if kinds := _rope_types(text).intersection(LENGTH_DEPENDENT):
        problem = f"{name} has RoPE of type {min(kinds)}, which depends on the longest position of a batch"
        raise UserError(f"{KEY}={n}: {problem}. Set it to 1", code="sequence-parallel")


def _rope_types(text: PretrainedConfig) -> set[str]:
    """Return the types of RoPE in a configuration, whose settings may be nested by layer type."""
    settings = getattr(text, "rope_parameters", None) or {}
    nested = [settings, *(value for value in settings.values() if isinstance(value, dict))]
    return {str(part.get("rope_type")) for part in nested}
