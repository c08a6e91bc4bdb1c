"""RoPE of a longer context: the frequencies that are built, exported and read back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from emo.common.config.recipe import parse_section
from emo.common.errors import UserError
from emo.common.io.weights import context_length, load_causal_lm, load_model_config
from emo.data_prep.config import load_data_config
from emo.pipeline.config import load_config
from emo.pipeline.engine.sequence import check_heads
from emo.pipeline.model.build import load_pretrained, model_config
from emo.pipeline.model.config import ModelConfig, RopeConfig
from emo.pipeline.model.rope import check_rope, extend_rope
from emo.pipeline.model.teacher import teacher_config
from tests.helpers.exporting import write
from tests.helpers.families import FAMILIES, family, tiny_llama
from tests.helpers.refusals import refused

CONTEXT = 64
LONG = torch.arange(4 * CONTEXT)[None] * 7 % 61
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 4},
    "dynamic": {"type": "dynamic", "factor": 4},
    "yarn": {"type": "yarn", "factor": 4, "beta_fast": 16, "theta": 5e4},
    "llama3": {"type": "llama3", "factor": 4, "max_position_embeddings": 512},
    "theta": {"theta": 1e6, "max_position_embeddings": 256},
}
RECIPE = """
output_dir: runs/x
data: {{ dir: d, tokenizer: t, sources: [{{ files: a.txt }}], sequence_len: 256 }}
model: {{ path: {path}, rope: {{ type: linear, factor: 4 }} }}
objective: {{ name: kl, teacher: base }}
train: {{ max_steps: 10 }}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "short"
    settings = {"hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": CONTEXT}
    tiny_llama(61, **settings).save_pretrained(directory)
    return directory


def rope(**keys: Any) -> RopeConfig:
    return parse_section(RopeConfig, keys, "model.rope")


def load(path: Path, **keys: Any) -> Any:
    return load_pretrained(str(path), None, "float32", "eager", rope=rope(**keys)).eval()


def naive_frequencies(keys: dict[str, Any], length: int, head: int = 32) -> Tensor:
    """Return the inverse frequencies of RoPE for rows of `length` tokens, by the formulas of the papers."""
    theta = keys.get("theta", 1e4)
    factor = keys.get("factor", 1.0)
    if keys.get("type") == "dynamic" and length > CONTEXT:
        theta *= (factor * length / CONTEXT - (factor - 1)) ** (head / (head - 2))
    plain = torch.tensor([theta ** (-2 * i / head) for i in range(head // 2)])
    if keys.get("type") == "linear":
        return plain / factor
    rotations = CONTEXT * plain / (2 * torch.pi)  # in the original context
    if keys.get("type") == "llama3":
        kept = ((rotations - 1.0) / (4.0 - 1.0)).clamp(0, 1)
        return (1 - kept) * plain / factor + kept * plain
    if keys.get("type") == "yarn":
        bounds = [head * torch.log(torch.tensor(CONTEXT / (r * 2 * torch.pi))) for r in (16, 1)]
        low, high = (bound / (2 * torch.log(torch.tensor(theta))) for bound in bounds)
        low, high = low.floor().clamp(min=0), high.ceil().clamp(max=head - 1)
        ramp = ((torch.arange(head // 2) - low) / (high - low)).clamp(0, 1)
        return plain / factor * ramp + plain * (1 - ramp)
    return plain


@pytest.mark.parametrize("kind", ROPES)
def test_built_and_exported_frequencies_are_those_of_transformers_and_of_the_papers(
    kind: str, model: Path, tmp_path: Path
) -> None:
    keys = ROPES[kind]
    extended = load(model, **keys)
    with torch.no_grad():
        expected = extended(LONG, use_cache=False).logits
    built = extended.model.rotary_emb.inv_freq
    assert torch.allclose(built, naive_frequencies(keys, LONG.shape[1]), rtol=1e-5)
    export = write(extended, tmp_path / "export")
    tree = json.loads((export / "config.json").read_text())
    assert tree["rope_theta"] == tree["rope_parameters"]["rope_theta"] == keys.get("theta", 1e4)
    scaling = tree["rope_scaling"] or {"rope_type": "default"}
    assert scaling.items() <= tree["rope_parameters"].items()
    assert context_length(tree) == keys.get("max_position_embeddings", 4 * CONTEXT)
    assert tree["max_position_embeddings"] == (CONTEXT if kind == "dynamic" else context_length(tree))
    for form in ("rope_parameters", "rope_scaling"):  # of transformers 5 and 4
        others = {"rope_parameters"} if form == "rope_scaling" else {"rope_scaling", "rope_theta"}
        (export / "config.json").write_text(json.dumps({k: v for k, v in tree.items() if k not in others}))
        read: PretrainedConfig = load_model_config(export)
        if kind != "theta":
            options = {"seq_len": LONG.shape[1]} if kind == "dynamic" else {}
            frequencies, scale = ROPE_INIT_FUNCTIONS[keys["type"]](read, **options)
            assert torch.allclose(built, frequencies) and extended.model.rotary_emb.attention_scaling == scale
        again = AutoModelForCausalLM.from_pretrained(export, attn_implementation="eager")
        with torch.no_grad():
            assert torch.allclose(again(LONG).logits, expected, atol=1e-4)


def test_dynamic_frequencies_do_not_depend_on_earlier_rows(model: Path) -> None:
    short, middle = LONG[:, :CONTEXT], LONG[:, : 3 * CONTEXT]
    fresh = load(model, **ROPES["dynamic"])
    with torch.no_grad():
        alone = [load(model, **ROPES["dynamic"])(row).logits for row in (LONG, middle, short)]
        in_order = [fresh(row).logits for row in (LONG, middle, short)]
        plain = load_causal_lm(model).model.eval()(short).logits
    assert all(torch.equal(a, b) for a, b in zip(alone, in_order, strict=True))
    assert torch.allclose(alone[-1], plain, atol=1e-4)
    with refused("sequence-parallel"):
        check_heads(fresh.config, 2, "the model")


@pytest.mark.parametrize("lora", (False, True))
def test_context_of_data_and_teacher(model: Path, tmp_path: Path, lora: bool) -> None:
    """The base teacher is the model before training, with the new RoPE also if it is a copy."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(path=model))
    assert load_data_config(path, []).sequence_len == 256
    with refused("context"):
        load_data_config(path, ["model.rope.factor=3"])
    config = load_config(path, ["model.lora.r=4"] if lora else [])
    teacher = teacher_config(config)
    assert teacher is None if lora else teacher.rope == config.model.rope
    with refused("bad-value"):
        load_config(path, ["model.lora.r=4", "model.lora.export=adapter"])
    assert model_config(config.model).max_position_embeddings == 256


@pytest.mark.parametrize(
    "keys",
    (
        {},
        {"type": "yarn"},
        {"factor": 4, "theta": 1e6},
        {"type": "linear", "factor": 4, "beta_fast": 32},
        {"type": "yarn", "factor": 4, "max_position_embeddings": 512},
        {"type": "yarn", "factor": 4, "beta_fast": 1},
        {"type": "llama3", "factor": 4, "low_freq_factor": 8},
        {"type": "longrope", "factor": 4},
        {"type": "linear", "factor": 0.5},
    ),
)
def test_wrong_keys_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        rope(**keys)
    assert "model.rope" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ("gpt2", "falcon-alibi", "mamba", "mpt"))
def test_models_without_rope_are_refused(name: str) -> None:
    with refused("rope"):
        extend_rope(family(name).config, rope(type="yarn", factor=4))


def test_a_scaled_model_needs_its_original_context(model: Path, tmp_path: Path) -> None:
    load(model, **ROPES["yarn"]).save_pretrained(tmp_path)
    with refused("rope"):
        load(tmp_path, **ROPES["yarn"])
    replaced = load(tmp_path, type="yarn", factor=8, original_max_position_embeddings=CONTEXT)
    settings = replaced.config.rope_parameters
    assert settings["beta_fast"] == 16 and settings["rope_theta"] == 5e4  # kept with the type
    assert replaced.config.max_position_embeddings == 8 * CONTEXT
    other = load(tmp_path, type="linear", factor=2, original_max_position_embeddings=CONTEXT).config
    assert other.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}
    assert load(tmp_path, theta=1e6).config.rope_parameters["rope_type"] == "yarn"


def test_families_that_ignore_the_type_are_refused() -> None:
    linear = rope(type="linear", factor=4)
    config = extend_rope(family("recurrent_gemma").config, linear)
    with refused("rope"):
        check_rope(AutoModelForCausalLM.from_config(config), linear)
    layers = FAMILIES["gemma3_text"] | {"layer_types": ["sliding_attention", "full_attention"]}
    settings = ModelConfig(
        path="x",
        architecture={"model_type": "gemma3_text", "vocab_size": 61} | layers,
        rope=rope(type="linear", factor=4),
    )
    nested = model_config(settings, online=False)
    assert nested.rope_parameters["sliding_attention"]["rope_type"] == "default"
    check_rope(AutoModelForCausalLM.from_config(nested), linear)
    olmo = extend_rope(family("olmo3").config, rope(theta=1e6)).rope_parameters  # one theta in transformers 4
    assert {part["rope_theta"] for part in olmo.values()} == {1e6}
