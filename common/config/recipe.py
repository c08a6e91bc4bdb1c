"""Recipes: YAML files of strict sections, completed by `extends` and `key=value` overrides.

A recipe is one file for a whole run: `data_prep` reads its `data` section, `pipeline` all of it. Every
section is a frozen pydantic model that refuses unknown keys. What cannot be read is a UserError.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import UserError, nearest, one_line, similar
from ..io.untrusted import read_bytes
from ..provenance import REPOSITORY, shipped
from ..text import without_secrets
from .objective_names import NO_PREFERENCES

EXAMPLES = {"recipe": "launch/recipes", "experiment": "experiments"}  # by kind of file: where ours are
KEYS = ("output_dir", "data", "model", "objective", "train", "deepspeed")  # of a recipe, besides `extends`
FILE_BYTES = 128 << 10  # of a recipe at most: what is larger is data
WRITTEN_BYTES = 8 << 20  # of a program's own YAML, whose defaults are written out
LARGEST = 2**53  # integers beyond it are mistakes: floats can no longer count there
# Settings of a recipe, and their names in other trainers.
_NAMES_ELSEWHERE = {
    "output_dir": "run_dir",
    "data.sequence_len": "max_seq_length max_seq_len max_length block_size seq_len seq_length cutoff_len "
    "model_max_length block",
    "data.sources": "train_file data_path datasets dataset dataset_name train_dataset pretraining_dataset",
    "data.validation_fraction": "val_fraction val_set_size val_size test_size",
    "data.limit_rows": "max_samples max_train_samples",
    "data.dir": "dataset_prepared_path tokenized_path",
    "data.template": "chat_template prompt_template",
    "data.tokenizer": "tokenizer_name tokenizer_name_or_path tokenizer_config",
    "model.path": "base_model model_name_or_path model_name model_id pretrained",
    "model.dtype": "bf16 fp16 precision mixed_precision torch_dtype",
    "model.attn_implementation": "flash_attention flash_attn flash_attn_2 sdp_attention",
    "model.activation_checkpointing": "gradient_checkpointing",
    "model.kernels": "use_liger use_liger_kernel enable_liger_kernel liger_rope liger_rms_norm "
    "liger_layer_norm liger_glu_activation liger_swiglu liger_fused_linear_cross_entropy",
    "data.root": "dataset_dir",
    "model.lora": "adapter peft peft_config use_peft finetuning_type qlora",
    "model.lora.r": "lora_r lora_rank rank",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.targets": "lora_target lora_target_modules lora_target_linear target_modules",
    "objective.name": "loss_type loss",
    "train.learning_rate": "lr",
    "train.global_batch_size": "batch_size train_batch_size batch",
    "train.micro_batch_size": "per_device_train_batch_size per_device_eval_batch_size micro_batch",
    "train.num_train_epochs": "epochs num_epochs max_epochs",
    "train.max_steps": "steps max_iters",
    "train.max_grad_norm": "gradient_clipping gradient_clip_val clip_grad grad_clip clip",
    "train.lr_scheduler_type": "lr_scheduler schedule",
    "train.optimizer": "optim",
    "train.eps": "adam_epsilon",
    "train.betas": "adam_beta1 adam_beta2",
    "train.logging_steps": "log_every log_interval",
    "train.eval_steps": "eval_every eval_interval eval_strategy evaluation_strategy evals_per_epoch",
    "train.save_steps": "save_every save_interval save_strategy saves_per_epoch",
    "train.save_total_limit": "keep_last",
    "train.report_to": "tensorboard wandb use_wandb",
    "train.project": "wandb_project",
}
_ANY = {"name", "path"}  # keys that could be of anything
# Also the last word of a key, for one in the wrong section.
OTHER_NAMES = {
    name: key
    for key, names in _NAMES_ELSEWHERE.items()
    for name in ({key.rpartition(".")[2]} - _ANY) | set(names.split())
}
_QUANTISED = (
    "quantised weights are not supported: set model.lora={} to train few parameters, or offload to the "
)
_QUANTISED += "host with deepspeed=ds_configs/zero3_offload.json"
_PACKED = "remove it: rows are always packed, and documents in a row do not attend to each other"
_ANSWERS = "remove it: only answers are supervised, each with the token that ends it (data.kind=instruct), "
_ANSWERS += "or every token (data.kind=text)"
_WORKERS = "remove it: `emo prepare --workers N` sets how many processes prepare the data"
# Settings of other trainers that have no counterpart, and what to do instead.
NOT_HERE = {
    name: hint
    for names, hint in {
        "load_in_4bit load_in_8bit quantization_bit bnb_4bit_compute_dtype bnb_config": _QUANTISED,
        "neftune_noise_alpha neftune": "noise on embeddings (NEFTune) is not supported; remove it",
        "rl dpo_beta ref_model reward_model kl_coef rlhf dpo kto orpo grpo ppo": NO_PREFERENCES,
        "sample_packing packing eval_packing eval_sample_packing pad_to_sequence_len neat_packing "
        "group_by_length": _PACKED,
        "train_on_inputs train_on_input assistant_only_loss completion_only_loss train_on_prompt "
        "roles_to_train train_on_eos train_on_eot": _ANSWERS,
        "preprocessing_num_workers dataset_num_proc dataset_processes num_proc": _WORKERS,
        "sources.type": "remove it: what rows are follows from data.kind, data.template and columns",
        "enable_thinking": "set data.template_variables={enable_thinking: true}, or false",
        "warmup_steps": "set train.warmup_ratio, which is a share of the steps, not their number",
        "ddp_timeout": "set train.timeout_minutes, in minutes instead of seconds",
        "gradient_accumulation_steps grad_accum gradient_accumulation": "remove it: it "
        "follows from train.global_batch_size (rows per step over all ranks) and train.micro_batch_size",
        "resume_from_checkpoint auto_resume_from_checkpoints overwrite_output_dir": "remove it: the same "
        "command resumes from the newest checkpoint, and another output_dir starts a new run",
        "trust_remote_code": "code that comes with a model is never run; use a model that transformers has",
        "fsdp fsdp_config": "FSDP is not supported: deepspeed=ds_configs/zero3.json shards in the same way",
        "push_to_hub hub_model_id hub_token": "remove it, and upload the export when training is done",
        "tf32 use_cache do_train do_eval stage trainer": "remove it: there is nothing to set",
    }.items()
    for name in names.split()
}
# Parts of values that settings cannot have, and what to do instead.
VALUES = {
    "8bit": "8-bit optimizers are not supported: ZeRO divides the optimizer over the ranks (deepspeed=...)",
    "paged": "for an optimizer in host memory set deepspeed=ds_configs/zero3_offload.json",
}


class RecipeLoader(yaml.SafeLoader):
    """YAML in which keys are given once, no alias contains itself, and 2e-5 is a number."""

    def construct_document(self, node: yaml.Node) -> Any:
        """Return the value of a document, at once: an alias that contains itself is then an error."""
        return self.construct_object(node, deep=True)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping, whose keys differ."""
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [key for key, count in keys.items() if count > 1]:
            raise yaml.MarkedYAMLError(problem=f"key {twice[0]} given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


class Section(BaseModel):
    """A part of a recipe: immutable, and strict about its keys and numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_bool_as_number(cls, tree: Any) -> Any:
        """Python reads `true` as 1; a recipe does not."""
        if not isinstance(tree, dict):
            return tree
        checked = dict(tree)
        for key in tree.keys() & cls.model_fields.keys():
            types = set(_parts(cls.model_fields[key].annotation))
            if bool not in types and types & {int, float}:
                checked[key] = _without_bools(tree[key])
        return checked


class _NotANumber:
    """Stands for true or false where a number is wanted, and is rejected by pydantic with the key's path."""

    def __init__(self, value: bool) -> None:
        self.value = value

    def __repr__(self) -> str:
        return str(self.value).lower()


def _without_bools(value: Any) -> Any:
    """Return a value, or the items of a list or mapping, with an invalid object for each true and false."""
    if isinstance(value, dict):
        return {key: _NotANumber(item) if isinstance(item, bool) else item for key, item in value.items()}
    if isinstance(value, list):
        return [_NotANumber(item) if isinstance(item, bool) else item for item in value]
    return _NotANumber(value) if isinstance(value, bool) else value


SectionT = TypeVar("SectionT", bound=Section)


# The mark of fields that may change when a run resumes: none of them changes what is learned.
FREE = "free"


def mark(name: str, default: Any = ..., **limits: Any) -> Any:
    """Return a field with a mark, for `marked` to find: `keep: int = mark("free", 2, gt=0)`.

    default and limits are those of pydantic's Field; without a default the field is required.
    """
    return Field(default, json_schema_extra={"mark": name}, **limits)


def mark_of(cls: type[Section], key: str) -> str | None:
    """Return the mark of a section's field, None where it has none."""
    extra = cls.model_fields[key].json_schema_extra
    return str(extra["mark"]) if isinstance(extra, dict) and "mark" in extra else None


def marked(cls: type[Section], name: str) -> set[str]:
    """Return the keys below `cls` that are declared with `mark(name, ...)`, as in `train.logging_steps`.

    A marked section covers all that it holds. Sections in lists are not searched.
    """
    keys: set[str] = set()
    for key, field in cls.model_fields.items():
        listed = any(get_origin(part) is list for part in _parts(field.annotation))
        section = None if listed else _section(field.annotation)
        if mark_of(cls, key) == name:
            keys.add(key)
        elif section is not None:
            keys |= {f"{key}.{inner}" for inner in marked(section, name)}
    return keys


def load_section(cls: type[SectionT], path: Path, overrides: Sequence[str], noun: str = "recipe") -> SectionT:
    """Return a YAML file with overrides as `cls`; for files that are written like recipes."""
    return parse_section(cls, read_recipe(path, overrides, noun), "")


def read_recipe(path: Path, overrides: Sequence[str], noun: str = "recipe") -> dict[str, Any]:
    """Return the tree of a YAML recipe with `key.sub=value` overrides, whose values are YAML too.

    A recipe may begin from another one: `extends: other.yaml`, a file beside it, whose sections it completes
    and overrides key by key; a model architecture that names its model_type replaces the other's whole.
    noun: the name of this kind of file in messages, one of EXAMPLES.

    Raises UserError when a file cannot be read or understood, a key is given twice, recipes extend each other
    in a circle or one outside their folder and this program, or an override has no `=`.
    """
    tree = _read_tree(shipped(path), (), noun)
    for override in overrides:
        apply_override(tree, override)
    return tree


def _read_tree(path: Path, before: tuple[Path, ...], noun: str) -> dict[str, Any]:
    """Return the tree of a recipe laid on those that it extends; `before`: the recipes that led here."""
    if path.resolve() in before:
        circle = " -> ".join(p.name for p in (*before[before.index(path.resolve()) :], path))
        raise UserError(f"recipes extend each other in a circle: {circle}", code="recipe-circle")
    try:
        tree = _load_yaml(read_bytes(path, FILE_BYTES))
    except FileNotFoundError:
        examples = REPOSITORY / EXAMPLES[noun]
        match = similar(path.stem, [file.stem for file in examples.glob("*.yaml")], 0.8)
        hint = f"did you mean {EXAMPLES[noun]}/{match}.yaml?" if match else f"see {examples} for examples"
        raise UserError(f"{noun} {path} does not exist; {hint}", code="no-recipe") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise UserError(f"{noun} {path} cannot be read: {reason}", code="recipe-unreadable") from None
    if not isinstance(tree, dict):
        raise UserError(f"{noun} {path} must be a mapping of sections", code="recipe-unreadable")
    base = tree.pop("extends", None)
    if base is None:
        return tree
    try:
        beside = (path.parent / str(base)).resolve()
        allowed = any(beside.is_relative_to(folder) for folder in (path.resolve().parent, REPOSITORY))
    except ValueError:  # no file can have such a name
        allowed = False
    if not allowed:
        problem = f"extends must name a file in its folder or of this program, not {format_value(base)}"
        raise UserError(f"{noun} {path}: {problem}", code="extends")
    return _merge(_read_tree(path.parent / str(base), (*before, path.resolve()), noun), tree)


def read_written(path: Path) -> Any:
    """Return the YAML value that a program wrote into a file. Raises OSError or ValueError."""
    return _load_yaml(read_bytes(path, WRITTEN_BYTES))


def _load_yaml(content: bytes | str) -> Any:
    """Return a YAML value. Raises ValueError, whatever is wrong with the text."""
    try:
        return yaml.load(content if isinstance(content, str) else content.decode("utf-8-sig"), RecipeLoader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (
        yaml.YAMLError,
        ValueError,
        AttributeError,
        TypeError,
    ) as error:  # constructors fail on odd values
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ValueError(f"not YAML: {getattr(error, 'problem', None) or one_line(error)}{line}") from None


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `over` laid on `base`: sections key by key, everything else whole."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict) and "model_type" not in value
        merged[key] = _merge(base[key], value) if both else value
    return merged


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `key.sub=value` in the tree; sections on the way are copied, as an alias may share them."""
    key, equals, value = override.partition("=")
    *parents, leaf = key.split(".")
    if not equals or not all((*parents, leaf)):
        raise UserError(
            f"override {format_value(override)} must be key.sub=value, for example train.learning_rate=2e-5",
            code="bad-override",
        )
    node = tree
    for parent in parents:
        child = node.get(parent)
        if child is not None and not isinstance(child, dict):
            noun = "a list; give it whole" if isinstance(child, list) else "a value, not a section"
            raise UserError(f"override {format_value(override)}: {parent} is {noun}", code="bad-override")
        node[parent] = dict(child or {})
        node = node[parent]
    try:
        node[leaf] = _load_yaml(value)
    except ValueError as error:
        message = f"override {format_value(override)}: the value is {one_line(error)}"
        raise UserError(message, code="bad-override") from None


def parse_section(cls: type[SectionT], tree: Any, where: str) -> SectionT:
    """Return `tree` as `cls`. Raises UserError naming every bad key, each with the nearest known one."""
    section = check_section(cls, tree, where)
    assert section is not None
    return section


def check_section(
    cls: type[SectionT], tree: Any, where: str, may_lack: Sequence[str] = ()
) -> SectionT | None:
    """Return `tree` as `cls`, or None where it is valid except that keys in `may_lack` are absent.

    Raises UserError naming every bad key, each with the nearest known one.
    """
    section, mistakes = None, dict[Any, UserError]()
    try:
        section = cls.model_validate(tree)
    except ValidationError as error:
        for problem in [*error.errors(), *_hidden(cls, tree, error)]:
            absent = problem["type"] == "missing" and problem["loc"] in [(key,) for key in may_lack]
            if absent or problem["type"] == "default_factory_not_called":  # because of another mistake
                continue
            # Each type that a field may have objects for itself; the first will do.
            is_unknown = problem["type"] == "extra_forbidden"
            path = problem["loc"] if is_unknown else _located(cls, problem["loc"])[1]
            mistakes.setdefault((path, repr(problem["input"])), _mistake(cls, problem, where))
    for key, value in _leaves(tree if section is None else section.model_dump(), where):
        if isinstance(value, int) and abs(value) > LARGEST:
            mistakes[key, ""] = UserError(f"{key}: {format_value(value)} is far too large", code="bad-value")
        if isinstance(value, str | Path) and without_secrets(str(value)) != str(value):
            mistakes[key, ""] = UserError(
                f"{key} holds a password or token, and would be copied to config.yaml, logs and reports; "
                "leave it out, and give it where its library looks for it (HF_TOKEN, AWS_PROFILE, ~/.netrc)",
                code="secret",
            )
    if mistakes:
        raise UserError.of(list(mistakes.values()))
    return section


def _hidden(cls: type[Section], tree: Any, error: ValidationError) -> list[Any]:
    """Return what is wrong with how values go together, unchecked in a section with other mistakes.

    The values that are wrong by themselves are set aside, and what is said about those is left out.
    """
    rest, wrong = copy.deepcopy(tree), set[str]()
    for problem in error.errors():
        path = problem["loc"] if problem["type"] == "extra_forbidden" else _located(cls, problem["loc"])[1]
        *above, key = [*takewhile(lambda part: isinstance(part, str), path)] or [""]
        node = rest
        for part in above:
            node = node.get(part) if isinstance(node, dict) else None
        if problem["type"] not in ("missing", "value_error") and isinstance(node, dict):
            wrong.add(str(key))
            node.pop(key, None)
    try:
        cls.model_validate(rest)
    except ValidationError as more:
        return [
            problem
            for problem in more.errors()
            if problem["type"] == "value_error" and not wrong & {*re.findall(r"\w+", problem["msg"])}
        ]
    return []


def _located(cls: type[Section], location: Sequence[int | str]) -> tuple[type[Section], Sequence[int | str]]:
    """Return the innermost section that a path enters, and the path up to its last known part."""
    current, known = cls, 0
    for number, part in enumerate(location, 1):
        field = current.model_fields.get(part) if isinstance(part, str) else None
        if field is not None or isinstance(part, int):
            known = number
        current = (_section(field.annotation) if field is not None else None) or current
    return current, location[:known]


def _mistake(cls: type[Section], problem: Mapping[str, Any], where: str) -> UserError:
    """Return what pydantic found wrong, in words."""
    path = ".".join(str(part) for part in (where, *problem["loc"]) if part != "")
    value, message = problem["input"], problem["msg"].removeprefix("Value error, ")
    in_recipe = path.split(".")[0] in KEYS or set(KEYS) <= cls.model_fields.keys()
    if problem["type"] == "extra_forbidden":
        *above, key = problem["loc"]
        names = _located(cls, above)[0].model_fields
        hint = suggest_key(cls, problem["loc"]) if in_recipe else None
        hint = hint or nearest(str(key), names, OTHER_NAMES if in_recipe else {})
        return UserError(f"unknown key {path}; {hint}", code="unknown-key")
    if problem["type"] == "model_type":
        message = "must be a section of key: value lines"
    detail = "" if isinstance(value, dict) else f" (given: {format_value(value)})"
    if problem["type"] == "literal_error" and in_recipe:
        detail += "".join(f"; {hint}" for word, hint in VALUES.items() if word in str(value).lower())
    return UserError(f"{path or cls.__name__}: {message}{detail}", code="bad-value")


def suggest_key(cls: type[Section], location: Sequence[int | str]) -> str | None:
    """Return a hint at what an unknown key of a recipe is called here; None for one that nobody has.

    A neighbour that is nearly alike comes first, then a key of another section, then other programs' names.
    """
    words = [str(part).lower() for part in location if isinstance(part, str)]
    key = words[-1]
    if hint := NOT_HERE.get(key) or NOT_HERE.get(".".join(words[-2:])):
        return hint
    alike = similar(key, _located(cls, location[:-1])[0].model_fields, 0.85)
    sections = {name: _section(field.annotation) for name, field in cls.model_fields.items()}
    homes = [f"{name}.{key}" for name, section in sections.items() if section and key in section.model_fields]
    homes = sorted(homes, key=lambda home: not home.startswith("train.")) if key not in _ANY else []
    found = alike or " or ".join(homes) or OTHER_NAMES.get(key)
    return f"did you mean {found}?" if found else None


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every value of a tree with its key."""
    if not isinstance(value, dict | list | tuple):
        yield path, value
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(inner, f"{path}.{key}" if path else str(key))


def format_value(value: Any) -> str:
    """Return a value for a message, cut short."""
    return one_line(repr(value), 80)


def _section(annotation: Any) -> type[Section] | None:
    """Return the section that a field holds, alone, optional or in a list."""
    sections = (part for part in _parts(annotation) if isinstance(part, type) and issubclass(part, Section))
    return next(sections, None)


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield a type and those that it is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)
