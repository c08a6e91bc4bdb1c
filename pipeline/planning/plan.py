"""What `emo plan` prints before a cluster is booked: what a run takes, and the fastest settings for it.

`print_plan` resolves everything that can be resolved without training. Given GPUs it adds, from `footprint`,
memory by part, the largest micro-batch that fits, step time, hours, and what to change if it does not fit.
`print_best` searches the settings under which a recipe trains fastest. Only what surely fits is considered:
memory as predicted, with the prediction's error on top. What changes what is learned (batch, rows, objective,
optimizer) stays as the recipe has it: the choices differ in speed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from emo.common.cli.progress import printer
from emo.common.config.recipe import apply_override
from emo.common.errors import FailureError, UserError
from emo.common.io.files import part_file
from emo.common.provenance import shipped
from emo.common.text import counted

from ..batches.config import Batch, solve_batch
from ..batches.order import REPEATED, MixedOrder, Portion
from ..config import RunConfig, load_config
from ..engine.devices import on_gpu
from ..engine.ds_config import deepspeed_config, zero_stage
from ..engine.hardware import GB, GIB, NODE, Cluster, basis
from ..loss.objectives import Objective
from ..model.build import model_config
from ..model.export import unwrap
from ..model.objective_config import BASE, ends
from ..model.teacher import KEY, teacher_config
from . import footprint
from .checks import PlannedRun, TrainingRun, check_plan
from .footprint import Memory, Setup, Sizes, Time

log = logging.getLogger(__name__)

PER_MILLIONS = 100  # tokens that hours are given for where the data's size is not known
# Keys of configurations: experts, those that a token is routed to, and the width of the feed-forward part.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
INNER = ("intermediate_size", "ffn_dim", "n_inner")
TRUST = (
    f"states are known, other memory is within {footprint.MEMORY_ERROR:.0%} of measured runs, time within "
    f"{footprint.TIME_ERROR:.0%} of published runs (FSDP, five of ZeRO-1) that it was not fitted to; what "
    "the host takes is an estimate"
)
FILES = ("zero1.json", "zero2.json", "zero3.json", "zero3_hpz.json", "zero3_offload.json")  # of ds_configs/
ALIKE = 0.01  # speeds this close are equal, and the choice that needs less memory is better


def sizes_of(model: nn.Module, hf_config: PretrainedConfig) -> Sizes:
    """Return a model in numbers."""
    base, parameters, text = unwrap(model), list(model.parameters()), hf_config.get_text_config()
    outside: list[Any] = [base.get_output_embeddings(), base.get_input_embeddings()]
    total = sum(p.numel() for p in parameters)

    def first(names: tuple[str, ...]) -> Any:
        return next((value for name in names if (value := getattr(text, name, None))), None)

    experts, chosen = first(EXPERTS), first(CHOSEN)
    idle = expert_width = 0
    if isinstance(experts, int) and chosen:
        # Shared experts, which every token passes through, are called otherwise than `experts` everywhere.
        routed = sum(
            parameter.numel()
            for name, parameter in model.named_parameters()
            if "experts" in name.split(".") or (parameter.dim() == 3 and parameter.shape[0] == experts)
        )
        most = max(chosen) if isinstance(chosen, list) else chosen  # a list is by layer
        active = routed * min(most, experts) // experts
        idle, expert_width = routed - active, active // (3 * text.hidden_size * text.num_hidden_layers)
    key_values = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    per_head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Sizes(
        parameters=total,
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        body=total - sum({id(m.weight): m.weight.numel() for m in outside}.values()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        inner=max(expert_width, int(first(INNER) or 4 * text.hidden_size)),
        key_values=key_values * per_head,
        gated=hasattr(text, "intermediate_size"),
        vocabulary=text.vocab_size,
        tensors=len(parameters),
        idle=idle,
    )


def setup_of(
    config: RunConfig,
    batch: Batch,
    ds_config: dict[str, Any],
    objective: Objective,
    attended: float | None = None,
) -> Setup:
    """Return how the recipe trains, for the footprint; `attended`: see Setup."""
    zero = ds_config.get("zero_optimization", {})
    half = config.model.dtype == "bfloat16"
    reduced, on_policy = ds_config.get("communication_data_type"), config.objective.on_policy
    # With device none, which is also the default, a section does not offload.
    offloaded = [(zero.get(f"offload_{part}") or {}).get("device", "none") for part in ("optimizer", "param")]
    return Setup(
        ranks=batch.ranks,
        stage=zero_stage(ds_config),
        micro=batch.micro,
        block=config.data.sequence_len,
        accumulation=batch.accumulation,
        bf16=half,
        checkpointing=config.model.activation_checkpointing,
        offload_optimizer=offloaded[0] != "none",
        offload_parameters=offloaded[1] != "none",
        cost=objective.needs_cost,
        cache_mb=config.objective.cost_cache_mb,
        live=float(zero.get("stage3_max_live_parameters", 1e9)),
        bucket=float(zero.get("reduce_bucket_size", 5e8)),
        compiled=config.model.compile,
        kernels=config.model.kernels is not None,
        # On GPUs `auto` takes an attention that knows packed rows; those compute in half precision only.
        masked=not half or config.model.attn_implementation in ("sdpa", "eager"),
        hpz=int(zero.get("zero_hpz_partition_size", 1)),
        reduced={None: 2 if half else 4, "fp32": 4}.get(reduced, 2),
        all_reduced=zero.get("use_multi_rank_bucket_allreduce", True) or not zero.get("reduce_scatter", True),
        attended=attended,
        written=0.0 if on_policy is None else max(ends(on_policy.share)) * on_policy.tokens,
        **_teacher_of(config),
    )


def _teacher_of(config: RunConfig) -> dict[str, Any]:
    """Return what a footprint needs to know of a live teacher; nothing where there is none."""
    if not config.objective.lives:
        return {}
    own = teacher_config(config)  # None: this model, without its adapters
    chosen = config.model if own is None or config.objective.compared == BASE else own
    try:
        settings = model_config(chosen, online=False, key=KEY)
    except UserError as error:
        log.warning("the plan leaves the teacher out: %s", error)
        return {}
    with torch.device("meta"):
        sizes = sizes_of(AutoModelForCausalLM.from_config(settings, trust_remote_code=False), settings)
    width = 2 if chosen.dtype == "bfloat16" else 4
    return {"teacher": sizes, "copied": own is not None, "teacher_width": width}


def attention_span(
    config: RunConfig, ready: PlannedRun, document_tokens: int | None
) -> tuple[float | None, str]:
    """Return how many tokens a token attends to on average, and what that number rests on.

    document_tokens: mean length of the documents, instead of that in the prepared data.
    """
    block = config.data.sequence_len
    if document_tokens is not None:
        attended = min(document_tokens, block) / 2
        return attended, f"of {document_tokens:,} tokens: a token attends to {attended:,.0f} on average"
    if ready.data is not None:
        attended = ready.data.mean_context()
        return attended, f"as prepared: a token attends to {attended:,.0f} of {block:,} on average"
    assumed = f"assumed to fill rows of {block:,} tokens"
    return None, f"{assumed}; prepare the data, or give --document_tokens N, for shorter ones"


def print_plan(
    config: RunConfig,
    ranks: int,
    cluster: Cluster | None = None,
    here: bool = False,
    document_tokens: int | None = None,
) -> bool:
    """Resolve everything that can be resolved without training and print it; return whether it fits.

    here: training would run on this host, which is checked as training does. document_tokens: mean length of
    the documents.
    """
    ready = check_plan(config, ranks, here=here)
    batch, sizes = ready.batch, sizes_of(ready.model, ready.hf_config)
    attended, span = attention_span(config, ready, document_tokens)
    setup = setup_of(config, batch, ready.ds_config, ready.objective, attended)
    memory = footprint.memory(sizes, setup)
    table = Table("what", "value", title=str(config.output_dir), show_header=False)
    table.add_row("model", config.model.path or f"new {(config.model.architecture or {})['model_type']}")
    active = f", {sizes.parameters - sizes.idle:,} active for a token" if sizes.idle else ""
    counts = f"{sizes.parameters:,} ({sizes.trainable:,} trainable{active})"
    table.add_row("parameters", f"{counts}, {config.model.dtype}")
    table.add_row("attention", ready.attention)
    table.add_row("objective", f"{config.objective.label} {config.objective.params or ''}".strip())
    table.add_row("batch", str(batch))
    table.add_row("tokens per step", f"at most {batch.batch * config.data.sequence_len:,}")
    steps, epochs = ready.steps, config.train.num_train_epochs
    passes = "" if epochs is None else counted(epochs, "epoch")
    if steps is None:
        table.add_row("steps", f"{passes}; their steps are known once the data are prepared")
    else:
        rows = ""
        if epochs is not None and ready.data:
            beyond = steps * batch.batch - round(epochs * len(ready.data))
            rest = f"{counted(abs(beyond), 'row')}{' of the next' if beyond > 0 else ''}"
            passes += f" {'and' if beyond > 0 else 'without'} {rest}" * (beyond != 0)
            rows = f" ({counted(len(ready.data), 'row')}, {passes})"
        table.add_row("steps", f"{steps:,}{rows}")
    for row in domain_rows(config, ready):
        table.add_row(*row)
    offloads = {"optimizer": setup.offload_optimizer, "weights": setup.offload_parameters}
    names = [name for name, offloaded in offloads.items() if offloaded]
    note = f", {' and '.join(names)} in host memory" if names else ""
    table.add_row("ZeRO", f"stage {setup.stage}{note}")
    if setup.teacher is not None:
        held = (
            f"{setup.teacher.parameters:,} parameters" if setup.copied else "this model without its adapters"
        )
        table.add_row("teacher", held)
    states = {"weights": memory.parameters, "gradients": memory.gradients, "optimizer": memory.optimizer}
    table.add_row("states per rank", memory_line(states, 2))
    staged = sizes.trainable * (12 + setup.width)  # float32 weights, two moments, weights
    table.add_row("saving", f"{staged / GIB:,.2f} GiB of host memory over all ranks, kept between saves")
    if cluster is not None:
        table.add_section()
        table.add_row("on", f"{cluster.gpus} x {cluster.kind}, {cluster.room / GIB:.1f} GiB of each usable")
        table.add_row("memory per GPU", memory_line(memory.peak, 1))
        table.add_row("fits", fit(sizes, setup, cluster))
        table.add_row("documents", span)
        time = footprint.step_time(sizes, setup, cluster.gpu, cluster.network_gb)
        tokens = setup.tokens * setup.accumulation * setup.ranks / time.total
        table.add_row("step", sum_line(time._asdict(), 2, "s"))
        used = footprint.utilisation(sizes, setup, time.total, cluster.gpu)
        table.add_row("speed", f"{tokens:,.0f} tokens/s, {tokens / setup.ranks:,.0f} per GPU, MFU {used:.0%}")
        if steps is None:
            hours = PER_MILLIONS * 1e6 / tokens / 3600 * cluster.gpus
            table.add_row("run", f"{hours:,.1f} GPU-hours per {PER_MILLIONS} million tokens, without saving")
        else:
            hours = steps * time.total / 3600
            table.add_row("run", f"{hours:,.1f} hours, {hours * cluster.gpus:,.1f} GPU-hours, without saving")
        if config.train.save_steps:
            table.add_row("saves", saves(config, sizes, setup, time.total))
        table.add_row("trust", TRUST)
    printer().print(table)
    for warning in remarks(config, ready, on_cpu=cluster is None and not on_gpu()):
        log.warning(warning)
    return cluster is None or memory.total <= cluster.room


def saves(config: RunConfig, sizes: Sizes, setup: Setup, step: float) -> str:
    """Return in words how often checkpoints are written, how fast that must be, and how long steps wait.

    step: its seconds. Steps wait while states go to host memory; they are written beside training.
    """
    state = sizes.trainable * (12 + setup.width)
    written = state + sizes.parameters * setup.width * config.train.export_checkpoints
    seconds = config.train.save_steps * step
    waiting = state / setup.ranks / footprint.HOST_LINK
    return (
        f"{written / GB:,.0f} GB every {seconds / 60:,.1f} minutes, {written / GB / seconds:.2g} GB/s; "
        f"steps wait {waiting / (waiting + seconds):.1%} of the time"
    )


def domain_rows(config: RunConfig, ready: PlannedRun | TrainingRun) -> list[tuple[str, str]]:
    """Return each domain's part of the run as table rows; none where there is one domain and no mixture."""
    mixture, data, order = config.train.mixture, ready.data, ready.order
    rows = [] if mixture is None else [("mixture", mixture.label)]
    if data is None or ready.steps is None or order is None or (mixture is None and len(data.domains) < 2):
        return rows
    if isinstance(order, MixedOrder):
        portions = order.portions(ready.steps)
    else:
        epochs, whole = ready.steps * ready.batch.batch / len(data), data.manifest.valid_tokens
        sizes = ((domain.name, domain.valid_tokens) for domain in data.manifest.domains)
        portions = [Portion(name, (n / whole, n / whole), 0, epochs, n * epochs) for name, n in sizes]
    for portion in portions:
        first, last = (f"{share:.1%}" for share in portion.shares)
        share = f"{first if first == last else f'{first} to {last}'} of {mixture.by if mixture else 'tokens'}"
        often = f", more than {REPEATED}" if mixture and portion.epochs > REPEATED else ""
        passes = counted(float(f"{portion.epochs:.2g}"), "epoch")
        rows.append((f"domain {portion.name}", f"{share}; {portion.tokens:,.0f} tokens, {passes}{often}"))
    return rows


def remarks(config: RunConfig, ready: PlannedRun | TrainingRun, on_cpu: bool) -> list[str]:
    """Return warnings on a run that can be trained, and perhaps not as its user thinks."""
    train, data, steps, warnings = config.train, ready.data, ready.steps, []
    for portion in ready.order.portions(steps) if isinstance(ready.order, MixedOrder) and steps else ():
        if portion.epochs > REPEATED:
            cure = "the same text then teaches less: lower its share, or set train.mixture.max_epochs"
            warnings.append(f"domain {portion.name} is gone through {portion.epochs:.3g} times; {cure}")
    batch = ready.batch
    if batch.slots > batch.batch:
        problem = f"each step leaves {batch.slots - batch.batch} of {batch.slots} slots empty"
        cure = f"set train.global_batch_size={batch.slots} in a new output_dir to fill them"
        warnings.append(f"{problem}: {batch.batch} rows do not divide over {batch.ranks} ranks; {cure}")
    if on_cpu and config.model.dtype == "bfloat16":
        cure = "set model.dtype=float32 in a new output_dir"
        warnings.append(f"bfloat16 on a CPU is several times slower than float32: {cure}")
    if train.num_train_epochs is not None and data is not None and steps is not None and steps < 10:
        amount = f"{counted(len(data), 'packed row')} of {config.data.sequence_len:,} tokens"
        cure = "set a smaller train.global_batch_size or more train.num_train_epochs in a new output_dir"
        warnings.append(f"only {counted(steps, 'step')} of {amount}: {cure}")
    return warnings


def sum_line(parts: dict[str, float], digits: int, unit: str) -> str:
    """Return a line such as `6.0 GiB = weights 2.5 + optimizer 3.5` that adds up digit by digit."""
    scale = 10**digits
    total = round(sum(parts.values()) * scale)
    whole = {name: math.floor(value * scale) for name, value in parts.items()}
    by_remainder = sorted(parts, key=lambda name: whole[name] - parts[name] * scale)
    for name in by_remainder[: total - sum(whole.values())]:
        whole[name] += 1
    terms = [f"{name} {value / scale:.{digits}f}" for name, value in whole.items() if value]
    return f"{total / scale:.{digits}f} {unit}" + (f" = {' + '.join(terms)}" if terms else "")


def memory_line(parts: dict[str, float], digits: int) -> str:
    """Return bytes by part as a sum in GiB; in MiB where all of it is less than a tenth of one."""
    small = sum(parts.values()) < 0.1 * GIB
    scaled = {name: value / (2**20 if small else GIB) for name, value in parts.items()}
    return sum_line(scaled, 1 if small else digits, "MiB" if small else "GiB")


def fit(sizes: Sizes, setup: Setup, cluster: Cluster) -> str:
    """Return in words whether the run fits, and the changes after which it does, cheapest first."""
    room, memory = cluster.room, footprint.memory(sizes, setup)

    def fits(**changes: Any) -> bool:
        changed = footprint.memory(sizes, dataclasses.replace(setup, **changes))
        return (changed.surely if memory.total <= room else changed.total) <= room

    rows = setup.micro * setup.accumulation
    micro = next((m for m in range(rows, 0, -1) if rows % m == 0 and fits(micro=m)), 0)
    if memory.surely <= room:
        limit = " (all rows of a GPU: more take a larger train.global_batch_size)" if micro == rows else ""
        return f"yes; largest train.micro_batch_size that surely fits: {micro}{limit}"
    changes = [f"set train.micro_batch_size={micro}"] if micro else []
    changes += ["set model.activation_checkpointing=true"] if fits(checkpointing=True) else []
    changes += ["set deepspeed=ds_configs/zero3.json"] if fits(stage=3) else []
    for offload in (False, True):
        least = {"micro": 1, "checkpointing": True, "stage": 3, "offload_optimizer": offload}
        if not changes and fits(**least):
            file = "zero3_offload.json" if offload else "zero3.json"
            changes = [f"set train.micro_batch_size=1 deepspeed=ds_configs/{file}, and checkpointing"]
    enough = next((n for i in range(1, 8) if fits(ranks=(n := cluster.gpus * 2**i))), None)
    changes += [f"take {enough} GPUs"] if enough else []
    remedies = "; or ".join(changes or ["no single change helps: take GPUs with more memory, or model.lora"])
    if memory.total > room:
        return f"NO; {remedies}"
    likely = f"tight: {memory.total / GIB:.1f} of {room / GIB:.1f} GiB, and all but states may take"
    return f"{likely} {footprint.MEMORY_ERROR:.0%} more; to be safe {remedies}"


class Choice(NamedTuple):
    """One way to train, and what is predicted of it."""

    file: Path  # of DeepSpeed
    setup: Setup
    memory: Memory
    time: Time

    @property
    def sets(self) -> dict[str, Any]:
        """Return the settings of a recipe that trains this way."""
        return {
            "deepspeed": str(self.file),
            "model.activation_checkpointing": self.setup.checkpointing,
            "model.compile": self.setup.compiled,
            "train.micro_batch_size": self.setup.micro,
        }

    @property
    def speed(self) -> float:
        """Return tokens/s of one GPU."""
        return self.setup.tokens * self.setup.accumulation / self.time.total

    @classmethod
    def predicted(cls, file: Path, setup: Setup, sizes: Sizes, cluster: Cluster) -> Choice:
        """Return the choice of a DeepSpeed file and a setup on these GPUs."""
        time = footprint.step_time(sizes, setup, cluster.gpu, cluster.network_gb)
        return cls(file, setup, footprint.memory(sizes, setup), time)


def print_best(config: RunConfig, cluster: Cluster, document_tokens: int | None = None) -> Choice:
    """Print the fastest settings that certainly fit, and return the best of them."""
    ready = check_plan(_without_choice(config, Path("ds_configs/zero2.json")), cluster.gpus)
    sizes, room = sizes_of(ready.model, ready.hf_config), cluster.room
    attended, span = attention_span(config, ready, document_tokens)
    every = list(choices(config, sizes, ready.objective, cluster, attended))
    fitting = [c for c in every if c.memory.surely <= room]
    if not fitting:
        least = min(every, key=lambda c: c.memory.surely)
        needs = f"{least.file.name} may need {least.memory.surely / GIB:.1f} GiB of {room / GIB:.1f}"
        problem = f"nothing surely fits on {cluster.gpus} x {cluster.kind}: {needs}"
        raise FailureError(f"{problem}; take more or larger GPUs, or set model.lora", code="nothing-fits")
    # the fastest first, and of those alike the smallest; one of every kind, with its best micro-batch
    fitting.sort(key=lambda c: (-round(math.log(c.speed) / ALIKE), c.memory.total))
    best: dict[tuple[Any, ...], Choice] = {}
    for choice in fitting:
        best.setdefault((choice.file, choice.setup.checkpointing, choice.setup.compiled), choice)
    shown = list(best.values())[:3]
    fits = f"what surely fits into {room / GIB:.1f} GiB of each"
    error = f"if all but states takes {footprint.MEMORY_ERROR:.0%} more than predicted"
    table = Table(title=f"{cluster.gpus} x {cluster.kind}: {fits}, {error}", padding=(0, 0))
    for name in ("", "deepspeed", "check- points", "compile", "micro batch"):
        table.add_column(name, no_wrap=name == "deepspeed")
    for name in ("GiB", "tok/s /GPU", "MFU", "step", "host"):
        table.add_column(name, justify="right")

    def add_row(name: str, choice: Choice) -> None:
        setup, time, total = choice.setup, choice.time, choice.memory.total
        used = footprint.utilisation(sizes, setup, time.total, cluster.gpu)
        flags = str(setup.checkpointing).lower(), str(setup.compiled).lower()
        size = f"{total / GIB:.1f}" + (" NO" if total > room else "")
        speed, host = f"{choice.speed:,.0f}", f"{time.host / time.total:.0%}"
        settings = (choice.file.name, *flags, str(setup.micro))
        table.add_row(name, *settings, size, speed, f"{used:.0%}", f"{time.total:.3g}", host)

    for i, choice in enumerate(shown, 1):
        add_row(str(i), choice)
    with contextlib.suppress(UserError):  # the recipe as it stands may not go with these GPUs
        batch = solve_batch(config.train.global_batch_size, config.train.micro_batch_size, cluster.gpus)
        setup = setup_of(config, batch, deepspeed_config(config, batch), ready.objective, attended)
        table.add_section()
        add_row("recipe", Choice.predicted(config.deepspeed, setup, sizes, cluster))
    console = printer()
    console.print(table)
    console.print(
        f"set: {', '.join(shown[0].sets)}. step: seconds; host: the share of it that is the host's. "
        "Compiling pays off in runs much longer than the minutes that it takes."
    )
    console.print(f"the first rests on {basis(shown[0].setup.stage, cluster.gpu)}")
    if any(choice.setup.offload_parameters for choice in shown):
        states = 18 * sizes.parameters / GIB * min(1, NODE / cluster.gpus)
        console.print(f"zero3_offload.json takes about {states:,.0f} GiB of the memory of every host")
    console.print(f"documents: {span}")
    console.print(f"trust: {TRUST}")
    return shown[0]


def choices(
    config: RunConfig,
    sizes: Sizes,
    objective: Objective,
    cluster: Cluster,
    attended: float | None = None,
) -> Iterator[Choice]:
    """Yield all settings on these GPUs, whether they fit or not; `attended`: see Setup.

    Compiling is tried under ZeRO-1 and 2: of layers that are compiled one by one no published run says what
    they gain. hpZ is tried where the ranks fill several nodes. A file that does not go with the recipe is
    passed over. Raises UserError when none does.
    """
    gpus = cluster.gpus
    batch = solve_batch(config.train.global_batch_size, 1, gpus)
    rows = batch.accumulation
    refused: list[UserError] = []
    files = [name for name in FILES if name != "zero3_hpz.json" or (gpus > NODE and gpus % NODE == 0)]
    for file in (Path("ds_configs") / name for name in files):
        plain = _without_choice(config, file)
        try:
            first = setup_of(plain, batch, deepspeed_config(plain, batch), objective, attended)
        except UserError as error:
            refused.append(error)
            continue
        micros = [m for m in range(1, rows + 1) if rows % m == 0]
        compiling = (False, True) if first.stage < 3 and not first.kernels else (False,)
        for checkpointing, compiled, micro in itertools.product((False, True), compiling, micros):
            changes: dict[str, Any] = {"micro": micro, "accumulation": rows // micro, "compiled": compiled}
            setup = dataclasses.replace(first, checkpointing=checkpointing, **changes)
            yield Choice.predicted(file, setup, sizes, cluster)
    if len(refused) == len(files):
        raise refused[-1]


def _without_choice(config: RunConfig, file: Path) -> RunConfig:
    """Return the recipe with a DeepSpeed file, passes of one row, and nothing that a file could refuse."""
    train = config.train.model_copy(update={"micro_batch_size": 1})
    model = config.model.model_copy(update={"compile": False})
    return config.model_copy(update={"deepspeed": file, "train": train, "model": model})


def write_recipe(
    path: Path, recipe: Path, overrides: Sequence[str], choice: Choice, cluster: Cluster
) -> None:
    """Write a recipe that extends `recipe` and sets the overrides and the choice.

    Raises UserError when the result would not say what the command said.
    """
    settings = [*overrides, *(f"{key}={value}" for key, value in choice.sets.items())]
    tree: dict[str, Any] = {}
    for setting in settings:
        apply_override(tree, setting)
    base = os.path.relpath(shipped(recipe).resolve(), path.parent.resolve())
    text = (
        f"# {recipe.name} as `plan --best` would train it on {cluster.gpus} x {cluster.kind}: "
        f"{choice.speed:,.0f} tokens/s/GPU predicted,\n"
        f"# {choice.memory.total / GIB:.1f} GiB on each.\n"
    ) + yaml.safe_dump({"extends": base, **tree}, sort_keys=False)
    with part_file(path) as file:
        file.write(text.encode())
        file.flush()
        if load_config(Path(file.name), []) != load_config(recipe, settings):
            problem = "--write: an override replaces a whole section, which an extending recipe cannot"
            raise UserError(f"{problem}; write it into the recipe first", code="write-section")
