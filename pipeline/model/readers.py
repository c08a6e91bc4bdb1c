"""Write exported files in the form that every reader of Hugging Face models understands.

In memory transformers 5 merges the experts of a layer into one tensor and the settings of RoPE into one
dictionary. Other readers (transformers 4, vLLM, llama.cpp) expect the older form of the files.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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
from transformers.utils import cached_file

from emo.common.errors import UserError, one_line
from emo.common.io.files import write_text
from emo.data_prep.encoding.tokenizer import PROBES, load_tokenizer

CONFIG = "config.json"
PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
# Layer types of families with two kinds of RoPE.
LOCAL = "sliding_attention"
GLOBAL = "full_attention"
# Names of RoPE's settings in transformers 4, unless they are rope_theta and partial_rotary_factor.
NEOX = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
NAMES_OF_4 = {
    "gpt_neox": NEOX,
    "gpt_neox_japanese": NEOX,
    "modernbert-decoder": {"rope_theta": "global_rope_theta"},
}
# The name of the theta of local layers. OLMo 3 has one theta for all layers.
LOCAL_THETA = {"modernbert-decoder": "local_rope_theta", "olmo3": None}
LOCAL_THETA |= dict.fromkeys(("gemma3_text", "gemma3n_text"), "rope_local_base_freq")
ALIASES_OF_4 = {"qwen3_moe": {"num_experts": "num_local_experts"}}
LAYERS_OF_4 = {"linear_attention": "mamba", "full_attention": "attention"}  # in the families of MAMBA
MAMBA = {"granitemoehybrid": "layer_types", "zamba": "layers_block_type", "zamba2": "layers_block_type"}
# The only keys besides the type that transformers 4 accepts for Phi-3.
LONGROPE = ("short_factor", "long_factor")
CONTEXT = "original_max_position_embeddings"  # also a key of Phi-3's configuration itself


def saved_tensors(
    model: PreTrainedModel, names: Iterable[str], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's tensors with the names and shapes that `save_pretrained` gives them.

    A saved tensor is yielded once all its parts have arrived, so the caller never holds the model twice.
    `names` are the in-memory names of all `tensors`.
    """
    reverse = [change.reverse_transform() for change in reversed(_set_conversions(model))]
    converters = [change for change in reverse if isinstance(change, WeightConverter)]

    def group(name: str) -> str:
        return apply_converters(name, converters)[0]

    group_sizes = Counter(map(group, names))
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        parts = groups.setdefault(group(name), {})
        parts[name] = tensor
        if len(parts) == group_sizes[group(name)]:
            del groups[group(name)]
            saved = revert_weight_conversion(model, parts) if reverse else parts
            yield from ((key, value.contiguous()) for key, value in saved.items())
    assert not groups, sorted(groups)


def saved_names(model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Return the names that `save_pretrained` gives these tensors of a model."""
    _set_conversions(model)
    return set(revert_weight_conversion(model, {name: tensor.to("meta") for name, tensor in tensors}))


def _set_conversions(model: PreTrainedModel) -> list[WeightTransform]:
    """Make `revert_weight_conversion` undo the conversions of a new model of this family, and return them.

    The exported names then do not depend on the files that this model was loaded from. A prefix inside a
    part of the model, such as the vision tower of Gemma 3, is restored, because published files have it.
    """
    mapping = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [c for c in mapping if not isinstance(c, PrefixChange) or c.scope_prefix]
    return model._weight_conversions


def write_tokenizer(
    source: Path,
    directory: Path,
    ends: list[int],
    context: int | None = None,
    variables: Mapping[str, object] | None = None,
) -> None:
    """Copy the tokenizer of prepared data, and set its eos_token to the end of supervised text if possible.

    Programs look for the end of a reply in different files: `generate` and vLLM stop at any eos_token_id of
    generation_config.json, llama.cpp and others only at the tokenizer's eos_token. It stays as it is if
    `ends`, the tokens that end supervised answers or documents, are several, or if the chat template itself
    writes eos_token. `model_max_length` is raised to the extended `context` of the model. `variables`, which
    are data.template_variables, become defaults of the chat template.
    """
    shutil.copytree(source, directory, dirs_exist_ok=True, copy_function=shutil.copyfile)
    file = directory / "tokenizer_config.json"
    before = json.loads(file.read_text(encoding="utf-8"))
    settings = dict(before)
    if len(ends) == 1 and "eos_token" not in settings.get("chat_template", ""):
        token = settings.get("added_tokens_decoder", {}).get(str(ends[0]))
        if token is not None and token["special"]:
            settings["eos_token"] = token["content"]
    if isinstance(template := settings.get("chat_template"), str):
        settings["chat_template"] = _template_defaults(variables or {}) + template
    if context is not None and settings.get("model_max_length", context) < context:
        settings["model_max_length"] = context
    if settings != before:
        write_text(file, json.dumps(settings, indent=2, sort_keys=True) + "\n")


def copy_processor(model: PreTrainedModel, source: str | None, revision: str | None, directory: Path) -> None:
    """Copy the settings of the image processor of a model that also reads images, if its source has them.

    vLLM does not load such a model without them. The text part of the model does not need them.
    """
    if source is None or model.config.get_text_config() is model.config:
        return
    options = dict.fromkeys(
        ("_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors"), False
    )
    for name in PROCESSOR:
        if (file := cached_file(source, name, revision=revision, **options)) is not None:
            shutil.copyfile(file, directory / name)


def _template_defaults(variables: Mapping[str, object]) -> str:
    """Return the beginning of a chat template that sets variables which the caller of the template does not.

    A server then prompts the model as in training. `date` has no default: training data get a fixed date, but
    a server should write the current one. Lists and mappings have none either.
    """
    lines = ""
    for name, value in variables.items():
        if name != "date" and name.isidentifier() and isinstance(value, str | int | float | None):
            literal = "none" if value is None else json.dumps(value, ensure_ascii=False)
            lines += f"{{%- if {name} is not defined %}}{{%- set {name} = {literal} %}}{{%- endif %}}\n"
    return lines


def check_exported_tokenizer(directory: Path, rows: Tensor) -> None:
    """Raise UserError if AutoTokenizer gives other ids than the tokenizer of the data.

    For a few families transformers replaces a tokenizer's rules by its own, whatever the files contain. The
    texts of `rows`, which are token ids of the data [rows, length], and PROBES are compared.
    """
    prepared = load_tokenizer(directory)
    texts = [*PROBES, *prepared.batch_decode(rows)]
    try:
        loaded = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        plain = {"add_special_tokens": False}
        differ = sum(
            prepared(text).input_ids != loaded(text).input_ids
            or prepared(text, **plain).input_ids != loaded(text, **plain).input_ids
            for text in texts
        )
        problem = f"gives other ids for {differ} of {len(texts)} texts"
    except Exception as error:  # tokenizer classes fail in many ways on files of another kind
        differ = 1
        problem = f"cannot read it ({one_line(error, 120)})"
    if differ:
        family = json.loads((directory / CONFIG).read_text(encoding="utf-8")).get("model_type")
        cure = "Use a tokenizer that such models are published with, or another architecture."
        problem = f"transformers has its own tokenizer for {family} models, which {problem}"
        raise UserError(f"{problem}. {cure}", code="tokenizer-class")


def write_config(directory: Path, changes: Mapping[str, object]) -> None:
    """Rewrite a saved config.json with `changes`, and with the names that transformers 4 reads."""
    text = (directory / CONFIG).read_text(encoding="utf-8")
    tree = json.loads(text, object_hook=_parse_infinity) | changes
    _add_names_of_4(tree)
    write_text(directory / CONFIG, json.dumps(tree, indent=2, sort_keys=True) + "\n")


def _parse_infinity(tree: dict[str, str]) -> dict[str, str] | float:
    """Return a JSON object, or the float for which transformers 5 writes an object because it is infinite."""
    return float(tree["__float__"]) if tree.keys() == {"__float__"} else tree


def _add_names_of_4(tree: dict[str, Any]) -> None:
    """Add transformers 4's names of settings to a configuration and the configurations inside it."""
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
    _add_rope_of_4(tree, family)


def _add_rope_of_4(tree: dict[str, Any], family: str) -> None:
    """Add transformers 4's names of RoPE's settings to a configuration."""
    settings = tree.get("rope_parameters") or {}
    if settings.get(GLOBAL):  # settings by layer type
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
