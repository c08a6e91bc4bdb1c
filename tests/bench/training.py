"""Compare our training loop with a bare DeepSpeed loop and Hugging Face's Trainer on equal terms.

    python -m tests.bench.training [--rounds 3] [--steps 60] [--quick]

Contestants have the same model, data and ZeRO-3. Each is a separate run on 2 ranks, started in turn. Steps
after the first ten count, by CPU seconds of both ranks and by tokens per second of wall time.

ours       emo.pipeline.trainer as the launcher runs it, with logging, guards and agreement on stops
bare       only forward, backward and step of the same DeepSpeed engine and fused MLE head, on ready batches
Trainer    Hugging Face's Trainer with the same DeepSpeed configuration and its usual loss
stall      the delay of a save: ours with saves every five steps, in the background or not, and without saves
domains    ours on four sources, as one domain and as four with a mixture
host       CPU time of ours without the engine's forward, backward and step, but with reading ahead
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from emo.data_prep.shards.format import TokenDataset
from emo.data_prep.sources.world import corpus, read_json_lines
from emo.pipeline.batches.config import solve_batch
from emo.pipeline.config import RunConfig, load_config
from emo.pipeline.control.world import World, end_world
from emo.pipeline.engine.ds_config import deepspeed_config
from emo.pipeline.engine.schedule import lr_at
from tests.bench import common
from tests.helpers.launching import run_ranks

WARM = 10  # steps that do not count
RANKS = 2
RECIPE = common.REPO / "launch" / "recipes" / "quickstart-pretrain.yaml"
SAVING = ("ours, saving aside", "ours, saving at once")
CONTESTANTS = ("ours", "bare", "Trainer", *SAVING, "ours, one domain", "ours, four domains")
MIXTURE = {"a": 0.4, "b": 0.3, "c": 0.2, "d": 0.1}


def data_of(contestant: str) -> list[str]:
    """Return the overrides that select the data of a contestant."""
    name, sources = "training-data", [{"embedded": "world"}]
    if "domain" in contestant:
        name += contestant.removeprefix("ours,").replace(" ", "-")
        sources = [{"files": str(common.RESULTS / f"{domain}.jsonl")} for domain in MIXTURE]
        if "four" in contestant:
            sources = [source | {"domain": name} for source, name in zip(sources, MIXTURE, strict=True)]
    return [f"data.dir={common.RESULTS}/{name}", f"data.sources={json.dumps(sources)}"]


def prepare_data() -> None:
    """Prepare the data of the contestants. Each domain is a quarter of the corpus."""
    rows = list(read_json_lines(corpus("world")))
    common.RESULTS.mkdir(parents=True, exist_ok=True)
    for index, domain in enumerate(MIXTURE):
        text = "".join(json.dumps(row) + "\n" for row in rows[index :: len(MIXTURE)])
        (common.RESULTS / f"{domain}.jsonl").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "emo", "prepare", str(RECIPE)]
    for data in dict.fromkeys(tuple(data_of(contestant)) for contestant in CONTESTANTS):
        subprocess.run([*command, *data], cwd=common.REPO, check=True, stdout=subprocess.DEVNULL)


class Clock:
    """CPU and wall time between the start of step WARM + 1 and the end of the last step."""

    def __init__(self, steps: int) -> None:
        self.steps, self.seen = steps, 0
        self.host = 0.0  # CPU seconds of reading, minus CPU seconds of this thread in the engine
        self.marks: list[tuple[float, float, float]] = []

    def tick(self) -> None:
        """Record that a step begins, or that the last one has ended."""
        if self.seen in (WARM, self.steps):
            self.marks.append((time.process_time(), time.perf_counter(), time.thread_time() + self.host))
        self.seen += 1

    @contextlib.contextmanager
    def counted(self, sign: int) -> Iterator[None]:
        """Add the CPU time of the block to the host's time, or subtract it."""
        began = time.thread_time()
        yield
        self.host += sign * (time.thread_time() - began)

    def result(self) -> dict[str, float]:
        return {name: b - a for name, a, b in zip(("cpu", "wall", "host"), *self.marks, strict=True)}


def within(owner: Any, name: str, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    """Make a function of `owner` run within a context."""
    function = getattr(owner, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    setattr(owner, name, run)


def worker(contestant: str, steps: int, directory: Path) -> None:
    """Run one rank of a contestant, and write its times to DIRECTORY/rank-N.json after its last step."""
    from emo.pipeline.engine.start import start_world

    options = [f"output_dir={directory}/run", *data_of(contestant)]
    options += ["train.num_train_epochs=null", f"train.max_steps={steps}", "train.logging_steps=10"]
    if "four" in contestant:
        options.append(f"train.mixture={json.dumps({'shares': MIXTURE})}")
    if "saving" in contestant:
        options += ["train.save_steps=5", f"train.async_save={str('aside' in contestant).lower()}"]
    clock, world = Clock(steps), start_world()
    {"ours": _ours, "bare": _bare, "Trainer": _trainer}[contestant.split(",")[0]](
        load_config(RECIPE, options), world, clock
    )
    (directory / f"rank-{world.rank}.json").write_text(json.dumps(clock.result()))
    end_world()


def _ours(config: RunConfig, world: World, clock: Clock) -> None:
    from deepspeed import DeepSpeedEngine

    from emo.pipeline.batches.loader import Loader
    from emo.pipeline.control.stop import SignalWatch
    from emo.pipeline.engine.engine import Engine
    from emo.pipeline.monitor.console import Console
    from emo.pipeline.trainer import Trainer

    @contextlib.contextmanager
    def ticking(validates: bool = False) -> Iterator[None]:
        if clock.seen or not validates:  # validation comes before the first step and after the last
            clock.tick()
        yield

    within(Engine, "train_step", ticking)
    within(Trainer, "validate", lambda: ticking(validates=True))
    for name in ("forward", "backward", "step"):
        within(DeepSpeedEngine, name, lambda: clock.counted(-1))
    within(Loader, "_read", lambda: clock.counted(1))
    Trainer(config, world, SignalWatch(), Console("quiet")).run()


def _bare(config: RunConfig, world: World, clock: Clock) -> None:
    import torch
    from transformers.integrations import HfDeepSpeedConfig

    from emo.pipeline.batches.loader import rank_rows
    from emo.pipeline.batches.order import BatchOrder
    from emo.pipeline.checkpoint import identity
    from emo.pipeline.engine import engine
    from emo.pipeline.model import build as model
    from emo.pipeline.model.objective.build import load_losses, training_objective

    data = TokenDataset(config.data.dir / "train")
    batch = solve_batch(config.train.global_batch_size, config.train.micro_batch_size, world.ranks)
    order = BatchOrder(len(data), batch.batch, config.train.seed)
    if world.is_main:
        model.write_initial_weights(config)
        identity.claim_run_dir(config, {"data": data.fingerprint})
    torch.distributed.barrier()
    vocabulary = model.model_config(config.model).vocab_size
    losses = load_losses(config, training_objective(config), vocabulary)
    ds_config = deepspeed_config(config, batch)
    partitioned = HfDeepSpeedConfig(ds_config)
    ds = engine.Engine(model.build_model(config, losses), ds_config, world).ds
    del partitioned
    batches = []
    for step in range(clock.steps):
        arrays = data.batch(rank_rows(order.step_rows(step), world.rank, world.ranks)[0])
        batches.append({k: torch.from_numpy(v) for k, v in arrays.items()})
    ds.train()
    for step, tensors in enumerate(batches):
        clock.tick()
        for group in ds.optimizer.param_groups:
            group["lr"] = lr_at(config.train, step, clock.steps)
        sums = ds(**tensors)
        ds.backward(sums.loss / sums.tokens)
        ds.step()
    clock.tick()


def _trainer(config: RunConfig, world: World, clock: Clock) -> None:
    import numpy as np
    import torch
    from torch.utils.data import Dataset
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from emo.pipeline.model.build import model_config

    tokens = TokenDataset(config.data.dir / "train")
    batch = solve_batch(config.train.global_batch_size, config.train.micro_batch_size, world.ranks)
    ds_config = deepspeed_config(config, batch) | {"zero_force_ds_cpu_optimizer": False}
    for key in ("optimizer", "steps_per_print"):
        ds_config.pop(key)

    class Rows(Dataset):
        def __len__(self) -> int:
            return len(tokens)

        def __getitem__(self, row: int) -> dict[str, Any]:
            arrays = tokens.batch(np.array([row]))
            ids, positions = (torch.from_numpy(arrays[name][0]) for name in ("input_ids", "position_ids"))
            return {"input_ids": ids, "labels": ids, "position_ids": positions}

    class Ticks(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.tick()

        on_train_end = on_step_begin

    arguments = TrainingArguments(
        output_dir=str(config.output_dir), max_steps=clock.steps, optim="adamw_torch",
        use_cpu=True, per_device_train_batch_size=batch.micro, gradient_accumulation_steps=batch.accumulation,
        learning_rate=config.train.learning_rate, lr_scheduler_type="cosine", warmup_steps=2,
        adam_beta2=config.train.betas[1], max_grad_norm=config.train.max_grad_norm, deepspeed=ds_config,
        logging_steps=config.train.logging_steps, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(model_config(config.model), attn_implementation="sdpa")
    Trainer(model, arguments, train_dataset=Rows(), callbacks=[Ticks()]).train()


class Outcome(NamedTuple):
    """The times of a run, which are empty if a rank has none, and the reason of a failure."""

    times: dict[str, float]  # seconds of all ranks (cpu, host) or of the slowest rank (wall)
    trouble: str


def run(contestant: str, steps: int) -> Outcome:
    """Run a contestant once. The bench continues if a peer dies, and uses its times if they are complete."""
    with tempfile.TemporaryDirectory() as directory:
        options = ["--worker", contestant, "--steps", str(steps), "--directory", directory]
        done = run_ranks("-m", "tests.bench.training", *options)
        last = re.findall(".*(?:Error|Signal|terminate called).*", done.stdout)[-1:]
        trouble = f"exit code {done.returncode}: {' '.join(last)[:200]}" if done.returncode else ""
        try:
            ranks = [json.loads((Path(directory) / f"rank-{r}.json").read_text()) for r in range(RANKS)]
        except (OSError, ValueError):
            return Outcome({}, trouble or "exit code 0: no times")
    times = {kind: sum(rank[kind] for rank in ranks) for kind in ("cpu", "host")}
    times["wall"] = max(rank["wall"] for rank in ranks)
    return Outcome(times, trouble and f"after its last step: {trouble}")


def tabulate(report: common.Report, outcomes: dict[str, list[Outcome]], steps: int) -> None:
    """Report the table and the ratios. A contestant without times has a reason instead of numbers."""
    measured = {contestant: [run.times for run in runs if run.times] for contestant, runs in outcomes.items()}

    def median(contestant: str, kind: str) -> float:
        return statistics.median(times[kind] for times in measured[contestant])

    def ratio(contestant: str, base: str, kind: str, base_kind: str = "") -> float | None:
        """Return the median over rounds in which both were measured, or None if there are none."""
        rounds = zip(outcomes[contestant], outcomes[base], strict=True)
        values = [a.times[kind] / b.times[base_kind or kind] for a, b in rounds if a.times and b.times]
        return statistics.median(values) if values else None

    for contestant, runs in outcomes.items():
        cells: dict[str, Any] = {
            f"{kind}_to_bare": ratio(contestant, "bare", kind) for kind in ("cpu", "wall")
        }
        if measured[contestant]:
            cells |= {f"{kind}_seconds": median(contestant, kind) for kind in ("cpu", "wall")}
            cells["tokens_per_s"] = round((steps - WARM) * 8 * 256 / cells["wall_seconds"])
        report.row(
            contestant=contestant, **cells, trouble=next((run.trouble for run in runs if run.trouble), "")
        )
    of_domains = ratio("ours, four domains", "ours, one domain", "cpu")
    report.ratio("four domains with a mixture / one, CPU", of_domains, at_most=1.01)
    report.ratio("ours / bare DeepSpeed loop, CPU", ratio("ours", "bare", "cpu"), at_most=0.96)
    report.ratio("tokens per CPU second, ours / Trainer", ratio("Trainer", "ours", "cpu"), at_least=1.05)
    report.ratio("tokens per second, ours / Trainer", ratio("Trainer", "ours", "wall"))
    report.ratio("host / whole step of ours, CPU", ratio("ours", "ours", "host", "cpu"), at_most=0.02)
    for contestant in SAVING:
        if measured[contestant] and measured["ours"]:
            stall = (median(contestant, "wall") - median("ours", "wall")) / max(1, (steps - WARM) // 5)
            report.row(contestant=f"{contestant}: stall of one save", wall_seconds=stall)


def main(arguments: list[str] | None = None) -> int:
    """Run the bench, or with --worker one rank of it."""
    options = common.parser(__doc__, rounds=3)
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--worker")
    options.add_argument("--directory", type=Path)
    args = options.parse_args(arguments)
    if args.worker:
        worker(args.worker, args.steps, args.directory)
        return 0
    if args.quick:
        args.rounds, args.steps = 1, WARM + 4
    prepare_data()
    outcomes: dict[str, list[Outcome]] = {contestant: [] for contestant in CONTESTANTS}
    for _, contestant in common.turns(CONTESTANTS, args.rounds):
        outcomes[contestant].append(run(contestant, args.steps))
    report = common.Report("training", judged=not args.quick)
    tabulate(report, outcomes, args.steps)
    return report.finish(rounds=args.rounds, steps=args.steps, ranks=RANKS)


if __name__ == "__main__":
    sys.exit(main())
