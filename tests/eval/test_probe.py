"""Families of models: shared prefixes where they are honoured, and never a wrong number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from emo.common.errors import UserError
from emo.eval.icl import probe
from emo.eval.icl.layout import Item
from emo.eval.icl.prefix_scorer import OWN, TREE, WHOLE, PrefixScorer
from emo.eval.icl.scores import NotFiniteError, winner
from tests.eval.test_score import check, random_items
from tests.helpers.families import family

ARCHITECTURES = (
    "gpt2", "opt", "qwen2", "qwen3", "gemma2", "mistral", "gpt_neo", "gpt_neox", "falcon", "bloom", "mpt",
    "cohere", "granite", "mixtral", "mamba", "jamba", "recurrent_gemma",
)  # fmt: skip
# Windows, distances instead of positions, and recurrences do not see the tree as prompts side by side.
WHOLE_PROMPTS = {"gemma2", "mistral", "gpt_neo", "bloom", "mpt", "mamba", "jamba"}
ONE_BY_ONE = {"recurrent_gemma"}


def random_model(kind: str, **config: Any) -> Any:
    """Return a random model of a family with 384 tokens and room for long prompts."""
    room = {"max_position_embeddings": 512, "n_positions": 512, "max_seq_len": 512}
    layers = {"num_hidden_layers": 3} if kind == "recurrent_gemma" else {}  # the third one attends
    return family(kind, **({"vocab_size": 384} | room | layers | config))


@pytest.mark.parametrize("kind", ARCHITECTURES)
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
