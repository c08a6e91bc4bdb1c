"""Part 6 of the GPU campaign: documents that share a row, with every attention that is here."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from emo.common.errors import UserError
from emo.common.labels import IGNORE
from emo.pipeline.loss import fuse_model, get_objective
from emo.pipeline.loss.head import VARLEN
from tests.bench import common
from tests.campaigns.gpu_figures import Figures, MissingError
from tests.campaigns.gpu_kernel import functions
from tests.campaigns.gpu_setting import GPU, architecture, needs

DEVICE = torch.device("cuda" if GPU else "cpu")
LONG = 4096  # tokens of a row whose memory is measured
ROWS, LAYERS = 2, 8
GIB = 2**30
ALIKE = 1e-2 if GPU else 1e-4  # relative: bfloat16, in kernels that add in another order
NAMES = (VARLEN, "flash_attention_2", "sdpa", "eager")


def attention(show: Figures) -> None:
    """Part 6: packed rows give what single documents give; what packing costs in memory."""
    with show.attempt(f"{VARLEN} beside sdpa"):
        functions(show)
    for name in NAMES:
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
    _check_host(name, config)
    torch.manual_seed(0)
    with DEVICE:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=name)
    model.config.use_cache = False
    fuse_model(model, get_objective("mle"))
    return model


def _check_host(name: str, config: Any) -> None:
    """Raises MissingError without that attention; where the trainer cannot be asked it is tried."""
    if importlib.util.find_spec("pydantic") is None:
        if name == VARLEN:
            import emo.pipeline.loss.varlen  # noqa: F401 - registers it
        elif name == "flash_attention_2":
            needs("flash_attn")
        return
    from emo.pipeline.config import ModelConfig
    from emo.pipeline.planning.host import usable_attention

    dtype = "bfloat16" if GPU else "float32"
    try:
        usable_attention(ModelConfig(path="random weights", attn_implementation=name, dtype=dtype), config)
    except UserError as error:
        raise MissingError(error) from None


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
    results, start = [], 0
    for document in documents:
        own = torch.full_like(labels, IGNORE)
        part = slice(start, start + len(document))
        own[:, part] = labels[:, part]
        sums = model(input_ids=ids, labels=own, position_ids=positions)
        results.append(sums.nll / sums.tokens.clamp(min=1))
        start += len(document)
    return torch.stack(results).double()


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
    """Peak of a forward and backward pass of ROWS long rows, packed, above that of single documents.

    The target is what `planning.footprint` counts: of SDPA a mask of booleans, and what every layer
    makes of it in bfloat16 and keeps for its backward pass; of attention by segments nothing, or one mask at
    most. Nobody counts eager attention, which keeps all of its scores.
    """
    few = {}
    model = _model(name, LAYERS, quick=False)
    for case, lengths in (("one document", (LONG,)), ("packed", (1000, 50, 2046, 1000))):
        rows = [_inputs(_documents(model.config.vocab_size, lengths, seed)) for seed in range(ROWS)]
        ids, positions, labels = (torch.cat(column) for column in zip(*rows, strict=True))

        def step(ids: Tensor = ids, positions: Tensor = positions, labels: Tensor = labels) -> None:
            sums = model(input_ids=ids, labels=labels, position_ids=positions)
            (sums.loss / sums.tokens).backward()
            model.zero_grad(set_to_none=True)

        step()
        few[case] = common.peak_memory_mb(step) * 2**20
    note = f"{few['packed'] / GIB:.2f} GiB packed, {few['one document'] / GIB:.2f} as one document a row"
    mask = ROWS * LONG * LONG / GIB
    most = {"sdpa": (1 + 2 * LAYERS) * mask, "eager": None}.get(name, mask)
    extra = (few["packed"] - few["one document"]) / GIB
    case = f"{name}: memory of packing, {ROWS} rows of {LONG} tokens, {LAYERS} layers"
    show(case, extra, "GiB", at_most=most, note=note)
