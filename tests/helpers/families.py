"""Tiny random models of many families, as different in their masks, positions and heads as families are."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
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
    "hyperclovax": BASE | {"logits_scaling": 4.0},  # the same name, but a factor
    "minicpm3": BASE | {"dim_model_base": 8},  # divides hidden states: the same
    "cohere": BASE | {"logit_scale": 0.25},
    "xlstm": XLSTM | {"output_logit_soft_cap": 3.0},
    "openai-gpt": OLD,
    "gpt_bigcode": OLD | {"n_inner": 48},  # one head of keys for all
    "bart": BART | {"d_model": 32, "max_position_embeddings": 64},
    "bert-generation": BASE | {"is_decoder": True},
    "lfm2": PAIRED | {"full_attn_idxs": [1]},
    "minimax": GROUPED | EXPERTS | {"block_size": 8},
    "gpt_oss": GROUPED | EXPERTS | SLIDING,
    "bert": BASE,  # not causal
}
EAGER = ("gemma2",)  # soft-capped attention has no SDPA form


def family(name: str, attn: str | None = None, **changes: Any) -> Any:
    """A tiny model of family `name` in evaluation mode; weights large enough for attention to matter."""
    settings = {"vocab_size": VOCAB} | FAMILIES[name] | changes
    config = AutoConfig.for_model(name.removesuffix("-alibi"), **settings)
    torch.manual_seed(0)
    attn = attn or ("eager" if name in EAGER else None)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)
    return model


def tiny_llama(vocab_size: int, **changes: Any) -> LlamaForCausalLM:
    """A random LLaMA, the same at every call, whose predictions are far from even."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = {"initializer_range": 0.3, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**{"vocab_size": vocab_size, **shape, **settings, **changes}))


def by_hand(model: Any, slope: float = 1.0) -> None:
    """Compute the norms and products of a LLaMA in another way; with a `slope` their gradients are wrong."""

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
