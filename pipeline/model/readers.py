"""The files of an export in the form that all readers of Hugging Face models understand.

transformers 5 keeps a model in memory in another form than its files have: the experts of a layer are one
tensor, RoPE's settings are one dictionary. Other readers (transformers 4, vLLM, llama.cpp) need the form of
the files.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightTransform,
    apply_converters,
    revert_weight_conversion,
)

from emo.common.errors import UserError, one_line
from emo.common.io.files import write_text
from emo.data_prep.encoding.tokenizer import PROBES, load_tokenizer

CONFIG = "config.json"
LOCAL, GLOBAL = "sliding_attention", "full_attention"  # layers of families that have two kinds of RoPE
# What transformers 4 calls RoPE's settings, where it is not rope_theta and partial_rotary_factor.
NEOX = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
NAMES_OF_4 = {
    "gpt_neox": NEOX,
    "gpt_neox_japanese": NEOX,
    "modernbert-decoder": {"rope_theta": "global_rope_theta"},
}
# And the theta of local layers, in the families of transformers 4 with two kinds; OLMo 3 has one theta.
LOCAL_THETA = {"modernbert-decoder": "local_rope_theta", "olmo3": None}
LOCAL_THETA |= dict.fromkeys(("gemma3_text", "gemma3n_text"), "rope_local_base_freq")
ALIASES_OF_4 = {"qwen3_moe": {"num_experts": "num_local_experts"}}
LAYERS_OF_4 = {"linear_attention": "mamba", "full_attention": "attention"}  # in the families of MAMBA
MAMBA = {"granitemoehybrid": "layer_types", "zamba": "layers_block_type", "zamba2": "layers_block_type"}
# With its type, all that transformers 4 takes for Phi-3; the context stands in the configuration too.
LONGROPE = ("short_factor", "long_factor")
CONTEXT = "original_max_position_embeddings"


def saved_tensors(
    model: PreTrainedModel, names: Iterable[str], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's tensors with the names and shapes that `save_pretrained` gives them.

    A tensor is yielded as soon as all parts of it have come, so that the caller never holds the model twice.

    Args:
        names: of all `tensors`, as the model has them in memory.
    """
    reverse = [change.reverse_transform() for change in reversed(_conversions(model))]
    converters = [change for change in reverse if isinstance(change, WeightConverter)]

    def group(name: str) -> str:
        return apply_converters(name, converters)[0]

    awaited = Counter(map(group, names))
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        together = parts.setdefault(group(name), {})
        together[name] = tensor
        if len(together) == awaited[group(name)]:
            del parts[group(name)]
            saved = revert_weight_conversion(model, together) if reverse else together
            yield from ((key, value.contiguous()) for key, value in saved.items())
    assert not parts, sorted(parts)


def saved_names(model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Return the names that `save_pretrained` gives these tensors of a model."""
    _conversions(model)
    return set(revert_weight_conversion(model, {name: tensor.to("meta") for name, tensor in tensors}))


def _conversions(model: PreTrainedModel) -> list[WeightTransform]:
    """Return the changes between files and memory, and have `revert_weight_conversion` undo just these.

    They are those of a new model: names do not depend on the files that this one was loaded from.
    """
    mapping = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [change for change in mapping if not isinstance(change, PrefixChange)]
    return model._weight_conversions


def write_tokenizer(source: Path, directory: Path, ends: list[int]) -> None:
    """Copy the tokenizer of prepared data, and let it name the token that ends what the model was taught.

    Programs look for the end of a reply in different files: `generate` and vLLM stop at any eos_token_id
    of generation_config.json, llama.cpp and others at the tokenizer's eos_token alone. So where every answer
    ends with the same token, that becomes the eos_token. With several, or where the chat template writes its
    eos_token elsewhere, the base model's own end remains.

    Args:
        ends: token ids that end supervised answers, or documents.
    """
    shutil.copytree(source, directory, dirs_exist_ok=True, copy_function=shutil.copyfile)
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    one = len(ends) == 1 and "eos_token" not in settings.get("chat_template", "")
    token = settings.get("added_tokens_decoder", {}).get(str(ends[0])) if one else None
    if token is not None and token["special"]:
        settings["eos_token"] = token["content"]
        write_text(file, json.dumps(settings, indent=2, sort_keys=True) + "\n")


def check_tokenizer(directory: Path, rows: Tensor) -> None:
    """Raise UserError where AutoTokenizer gives other ids than the tokenizer of the data.

    For a few families transformers replaces a tokenizer's rules by its own, whatever the files say.

    Args:
        rows: token ids of the data [rows, length]; their texts are compared, and PROBES.
    """
    own = load_tokenizer(directory)
    texts = [*PROBES, *own.batch_decode(rows)]
    try:
        found = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        plain = {"add_special_tokens": False}
        differ = sum(
            own(text).input_ids != found(text).input_ids
            or own(text, **plain).input_ids != found(text, **plain).input_ids
            for text in texts
        )
        problem = f"gives other ids for {differ} of {len(texts)} texts"
    except Exception as error:  # whatever a tokenizer of another kind makes of these files
        differ, problem = 1, f"cannot read it ({one_line(error, 120)})"
    if differ:
        family = json.loads((directory / CONFIG).read_text(encoding="utf-8")).get("model_type")
        raise UserError(
            f"transformers has its own tokenizer for {family} models, which {problem}; take one that such "
            "models are published with, or another architecture",
            code="tokenizer-class",
        )


def write_config(directory: Path, changes: dict[str, Any]) -> None:
    """Rewrite a saved config.json with `changes`, and with what transformers 4 reads under other names."""
    text = (directory / CONFIG).read_text(encoding="utf-8")
    tree = json.loads(text, object_hook=_with_plain_floats) | changes
    _add_names_of_4(tree)
    write_text(directory / CONFIG, json.dumps(tree, indent=2, sort_keys=True) + "\n")


def _with_plain_floats(tree: dict[str, Any]) -> Any:
    """Return an object of JSON, or the number that transformers 5 writes as an object: an infinite one."""
    return float(tree["__float__"]) if tree.keys() == {"__float__"} else tree


def _add_names_of_4(tree: dict[str, Any]) -> None:
    """Add what transformers 4 calls RoPE's settings and the dtype to a configuration and those inside it."""
    for inner in tree.values():
        if isinstance(inner, dict) and "model_type" in inner:
            _add_names_of_4(inner)
    if "dtype" in tree:
        tree["torch_dtype"] = tree["dtype"]
    family = str(tree.get("model_type"))
    for old, new in ALIASES_OF_4.get(family, {}).items():
        tree[old] = tree[new]
    if layers := tree.get(MAMBA.get(family, "")):
        tree[MAMBA[family]] = [LAYERS_OF_4.get(kind, kind) for kind in layers]
    settings = tree.get("rope_parameters") or {}
    if settings.get(GLOBAL):  # by kind of layer
        if family not in LOCAL_THETA:
            return
        if key := LOCAL_THETA[family]:
            tree[key] = settings[LOCAL]["rope_theta"]
        settings = settings[GLOBAL]
    settings = dict(settings)
    if "rope_theta" not in settings:
        return
    for key in ("rope_theta", "partial_rotary_factor"):
        if (value := settings.pop(key, None)) is not None:
            tree[NAMES_OF_4.get(family, {}).get(key, key)] = value
    if family == "phi3" and settings.keys() <= {"rope_type", "type", CONTEXT, *LONGROPE}:
        settings = {"type": settings["rope_type"]} | {k: settings[k] for k in LONGROPE if k in settings}
    scaled = settings.get("rope_type", settings.get("type")) != "default"
    tree["rope_scaling"] = settings if scaled else None
