"""Compare the fused loss with its peers: time, peak memory, whole training steps.

    python -m tests.bench.objectives [--rounds 5] [--parts time memory library long step] [--quick]

Measures forward and backward of head and loss, with gradients for hidden states and head. All contestants get
the same inputs. Labels are real text if available. Each round has another batch, so that the cache of cost
rows meets new targets. The cache is filled beforehand from other text.
"""

from __future__ import annotations

import copy
import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from emo.pipeline.loss.cost import CostEmbedding
from emo.pipeline.loss.models.head import fuse_head
from emo.pipeline.loss.objectives import BUILT_IN, get_objective
from tests.bench import _objectives_setting as others
from tests.bench import common
from tests.bench._objectives_setting import (
    CACHE_MB,
    DEVICE,
    GPU,
    HEAD_TIME,
    NAIVE,
    STEP_TIME,
    WARM_BATCHES,
    Setting,
    Shape,
)

OURS_MLE, OURS_EMO, OURS_CACHE = "ours: MLE", "ours: EMO exact", "ours: EMO cached"
PEERS: dict[str, Callable[[], others.Loss]] = {
    "naive CE": lambda: others.from_logits(others.cross_entropy),
    "torch linear_cross_entropy": lambda: F.linear_cross_entropy,
    "torch linear_cross_entropy, chunked": others.chunked,
    "Liger fused linear CE": others.liger,
    "cut-cross-entropy": others.cut,
    "TRL chunked log-probabilities": others.trl,
}
AUTHORS_EMO = "authors' EMOLoss"


def contestant(setting: Setting, name: str) -> Callable[[int], None]:
    """Return the step of a peer, `naive: NAME` or `ours: NAME`. Raises ImportError if it cannot run here."""
    if name in PEERS:
        return setting.other(PEERS[name]())
    if name == AUTHORS_EMO:
        return setting.other(others.authors(setting.weight.detach().clone()))
    variant, objective, *costs = name.replace(":", "").lower().split()
    if variant == "naive":
        return setting.other(others.from_logits(NAIVE[objective]))
    return setting.ours(objective, exact=costs == ["exact"])


def runnable(setting: Setting, report: common.Report) -> common.Contestants:
    """Return all contestants that run on this machine. Notes give the reasons of the others."""
    runs: common.Contestants = {}
    for name in (OURS_MLE, OURS_EMO, OURS_CACHE, *PEERS, AUTHORS_EMO):
        try:
            run = contestant(setting, name)
            run(-2)
            runs[name] = run
        except Exception as error:
            report.note(f"{name} left out ({setting.shape}): {' '.join(str(error).split())[:160]}")
    return runs


def peak(shape: Shape, name: str) -> float:
    """Return the peak memory of a contestant above its inputs and caches. Call this in a child process."""
    contestant(Setting(Shape("tiny", 64, 500, 32, shape.dtype)), name)(-1)  # loads code and libraries
    setting = Setting(shape)
    run = contestant(setting, name)
    setting.labels(0)
    return common.peak_memory_mb(lambda: run(0))


def measure(
    report: common.Report, shape: object, runs: common.Contestants, base: str, rounds: int, memory: bool
) -> dict[str, common.Times[str]]:
    """Measure times, and peaks of memory if wanted. Report a row per contestant with ratios to `base`."""
    measured = {"time": common.race(runs, rounds)}
    if memory:
        measured["memory"] = {name: [common.in_child(peak, shape, name)] for name in runs}
    for name in runs:
        cells = {}
        for kind, values in measured.items():
            cells[{"time": "seconds", "memory": "peak_mb"}[kind]] = statistics.median(values[name])
            cells[f"{kind}_to_mle"] = common.ratio(values, name, base)
        report.row(shape=str(shape), contestant=name, **cells)
    return measured


def race_shape(shape: Shape, report: common.Report, rounds: int, memory: bool) -> None:
    """Compare time and memory at one shape, and report the ratios."""
    setting = Setting(shape)
    report.note(f"{shape}: labels are {setting.source}")
    runs = runnable(setting, report)
    llama = shape.V == 32000  # this shape has all targets, others have fewer
    targets = {
        "time": ("best", HEAD_TIME if llama or not GPU else None, 2.2),
        "memory": ("leanest", 1.05 if llama else None, 8),
    }
    for kind, values in measure(report, shape, runs, OURS_MLE, rounds, memory).items():
        which, most, least = targets[kind]
        ratio = functools.partial(common.ratio, values)
        peers = {name: statistics.median(values[name]) for name in PEERS if name in runs}
        best = min(peers, key=peers.__getitem__)
        report.ratio(f"{shape}: MLE {kind} / {which} peer ({best})", ratio(OURS_MLE, best), at_most=1.0)
        report.ratio(f"{shape}: EMO {kind} / MLE", ratio(OURS_CACHE, OURS_MLE), at_most=most)
        report.ratio(f"{shape}: exact EMO {kind} / MLE", ratio(OURS_EMO, OURS_MLE))
        value = ratio(AUTHORS_EMO, OURS_CACHE) if AUTHORS_EMO in runs else None
        report.ratio(f"{shape}: authors' {kind} / EMO", value, at_least=least if llama else None)


def library(report: common.Report, shape: Shape, rounds: int, memory: bool) -> None:
    """Compare every objective with MLE, and five of them with their usual form from logits."""
    setting, base = Setting(shape), "ours: mle"
    names = [f"ours: {name}" for name in BUILT_IN]
    names += [f"naive: {name}" for name in NAIVE]
    runs: common.Contestants = {name: contestant(setting, name) for name in names}
    for kind, values in measure(report, shape, runs, base, rounds, memory).items():
        for name in (name for name in names if name != base):
            variant, objective = name.split(": ")
            beside, label, most = f"ours: {objective}", "ours", None
            if variant == "ours":
                entropy = bool({"H", "H_top"} & get_objective(objective).needs)
                beside, label, most = base, "MLE", 1.15 if entropy and not GPU else 1.10
            report.ratio(f"{name} {kind} / {label}", common.ratio(values, name, beside), at_most=most)


def long_batch(report: common.Report, quick: bool) -> None:
    """Compare memory at N = 8192. Ours grows with N only by hidden states and their gradient."""
    sizes = (1024, 5000, 64) if quick else (8192, 32000, 1024)
    for dtype in ("float32", "bfloat16"):
        shape = Shape("long batch", *sizes, dtype)
        peaks = {name: common.in_child(peak, shape, name) for name in (OURS_MLE, OURS_CACHE, AUTHORS_EMO)}
        for name, took in peaks.items():
            report.row(shape=str(shape), contestant=name, peak_mb=took)
        value = peaks[AUTHORS_EMO] / peaks[OURS_CACHE]
        report.ratio(f"{shape}: authors' memory / EMO", value, at_least=25)
        report.ratio(f"{shape}: EMO memory / MLE", peaks[OURS_CACHE] / peaks[OURS_MLE], at_most=1.05)


def whole_step(report: common.Report, rounds: int, quick: bool) -> None:
    """Compare the training step of a LLaMA (forward, backward, AdamW) with EMO and with MLE."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    dtype = torch.bfloat16 if GPU else torch.float32
    hidden, layers, length = (64, 2, 128) if quick else ((2048, 8, 2048) if GPU else (512, 8, 512))
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": hidden // 64, "vocab_size": 32000}
    config = LlamaConfig(tie_word_embeddings=False, use_cache=False, **sizes)
    tokens, source = others.text_tokens(32000)
    first = LlamaForCausalLM(config).to(DEVICE, dtype)
    cost = CostEmbedding.from_weight(first.lm_head.weight, cache_mb=CACHE_MB)
    models = {"mle": first, "emo": copy.deepcopy(first)}
    for name, model in models.items():
        fuse_head(model.lm_head, get_objective(name), cost if name == "emo" else None)
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-5) for name, model in models.items()}

    def step(name: str, i: int) -> None:
        model, rows = models[name], 4 if GPU else 2
        start = (i + 1000 if i >= 0 else -i) * rows * length % (len(tokens) - rows * length - 1)
        span = tokens[start : start + rows * length + 1].to(DEVICE)
        ids, labels = span[:-1].view(rows, length), span[1:].view(rows, length)
        sums = model.lm_head(model.model(ids).last_hidden_state, labels)
        (sums.loss / sums.tokens).backward()
        optimizers[name].step()
        optimizers[name].zero_grad()

    for i in range(4 if quick else WARM_BATCHES):  # from text that the steps do not use
        others.fill(cost, tokens[-(i + 1) * 2048 - 1 : -i * 2048 - 1].to(DEVICE))
    runs: common.Contestants = {f"ours: {name.upper()}": functools.partial(step, name) for name in models}
    description = f"LLaMA {hidden} x {layers}, {length} tokens a row, {str(dtype).removeprefix('torch.')}"
    times = measure(report, f"whole step, {description}", runs, "ours: MLE", rounds, memory=False)["time"]
    report.note(f"whole step: {description}; labels are {source}")
    value = common.ratio(times, "ours: EMO", "ours: MLE")
    report.ratio("whole step: EMO time / MLE", value, at_most=STEP_TIME)


def main(arguments: list[str] | None = None) -> int:
    options = common.parser(__doc__, parts=("time", "memory", "library", "long", "step"))
    options.add_argument("--only", default="", help="shapes whose description contains this")
    args = options.parse_args(arguments)
    report = common.Report("objectives", judged=not args.quick)
    memory, shapes = "memory" in args.parts, others.shapes(args.quick)
    if "time" in args.parts:
        for shape in shapes:
            if args.only in str(shape):
                race_shape(shape, report, args.rounds, memory)
    if "library" in args.parts:
        library(report, shapes[0], args.rounds, memory)
    if "long" in args.parts:
        long_batch(report, args.quick)
    if "step" in args.parts:
        whole_step(report, args.rounds, args.quick)
    settings: dict[str, Any] = vars(args) | {"cache_mb": CACHE_MB, "warm_batches": WARM_BATCHES}
    return report.finish(**settings)


if __name__ == "__main__":
    sys.exit(main())
