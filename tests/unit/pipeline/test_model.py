"""Loading and checking the trained model: weights, attention, adapters and their export."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
)

from emo.common.errors import UserError
from emo.data_prep.encoding.tokenizer import load_tokenizer, tokenizer_fingerprint
from emo.pipeline.config import RunConfig
from emo.pipeline.engine.device.devices import usable_attention
from emo.pipeline.loss import CostEmbedding, Ramp, Spaced, fuse_model, get_objective, weighted_sum
from emo.pipeline.loss.cost_files import load_cost
from emo.pipeline.model import export
from emo.pipeline.model.adapters import add_lora
from emo.pipeline.model.build import (
    add_embedding_noise,
    check_fits,
    check_model,
    load_pretrained,
    model_config,
)
from emo.pipeline.model.config import ModelConfig
from emo.pipeline.model.export import exported_tensors, write_shards
from emo.pipeline.model.objective.build import Losses, measuring, warn_of_twins
from emo.pipeline.model.readers import copy_processor, saved_names
from emo.pipeline.planning.checks import rehearse_export
from tests.helpers.corpus import random_dataset
from tests.helpers.families import family
from tests.helpers.refusals import refused

Change = Callable[[dict[str, Tensor]], Any]  # changes the tensors of a checkpoint
UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"


def model_section(**keys: Any) -> ModelConfig:
    return ModelConfig(**({"architecture": {"model_type": "llama"}} | keys))  # type: ignore[arg-type]


def run_config(directory: Path, **model: Any) -> RunConfig:
    data = {"dir": directory, "tokenizer": "x", "sources": [{"files": "x"}]}
    tree = {"output_dir": directory, "data": data, "model": {"path": "x", "dtype": "float32"} | model}
    return RunConfig(**tree, train={"max_steps": 1})  # type: ignore[arg-type]


def test_embeddings_have_noise_only_while_training() -> None:
    model = family("llama")
    embeddings = model.get_input_embeddings()
    ids = torch.randint(0, 61, (2, 8))
    clean = embeddings(ids)
    add_embedding_noise(model, 5.0)
    limit = 5.0 / (8 * 32) ** 0.5
    noise = (model.train().get_input_embeddings()(ids) - clean).abs()
    assert 0.9 * limit < noise.max() <= limit * 1.001 and 0.4 * limit < noise.mean() < 0.6 * limit
    with torch.no_grad():
        assert embeddings(ids).equal(clean)
    assert model.eval().get_input_embeddings()(ids).equal(clean)


def test_demd_is_measured_for_mle_only_within_the_block() -> None:
    model = family("llama")
    cost = CostEmbedding.from_weight(model.lm_head.weight.detach().clone())
    losses = Losses(get_objective("mle"), None, cost)
    fuse_model(model, losses.objective, losses.cost)
    ids = torch.randint(0, 61, (2, 8))
    assert model(input_ids=ids, labels=ids).demd.isnan()
    with measuring(model, losses):
        measured = model(input_ids=ids, labels=ids)
    probabilities = model(input_ids=ids).logits.softmax(-1)
    unit = torch.nn.functional.normalize(model.lm_head.weight.detach(), dim=1)
    expected = (probabilities * (1 - unit @ unit.T)[ids]).sum()
    assert measured.demd.item() == pytest.approx(expected.item(), rel=1e-4)
    assert model(input_ids=ids, labels=ids).demd.isnan()


def test_validation_measures_the_training_objective_after_any_step() -> None:
    """A step may have been on-policy, with another objective, or without a part of the sum."""
    model = family("llama")
    parts = [(get_objective("mle"), 1.0), (get_objective("neg_entropy"), Spaced(1.0, Ramp(0.5, 0.5, 1)))]
    losses = Losses(weighted_sum(parts), None, CostEmbedding.from_weight(model.lm_head.weight.detach()))
    fuse_model(model, losses.objective)
    ids = torch.randint(0, 61, (2, 8))
    measured = []
    for objective in (losses.objective.at(0), losses.objective.at(1), get_objective("mle")):
        model.get_output_embeddings().use(objective)
        with measuring(model, losses, 3):
            measured.append(model(input_ids=ids, labels=ids).loss.item())
    assert measured[0] == measured[1] == measured[2]


@pytest.mark.parametrize(("equal", "warned"), [(slice(500), True), (slice(1000, None), False)])
def test_equal_embeddings_of_tokens_in_the_data_are_warned_of(
    equal: slice, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens from 1000 on do not occur in the data."""
    E = torch.randn(1100, 16)
    E[equal] = E.mean(0)
    warn_of_twins(CostEmbedding.from_weight(E), random_dataset(tmp_path / "data", 2000, 8))
    assert bool(caplog.records) == warned


def test_a_gpu_gets_the_first_attention_that_host_and_family_support(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is torch's kernel, flash-attn, SDPA. Float32 never uses an attention for half precision."""
    monkeypatch.setattr("emo.pipeline.engine.device.devices.on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flash_attn", None)

    def choose(name: str, changes: dict[str, Any] | None = None, **keys: Any) -> str:
        return usable_attention(model_section(**keys), family(name, **(changes or {})).config)

    assert choose("llama") == "varlen"
    assert choose("llama", dtype="float32") == "sdpa"
    assert choose("xglm") == "eager"
    assert choose("gpt2") == "sdpa"  # GPT-2 has dropout
    assert choose("llama", {"head_dim": 264}) == "sdpa"
    with pytest.raises(UserError):
        choose("llama", attn_implementation="varlen", dtype="float32")
    with pytest.raises(UserError):
        choose("llama", attn_implementation="flash_attention_2")
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    assert choose("gpt2") == "flash_attention_2"
    assert choose("gemma2") == "flash_attention_2"  # Gemma 2 has a soft cap
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert choose("llama") == "flash_attention_2"


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [1]},
    ],
)
def test_an_adapted_head_is_rejected_when_the_loss_is_fused(settings: dict[str, Any]) -> None:
    model = family("llama", tie_word_embeddings=True)
    peft.get_peft_model(model, peft.LoraConfig(**settings))
    with refused("adapted-head"):
        fuse_model(model, get_objective("mle"))


def test_an_adapted_head_is_rejected_in_a_recipe() -> None:
    with refused("adapted-head"):
        add_lora(family("llama"), model_section(lora={"r": 2, "targets": ["lm_head"]}), 0)


def test_adapters_leave_experts_out() -> None:
    """Their weights are stacked, and PEFT's adapters for those allow no dropout and cannot be merged."""
    model = family("qwen3_moe")
    add_lora(model, model_section(lora={"r": 2}), 0)
    names = [name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name]
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    for dropout in (0.0, 0.05):
        settings = {"r": 2, "dropout": dropout, "targets": r".*\.(q|gate|up|down)_proj"}
        with refused("lora-targets") as error:
            add_lora(family("qwen3_moe"), model_section(lora=settings), 0)
        assert "experts" in str(error.value)


@pytest.mark.parametrize("targets", [["q_proj", "v_prj"], "all_linear", "("])
def test_adapters_on_unknown_layers_are_rejected(targets: str | list[str]) -> None:
    with pytest.raises(UserError, match=r"model\.lora\.targets"):
        add_lora(family("llama"), model_section(lora={"r": 2, "targets": targets}), 0)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.pop(UP), f"lacks {UP}"),
        (lambda t: t.update(score=torch.ones(2, 32)), "does not have: score"),
        (lambda t: t.update({NORM: torch.ones(31)}), f"another shape for {NORM}"),
        (lambda t: t[UP].view(-1)[5:6].fill_(torch.nan), UP),
        (lambda t: t.update({NORM: torch.ones(32, dtype=torch.int64)}), f"{NORM} as int64"),
    ],
)
def test_damaged_weights_are_rejected(change: Change, problem: str, tmp_path: Path) -> None:
    family("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"{re.escape(f'model.path={tmp_path}')} .*{re.escape(problem)}"):
        load_pretrained(str(tmp_path), None, "float32", "sdpa")


@pytest.mark.parametrize(("model_type", "pickled"), [("llama", False), ("gpt2", True)])
def test_tied_weights_that_differ_are_rejected(model_type: str, pickled: bool, tmp_path: Path) -> None:
    """Checkpoints of a bare base model, such as GPT-2's, have shorter names."""
    model = family(model_type, tie_word_embeddings=True)
    model.config.save_pretrained(tmp_path)
    prefix = "model." if model_type == "llama" else ""
    tensors = {f"{prefix}{name}": tensor.clone() for name, tensor in model.base_model.state_dict().items()}
    embedding = next(name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight")))
    source = (str(tmp_path), None, "float32", "sdpa")
    for difference in (0, 1):
        changed = tensors | {"lm_head.weight": tensors[embedding] + difference}
        if pickled:
            torch.save(changed, tmp_path / "pytorch_model.bin")
        else:
            save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        if difference:
            with pytest.raises(UserError, match=f"lm_head.weight and {embedding}"):
                load_pretrained(*source)
        else:
            loaded = load_pretrained(*source)
            assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


def test_data_that_do_not_fit_the_model_are_rejected(shared_data: Path) -> None:
    new, stories = model_section(), ModelConfig(path=str(shared_data / "models" / "stories260K"))
    tokenizer = load_tokenizer(str(stories.path))
    right, end = tokenizer_fingerprint(tokenizer), tokenizer.eos_token_id
    tokenizer.eos_token = "a"  # the end token of the data may differ from the model's
    changed, changed_end = tokenizer_fingerprint(tokenizer), tokenizer.eos_token_id
    for model, vocabulary, block, digest, eos, fits in (
        (new, 61, 32, "x", end, True),
        (new, 62, 32, "x", end, False),
        (new, 61, 65, "x", end, False),
        (stories, 61, 32, right, end, True),
        (stories, 61, 32, right, 5, False),
        (stories, 61, 32, changed, changed_end, True),
        (stories, 61, 32, "x", end, False),
    ):
        facts = {"used_ids": vocabulary, "block": block, "tokenizer_fingerprint": digest, "eos_id": eos}
        data: Any = SimpleNamespace(**facts)
        with contextlib.nullcontext() if fits else pytest.raises(UserError):
            check_fits(family("llama").config, model, data)
    data.used_ids = 10_000
    with refused("vocabulary") as error:
        check_fits(family("llama").config, new, data)
    assert "resize_token_embeddings" in str(error.value)


def check_packing(model: Any, attention: str, *segments: int) -> None:
    """Check a model as the trainer does, for data sets of two rows with these numbers of segments."""
    fuse_model(model, get_objective("mle"))
    engine: Any = SimpleNamespace(
        model=model, ds=model, world=SimpleNamespace(device=torch.device("cpu"), sequence=1)
    )
    data: Any = [SimpleNamespace(shards=[SimpleNamespace(segments=n, rows=2)]) for n in segments]
    check_model(engine, run_config(Path("x"), attn_implementation=attention), data)


def test_text_of_a_model_with_images_can_be_trained(tmp_path: Path) -> None:
    """The nested architecture is compared by key, the tied head is found, and files have the Hub's names."""
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 61}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    images = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = AutoConfig.for_model("gemma3", text_config=text, vision_config=images)
    model = AutoModelForCausalLM.from_config(settings)
    model.save_pretrained(tmp_path)
    towers = {"vision_tower.vision_model.post_layernorm.bias", "language_model.model.norm.weight"}
    assert towers < saved_names(model, model.named_parameters())
    section = model_section(path=str(tmp_path), architecture={"model_type": "gemma3", "text_config": text})
    hf_config = model_config(section)
    assert load_cost(str(tmp_path), hf_config.get_text_config().vocab_size).rows.shape == (61, 16)
    section.architecture["text_config"]["hidden_size"] = 32  # type: ignore[index]
    with pytest.raises(UserError, match=r"text_config\.hidden_size=16"):
        model_config(section)


@pytest.mark.parametrize("segments", [(3,), (2, 3)])
def test_packed_data_need_a_model_that_separates_documents(segments: tuple[int, ...]) -> None:
    """This applies to training data and to validation data."""
    with pytest.raises(UserError, match="BloomForCausalLM"):
        check_packing(family("bloom"), "auto", *segments)
    check_packing(family("bloom"), "auto", 2)


@pytest.mark.parametrize("chosen", ["auto", "varlen"])
def test_auto_replaces_an_attention_that_does_not_separate_documents(chosen: str) -> None:
    """Some families do not pass segments to their layers. An explicit choice is rejected."""
    model = family("opt", "varlen")
    body = model.model.forward

    @functools.wraps(body)
    def drop_segments(*args: Any, **kwargs: Any) -> Any:
        bounds = ("cu_seq_lens", "max_length")
        return body(*args, **{k: v for k, v in kwargs.items() if not k.startswith(bounds)})

    model.model.forward = drop_segments
    if chosen == "auto":
        check_packing(model, chosen, 3)
        assert (model.config._attn_implementation, model.packing) == ("sdpa", "mask")
    else:
        with pytest.raises(UserError, match="=varlen"):
            check_packing(model, chosen, 3)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize(
    ("name", "targets"),
    [("llama", "all-linear"), ("llama", ["embed_tokens"]), ("gpt2", "all-linear"), ("gpt2", ["wte"])],
)
def test_merged_tensors_give_the_adapted_model(
    name: str, targets: str | list[str], use_dora: bool, tmp_path: Path
) -> None:
    """GPT-2's Conv1D stores [in, out], and its head is tied. Adapters of embeddings have another shape."""
    config = run_config(tmp_path, lora={"r": 4, "alpha": 16, "targets": targets, "use_dora": use_dora})
    torch.manual_seed(0)
    adapted = add_lora(family(name).eval(), config.model, 0).eval()
    with torch.no_grad():
        for parameter_name, parameter in adapted.named_parameters():
            if ".lora_" in parameter_name:
                parameter.normal_(std=0.3)
    if targets == ["wte"]:
        with pytest.raises(UserError, match=r"model.lora.targets: .* and lm_head.weight are one tensor"):
            rehearse_export(adapted, config)
        return
    rehearse_export(adapted, config)
    merged = {t.name: t.merged(*(p.detach() for p in t.parts)) for t in exported_tensors(adapted)}
    assert any(len(t.parts) > 1 for t in exported_tensors(adapted))
    plain = family(name).eval()
    plain.load_state_dict(merged, strict=False)
    ids = torch.arange(16)[None]
    with torch.no_grad():
        result, expected = plain(input_ids=ids).logits, adapted(input_ids=ids).logits
    assert torch.allclose(result, expected, atol=1e-4)


def test_shards_are_named_and_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "SHARD_BYTES", 100)
    write_shards(tmp_path / "x", [(f"t{i}", torch.zeros(20)) for i in range(3)])
    index = json.loads((tmp_path / "x/model.safetensors.index.json").read_text())
    names = {name: load_file(tmp_path / "x" / file).keys() for name, file in index["weight_map"].items()}
    assert names == {f"t{i}": {f"t{i}"} for i in range(3)}
    assert index["metadata"] == {"total_size": 240}


def test_published_weights_of_gpt_oss_are_read(tmp_path: Path) -> None:
    """transformers turns their 4-bit experts into floating-point numbers, and forgets that it did."""
    config = GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, num_local_experts=2, num_experts_per_tok=1, pad_token_id=0,
    )  # fmt: skip
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("gate_up_proj", "down_proj"):
        key = f"model.layers.0.mlp.experts.{name}"
        experts, rows, columns = tensors.pop(key).shape
        tensors[f"{key}_blocks"] = torch.zeros(experts, columns, rows // 32, 16, dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.full((experts, columns, rows // 32), 127, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError):
        load_pretrained(str(tmp_path), None, "bfloat16", "eager")
    settings = json.loads((tmp_path / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    model = load_pretrained(str(tmp_path), None, "bfloat16", "eager")
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())


def test_the_settings_of_an_image_processor_are_exported(tmp_path: Path) -> None:
    """vLLM needs them to load a model that also reads images."""
    (tmp_path / "preprocessor_config.json").write_text("{}")
    for config, expected in ((Gemma3Config(), ["preprocessor_config.json"]), (LlamaConfig(), [])):
        target = tmp_path / config.model_type
        target.mkdir()
        copy_processor(SimpleNamespace(config=config), str(tmp_path), None, target)  # type: ignore[arg-type]
        assert [path.name for path in target.iterdir()] == expected
