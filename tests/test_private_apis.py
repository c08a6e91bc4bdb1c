"""Every private or version-fragile interface in use, so that an upgrade fails here first and names the file.

When an entry fails after an upgrade, its file has to change; when the file no longer mentions the interface,
the entry must go. What a behaviour test uses anyway (losses, exports, adapters, chats) is not listed again.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch

from tests.conftest import REPO

# By file of this project: attributes of libraries that it uses, as `module:attribute`.
ATTRIBUTES = {
    "pipeline/loss/cost.py": [
        *("torch.cpu:_is_avx512_bf16_supported", "torch.cpu:_is_amx_tile_supported"),
        *("torch.distributed.tensor:DTensor.full_tensor", "deepspeed:zero.GatheredParameters"),
    ],
    "pipeline/loss/probe.py": ["torch.compiler:set_stance"],
    "pipeline/loss/varlen.py": [
        "transformers.masking_utils:sdpa_mask",
        "transformers.integrations.sdpa_attention:sdpa_attention_forward",
    ],
    "pipeline/engine.py": [
        *("torch.utils:_pytree", "deepspeed:ops.__compatible_ops__"),
        "deepspeed.runtime.checkpoint_engine:TorchCheckpointEngine",
        "deepspeed.runtime.engine:DeepSpeedEngine._copy_recovery_script",
        "deepspeed.runtime.engine:DeepSpeedEngine.was_step_applied",
        "deepspeed.checkpoint.ds_to_universal:parse_arguments",
    ],
    "pipeline/train.py": [
        "deepspeed.runtime.engine:DeepSpeedEngine.get_global_grad_norm",
        "transformers.integrations:HfDeepSpeedConfig",
    ],
    "pipeline/export.py": ["transformers.integrations:unset_hf_deepspeed_config"],
    "pipeline/model.py": ["transformers:PreTrainedModel.set_attn_implementation"],
    "pipeline/planning/host.py": [
        "transformers:LlamaForCausalLM._supports_sdpa",
        "transformers:LlamaForCausalLM._supports_flash_attn",
        "transformers:LlamaForCausalLM._supports_attention_backend",
    ],
    "pipeline/planning/ds_file.py": [
        *("torch.utils.cpp_extension:CUDA_HOME", "deepspeed.ops.op_builder:AsyncIOBuilder"),
        "deepspeed.git_version_info:installed_ops",
    ],
    "common/weights.py": [
        "transformers:PreTrainedModel.get_expanded_tied_weights_keys",
        "transformers:PreTrainedModel._keys_to_ignore_on_load_unexpected",
        "transformers.modeling_utils:load_state_dict",
    ],
    "data_prep/templates.py": [
        "transformers.utils.chat_template_utils:_get_control_token_patterns",
        "transformers.utils.chat_template_utils:mark_control_tokens",
    ],
    "eval/icl/prefix_scorer.py": ["torch:ops.aten._log_softmax.out"],
    "eval/icl/openicl_compat.py": [
        *("openicl.icl_retriever.icl_bm25_retriever:word_tokenize", "openicl.utils.collators:ListWrapper")
    ],
    "tests/bench/kernels_static.py": [*("triton.backends.compiler:GPUTarget", "triton.compiler:ASTSource")],
}
# By file of this project: names that it uses and that stand in the source of a module or class of a library.
IN_SOURCES = {
    "pipeline/engine.py": {
        "deepspeed.runtime.engine": ["checkpoint_engine", "scale_wrt_gas", "exclude_frozen_parameters"],
        "deepspeed.checkpoint.ds_to_universal": ["--inject_missing_state"],
        "deepspeed.runtime.zero.partition_parameters": ["ds_tensor"],
        "torch.serialization": ["TORCH_FORCE_WEIGHTS_ONLY_LOAD", "Weights only load failed"],
    },
    "pipeline/checkpoint.py": {"deepspeed.runtime.constants": ["load_universal"]},
    "pipeline/planning/ds_file.py": {
        "deepspeed.runtime.zero.utils": ["deepspeed.runtime.zero.muon.muon_optimizer"],
        "deepspeed.runtime.zero.stage_1_and_2": ["use_muon"],
        "deepspeed.runtime.zero.stage3": ["use_muon"],
        "deepspeed.runtime.zero.muon.muon_optimizer:MuonWithAuxAdam": ["adam_optimizer_kwargs"],
    },
    "pipeline/loss/cost.py": {"deepspeed.runtime.zero.partition_parameters": ["ds_id"]},
    "pipeline/export.py": {"deepspeed.runtime.zero.partition_parameters": ["ds_id"]},
    "common/weights.py": {
        "transformers:PreTrainedModel.from_pretrained": ["hf_quantizer"],
    },
    "pipeline/hf.py": {
        "transformers:Trainer": [
            *("model_accepts_loss_kwargs", "loss_is_scaled_for_ga", "current_gradient_accumulation_steps"),
            "_loss_shifts_labels",
        ],
        "trl:SFTTrainer": ["_total_train_tokens"],
    },
    "pipeline/loss/head.py": {
        "accelerate:Accelerator.prepare_model": ["_original_forward"],
        "accelerate.hooks:add_hook_to_module": ["_hf_hook"],
    },
    "eval/icl/openicl_compat.py": {
        "openicl.icl_dataset_reader:DatasetEncoder": ["init_dataset"],
        "openicl.icl_retriever.icl_dpp_retriever:DPPRetriever": ["fast_map_dpp"],
    },
    "eval/export/tracking.py": {
        "wandb:Settings": ["x_disable_meta", "x_disable_stats", "x_save_requirements"]
    },
}


def _attribute(path: str) -> Any:
    import emo.eval.icl.openicl_compat  # noqa: F401 - without it OpenICL cannot be imported

    module, _, attributes = path.partition(":")
    return reduce(getattr, attributes.split(".") if attributes else (), importlib.import_module(module))


@pytest.mark.parametrize("file", [*ATTRIBUTES, *(file for file in IN_SOURCES if file not in ATTRIBUTES)])
def test_what_a_file_uses_is_there(file: str) -> None:
    user, names = (REPO / file).read_text(), []
    for path in ATTRIBUTES.get(file, ()):
        _attribute(path)
        names.append(path.replace(":", ".").rpartition(".")[2])
    for path, words in IN_SOURCES.get(file, {}).items():
        source = inspect.getsource(_attribute(path))
        assert all(word in source for word in words), path
        names += words
    assert [name for name in names if name not in user] == [], "no longer mentioned: remove the entries"


# --- what has to be tried ----------------------------------------------------------------------------------


def process_groups_have_timeouts() -> None:
    """pipeline/ranks.py"""
    import datetime

    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        (group,) = distributed_c10d._world.pg_map
        distributed_c10d._set_pg_timeout(datetime.timedelta(minutes=3), group)
        options = group._get_backend(torch.device("cpu")).options
        assert options._timeout == datetime.timedelta(minutes=3)
    finally:
        dist.destroy_process_group()


def products_of_half_precision_are_summed_in_float32() -> None:
    """pipeline/loss/fused.py"""
    assert all("out_dtype" in str(op.dtype._schema) for op in (torch.ops.aten.addmm, torch.ops.aten.mm))


def adam_may_be_pytorchs() -> None:
    """pipeline/planning/ds_file.py: `torch_adam`, `fused`; pipeline/engine.py: steps are tensors."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    options = {"torch_adam": True, "lr": 0.1, "fused": True}
    adam, defaults = DeepSpeedEngine.get_optimizer_configuration(None, options, adam_w_mode=True)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = adam([weight], **options, **defaults)
    weight.grad = torch.ones(2)
    optimizer.step()
    assert adam is torch.optim.AdamW and optimizer.param_groups[0]["fused"] is True
    assert optimizer.state[weight]["step"].dtype == torch.float32


def a_ratio_of_one_is_an_l1_penalty() -> None:
    """eval/judging/results.py: before scikit-learn 1.8 it was ignored, and the penalty was L2."""
    import numpy as np
    from sklearn.linear_model import LogisticRegression

    X, y = np.array([[1.0, 0.1], [1.0, -0.1], [-1.0, 0.1], [-1.0, 0.2]]), np.array([1, 1, 0, 0])
    model = LogisticRegression(C=0.6, l1_ratio=1.0, solver="liblinear", fit_intercept=False, random_state=1)
    ((first, second),) = model.fit(X, y).coef_
    assert first > 0 and second == 0


CHECKS = (
    process_groups_have_timeouts,
    products_of_half_precision_are_summed_in_float32,
    adam_may_be_pytorchs,
    a_ratio_of_one_is_an_l1_penalty,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_library_behaves_so(check: Callable[[], object]) -> None:
    check()
