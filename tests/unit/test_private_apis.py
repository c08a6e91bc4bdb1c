"""Private and fragile library interfaces whose removal by an upgrade no other test would notice.

If an entry fails after an upgrade, change its file. If the file no longer mentions the interface, remove the
entry. Interfaces that other tests import or call are not listed.
"""

from __future__ import annotations

import datetime
import importlib
import inspect
import os
import tomllib
from functools import reduce

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from packaging.requirements import Requirement
from torch.distributed import distributed_c10d

from emo.pipeline.control import rendezvous
from tests.conftest import REPO

# Each line has a file of this project, a module or class of a library, and names in the library's source.
# The file sets these names, reads them with a default, or needs them only on some hosts.
INTERFACES = """
pipeline/engine/engine.py deepspeed.runtime.engine checkpoint_engine, _copy_recovery_script
pipeline/engine/snapshots.py torch.serialization TORCH_FORCE_WEIGHTS_ONLY_LOAD, Weights only load failed
pipeline/loss/models/frozen.py peft.tuners.tuners_utils:BaseTunerLayer _active_adapter
pipeline/loss/models/hf.py transformers:Trainer model_accepts_loss_kwargs, loss_is_scaled_for_ga
pipeline/loss/models/hf.py transformers:Trainer _loss_shifts_labels, current_gradient_accumulation_steps
pipeline/loss/models/hf.py trl:SFTTrainer _total_train_tokens
pipeline/model/readers.py transformers.core_model_loading _weight_conversions
pipeline/loss/cost.py torch.cpu _is_avx512_bf16_supported, _is_amx_tile_supported
pipeline/loss/models/head.py accelerate:Accelerator.prepare_model _original_forward
pipeline/loss/models/head.py accelerate.hooks:add_hook_to_module _hf_hook
pipeline/monitor/profiler.py torch.cuda.memory _record_memory_history, _dump_snapshot
pipeline/engine/ds_config.py torch.utils.cpp_extension CUDA_HOME
"""
ROWS = [line.split(maxsplit=2) for line in INTERFACES.strip().splitlines()]


@pytest.mark.parametrize(("file", "owner", "names"), ROWS)
def test_what_a_file_uses_is_there(file: str, owner: str, names: str) -> None:
    module, _, attributes = owner.partition(":")
    parts = attributes.split(".") if attributes else []
    source = inspect.getsource(reduce(getattr, parts, importlib.import_module(module)))
    user = (REPO / file).read_text()
    for name in names.split(", "):
        assert name in source, name
        assert name in user, f"{name} is no longer mentioned: remove the entry"


def test_their_libraries_have_upper_bounds() -> None:
    """peft has one because pipeline/model/export.py relies on how adapters store their weights."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    bounded = {
        requirement.name
        for requirement in map(Requirement, project["dependencies"])
        if any(bound.operator == "<" for bound in requirement.specifier)
    }
    assert {"accelerate", "deepspeed", "peft", "torch", "transformers"} <= bounded


# --- interfaces that have to be called ---------------------------------------------------------------------


def test_process_groups_have_timeouts() -> None:
    """pipeline/control/world.py sets the timeouts of existing groups."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        (group,) = distributed_c10d._world.pg_map
        distributed_c10d._set_pg_timeout(datetime.timedelta(minutes=3), group)
        options = group._get_backend(torch.device("cpu")).options
        assert options._timeout == datetime.timedelta(minutes=3)
    finally:
        dist.destroy_process_group()


def test_products_of_half_precision_are_summed_in_float32() -> None:
    """pipeline/loss/fused.py passes `out_dtype` to matrix products."""
    assert all("out_dtype" in str(op.dtype._schema) for op in (torch.ops.aten.addmm, torch.ops.aten.mm))


def test_deepspeeds_adam_may_be_pytorchs() -> None:
    """pipeline/engine/ds_config.py sets `torch_adam` and `fused`, and engine.py expects steps in tensors."""
    options = {"torch_adam": True, "lr": 0.1, "fused": True}
    adam, defaults = DeepSpeedEngine.get_optimizer_configuration(None, options, adam_w_mode=True)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = adam([weight], **options, **defaults)
    weight.grad = torch.ones(2)
    optimizer.step()
    assert adam is torch.optim.AdamW and optimizer.param_groups[0]["fused"] is True
    assert optimizer.state[weight]["step"].dtype == torch.float32


def test_ranks_that_are_restarted_get_a_store_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared store, restarted ranks would connect to dead ones."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")
    assert rendezvous.plugin() is rendezvous.create_handler
    assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "0"  # the user's choice
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    rendezvous.plugin()
    assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert hasattr(rendezvous.SpareHandler, "use_agent_store")
