"""The training loop, and the command behind launch/*.sh.

for each step s:
    rows    = positions [s*B, (s+1)*B) of the seeded order           (batches.py)
    divisor = supervised tokens of those rows, over all ranks
    loss    = sum over tokens of the objective / divisor             (objectives.py, fused.py)
    AdamW step at the scheduled rate                                 (engine.py)
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from common.errors import UserError
from common.labels import IGNORE
from data_prep.shards import TokenDataset
from pipeline import engine, resume
from pipeline.batches import BatchOrder, micro_batches, rank_rows
from pipeline.config import Batch, RunConfig, load_config, lr_at, solve_batch, total_steps
from pipeline.engine import Engine, compiling
from pipeline.export import ExportError, export_model
from pipeline.guard import Guard
from pipeline.metrics import Metrics
from pipeline.model import (
    Losses,
    build_model,
    check_fits,
    check_model,
    load_losses,
    measuring,
    model_config,
    write_initial_weights,
)
from pipeline.planning.footprint import Setup, accelerator, utilisation
from pipeline.planning.plan import model_sizes, print_plan
from pipeline.ranks import World, end_world, lost_a_peer, main_first, patience, wait_at_most
from pipeline.run_dir import EXPORT
from pipeline.saving import Saver
from pipeline.stop import EXIT_STOPPED, StopRequest

log = logging.getLogger(__name__)


def train(config: RunConfig, world: World) -> bool:
    """Train, or go on training, the run of `config`. True when it is finished, false when stopped."""
    data = TokenDataset(config.data.dir / "train")
    held_out = config.data.dir / "validation"
    validation = TokenDataset(held_out) if held_out.is_dir() else None
    hf_config = model_config(config.model)
    check_fits(hf_config, config.model, data.manifest)
    batch = solve_batch(config.train.batch, config.train.micro_batch, world.ranks)
    steps = total_steps(config.train, len(data))
    order = BatchOrder(len(data), batch.batch, config.train.seed)
    ds_config = engine.deepspeed_config(config, batch)
    engine.check_host(ds_config)

    with main_first(world):
        if world.is_main:
            resume.claim_run_dir(config, data.fingerprint)
            if config.model.path is None:
                write_initial_weights(config)
    if (config.run_dir / EXPORT).is_dir():
        log.info("%s is finished: its export stands in export/", config.run_dir)
        return True
    stop = StopRequest(config.run_dir, config.train.max_minutes)
    losses = load_losses(config, hf_config.vocab_size)
    saved = resume.newest_valid(config.run_dir, world)
    source = None
    if saved is not None:
        source, universal = resume.loadable(saved, engine.zero_stage(ds_config), world)
        if universal:
            ds_config["checkpoint"] = {"load_universal": True}
    with compiling():
        partitioned = engine.build_partitioned(ds_config)  # transformers looks for it while it is alive
        trainer = Engine(build_model(config, losses), ds_config, world, config.model.compile)
        del partitioned
    check_model(trainer, config, data.manifest)
    step, tokens = 0, 0
    if saved is not None and source is not None:
        trainer.load(source)
        step, tokens = saved.step, saved.tokens
        log.info("resumed from %s", saved.directory)
    log.info("%s; steps %d to %d; objective %s", batch, step, steps, losses.objective)
    metrics = Metrics(config, step, steps, world.is_main, _peak_share(config, batch))
    guard = Guard(config.run_dir, config.train, writes=world.is_main)
    saver = Saver(trainer, config, data.fingerprint)

    finished, last_lr, first, saved_step = True, 0.0, step, step
    while step < steps:
        rows = order.step_rows(step)
        mine = rank_rows(rows, world.rank, world.ranks)
        last_lr = lr_at(config.train, step, steps)
        metrics.starts(step + 1)
        sums = trainer.train_step(
            _tensors(data, mine, batch.micro),
            valid=int(data.valid[rows].sum()),
            lr=last_lr,
            seed=engine.step_seed(config.train.seed, step),
            stop=stop.reason is not None or saver.problem is not None,
        )
        step, tokens = step + 1, tokens + sums.tokens
        if step == first + 1:
            wait_at_most(config.train.timeout_minutes, saver.group)
        metrics.step(step, sums)
        warning = guard.observe(step, sums, functools.partial(data.provenance, rows))
        if warning:
            metrics.say(warning)
        if step % config.train.log_every == 0 or step == steps:
            metrics.log(step, tokens, last_lr, trainer.gradient_norm())
        if validation is not None and _due(step, config.train.eval_every, steps):
            metrics.validation(step, tokens, evaluate(trainer, losses, validation, config, batch.micro))
            metrics.pause()
        finished = not sums.stop or step == steps
        if not finished or _due(step, config.train.save_every, steps):
            with patience(config.train.timeout_minutes, saver.group):
                saver.save(step, tokens)
            saved_step = step
            metrics.pause()
        if not finished:
            break
    with patience(config.train.timeout_minutes, saver.group):
        if finished:
            if saved_step != steps:
                saver.save(step, tokens)
            info = saver.export_info(step, tokens)
            export_model(trainer, config, config.run_dir / EXPORT, info)
            metrics.say(f"finished; export: {config.run_dir / EXPORT}")
        saver.finish()
    if not finished:
        metrics.say(f"stopped after step {step}; the same command goes on from there")
        if world.is_main:
            stop.file.unlink(missing_ok=True)
    metrics.close()
    return finished


def _peak_share(config: RunConfig, batch: Batch) -> float | None:
    """Share of the GPUs' peak that one step per second would be; None on hardware that is not known."""
    gpu = accelerator(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if gpu is None:
        return None
    setup = Setup(batch.ranks, 0, batch.micro, config.data.block, batch.accumulation)
    return utilisation(model_sizes(config), setup, 1.0, gpu)


def evaluate(
    trainer: Engine, losses: Losses, validation: TokenDataset, config: RunConfig, micro: int
) -> engine.Sums:
    """Sums over the first train.eval_rows validation rows; ranks take equally many micro-batches."""
    ranks, rank = trainer.world.ranks, trainer.world.rank
    count = min(len(validation), config.train.eval_rows)
    rounds = -(-count // (ranks * micro))
    padded = np.resize(np.arange(count), rounds * ranks * micro)
    real = np.arange(len(padded)) < count
    mine = slice(rank * rounds * micro, (rank + 1) * rounds * micro)
    with measuring(trainer.model, losses):
        return trainer.evaluate(_tensors(validation, padded[mine], micro, real[mine]))


def _tensors(
    data: TokenDataset, rows: np.ndarray, micro: int, real: np.ndarray | None = None
) -> Iterator[dict[str, Tensor]]:
    """Micro-batches of rows as tensors; rows that are not `real` supervise nothing."""
    for at, part in enumerate(micro_batches(rows, micro)):
        arrays = data.batch(part)
        if real is not None:
            arrays["labels"][~real[at * micro : at * micro + len(part)]] = IGNORE
        yield {name: torch.from_numpy(array) for name, array in arrays.items()}


def _due(step: int, every: int, steps: int) -> bool:
    return step == steps or (every > 0 and step % every == 0)


def main(kind: str, argv: list[str] | None = None) -> int:
    """Run a recipe whose data are of `kind`, text or instruct.

    Exit codes: 0 finished, 2 a mistake in the input, 75 stopped before the end.
    """
    parser = argparse.ArgumentParser(
        prog="deepspeed launch/continual.sh", description="Train a recipe; run it again to go on."
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--dry-run", action="store_true", help="resolve, check and plan; train nothing")
    parser.add_argument("--ranks", type=int, help="ranks that a dry run plans for")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args(argv)
    main_rank = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(
        level=logging.INFO if main_rank else logging.ERROR, format="%(message)s", stream=sys.stdout
    )
    for noisy in ("httpx", "DeepSpeed", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # DeepSpeed tries the compiler at its start, and distutils logs the commands at the root
    logging.getLogger().handlers[0].addFilter(lambda record: record.module != "spawn")
    disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        config = load_config(args.recipe, args.overrides)
        if config.data.kind != kind:
            script = {"text": "continual", "instruct": "instruct"}[config.data.kind]
            raise UserError(f"{args.recipe} has data.kind={config.data.kind}; run launch/{script}.sh")
        if args.dry_run:
            ranks = args.ranks or int(os.environ.get("WORLD_SIZE", 1))
            if main_rank:
                print_plan(config, ranks)
            return 0
        started = time.perf_counter()
        world = engine.start_world()
        finished = train(config, world)
        log.info("%.0f s", time.perf_counter() - started)
    except (UserError, ExportError) as error:
        if main_rank:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except (OSError, SafetensorError) as error:
        print(
            f"error: {error}; the same command goes on from the last checkpoint", file=sys.stderr, flush=True
        )
        os._exit(1)  # the other ranks wait for this one; the launcher ends them
    except RuntimeError as error:
        if not lost_a_peer(error):
            raise
        print(
            f"error: rank {os.environ['RANK']} lost another rank (its message may stand above); "
            "the same command goes on from the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)  # the process group is beyond an orderly end
    end_world()
    return 0 if finished else EXIT_STOPPED
