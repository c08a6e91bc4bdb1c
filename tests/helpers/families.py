"""Tiny random models of many families, which differ in masks, positions and heads."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

VOCAB = 61
BASE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
BASE |= {"num_attention_heads": 2, "max_position_embeddings": 64}
PAIRED = BASE | {"num_key_value_heads": 2}
GROUPED = PAIRED | {"head_dim": 16}
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
STATES = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4, "mamba_n_groups": 1}
JAMBA = {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 64}
XGLM = {"d_model": 32, "num_layers": 2, "attention_heads": 2, "ffn_dim": 48, "max_position_embeddings": 64}
ENDS = (("layers", 2), ("attention_heads", 2), ("ffn_dim", 48))
BART = {f"{end}_{key}": n for end in ("encoder", "decoder") for key, n in ENDS}
XLSTM = {"hidden_size": 32, "num_blocks": 2, "num_heads": 2, "chunk_size": 8, "qk_dim_factor": 1.0}
SLIDING = {"sliding_window": 4}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": BASE,
    "gpt2": OLD | {"bos_token_id": 1, "eos_token_id": 2},
    "opt": BASE | {"ffn_dim": 48, "word_embed_proj_dim": 16},  # like OPT-350M: the head is narrower
    "gpt_neox": BASE,
    "gpt_neo": NEO | {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gptj": OLD | {"rotary_dim": 8},
    "falcon": BASE,
    "falcon-alibi": BASE | {"alibi": True},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 64},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "xglm": XGLM,
    "biogpt": BASE,
    "mamba": STATES,
    "mamba2": STATES | {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "rwkv": {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32, "context_length": 64},
    "jamba": PAIRED | JAMBA | {"mamba_d_state": 4, "pad_token_id": 0},
    "falcon_h1": PAIRED | MAMBA2 | {"mamba_d_ssm": 64, "lm_head_multiplier": 0.3},
    "recurrent_gemma": GROUPED
    | {"num_key_value_heads": 1, "logits_soft_cap": 2.0, "attention_window_size": 8},
    "mistral": PAIRED | SLIDING,
    "gemma": GROUPED,
    "gemma2": GROUPED | SLIDING | {"final_logit_softcapping": 3.0},
    "gemma3_text": GROUPED | SLIDING | {"final_logit_softcapping": 2.0},
    "qwen2": PAIRED,
    "qwen3": GROUPED,
    "mixtral": PAIRED | {"num_local_experts": 2},
    "phi": BASE,  # its head has a bias
    "stablelm": PAIRED,
    "granite": BASE | {"logits_scaling": 4.0},
    "hyperclovax": BASE | {"logits_scaling": 4.0},  # multiplies logits by this number. Granite divides
    "minicpm3": BASE | {"dim_model_base": 8},  # divides hidden states, with the same effect
    "cohere": BASE | {"logit_scale": 0.25},
    "xlstm": XLSTM | {"output_logit_soft_cap": 3.0},
    "openai-gpt": OLD,
    "gpt_bigcode": OLD | {"n_inner": 48},  # all heads share one head of keys
    "bart": BART | {"d_model": 32, "max_position_embeddings": 64},
    "bert-generation": BASE | {"is_decoder": True},
    "lfm2": PAIRED | {"full_attn_idxs": [1]},
    "minimax": GROUPED | EXPERTS | {"block_size": 8},
    "gpt_oss": GROUPED | EXPERTS | SLIDING,
    "bert": BASE,  # not causal
}
MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
THETA = {"rope_theta": 5e5}
HYBRID: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
HYBRID |= {f"linear_{key}": 2 for key in ("num_key_heads", "num_value_heads")}
HYBRID |= {f"linear_{key}_head_dim": 8 for key in ("key", "value")}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
DEEPSEEK = PAIRED | MOE | LATENT | {"n_routed_experts": 4, "first_k_dense_replace": 1}
SCALED = {"original_max_position_embeddings": 32, "factor": 2.0, "rope_theta": 5e5}
LLAMA3 = SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = SCALED | {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
LONG = SCALED | {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
BY_LAYER = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
}
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61, "pad_token_id": 0}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}

# More families whose exports other programs read. The suffix of a name is the variant.
EXPORTED: dict[str, dict[str, Any]] = {
    "llama-llama3": PAIRED | {"rope_parameters": LLAMA3},
    "llama-linear": PAIRED | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    "llama-dynamic": PAIRED | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e5}},
    "llama-tied": PAIRED | THETA | {"tie_word_embeddings": True},
    "qwen2-yarn": PAIRED | {"rope_parameters": YARN, "tie_word_embeddings": True},
    "qwen2-sliding": PAIRED | THETA | SLIDING | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": PAIRED | MOE | THETA | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_moe": GROUPED | MOE | THETA | {"num_experts": 4},
    "qwen3_next": GROUPED | MOE | THETA | HYBRID | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": GROUPED | HYBRID,
    "qwen3_5_moe_text": GROUPED | MOE | HYBRID | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "gpt_neox-theta": BASE | {"rotary_emb_base": 2e4, "rotary_pct": 0.5, "use_parallel_residual": False},
    "gpt_neox-tied": BASE | {"tie_word_embeddings": True},
    "gpt_neox_japanese": BASE | {"intermediate_multiple_size": 2, "rotary_emb_base": 2e4},
    "codegen": OLD | {"n_head": 4, "rotary_dim": 8},
    "gemma3_text-layers": GROUPED | SLIDING | MIXED | {"rope_parameters": BY_LAYER},
    "gemma3n_text": GROUPED
    | SLIDING
    | MIXED
    | PER_LAYER
    | {"laurel_rank": 4, "altup_num_inputs": 2, "num_kv_shared_layers": 0, "intermediate_size": [48, 48]}
    | {"activation_sparsity_pattern": [0.0, 0.0]},
    "gemma4_text": GROUPED | SLIDING | MIXED | PER_LAYER | {"num_kv_shared_layers": 0},
    "aria_text": GROUPED
    | THETA
    | {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "pad_token_id": 0},
    "olmo": PAIRED | THETA,
    "olmo2": PAIRED | THETA,
    "olmo3": PAIRED
    | SLIDING
    | MIXED
    | {
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        }
    },
    "gpt_oss-yarn": GROUPED | EXPERTS | SLIDING | {"rope_parameters": YARN | {"truncate": False}},
    "olmoe": PAIRED | THETA | {"num_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": PAIRED | THETA | {"pad_token_id": 0, "num_experts": 4, "num_experts_per_tok": 2},
    "phi-theta": BASE | THETA | {"partial_rotary_factor": 0.25},
    "phi3": PAIRED | THETA | {"pad_token_id": 0, "partial_rotary_factor": 0.5},
    "phimoe-long": PAIRED
    | EXPERTS
    | {
        "original_max_position_embeddings": 32,
        "rope_parameters": LONG | {"short_mscale": 1.1, "long_mscale": 1.2},
    },
    "stablelm-dynamic": PAIRED
    | {
        "partial_rotary_factor": 0.5,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e5},
    },
    "gpt_neox-linear": BASE
    | {"rope_parameters": BY_LAYER["full_attention"] | {"partial_rotary_factor": 0.5}},
    "phi3-long": PAIRED
    | {"pad_token_id": 0, "original_max_position_embeddings": 32, "max_position_embeddings": 64}
    | {"rope_parameters": {k: v for k, v in LONG.items() if k != "factor"}},
    "phimoe": PAIRED | THETA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "stablelm-theta": PAIRED | THETA | {"partial_rotary_factor": 0.5},
    "cohere-theta": BASE | THETA,
    "cohere2": PAIRED | THETA | SLIDING,
    "granite-theta": PAIRED | THETA | {"embedding_multiplier": 2.0, "attention_multiplier": 0.1},
    "granitemoe": PAIRED | THETA | EXPERTS,
    "granitemoeshared": PAIRED | THETA | EXPERTS | {"shared_intermediate_size": 16},
    "granitemoehybrid": PAIRED
    | EXPERTS
    | MAMBA2
    | {"shared_intermediate_size": 16, "mamba_expand": 2}
    | {"layer_types": ["mamba", "attention"]},
    "bamba": PAIRED | MAMBA2 | {"mamba_expand": 2, "attn_layer_indices": [1]},
    "zamba2": PAIRED
    | {"layers_block_type": ["linear_attention", "hybrid"], "use_mem_rope": True}
    | {"n_mamba_heads": 4, "mamba_d_state": 4, "num_key_value_heads": 2, "adapter_rank": 4},
    "nemotron": PAIRED | THETA,
    "nemotron_h": PAIRED
    | {"hybrid_override_pattern": "M*", "mamba_num_heads": 4, "mamba_head_dim": 16}
    | {"n_groups": 1, "ssm_state_size": 4},
    "helium": GROUPED | THETA,
    "arcee": PAIRED | THETA,
    "apertus": PAIRED | {"rope_parameters": LLAMA3},
    "seed_oss": GROUPED | THETA,
    "smollm3": PAIRED | THETA | {"pad_token_id": 0, "no_rope_layers": [1, 0]},
    "exaone4": PAIRED | THETA | SLIDING | {"sliding_window_pattern": 2},
    "starcoder2": PAIRED | THETA | SLIDING,
    "persimmon": BASE | THETA,
    "diffllama": PAIRED | THETA,
    "glm": GROUPED | THETA | {"pad_token_id": 0},
    "glm4": GROUPED | THETA | {"pad_token_id": 0},
    "glm4_moe": GROUPED | MOE | THETA | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "deepseek_v2": DEEPSEEK,
    "deepseek_v2-yarn": DEEPSEEK | {"rope_parameters": YARN},
    "deepseek_v3": DEEPSEEK | {"n_group": 2, "topk_group": 1},
    "deepseek_v3-yarn": DEEPSEEK
    | {"n_group": 2, "topk_group": 1, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "dots1": GROUPED
    | MOE
    | THETA
    | {"n_shared_experts": 1, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "ernie4_5": GROUPED | THETA,
    "ernie4_5_moe": PAIRED
    | THETA
    | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 0}
    | {"moe_layer_end_index": 1},
    "hunyuan_v1_dense": GROUPED | THETA,
    "hunyuan_v1_moe": GROUPED | THETA | {"num_experts": 4, "moe_topk": 2},
    "jamba-experts": PAIRED
    | JAMBA
    | {"mamba_d_state": 4, "pad_token_id": 0, "mamba_dt_rank": 8}
    | {"num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 1, "expert_layer_offset": 0},
    "jetmoe": {"hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 16}
    | {"intermediate_size": 48, "num_local_experts": 2, "num_experts_per_tok": 1},
    "minimax_m2": GROUPED | EXPERTS | THETA | {"rotary_dim": 8},
    "lfm2_moe": PAIRED
    | MOE
    | THETA
    | {"num_experts": 4, "num_dense_layers": 1}
    | {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": PAIRED
    | LATENT
    | {"num_layers": 1, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "n_routed_experts": 4}
    | {"moe_topk": 2, "zero_expert_num": 1, "head_dim": 8},
    "llama4_text": GROUPED
    | THETA
    | {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 16, "pad_token_id": 0},
    "mixtral-theta": PAIRED | THETA | {"num_local_experts": 4},
    "ministral": GROUPED | THETA | SLIDING,
    "vaultgemma": GROUPED | SLIDING,
    "bitnet": PAIRED | THETA,
    "doge": PAIRED | THETA,
    "falcon_mamba": STATES | {"intermediate_size": 64},
    "modernbert-decoder": BASE
    | {"pad_token_id": 0, "local_attention": 8, "global_attn_every_n_layers": 2}
    | {"rope_parameters": BY_LAYER | {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}},
}
EAGER = ("gemma2",)  # SDPA does not support soft-capped attention


def family(name: str, attn: str | None = None, **changes: Any) -> Any:
    """Return a tiny model in evaluation mode. Its weights are large enough for attention to matter."""
    settings = copy.deepcopy({"vocab_size": VOCAB} | (FAMILIES | EXPORTED)[name] | changes)
    model_type = name if name in CONFIG_MAPPING else name.rpartition("-")[0]
    config = AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(0)
    attn = attn or ("eager" if name in EAGER else None)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() in (2, 3):
                parameter.mul_(3)
    return model


def tiny_llama(vocab_size: int, **changes: Any) -> LlamaForCausalLM:
    """Return a random LLaMA with far from uniform predictions. Every call returns the same weights."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = {"initializer_range": 0.3, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**{"vocab_size": vocab_size, **shape, **settings, **changes}))


def by_hand(model: Any, slope: float = 1.0) -> None:
    """Compute norms and MLPs of a LLaMA in another way. A `slope` other than 1 scales gradients of norms."""

    def norm(module: Any, x: Tensor) -> Tensor:
        y = torch.nn.functional.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)
        return y.detach() + slope * (y - y.detach())

    def product(module: Any, x: Tensor) -> Tensor:
        gate = module.gate_proj(x)
        return module.down_proj(gate * torch.sigmoid(gate) * module.up_proj(x))

    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = functools.partial(norm, module)
        elif isinstance(module, LlamaMLP):
            module.forward = functools.partial(product, module)
