"""The DeepSpeed file: what is refused, in one line that names the file; and what a host must have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emo.common.errors import UserError
from emo.pipeline.config import Batch, load_config
from emo.pipeline.planning import ds_file, host
from emo.pipeline.planning.ds_file import check_host, deepspeed_config, zero_stage
from tests.conftest import REPO


def resolved(path: Path, *overrides: str, ranks: int = 4) -> dict[str, Any]:
    recipe = REPO / "launch/recipes/llama-7b-wikitext103.yaml"
    batch = Batch(16, 16 // ranks, 1, ranks)
    return deepspeed_config(load_config(recipe, [f"deepspeed={path}", *overrides]), batch)


def test_weights_on_nvme_need_a_directory_libaio_and_nvcc(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refusal(**offload: str) -> str | None:
        try:
            check_host({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", **offload}}})
        except UserError as error:
            return error.code
        return None

    for present, offload, code in (
        (False, {"nvme_path": str(tmp_path)}, "nvme-libaio"),
        (True, {"nvme_path": str(tmp_path / "none")}, "nvme-path"),
        (True, {}, "nvme-path"),
        (True, {"nvme_path": str(tmp_path)}, None),
    ):
        monkeypatch.setattr(ds_file.AsyncIOBuilder, "is_compatible", lambda _, present=present: present)
        assert refusal(**offload) == code
    monkeypatch.setattr(host, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    for home, code in ((None, "nvme-nvcc"), ("/usr/local/cuda", None)):
        monkeypatch.setattr(ds_file.cpp_extension, "CUDA_HOME", home)
        assert refusal(nvme_path=str(tmp_path)) == code


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[1, 2]", ""),
        ("null", ""),
        ("{", ""),
        ("[" * 100_000, ""),
        ('{"zero_optimization": {"stage": 1}, "zero_optimization": {"stage": 3}}', "zero_optimization"),
        ('{"zero_optimization": {"stage": "three"}}', "zero_optimization.stage"),
        ('{"zero_optimization": {"stage": 7}}', "zero_optimization.stage"),
        ('{"zero_optimization": []}', ""),
        ('{"zero_optimisation": {"stage": 3}}', "did you mean zero_optimization?"),
        ('{"zero_optimization": {"stage": 3, "overlap_com": true}}', "zero_optimization.overlap_com"),
        ('{"zero_optimization": {"offload_param": {"devise": "cpu"}}}', "offload_param.devise"),
        ('{"data_types": {"grad_accum_dtype": "fp8"}}', "grad_accum_dtype"),
        ('{"data_types": {"grad_acum_dtype": "fp32"}}', "grad_accum_dtype"),
        ('{"data_types": []}', "data_types"),
        ('{"aio": 3}', ""),
        ('{"wall_clock_breakdown": "x"}', ""),
    ],
)
def test_a_mistake_in_the_file_names_the_file(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        resolved(path)
    message = str(error.value)
    assert error.value.code == "ds-file" and str(path) in message and named in message
    assert "\n" not in message and len(message) < 2500


MUON = ("train.optimizer=muon", "train.muon_lr=0.02", "train.max_grad_norm=0")
OFFLOAD = '"stage": 3, "offload_optimizer": {"device": "cpu"}'


@pytest.mark.parametrize(
    ("content", "overrides", "code"),
    [
        ('"sequence_parallel_size": 2', (), "ds-cuts"),
        ('"tensor_parallel": {"autotp_size": 2}', (), "ds-cuts"),
        ('"train_batch_size": 4, "zero_optimization": {"stage": 2}', (), "ds-owned"),
        ('"zero_optimization": {}', (), "zero-stage"),
        ('"zero_optimization": {"stage": 0}', (), "zero-stage"),
        ('"zero_optimization": {"stage": 2, "reduce_scatter": true}', MUON, "ds-combination"),
        (f'"zero_optimization": {{{OFFLOAD}}}', MUON, "ds-combination"),
        ('"zero_optimization": {"stage": 2}', (*MUON, "model.lora.r=4"), "ds-combination"),
        (f'"zero_optimization": {{{OFFLOAD[:-1]}, "ratio": 0.5}}}}', (), "ds-combination"),
        (f'"zero_optimization": {{{OFFLOAD.replace("cpu", "nvme")}}}', (), "ds-combination"),
        ('"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}', (), "ds-combination"),
        ('"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}', (), "ds-combination"),
        ('"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}', (), "ds-combination"),
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


def test_the_files_of_this_repository_are_accepted(tmp_path: Path) -> None:
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
    path = tmp_path / "ds.json"
    contents = {'{"wall_clock_breakdown": false}': 1}
    contents['{"zero_optimization": {"stage": 2, "offload_optimizer": null}}'] = 2
    for content, stage in contents.items():
        path.write_text(content)
        assert zero_stage(resolved(path)) == stage
    with pytest.raises(UserError, match=r"did you mean ds_configs/zero1\.json\?"):
        resolved(Path("ds_configs/zero1.jsn"))


def test_copies_of_weights_stay_in_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    check_host(tree)
    for ranks in ("4", "12"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        with pytest.raises(UserError) as error:
            check_host(tree)
        assert error.value.code == "hpz-ranks"
