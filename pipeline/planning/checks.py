"""Everything about a run that can be refused before its weights are loaded, in one place.

The dry run, `plan`, `preflight` and training itself all ask `check`, so that what one of them accepts the
others do not refuse.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from emo.common.errors import UserError, one_line
from emo.common.recipe import shown
from emo.common.text import counted
from emo.data_prep.config import TRAIN
from emo.data_prep.scores import Scores
from emo.data_prep.shards import AGAIN, TokenDataset, is_prepared, open_prepared
from emo.data_prep.tokenizer import load_tokenizer, tokenizer_facts
from emo.pipeline import identity
from emo.pipeline.config import Batch, RunConfig, solve_batch
from emo.pipeline.export import exported_tensors, unwrap, write_rest
from emo.pipeline.identity import Identity
from emo.pipeline.loss.cost_files import FILES, load_cost
from emo.pipeline.loss.objectives import Objective
from emo.pipeline.model import add_lora, check_fits, model_config, objective_parts, training_objective
from emo.pipeline.order import BatchOrder, Domain, Holding, MixedOrder, shares
from emo.pipeline.planning.ds_file import check_host, deepspeed_config, parameter_groups
from emo.pipeline.planning.host import usable_attention
from emo.pipeline.report.samples import prompt_ids

log = logging.getLogger(__name__)


class Ready(NamedTuple):
    """A recipe on so many ranks, found to be without mistakes."""

    batch: Batch
    steps: int | None  # None where they follow from data that are not prepared yet
    ds_config: dict[str, Any]
    hf_config: PretrainedConfig
    model: nn.Module  # on the meta device, with adapters
    objective: Objective
    attention: str
    data: TokenDataset | None
    validation: dict[str, TokenDataset]  # by set, in the recipe's order
    scores: list[Scores | None]  # of the training data and of each validation set
    mixtures: list[Holding]
    order: BatchOrder | MixedOrder | None  # None where the data are not prepared yet
    identity: Identity  # all that is known of it before the cost embedding is read


def check(config: RunConfig, ranks: int, local: bool) -> Ready:
    """Resolve the recipe for `ranks` ranks.

    local: training shall start on this host, so that model, data and run directory must be at hand; otherwise
    what is absent is passed over. Raises UserError for whatever would stop the run.
    """
    batch = solve_batch(config.train.global_batch_size, config.train.micro_batch_size, ranks)
    ds_config = deepspeed_config(config, batch)
    if local:
        check_host(ds_config)
        for package in config.train.report_to:
            if importlib.util.find_spec(package) is None:
                cure = f"pip install {package}, or leave it out"
                raise UserError(f"train.report_to: {package} is not installed: {cure}", code="missing-extra")
    parts = objective_parts(config)
    programs, objective = identity.programs(config), training_objective(config, parts)
    data, validation = _data(config, local)
    hf_config = model_config(config.model, online=local)
    for part in () if data is None else (data, *validation.values()):
        check_fits(hf_config, config.model, part.manifest)
    implementation = usable_attention(config.model, hf_config) if local else config.model.attn_implementation
    train, steps = config.train, config.train.max_steps
    if steps is None and data is not None:  # as many whole batches as the epochs hold
        epochs = train.num_train_epochs or 0
        steps = int(epochs * len(data) / train.global_batch_size)
        if steps == 0:
            amount = f"{counted(len(data), 'row')} x {counted(epochs, 'epoch')}"
            raise UserError(f"{amount} are less than a batch; set a smaller train.global_batch_size")
    if train.profile is not None and steps is not None and train.profile[1] > steps:
        raise UserError(f"train.profile={list(train.profile)} ends after the run's {steps} steps")
    try:
        with torch.device("meta"):  # names and shapes without weights
            model: nn.Module = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=False)
            if config.model.lora is not None:
                model = add_lora(model, config.model, train.seed)  # type: ignore[arg-type]
    except UserError:
        raise
    except Exception as error:  # whatever a configuration that cannot be makes of transformers
        where = "model.path" if config.model.path else "model.architecture"
        where += "" if config.model.lora is None else " or model.lora"
        raise UserError(f"{where}: no model can be built from it ({one_line(error, 250)})") from None
    if config.train.optimizer == "muon":
        parameter_groups(model, config.train.weight_decay, use_muon=True)
    settings: Any = hf_config.get_text_config()
    for key in ("num_attention_heads", "num_hidden_layers", "hidden_size", "vocab_size"):
        value = None
        with contextlib.suppress(Exception):  # configurations compute some, and some are for single layers
            value = getattr(settings, key)
        if type(value) is not int or value < 1:
            problem = f"model_type {hf_config.model_type} has no {key} of all layers; take a transformer"
            raise UserError(problem, code="architecture")
    path = config.model.path
    if path is not None and (local or Path(path).exists()):
        with contextlib.suppress(OSError):  # generation defaults, if any, are carried on by the export
            try:
                revision = config.model.revision or "main"
                unwrap(model).generation_config = GenerationConfig.from_pretrained(path, revision=revision)
            except ValueError as error:
                problem = f"model.path={path}: its generation_config.json is wrong: {one_line(error)}"
                raise UserError(problem) from None
    rehearse(model, config)
    _check_cost(config, hf_config.get_text_config().vocab_size, local)
    scores: list[Scores | None] = []
    facts = identity.of_objective(parts, programs, batch) | identity.of_deepspeed(ds_config)
    if local:
        facts |= identity.of_model(hf_config, model)
    if data is not None:
        prompt_ids(config)
        facts |= identity.of_data(data, validation)
        if local:
            name = config.objective.scores  # of the column that the objective reads beside the tokens
            scores = [None if name is None else Scores(rows, name) for rows in (data, *validation.values())]
            facts |= identity.of_scores(scores)
        identity.compare(config, facts)
    elif config.train.mixture is not None:  # a recipe knows its domains, though not what they hold
        shares(config.train.mixture, [Domain(name, 1, 1) for name in config.data.domains_of(TRAIN)])
    history = [Holding(0, config.train.mixture)] if data is None else identity.mixtures(config)
    order: BatchOrder | MixedOrder | None = None
    if data is not None and steps is not None:
        order = BatchOrder(len(data), config.train.global_batch_size, config.train.seed)
        if history[-1].mixture is not None:
            rows = (data.domain, data.valid, data.domains)
            order = MixedOrder(*rows, config.train.global_batch_size, config.train.seed, history)
            order.taken(steps)  # a mixture that ends before the last step is refused
    resolved = (batch, steps, ds_config, hf_config, model, objective, implementation)
    return Ready(*resolved, data, validation, scores, history, order, facts)


def _data(config: RunConfig, required: bool) -> tuple[TokenDataset | None, dict[str, TokenDataset]]:
    """Return the training data, None where they are not there and need not be; and the validation sets."""
    if not required and not is_prepared(config.data):
        return None, {}
    data, validation = open_prepared(config.data)
    for rows in (data, *validation.values()):  # the tokenizer beside them, which is exported, is theirs
        directory = rows.directory.parent / "tokenizer"
        try:
            fingerprint = tokenizer_facts(directory).fingerprint
        except UserError:
            raise
        except Exception as error:  # `tokenizers` raises plain Exception for a broken file
            raise UserError(f"{directory} cannot be read ({one_line(error)}); {AGAIN} --force") from None
        if fingerprint != rows.manifest.tokenizer_fingerprint:
            problem = f"{directory} is not what the rows beside it were prepared with; {AGAIN} --force"
            raise UserError(problem, code="changed-tokenizer")
    if not data.valid.sum():
        raise UserError(f"{data.directory} holds nothing to learn from; check data.sources")
    return data, validation


def _check_cost(config: RunConfig, vocab_size: int, local: bool) -> None:
    """Read the cost embedding once, where it exists already and is at hand."""
    source, path = config.objective.cost, config.model.path
    if source in ("constant", "numbers"):
        return
    if source in ("pretrained", "permuted"):
        if path is None:
            return  # the head of weights that the run itself is going to write
        source = path
    is_file = Path(source).suffix in FILES
    is_path = is_file or source.startswith(("/", ".", "~")) or source.count("/") > 1
    if is_path and source != path and not Path(source).exists() and (local or is_file):
        raise UserError(
            f"objective.cost={source} does not exist; give pretrained, live, constant, permuted or numbers, "
            f"a model's directory or hub id, or a file that holds one matrix ({', '.join(FILES)})"
        )
    if source == "live" or not (local or is_file or Path(source).exists()):
        return
    load_cost(source, vocab_size, revision=config.model.revision if source == path else None)
    if is_file or not local or source == path:
        return
    # Another model's costs must be of the same tokens; special ones may differ, for training renames them.
    tokenizer = load_tokenizer(str(config.data.dir / "tokenizer"))
    try:
        other = load_tokenizer(source)
    except UserError:
        log.warning(
            "objective.cost=%s carries no tokenizer: cannot check that its costs fit the data", source
        )
        return
    special = {*tokenizer.added_tokens_decoder, *other.added_tokens_decoder}
    names = {token: name for name, token in other.get_vocab().items()}
    for name, token in tokenizer.get_vocab().items():
        if token not in special and names.get(token) != name:
            problem = (
                f"objective.cost={source} has another tokenizer than the data: its token {token} is "
                f"{shown(names.get(token))}, not {shown(name)}; set objective.cost=pretrained"
            )
            raise UserError(problem, code="cost-tokenizer")


def rehearse(model: nn.Module, config: RunConfig) -> None:
    """Go through the export of `model` without its weights: names, shapes, adapters, configuration, files."""
    base = unwrap(model)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        try:
            write_rest(base, config, directory, {})
            settings = AutoConfig.from_pretrained(directory)
            with torch.device("meta"):
                plain = AutoModelForCausalLM.from_config(settings)
        except (OSError, ValueError, KeyError) as error:
            problem = f"its configuration cannot be written and read back ({one_line(error, 200)})"
            raise UserError(f"the trained model could not be exported: {problem}") from None
    names: dict[int, list[str]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name.replace(".base_layer.", "."))
    actual: dict[str, list[int] | str] = {}
    for tensor in exported_tensors(model):
        sharing = names[id(tensor.base)]
        if tensor.adapters and len(sharing) > 1:  # merged into one, they would change the other as well
            problem = f"{' and '.join(sharing)} are one tensor, and adapters on one cannot be exported"
            raise UserError(f"model.lora.targets: {problem}; leave it out of the targets")
        whole = [torch.empty(getattr(p, "ds_shape", p.shape), device="meta") for p in tensor.parts]
        try:
            actual[tensor.name] = list(tensor.merged(*whole).shape)
        except RuntimeError as error:  # its parts do not fit together
            actual[tensor.name] = one_line(error, 100)
    expected = {name: list(p.shape) for name, p in plain.named_parameters()}
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            shapes = f"{actual.get(name, 'nothing')}, not {expected.get(name, 'nothing')}"
            raise UserError(f"the trained model could not be exported: {name} would be {shapes}")
