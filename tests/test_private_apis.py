"""Every private or version-fragile interface in use, so that an upgrade fails here first and names the file.

Each check uses what it is about, on something tiny, and says which file needs it. When one fails after an
upgrade, that file has to change. A check whose file no longer mentions the interface must go.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from tests.conftest import REPO
from tests.helpers.families import family

Check = Callable[[], object]
CHECKS: list[tuple[str, str, Check]] = []  # file, what it mentions, check


def needs(file: str, mention: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS.append((file, mention, check))
        return check

    return register


# --- torch ------------------------------------------------------------------------------------------------


@needs("pipeline/ranks.py", "distributed_c10d._world")
@needs("pipeline/ranks.py", "_set_pg_timeout")
def process_groups_and_their_timeouts() -> None:
    import datetime

    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        (group,) = distributed_c10d._world.pg_map
        distributed_c10d._set_pg_timeout(datetime.timedelta(minutes=3), group)
        options = group._get_backend(torch.device("cpu")).options
        assert options._timeout == datetime.timedelta(minutes=3)
    finally:
        dist.destroy_process_group()


@needs("pipeline/loss/cost.py", "_is_avx512_bf16_supported")
@needs("pipeline/loss/cost.py", "_is_amx_tile_supported")
def what_the_processor_has() -> None:
    assert isinstance(torch.cpu._is_avx512_bf16_supported(), bool)
    assert isinstance(torch.cpu._is_amx_tile_supported(), bool)
    assert isinstance(torch.backends.cpu.get_cpu_capability(), str)


@needs("pipeline/engine.py", "_pytree")
def trees_of_tensors() -> None:
    from torch.utils import _pytree

    tree = {"a": [torch.ones(2), "x"], "b": 3}
    assert _pytree.tree_map_only(torch.Tensor, lambda t: t.shape, tree) == {"a": [(2,), "x"], "b": 3}


@needs("pipeline/planning/host.py", "cpp_extension.get_default_build_root")
def where_extensions_are_built() -> None:
    from torch.utils import cpp_extension

    assert isinstance(cpp_extension.get_default_build_root(), str)


@needs("pipeline/loss/probe.py", "set_stance")
def compiled_code_can_run_uncompiled() -> None:
    ran = torch.compile(lambda x: x + 1, backend="eager")
    with torch.compiler.set_stance("force_eager"):
        assert ran(torch.ones(1)) == 2


@needs("pipeline/loss/fused.py", "out_dtype=")
def products_of_half_precision_summed_in_float32() -> None:
    assert "out_dtype" in str(torch.ops.aten.addmm.dtype._schema)
    assert "out_dtype" in str(torch.ops.aten.mm.dtype._schema)


@needs("pipeline/loss/cost.py", "full_tensor")
def distributed_tensors_come_together() -> None:
    from torch.distributed.tensor import DTensor

    assert callable(DTensor.full_tensor)


@needs("eval/icl/head.py", "torch.ops.aten._log_softmax.out")
def log_softmax_in_place() -> None:
    z = torch.randn(2, 5)
    want = z.log_softmax(-1)
    torch.testing.assert_close(torch.ops.aten._log_softmax.out(z, -1, False, out=z), want)


# --- DeepSpeed --------------------------------------------------------------------------------------------


@needs("pipeline/engine.py", "__compatible_ops__")
def operations_can_be_switched_off() -> None:
    import deepspeed

    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__


@needs("pipeline/planning/ds_file.py", "DeepSpeedConfig(lookups)")
def deepspeed_looks_up_every_key_that_it_knows() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    from pipeline.planning.ds_file import _Lookups

    tree = _Lookups(train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
    tree.keys_read = set()
    DeepSpeedConfig(tree)
    assert {
        "zero_optimization",
        "data_types",
        "bf16",
        "wall_clock_breakdown",
        "comms_logger",
    } <= tree.keys_read


@needs("pipeline/export.py", "layer.fan_in_fan_out")
@needs("pipeline/export.py", "layer.lora_embedding_A")
def adapters_say_how_their_layer_stores_its_weight() -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    model = torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.Linear(2, 2))
    embedding, linear = get_peft_model(model, LoraConfig(r=1, target_modules=["0", "1"])).get_base_model()  # type: ignore[arg-type, operator]
    assert linear.fan_in_fan_out is False
    assert "default" in linear.lora_A and "default" in linear.scaling
    assert "default" in embedding.lora_embedding_A and "default" not in embedding.lora_A


@needs("pipeline/planning/ds_file.py", "AsyncIOBuilder")
def nvme_can_be_asked_about() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    assert AsyncIOBuilder().is_compatible() in (True, False)


@needs("pipeline/planning/ds_file.py", "installed_ops")
@needs("pipeline/planning/ds_file.py", "cpp_extension.CUDA_HOME")
def what_was_built_beforehand_is_known() -> None:
    from deepspeed.git_version_info import installed_ops
    from torch.utils import cpp_extension

    assert "async_io" in installed_ops
    assert cpp_extension.CUDA_HOME is None or isinstance(cpp_extension.CUDA_HOME, str)


@needs("pipeline/engine.py", "TorchCheckpointEngine")
@needs("pipeline/engine.py", "checkpoint_engine = self.files")
def checkpoints_are_written_through_an_engine_of_ours() -> None:
    from deepspeed.runtime import engine
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    assert list(inspect.signature(TorchCheckpointEngine.save).parameters)[:3] == [
        "self",
        "state_dict",
        "path",
    ]
    assert "exist_ok" in inspect.signature(TorchCheckpointEngine.makedirs).parameters
    source = inspect.getsource(engine.DeepSpeedEngine)
    assert "self.checkpoint_engine.save(" in source
    assert "self.checkpoint_engine.makedirs(" in source


@needs("pipeline/planning/ds_file.py", "deepspeed.runtime.zero.muon.muon_optimizer")
def muon_is_imported_whatever_the_optimizer() -> None:
    from deepspeed.runtime.zero import utils

    wanted = "from deepspeed.runtime.zero.muon.muon_optimizer import"
    assert wanted in inspect.getsource(utils.is_zero_supported_optimizer)


@needs("pipeline/planning/ds_file.py", "parameter.use_muon = use")
@needs("pipeline/planning/ds_file.py", "adam_optimizer_kwargs=fused")
def muon_is_built_by_a_function_of_ours() -> None:
    from deepspeed.runtime import engine
    from deepspeed.runtime.zero import stage3, stage_1_and_2
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    assert "client_optimizer(model_parameters)" in inspect.getsource(engine.DeepSpeedEngine)
    for module in (stage3, stage_1_and_2):  # the marks on parameters, not the groups, are what ZeRO reads
        assert re.search(r"getattr\([^)]*'use_muon'", inspect.getsource(module))
    known = inspect.signature(MuonWithAuxAdam.__init__).parameters
    assert {"param_groups", "adam_optimizer", "adam_optimizer_kwargs"} <= set(known)


@needs("pipeline/engine.py", 'state["step"]')
def steps_are_counted_in_the_state() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[weight]["step"].dtype == torch.float32


@needs("pipeline/planning/ds_file.py", "torch_adam")
@needs("pipeline/planning/ds_file.py", '"fused"')
def adam_may_be_pytorchs() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    given = {"torch_adam": True, "lr": 0.1, "fused": True}
    adam, more = DeepSpeedEngine.get_optimizer_configuration(None, given, adam_w_mode=True)
    weight = torch.nn.Parameter(torch.ones(2))
    assert adam is torch.optim.AdamW and adam([weight], **given, **more).param_groups[0]["fused"] is True


@needs("pipeline/planning/ds_file.py", "TORCHDYNAMO_DISABLE")
def compiling_can_be_left_out_of_an_import() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, sys, torch; os.environ['TORCHDYNAMO_DISABLE'] = '1'; torch.compile()(print); "
            "sys.exit('torch._inductor.compile_fx' in sys.modules)",
        ]
    )
    assert done.returncode == 0


@needs("pipeline/engine.py", "_copy_recovery_script")
def the_recovery_script_can_be_left_out() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    assert callable(DeepSpeedEngine._copy_recovery_script)


@needs("pipeline/engine.py", "was_step_applied")
@needs("pipeline/engine.py", "get_global_grad_norm")
@needs("pipeline/engine.py", "scale_wrt_gas=False")
@needs("pipeline/engine.py", "exclude_frozen_parameters=True")
def the_engine_tells_of_its_step() -> None:
    from deepspeed.runtime import engine
    from deepspeed.runtime.engine import DeepSpeedEngine

    assert callable(DeepSpeedEngine.was_step_applied)
    assert callable(DeepSpeedEngine.get_global_grad_norm)
    source = inspect.getsource(engine)  # decorators hide the signatures
    assert re.search(r"def backward\(.*scale_wrt_gas", source)
    assert re.search(r"def save_checkpoint\([^)]*exclude_frozen_parameters", source)


@needs("pipeline/engine.py", "ds_to_universal.main(ds_to_universal.parse_arguments())")
@needs("pipeline/engine.py", "--inject_missing_state")
@needs("pipeline/train.py", "load_universal")
def states_can_be_converted() -> None:
    from deepspeed.checkpoint import ds_to_universal

    assert "--inject_missing_state" in inspect.getsource(ds_to_universal)
    assert (
        callable(ds_to_universal.main) and not inspect.signature(ds_to_universal.parse_arguments).parameters
    )
    from deepspeed.runtime import config

    assert config.LOAD_UNIVERSAL_CHECKPOINT == "load_universal"


@needs("pipeline/engine.py", "STATE_CLASSES")
def states_name_no_other_classes() -> None:
    """What DeepSpeed pickles besides tensors: two plain classes and an enumeration."""
    from pipeline.engine import STATE_CLASSES

    for one in STATE_CLASSES:
        assert one.__name__ in ("LossScaler", "ZeroStageEnum", "fragment_address")
        assert not hasattr(one, "__setstate__")


@needs("pipeline/engine.py", "TORCH_FORCE_WEIGHTS_ONLY_LOAD")
def pickles_can_be_read_as_data_whatever_their_reader_says() -> None:
    from torch import serialization

    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" in inspect.getsource(serialization.load)
    assert "Weights only load failed" in inspect.getsource(serialization)


@needs("pipeline/loss/cost.py", "ds_id")
@needs("pipeline/loss/cost.py", "GatheredParameters")
@needs("pipeline/model.py", "ds_tensor")
@needs("pipeline/export.py", "ds_id")
def partitioned_parameters_are_marked() -> None:
    import deepspeed
    from deepspeed.runtime.zero import partition_parameters

    source = inspect.getsource(partition_parameters)
    assert "param.ds_id = " in source
    assert "param.ds_tensor = " in source
    with deepspeed.zero.GatheredParameters([torch.nn.Parameter(torch.ones(2))], modifier_rank=None):
        pass


# --- transformers -----------------------------------------------------------------------------------------


@needs("pipeline/engine.py", "HfDeepSpeedConfig")
@needs("pipeline/export.py", "unset_hf_deepspeed_config")
def models_are_built_partitioned() -> None:
    from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    alive = HfDeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {"stage": 3}})
    assert is_deepspeed_zero3_enabled()
    del alive
    assert not is_deepspeed_zero3_enabled()
    unset_hf_deepspeed_config()


@needs("pipeline/loss/head.py", "_attn_implementation")
@needs("pipeline/loss/probe.py", "_attn_implementation")
@needs("pipeline/model.py", "set_attn_implementation")
def the_attention_in_use_is_known() -> None:
    model = family("llama", "eager")
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa"


@needs("pipeline/planning/attention.py", "_supports_sdpa")
@needs("pipeline/planning/attention.py", "_supports_flash_attn")
@needs("pipeline/planning/attention.py", "_supports_attention_backend")
@needs("pipeline/planning/attention.py", "MODEL_FOR_CAUSAL_LM_MAPPING")
def families_say_which_attention_they_have() -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    llama, xglm = (MODEL_FOR_CAUSAL_LM_MAPPING.get(type(family(n).config), None) for n in ("llama", "xglm"))
    assert (llama._supports_sdpa, llama._supports_flash_attn, xglm._supports_sdpa) == (True, True, False)
    assert (llama._supports_attention_backend, xglm._supports_attention_backend) == (True, False)


@needs("pipeline/loss/varlen.py", "sdpa_attention_forward")
@needs("pipeline/loss/varlen.py", "sdpa_mask")
def attention_by_name_is_a_function_and_a_mask() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    assert AttentionInterface()["sdpa"] is sdpa_attention_forward
    assert AttentionMaskInterface()["sdpa"] is sdpa_mask


@needs("pipeline/loss/head.py", "max_length_q")
def a_mask_of_four_dimensions_is_taken_as_it_is_and_segments_reach_attention() -> None:
    from transformers import AttentionInterface

    seen: list[dict[str, object]] = []

    def attend(module, q, k, v, mask, **keys):  # type: ignore[no-untyped-def]
        seen.append(keys | {"mask": mask})
        return torch.zeros_like(q).transpose(1, 2), None

    AttentionInterface.register("seen", attend)
    mask = torch.empty(1, 1, 0, 0)
    told = {"cu_seq_lens_q": torch.tensor([0, 4]), "max_length_q": 4}
    model = family("llama", "sdpa")
    model.config._attn_implementation = "seen"
    model.model(torch.ones(1, 4, dtype=torch.int64), attention_mask=mask, **told)
    del AttentionInterface._global_mapping["seen"]
    assert len(seen) == 2
    assert all(keys["mask"] is mask for keys in seen)
    assert all(told.items() <= keys.items() for keys in seen)


@needs("common/weights.py", "output_loading_info=True")
@needs("pipeline/export.py", "output_loading_info=True")
def loading_tells_what_was_missing() -> None:
    import tempfile

    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as directory:
        family("llama").save_pretrained(directory)
        _, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert {"missing_keys", "unexpected_keys", "mismatched_keys"} <= set(report)


@needs("common/weights.py", "LOAD REPORT")
def what_is_missing_is_told_in_a_table() -> None:
    from transformers import modeling_utils
    from transformers.utils import loading_report

    source = inspect.getsource(loading_report)
    assert "LOAD REPORT" in source and "CONVERSION" in source
    assert "tied weights" in inspect.getsource(modeling_utils.PreTrainedModel.tie_weights)
    assert modeling_utils.logger.name == "transformers.modeling_utils"


@needs("common/weights.py", "load_state_dict(")
@needs("common/weights.py", "get_expanded_tied_weights_keys")
@needs("common/weights.py", "_keys_to_ignore_on_load_unexpected")
@needs("common/weights.py", "hf_quantizer")
def files_and_ties_can_be_looked_at() -> None:
    import tempfile

    from transformers.modeling_utils import PreTrainedModel, load_state_dict

    model = family("llama", tie_word_embeddings=True)
    assert model.get_expanded_tied_weights_keys(all_submodels=True) == {
        "lm_head.weight": "model.embed_tokens.weight"
    }
    assert hasattr(model, "_keys_to_ignore_on_load_unexpected")
    assert "hf_quantizer" in inspect.getsource(PreTrainedModel.from_pretrained)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        held = load_state_dict(f"{directory}/model.safetensors", map_location="meta")
    assert held["model.norm.weight"].is_meta and held["model.norm.weight"].is_floating_point()


@needs("common/weights.py", "_raise_exceptions_for_missing_entries")
@needs("pipeline/loss/cost_files.py", "_raise_exceptions_for_missing_entries")
def absent_files_can_be_asked_for() -> None:
    import tempfile

    from transformers.utils import cached_file

    with tempfile.TemporaryDirectory() as directory:
        absent = cached_file(directory, "none.json", _raise_exceptions_for_missing_entries=False)
    assert absent is None


@needs("data_prep/templates/chat.py", "render_jinja_template")
@needs("data_prep/templates/chat.py", "_get_control_token_patterns")
@needs("data_prep/templates/chat.py", "mark_control_tokens")
@needs("data_prep/templates/chat.py", "strftime_now")
def chats_are_rendered_with_the_tokens_of_people_marked() -> None:
    from transformers.utils import chat_template_utils as utils

    known, marked = utils._get_control_token_patterns(("<end>", "<x>"))
    messages = utils.mark_control_tokens([{"role": "assistant", "content": "a<end>b"}], known)
    template = "{% for m in messages %}{% generation %}{{ m.content }}<end>{% endgeneration %}{% endfor %}"
    (text,), (spans,) = utils.render_jinja_template(
        conversations=[messages], chat_template=template, return_assistant_tokens_mask=True, eos_token="<end>"
    )
    assert marked.split(text) == ["a", "<end>", "b<end>"] and list(spans) == [(0, len(text))]
    dated = "{% set strftime_now = none_such %}{% if strftime_now is defined %}x{% endif %}"
    assert utils.render_jinja_template([[]], chat_template=dated)[0] == [""]


@needs("pipeline/loss/head.py", "base_model")
@needs("pipeline/loss/head.py", "get_output_embeddings")
def a_causal_lm_is_a_body_and_a_head() -> None:
    model = family("opt")
    assert model.base_model is model.model
    hidden = model.base_model(input_ids=torch.ones(1, 3, dtype=torch.long), use_cache=False)[0]
    assert model.get_output_embeddings()(hidden).shape == (1, 3, model.config.vocab_size)


@needs("pipeline/hf.py", "model_accepts_loss_kwargs")
@needs("pipeline/hf.py", "loss_is_scaled_for_ga")
@needs("pipeline/hf.py", "current_gradient_accumulation_steps")
@needs("pipeline/hf.py", "_loss_shifts_labels")
def the_trainer_counts_tokens() -> None:
    from transformers import Trainer

    source = inspect.getsource(Trainer)
    names = ["model_accepts_loss_kwargs", "loss_is_scaled_for_ga", "current_gradient_accumulation_steps"]
    for name in [*names, "_loss_shifts_labels"]:
        assert f"self.{name}" in source, name
    assert "num_items_in_batch" in inspect.signature(Trainer.compute_loss).parameters


@needs("pipeline/loss/head.py", "_original_forward")
def mixed_precision_wraps_the_forward_of_an_instance() -> None:
    from accelerate import Accelerator

    assert "model._original_forward = model.forward" in inspect.getsource(Accelerator.prepare_model)


@needs("pipeline/loss/head.py", "_hf_hook")
def devices_of_a_map_hook_the_forward_of_an_instance() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = add_hook_to_module(family("llama"), ModelHook())
    assert "forward" in vars(model)
    assert hasattr(model, "_hf_hook")


@needs("pipeline/hf.py", "_total_train_tokens")
def trl_counts_and_notes() -> None:
    import trl

    source = inspect.getsource(trl.SFTTrainer)
    assert "self._total_train_tokens +=" in source
    assert 'self._metrics[mode]["num_tokens"] = [self._total_train_tokens]' in source


@needs("eval/icl/prefix_scorer.py", "cache.layers")
def caches_have_layers_of_keys_and_values() -> None:
    cache = family("llama")(input_ids=torch.ones(1, 3, dtype=torch.long), use_cache=True).past_key_values
    assert cache.layers[0].keys.shape == cache.layers[0].values.shape == (1, 2, 3, 16)


# --- Triton -----------------------------------------------------------------------------------------------


@needs("tests/bench/kernels_static.py", "ASTSource")
@needs("tests/bench/kernels_static.py", "GPUTarget")
@needs("tests/bench/kernels_static.py", "tt.divisibility")
@needs("tests/bench/kernels_static.py", "knobs.nvidia.ptxas")
def kernels_compile_without_a_gpu() -> None:
    import triton
    from triton.backends.compiler import BaseBackend, GPUTarget
    from triton.compiler import ASTSource

    assert list(inspect.signature(ASTSource).parameters) == ["fn", "signature", "constexprs", "attrs"]
    assert GPUTarget("cuda", 90, 32).arch == 90
    assert BaseBackend.parse_attr("D") == [["tt.divisibility", 16]]
    assert "ptxas" in type(triton.knobs.nvidia).__dict__


# --- OpenICL ----------------------------------------------------------------------------------------------


@needs("eval/icl/openicl_compat.py", "_PPLInferencer__get_ppl")
def what_openicl_hides_by_name() -> None:
    from eval.icl.openicl_compat import ChannelInferencer, PPLInferencer

    assert callable(PPLInferencer._PPLInferencer__get_ppl)
    assert ChannelInferencer._ChannelInferencer__get_ppl is PPLInferencer._PPLInferencer__get_ppl
    assert "_ChannelInferencer__get_ppl" in ChannelInferencer.inference.__code__.co_names


@needs("eval/icl/openicl_compat.py", "fast_map_dpp")
@needs("eval/icl/openicl_compat.py", "init_dataset")
@needs("eval/icl/openicl_compat.py", "ListWrapper.to")
@needs("eval/icl/openicl_compat.py", "icl_bm25_retriever.word_tokenize")
@needs("eval/icl/openicl_compat.py", "icl_acc_evaluator.evaluate")
def what_openicl_is_patched_at() -> None:
    from openicl.icl_dataset_reader import DatasetEncoder
    from openicl.icl_evaluator import AccEvaluator
    from openicl.icl_retriever import icl_bm25_retriever, icl_dpp_retriever
    from openicl.utils import collators

    import eval.icl.openicl_compat  # noqa: F401

    assert "self.init_dataset" in inspect.getsource(DatasetEncoder.__init__)
    assert "fast_map_dpp(" in inspect.getsource(icl_dpp_retriever.DPPRetriever)
    assert "word_tokenize(" in inspect.getsource(icl_bm25_retriever.BM25Retriever)
    assert collators.ListWrapper([1]).to("cpu") == [1]
    assert AccEvaluator().score(["a", "b"], ["a", "a"])["accuracy"] == 0.5


# --- Weights & Biases -------------------------------------------------------------------------------------


@needs("eval/export/tracking.py", "x_disable_meta")
@needs("eval/export/tracking.py", "x_disable_stats")
@needs("eval/export/tracking.py", "x_save_requirements")
def what_else_is_sent_of_a_machine_can_be_left_out() -> None:
    import wandb

    settings = wandb.Settings(x_disable_meta=True, x_disable_stats=True, x_save_requirements=False)
    assert settings.x_disable_meta and settings.x_disable_stats and not settings.x_save_requirements


# --- scikit-learn -----------------------------------------------------------------------------------------


@needs("eval/judging/results.py", "l1_ratio=1.0")
def a_ratio_of_one_is_an_l1_penalty() -> None:
    """Before 1.8 it was ignored without penalty="elasticnet", and the penalty was L2."""
    import numpy as np
    from sklearn.linear_model import LogisticRegression

    X, y = np.array([[1.0, 0.1], [1.0, -0.1], [-1.0, 0.1], [-1.0, 0.2]]), np.array([1, 1, 0, 0])
    model = LogisticRegression(C=0.6, l1_ratio=1.0, solver="liblinear", fit_intercept=False, random_state=1)
    ((first, second),) = model.fit(X, y).coef_
    assert first > 0 and second == 0


@pytest.mark.parametrize(("file", "mention", "check"), CHECKS, ids=[f"{f}:{m}" for f, m, _ in CHECKS])
def test_an_interface_that_may_change(file: str, mention: str, check: Check) -> None:
    """`file` needs it: see the check."""
    text = (REPO / file).read_text()
    assert mention in text, f"{file} no longer mentions {mention}: remove its check"
    check()
