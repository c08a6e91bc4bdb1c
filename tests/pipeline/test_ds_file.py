"""The DeepSpeed file: what is refused, what a host must have for it, and the groups of its optimizer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from emo.common.errors import UserError
from emo.pipeline.config import Batch, load_config
from emo.pipeline.planning import ds_file, host
from emo.pipeline.planning.ds_file import REPORTS, check_host, deepspeed_config, parameter_groups
from tests.conftest import REPO
from tests.helpers.families import family


def resolved(path: Path, *overrides: str, ranks: int = 4) -> dict[str, Any]:
    recipe = REPO / "launch/recipes/llama-7b-wikitext103.yaml"
    batch = Batch(16, 16 // ranks, 1, ranks)
    return deepspeed_config(load_config(recipe, [f"deepspeed={path}", *overrides]), batch)


def refusal(tree: dict[str, Any]) -> str | None:
    try:
        check_host({"zero_optimization": {"stage": 3, **tree}})
    except UserError as error:
        return error.code
    return None


def test_what_a_host_must_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks for copies of weights; libaio, a directory and nvcc for NVMe; a compiler for Triton."""
    for ranks, code in (("8", None), ("4", "hpz-ranks"), ("12", "hpz-ranks")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert refusal({"zero_hpz_partition_size": 8}) == code
    there, absent = str(tmp_path), str(tmp_path / "none")
    for present, path, code in (
        (False, there, "nvme-libaio"),
        (True, absent, "nvme-path"),
        (True, there, None),
    ):
        monkeypatch.setattr(ds_file.AsyncIOBuilder, "is_compatible", lambda _, present=present: present)
        assert refusal({"offload_param": {"device": "nvme", "nvme_path": path}}) == code
    monkeypatch.setattr(host, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    for home, code in ((None, "nvme-nvcc"), ("/usr/local/cuda", None)):
        monkeypatch.setattr(ds_file.cpp_extension, "CUDA_HOME", home)
        assert refusal({"offload_param": {"device": "nvme", "nvme_path": there}}) == code
    monkeypatch.setattr(ds_file, "compiler", lambda: None)
    assert refusal({}) == "compiler"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("null", ""),
        ("[" * 100_000, ""),
        ('{"zero_optimization": {"stage": 1}, "zero_optimization": {"stage": 3}}', "zero_optimization"),
        ('{"zero_optimization": {"stage": 7}}', "zero_optimization.stage"),
        ('{"zero_optimisation": {"stage": 3}}', "did you mean zero_optimization?"),
        ('{"zero_optimization": {"stage": 3, "overlap_com": true}}', "zero_optimization.overlap_com"),
        ('{"data_types": {"grad_accum_dtype": "fp8"}}', "grad_accum_dtype"),
    ],
)
def test_a_mistake_in_the_file_names_the_file(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        resolved(path)
    message = str(error.value)
    assert error.value.code == "ds-file" and str(path) in message and named in message


MUON = ("train.optimizer=muon", "train.muon_lr=0.02", "train.max_grad_norm=0")
OFFLOAD = '"stage": 3, "offload_optimizer": {"device": "cpu"}'


@pytest.mark.parametrize(
    ("content", "overrides", "code"),
    [
        ('"tensor_parallel": {"autotp_size": 2}', (), "ds-cuts"),
        ('"zero_optimization": {}', (), "zero-stage"),
        ('"train_batch_size": 4, "zero_optimization": {"stage": 2}', (), "ds-owned"),
        *((f'"{key}": {{"enabled": true}}', (), "ds-owned") for key in REPORTS),
        ('"zero_optimization": {"stage": 2, "reduce_scatter": true}', MUON, "ds-combination"),
        (f'"zero_optimization": {{{OFFLOAD}}}', MUON, "ds-combination"),
        ('"zero_optimization": {"stage": 2}', (*MUON, "model.lora.r=4"), "ds-combination"),
        (f'"zero_optimization": {{{OFFLOAD[:-1]}, "ratio": 0.5}}}}', (), "ds-combination"),
        (f'"zero_optimization": {{{OFFLOAD.replace("cpu", "nvme")}}}', (), "ds-combination"),
        ('"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}', (), "ds-combination"),
        ('"zero_optimization": {"stage": 3}', ("model.compile=true",), "ds-combination"),
    ],
)
def test_what_does_not_go_together(
    tmp_path: Path, content: str, overrides: tuple[str, ...], code: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(f"{{{content}}}")
    with pytest.raises(UserError) as error:
        resolved(path, *overrides)
    assert error.value.code == code


def test_the_files_of_this_repository_are_accepted() -> None:
    """AdamW is PyTorch's, so that nothing is compiled; the fused one also steps offloaded optimizers."""
    for path in sorted((REPO / "ds_configs").glob("*.json")):
        tree = resolved(path, ranks=8)
        section = tree["optimizer"]
        assert tree["train_batch_size"] == 16 and section["type"] == "AdamW"
        offloads = "offload_optimizer" in tree["zero_optimization"]
        assert section["params"]["torch_adam"] and section["params"].get("fused", False) == offloads
    tree = resolved(REPO / "ds_configs/zero3.json", *MUON)
    assert tree["zero_optimization"]["reduce_scatter"] is False, "Muon needs whole gradients"
    assert tree["optimizer"]["params"]["muon_lr"] == 0.02


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_biases_and_gains_of_norms_do_not_decay_as_in_trainer(name: str) -> None:
    model = family(name)
    forbidden = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)", r"\.ln_", "^ln_"]
    decaying = set(get_parameter_names(model, [nn.LayerNorm], forbidden))
    names = {id(p): n for n, p in model.named_parameters()}
    first, second = parameter_groups(model, 0.1)
    assert {names[id(p)] for p in first["params"]} == decaying & set(names.values())
    assert {names[id(p)] for p in second["params"]} == set(names.values()) - decaying
    assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.0)


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_muon_takes_the_matrices_of_the_body(name: str) -> None:
    model = family(name)
    first, *others = parameter_groups(model, 0.1, use_muon=True)
    names = {id(p): n for n, p in model.named_parameters()}
    taken = {names[id(p)] for p in first["params"]}
    assert first["use_muon"] and first["weight_decay"] == 0.1
    assert taken and all(model.get_parameter(name).dim() == 2 for name in taken)
    assert not any(word in name for name in taken for word in ("embed", "lm_head", "wte", "wpe"))
    together = [p for group in (first, *others) for p in group["params"]]
    assert len(together) == len({id(p) for p in together}) == len(names)


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_muon_refuses_transposed_matrices_and_experts_in_one_tensor(name: str) -> None:
    """They would be scaled the wrong way round, or left to AdamW at its rate, without a word."""
    with pytest.raises(UserError, match="muon"):
        parameter_groups(family(name), 0.1, use_muon=True)
