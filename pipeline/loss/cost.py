"""Transport costs between tokens: c(i, j) = 1 - cos(e_i, e_j) >= 0, from a frozen embedding E [V, H].

E is the output head of a pre-trained model (the trained model's own by default). It never receives
a gradient and is no parameter: sharded optimizers must not see it. Its hidden size need not be the
trained model's.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path

import torch
from torch import Tensor

from common.errors import UserError, one_line
from pipeline.loss.cost_cache import CostTable

OLD_HEAD_NAMES = ("embed_out.weight",)  # what checkpoints call a head that transformers renames
TENSOR_FILES = (".safetensors", ".pt", ".pth", ".bin")  # endings of files that hold one matrix
NORMALISE_ROWS = 4096  # rows normalised at a time, so that the float32 copy stays small


class CostEmbedding:
    """Unit-length embedding rows [V, H], and the cost rows that follow from them.

    A row of zero length has no direction: its cosine with every other row counts as 0, so its cost
    to every *other* token is 1 and to itself 0 like everybody's.
    """

    def __init__(self, rows: Tensor, cache_mb: float = 0.0) -> None:
        """Take rows that are already of unit (or zero) length; see `from_weight` for raw ones.

        With `cache_mb` above 0 the cost rows of frequent targets are kept in that much memory, in
        float16: every cost is then off by up to 5e-4 of itself, gradients by less than 2e-3. With 0 (the
        default) they are exact.
        """
        if cache_mb < 0:
            raise UserError(f"the cost cache's memory must not be negative (given: {cache_mb:g} MB)")
        self.rows = rows
        self.cache_mb = cache_mb
        self.fingerprint: str | None = None  # of the tensor that it was read from, by `load_cost`
        self._table: CostTable | None = None
        self._placed: CostEmbedding | None = None

    def cached(self, memory_mb: float) -> CostEmbedding:
        """The same embedding with a cache of `memory_mb` for cost rows (0: exact, no cache)."""
        return CostEmbedding(self.rows, memory_mb)

    @property
    def table(self) -> CostTable | None:
        """The cache, made at its first use; None where rows are exact."""
        if self.cache_mb and self._table is None:
            self._table = CostTable(self.vocab_size, self.cache_mb, self.rows.device)
        return self._table

    def placed(self, device: torch.device, model_dtype: torch.dtype) -> CostEmbedding:
        """This embedding on the model's device, no wider than the model is; the copy is kept.

        For a half-precision model the rows become float16 on an accelerator (entries are at most 1, so
        its three more bits are worth having) and bfloat16 on a CPU, which has no fast float16 product.
        """
        dtype = self.rows.dtype
        if model_dtype.itemsize == 2:
            dtype = torch.bfloat16 if device.type == "cpu" else torch.float16
        if self.rows.device == device and self.rows.dtype == dtype:
            return self
        if self._placed is None or (self._placed.rows.device, self._placed.rows.dtype) != (device, dtype):
            self._placed = CostEmbedding(self.rows.to(device, dtype), self.cache_mb)
        return self._placed

    @classmethod
    def from_weight(
        cls, weight: Tensor, dtype: torch.dtype | None = None, cache_mb: float = 0.0
    ) -> CostEmbedding:
        """Normalise a copy of `weight` [V, H]; the copy has `dtype`, by default the weight's own.

        A parameter that DeepSpeed ZeRO-3 keeps in pieces is gathered first (on all ranks: a
        collective call). Raises UserError when the weight is no matrix or holds NaN or infinity.
        """
        if hasattr(weight, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([weight], modifier_rank=None):
                return cls(unit_rows(weight.detach(), dtype), cache_mb)
        return cls(unit_rows(weight.detach(), dtype), cache_mb)

    @property
    def vocab_size(self) -> int:
        return self.rows.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.rows.shape[1]

    def cosines(self, targets: Tensor) -> Tensor:
        """Cosines [u, V] of the tokens `targets` [u] with all tokens, in the rows' dtype."""
        return torch.mm(self.rows[targets], self.rows.t())

    def costs(self, targets: Tensor) -> Tensor:
        """Cost rows [u, V] of the tokens `targets` [u], float32 (float64 if the embedding is).

        Never negative, and exactly 0 at the target itself whatever the rounding.
        """
        cosine = self.cosines(targets)
        cost = cosine.to(torch.promote_types(cosine.dtype, torch.float32))
        cost.neg_().add_(1).clamp_(min=0)
        return cost.scatter_(1, targets[:, None], 0)


def unit_rows(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`weight` [V, H] with its rows scaled to length one (zero rows stay zero), in `dtype` or its own."""
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
            stacklevel=2,
        )
    return rows


class LiveCost:
    """Stands for the head as it trains ("adaptive" cost): normalised anew, detached, at every call."""


LIVE = LiveCost()


def load_cost(
    source: str,
    vocab_size: int,
    dtype: torch.dtype = torch.float32,
    cache_mb: float = 0.0,
    revision: str | None = None,
) -> CostEmbedding:
    """The cost embedding of a pre-trained model, without loading that model.

    `source` is a model directory or hub id (at `revision`), of which only the output head's tensor is read
    (the input embedding where the two are tied), or a .safetensors / .pt file holding one matrix.
    Raises UserError when it is missing, ambiguous, or made for another vocabulary.
    """
    path = Path(source)
    if path.suffix in TENSOR_FILES:
        if not path.is_file():
            raise UserError(f"cost embedding file {source} does not exist")
        weight = _only_matrix(path)
    else:
        weight = _head_of_model(source, revision)
    if weight.shape[0] != vocab_size:
        raise UserError(
            f"cost embedding {source} has {weight.shape[0]} rows but the model's vocabulary has "
            f"{vocab_size}; both must share one vocabulary"
        )
    cost = CostEmbedding.from_weight(weight, dtype, cache_mb)
    # of the tensor as stored: normalised rows differ in their last bits from one processor to another
    content = weight.detach().contiguous().flatten().view(torch.uint8).numpy()
    cost.fingerprint = hashlib.sha256(content).hexdigest()  # type: ignore[arg-type]
    return cost


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


def _head_of_model(source: str, revision: str | None) -> Tensor:
    """The output head's tensor of a causal LM checkpoint, read alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(source, revision=revision)
    except (OSError, ValueError) as error:
        line = one_line(error)
        raise UserError(f"cost embedding {source} is no model directory or hub id: {line}") from None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = _head_names(model)
    for name in (*names, *OLD_HEAD_NAMES):
        tensor = _read_tensor(source, name, revision)
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


def _read_tensor(source: str, name: str, revision: str | None) -> Tensor | None:
    """Tensor `name` of a checkpoint in one or many files, or None if it holds no such tensor."""
    from safetensors import safe_open

    for stem in ("model.safetensors", "pytorch_model.bin"):
        index = _checkpoint_file(source, f"{stem}.index.json", revision)
        shard: str | None = stem
        if index is not None:
            shard = json.loads(index.read_text())["weight_map"].get(name)
        path = _checkpoint_file(source, shard, revision) if shard else None
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


def _checkpoint_file(source: str, name: str, revision: str | None) -> Path | None:
    """A file of a local or hub checkpoint, fetched alone; None if there is none of that name."""
    from transformers.utils import cached_file

    found = cached_file(source, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return Path(found) if found else None
