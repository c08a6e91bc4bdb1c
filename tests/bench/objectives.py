"""The fused loss beside its peers: time, peak memory, whole training steps.

    python -m tests.bench.objectives [--rounds 5] [--parts time memory step] [--quick]

Forward and backward of head and loss, gradients for hidden states and head. Everybody gets the same
inputs; labels are real text where it is at hand, of another batch in every round, so that a cache of cost
rows meets targets it has not seen. The cache is filled beforehand from other text.
"""

from __future__ import annotations

import functools
import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.loss.chunks import order_tokens
from pipeline.loss.cost import CostEmbedding
from pipeline.loss.cost_rows import open_rows
from pipeline.loss.fused import fused_linear_loss
from pipeline.loss.head import fuse_head
from pipeline.loss.objectives import get_objective
from tests.bench import common

AUTHORS, LIGER, CCE, TRL = "EMOLoss==0.0.2", "liger-kernel==0.8.5", "cut-cross-entropy==25.1.1", "trl==1.16.0"
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
CACHE_MB = 512.0
ALPACA = "9,229 Alpaca rows, LLaMA tokenizer"
WARM_BATCHES = 150  # of text seen before the measured batches


@dataclass(frozen=True)
class Shape:
    """One head and one batch."""

    label: str
    N: int
    V: int
    H: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def __str__(self) -> str:
        return f"{self.label} N={self.N} V={self.V} H={self.H} {self.dtype}"


def shapes(quick: bool) -> list[Shape]:
    """The sizes that the targets speak of."""
    if quick:
        return [Shape("small", 256, 5000, 64, "float32"), Shape("small", 256, 5000, 64, "bfloat16")]
    if GPU:
        return [
            Shape("LLaMA-7B head", 8192, 32000, 4096, "bfloat16"),
            Shape("GPT-2 head", 8192, 50257, 768, "bfloat16"),
        ]
    return [
        Shape("LLaMA-like head", 2048, 32000, 1024, "float32"),
        Shape("LLaMA-like head", 2048, 32000, 1024, "bfloat16"),
        Shape("GPT-2 head", 1024, 50257, 768, "float32"),
        Shape("GPT-2 head", 1024, 50257, 768, "bfloat16"),
    ]


@functools.cache
def text_tokens(vocab_size: int) -> tuple[Tensor, str]:
    """A long run of token ids and where they come from: Alpaca text if at hand, else Zipf's law."""
    data = Path(os.environ.get("SHARED_DATA", common.REPO.parent / "shared" / "data"))
    text = data / "instruct" / "alpaca_davinci003_9k" / "train.jsonl.zst"
    model = data / "tokenizers" / "llama" / "tokenizer.model"
    if vocab_size == 32000 and text.is_file() and model.is_file():
        import sentencepiece
        import zstandard

        kept = common.RESULTS / "tokens.pt"  # child processes need them again
        if kept.is_file():
            return torch.load(kept), ALPACA

        encode = sentencepiece.SentencePieceProcessor(model_file=str(model)).encode
        ids: list[int] = []
        with text.open("rb") as file:
            for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), "utf-8"):
                row = json.loads(line)
                ids += [*encode("\n".join((row["instruction"], row["input"], row["output"]))), 2]
        common.RESULTS.mkdir(parents=True, exist_ok=True)
        torch.save(torch.tensor(ids), kept)
        return torch.tensor(ids), ALPACA
    generator = torch.Generator().manual_seed(0)
    rank = torch.arange(vocab_size, dtype=torch.float64)
    ids_drawn = torch.multinomial((rank + 2.7) ** -1.07, 600_000, replacement=True, generator=generator)
    return ids_drawn, "drawn by Zipf's law (exponent 1.07)"


def fill(cost: CostEmbedding, labels: Tensor) -> None:
    """Let the cache see a batch of labels without computing any loss."""
    order = order_tokens(labels, cost.vocab_size, by_label=True)
    assert order.targets is not None
    rows = open_rows(cost, order.targets, torch.float32, 64, 64, as_stored=True)
    for start in range(0, len(order.places), 64):
        rows.group(start, min(start + 64, len(order.places)))


class Setting:
    """Tensors of one shape, and what each contestant does with them."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self.shape = shape
        dtype, options = shape.torch_dtype, {"device": DEVICE}
        weight = torch.randn(shape.V, shape.H, **options) * shape.H**-0.5
        self.weight = weight.to(dtype).requires_grad_()
        self.hidden = torch.randn(shape.N, shape.H, **options).to(dtype).requires_grad_()
        self.tokens, self.source = text_tokens(shape.V)
        self.cost = CostEmbedding.from_weight(self.weight)

    def labels(self, i: int) -> Tensor:
        """Batch `i` of the second half of the text; warm-up rounds have negative numbers."""
        N = self.shape.N
        start = len(self.tokens) // 2 + (i + 8) * N
        return self.tokens[start : start + N].to(DEVICE)

    def cached_cost(self) -> CostEmbedding:
        """A cost embedding whose cache has seen other text."""
        cost = self.cost.cached(CACHE_MB).placed(DEVICE, self.shape.torch_dtype)
        N = self.shape.N
        for i in range(min(WARM_BATCHES, len(self.tokens) // 2 // N)):
            fill(cost, self.tokens[i * N : (i + 1) * N].to(DEVICE))
        return cost

    def backward(self, loss: Tensor) -> None:
        self.hidden.grad = self.weight.grad = None
        loss.backward()

    def ours(self, name: str, cost: CostEmbedding | None) -> Callable[[int], None]:
        objective = get_objective(name)

        def run(i: int) -> None:
            sums = fused_linear_loss(self.hidden, self.weight, self.labels(i), objective, cost)
            self.backward(sums.loss / self.shape.N)

        return run

    def naive(self, i: int) -> None:
        logits = F.linear(self.hidden, self.weight).float()
        self.backward(F.cross_entropy(logits, self.labels(i)))

    def pytorch(self, chunked: bool) -> Callable[[int], None]:
        options = nn.LinearCrossEntropyOptions() if chunked else None

        def run(i: int) -> None:
            labels = self.labels(i)
            self.backward(F.linear_cross_entropy(self.hidden, self.weight, labels, options=options))

        return run

    def authors(self) -> Callable[[int], None]:
        """The package shifts labels itself, so it gets one more row and label of padding."""
        loss = common.import_peer(AUTHORS, "emo").EMOLoss
        embedding = self.weight.detach().clone()

        def run(i: int) -> None:
            padded = torch.cat((self.hidden, self.hidden[:1].detach()))
            labels = torch.cat((self.labels(i)[:1], self.labels(i)))
            self.backward(loss(F.linear(padded, self.weight)[None], labels[None], embedding))

        return run

    def liger(self) -> Callable[[int], None]:
        if not GPU:
            raise ImportError("its kernel is written in Triton and needs a GPU")
        common.import_peer(LIGER, "liger_kernel")
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss()
        return lambda i: self.backward(loss(self.weight, self.hidden, self.labels(i)))

    def cut(self) -> Callable[[int], None]:
        try:
            loss = common.import_peer(CCE, "cut_cross_entropy").linear_cross_entropy
        except ModuleNotFoundError as error:
            raise ImportError(f"it imports {error.name}, which this machine has not") from None
        how = "cce" if GPU else "torch_compile"
        return lambda i: self.backward(loss(self.hidden, self.weight, self.labels(i), impl=how))

    def trl(self) -> Callable[[int], None]:
        function = common.import_peer(TRL, "trl.kernels.chunked_logprob").ChunkedLogProbFunction

        def run(i: int) -> None:
            arguments = (self.hidden, self.weight, None, self.labels(i), 1.0, 8192, None, 1.0, ())
            self.backward(-function.apply(*arguments)[0].mean())

        return run


OURS_MLE, OURS_EMO, OURS_CACHE = "ours: MLE", "ours: EMO exact", "ours: EMO cached"
PEERS: dict[str, Callable[[Setting], Callable[[int], None]]] = {
    "naive CE": lambda s: s.naive,
    "torch linear_cross_entropy": lambda s: s.pytorch(chunked=False),
    "torch linear_cross_entropy, chunked": lambda s: s.pytorch(chunked=True),
    "Liger fused linear CE": Setting.liger,
    "cut-cross-entropy": Setting.cut,
    "TRL chunked log-probabilities": Setting.trl,
}
AUTHORS_EMO = "authors' EMOLoss"


def contestant(setting: Setting, name: str) -> Callable[[int], None]:
    """What `name` runs; ImportError where it cannot run here."""
    if name == OURS_MLE:
        return setting.ours("mle", None)
    if name == OURS_EMO:
        return setting.ours("emo", setting.cost)
    if name == OURS_CACHE:
        return setting.ours("emo", setting.cached_cost())
    if name == AUTHORS_EMO:
        return setting.authors()
    return PEERS[name](setting)


def runnable(setting: Setting, report: common.Report) -> dict[str, Callable[[int], None]]:
    """All contestants that run on this machine; says why where one does not."""
    found = {}
    for name in (OURS_MLE, OURS_EMO, OURS_CACHE, *PEERS, AUTHORS_EMO):
        try:
            run = contestant(setting, name)
            run(-2)
            found[name] = run
        except Exception as error:
            line = " ".join(str(error).split())[:160]
            report.note(f"{name} left out ({setting.shape}): {line}")
    return found


def peak(shape: Shape, name: str) -> float:
    """Peak memory of one contestant above its inputs and caches; runs in a child process."""
    common.settle()
    tiny = Setting(Shape("tiny", 64, 500, 32, shape.dtype))
    contestant(tiny, name)(-1)  # loads code and libraries
    del tiny
    setting = Setting(shape)
    run = contestant(setting, name)
    setting.labels(0)
    return common.peak_memory_mb(lambda: run(0))


def race_shape(shape: Shape, report: common.Report, rounds: int, memory: bool) -> None:
    """Time and memory at one shape, and the ratios that the targets name."""
    setting = Setting(shape)
    report.note(f"{shape}: labels are {setting.source}")
    runs = runnable(setting, report)
    times = common.race(runs, rounds)
    peaks: dict[str, float] = {}
    for name in runs:
        if memory:
            peaks[name] = common.in_child(peak, shape, name)
        report.row(
            shape=str(shape),
            contestant=name,
            seconds=common.statistics.median(times[name]),
            time_to_mle=common.ratio(times, name, OURS_MLE),
            peak_mb=peaks.get(name),
            memory_to_mle=peaks[name] / peaks[OURS_MLE] if memory else None,
        )
    peers = [name for name in PEERS if name in runs]
    best = min(peers, key=lambda name: common.statistics.median(times[name]))
    report.ratio(f"{shape}: MLE time / best peer ({best})", common.ratio(times, OURS_MLE, best), at_most=1.0)
    llama = shape.V == 32000  # the shape that the targets name; elsewhere ratios are reported only
    most = (1.02 if GPU else 1.05) if llama else None
    report.ratio(f"{shape}: EMO time / MLE", common.ratio(times, OURS_CACHE, OURS_MLE), at_most=most)
    report.ratio(f"{shape}: exact EMO time / MLE", common.ratio(times, OURS_EMO, OURS_MLE))
    if AUTHORS_EMO in runs:
        value = common.ratio(times, AUTHORS_EMO, OURS_CACHE)
        report.ratio(f"{shape}: authors' time / EMO", value, at_least=2.2 if llama else None)
    if memory:
        least = min(peers, key=peaks.__getitem__)
        value = peaks[OURS_MLE] / peaks[least]
        report.ratio(f"{shape}: MLE memory / leanest peer ({least})", value, at_most=1.0)
        value = peaks[OURS_CACHE] / peaks[OURS_MLE]
        report.ratio(f"{shape}: EMO memory / MLE", value, at_most=1.05 if llama else None)
        report.ratio(f"{shape}: exact EMO memory / MLE", peaks[OURS_EMO] / peaks[OURS_MLE])
        if AUTHORS_EMO in runs:
            value = peaks[AUTHORS_EMO] / peaks[OURS_CACHE]
            report.ratio(f"{shape}: authors' memory / EMO", value, at_least=8 if llama else None)
    if GPU:
        flops = 3 * 2 * shape.N * shape.V * shape.H
        for name in (OURS_MLE, OURS_CACHE):
            rate = flops / common.statistics.median(times[name]) / 1e12
            report.note(f"{shape}: {name} does {rate:.0f} TFLOP/s of head products")


def long_batch(report: common.Report, quick: bool) -> None:
    """Memory at N = 8192: ours does not grow with N beyond hidden states and their gradient."""
    N = 1024 if quick else 8192
    V, H = (5000, 64) if quick else (32000, 1024)
    for dtype in ("float32", "bfloat16"):
        shape = Shape("long batch", N, V, H, dtype)
        peaks = {}
        for name in (OURS_MLE, OURS_CACHE, AUTHORS_EMO):
            peaks[name] = common.in_child(peak, shape, name)
            report.row(shape=str(shape), contestant=name, peak_mb=peaks[name])
        value = peaks[AUTHORS_EMO] / peaks[OURS_CACHE]
        report.ratio(f"{shape}: authors' memory / EMO", value, at_least=None if quick else 25)
        report.ratio(f"{shape}: EMO memory / MLE", peaks[OURS_CACHE] / peaks[OURS_MLE], at_most=1.05)


def whole_step(report: common.Report, rounds: int, quick: bool) -> None:
    """A LLaMA's training step (forward, backward, AdamW) with EMO beside the same with MLE."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = (64, 2, 128) if quick else ((2048, 8, 2048) if GPU else (512, 8, 512))
    hidden, layers, length = size
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        tie_word_embeddings=False,
        use_cache=False,
    )
    tokens, source = text_tokens(32000)
    models, runs = {}, {}
    first = LlamaForCausalLM(config).to(DEVICE)
    cost = CostEmbedding.from_weight(first.lm_head.weight, cache_mb=CACHE_MB)
    for name in ("mle", "emo"):
        model = LlamaForCausalLM(config).to(DEVICE)
        model.load_state_dict(first.state_dict())
        fuse_head(model.lm_head, get_objective(name), cost if name == "emo" else None)
        models[name] = (model, torch.optim.AdamW(model.parameters(), lr=1e-5))

    def step(name: str, i: int) -> None:
        model, optimizer = models[name]
        rows = 4 if GPU else 2
        start = (i + 1000 if i >= 0 else -i) * rows * length % (len(tokens) - rows * length - 1)
        ids = tokens[start : start + rows * length].view(rows, length).to(DEVICE)
        labels = tokens[start + 1 : start + rows * length + 1].view(rows, length).to(DEVICE)
        sums = model.lm_head(model.model(ids).last_hidden_state, labels)
        (sums.loss / sums.tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    del first
    for i in range(4 if quick else WARM_BATCHES):  # from text that the steps do not use
        fill(cost, tokens[-(i + 1) * 2048 - 1 : -i * 2048 - 1].to(DEVICE))
    runs = {name: functools.partial(step, name) for name in models}
    times = common.race(runs, rounds)
    what = f"LLaMA {hidden} x {layers}, {length} tokens a row"
    for name in runs:
        report.row(
            shape=f"whole step, {what}",
            contestant=f"ours: {name.upper()}",
            seconds=common.statistics.median(times[name]),
            time_to_mle=common.ratio(times, name, "mle"),
        )
    report.note(f"whole step: {what}; labels are {source}")
    report.ratio("whole step: EMO time / MLE", common.ratio(times, "emo", "mle"), at_most=1.03)


def main(arguments: list[str] | None = None) -> int:
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("--parts", nargs="+", default=["time", "memory", "long", "step"])
    options.add_argument("--only", default="", help="shapes whose description contains this")
    given = options.parse_args(arguments)
    common.settle()
    report = common.Report("objectives")
    if "time" in given.parts:
        for shape in shapes(given.quick):
            if given.only in str(shape):
                race_shape(shape, report, given.rounds, "memory" in given.parts)
    if "long" in given.parts:
        long_batch(report, given.quick)
    if "step" in given.parts:
        whole_step(report, given.rounds, given.quick)
    if given.quick:  # these sizes say whether it runs, not how well
        report.ratios = {name: {"value": e["value"], "target": None} for name, e in report.ratios.items()}
    settings: dict[str, Any] = vars(given) | {"cache_mb": CACHE_MB, "warm_batches": WARM_BATCHES}
    return report.finish(**settings)


if __name__ == "__main__":
    sys.exit(main())
