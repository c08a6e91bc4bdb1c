"""Documents in packed rows: their bounds, varlen attention, and the probe's verdict on families of models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import modeling_flash_attention_utils as flash_utils

from emo.common.errors import UserError
from emo.pipeline.config import ModelConfig
from emo.pipeline.loss import CostEmbedding, fuse_model, get_objective, head_options, plan_tokens, probe_model
from emo.pipeline.loss.head import (
    BOUNDS,
    LONGEST,
    SEGMENTS,
    by_document,
    document_mask,
    keep_apart,
    segments,
)
from emo.pipeline.loss.varlen import attend_in_turn, varlen_attention
from emo.pipeline.planning.host import usable_attention
from tests.helpers.families import FAMILIES, VOCAB, family, tiny_llama
from tests.helpers.loss_reference import relative_error
from tests.helpers.packing import documents, packed_rows
from tests.helpers.refusals import refused
from tests.helpers.waits import waits


def rows(*lengths: list[int]) -> Tensor:
    """Positions of rows of documents of these lengths, [b, L]."""
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


@pytest.mark.parametrize(
    ("positions", "bounds", "longest"),
    [
        (rows([5, 3]), [0, 5, 8], 5),
        (rows([1, 1, 6], [2, 5, 1]), [0, 1, 2, 8, 10, 15, 16], 6),
        (rows([3, 5])[:, 1:], [0, 2, 7], 5),  # a row may begin within a document
    ],
)
def test_segments_are_the_documents_of_all_rows(positions: Tensor, bounds: list[int], longest: int) -> None:
    result, length = segments(positions)
    assert (result.tolist(), length, type(length)) == (bounds, longest, int)
    assert result.dtype == torch.int32


def test_a_document_mask_is_causal_and_ends_at_documents() -> None:
    mask = document_mask(rows([2, 3]), torch.float32)[0, 0]
    want = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).tril()
    assert torch.equal(mask == 0, want.bool())
    assert bool((mask[want == 0] == torch.finfo(torch.float32).min).all())


def stand_in(packing: str, attention: str) -> Any:
    config = SimpleNamespace(_attn_implementation=attention)
    return SimpleNamespace(packing=packing, config=config, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize(
    ("packing", "attention", "added"),
    [
        ("positions", "varlen", {*SEGMENTS, "attention_mask"}),
        ("positions", "flash_attention_2", {*SEGMENTS}),
        ("mask", "sdpa", {"attention_mask"}),
        ("alone", "sdpa", set()),
    ],
)
def test_segments_among_the_inputs_are_not_computed_again(
    packing: str, attention: str, added: set[str]
) -> None:
    """Tensors of the meta device have no values: reading one would fail."""
    bounds, longest = segments(rows([5, 3], [8]))
    positions = torch.empty(2, 8, dtype=torch.int64, device="meta")
    inputs: dict[str, Any] = {"position_ids": positions, "cu_seq_lens_q": bounds, "max_length_q": longest}
    keep_apart(stand_in(packing, attention), positions, inputs)
    assert inputs.keys() - {"position_ids"} == added
    if "max_length_k" in added:
        assert inputs["cu_seq_lens_q"] is inputs["cu_seq_lens_k"] is bounds
        assert inputs["max_length_q"] == inputs["max_length_k"] == 8


def test_padding_masks_give_way_to_restarting_positions_and_to_nothing_else() -> None:
    model = stand_in("positions", "varlen")
    plain, packed = rows([8]), rows([5, 3])
    mask = torch.ones(1, 8, dtype=torch.int64)
    inputs: dict[str, Any] = {"attention_mask": mask}
    keep_apart(model, plain, inputs)
    assert inputs == {"attention_mask": mask}
    keep_apart(model, packed, inputs)
    assert inputs["attention_mask"].numel() == 0 and inputs["cu_seq_lens_q"].tolist() == [0, 5, 8]
    with refused("mask-positions"):
        keep_apart(model, packed, {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])})
    with refused("packing"):
        keep_apart(stand_in("refused", "eager"), packed, {})
    keep_apart(stand_in("refused", "eager"), rows([8], [8]), {})


@pytest.mark.parametrize("name", ["mistral", "opt"])
def test_flash_attention_takes_segments_without_a_search_in_every_layer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers takes its branch for known segments: its search in the positions is never reached."""
    calls = []

    def flash_varlen(q: Tensor, k: Tensor, v: Tensor, **keys: Any) -> Tensor:
        calls.append(keys["max_seqlen_q"])
        bounds, left = keys["cu_seqlens_q"], keys.get("window_size", (-1, -1))[0]
        assert bounds is keys["cu_seqlens_k"] and keys["causal"] and not keys.get("dropout_p")
        scale = keys["softmax_scale"] or q.shape[-1] ** -0.5
        return attend_in_turn(q, k, v, bounds, keys["max_seqlen_q"], scale, left)

    def unreached(*_: Any, **__: Any) -> Any:
        raise AssertionError("looked for documents")

    supported = dict.fromkeys(
        ("dropout_p", "window_size", "deterministic", "softcap", "s_aux", "max_seqlen_q", "max_seqlen_k"),
        True,
    )
    process = lambda *a, **k: flash_utils._process_flash_attention_kwargs(  # noqa: E731
        *a, **k, supports_mapping=supported | {"learnable_sink": False, "cache_seqlens": False}
    )
    functions = ((unreached, flash_varlen, unreached, unreached, unreached), (process, unreached))
    monkeypatch.setattr(flash_utils, "lazy_import_flash_attention", lambda *_, **__: functions)
    monkeypatch.setattr(flash_utils, "_is_packed_sequence", unreached)
    model = family(name)
    fuse_model(model, get_objective("mle"))
    ids, labels, positions = packed_rows()
    want = sum(
        F.cross_entropy(model(input_ids=doc[None], use_cache=False).logits[0, :-1], doc[1:], reduction="sum")
        for doc in documents(ids)
    )
    model.config._attn_implementation = "flash_attention_2"
    sums = model(input_ids=ids, labels=labels, position_ids=positions)
    torch.testing.assert_close(sums.loss, want)
    assert calls == [int(segments(positions)[1])] * 2  # once in each layer


def test_a_micro_batch_of_the_trainer_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With segments and labels planned by the loader, from the token ids to the gradients of all weights."""
    monkeypatch.setattr(
        "emo.pipeline.loss.varlen.attend_in_turn", lambda q, k, v, *_: q + (k + v).repeat(1, 2, 1)
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
    assert all(parameter.grad is not None for parameter in model.parameters())
    with waits() as waited:
        model(**inputs, labels=labels)
    assert len(waited) > 1


def test_sums_by_document() -> None:
    """Values are summed on the device, valid labels on the host; padding is a document without labels."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    bounds, _ = segments(positions)
    labels = torch.tensor([[5, 6, -100, 7, -100, -100], [-100, 1, 2, 3, 4, -100]])
    values = torch.arange(12.0)
    assert by_document(values, bounds).tolist() == [0 + 1 + 2, 3 + 4, 5, sum(range(6, 12))]
    assert plan_tokens(labels).per_document(bounds).tolist() == [2, 1, 0, 4]
    none = plan_tokens(torch.full((2, 6), -100))
    assert none.per_document(bounds).tolist() == [0, 0, 0, 0]


LAYER = SimpleNamespace(is_causal=True)


def alone(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], scale: float, window: int | None) -> Tensor:
    """The definition, in float64: softmax(q k^T * scale) v over earlier tokens of the document, [T, H, D]."""
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
def test_documents_attend_to_themselves(
    window: int | None, heads: int, groups: int, size: int, value_size: int, scaling: float | None
) -> None:
    """Values and gradients against the definition: grouped heads, windows, widths that the kernel lacks."""
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
def test_unsupported_arguments_are_errors(keys: dict[str, Any]) -> None:
    x = torch.randn(1, 2, 8, 8)
    bounded: dict[str, Any] = {"cu_seq_lens_q": torch.tensor([0, 8], dtype=torch.int32), "max_length_q": 8}
    with pytest.raises(ValueError):
        varlen_attention(LAYER, x, x, x, None, **bounded, **keys)


def test_no_tensor_grows_with_the_square_of_a_block() -> None:
    """A block of 4,096 tokens, forward and backward; under SDPA its mask alone has 4,096 squared."""
    length, elements = 4096, 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal elements
            out = func(*args, **(kwargs or {}))
            tensors = out if isinstance(out, (tuple, list)) else (out,)
            elements = max([elements, *(t.numel() for t in tensors if isinstance(t, Tensor))])
            return out

    lengths = [1500, 600, 1, 1995]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = torch.arange(length)[None] % 61
    largest = {}
    for attention in ("sdpa", "varlen"):
        model = tiny_llama(61, max_position_embeddings=length, num_key_value_heads=1)
        model.set_attn_implementation(attention)
        fuse_model(model, get_objective("mle"))
        elements = 0
        with Watch():
            model(input_ids=ids, labels=ids, position_ids=positions).loss.backward()
        largest[attention] = elements
    assert largest["sdpa"] >= length**2
    assert largest["varlen"] <= 128 * length


MASKED = {"opt", "falcon", "mpt", "xglm", "biogpt", "bert-generation"}
REFUSED = {
    *("falcon-alibi", "bloom", "mamba", "mamba2", "rwkv", "jamba", "bamba", "falcon_h1"),
    *("openai-gpt", "bart", "minimax", "falcon_mamba", "gpt_oss", "lfm2"),
}
ELSEWHERE = {"bert", "recurrent_gemma", "xlstm"}  # in tests of their own
PACKING = {
    name: "mask" if name in MASKED else "refused" if name in REFUSED else "positions"
    for name in FAMILIES
    if name not in ELSEWHERE
}
VARLEN = ModelConfig(architecture={"model_type": "llama"}, attn_implementation="varlen")
# Differences from their usual form: no dropout of attention, no soft cap, grouped heads, windows.
CHANGES: dict[str, dict[str, Any]] = {
    "gpt2": {"attn_pdrop": 0.0},
    "gpt_bigcode": {"attn_pdrop": 0.0},
    "llama": {"num_key_value_heads": 1},
    "mistral": {"num_key_value_heads": 1},
    "gemma": {"num_key_value_heads": 1},
    "qwen2": {
        "num_key_value_heads": 1,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
}
# Their own attention, soft caps, recurrences, or dropout.
NOT_OFFERED = {
    *("gpt_neo", "gptj", "falcon", "falcon-alibi", "mpt", "bloom", "xglm", "biogpt", "stablelm", "bert"),
    *("gemma2", "mamba", "mamba2", "rwkv", "jamba", "bamba", "falcon_h1", "recurrent_gemma", "xlstm"),
    *("openai-gpt", "bart", "bert-generation", "minimax", "falcon_mamba", "lfm2", "gpt_oss"),
}


def fused(name: str, attention: str | None = None, **changes: Any) -> Any:
    model = family(name, attention, **changes)
    fuse_model(model, get_objective("mle"))
    return model


def gradients(model: nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def compare(model: Any, ordinary: Any, rows: tuple[Tensor, Tensor, Tensor]) -> None:
    """The loss and every gradient of packed rows are those of their documents in the ordinary forward."""
    ids, labels, positions = rows
    logits = (ordinary(input_ids=part[None], use_cache=False).logits[0, :-1] for part in documents(ids))
    pairs = zip(logits, documents(ids), strict=True)
    want = sum(F.cross_entropy(z.float(), part[1:], reduction="sum") for z, part in pairs)
    sums = model(input_ids=ids, labels=labels, position_ids=positions)
    assert relative_error(sums.loss.detach(), want.detach()) <= 1e-5
    assert relative_error(gradients(model, sums.loss), gradients(ordinary, want)) <= 2e-4


@pytest.mark.parametrize(("name", "packing"), PACKING.items())
def test_packed_rows_train_like_single_documents_or_not_at_all(name: str, packing: str) -> None:
    model = fused(name)
    assert probe_model(model, packed=False) == packing
    ids, labels, positions = packed_rows()
    if packing != "refused":
        compare(model, family(name), (ids, labels, positions))
        return
    with refused("packing"):
        model(input_ids=ids, labels=labels, position_ids=positions)
    with refused("packing"):
        probe_model(model, packed=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_under_varlen(name: str) -> None:
    """A family either is offered it, and is right, or is refused it in one line."""
    changes = CHANGES.get(name, {})
    ordinary = family(name, **changes)
    try:
        model = fused(name, usable_attention(VARLEN, ordinary.config), **changes)
        assert probe_model(model) == "positions"
    except UserError as error:
        assert name in NOT_OFFERED, error
        return
    assert name not in NOT_OFFERED
    compare(model, ordinary, packed_rows())


@pytest.mark.parametrize("name", ["opt", "gpt2", "mpt", "gemma2"])
def test_in_bfloat16(name: str) -> None:
    """Rounding alone is not taken for a leak or another head, nor does it hide one."""
    model = fused(name).to(torch.bfloat16)
    assert probe_model(model) == PACKING[name]
    if PACKING[name] == "mask":
        model.packing = "positions"
        ids, labels, positions = packed_rows()
        leaking = model(input_ids=ids, labels=labels, position_ids=positions).nll
        model.packing = "mask"
        assert abs(leaking - model(input_ids=ids, labels=labels, position_ids=positions).nll) > 0.02


SKEWED: dict[str, Any] = {  # of a LLaMA's logits, as families make them
    "scale": lambda z: z * 0.9,
    "cap": lambda z: 3 * torch.tanh(z / 3),
    "mask": lambda z: z.index_fill(-1, torch.tensor([7, 9]), torch.finfo(z.dtype).min),
    "minus infinity": lambda z: z.index_fill(-1, torch.tensor([7]), -torch.inf),
    "bias": lambda z: z + torch.linspace(-1, 1, VOCAB),
    "fewer": lambda z: z[..., :-3],
}


@pytest.mark.parametrize("change", SKEWED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_treated_in_an_unknown_way_are_refused(change: str, dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        (("granite", {"logits_scaling": 4.0}), {"logit_scale": 0.25}),
        (("hyperclovax", {"logits_scaling": 4.0}), {"logit_scale": 4.0}),
        (("cohere", {"logit_scale": 0.5}), {"logit_scale": 0.5}),
        (("gemma2", {"final_logit_softcapping": 3.0}), {"softcap": 3.0}),
        (("recurrent_gemma", {"logits_soft_cap": 2.0}), {"softcap": 2.0}),
        (("mpt", {"logit_scale": "inv_sqrt_d_model"}), {}),
    ],
)
def test_head_options(settings: tuple[str, dict[str, Any]], want: dict[str, float]) -> None:
    from transformers import AutoConfig

    name, keys = settings
    assert head_options(AutoConfig.for_model(name, **keys)) == want


def test_models_that_are_not_causal_or_not_finite_are_refused() -> None:
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


def test_heads_that_cannot_be_fused() -> None:
    model = family("llama")
    model.lm_head = nn.Sequential(nn.Linear(32, VOCAB))
    with refused("needs-head"):
        fuse_model(model, get_objective("mle"))
    with pytest.warns(UserWarning):
        fuse_model(family("mixtral", output_router_logits=True), get_objective("mle"))


def test_fusing_twice_and_positional_arguments() -> None:
    """The second call counts; arguments by position mean what the model's own signature says."""
    model = fused("llama")
    kind = type(model).__mro__
    fuse_model(model, get_objective("demd"), cost=None)
    assert len(type(model).__mro__) == len(kind)
    fuse_model(model, get_objective("mle"))
    ids = torch.randint(VOCAB, (2, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    want = family("llama")(ids, mask).logits
    torch.testing.assert_close(model(ids, mask).logits, want)
