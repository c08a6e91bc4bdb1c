"""Families of models: the start-up probe's verdict, and correct training of those that it admits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emo.common.errors import UserError
from emo.pipeline.config import ModelConfig
from emo.pipeline.loss import fuse_model, get_objective, head_options, probe_model
from emo.pipeline.planning.host import usable_attention
from tests.helpers.families import FAMILIES, VOCAB, family
from tests.helpers.loss_reference import relative_error
from tests.helpers.packing import documents, packed_rows
from tests.helpers.refusals import refused

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
