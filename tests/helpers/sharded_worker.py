"""Run one of two ranks: python -m tests.helpers.sharded_worker DIRECTORY

It trains under every ZeRO stage and wrapper, probes partitioned weights, and counts the elements that
DeepSpeed sends. `train_plain` is the reference. It runs plain optimizers in one process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from emo.common.errors import UserError
from emo.pipeline.batches.config import Batch
from emo.pipeline.config import RunConfig, load_config
from emo.pipeline.control.world import World, end_world, run_on_main
from emo.pipeline.engine.ds_config import deepspeed_config
from emo.pipeline.engine.engine import Engine
from emo.pipeline.engine.schedule import lr_at
from emo.pipeline.engine.snapshots import to_universal
from emo.pipeline.engine.start import start_world
from emo.pipeline.loss import CostEmbedding, fuse_model, get_objective, probe_model
from emo.pipeline.loss.models.varlen import VARLEN
from emo.pipeline.model.build import _find_nonfinite_parameter
from emo.pipeline.model.kernels import check_kernels
from tests.conftest import REPO
from tests.helpers import wrapped
from tests.helpers.families import by_hand, family, tiny_llama

VOCAB, BLOCK, ROWS, STEPS = 96, 16, 8, 4
ADAM = ["train.learning_rate=1e-2", "train.eps=1e-3"]  # a tiny eps would amplify rounding
MUON = [*ADAM, "train.optimizer=muon", "train.muon_lr=0.03", "train.max_grad_norm=0"]


class Case(NamedTuple):
    """A recipe and a model."""

    overrides: list[str]  # recipe keys, as key=value
    file: str  # DeepSpeed file without .json. `main` writes upper-case ones
    objective: str = "mle"
    tied: bool = False
    checkpointing: bool = False
    partitioned: bool = False  # partition weights at construction, and gather the cost embedding
    frozen_head: bool = False
    accumulation: int = 2
    kernels: bool = False  # compare custom layers with the originals before the first step


CASES = {
    "adamw-3": Case(ADAM, "zero3"),
    "adamw-offload": Case(ADAM, "zero3_offload"),
    **{f"muon-{stage}": Case(MUON, f"zero{stage}") for stage in (1, 3)},
    "muon-2-bf16": Case([*MUON, "model.dtype=bfloat16"], "zero2"),
    "narrow-2-bf16": Case([*ADAM, "model.dtype=bfloat16", "train.state_dtype=bfloat16"], "zero2"),
    "emo-2-tied": Case(ADAM, "zero2", "emo", tied=True),
    "emo-3-tied": Case(ADAM, "zero3", "emo", tied=True, checkpointing=True),
    "emo-3-pieces": Case(ADAM, "zero3", "emo", tied=True, partitioned=True),
    "emo-3-frozen": Case(ADAM, "zero3", "emo", frozen_head=True),
    # SMALL also partitions small parameters
    "compiled-3": Case([*ADAM, "model.compile=true"], "SMALL", checkpointing=True),
    "kernels-3": Case(ADAM, "SMALL", kernels=True),
    "mile-3": Case(ADAM, "zero3", "mile", accumulation=1),  # normalises weights per pass
    "adamw-hpz": Case(ADAM, "HPZ"),  # last, because its process groups remain
}
RESUMED = ("adamw-3", "muon-1", "muon-2-bf16", "muon-3", "narrow-2-bf16")
PROBED: dict[tuple[Any, ...], str] = {  # verdict by family, logit scale and attention
    ("llama",): "positions",
    ("opt",): "mask",
    ("bloom",): "refused",
    ("granite", 0.3): "head-differs",
    ("opt", None, VARLEN): "positions",
}
WIDTH, LAYERS, PASSES = 512, 4, 2
PARAMETERS = WIDTH * WIDTH * LAYERS
# DeepSpeed file, dtype, changes of its section "zero_optimization".
TRAFFIC: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "zero1": ("zero1", torch.bfloat16, {}),
    "zero2": ("zero2", torch.bfloat16, {}),
    "zero2-root": ("zero2", torch.bfloat16, {"use_multi_rank_bucket_allreduce": False}),
    "zero2-float32": ("zero2", torch.float32, {}),
}


def load_recipe(case: Case, directory: Path = REPO / "ds_configs") -> RunConfig:
    settings = ["train.num_train_epochs=null", f"train.max_steps={STEPS}", f"train.global_batch_size={ROWS}"]
    settings += ["train.lr_scheduler_type=linear", "train.warmup_ratio=0", "train.weight_decay=0.1"]
    settings += ["model.dtype=float32", f"deepspeed={directory}/{case.file}.json", *case.overrides]
    return load_config(REPO / "launch/recipes/paper/llama-7b-wikitext103.yaml", settings)


def build_model(case: Case) -> Any:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.2}
    model = tiny_llama(VOCAB, tie_word_embeddings=case.tied, **shape)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def fuse_head(model: Any, case: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        objective = get_objective(case.objective)
        cost = CostEmbedding.from_weight(model.lm_head.weight) if objective.needs_cost else None
        fuse_model(model, objective, cost)
    model.lm_head.weight.requires_grad_(not case.frozen_head)


def global_batch(step: int) -> dict[str, Tensor]:
    """Return the global batch [ROWS, BLOCK] of a step. Rows differ in their number of supervised tokens."""
    ids = torch.randint(VOCAB, (ROWS, BLOCK), generator=torch.Generator().manual_seed(100 + step))
    labels = ids.clone()
    for row in range(ROWS):
        labels[row, :row] = -100
    if step == 1:
        labels[: ROWS // 2] = -100  # one rank has no supervised token
    return {"input_ids": ids, "labels": labels}


def start_engine(case: Case, config: RunConfig, world: World, universal: bool = False) -> Engine:
    passes = case.accumulation
    ds_config = deepspeed_config(config, Batch(ROWS, ROWS // world.ranks // passes, passes, world.ranks))
    model = build_model(case)
    if case.partitioned:
        source = model.state_dict()
        with deepspeed.zero.Init(config_dict_or_path=ds_config):
            model = build_model(case)
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            if world.is_main:
                model.load_state_dict(source)
    fuse_head(model, case)
    if config.model.dtype == "bfloat16":
        model.bfloat16()
    if case.kernels:
        by_hand(model)
    settings = ds_config | {"checkpoint": {"load_universal": universal}}
    engine = Engine(model, settings, world, config.model.compile)
    if case.kernels:
        engine.ds.eval()
        with torch.no_grad():
            check_kernels(engine.model, lambda: engine.ds(**global_batch(0)))
    return engine


def train_steps(engine: Engine, case: Case, config: RunConfig, steps: range) -> Tensor:
    rank, share, losses = engine.world.rank, ROWS // engine.world.ranks, []
    size = share // case.accumulation
    for step in steps:
        whole = global_batch(step)
        starts = range(rank * share, (rank + 1) * share, size)
        micro = [{name: tensor[i : i + size] for name, tensor in whole.items()} for i in starts]
        valid = int((whole["labels"] != -100).sum())
        sums = engine.train_step(micro, valid, lr_at(config.train, step, STEPS), seed=0, stop=False)
        losses.append(sums.loss / valid)
    return torch.tensor(losses)


def run_case(case: Case, config: RunConfig, world: World, saved: Path | None) -> dict[str, Any]:
    """Return losses and weights under DeepSpeed, and losses of runs that resume half way from `saved`."""
    engine, graphs = start_engine(case, config, world), counters["stats"]["unique_graphs"]
    first = train_steps(engine, case, config, range(STEPS // 2))
    if saved is not None:
        engine.snapshot(saved)
        engine.files.write()
    results = {"losses": torch.cat((first, train_steps(engine, case, config, range(STEPS // 2, STEPS))))}
    results["groups"] = engine.groups
    results["graphs"] = counters["stats"]["unique_graphs"] - graphs
    for name, parameter in engine.model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=None):
            results[name] = parameter.detach().float().clone()
    engine.ds.destroy()
    if saved is not None:
        results["resumed"] = resume_case(case, config, world, saved)
    if saved is not None and saved.name == "adamw-3":
        copy = saved.with_name("converted")
        run_on_main(world, lambda: to_universal(saved / "state", copy / "state"))
        results["converted"] = resume_case(case, config, world, copy, universal=True)
    return results


def resume_case(case: Case, config: RunConfig, world: World, saved: Path, universal: bool = False) -> Tensor:
    engine = start_engine(case, config, world, universal)
    engine.load(saved)
    losses = train_steps(engine, case, config, range(STEPS // 2, STEPS))
    engine.ds.destroy()
    return losses


def save_padding(world: World, directory: Path) -> str:
    """Save a model whose padding is NaN. Return the parameter that looks damaged, or an empty text."""
    config = load_recipe(Case([*ADAM, "model.dtype=bfloat16"], "zero3"))
    ds_config = deepspeed_config(config, Batch(ROWS, ROWS // world.ranks, 1, world.ranks))
    with deepspeed.zero.Init(config_dict_or_path=ds_config):
        model: Any = tiny_llama(VOCAB)
        model.odd = nn.Linear(7, 1, bias=False)
    model.odd.weight.ds_tensor[7 - 4 * world.rank :] = torch.nan
    broken = _find_nonfinite_parameter(model)
    engine = Engine(model, ds_config, world)
    engine.snapshot(directory / "padding")
    engine.files.write()
    engine.ds.destroy()
    return broken


def train_plain(case: Case) -> dict[str, Any]:
    """Train in one process on complete batches, with PyTorch's AdamW and the original Muon.

    https://kellerjordan.github.io/posts/muon
    """
    model, train = build_model(case), load_recipe(case).train
    fuse_head(model, case)
    parameters = dict(model.named_parameters())
    tables = ("embed_tokens.weight", "lm_head.weight")
    matrices = [name for name, p in parameters.items() if p.dim() == 2 and not name.endswith(tables)]
    body = {name: torch.zeros_like(parameters[name]) for name in matrices if train.optimizer == "muon"}
    others = [p for name, p in parameters.items() if name not in body]
    groups = [
        {"params": [p for p in others if p.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=train.betas, eps=train.eps)
    losses = []
    for step in range(STEPS):
        lr = lr_at(train, step, STEPS)
        model.zero_grad()
        sums = model(**global_batch(step))
        loss = sums.loss / sums.tokens
        loss.backward()
        if train.max_grad_norm:
            nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm)
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        with torch.no_grad():
            for name, momentum in body.items():
                weight, gradient = parameters[name], parameters[name].grad
                momentum.lerp_(gradient, 1 - 0.95)
                update = orthogonalize(gradient.lerp(momentum, 0.95))
                rate = lr * train.muon_lr / train.learning_rate
                weight.mul_(1 - rate * train.weight_decay)
                weight.add_(update, alpha=-rate * max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5)
        losses.append(loss.detach())
    state = {name: p.detach().clone() for name, p in parameters.items()}
    return {"losses": torch.stack(losses), **state}


def orthogonalize(matrix: Tensor) -> Tensor:
    """Apply five Newton-Schulz steps towards the orthogonal factor of `matrix`."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def probe_family(name: str, scale: float | None = None, attn: str | None = None) -> str:
    """Return the start-up probe's verdict on a family. Train two steps if it is accepted."""
    model = family(name, attn)
    fuse_model(model, get_objective("mle"), **({} if scale is None else {"logit_scale": scale}))
    zero = {"overlap_comm": False, "stage3_param_persistence_threshold": 0, "stage": 3}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    config |= {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-2}}}
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    try:
        packing = probe_model(model, engine, packed=False, collective=True, device=torch.device("cpu"))
    except UserError as error:
        return error.code
    ids = torch.arange(12)[None]
    for _ in range(2):
        sums = engine(input_ids=ids, labels=ids, position_ids=ids)
        engine.backward(sums.loss / 12)
        engine.step()
    engine.destroy()
    return packing


@contextlib.contextmanager
def counted_elements() -> Iterator[Counter[str]]:
    """Count the elements that each collective sends within the block."""
    elements: Counter[str] = Counter()

    def count_calls(name: str, collective: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            tensors = (a for a in (*arguments, *options.values()) if isinstance(a, Tensor))
            largest = max((tensor.numel() for tensor in tensors), default=0)
            if largest > WIDTH:  # not a norm
                elements[name] += largest
            return collective(*arguments, **options)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("all_reduce", "reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_gather"):
            stack.enter_context(mock.patch.object(dist, name, count_calls(name, getattr(dist, name))))
        yield elements


def count_traffic(case: str) -> dict[str, int]:
    """Return the elements that the second step sends, by collective. The first creates optimizer state."""
    file, dtype, changes = TRAFFIC[case]
    config = json.loads((REPO / f"ds_configs/{file}.json").read_text(encoding="utf-8"))
    config["zero_optimization"] |= changes | {"reduce_bucket_size": WIDTH * WIDTH}
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": PASSES}
    config |= {"bf16": {"enabled": dtype == torch.bfloat16}}
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(2):
        with counted_elements() as elements:
            for _ in range(PASSES):
                engine.backward(engine(torch.ones(1, WIDTH, dtype=dtype)).float().pow(2).sum())
                engine.step()
    return dict(elements)


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    world = start_world()
    results: dict[str, dict[Any, Any]] = {"traffic": {case: count_traffic(case) for case in TRAFFIC}}
    results["wrapped"] = {case: wrapped.together(case, directory) for case in wrapped.CASES}
    results["probed"] = {arguments: probe_family(*arguments) for arguments in PROBED}
    results["padding"] = {world.ranks: save_padding(world, directory)}
    results["stages"] = {}
    folder = directory / f"{world.rank}"
    folder.mkdir()
    files = {"HPZ": ("zero3_hpz", "zero_hpz_partition_size", 2)}
    files["SMALL"] = ("zero3", "stage3_max_live_parameters", 0)
    for name, (file, key, value) in files.items():
        config = json.loads((REPO / f"ds_configs/{file}.json").read_text(encoding="utf-8"))
        config["zero_optimization"] |= {key: value, "stage3_param_persistence_threshold": 0}
        (folder / f"{name}.json").write_text(json.dumps(config))
    for name, case in CASES.items():
        folders = (folder,) if case.file.isupper() else ()
        saved = directory / name if name in RESUMED else None
        # Muon's step is compiled by default, which is slow. Only the case about compilation compiles it.
        stance = "default" if "model.compile=true" in case.overrides else "force_eager"
        # This backend gives the same graphs, without code generation, which takes a minute on a CPU.
        as_graphs = mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        with as_graphs, torch.compiler.set_stance(stance):
            results["stages"][name] = run_case(case, load_recipe(case, *folders), world, saved)
    if world.is_main:
        torch.save(results, directory / "results.pt")
    dist.barrier()
    end_world()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
