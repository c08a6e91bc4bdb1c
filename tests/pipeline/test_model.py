"""The fused forward of real architectures, what does not fit is refused, and adapters."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from common.errors import UserError
from data_prep.tokenizer import load_tokenizer, tokenizer_fingerprint
from pipeline.config import ModelConfig
from pipeline.loss.cost import CostEmbedding
from pipeline.loss.objectives import get_objective
from pipeline.model import Losses, add_lora, attention, check_fits, fuse_model, measuring, model_config

SMALL = {
    "llama": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 16,  # like OPT-350M: the head is narrower than the body
    },
    "gemma2": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "final_logit_softcapping": 3.0,
    },
    "cohere": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "logit_scale": 0.25,
    },
    "granite": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "logits_scaling": 4.0,
    },
}


def small(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, vocab_size=61, max_position_embeddings=64, **SMALL[model_type])
    attn = "eager" if model_type == "gemma2" else "sdpa"  # soft-capped attention has no SDPA form
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn).eval()


@pytest.mark.parametrize("model_type", SMALL)
def test_the_fused_forward_equals_the_models_own_loss(model_type: str) -> None:
    model = small(model_type)
    ids = torch.randint(0, 61, (3, 20))
    expected = model(input_ids=ids, labels=ids)
    names = [n for n, _ in model.named_parameters()]
    fuse_model(model, Losses(get_objective("mle"), None, None))
    labels = torch.cat([ids[:, 1:], torch.full((3, 1), -100)], dim=1)
    positions = torch.arange(20).expand(3, -1)
    sums = model(input_ids=ids, labels=labels, position_ids=positions)
    assert int(sums.tokens) == 3 * 19
    assert sums.loss.item() / 57 == pytest.approx(expected.loss.item(), rel=1e-5)
    assert [n for n, _ in model.named_parameters()] == names
    torch.testing.assert_close(model(input_ids=ids).logits, expected.logits)


def test_measuring_reports_demd_for_mle_and_leaves_training_as_it_was() -> None:
    model = small("llama")
    cost = CostEmbedding.from_weight(model.lm_head.weight.detach().clone())
    losses = Losses(get_objective("mle"), None, cost)
    fuse_model(model, losses)
    ids = torch.randint(0, 61, (2, 8))
    assert model(input_ids=ids, labels=ids).demd.isnan()
    with measuring(model, losses):
        measured = model(input_ids=ids, labels=ids)
    probabilities = model(input_ids=ids).logits.softmax(-1)
    unit = torch.nn.functional.normalize(model.lm_head.weight.detach(), dim=1)
    expected = (probabilities * (1 - unit @ unit.T)[ids]).sum()
    assert measured.demd.item() == pytest.approx(expected.item(), rel=1e-4)
    assert model(input_ids=ids, labels=ids).demd.isnan()


def test_adapters_leave_the_head_alone() -> None:
    model = small("llama")
    wrapped = add_lora(model, ModelConfig(path="x", lora={"r": 2}))  # type: ignore[arg-type]
    trainable = [n for n, p in wrapped.named_parameters() if p.requires_grad]
    assert trainable
    assert all(".lora_" in n and "lm_head" not in n for n in trainable)
    fuse_model(model, Losses(get_objective("mle"), None, None))
    ids = torch.randint(0, 61, (1, 8))
    wrapped(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is None for n, p in wrapped.named_parameters() if not p.requires_grad)


def test_attention_auto_says_sdpa_without_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with caplog.at_level("INFO"):
        assert attention("auto") == "sdpa"
    assert "sdpa (no GPU)" in caplog.text


def manifest(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(**({"vocab_size": 61, "block": 32, "tokenizer_fingerprint": "x"} | changes))


def test_data_that_do_not_fit_are_refused(shared_data: Path) -> None:
    config = small("llama").config
    new = ModelConfig(architecture={"model_type": "llama"})
    check_fits(config, new, manifest())  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"use 62 token ids but the model's head has 61"):
        check_fits(config, new, manifest(vocab_size=62))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"longer than the model's context of 64; set data.block=64"):
        check_fits(config, new, manifest(block=65))  # type: ignore[arg-type]
    stories = shared_data / "models" / "stories260K"
    own = tokenizer_fingerprint(load_tokenizer(stories))
    check_fits(config, ModelConfig(path=str(stories)), manifest(tokenizer_fingerprint=own))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="another tokenizer than that of"):
        check_fits(config, ModelConfig(path=str(stories)), manifest())  # type: ignore[arg-type]


def test_the_architecture_must_be_that_of_the_weights(shared_data: Path) -> None:
    path = str(shared_data / "models" / "stories260K")
    right = ModelConfig(path=path, architecture={"model_type": "llama", "hidden_size": 64})
    assert model_config(right).hidden_size == 64
    wrong = ModelConfig(path=path, architecture={"model_type": "llama", "hidden_size": 65})
    with pytest.raises(UserError, match=r"has hidden_size=64, but model.architecture says 65"):
        model_config(wrong)
