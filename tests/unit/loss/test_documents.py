"""Documents in packed rows: their bounds, varlen attention, and the probe on families of models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emo.common.errors import UserError
from emo.pipeline.engine.device.devices import usable_attention
from emo.pipeline.loss import CostEmbedding, fuse_model, get_objective, plan_tokens, probe_model
from emo.pipeline.loss.models.head import (
    BOUNDS,
    LONGEST,
    SEGMENTS,
    segments,
    separate_documents,
    sum_by_document,
)
from emo.pipeline.loss.models.varlen import varlen_attention
from emo.pipeline.model.config import ModelConfig
from tests.helpers.families import FAMILIES, VOCAB, family, tiny_llama
from tests.helpers.loss_reference import relative_error
from tests.helpers.packing import documents, packed_rows
from tests.helpers.refusals import refused
from tests.helpers.waits import shapes, waits


def rows(*lengths: list[int]) -> Tensor:
    """Return the positions [b, L] of rows that contain documents of these lengths."""
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


def stand_in(packing: str, attention: str) -> Any:
    config = SimpleNamespace(_attn_implementation=attention)
    return SimpleNamespace(packing=packing, config=config, device=torch.device("cpu"), dtype=torch.float32)


def test_flash_attention_gets_the_segments_that_the_loader_knows() -> None:
    """Positions on the meta device have no values, so reading one would fail."""
    bounds, longest = segments(rows([5, 3], [8]))
    inputs: dict[str, Any] = {"cu_seq_lens_q": bounds, "max_length_q": longest}
    separate_documents(stand_in("positions", "flash_attention_2"), torch.empty(2, 8, device="meta"), inputs)
    assert inputs == dict(zip(SEGMENTS, (bounds, bounds, 8, 8), strict=True))
    separate_documents(stand_in("positions", "sdpa"), rows([5, 3]), plain := {})
    assert plain == {}, "other attention reads the positions"


def test_padding_masks_are_dropped_only_for_restarting_positions() -> None:
    model, plain, packed = stand_in("positions", "varlen"), rows([8]), rows([5, 3])
    mask = torch.ones(1, 8, dtype=torch.int64)
    inputs: dict[str, Any] = {"attention_mask": mask}
    separate_documents(model, plain, inputs)
    assert inputs == {"attention_mask": mask}
    separate_documents(model, packed, inputs)
    assert inputs["attention_mask"].numel() == 0 and inputs["cu_seq_lens_q"].tolist() == [0, 5, 8]
    with refused("mask-positions"):
        separate_documents(model, packed, {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])})
    with refused("packing"):
        separate_documents(stand_in("refused", "eager"), packed, {})
    separate_documents(stand_in("refused", "eager"), rows([8], [8]), {})


def test_a_micro_batch_of_the_trainer_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With segments and labels from the loader, nothing waits between token ids and gradients."""
    monkeypatch.setattr(
        "emo.pipeline.loss.models.varlen.attend_per_document", lambda q, k, v, *_: q + (k + v).repeat(1, 2, 1)
    )
    model = tiny_llama(61, num_attention_heads=4, num_key_value_heads=2)
    model.set_attn_implementation("varlen")
    cost = CostEmbedding.from_weight(model.get_output_embeddings().weight.detach())
    fuse_model(model, get_objective("emo"), cost)
    ids, labels, positions = packed_rows()
    bounds, longest = segments(positions)
    plan, inputs = plan_tokens(labels), {"input_ids": ids, "position_ids": positions}
    with waits() as waited:
        sums = model(**inputs, labels=plan, **{BOUNDS: bounds, LONGEST: longest})
        (sums.loss / sums.tokens).backward()
    assert waited == []


def test_sums_by_document() -> None:
    """Values are summed on the device, and valid labels on the host. Padding is a separate document."""
    positions = torch.tensor([[3, 4, 5, 0, 1, 0], [0, 1, 2, 3, 4, 5]])  # a row may begin within a document
    bounds, longest = segments(positions)
    assert (bounds.tolist(), longest, bounds.dtype) == ([0, 3, 5, 6, 12], 6, torch.int32)
    labels = torch.tensor([[5, 6, -100, 7, -100, -100], [-100, 1, 2, 3, 4, -100]])
    assert sum_by_document(torch.arange(12.0), bounds).tolist() == [0 + 1 + 2, 3 + 4, 5, sum(range(6, 12))]
    assert plan_tokens(labels).per_document(bounds).tolist() == [2, 1, 0, 4]


LAYER = SimpleNamespace(is_causal=True)


def alone(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], scale: float, window: int | None) -> Tensor:
    """Return softmax(q k^T * scale) v over earlier tokens of each document, in float64, [T, H, D]."""
    token = torch.arange(bounds[-1])
    document = torch.bucketize(token, torch.tensor(bounds), right=True)
    apart = token[:, None] - token[None, :]
    visible = (document[:, None] == document) & (apart >= 0) & (apart < (window or bounds[-1]))
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize(
    ("heads", "groups", "size", "value_size", "scaling"),
    [(2, 2, 16, 16, None), (4, 2, 8, 8, 0.3), (4, 1, 10, 10, None), (2, 1, 12, 7, None)],
)
def test_varlen_attention_stays_within_documents(
    window: int | None, heads: int, groups: int, size: int, value_size: int, scaling: float | None
) -> None:
    """Values and gradients are right for grouped heads, windows, and widths that the kernel lacks."""
    positions = packed_rows()[2]
    b, length = positions.shape
    bounds, longest = segments(positions)
    torch.manual_seed(0)
    q = torch.randn(b, heads, length, size, requires_grad=True)
    k = torch.randn(b, groups, length, size, requires_grad=True)
    v = torch.randn(b, groups, length, value_size, requires_grad=True)
    weights = torch.randn(b, length, heads, value_size)
    bounded: dict[str, Any] = {"cu_seq_lens_q": bounds, "max_length_q": longest}
    out, _ = varlen_attention(LAYER, q, k, v, None, scaling=scaling, sliding_window=window, **bounded)
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    want = alone(*flat, bounds.tolist(), size**-0.5 if scaling is None else scaling, window)
    torch.testing.assert_close(out.flatten(0, 1).double(), want, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad((out * weights).sum(), (q, k, v), retain_graph=True)
    expected = torch.autograd.grad((want * weights.flatten(0, 1)).sum(), (q, k, v))
    for a, e in zip(got, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keys", [{"dropout": 0.1}, {"softcap": 3.0}, {"is_causal": False}])
def test_unsupported_attention_arguments_raise(keys: dict[str, Any]) -> None:
    x = torch.randn(1, 2, 8, 8)
    bounded: dict[str, Any] = {"cu_seq_lens_q": torch.tensor([0, 8], dtype=torch.int32), "max_length_q": 8}
    with pytest.raises(ValueError):
        varlen_attention(LAYER, x, x, x, None, **bounded, **keys)


def test_varlen_attention_builds_no_quadratic_tensor() -> None:
    """SDPA's mask for a block of 4,096 tokens has 4,096 squared elements. Varlen has no such tensor."""
    length = 4096
    positions = rows([1500, 600, 1, 1995])
    ids = torch.arange(length)[None] % 61
    largest = {}
    for attention in ("sdpa", "varlen"):
        model = tiny_llama(61, max_position_embeddings=length, num_key_value_heads=1)
        model.set_attn_implementation(attention)
        fuse_model(model, get_objective("mle"))
        with shapes() as tensors:
            model(input_ids=ids, labels=ids, position_ids=positions).loss.backward()
        largest[attention] = max(shape.numel() for shape in tensors)
    assert largest["sdpa"] >= length**2
    assert largest["varlen"] <= 128 * length


MASKED = {"opt", "falcon", "mpt", "xglm", "biogpt", "bert-generation"}
REFUSED = {
    *("falcon-alibi", "bloom", "mamba", "mamba2", "rwkv", "jamba", "falcon_h1", "openai-gpt", "bart"),
    *("minimax", "gpt_oss", "lfm2"),
}
UNPACKED = {"bert", "recurrent_gemma", "xlstm"}  # without causal attention, or with a state per row
PACKING = {
    name: "mask" if name in MASKED else "refused" if name in REFUSED else "positions"
    for name in FAMILIES
    if name not in UNPACKED
}
VARLEN = ModelConfig(architecture={"model_type": "llama"}, attn_implementation="varlen")
# Changes of the families: no attention dropout, grouped heads, windows.
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
CHANGES: dict[str, dict[str, Any]] = {
    **{name: {"attn_pdrop": 0.0} for name in ("gpt2", "gpt_bigcode")},
    **{name: {"num_key_value_heads": 1} for name in ("llama", "mistral", "gemma")},
    "qwen2": {"num_key_value_heads": 1, **WINDOW},
}
# Families with special attention, soft caps, recurrences or dropout.
NOT_OFFERED = REFUSED | MASKED - {"opt"} | UNPACKED | {"gpt_neo", "gptj", "stablelm", "gemma2"}


def fused(name: str, attention: str | None = None, **changes: Any) -> Any:
    model = family(name, attention, **changes)
    fuse_model(model, get_objective("mle"))
    return model


def gradients(model: nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def compare(model: Any, ordinary: Any) -> None:
    """Assert that packed rows have the loss and gradients of their documents in the ordinary forward."""
    ids, labels, positions = packed_rows()
    logits = (ordinary(input_ids=part[None], use_cache=False).logits[0, :-1] for part in documents(ids))
    pairs = zip(logits, documents(ids), strict=True)
    want = sum(F.cross_entropy(z.float(), part[1:], reduction="sum") for z, part in pairs)
    sums = model(input_ids=ids, labels=labels, position_ids=positions)
    assert relative_error(sums.loss.detach(), want.detach()) <= 1e-5
    assert relative_error(gradients(model, sums.loss), gradients(ordinary, want)) <= 2e-4


@pytest.mark.parametrize(("name", "packing"), PACKING.items())
def test_packed_rows_train_like_single_documents_or_raise(name: str, packing: str) -> None:
    model = fused(name)
    assert probe_model(model, packed=False) == packing
    if packing != "refused":
        compare(model, family(name))
        return
    with refused("packing"):
        probe_model(model, packed=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_under_varlen(name: str) -> None:
    """Each family either gives right results with varlen, or is rejected with a message of one line."""
    changes = CHANGES.get(name, {})
    ordinary = family(name, **changes)
    try:
        model = fused(name, usable_attention(VARLEN, ordinary.config), **changes)
        assert probe_model(model) == "positions"
    except UserError as error:
        assert name in NOT_OFFERED, error
        return
    assert name not in NOT_OFFERED
    compare(model, ordinary)


@pytest.mark.parametrize("name", ["opt", "gpt2", "mpt", "gemma2"])
def test_the_probe_tolerates_bfloat16_rounding(name: str) -> None:
    """Rounding neither looks like a leak or another head, nor hides one."""
    assert probe_model(fused(name).to(torch.bfloat16)) == PACKING[name]


SKEWED: dict[str, Any] = {  # changed logits of a LLaMA, as in other families
    "scale": lambda z: z * 0.9,
    "cap": lambda z: 3 * torch.tanh(z / 3),
    "mask": lambda z: z.index_fill(-1, torch.tensor([7, 9]), torch.finfo(z.dtype).min),
    "bias": lambda z: z + torch.linspace(-1, 1, VOCAB),
    "fewer": lambda z: z[..., :-3],
}


@pytest.mark.parametrize("change", SKEWED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unknown_transformations_of_logits_raise(change: str, dtype: torch.dtype) -> None:
    model = family("llama").to(dtype)
    ordinary = type(model)

    class Peculiar(ordinary):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = SKEWED[change](out.logits)
            return out

    model.__class__ = Peculiar
    fuse_model(model, get_objective("mle"))
    with refused("head-differs"):
        probe_model(model)


def test_models_that_are_not_causal_or_not_finite_raise() -> None:
    model = fused("llama")

    def sees_all(*args: Any, **kwargs: Any) -> Any:
        size = kwargs["input_ids"].shape[1]
        return body(*args, **(kwargs | {"attention_mask": torch.zeros(1, 1, size, size)}))

    body = model.model.forward
    model.model.forward = sees_all
    with refused("not-causal"):
        probe_model(model)
    model = fused("llama")
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    with refused("not-finite"):
        probe_model(model)


def test_the_probe_leaves_the_model_as_it_was() -> None:
    model = fused("llama", attention_dropout=0.5)
    fuse_model(model, get_objective("mle"), z_loss=0.1)
    model.train()
    model.model.layers[0].eval()
    spec, modes = model.lm_head.spec, [m.training for m in model.modules()]
    state = torch.random.get_rng_state()
    probe_model(model)
    assert model.lm_head.spec is spec
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_heads_that_cannot_be_fused_raise() -> None:
    model = family("llama")
    model.lm_head = nn.Sequential(nn.Linear(32, VOCAB))
    with refused("needs-head"):
        fuse_model(model, get_objective("mle"))
    with pytest.warns(UserWarning):
        fuse_model(family("mixtral", output_router_logits=True), get_objective("mle"))


@pytest.mark.parametrize("name", ["llama4_text"])
def test_a_body_that_transformers_does_not_find_is_fused(name: str) -> None:
    model = family(name)
    ids = torch.arange(24).view(2, 12) % VOCAB
    logits = model(input_ids=ids, use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")
    fuse_model(model, get_objective("mle"))
    assert float(model(input_ids=ids, labels=ids).loss.detach()) == pytest.approx(float(expected), rel=1e-5)


def test_fusing_twice_and_positional_arguments() -> None:
    """The last call decides. Positional arguments follow the signature of the model."""
    model = fused("llama")
    fuse_model(model, get_objective("demd"))
    fuse_model(model, get_objective("mle"))
    compare(model, family("llama"))
    ids = torch.randint(VOCAB, (2, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    want = family("llama")(ids, mask).logits
    torch.testing.assert_close(model(ids, mask).logits, want)
