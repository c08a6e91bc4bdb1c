"""The DeepSpeed file: what is refused, in one line that names the file; and what a host must have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import UserError
from pipeline.config import Batch, load_config
from pipeline.planning import ds_file, host
from pipeline.planning.ds_file import check_host, deepspeed_config, zero_stage
from tests.conftest import REPO


def test_weights_on_nvme_need_a_place_and_libaio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def config(place: Path) -> dict:
        offload = {"device": "nvme", "nvme_path": str(place)}
        return {"zero_optimization": {"stage": 3, "offload_param": offload}}

    for present, place, message in (
        (False, tmp_path, "install libaio-dev"),
        (True, tmp_path / "none", "none is not a writable directory"),
    ):
        monkeypatch.setattr(ds_file.AsyncIOBuilder, "is_compatible", lambda _, present=present: present)
        with pytest.raises(UserError, match=message):
            check_host(config(place))
    check_host(config(tmp_path))


def test_weights_on_nvme_without_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ds_file.AsyncIOBuilder, "is_compatible", lambda _: True)
    with pytest.raises(UserError, match=r"nvme_path \(not given\) is not a writable directory"):
        check_host({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})


def test_weights_on_nvme_need_nvcc_on_a_gpu_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    monkeypatch.setattr(ds_file.cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(ds_file.AsyncIOBuilder, "is_compatible", lambda _: True)
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    tree = {"zero_optimization": {"stage": 3, "offload_param": offload}}
    with pytest.raises(UserError, match="compiles with nvcc, which is not here"):
        check_host(tree)
    monkeypatch.setattr(ds_file.cpp_extension, "CUDA_HOME", "/usr/local/cuda")
    check_host(tree)


def resolved(path: Path, *overrides: str, ranks: int = 4) -> dict:
    recipe = REPO / "launch/recipes/llama-7b-wikitext103.yaml"
    batch = Batch(16, 16 // ranks, 1, ranks)
    return deepspeed_config(load_config(recipe, [f"deepspeed={path}", *overrides]), batch)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "must hold a JSON object"),
        ('"zero3"', "must hold a JSON object"),
        ("null", "must hold a JSON object"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"zero_optimization": {"stage": 1}, "zero_optimization": {"stage": 3}}', "is given twice"),
        ('{"zero_optimization": {"stage": "three"}}', r"zero_optimization.stage: .*\(given: 'three'\)"),
        (
            '{"zero_optimization": {"stage": 7}}',
            r": zero_optimization.stage: must be one of 0, 1, 2, 3 \(given: 7\)$",
        ),
        ('{"zero_optimization": []}', "zero_optimization must be an object"),
        ('{"zero_optimization": true}', "zero_optimization must be an object"),
        ('{"zero_optimisation": {"stage": 3}}', "no key zero_optimisation; did you mean zero_optimization?"),
        ('{"stage": 3}', "DeepSpeed knows no key stage"),
        ('{"zero_optimization": {"stage": 3, "overlap_com": true}}', "did you mean overlap_comm?"),
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"devise": "cpu"}}}',
            "unknown key zero_optimization.offload_param.devise; did you mean device?",
        ),
        ('{"zero_optimization": {"stage": 3, "offload_optimizer": "cpu"}}', "offload_optimizer: "),
        ('{"data_types": {"grad_accum_dtype": "fp8"}}', "grad_accum_dtype, one of fp32"),
        ('{"data_types": {"grad_acum_dtype": "fp32"}}', "must be an object with grad_accum_dtype"),
        ('{"data_types": []}', "must be an object with grad_accum_dtype"),
        ('{"aio": 3}', "DeepSpeed refuses it"),
        ('{"wall_clock_breakdown": "x"}', "DeepSpeed refuses it"),
    ],
)
def test_a_mistake_in_the_file_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    """defects D1"""
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        resolved(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"sequence_parallel_size": 2}', "sets sequence_parallel_size, which cuts every row over ranks"),
        (
            '{"tensor_parallel": {"autotp_size": 2}}',
            "sets tensor_parallel, which cuts the output head over ranks",
        ),
    ],
)
def test_parallelism_that_cuts_what_the_head_needs_whole_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        resolved(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("path", sorted((REPO / "ds_configs").glob("*.json")), ids=lambda p: p.stem)
def test_the_files_of_this_repository_are_accepted(path: Path) -> None:
    assert resolved(path, ranks=8)["train_batch_size"] == 16


def test_adam_is_never_compiled() -> None:
    """DeepSpeed's own needs nvcc on every host; PyTorch's fused one steps offloaded optimizers too."""
    for name, fused in (("zero3", False), ("zero3_offload", True)):
        section = resolved(REPO / f"ds_configs/{name}.json")["optimizer"]
        assert section["type"] == "AdamW" and section["params"]["torch_adam"] is True
        assert section["params"].get("fused", False) == fused  # everywhere on GPUs


MUON = ("train.optimizer=muon", "train.muon_lr=0.02", "train.clip=0")


def test_muon_needs_whole_gradients() -> None:
    tree = resolved(REPO / "ds_configs/zero3.json", *MUON)
    assert tree["zero_optimization"]["reduce_scatter"] is False
    assert tree["optimizer"]["params"]["muon_lr"] == 0.02


@pytest.mark.parametrize(
    ("zero", "overrides", "message"),
    [
        ('"stage": 2, "reduce_scatter": true', MUON, "train.optimizer=muon needs ZeRO"),
        ('"stage": 3, "offload_optimizer": {"device": "cpu"}', MUON, "train.optimizer=muon needs ZeRO"),
        ('"stage": 2', (*MUON, "model.lora.r=4"), "not for the factors of model.lora"),
        ('"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}', (), "need DeepSpeed's own Adam"),
        ('"stage": 2, "zero_hpz_partition_size": 2', (), "size=2 needs ZeRO stage 3 .* not stage 2"),
        ('"stage": 3, "zero_hpz_partition_size": 3', (), "ranks in groups of 3, not stage 3 and 4 ranks"),
        ('"stage": 3, "zero_hpz_partition_size": 8', (), "ranks in groups of 8, not stage 3 and 4 ranks"),
    ],
)
def test_what_does_not_go_together(
    tmp_path: Path, zero: str, overrides: tuple[str, ...], message: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(f'{{"zero_optimization": {{{zero}}}}}')
    with pytest.raises(UserError, match=message):
        resolved(path, *overrides)


def test_copies_of_weights_stay_in_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    check_host(tree)
    for ranks in ("4", "12"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        with pytest.raises(UserError, match=f"size=8 must divide the {ranks} ranks of a host"):
            check_host(tree)


def test_a_file_may_leave_zero_out(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"wall_clock_breakdown": false}')
    assert zero_stage(resolved(path)) == 1
    for content in ('{"zero_optimization": {}}', '{"zero_optimization": {"stage": 0}}'):
        path.write_text(content)
        with pytest.raises(UserError) as error:
            resolved(path)
        assert error.value.code == "zero-stage"
    path.write_text('{"zero_optimization": {"stage": 2, "offload_optimizer": null}}')
    assert zero_stage(resolved(path)) == 2


@pytest.mark.parametrize("given", ["ds_configs/zero1", "ds_configs/zero1.jsn"])
def test_a_file_that_is_not_there_has_a_neighbour(given: str) -> None:
    with pytest.raises(UserError, match=r"is not a file; did you mean ds_configs/zero1\.json\?"):
        resolved(Path(given))
