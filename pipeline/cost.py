"""Transport costs between tokens: c(i, j) = 1 - cos(e_i, e_j) >= 0, from a frozen embedding E [V, H].

E is the output head of a pre-trained model (the trained model's own by default). It never receives
a gradient and is no parameter: sharded optimizers must not see it. Its hidden size need not be the
trained model's.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
from torch import Tensor

from data_prep.config import UserError

NORMALISE_ROWS = 4096  # rows normalised at a time, so that the float32 copy stays small


class CostEmbedding:
    """Unit-length embedding rows [V, H], and the cost rows that follow from them.

    A row of zero length has no direction: its cosine with every other row counts as 0, so its cost
    to every *other* token is 1 and to itself 0 like everybody's.
    """

    def __init__(self, rows: Tensor) -> None:
        """Take rows that are already of unit (or zero) length; see `from_weight` for raw ones."""
        self.rows = rows

    @classmethod
    def from_weight(cls, weight: Tensor, dtype: torch.dtype | None = None) -> CostEmbedding:
        """Normalise a copy of `weight` [V, H]; the copy has `dtype`, by default the weight's own.

        A parameter that DeepSpeed ZeRO-3 keeps in pieces is gathered first (on all ranks: a
        collective call). Raises UserError when the weight is no matrix or holds NaN or infinity.
        """
        if hasattr(weight, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([weight], modifier_rank=None):
                return cls._normalised(weight.detach(), dtype)
        return cls._normalised(weight.detach(), dtype)

    @classmethod
    def _normalised(cls, weight: Tensor, dtype: torch.dtype | None) -> CostEmbedding:
        if weight.dim() != 2 or weight.numel() == 0:
            raise UserError(
                f"cost embedding needs a full [V, H] matrix (got shape {list(weight.shape)}); "
                "gather the parameter first if it is sharded"
            )
        rows = torch.empty_like(weight, dtype=dtype or weight.dtype)
        work = torch.promote_types(torch.promote_types(weight.dtype, rows.dtype), torch.float32)
        zeros = 0
        for start in range(0, len(weight), NORMALISE_ROWS):
            part = weight[start : start + NORMALISE_ROWS].to(work)
            # scale by the largest entry first: squares of tiny or huge entries leave float32's range
            peak = part.abs().amax(1, keepdim=True)
            if not torch.isfinite(peak).all():
                raise UserError("cost embedding holds NaN or infinite values")
            empty = peak == 0
            zeros += int(empty.sum())
            part = part / torch.where(empty, 1.0, peak)
            norm = torch.linalg.vector_norm(part, dim=1, keepdim=True)
            rows[start : start + NORMALISE_ROWS] = part / torch.where(empty, 1.0, norm)
        if zeros:
            warnings.warn(
                f"cost embedding: {zeros} of {len(rows)} rows have length zero; "
                "their cost to every other token is 1",
                stacklevel=3,
            )
        return cls(rows)

    @property
    def vocab_size(self) -> int:
        return self.rows.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.rows.shape[1]

    def to(self, device: torch.device | str) -> CostEmbedding:
        """The same costs on `device` (itself if it is there already)."""
        return self if self.rows.device == torch.device(device) else CostEmbedding(self.rows.to(device))

    def costs(self, targets: Tensor) -> Tensor:
        """Cost rows [u, V] of the token ids `targets` [u], float32 (float64 if the embedding is).

        Never negative, and exactly 0 at the target itself whatever the rounding.
        """
        similarity = torch.mm(self.rows[targets], self.rows.t())
        cost = similarity.to(torch.promote_types(similarity.dtype, torch.float32))
        cost.neg_().add_(1).clamp_(min=0)
        return cost.scatter_(1, targets[:, None], 0)


def load_cost(source: str, vocab_size: int, dtype: torch.dtype = torch.float32) -> CostEmbedding:
    """The cost embedding of a pre-trained model, without loading that model.

    `source` is a model directory or hub id, of which only the output head's tensor is read (the
    input embedding where the two are tied), or a .safetensors / .pt file holding one matrix.
    Raises UserError when it is missing, ambiguous, or made for another vocabulary.
    """
    path = Path(source)
    if path.suffix in (".safetensors", ".pt", ".pth", ".bin"):
        if not path.is_file():
            raise UserError(f"cost embedding file {source} does not exist")
        weight = _only_matrix(path)
    else:
        weight = _head_of_model(source)
    if weight.shape[0] != vocab_size:
        raise UserError(
            f"cost embedding {source} has {weight.shape[0]} rows but the model's vocabulary has "
            f"{vocab_size}; both must share one vocabulary"
        )
    return CostEmbedding.from_weight(weight, dtype)


def _only_matrix(path: Path) -> Tensor:
    """The one two-dimensional tensor in a file."""
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if len(file.get_slice(name).get_shape()) == 2]  # noqa: SIM118
            if len(names) == 1:
                return file.get_tensor(names[0])
    else:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if isinstance(content, Tensor):
            return content
        names = [k for k, v in content.items() if isinstance(v, Tensor) and v.dim() == 2]
        if len(names) == 1:
            return content[names[0]]
    raise UserError(
        f"cost embedding file {path} must hold exactly one matrix [V, H] (it holds {len(names)}); "
        "give a model directory to use that model's output head"
    )


def _head_of_model(source: str) -> Tensor:
    """The output head's tensor of a causal LM checkpoint, read alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        line = " ".join(str(error).split())
        raise UserError(f"cost embedding {source} is no model directory or hub id: {line}") from None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = _head_names(model)
    for name in names:
        tensor = _read_tensor(source, name)
        if tensor is not None:
            return tensor
    raise UserError(f"model {source} holds none of the head's tensors ({', '.join(names)})")


def _head_names(model: torch.nn.Module) -> list[str]:
    """Names a checkpoint may use for the head: its own first, then the one it is tied to."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    tied = model.get_input_embeddings() if model.config.tie_word_embeddings else None  # type: ignore[operator, union-attr]
    names = [f"{n}.weight" for module in (head, tied) for n, m in model.named_modules() if m is module]
    prefix = f"{model.base_model_prefix}."
    # checkpoints of a bare base model lack the prefix
    return names + [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def _read_tensor(source: str, name: str) -> Tensor | None:
    """Tensor `name` of a checkpoint in one or many files, or None if it holds no such tensor."""
    from safetensors import safe_open

    for stem in ("model.safetensors", "pytorch_model.bin"):
        index = _checkpoint_file(source, f"{stem}.index.json")
        shard: str | None = stem
        if index is not None:
            shard = json.loads(index.read_text())["weight_map"].get(name)
        path = _checkpoint_file(source, shard) if shard else None
        if path is None:
            continue
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                if name in file.keys():  # noqa: SIM118
                    return file.get_tensor(name)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if name in content:
                return content[name].clone()
    return None


def _checkpoint_file(source: str, name: str) -> Path | None:
    """A file of a local or hub checkpoint, fetched alone; None if there is none of that name."""
    from transformers.utils import cached_file

    found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return Path(found) if found else None
