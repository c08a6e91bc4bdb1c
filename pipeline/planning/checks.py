"""All checks of a run that can be made before its weights are loaded.

Training and `preflight` call `check_run`. `plan` and the dry run call `check_plan`. They share their checks,
so that what one of them accepts the other does not reject.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from emo.common.config.recipe import format_value
from emo.common.errors import UserError, one_line
from emo.common.io.weights import FILES as WEIGHTS
from emo.common.text import counted
from emo.data_prep.config import TRAIN
from emo.data_prep.encoding.tokenizer import load_tokenizer, text_ids, tokenizer_facts
from emo.data_prep.shards.format import AGAIN, TokenDataset, is_prepared, open_prepared
from emo.data_prep.shards.scores import Scores

from ..batches.config import Batch, count_steps, solve_batch
from ..batches.order import BatchOrder, Domain, MixedOrder, MixtureStart, domain_shares
from ..checkpoint import identity
from ..checkpoint.identity import Identity
from ..config import RunConfig, TrainConfig
from ..engine.activations import tile_mlps
from ..engine.device.devices import check_gpus, usable_attention
from ..engine.ds_config import EIGHT_BIT, DsConfig, check_deepspeed_host, deepspeed_config, parameter_groups
from ..engine.schedule import check_branch_steps
from ..engine.sequence import check_sequence_parallel
from ..loss.cost_files import FILES, load_cost
from ..loss.objectives import Objective
from ..model import kernels
from ..model.adapters import add_lora, check_adapter
from ..model.build import check_context, check_fits, check_shape, model_config
from ..model.export import exported_tensors, sample_rows, unwrap, write_metadata
from ..model.objective.build import objective_parts, training_objective
from ..model.objective.config import COSTS
from ..model.readers import check_exported_tokenizer
from ..model.rope import check_rope
from ..model.teacher import check_teacher, check_teacher_storage

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe resolved for a number of ranks, without its data."""

    batch: Batch
    ds_config: DsConfig
    objective: Objective
    hf_config: PretrainedConfig
    model: nn.Module  # on the meta device, with adapters
    attention: str


@dataclass(frozen=True)
class PlannedRun(ResolvedRecipe):
    """A recipe that can be planned. Its data may not be prepared yet."""

    data: TokenDataset | None
    steps: int | None  # None if they depend on data that are not prepared
    order: BatchOrder | MixedOrder | None


@dataclass(frozen=True)
class TrainingRun(ResolvedRecipe):
    """A recipe that can be trained, with its data."""

    data: TokenDataset
    steps: int
    order: BatchOrder | MixedOrder
    validation: dict[str, TokenDataset]  # by set, in the recipe's order
    scores: list[Scores | None]  # of the training data, then of each validation set
    mixtures: list[MixtureStart]
    prompts: list[list[int]]  # token ids of train.sample_prompts
    identity: Identity  # without the cost embedding and the teacher, which are not read yet

    def with_mixtures(self, config: RunConfig, mixtures: list[MixtureStart]) -> TrainingRun:
        """Return the run with another history of mixtures, and the order that follows from it."""
        if mixtures == self.mixtures:
            return self
        order = create_order(config.train, self.data, self.steps, mixtures)
        return replace(self, mixtures=mixtures, order=order)


def check_run(config: RunConfig, ranks: int) -> TrainingRun:
    """Resolve the recipe for training on this host, as one of `ranks` ranks.

    Raises UserError for whatever would stop the run, also if model or data are not there.
    """
    batch, ds_config = _check_settings(config, ranks, here=True)
    parts = objective_parts(config)
    objective = training_objective(config, parts)
    data, validation = _open_data(config)
    sets = [data, *validation.values()]
    resolved = _resolve_model(config, batch, ds_config, objective, sets)
    steps = count_steps(config.train, len(data))
    _check_steps(config.train, steps, ranks)
    if config.model.kernels is not None:
        kernels.use_liger(unwrap(resolved.model))
    rehearse_export(resolved.model, config)
    vocab_size = resolved.hf_config.get_text_config().vocab_size
    _check_cost(config, vocab_size, local=True)  # validation measures objectives without costs by them, too
    prompts = encode_sample_prompts(config)
    name = config.objective.scores_name
    scores = [None if name is None else Scores(rows, name) for rows in sets]
    _check_scores(config, scores)
    model = (resolved.hf_config, resolved.model)
    facts = identity.identify(parts, config, batch, ds_config, model, data, validation, scores)
    identity.check_run_dir(config, facts)
    mixtures = identity.mixture_history(config)
    order = create_order(config.train, data, steps, mixtures)
    return TrainingRun(
        **vars(resolved),
        data=data,
        steps=steps,
        order=order,
        validation=validation,
        scores=scores,
        mixtures=mixtures,
        prompts=prompts,
        identity=facts,
    )


def check_plan(config: RunConfig, ranks: int, here: bool = False, gpus: bool = False) -> PlannedRun:
    """Resolve the recipe for a plan. Missing models and missing data are skipped.

    Raises UserError for whatever would stop the run.

    Args:
        config: The recipe.
        ranks: Number of ranks.
        here: The run would start on this host, which must have what training needs.
        gpus: It would run on GPUs of other hosts.
    """
    if here:  # a run checks its GPUs before the ranks meet
        check_gpus()
    batch, ds_config = _check_settings(config, ranks, here)
    parts = objective_parts(config)
    objective = training_objective(config, parts)
    train = config.train
    data, validation = _open_data(config) if is_prepared(config.data) else (None, {})
    sets = [] if data is None else [data, *validation.values()]
    others = None if here else gpus
    resolved = _resolve_model(config, batch, ds_config, objective, sets, local=False, gpus=others)
    steps = train.max_steps if data is None else count_steps(train, len(data))
    _check_steps(train, steps, ranks)
    rehearse_export(resolved.model, config)
    if here or objective.needs_cost:
        _check_cost(config, resolved.hf_config.get_text_config().vocab_size, local=False)
    if data is not None:
        encode_sample_prompts(config)
    elif train.mixture is not None:  # a recipe knows its domains, though not how much data they hold
        domain_shares(train.mixture, [Domain(name, 1, 1) for name in config.data.domains_of(TRAIN)])
    facts = identity.identify(parts, config, batch, ds_config, None, data, validation, [])
    order: BatchOrder | MixedOrder | None = None
    if data is not None:
        identity.check_run_dir(config, facts)
        mixtures = identity.mixture_history(config)
        if steps is not None:
            order = create_order(train, data, steps, mixtures)
    return PlannedRun(**vars(resolved), data=data, steps=steps, order=order)


def resolve_deepspeed(config: RunConfig, batch: Batch) -> DsConfig:
    """Return the DeepSpeed configuration. Raises UserError if a teacher or the recipe excludes it."""
    ds_config = deepspeed_config(config, batch)
    check_teacher_storage(config, ds_config)
    return ds_config


def _check_settings(config: RunConfig, ranks: int, here: bool) -> tuple[Batch, DsConfig]:
    """Return the batch and the DeepSpeed configuration. If `here`, also check this host."""
    train = config.train
    batch = solve_batch(train.global_batch_size, train.micro_batch_size, ranks, train.sequence_parallel)
    ds_config = resolve_deepspeed(config, batch)
    if here:
        check_deepspeed_host(ds_config)
        for package in train.report_to:  # each has the name of its package
            if importlib.util.find_spec(package) is None:
                cure = f"pip install {package}, or leave it out"
                raise UserError(f"train.report_to: {package} is not installed: {cure}", code="missing-extra")
        if config.model.kernels is not None:
            kernels.check_liger_host()
        nf4 = config.model.linear_dtype is not None
        setting = "model.lora.base_dtype" if nf4 else f"train.optimizer={config.train.optimizer}"
        if (nf4 or config.train.optimizer in EIGHT_BIT) and importlib.util.find_spec("bitsandbytes") is None:
            cure = f"Run pip install 'emo-pipeline[bnb]', or remove {setting}"
            raise UserError(f"{setting} needs bitsandbytes. {cure}", code="missing-extra")
    return batch, ds_config


def _resolve_model(
    config: RunConfig,
    batch: Batch,
    ds_config: DsConfig,
    objective: Objective,
    sets: Sequence[TokenDataset],
    local: bool = True,
    gpus: bool | None = None,
) -> ResolvedRecipe:
    """Return the recipe with its model.

    Args:
        config: The configuration of the run.
        batch: Rows of a step.
        ds_config: The resolved DeepSpeed configuration.
        objective: The objective.
        sets: The data sets that the model must be able to read, the training data first.
        local: Whether the model and the teacher must be available.
        gpus: For a run on other hosts, whether they have GPUs. None if the run is on this host.
    """
    hf_config = model_config(config.model, online=local)
    check_context(hf_config, config.data.sequence_len)
    check_shape(hf_config)
    check_sequence_parallel(config, hf_config)
    for rows in sets:
        check_fits(hf_config, config.model, rows.manifest)
    attention = usable_attention(config.model, hf_config, config.train.sequence_parallel > 1, gpus)
    check_teacher(config, hf_config, [rows.manifest for rows in sets[:1]], local, gpus)
    model = _build_meta_model(config, hf_config)
    _check_nvme(ds_config, model, batch.replicas * batch.sequence)
    path = config.model.path
    if path is not None and (local or Path(path).exists()):
        with contextlib.suppress(OSError):  # the export keeps generation defaults, if there are any
            revision = config.model.revision or "main"
            unwrap(model).generation_config = GenerationConfig.from_pretrained(path, revision=revision)
    return ResolvedRecipe(batch, ds_config, objective, hf_config, model, attention)


def _check_steps(train: TrainConfig, steps: int | None, ranks: int) -> None:
    """Reject a decay after the last step, and steps and ranks to profile that the run does not have."""
    if steps is not None:
        check_branch_steps(train, steps)
    if train.profile is None:
        return
    if steps is not None and train.profile.steps[1] > steps:
        raise UserError(
            f"train.profile.steps={list(train.profile.steps)} ends after the run's {steps} steps",
            code="profile",
        )
    if max(train.profile.ranks) >= ranks:
        chosen = f"train.profile.ranks={train.profile.ranks}"
        raise UserError(
            f"{chosen} names more than the run's {counted(ranks, 'rank')}, which count from 0", code="profile"
        )


def create_order(
    train: TrainConfig, data: TokenDataset, steps: int, history: list[MixtureStart]
) -> BatchOrder | MixedOrder:
    """Return the order of the rows. Raises UserError if a mixture runs out of rows before the last step."""
    if history[-1].mixture is None:
        return BatchOrder(len(data), train.global_batch_size, train.seed)
    columns = (data.domain, data.valid, data.domains)
    order = MixedOrder(*columns, train.global_batch_size, train.seed, history)
    order.count_rows(steps)
    return order


def _open_data(config: RunConfig) -> tuple[TokenDataset, dict[str, TokenDataset]]:
    """Return the training data and the validation sets, and check their tokenizer."""
    data, validation = open_prepared(config.data)
    for rows in (data, *validation.values()):  # the export contains the tokenizer next to the rows
        directory = rows.directory.parent / "tokenizer"
        if tokenizer_facts(directory).fingerprint != rows.manifest.tokenizer_fingerprint:
            problem = f"{directory} is not the tokenizer that the rows next to it were prepared with"
            raise UserError(f"{problem}; {AGAIN} --force", code="changed-tokenizer")
    if config.objective.on_policy is not None and data.weighted:
        problem = f"{data.directory} has loss weights, and objective.on_policy trains on other answers"
        raise UserError(f"{problem}. Remove the weights or objective.on_policy", code="weighted-prompts")
    if not data.valid.sum():
        raise UserError(f"{data.directory} has no supervised tokens. Check data.sources", code="no-labels")
    return data, validation


def encode_sample_prompts(config: RunConfig) -> list[list[int]]:
    """Return the token ids of train.sample_prompts, with the first tokens of the data's documents.

    Raises UserError for a prompt that is empty, or too long for data.sequence_len with its continuation.
    """
    train = config.train
    limit = config.data.sequence_len
    if not train.sample_prompts:
        return []
    tokenizer = load_tokenizer(config.data.dir / "tokenizer")
    prompts = [text_ids(tokenizer, prompt) for prompt in train.sample_prompts]
    for number, ids in enumerate(prompts):
        if not ids or len(ids) + train.sample_tokens > limit:
            raise UserError(
                f"train.sample_prompts[{number}] has {len(ids)} tokens, but needs at least one, and with "
                f"train.sample_tokens={train.sample_tokens} at most data.sequence_len={limit}",
                code="sample-prompts",
            )
    return prompts


def _check_scores(config: RunConfig, scores: list[Scores | None]) -> None:
    """Reject scores of the labels if the objective needs a teacher's most likely tokens, and the reverse."""
    needs_top_k = config.objective.scores is None
    for stored in scores:
        if stored is not None and (stored.top_k is not None) != needs_top_k:
            kinds = "a teacher's most likely tokens", "the tokens of the data"
            has, needs = reversed(kinds) if needs_top_k else kinds
            cure = f"run emo score {'with' if needs_top_k else 'without'} --top_k and another --name"
            problem = f"the scores {stored.files[0].parent} are of {has}, but the objective needs {needs}"
            raise UserError(f"{problem}; {cure}", code="scores-kind")


def _build_meta_model(config: RunConfig, hf_config: PretrainedConfig) -> nn.Module:
    """Build the model with its adapters on the meta device, which stores only names and shapes."""
    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=False)
            check_rope(model, config.model.rope)
            if config.model.lora is not None:
                model = add_lora(model, config.model, config.train.seed)
                if config.model.lora.path is not None:
                    check_adapter(model, config.model.lora)
    except UserError:
        raise
    except Exception as error:  # transformers raises anything for an impossible configuration
        where = "model.path" if config.model.path else "model.architecture"
        where += "" if config.model.lora is None else " or model.lora"
        raise UserError(
            f"{where} describes no model that can be built ({one_line(error, 250)})", code="architecture"
        ) from None
    if config.model.tiled_mlp:
        tile_mlps(model, hf_config.get_text_config().hidden_size)
    if config.train.optimizer == "muon":
        parameter_groups(model, config.train.weight_decay, use_muon=True)
    return model


def _check_nvme(ds_config: DsConfig, model: nn.Module, ranks: int) -> None:
    """Reject weights that would be only on NVMe, because DeepSpeed cannot load their checkpoints."""
    offload = ds_config["zero_optimization"].get("offload_param") or {}
    count = sum(-(-p.numel() // ranks) for p in model.parameters())
    limit = int(offload.get("max_in_cpu", 1_000_000_000))
    if offload.get("device") == "nvme" and count > limit:
        problem = f"each rank holds {count:,} weights, and DeepSpeed cannot resume if more than {limit:,}"
        cure = f"Set offload_param.max_in_cpu={count} in the DeepSpeed file, or use more ranks"
        raise UserError(f"{problem} (offload_param.max_in_cpu) are on NVMe. {cure}", code="ds-combination")


def _check_cost(config: RunConfig, vocab_size: int, local: bool) -> None:
    """Read the cost embedding once, if it exists already. If `local`, it must be available."""
    source = config.objective.cost
    path = config.model.path
    if source in ("constant", "numbers", "live") or (source in ("pretrained", "permuted") and path is None):
        return  # costs without a file, or from weights that the run will create
    if path is not None and source in ("pretrained", "permuted", path):
        has_weights = any(file for name in WEIGHTS for file in Path(path).glob(f"*{Path(name).suffix}"))
        if local or has_weights:
            load_cost(path, vocab_size, revision=config.model.revision)
        return
    is_file = Path(source).suffix in FILES
    if not Path(source).exists() and (is_file or (local and (source[0] in "/.~" or source.count("/") > 1))):
        raise UserError(
            f"objective.cost={source} does not exist. Set one of {', '.join(COSTS)}, a directory or "
            f"Hub id of a model, or a file with one matrix ({', '.join(FILES)})",
            code="cost-missing",
        )
    if not (local or is_file or Path(source).exists()):
        return
    load_cost(source, vocab_size)
    if local and not is_file:
        _check_cost_tokenizer(config, source)


def _check_cost_tokenizer(config: RunConfig, source: str) -> None:
    """Compare the tokens of another model's costs with the data's. Special tokens may have other names."""
    tokenizer = load_tokenizer(str(config.data.dir / "tokenizer"))
    try:
        other = load_tokenizer(source)
    except UserError:
        log.warning("objective.cost=%s has no tokenizer, cannot check that its costs fit the data", source)
        return
    special = {*tokenizer.added_tokens_decoder, *other.added_tokens_decoder}
    names = {token: name for name, token in other.get_vocab().items()}
    for name, token in tokenizer.get_vocab().items():
        if token not in special and names.get(token) != name:
            problem = f"objective.cost={source} has another tokenizer than the data"
            difference = f"its token {token} is {format_value(names.get(token))}, not {format_value(name)}"
            cure = "set objective.cost=pretrained"
            raise UserError(f"{problem} ({difference}); {cure}", code="cost-tokenizer")


def rehearse_export(model: nn.Module, config: RunConfig) -> None:
    """Export `model` without its weights. Raises UserError if the export could not be loaded."""
    expected = _export_and_reload(unwrap(model), config)
    actual = _exported_shapes(model)
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            shapes = f"{actual.get(name, 'nothing')}, not {expected.get(name, 'nothing')}"
            raise UserError(
                f"the trained model could not be exported: {name} would be {shapes}", code="export"
            )


def _export_and_reload(base: PreTrainedModel, config: RunConfig) -> dict[str, list[int]]:
    """Write the files of an export except weights. Return the shapes in the model that they describe."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        try:
            write_metadata(base, config, directory, {})
            if (directory / "tokenizer.json").is_file():
                check_exported_tokenizer(directory, sample_rows(config))
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
        except (OSError, ValueError, KeyError) as error:
            problem = f"its configuration cannot be written and read back ({one_line(error, 200)})"
            raise UserError(f"the trained model could not be exported: {problem}", code="export") from None
    return {name: list(p.shape) for name, p in model.named_parameters()}


def _exported_shapes(model: nn.Module) -> dict[str, list[int]]:
    """Return the shapes of the tensors in an export of `model`, with its adapters merged."""
    names: dict[int, list[str]] = {}
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name.replace(".base_layer.", "."))
    shapes: dict[str, list[int]] = {}
    for tensor in exported_tensors(model):
        sharing = names[id(tensor.parts[0])]
        if len(tensor.parts) > 1 and len(sharing) > 1:  # adapters of one name would change the other
            problem = f"{' and '.join(sharing)} are one tensor, and adapters on one cannot be exported"
            cure = "Remove it from the targets. model.lora.train_embeddings=true trains it in full"
            raise UserError(f"model.lora.targets: {problem}. {cure}", code="lora-targets")
        parts = [torch.empty(getattr(p, "ds_shape", p.shape), device="meta") for p in tensor.parts]
        shapes[tensor.name] = list(tensor.merged(*parts).shape)
    return shapes
