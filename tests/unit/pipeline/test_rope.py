"""RoPE for a longer context: frequencies that are built, exported and read back, and rejected settings."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from emo.common.config.recipe import parse_section
from emo.common.context_length import context_length, rope_type
from emo.common.io.weights import load_causal_lm, load_model_config
from emo.data_prep.config import load_data_config
from emo.pipeline.config import RunConfig, load_config
from emo.pipeline.model.build import check_context, load_pretrained, model_config
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


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_equal_those_of_transformers_from_the_export(
    kind: str, model: Path, tmp_path: Path
) -> None:
    keys = ROPES[kind]
    extended = load(model, **keys)
    with torch.no_grad():
        expected = extended(LONG, use_cache=False).logits
    built = extended.model.rotary_emb.inv_freq
    export = write(extended, tmp_path / "export")
    tree = json.loads((export / "config.json").read_text())
    assert tree["rope_theta"] == tree["rope_parameters"]["rope_theta"] == keys.get("theta", 1e4)
    assert (tree["rope_scaling"] or {}).items() <= tree["rope_parameters"].items()
    assert context_length(tree) == keys.get("max_position_embeddings", 4 * CONTEXT)
    assert tree["max_position_embeddings"] == (CONTEXT if kind == "dynamic" else context_length(tree))
    for form in ("rope_parameters", "rope_scaling"):  # the keys of transformers 5 and 4
        others = {"rope_parameters"} if form == "rope_scaling" else {"rope_scaling", "rope_theta"}
        (export / "config.json").write_text(json.dumps({k: v for k, v in tree.items() if k not in others}))
        read: PretrainedConfig = load_model_config(export)
        again = AutoModelForCausalLM.from_pretrained(export, attn_implementation="eager")
        options = {"seq_len": LONG.shape[1]} if kind == "dynamic" else {}
        compute = ROPE_INIT_FUNCTIONS.get(
            keys.get("type"), again.model.rotary_emb.compute_default_rope_parameters
        )
        frequencies, scale = compute(read, **options)
        assert torch.equal(built, frequencies) and extended.model.rotary_emb.attention_scaling == scale
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


def test_dynamic_frequencies_of_a_layer_type_do_not_either(tmp_path: Path) -> None:
    theta = {"rope_theta": 1e4}
    types = {"full_attention": theta | {"rope_type": "dynamic", "factor": 4.0}}
    settings = {"rope_parameters": types | {"sliding_attention": theta | {"rope_type": "default"}}}
    family("gemma3_text-layers", max_position_embeddings=CONTEXT, **settings).save_pretrained(tmp_path)
    used, fresh = (load_causal_lm(tmp_path).model.eval() for _ in range(2))
    with torch.no_grad():
        used(LONG)
        assert torch.equal(*(model(LONG[:, : 3 * CONTEXT]).logits for model in (used, fresh)))


@pytest.mark.parametrize("lora", ((), ("model.lora.r=4",)))
def test_context_of_data_and_teacher(model: Path, tmp_path: Path, lora: tuple[str, ...]) -> None:
    """The base teacher is the model before training. It has the new RoPE, even as a separate copy."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(path=model))
    assert load_data_config(path, []).sequence_len == 256
    with refused("context"):
        load_data_config(path, ["model.rope.factor=3"])
    config = load_config(path, [*lora])
    teacher = teacher_config(config)
    assert teacher is None if lora else teacher.rope == config.model.rope
    assert model_config(config.model).max_position_embeddings == 256
    with refused("bad-value"):
        load_config(path, ["model.lora.r=4", "model.lora.export=adapter"])


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ("{type: yarn, factor: '4'}", None),
        ("{theta: 1.0e+6, max_position_embeddings: 512.0}", None),
        ("{theta: 1.0e+6, max_position_embeddings: '128'}", "context"),
        ("{type: yarn, factor: 2}", "context"),
        ("{type: linear, factor: 4, original_max_position_embeddings: 32}", "context"),
    ],
)
def test_prepare_judges_a_recipe_as_training_does(
    keys: str, code: str | None, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(path=model))
    wrong = [contextlib.nullcontext() if code is None else refused(code) for _ in range(2)]
    with wrong[0]:
        load_data_config(path, [f"model.rope={keys}"], RunConfig)
    with wrong[1]:
        config = load_config(path, [f"model.rope={keys}"])
        check_context(model_config(config.model), config.data.sequence_len)


@pytest.mark.parametrize("name", ("llama-dynamic", "gemma3_text-layers", "phi3", "phimoe", "falcon-alibi"))
def test_prepare_refuses_rope_that_cannot_be_changed(name: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(path=tmp_path))
    family(name).config.save_pretrained(tmp_path)
    with refused("rope"):
        load_data_config(path, [])
    with refused("rope"):
        model_config(load_config(path, []).model)


WRONG: tuple[dict[str, Any], ...] = (
    *({}, {"type": "yarn"}, {"factor": 4, "theta": 1e6}, {"type": "linear", "factor": 0.5}),
    *({"type": "linear", "factor": 4, "beta_fast": 32}, {"type": "longrope", "factor": 4}),
    *({"type": "yarn", "factor": 4, "beta_fast": 1}, {"type": "llama3", "factor": 4, "low_freq_factor": 8}),
    *({"type": "yarn", "factor": 4, "max_position_embeddings": 512}, {"type": "yarn", "factor": 1e6}),
)


@pytest.mark.parametrize("keys", WRONG)
def test_wrong_keys_are_refused(keys: dict[str, Any]) -> None:
    with refused("bad-value"):
        rope(**keys)


WITHOUT = ("gpt2", "falcon-alibi", "mamba", "recurrent_gemma", "granitemoehybrid", "gemma3_text", "phimoe")


@pytest.mark.parametrize("keys", (ROPES["linear"], ROPES["theta"]), ids=("linear", "theta"))
@pytest.mark.parametrize("name", WITHOUT)
def test_models_without_such_rope_are_refused(name: str, keys: dict[str, Any]) -> None:
    """Also those of which no layer has it: recurrent layers, layers with a window, no positions at all."""
    changed = rope(**keys)
    with refused("rope"):
        check_rope(AutoModelForCausalLM.from_config(extend_rope(family(name).config, changed)), changed)


@pytest.mark.parametrize("kind", ("yarn", "dynamic", "linear"))
def test_a_model_that_does_not_name_the_size_of_its_heads(kind: str, tmp_path: Path) -> None:
    short = family("mixtral")
    assert short.config.head_dim is None
    short.save_pretrained(tmp_path / "short")
    extended = load(tmp_path / "short", **ROPES[kind])
    with torch.no_grad():
        expected = extended(LONG, use_cache=False).logits
        again = AutoModelForCausalLM.from_pretrained(write(extended, tmp_path / "export"))
        assert torch.allclose(again.eval()(LONG, use_cache=False).logits, expected, atol=1e-4)
        assert not torch.allclose(short(LONG, use_cache=False).logits, expected, atol=1e-4)


def test_layers_with_a_window_keep_their_rope() -> None:
    linear = rope(type="linear", factor=4)
    layers = {"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]}
    settings = ModelConfig(path="x", architecture=FAMILIES["gemma3_text"] | layers, rope=linear)
    nested = model_config(settings, online=False)
    assert nested.rope_parameters["sliding_attention"]["rope_type"] == "default"
    check_rope(AutoModelForCausalLM.from_config(nested), linear)
    with refused("rope"):
        model_config(settings.model_copy(update={"rope": rope(**ROPES["dynamic"])}), online=False)
    olmo = extend_rope(family("olmo3").config, rope(theta=1e6)).rope_parameters  # one theta in transformers 4
    assert {part["rope_theta"] for part in olmo.values()} == {1e6}


def test_a_scaled_model_needs_its_original_context(model: Path, tmp_path: Path) -> None:
    load(model, **ROPES["yarn"]).save_pretrained(tmp_path)
    with refused("rope"):
        load(tmp_path, **ROPES["yarn"])
    replaced = load(tmp_path, type="yarn", factor=8, original_max_position_embeddings=CONTEXT).config
    assert replaced.max_position_embeddings == 8 * CONTEXT
    assert replaced.rope_parameters["beta_fast"] == 16 and replaced.rope_parameters["rope_theta"] == 5e4
    other = load(tmp_path, type="linear", factor=2, original_max_position_embeddings=CONTEXT).config
    assert other.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}
    assert load(tmp_path, theta=1e6).config.rope_parameters["rope_type"] == "yarn"
    with refused("rope"):  # the factor sets the context
        load(tmp_path, theta=1e6, max_position_embeddings=512)
    assert rope_type(other) == "linear" and rope_type(load_model_config(model)) == "default"
