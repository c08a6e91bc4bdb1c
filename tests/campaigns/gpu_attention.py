"""Part 6 of the GPU campaign: documents that share a row, with every attention that is here."""

from __future__ import annotations

import typing
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from common.errors import UserError
from common.labels import IGNORE
from pipeline.config import ModelConfig
from pipeline.loss import fuse_model, get_objective
from pipeline.planning.attention import usable_attention
from tests.bench import common
from tests.campaigns.gpu_figures import Figures, MissingError
from tests.campaigns.gpu_setting import GPU, architecture

DEVICE = torch.device("cuda" if GPU else "cpu")
LONG = 4096  # tokens of a row whose memory is measured
ROWS = 2
GIB = 2**30
ALIKE = 1e-2  # relative: bfloat16, in kernels that add in another order
CHOICES = typing.get_args(ModelConfig.model_fields["attn_implementation"].annotation)


def attention(show: Figures) -> None:
    """Part 6: packed rows give what single documents give; what packing costs in memory."""
    for name in (choice for choice in CHOICES if choice != "auto"):
        with show.attempt(name):
            show.need_seconds(15)
            model = _model(name, layers=2, quick=show.quick)
            _compare(show, name, model)
            del model
            if GPU:
                _memory(show, name)
            else:
                show.skip(f"{name}: memory at {LONG} tokens", "needs a GPU")
        if GPU:
            torch.cuda.empty_cache()


def _model(name: str, layers: int, quick: bool) -> Any:
    """A LLaMA with random weights that ends in the fused head. Raises MissingError without that attention."""
    dtype = torch.bfloat16 if GPU else torch.float32
    keys = architecture("toy" if quick else "220M") | {"num_hidden_layers": layers}
    config = AutoConfig.for_model(keys.pop("model_type"), tie_word_embeddings=False, **keys)
    settings = ModelConfig(
        path="random weights", attn_implementation=name, dtype="bfloat16" if GPU else "float32"
    )
    try:
        usable = usable_attention(settings, config)
    except UserError as error:
        raise MissingError(error) from None
    torch.manual_seed(0)
    with DEVICE:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=usable)
    model.config.use_cache = False
    fuse_model(model, get_objective("mle"))
    return model


def _documents(vocabulary: int, lengths: tuple[int, ...], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (length,), generator=generator).to(DEVICE) for length in lengths]


def _inputs(documents: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, positions and labels of one row [1, L] that holds the documents."""
    ids = torch.cat(documents)[None]
    positions = torch.cat([torch.arange(len(d), device=DEVICE) for d in documents])[None]
    labels = torch.cat([torch.cat((d[1:], d.new_tensor([IGNORE]))) for d in documents])[None]
    return ids, positions, labels


@torch.no_grad()
def _nll(model: Any, documents: list[Tensor]) -> Tensor:
    """Negative log-likelihood of each document of a row that holds them, a mean over its tokens."""
    ids, positions, labels = _inputs(documents)
    found, start = [], 0
    for document in documents:
        own = torch.full_like(labels, IGNORE)
        part = slice(start, start + len(document))
        own[:, part] = labels[:, part]
        sums = model(input_ids=ids, labels=own, position_ids=positions)
        found.append(sums.nll / sums.tokens.clamp(min=1))
        start += len(document)
    return torch.stack(found).double()


def _compare(show: Figures, name: str, model: Any) -> None:
    lengths = (23, 9, 32) if show.quick else (700, 37, 2, 1309)
    documents = _documents(model.config.vocab_size, lengths, seed=1)
    packed = _nll(model, documents)
    alone = torch.cat([_nll(model, [document]) for document in documents])
    value = float(((packed - alone).abs() / alone).max())
    show(f"{name}: packed and alone, likelihoods apart", value, at_most=ALIKE, always=True)
    others = [*_documents(model.config.vocab_size, lengths[:1], seed=2), *documents[1:]]
    moved = float((_nll(model, others) - packed)[1:].abs().max())
    note = "largest change of a document's likelihood when the one before it is another"
    show(f"{name}: what other documents leak, nats a token", moved, at_most=1e-4, always=True, note=note)


def _memory(show: Figures, name: str) -> None:
    """Peak of a forward and backward pass of ROWS long rows, packed, above that of single documents."""
    layers, few = 8, {}
    model = _model(name, layers, quick=False)
    for what, lengths in (("one document", (LONG,)), ("packed", (1000, 50, 2046, 1000))):
        rows = [_inputs(_documents(model.config.vocab_size, lengths, seed)) for seed in range(ROWS)]
        ids, positions, labels = (torch.cat(column) for column in zip(*rows, strict=True))

        def step(ids: Tensor = ids, positions: Tensor = positions, labels: Tensor = labels) -> None:
            sums = model(input_ids=ids, labels=labels, position_ids=positions)
            (sums.loss / sums.tokens).backward()
            model.zero_grad(set_to_none=True)

        step()
        few[what] = common.peak_memory_mb(step) * 2**20
    note = f"{few['packed'] / GIB:.2f} GiB packed, {few['one document'] / GIB:.2f} as one document a row"
    mask = 3 * ROWS * LONG * LONG / GIB  # once, as truth values and in bfloat16
    extra = (few["packed"] - few["one document"]) / GIB
    what = f"{name}: memory of packing, {ROWS} rows of {LONG} tokens, {layers} layers"
    show(what, extra, "GiB", at_most=mask if name in ("sdpa", "eager") else mask / 3, note=note)
