"""Families of models: shared prefixes where they are honoured, and never a wrong number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from emo.common.errors import UserError
from emo.eval.icl import probe
from emo.eval.icl.layout import Item
from emo.eval.icl.prefix_scorer import OWN, TREE, WHOLE, PrefixScorer
from emo.eval.icl.scores import NotFiniteError, winner
from tests.eval.test_score import check, random_items

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 16},
    "qwen2": {"num_key_value_heads": 1},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 16},
    "gemma2": {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "final_logit_softcapping": 5.0,
        "sliding_window": 16,
    },
    "mistral": {"num_key_value_heads": 2, "sliding_window": 8},
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 2,
        "window_size": 8,
        "attention_types": [[["global", "local"], 1]],
    },
    "gpt_neox": {},
    "falcon": {},
    "bloom": {"n_head": 2, "n_layer": 2},
    "mpt": {"d_model": 32, "n_heads": 2, "n_layers": 2},
    "cohere": {"logit_scale": 0.25},
    "granite": {"num_key_value_heads": 2, "logits_scaling": 8.0, "embedding_multiplier": 3.0},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 2},
    "mamba": {},
    "jamba": {
        "num_key_value_heads": 2,
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 16, "lru_width": 32},
}
# Windows, distances instead of positions, and recurrences do not see the tree as prompts side by side.
WHOLE_PROMPTS = {"gemma2", "mistral", "gpt_neo", "bloom", "mpt", "mamba", "jamba"}
ONE_BY_ONE = {"recurrent_gemma"}
COMMON = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def random_model(kind: str, **config: Any) -> Any:
    """A random model of a family, with larger weights than initialised ones so that mistakes show."""
    torch.manual_seed(1)
    settings = transformers.AutoConfig.for_model(kind, **(COMMON | ARCHITECTURES.get(kind, {}) | config))
    model = transformers.AutoModelForCausalLM.from_config(settings).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return model


@pytest.mark.parametrize("kind", list(ARCHITECTURES))
def test_other_architectures(kind: str) -> None:
    """Sharing where the model honours it, whole prompts where it does not; the right numbers either way."""
    messages: list[str] = []
    scorer = PrefixScorer(random_model(kind), say=messages.append)
    check(scorer, random_items(384, 8))
    check(scorer, random_items(384, 6, shared=50))
    assert scorer.way == (OWN if kind in ONE_BY_ONE else WHOLE if kind in WHOLE_PROMPTS else TREE)
    assert bool(messages) == (scorer.way != TREE)  # what is slower is said


def test_a_change_of_logits_that_nobody_knows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family may do anything to its logits after the head."""
    model = random_model("llama")
    forward = type(model).forward

    def biased(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        out.logits = out.logits + torch.linspace(-3, 3, out.logits.shape[-1])
        return out

    monkeypatch.setattr(type(model), "forward", biased)
    messages: list[str] = []
    scorer = PrefixScorer(model, say=messages.append)
    assert scorer.way == OWN and "one whole prompt at a time" in messages[-1]
    check(scorer, random_items(384, 5))


def test_what_shows_only_in_long_prompts_is_noticed_when_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that no option names, longer than the probe at the start."""
    model = random_model("llama")
    body, window = type(model.model), 100
    forward = body.forward

    def windowed(self: Any, input_ids: Any, **kwargs: Any) -> Any:
        out = forward(self, input_ids, **kwargs)
        if input_ids.shape[1] > window:
            out.last_hidden_state[:, window:] = 0.5 * out.last_hidden_state[:, window:]
        return out

    monkeypatch.setattr(body, "forward", windowed)
    scorer = PrefixScorer(model, say=lambda text: None)
    assert scorer.way == TREE
    check(scorer, random_items(384, 4))
    assert scorer.way == TREE
    rng = np.random.default_rng(0)
    long = [Item(rng.integers(3, 384, 85), [rng.integers(3, 384, 13) for _ in range(4)]) for _ in range(3)]
    check(scorer, long)
    assert scorer.way == WHOLE


def test_embeddings_that_depend_on_a_batchs_longest_row_are_scored_alone() -> None:
    """Dynamic rotary scaling changes every prompt of a batch that holds a long one."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = random_model("llama", max_position_embeddings=32, rope_parameters=rope)
    scorer = PrefixScorer(model, say=lambda text: None)
    assert scorer.way == OWN
    check(scorer, random_items(384, 4, shared=30))


def test_a_model_that_sees_the_future_is_not_causal() -> None:
    assert probe.is_causal(random_model("llama")) and probe.is_causal(random_model("mamba"))
    assert not probe.is_causal(random_model("bert", is_decoder=False))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("way", [TREE, WHOLE, OWN])
def test_scores_that_are_not_finite_are_an_error(value: float, way: str) -> None:
    model = random_model("llama")
    scorer = PrefixScorer(model, say=lambda text: None)
    scorer.way = way
    model.model.norm.weight.data[3] = value
    with pytest.raises(NotFiniteError, match="not finite"):
        scorer.score(random_items(384, 3))


def test_no_label_is_chosen_by_nan() -> None:
    assert winner([2.0, 1.0, 1.0]) == 1
    for bad in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(NotFiniteError):
            winner([1.0, bad])


def test_a_token_beyond_the_embeddings_is_one_line() -> None:
    with pytest.raises(UserError, match="token id 384, but the model has 384 embeddings"):
        PrefixScorer(random_model("llama")).score([Item(np.array([1, 5, 384]), [np.array([3])])])
