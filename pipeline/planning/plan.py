"""`emo plan`: predict what a run needs on given GPUs.

`print_plan` resolves a recipe without training. Given GPUs it predicts memory by part, the largest
micro-batch that fits, step time and hours, and suggests changes if the run does not fit.
"""

from __future__ import annotations

import logging

from rich.table import Table

from emo.common.cli.progress import make_console
from emo.common.text import counted
from emo.data_prep.shards.scores import top_dtype

from ..config import RunConfig
from ..engine.device.devices import on_gpu
from ..engine.device.hardware import GB, GIB, Cluster
from ..engine.schedule import describe_schedule
from . import footprint
from .alternatives import Alternatives, describe_fit
from .checks import PlannedRun, TrainingRun, check_plan
from .describe import TRUST, Rows, collect_warnings, domain_rows, memory_line, sum_line
from .footprint import Memory, Setup, Sizes
from .setup import attention_span, checkpoint_bytes, setup_of, sizes_of

log = logging.getLogger(__name__)
PER_MILLIONS = 100  # the plan gives hours for so many million tokens if the size of the data is unknown


def print_plan(
    config: RunConfig,
    ranks: int,
    cluster: Cluster | None = None,
    here: bool = False,
    document_tokens: int | None = None,
) -> bool:
    """Resolve a recipe without training, print the plan, and return whether it fits.

    Args:
        config: The recipe.
        ranks: Number of ranks.
        cluster: The GPUs, for which memory and time are predicted.
        here: Check this host as training does.
        document_tokens: Mean length of the documents, instead of that in the prepared data.
    """
    run = check_plan(config, ranks, here=here, gpus=cluster is not None)
    sizes = sizes_of(run.model, run.hf_config, config.model.linear_dtype)
    attended, span = attention_span(config, run, document_tokens)
    setup = setup_of(config, run.batch, run.ds_config, run.objective, attended, run.attention)
    memory = footprint.memory(sizes, setup)
    table = Table("what", "value", title=str(config.output_dir), show_header=False)
    for row in _recipe_rows(config, run, sizes, setup, memory):
        table.add_row(*row)
    if cluster is not None:
        table.add_section()
        for row in _cluster_rows(Alternatives(config, run, sizes, setup, cluster), span):
            table.add_row(*row)
    make_console().print(table)
    for warning in collect_warnings(config, run, on_cpu=cluster is None and not on_gpu()):
        log.warning(warning)
    return cluster is None or memory.total <= cluster.memory


def _recipe_rows(
    config: RunConfig, run: PlannedRun | TrainingRun, sizes: Sizes, setup: Setup, memory: Memory
) -> Rows:
    """Return the rows of a plan that do not depend on the GPUs."""
    active = f", {sizes.parameters - sizes.idle:,} active for a token" if sizes.idle else ""
    counts = f"{sizes.parameters:,} ({sizes.trainable:,} trainable{active})"
    rows = [
        ("model", config.model.path or f"new {(config.model.architecture or {})['model_type']}"),
        ("parameters", f"{counts}, {config.model.dtype}"),
        ("attention", run.attention),
        ("objective", f"{config.objective.label} {config.objective.params or ''}".strip()),
        ("batch", str(run.batch)),
        ("tokens per step", f"at most {run.batch.batch * config.data.sequence_len:,}"),
        *([] if setup.sequence == 1 else [("shared rows", _describe_sharing(sizes, setup))]),
        ("steps", _describe_steps(config, run)),
        *([] if run.steps is None else [("learning rate", describe_schedule(config.train, run.steps))]),
        *domain_rows(config, run),
    ]
    offloads = {"optimizer": setup.offload_optimizer, "weights": setup.offload_parameters}
    names = [name for name, offloaded in offloads.items() if offloaded]
    note = f", {' and '.join(names)} in host memory" if names else ""
    rows.append(("ZeRO", f"stage {setup.stage}{note}"))
    if setup.teacher is not None:
        rows.append(("teacher", _describe_teacher(config, setup, sizes)))
    if config.train.kl_from_base and config.data.validation_sets and not config.holds_base:
        tokens = len(config.data.validation_sets) * config.train.eval_rows * config.data.sequence_len
        dtype = top_dtype(min(config.train.kl_from_base, sizes.vocabulary - 1), sizes.vocabulary, "<f4")
        stored = f"at most {tokens * dtype.itemsize / GB:,.2g} GB of predictions in the run directory"
        rows.append(("KL from base", stored))
    states = {"weights": memory.parameters, "gradients": memory.gradients, "optimizer": memory.optimizer}
    staged = footprint.state_bytes(sizes, setup)
    rows.append(("states per rank", memory_line(states, 2)))
    if setup.checkpointing and setup.offload_activations:
        offloaded = footprint.stored_bytes(sizes, setup) / GIB
        rows.append(("activations", f"{offloaded:,.2f} GiB of host memory per rank"))
    amount = f"{staged / GIB:,.2f} GiB of host memory over all ranks"
    saving = f"{amount}, kept between saves" if config.train.async_save else f"at most {amount}, then freed"
    rows.append(("saving", saving))
    return rows


def _describe_sharing(sizes: Sizes, setup: Setup) -> str:
    """Return the part of a row that a rank computes, and what the ranks of a row exchange."""
    part = f"{setup.block // setup.sequence:,} tokens of each row per rank"
    return (
        f"{part}, which sends {footprint.exchanged_bytes(sizes, setup) / 2**20:,.1f} MiB per layer and pass"
    )


def _describe_teacher(config: RunConfig, setup: Setup, sizes: Sizes) -> str:
    """Return the weights of the live teacher, and what it reads in addition to the batch."""
    assert setup.teacher is not None
    text = f"{setup.teacher.parameters:,} parameters"
    if setup.averaged:
        text = f"average of {sizes.trainable:,} parameters that train"
    elif not setup.copied:
        text = "this model" if config.objective.teaches_itself else "this model without its adapters"
    if setup.demonstrated:
        share = f"in {setup.demonstrated:.0%} of the steps"
        text += f", reads rows of {2 * setup.block:,} tokens with demonstrations {share}"
    return text


def _describe_steps(config: RunConfig, run: PlannedRun | TrainingRun) -> str:
    """Return the number of steps, with the rows and epochs that it covers."""
    steps = run.steps
    epochs = config.train.num_train_epochs
    passes = "" if epochs is None else counted(epochs, "epoch")
    if steps is None:
        return f"{passes}; the number of steps is known once the data are prepared"
    if epochs is None or not run.data:
        return f"{steps:,}"
    extra = steps * run.batch.batch - round(epochs * len(run.data))
    if extra:
        rows = counted(abs(extra), "row")
        passes += f" and {rows} of the next" if extra > 0 else f" without {rows}"
    return f"{steps:,} ({counted(len(run.data), 'row')}, {passes})"


def _cluster_rows(alternatives: Alternatives, span: str) -> Rows:
    """Return the rows of a plan that predict memory and time on a cluster."""
    config, sizes, setup, cluster = (
        alternatives.config,
        alternatives.sizes,
        alternatives.setup,
        alternatives.cluster,
    )
    steps = alternatives.run.steps
    time = footprint.step_time(sizes, setup, cluster.gpu, cluster.network_gb)
    tokens = setup.tokens * setup.accumulation * setup.ranks / time.total
    mfu = footprint.utilisation(sizes, setup, time.total, cluster.gpu)
    if steps is None:
        hours = PER_MILLIONS * 1e6 / tokens / 3600 * cluster.gpus
        duration = f"{hours:,.1f} GPU-hours per {PER_MILLIONS} million tokens, without saving"
    else:
        hours = steps * time.total / 3600
        duration = f"{hours:,.1f} hours, {hours * cluster.gpus:,.1f} GPU-hours, without saving"
    rows = [
        ("on", f"{cluster.gpus} x {cluster.kind}, {cluster.memory / GIB:.1f} GiB of each usable"),
        ("memory per GPU", memory_line(footprint.memory(sizes, setup).peak, 1)),
        ("fits", describe_fit(alternatives)),
        ("documents", span),
        ("step", sum_line(time._asdict(), 2, "s")),
        ("speed", f"{tokens:,.0f} tokens/s, {tokens / setup.ranks:,.0f} per GPU, MFU {mfu:.0%}"),
        ("run", duration),
    ]
    if config.train.save_steps:
        rows.append(("saves", _describe_saves(config, sizes, setup, time.total)))
    return [*rows, ("trust", TRUST)]


def _describe_saves(config: RunConfig, sizes: Sizes, setup: Setup, step: float) -> str:
    """Return the size and rate of checkpoints, and how long training waits for them.

    Training waits while states are copied to host memory. They are written in the background. A step takes
    `step` seconds.
    """
    written = checkpoint_bytes(config, sizes, setup)
    seconds = config.train.save_steps * step
    waiting = footprint.state_bytes(sizes, setup) / setup.ranks / footprint.HOST_LINK
    return (
        f"{written / GB:,.0f} GB every {seconds / 60:,.1f} minutes, {written / GB / seconds:.2g} GB/s; "
        f"training waits {waiting / (waiting + seconds):.1%} of the time"
    )
