"""Recipes and DeepSpeed files: how they resolve, rejected settings, and groups of the optimizer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft.optimizers import create_loraplus_optimizer
from torch import nn
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from emo.common.config.recipe import parse_section
from emo.common.errors import UserError
from emo.pipeline.batches.config import Batch, solve_batch
from emo.pipeline.batches.loader import rank_rows
from emo.pipeline.config import TrainConfig, dump_config, load_config
from emo.pipeline.engine import ds_config as ds_file
from emo.pipeline.engine.device import devices
from emo.pipeline.engine.ds_config import (
    REPORTS,
    Grouping,
    build_8bit,
    check_deepspeed_host,
    deepspeed_config,
    page_states,
    parameter_groups,
)
from emo.pipeline.engine.schedule import lr_at
from emo.pipeline.loss import get_objective
from emo.pipeline.model.objective.config import ObjectiveConfig
from emo.pipeline.planning.setup import setup_of
from tests.conftest import REPO
from tests.helpers.families import family
from tests.helpers.refusals import refused

RECIPE = """
output_dir: runs/x
data: { dir: d, tokenizer: t, sources: [{ files: a.txt }] }
model: { architecture: { model_type: llama } }
train: { max_steps: 10, learning_rate: 1.0e-3 }
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def test_overrides_win_and_the_dump_reads_back(recipe: Path, tmp_path: Path) -> None:
    overrides = ["train.learning_rate=2e-5", "data.sequence_len=64", "objective.params.ratio_cap=3"]
    config = load_config(recipe, overrides)
    assert (config.train.learning_rate, config.data.sequence_len) == (2e-5, 64)
    assert config.objective.params == {"ratio_cap": 3}
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(dump_config(config))
    assert load_config(dumped, []) == config


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.warmup_ration=0.1", "warmup_ratio"),
        ("train.learning_rate=-1", "train.learning_rate"),
        ("train.num_train_epochs=2", "train.num_train_epochs=null"),
        ("train.optimizer=muon", "muon_lr"),
        ("train.profile.steps=[5,2]", "profile.steps"),
        ("model.architecture={hidden_size: 8}", "model_type"),
        ("objective={name: mle, sum: [{name: emo}]}", "not both"),
        ("objective.sum=[{name: emo, cost: live}, {name: mle}]", "unknown key"),
        ("objective={cost: live, cost_cache_mb: 64}", "cost_cache_mb"),
        ("objective.sum=[{name: emo, weight: {from: 1, to: 0}}]", "steps"),
        ("objective.sum=[{name: emo, share: 0.5}, {name: mle, share: 0.5}]", "share of 1"),
        ("train.mixture={}", "shares and temperature"),
        ("train.mixture={temperature: 2, max_epochs: {home: 0}}", "max_epochs"),
    ],
)
def test_a_mistake_gets_one_line(recipe: Path, override: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(recipe, [override])
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_what_adapters_do_with_embeddings_decides_which_settings_are_allowed(recipe: Path) -> None:
    full = "model.lora.train_embeddings=true"
    for settings in (
        ["train.head_lr_ratio=0"],
        ["train.only=embeddings"],
        [full, "objective={name: kl, teacher: base}"],
        [full, "objective={name: kl, teacher: {ema: 0.9}}"],
    ):
        with pytest.raises(UserError, match="train_embeddings"):
            load_config(recipe, ["model.lora.r=2", *settings])
    assert not load_config(recipe, ["model.lora.r=2", full, "train.head_lr_ratio=0.1"]).holds_base
    assert load_config(recipe, ["model.lora.r=2"]).holds_base
    # the model without the adapters is not the one before training
    assert not load_config(recipe, ["model.lora.r=2", "model.lora.path=adapter"]).holds_base


@given(st.integers(1, 4096), st.integers(1, 64), st.integers(1, 64))
def test_batch_equation(batch: int, micro: int, ranks: int) -> None:
    """A batch takes as few passes as possible, which have the same size and few empty slots."""
    if batch < ranks:
        with refused("batch-ranks"):
            solve_batch(batch, micro, ranks)
        return
    solved = solve_batch(batch, micro, ranks)
    rows = -(-batch // ranks)
    assert solved.micro <= micro and solved.accumulation == -(-rows // micro)
    assert 0 <= solved.slots - batch < (solved.accumulation + 1) * ranks
    parts = [rank_rows(np.arange(batch), rank, ranks, solved.micro) for rank in range(ranks)]
    assert all(len(indices) == solved.micro * solved.accumulation for indices, _ in parts)
    assert np.array_equal(np.concatenate([indices[real] for indices, real in parts]), np.arange(batch))


SCHEDULES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"lr_scheduler_type": "cosine"}, {}),
    ({"lr_scheduler_type": "linear", "warmup_steps": 0}, {}),
    ({"lr_scheduler_type": "constant"}, {"name": "constant_with_warmup"}),
    (
        {"lr_scheduler_type": "cosine", "min_lr_ratio": 0.1},
        {"name": "cosine_with_min_lr", "min_lr_rate": 0.1},
    ),
    ({"lr_scheduler_type": "cosine_with_restarts", "num_cycles": 3}, {"num_cycles": 3}),
    ({"lr_scheduler_type": "inverse_sqrt"}, {}),
    ({"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 0}, {"timescale": 10_000}),
    *(
        (
            {"lr_scheduler_type": "warmup_stable_decay", "decay_type": shape} | decay | {"min_lr_ratio": 0.2},
            {"num_decay_steps": 20, "decay_type": shape, "min_lr_ratio": 0.2},
        )
        for shape in ("linear", "cosine", "1-sqrt")
        for decay in ({"decay_steps": 20}, {"decay_ratio": 0.2})
    ),
]


@pytest.mark.parametrize(("settings", "theirs"), SCHEDULES)
def test_learning_rates_after_the_warm_up_are_those_of_transformers(
    settings: dict[str, Any], theirs: dict[str, Any]
) -> None:
    train = TrainConfig(**{"max_steps": 100, "learning_rate": 0.5, "warmup_ratio": 0.1} | settings)
    name = theirs.get("name", settings.get("lr_scheduler_type", "cosine"))
    warmup = settings.get("warmup_steps", 10)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    options = {key: value for key, value in theirs.items() if key != "name"}
    scheduler = get_scheduler(name, optimizer, warmup, 100, scheduler_specific_kwargs=options)
    for step in range(100):
        if step >= warmup:
            assert lr_at(train, step, 100) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12), step
        optimizer.step()
        scheduler.step()


def test_a_restart_can_warm_up_again() -> None:
    keys = {"lr_scheduler_type": "cosine_with_restarts", "num_cycles": 2, "restart_warmup_ratio": 0.2}
    train = TrainConfig(max_steps=100, learning_rate=1.0, warmup_ratio=0, **keys)  # type: ignore[arg-type]
    rates = [lr_at(train, step, 100) for step in range(100)]
    assert rates[0] == 1 and rates[50:61] == pytest.approx([i / 10 for i in range(11)])
    assert rates[60:] == sorted(rates[60:], reverse=True) and rates[99] < 0.01


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"decay_steps": 5}, "warmup_stable_decay"),
        ({"num_cycles": 2}, "cosine_with_restarts"),
        ({"lr_scheduler_type": "constant", "min_lr_ratio": 0.1}, "never decays"),
        ({"lr_scheduler_type": "warmup_stable_decay", "decay_from": "runs/a"}, "RUN_DIR/step-N"),
        ({"lr_scheduler_type": "wsd"}, "warmup_stable_decay"),
        ({"min_lr": 1e-6}, "min_lr_ratio"),
    ],
)
def test_schedule_keys_without_effect_are_rejected(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        parse_section(TrainConfig, {"max_steps": 10} | settings, "train")


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_learning_rate_warms_up_peaks_and_falls(schedule: str) -> None:
    train = TrainConfig(max_steps=100, learning_rate=1.0, lr_scheduler_type=schedule, warmup_ratio=0.1)  # type: ignore[arg-type]
    rates = [lr_at(train, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(rates) == pytest.approx(1.0)
    falling = rates[10:]
    assert falling == sorted(falling, reverse=True)
    assert (rates[-1] < 0.02) == (schedule != "constant")
    assert min(rates) > 0


def test_sums_of_objectives() -> None:
    """Schedules keep their YAML form in a dump."""
    parts = [{"name": "emo", "weight": 0.5}, {"name": "mle", "weight": {"from": 0.5, "to": 0, "steps": 9}}]
    config = parse_section(ObjectiveConfig, {"sum": parts}, "objective")
    assert config.label == "0.5 emo + (0.5 to 0) mle"
    assert parse_section(ObjectiveConfig, config.model_dump(mode="json"), "objective") == config


def resolve(path: Path, *overrides: str, ranks: int = 4) -> dict[str, Any]:
    recipe = REPO / "launch/recipes/paper/llama-7b-wikitext103.yaml"
    batch = Batch(16, 16 // ranks, 1, ranks)
    return deepspeed_config(load_config(recipe, [f"deepspeed={path}", *overrides]), batch)


@pytest.fixture
def resolve_text(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Resolve the text of a DeepSpeed file."""

    def resolve_text(text: str, *overrides: str) -> dict[str, Any]:
        (tmp_path / "ds.json").write_text(text)
        return resolve(tmp_path / "ds.json", *overrides)

    return resolve_text


def test_a_host_lacks_what_the_deepspeed_file_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It may lack ranks for copies of weights, libaio or a directory for NVMe, or a compiler for Triton."""

    def find_error(**section: Any) -> str | None:
        try:
            check_deepspeed_host({"zero_optimization": {"stage": 3, **section}})
        except UserError as error:
            return error.code
        return None

    for ranks, code in (("8", None), ("4", "hpz-ranks"), ("12", "hpz-ranks")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert find_error(zero_hpz_partition_size=8) == code
    cases = ((tmp_path, False, "nvme-libaio"), (tmp_path / "none", True, "nvme-path"), (tmp_path, True, None))
    for path, libaio, code in cases:
        monkeypatch.setattr(ds_file.AsyncIOBuilder, "is_compatible", lambda _, libaio=libaio: libaio)
        assert find_error(offload_param={"device": "nvme", "nvme_path": str(path)}) == code
    monkeypatch.setattr(devices, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    monkeypatch.setattr(ds_file, "find_c_compiler", lambda: None)
    assert find_error() == "compiler"


NARROW = ("train.state_dtype=bfloat16", "model.dtype=bfloat16")
MUON = ("train.optimizer=muon", "train.muon_lr=0.02", "train.max_grad_norm=0")
OFFLOAD = '"stage": 3, "offload_optimizer": {"device": "cpu"}'


@pytest.mark.parametrize(
    ("text", "overrides", "code", "message"),
    [
        ("[" * 100_000, (), "ds-file", ""),
        ("[1]", (), "ds-file", ""),
        ('{"zero_optimization": []}', (), "ds-file", "zero_optimization"),
        ('{"zero_optimization": {"stage": 1}, "zero_optimization": {"stage": 3}}', (), "ds-file", "repeated"),
        ('{"zero_optimization": {"stage": 9}}', (), "ds-file", "must be one of 0, 1, 2, 3 (given: 9)"),
        ('{"zero_optimization": {"stage": 7}}', (), "ds-file", "zero_optimization.stage"),
        ('{"zero_optimisation": {"stage": 3}}', (), "ds-file", "did you mean zero_optimization?"),
        ('{"tensor_parallel": {"autotp_size": 2}}', (), "ds-cuts", ""),
        ('{"zero_optimization": {}}', (), "zero-stage", ""),
        ('{"train_batch_size": 4, "zero_optimization": {"stage": 2}}', (), "ds-owned", ""),
        *((f'{{"{key}": {{"enabled": true}}}}', (), "ds-owned", "") for key in REPORTS),
        ('{"zero_optimization": {"stage": 2, "reduce_scatter": true}}', MUON, "ds-combination", ""),
        (f'{{"zero_optimization": {{{OFFLOAD[:-1]}, "ratio": 0.5}}}}}}', (), "ds-combination", ""),
        (f'{{"zero_optimization": {{{OFFLOAD.replace("cpu", "nvme")}}}}}', (), "ds-combination", ""),
        ('{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}', (), "ds-combination", ""),
        (
            '{"zero_optimization": {"stage": 3}}',
            ("model.lora.base_dtype=nf4",),
            "ds-combination",
            "zero2.json",
        ),
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}',
            ("model.lora={}",),
            "ds-combination",
            "model.lora",
        ),
        (
            f'{{"zero_optimization": {{{OFFLOAD}}}}}',
            ("train.optimizer=adamw_8bit",),
            "ds-combination",
            "train.optimizer=adamw",
        ),
        (f'{{"zero_optimization": {{{OFFLOAD}}}}}', NARROW, "ds-combination", "train.state_dtype=float32"),
        ("{}", (*NARROW, "model.dtype=float32"), "ds-combination", "train.state_dtype=float32"),
    ],
)
def test_wrong_deepspeed_files_are_rejected(
    resolve_text: Callable[..., Any], text: str, overrides: tuple[str, ...], code: str, message: str
) -> None:
    with refused(code) as error:
        resolve_text(text, *overrides)
    assert "ds.json" in str(error.value) and message in str(error.value)


def test_a_null_section_is_absent(resolve_text: Callable[..., Any]) -> None:
    assert resolve_text('{"zero_optimization": null}')["zero_optimization"]["stage"] == 1


# Sections of files for other trainers.
HF_OWNED: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
HF_ZERO2 = {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True}
HF_ZERO3 = {
    **{"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9},
    **{"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    **{"stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9},
    **{"stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True},
}
CPU = {"device": "cpu", "pin_memory": True}
AXOLOTL_BF16 = {"bf16": {"enabled": True}, "gradient_clipping": "auto", "wall_clock_breakdown": False}


@pytest.mark.parametrize(
    "tree",
    [
        HF_OWNED | {"zero_optimization": HF_ZERO2, "steps_per_print": 2000, "wall_clock_breakdown": False},
        HF_OWNED | {"zero_optimization": HF_ZERO2 | {"offload_optimizer": CPU}},
        HF_OWNED | {"zero_optimization": HF_ZERO3},
        HF_OWNED | {"zero_optimization": HF_ZERO3 | {"offload_optimizer": CPU, "offload_param": CPU}},
        AXOLOTL_BF16 | {"zero_optimization": {"stage": 1, "overlap_comm": True}},
        AXOLOTL_BF16 | {"zero_optimization": HF_ZERO3, "train_batch_size": 16},
        {"zero_optimization": HF_ZERO3 | {"stage3_max_live_parameters": "auto", "offload_param": "auto"}},
        {"zero_optimization": "auto", "flops_profiler": {"enabled": False}},
        {"bf16": "auto", "optimizer": {"type": "AdamW", "params": {"betas": ["auto", "auto"]}}}
        | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "auto"}}},
    ],
)
def test_files_for_other_trainers_are_accepted(
    resolve_text: Callable[..., Any], tree: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The recipe decides its keys, and "auto" means DeepSpeed's default. One warning lists both."""
    made = resolve_text(json.dumps(tree))
    plain = resolve(REPO / "ds_configs/zero2.json")
    assert "auto" not in json.dumps(made) and "scheduler" not in made and "fp16" not in made
    for key in ("optimizer", "train_batch_size", "gradient_clipping", "bf16"):
        same = "offload_optimizer" not in made["zero_optimization"] or key != "optimizer"
        assert not same or made[key] == plain[key]
    zero = tree["zero_optimization"]
    if isinstance(zero, dict):
        kept = {key: value for key, value in zero.items() if not isinstance(value, dict) and value != "auto"}
        assert made["zero_optimization"].items() >= (kept | {"overlap_comm": False}).items()
    (note,) = caplog.messages
    assert all(key in note for key in tree if key in ds_file.OWNED_BY_RECIPE)
    config = load_config(REPO / "launch/recipes/paper/llama-7b-wikitext103.yaml", [])
    assert setup_of(config, Batch(16, 4, 1, 4), made, get_objective("mle")).live == 1e9


def test_offloading_to_no_device_is_no_offloading(resolve_text: Callable[..., Any]) -> None:
    nowhere = {"device": "none", "pin_memory": True}
    made = resolve_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": nowhere}}), *MUON)
    assert made["zero_optimization"].keys().isdisjoint(ds_file.OFFLOADED)


def test_all_errors_of_a_file_are_listed(resolve_text: Callable[..., Any]) -> None:
    enabled = {"enabled": True}
    wrong = {"train_batch_size": 4, "gradient_clipping": 0.5, "fp16": enabled, "wandb": enabled}
    wrong["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}
    wrong["optimizer"] = {"type": "Lamb"}
    wrong["managed_gradient_accumulation"] = False
    with refused("ds-owned") as error:
        resolve_text(json.dumps(wrong | {"zero_optimization": {"stage": 2}}))
    assert len(error.value.lines) == len(wrong)
    assert all(any(f"sets {key}" in line for line in error.value.lines) for key in wrong)
    unknown = {"tensor_parallel": {}, "zero_optimisation": {}, "gradient_cliping": 1}
    with refused("ds-cuts") as error:
        resolve_text(json.dumps(unknown | {"zero_optimization": {"stage": 2}}))
    assert len(error.value.lines) == len(unknown)


def test_the_files_of_this_repository_are_accepted() -> None:
    """AdamW is PyTorch's, which needs no compilation. Offloading uses the fused version."""
    for path in sorted((REPO / "ds_configs").glob("*.json")):
        tree = resolve(path, ranks=8)
        section = tree["optimizer"]
        assert tree["train_batch_size"] == 16 and section["type"] == "AdamW"
        offloads = "offload_optimizer" in tree["zero_optimization"]
        assert section["params"]["torch_adam"] and section["params"].get("fused", False) == offloads
    tree = resolve(REPO / "ds_configs/zero3.json", *MUON)
    assert tree["zero_optimization"]["reduce_scatter"] is False, "Muon needs whole gradients"
    assert tree["optimizer"]["params"]["muon_lr"] == 0.02
    tree = resolve(REPO / "ds_configs/zero3.json", *NARROW)
    assert tree["bf16"]["bf16_optimizer_states"] and tree["data_types"]["grad_accum_dtype"] == "bf16"


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_the_same_parameters_decay_as_in_the_hf_trainer(name: str) -> None:
    model = family(name)
    forbidden = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)", r"\.ln_", "^ln_"]
    decaying = set(get_parameter_names(model, [nn.LayerNorm], forbidden))
    names = {id(p): n for n, p in model.named_parameters()}
    first, second = parameter_groups(model, 0.1)
    members = [{names[id(p)] for p in group["params"]} for group in (first, second)]
    assert members == [decaying & set(names.values()), set(names.values()) - decaying]
    assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.0)


@pytest.mark.parametrize(("name", "muon"), [("llama", False), ("opt", False), ("opt", True)])
def test_a_head_with_another_rate_has_a_separate_group(name: str, muon: bool) -> None:
    """OPT's head is tied to its embedding."""
    model = family(name)
    groups = parameter_groups(model, 0.1, muon, Grouping(head_lr_ratio=0.1))
    (head,) = (group for group in groups if group["ratio"] == 0.1)
    assert head["params"] == [model.get_output_embeddings().weight] and head["weight_decay"] == 0.1
    plain = [id(p) for group in parameter_groups(model, 0.1, muon) for p in group["params"]]
    assert sorted(plain) == sorted(id(p) for group in groups for p in group["params"])


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "embed_tokens"]])
def test_lora_plus_speeds_up_the_weights_that_peft_does(targets: Any) -> None:
    """Adapters of an embedding are an exception, because they keep the learning rate."""
    settings = peft.LoraConfig(r=2, target_modules=targets, use_dora=True)
    model = peft.get_peft_model(family("llama"), settings)
    expected = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1.0, loraplus_lr_ratio=16.0)
    embedded = {id(p) for name, p in model.named_parameters() if "embed_tokens" in name}
    rates = [
        {id(p): group.get("ratio", group["lr"]) for group in groups for p in group["params"]}
        for groups in (
            expected.param_groups,
            [
                {"lr": 1.0} | g
                for g in parameter_groups(model, 0.1, grouping=Grouping(loraplus_lr_ratio=16.0))
            ],
        )
    ]
    assert rates[0].keys() == rates[1].keys() and {16.0, 1.0} == set(rates[1].values())
    assert all(rates[1][key] == rate for key, rate in rates[0].items() if key not in embedded)


def test_8bit_optimizers_get_the_settings_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    class PagedAdamW8bit(torch.optim.AdamW): ...

    optimizers = SimpleNamespace(PagedAdamW8bit=PagedAdamW8bit)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", optimizers)
    settings = ("train.optimizer=paged_adamw_8bit", "train.betas=[0.8,0.9]", "train.weight_decay=0.1")
    tree = resolve(REPO / "ds_configs/zero2.json", *settings)
    optimizer = build_8bit(parameter_groups(family("llama"), 0.1), tree)
    assert type(optimizer) is PagedAdamW8bit and tree["zero_allow_untested_optimizer"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert list(optimizer.defaults["betas"]) == [0.8, 0.9]


def test_averages_are_paged_again_after_loading() -> None:
    loaded, pages = torch.arange(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    state = {"step": 3, "state1": loaded, "state2": loaded + 1}
    optimizer = SimpleNamespace(is_paged=True, state={loaded: state})
    optimizer.get_state_buffer = lambda parameter, dtype: pages.clone().to(dtype)
    page_states(optimizer)
    assert state["state1"] is not loaded and state["state1"].equal(loaded)
    assert state["state2"].equal(loaded + 1) and state["step"] == 3


def test_muon_trains_the_matrices_of_the_body_and_rejects_other_models() -> None:
    model = family("opt")
    first, *others = parameter_groups(model, 0.1, use_muon=True)
    names = {id(p): n for n, p in model.named_parameters()}
    body = [names[id(p)] for p in first["params"]]
    assert first["use_muon"] and body and all(model.get_parameter(name).dim() == 2 for name in body)
    assert not any(word in name for name in body for word in ("embed", "lm_head"))
    members = [names[id(p)] for group in (first, *others) for p in group["params"]]
    assert sorted(members) == sorted(names.values())
    for transposed_or_stacked in ("gpt2", "mixtral"):
        with refused("muon-dimensions"):
            parameter_groups(family(transposed_or_stacked), 0.1, use_muon=True)
