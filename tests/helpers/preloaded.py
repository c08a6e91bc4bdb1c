"""Import the libraries of a rank and fill their cache. Tests fork ranks from a process that imported this."""

from __future__ import annotations

from importlib import import_module

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

for name in (
    "emo.eval.watch",
    "emo.launch.rank",
    "emo.pipeline.engine.start",
    "emo.pipeline.trainer",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "peft",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
):
    import_module(name)
get_checkpoint_conversion_mapping("llama")
