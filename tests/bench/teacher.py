"""Compare divergences from a teacher with MLE and with peers: time, peak memory, what storing loses.

    python -m tests.bench.teacher [--rounds 5] [--parts time memory stored] [--quick]

Measures forward and backward of head and loss, with gradients for hidden states and head. The teacher is as
wide as the student. A live teacher costs a product and a softmax. Peers compute generalised JSD (beta 0.5).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from emo.data_prep.sources.files import open_text
from emo.pipeline.loss import Teacher, TopK, fused_linear_loss, get_objective
from tests.bench import common
from tests.bench._objectives_setting import DEVICE, GPU, LIGER, TRL, Setting, Shape

K = 64
MLE, KL, JSD, STORED = "MLE", "KL, live", "JSD, live", f"KL, top {K}"
TRL_GKD, LIGER_JSD = "TRL GKD loss", "Liger fused linear JSD"
SIDE = {"time": (MLE, KL, JSD, STORED), "memory": (MLE, KL, JSD, STORED, TRL_GKD, LIGER_JSD)}


def contestant(setting: Setting, name: str) -> Callable[[int], None]:
    """Return a contestant's step. Raises ImportError if its peer is missing."""
    shape = setting.shape
    generator = torch.Generator(DEVICE).manual_seed(1)
    hidden = torch.randn(shape.N, shape.H, device=DEVICE, generator=generator).to(setting.dtype)
    weight = setting.weight.detach().roll(1, 0)
    if name == TRL_GKD:
        gkd = common.import_peer(TRL, "trl.experimental.gkd").GKDTrainer.generalized_jsd_loss
        return lambda i: setting.backward(
            gkd(F.linear(setting.hidden, setting.weight)[None], F.linear(hidden, weight)[None], beta=0.5)
        )
    if name == LIGER_JSD:
        module = common.import_peer(LIGER, "liger_kernel.chunked_loss.jsd_loss")
        liger = module.LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, compiled=GPU)
        return lambda i: setting.backward(
            liger(setting.hidden, setting.weight, hidden, weight, setting.labels(i))
        )
    if name == MLE:
        return setting.ours("mle")
    objective = get_objective("jsd" if name == JSD else "kl")
    side: Teacher | TopK = Teacher(hidden, weight)
    if name == STORED:
        with torch.no_grad():
            side = stored(Teacher(hidden, weight), K, shape.V)

    def run(i: int) -> None:
        sums = fused_linear_loss(setting.hidden, setting.weight, setting.labels(i), objective, teacher=side)
        setting.backward(sums.loss / shape.N)

    return run


def stored(teacher: Teacher, k: int, vocab_size: int) -> TopK:
    """Return the k most likely entries of every token and the mass of the rest, a few tokens at a time."""
    parts = []
    for positions in torch.arange(teacher.hidden[..., 0].numel(), device=DEVICE).split(256):
        log_p = teacher.log_probs(positions, vocab_size)
        values, ids = log_p.topk(k)
        remainder = log_p.scatter_(1, ids, -torch.inf).logsumexp(1, keepdim=True)
        parts.append((ids, torch.cat((values, remainder), 1)))
    return TopK(*(torch.cat(column) for column in zip(*parts, strict=True)))


def peak(shape: Shape, name: str) -> float:
    """Return the peak memory of a contestant above its inputs. Call this in a child process."""
    contestant(Setting(Shape("tiny", 64, 500, 32, shape.dtype)), name)(-1)  # loads code and libraries
    setting = Setting(shape)
    run = contestant(setting, name)
    setting.labels(0)
    return common.peak_memory_mb(lambda: run(0))


def in_time(report: common.Report, shape: Shape, rounds: int) -> None:
    """Compare the time of divergences with MLE."""
    setting = Setting(shape)
    times = report.race({n: contestant(setting, n) for n in SIDE["time"]}, rounds, "contestant")
    for name, most in ((KL, 1.9), (JSD, 1.9), (STORED, 1.15)):
        report.ratio(f"{name}: time / MLE", common.ratio(times, name, MLE), at_most=most)


def in_memory(report: common.Report, shape: Shape) -> None:
    """Compare the memory of divergences with peers."""
    peaks: dict[str, float] = {}
    for name in SIDE["memory"]:
        try:
            peaks[name] = common.in_child(peak, shape, name)
        except Exception as error:
            report.note(f"{name} left out: {' '.join(str(error).split())[:160]}")
        else:
            report.row(contestant=f"{name}, N={shape.N}", peak_mb=peaks[name])
    for peer, least in ((TRL_GKD, 10), (LIGER_JSD, 1)):
        value = peaks[peer] / peaks[JSD] if peer in peaks else None
        report.ratio(f"{peer}: memory / JSD, live", value, at_least=least)


def what_is_lost(report: common.Report) -> None:
    """Report the share of the KL between two real models that is lost by storing k entries, on real text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = common.SHARED / "models"
    if not folder.is_dir():
        report.skip("stored", f"no real models at {folder}; set SHARED_DATA")
        return
    tokenizer = AutoTokenizer.from_pretrained(folder / "stories260K")
    with open_text(common.SHARED / "lm/tinystories/validation.jsonl.zst") as stream:
        text = "\n".join(json.loads(line)["text"] for line in stream.read().splitlines()[:100])
    ids = torch.tensor(tokenizer(text).input_ids[: 64 * 256]).view(-1, 256)
    log_probs: list[Tensor] = []
    with torch.no_grad():
        for name in ("stories260K", "stories-xs-279K"):
            model: Any = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
            log_probs.append(torch.cat([model(row[None]).logits[0] for row in ids]).log_softmax(-1))
    p, q = log_probs
    dense = (p.exp() * (p - q)).sum(1).mean()
    for k in (4, 16, 64, 256):
        entries = p.topk(k).indices
        masses = [torch.cat((x.gather(1, entries), rest(x, entries)), 1) for x in (p, q)]
        coarse = (masses[0].exp() * (masses[0] - masses[1])).sum(1).mean()
        lost = float(1 - coarse / dense)
        report.row(contestant=f"top {k} of {p.shape[1]}", kl_lost=lost)
        if k == K:
            report.ratio(f"top {k}: share of KL that is lost", lost, at_most=0.02)


def rest(log_p: Tensor, entries: Tensor) -> Tensor:
    """Return the log-probability of all other tokens."""
    return log_p.scatter(1, entries, -torch.inf).logsumexp(1, keepdim=True)


def main(arguments: list[str] | None = None) -> int:
    args = common.parser(__doc__, parts=("time", "memory", "stored")).parse_args(arguments)
    report = common.Report("teacher", judged=not args.quick)
    sizes = (256, 5000, 64) if args.quick else (2048, 32000, 1024)
    if "time" in args.parts:
        in_time(report, Shape("head", *sizes, "bfloat16" if GPU else "float32"), args.rounds)
    if "memory" in args.parts:
        long = (1024, 5000, 64) if args.quick else (8192, 32000, 1024)
        in_memory(report, Shape("long batch", *long, "bfloat16" if GPU else "float32"))
    if "stored" in args.parts:
        what_is_lost(report)
    return report.finish(**vars(args))


if __name__ == "__main__":
    sys.exit(main())
