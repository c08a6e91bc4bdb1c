"""Lines that a plan and the start of training print."""

from __future__ import annotations

import math

from emo.common.text import counted

from ..batches.order import REPEATED, MixedOrder, Portion
from ..config import RunConfig
from ..engine.device.hardware import GIB
from ..loss.cost import lacks_bfloat16
from . import footprint
from .checks import PlannedRun, TrainingRun

TRUST = (
    f"states are exact, other memory is within {footprint.MEMORY_ERROR:.0%} of measured runs, time is within "
    f"{footprint.TIME_ERROR:.0%} of published runs (FSDP, five of ZeRO-1) that it was not fitted to. Host "
    "time is an estimate."
)
LOST_BELOW = 0.001  # learning rate, see docs/how-to/out-of-memory.md

Rows = list[tuple[str, str]]  # of a printed table: a name and a value


def domain_rows(config: RunConfig, run: PlannedRun | TrainingRun) -> Rows:
    """Return the range of any loss weights, and the share, tokens and epochs of each of several domains."""
    mixture = config.train.mixture
    data = run.data
    order = run.order
    rows = [] if mixture is None else [("mixture", mixture.label)]
    if data is not None and data.weighted:
        rows.append(("loss weights", data.describe_weights()))
    if data is None or run.steps is None or order is None or (mixture is None and len(data.domains) < 2):
        return rows
    if isinstance(order, MixedOrder):
        portions = order.portions(run.steps)
    else:
        epochs = run.steps * run.batch.batch / len(data)
        total = data.manifest.valid_tokens
        sizes = ((domain.name, domain.valid_tokens) for domain in data.manifest.domains)
        portions = [Portion(name, (n / total, n / total), 0, epochs, n * epochs) for name, n in sizes]
    for portion in portions:
        first, last = (f"{share:.1%}" for share in portion.shares)
        share = f"{first if first == last else f'{first} to {last}'} of {mixture.by if mixture else 'tokens'}"
        repeated = f", more than {REPEATED}" if mixture and portion.epochs > REPEATED else ""
        passes = counted(float(f"{portion.epochs:.2g}"), "epoch")
        rows.append((f"domain {portion.name}", f"{share}; {portion.tokens:,.0f} tokens, {passes}{repeated}"))
    return rows


def collect_warnings(config: RunConfig, run: PlannedRun | TrainingRun, on_cpu: bool) -> list[str]:
    """Return warnings about a valid run that may not do what its user expects."""
    train = config.train
    data = run.data
    steps = run.steps
    warnings = []
    if config.model.lora is not None and config.model.lora.use_dora:
        warnings.append("DoRA's activations are not planned. They can double those of LoRA.")
    template = config.data.template
    frozen = config.model.lora is not None and not config.model.lora.train_embeddings
    if frozen and config.data.by_chat_template and template != "chat_template":
        problem = f"LoRA may not teach a base model the special tokens of data.template={template}, so that"
        cure = "Set model.lora.train_embeddings=true in a new output_dir, unless the model knows the tokens."
        warnings.append(f"{problem} its answers do not end. {cure}")
    for portion in run.order.portions(steps) if isinstance(run.order, MixedOrder) and steps else ():
        if portion.epochs > REPEATED:
            cure = "Repeated text teaches less: lower its share, or set train.mixture.max_epochs."
            warnings.append(f"domain {portion.name} is repeated for {portion.epochs:.3g} epochs. {cure}")
    batch = run.batch
    if batch.slots > batch.batch:
        problem = f"each step leaves {batch.slots - batch.batch} of {batch.slots} slots empty"
        cure = f"Set train.global_batch_size={batch.slots} in a new output_dir to fill them."
        unit = "ranks" if batch.sequence == 1 else "groups of ranks"
        warnings.append(f"{problem}: {batch.batch} rows do not divide over {batch.replicas} {unit}. {cure}")
    if train.state_dtype == "bfloat16" and train.learning_rate < LOST_BELOW:
        problem = f"train.state_dtype=bfloat16 loses most updates at learning rates below {LOST_BELOW:g}"
        warnings.append(f"{problem}. Set train.state_dtype=float32 in a new output_dir.")
    if on_cpu and config.model.dtype == "bfloat16" and lacks_bfloat16():
        cure = "Set model.dtype=float32 in a new output_dir."
        warnings.append(f"bfloat16 on this CPU is several times slower than float32. {cure}")
    if train.warmup_steps and steps is not None and train.warmup_steps > steps:
        warnings.append(
            f"train.warmup_steps={train.warmup_steps} is more than the {steps:,} steps of the run, so the "
            "learning rate rises faster. Lower train.warmup_steps."
        )
    if train.num_train_epochs is not None and data is not None and steps is not None and steps < 10:
        amount = f"{counted(len(data), 'packed row')} of {config.data.sequence_len:,} tokens"
        cure = "Set a smaller train.global_batch_size or more train.num_train_epochs in a new output_dir."
        warnings.append(f"only {counted(steps, 'step')} of {amount}. {cure}")
    return warnings


def sum_line(parts: dict[str, float], digits: int, unit: str) -> str:
    """Return a line such as `6.0 GiB = weights 2.5 + optimizer 3.5`, rounded so that the sum is exact."""
    scale = 10**digits
    total = round(sum(parts.values()) * scale)
    rounded = {name: math.floor(value * scale) for name, value in parts.items()}
    by_remainder = sorted(parts, key=lambda name: rounded[name] - parts[name] * scale)
    for name in by_remainder[: total - sum(rounded.values())]:
        rounded[name] += 1
    terms = [f"{name} {value / scale:.{digits}f}" for name, value in rounded.items() if value]
    return f"{total / scale:.{digits}f} {unit}" + (f" = {' + '.join(terms)}" if terms else "")


def memory_line(parts: dict[str, float], digits: int) -> str:
    """Return bytes by part as a sum in GiB, or in MiB if the total is below a tenth of a GiB."""
    small = sum(parts.values()) < 0.1 * GIB
    scaled = {name: value / (2**20 if small else GIB) for name, value in parts.items()}
    return sum_line(scaled, 1 if small else digits, "MiB" if small else "GiB")
