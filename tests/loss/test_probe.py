"""Families of models: the start-up probe's verdict, and correct training of those that it admits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emo.pipeline.loss import fuse_model, get_objective, head_options, probe_model
from tests.helpers.families import FAMILIES, VOCAB, family
from tests.helpers.loss_reference import relative_error
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
DOCUMENTS = [5, 9, 1, 7]  # tokens


def fused(name: str, **changes: Any) -> Any:
    model = family(name, **changes)
    fuse_model(model, get_objective("mle"))
    return model


def packed_row() -> tuple[Tensor, Tensor, Tensor]:
    """A row of documents as the trainer gets it: ids, shifted labels, positions, each [1, L]."""
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(VOCAB, (n,), generator=generator) for n in DOCUMENTS]
    labels = [torch.cat([d[1:], torch.tensor([-100])]) for d in documents]
    positions = [torch.arange(n) for n in DOCUMENTS]
    return tuple(torch.cat(parts)[None] for parts in (documents, labels, positions))  # type: ignore[return-value]


def ordinary_loss(model: Any, ids: Tensor) -> Tensor:
    """Summed next-token loss of one document [n], by the model's ordinary forward and PyTorch alone."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    return F.cross_entropy(logits, ids[1:], reduction="sum")


def gradients(model: nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(("name", "packing"), PACKING.items())
def test_packed_rows_train_like_single_documents_or_not_at_all(name: str, packing: str) -> None:
    """The fused loss and every gradient of a packed row are those of its documents alone.

    The documents go through the model's ordinary forward, the row through the one that training calls.
    """
    model = fused(name)
    assert probe_model(model, packed=False) == packing
    ids, labels, positions = packed_row()
    if packing == "refused":
        for call in (
            lambda: model(input_ids=ids, labels=labels, position_ids=positions),
            lambda: probe_model(model, packed=True),
        ):
            with refused("packing"):
                call()
        ids, labels, positions = ids[:, :5], labels[:, :5], positions[:, :5]  # one document per row is fine
    sums = model(input_ids=ids, labels=labels, position_ids=positions)
    got = gradients(model, sums.loss)
    # one forward per document, as a one-token document has no target
    parts = torch.split(ids[0], DOCUMENTS if packing != "refused" else 5)
    want_loss = torch.stack([ordinary_loss(model, part) for part in parts if len(part) > 1]).sum()
    want = gradients(model, want_loss)
    assert relative_error(sums.loss.detach(), want_loss.detach()) <= 1e-5
    assert relative_error(got, want) <= 2e-4


@pytest.mark.parametrize("name", ["opt", "gpt2", "mpt", "gemma2"])
def test_in_bfloat16(name: str) -> None:
    """Rounding alone is not taken for a leak or another head, nor does it hide one."""
    model = fused(name).to(torch.bfloat16)
    assert probe_model(model) == PACKING[name]
    if PACKING[name] == "mask":
        model.packing = "positions"
        ids, labels, positions = packed_row()
        leaking = model(input_ids=ids, labels=labels, position_ids=positions).nll
        model.packing = "mask"
        assert abs(leaking - model(input_ids=ids, labels=labels, position_ids=positions).nll) > 0.02


CHANGES: dict[str, Any] = {  # of a LLaMA's logits, as families make them
    "scale": lambda z: z * 0.9,
    "cap": lambda z: 3 * torch.tanh(z / 3),
    "mask": lambda z: z.index_fill(-1, torch.tensor([7, 9]), torch.finfo(z.dtype).min),
    "minus infinity": lambda z: z.index_fill(-1, torch.tensor([7]), -torch.inf),
    "bias": lambda z: z + torch.linspace(-1, 1, VOCAB),
    "fewer": lambda z: z[..., :-3],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_treated_in_an_unknown_way_are_refused(change: str, dtype: torch.dtype) -> None:
    model = family("llama").to(dtype)
    ordinary = type(model)

    class Peculiar(ordinary):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = CHANGES[change](out.logits)
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
