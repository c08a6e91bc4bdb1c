"""What is loaded is what was saved, what does not fit is refused; attention, adapters, and their export."""

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
from torch import Tensor, nn

from emo.common.errors import UserError
from emo.data_prep.encoding.tokenizer import load_tokenizer, tokenizer_fingerprint
from emo.pipeline.config import RunConfig, load_config
from emo.pipeline.engine.devices import usable_attention
from emo.pipeline.loss import CostEmbedding, fuse_model, get_objective
from emo.pipeline.model import export
from emo.pipeline.model.build import add_lora, check_fits, check_model, load_pretrained
from emo.pipeline.model.config import ModelConfig
from emo.pipeline.model.export import exported_tensors, write_shards
from emo.pipeline.model.objectives import Losses, measuring, warn_of_twins
from emo.pipeline.planning.checks import rehearse_export
from tests.conftest import REPO
from tests.helpers.corpus import random_dataset
from tests.helpers.families import family
from tests.helpers.refusals import refused


def test_measuring_reports_demd_for_mle_and_leaves_training_as_it_was() -> None:
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


@pytest.mark.parametrize(("alike", "warned"), [(slice(500), True), (slice(1000, None), False)])
def test_costs_that_do_not_tell_tokens_of_the_data_apart(
    alike: slice, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens that never occur may be alike, and commonly are."""
    E = torch.randn(1100, 16)
    E[alike] = E.mean(0)
    warn_of_twins(CostEmbedding.from_weight(E), random_dataset(tmp_path / "data", 2000, 8))
    assert bool(caplog.records) == warned


Change = Callable[[dict[str, Tensor]], Any]  # of the tensors of a checkpoint


def choice(**keys: Any) -> ModelConfig:
    return ModelConfig(**({"architecture": {"model_type": "llama"}} | keys))  # type: ignore[arg-type]


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that says it has a GPU with torch's own kernel, and has no flash-attn."""
    monkeypatch.setattr("emo.pipeline.engine.devices.on_gpu", lambda: True)
    monkeypatch.setattr("emo.pipeline.engine.devices.kernel_is_new_enough", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flash_attn", None)


def test_a_gpu_takes_the_first_attention_that_host_and_family_have(
    ampere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own kernel, else flash-attn, else SDPA; never half precision's for float32."""

    def auto(config: Any, **keys: Any) -> str:
        return usable_attention(choice(**keys), config)

    llama = family("llama").config
    assert auto(llama) == "varlen"
    assert auto(llama, dtype="float32") == "sdpa"
    assert auto(family("xglm").config) == "eager"
    assert auto(family("gpt2").config) == "sdpa"  # it has dropout
    assert auto(family("llama", head_dim=264).config) == "sdpa"
    for chosen in (
        {"attn_implementation": "varlen", "dtype": "float32"},
        {"attn_implementation": "flash_attention_2"},
    ):
        with pytest.raises(UserError):
            auto(llama, **chosen)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    assert auto(family("gpt2").config) == "flash_attention_2"
    assert auto(family("gemma2").config) == "flash_attention_2"  # it has a soft cap
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert auto(llama) == "flash_attention_2"


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [1]},
    ],
)
def test_an_adapted_head_is_named_as_the_reason(settings: dict[str, Any]) -> None:
    """By recipe before weights are loaded; in a program of the user's when the loss is put in."""
    with pytest.raises(UserError) as caught:
        add_lora(family("llama"), choice(lora={"r": 2, "targets": ["lm_head"]}), 0)
    assert caught.value.code == "adapted-head"
    model = family("llama", tie_word_embeddings=True)
    peft.get_peft_model(model, peft.LoraConfig(**settings))
    with pytest.raises(UserError) as caught:
        fuse_model(model, get_objective("mle"))
    assert caught.value.code == "adapted-head"


@pytest.mark.parametrize("targets", [["q_proj", "v_prj"], "all_linear", "("])
def test_adapters_on_layers_that_do_not_exist(targets: str | list[str]) -> None:
    with pytest.raises(UserError, match=r"model\.lora\.targets"):
        add_lora(family("llama"), choice(lora={"r": 2, "targets": targets}), 0)


def run_config(path: str, directory: Path, **model: Any) -> RunConfig:
    data = {"dir": directory, "tokenizer": "x", "sources": [{"files": "x"}]}
    tree = {"output_dir": directory, "data": data, "model": {"path": path, "dtype": "float32"} | model}
    return RunConfig(**tree, train={"max_steps": 1})  # type: ignore[arg-type]


UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(UP), f"lacks {UP}"),
        (lambda t: t.update(score=torch.ones(2, 32)), "holds what this kind of model has not: score"),
        (lambda t: t.update({NORM: torch.ones(31)}), f"has another shape for {NORM}"),
        (lambda t: t[UP].view(-1)[5:6].fill_(torch.nan), f"holds values in {UP}"),
        (lambda t: t.update({NORM: torch.ones(32, dtype=torch.int64)}), f"holds {NORM} as int64"),
    ],
)
def test_weights_that_are_not_those_of_the_model(change: Change, message: str, tmp_path: Path) -> None:
    family("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=re.escape(f"model.path={tmp_path} {message}")):
        load_pretrained(str(tmp_path), None, "float32", "sdpa")


@pytest.mark.parametrize(("model_type", "pickled"), [("llama", False), ("gpt2", True)])
def test_tied_weights_that_differ_are_refused(model_type: str, pickled: bool, tmp_path: Path) -> None:
    """Checkpoints of a bare base model, as GPT-2's are, have shorter names."""
    model = family(model_type, tie_word_embeddings=True)
    model.config.save_pretrained(tmp_path)
    prefix = "model." if model_type == "llama" else ""
    tensors = {f"{prefix}{name}": tensor.clone() for name, tensor in model.base_model.state_dict().items()}
    short = next(name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight")))
    for fault in (0, 1):
        whole = tensors | {"lm_head.weight": tensors[short] + fault}
        if pickled:
            torch.save(whole, tmp_path / "pytorch_model.bin")
        else:
            save_file(whole, tmp_path / "model.safetensors", {"format": "pt"})
        source = (str(tmp_path), None, "float32", "sdpa")
        if fault:
            with pytest.raises(UserError, match=f"lm_head.weight and {short}"):
                load_pretrained(*source)
        else:
            loaded = load_pretrained(*source)
            assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


def test_data_that_do_not_fit_are_refused(shared_data: Path) -> None:
    new, stories = choice(), ModelConfig(path=str(shared_data / "models" / "stories260K"))
    tokenizer = load_tokenizer(str(stories.path))
    right, end = tokenizer_fingerprint(tokenizer), tokenizer.eos_token_id
    tokenizer.eos_token = "a"  # data may end with another token than the model names
    for model, vocabulary, block, digest, eos, fits in (
        (new, 61, 32, "x", end, True),
        (new, 62, 32, "x", end, False),
        (new, 61, 65, "x", end, False),
        (stories, 61, 32, right, end, True),
        (stories, 61, 32, right, 5, False),
        (stories, 61, 32, tokenizer_fingerprint(tokenizer), tokenizer.eos_token_id, True),
        (stories, 61, 32, "x", end, False),
    ):
        facts = {"vocab_size": vocabulary, "block": block, "tokenizer_fingerprint": digest, "eos_id": eos}
        data: Any = SimpleNamespace(**facts)
        with contextlib.nullcontext() if fits else pytest.raises(UserError):
            check_fits(family("llama").config, model, data)
    facts["vocab_size"] = 10_000
    with refused("vocabulary") as told:
        check_fits(family("llama").config, new, SimpleNamespace(**facts))  # type: ignore[arg-type]
    assert "resize_token_embeddings" in str(told.value)


def checked_model(model: Any, attention: str, *segments: int) -> None:
    """Check a model as the trainer does, for sets of two rows with so many segments."""
    fuse_model(model, get_objective("mle"))
    engine: Any = SimpleNamespace(model=model, ds=model, world=SimpleNamespace(device=torch.device("cpu")))
    config = run_config("x", Path("x"), attn_implementation=attention)
    data: Any = [SimpleNamespace(shards=[SimpleNamespace(segments=n, rows=2)]) for n in segments]
    check_model(engine, config, data)


@pytest.mark.parametrize("segments", [(3,), (2, 3)])
def test_packed_data_need_a_model_that_keeps_documents_apart(segments: tuple[int, ...]) -> None:
    """Training or validation data."""
    with pytest.raises(UserError, match="BloomForCausalLM"):
        checked_model(family("bloom"), "auto", *segments)
    checked_model(family("bloom"), "auto", 2)


@pytest.mark.parametrize("chosen", ["auto", "varlen"])
def test_attention_that_is_told_of_documents_in_vain_gives_way(chosen: str) -> None:
    """A family that does not hand segments on to its layers: `auto` takes another, a choice is refused."""
    model = family("opt", "varlen")
    body = model.model.forward

    @functools.wraps(body)
    def forgets(*args: Any, **kwargs: Any) -> Any:
        bounds = ("cu_seq_lens", "max_length")
        return body(*args, **{k: v for k, v in kwargs.items() if not k.startswith(bounds)})

    model.model.forward = forgets
    if chosen == "auto":
        checked_model(model, chosen, 3)
        assert (model.config._attn_implementation, model.packing) == ("sdpa", "mask")
    else:
        with pytest.raises(UserError, match="=varlen"):
            checked_model(model, chosen, 3)


def adapted_model(name: str, **lora: Any) -> tuple[nn.Module, RunConfig]:
    """A small model, with adapters whose values are not zero if `lora` is given, and its recipe."""
    overrides = [f"model.lora.{k}={v}" for k, v in lora.items()]
    config = load_config(REPO / "launch/recipes/quickstart-pretrain.yaml", overrides)
    torch.manual_seed(0)
    plain = family(name).eval()
    if not lora:
        return plain, config
    chosen = ModelConfig(architecture={"model_type": name}, lora=config.model.lora)
    adapted = add_lora(plain, chosen, 0).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.3)
    return adapted, config


@pytest.mark.parametrize(
    ("name", "targets"),
    [("llama", "all-linear"), ("llama", "[embed_tokens]"), ("gpt2", "all-linear"), ("gpt2", "[wte]")],
)
def test_merged_tensors_give_the_adapted_model(name: str, targets: str) -> None:
    """GPT-2's Conv1D stores [in, out], and its head is tied; embeddings' adapters have another shape."""
    adapted, config = adapted_model(name, r=4, alpha=16, targets=targets)
    if targets == "[wte]":
        with pytest.raises(UserError, match=r"model.lora.targets: .* and lm_head.weight are one tensor"):
            rehearse_export(adapted, config)
        return
    rehearse_export(adapted, config)
    merged = {t.name: t.merged(*(p.detach() for p in t.parts)) for t in exported_tensors(adapted)}
    assert any(len(t.parts) > 1 for t in exported_tensors(adapted))
    plain, _ = adapted_model(name)
    plain.load_state_dict(merged, strict=False)
    ids = torch.arange(16)[None]
    with torch.no_grad():
        result, expected = plain(input_ids=ids).logits, adapted(input_ids=ids).logits
    assert torch.allclose(result, expected, atol=1e-4)


def tensors(count: int) -> list[tuple[str, torch.Tensor]]:
    return [(f"t{i}", torch.zeros(20)) for i in range(count)]


def test_shards_are_named_and_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "SHARD_BYTES", 100)
    write_shards(tmp_path / "x", tensors(3))
    index = json.loads((tmp_path / "x/model.safetensors.index.json").read_text())
    assert {name: load_file(tmp_path / "x" / file).keys() for name, file in index["weight_map"].items()} == {
        f"t{i}": {f"t{i}"} for i in range(3)
    }
    assert index["metadata"] == {"total_size": 240}
