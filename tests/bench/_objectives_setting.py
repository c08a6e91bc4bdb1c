"""What the objectives bench measures with: heads, batches of real labels, and every contestant on them.

The naive objectives are as people write them, from logits of all tokens.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emo.pipeline.loss.cost import CostEmbedding, TokenPlan, open_rows, plan_tokens
from emo.pipeline.loss.fused import fused_linear_loss
from emo.pipeline.loss.objectives import get_objective
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
    heads = [("LLaMA-like head", 2048, 32000, 1024), ("GPT-2 head", 1024, 50257, 768)]
    if quick:
        heads = [("small", 256, 5000, 64)]
    elif GPU:
        heads = [("LLaMA-7B head", 8192, 32000, 4096), ("GPT-2 head", 8192, 50257, 768)]
    dtypes = ("bfloat16",) if GPU and not quick else ("float32", "bfloat16")
    return [Shape(*head, dtype) for head in heads for dtype in dtypes]


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """Focal loss with gamma 2."""
    m = F.cross_entropy(logits.float(), labels, reduction="none")
    return ((1 - torch.exp(-m)) ** 2 * m).mean()


def dft(logits: Tensor, labels: Tensor) -> Tensor:
    """Dynamic fine-tuning."""
    m = F.cross_entropy(logits.float(), labels, reduction="none")
    return (torch.exp(-m).detach() * m).mean()


def mile(logits: Tensor, labels: Tensor) -> Tensor:
    """MiLe with gamma 1, its weights without gradient."""
    logits = logits.float()
    m = F.cross_entropy(logits, labels, reduction="none")
    with torch.no_grad():
        log_p = logits.log_softmax(-1)
        weight = 1 - (log_p.exp() * log_p).sum(-1)
    return (weight / weight.mean() * m).mean()


def deft(logits: Tensor, labels: Tensor) -> Tensor:
    """DEFT."""
    log_p = logits.float().log_softmax(-1)
    a = log_p.detach().exp().square().sum(-1)
    p = log_p.gather(-1, labels[:, None])[:, 0].exp()
    return ((1 - p**a) / a).mean()


def neg_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """An entropy bonus."""
    log_p = logits.float().log_softmax(-1)
    return (log_p.exp() * log_p).sum(-1).mean()


NAIVE = {function.__name__: function for function in (focal, dft, mile, deft, neg_entropy)}


@functools.cache
def text_tokens(vocab_size: int) -> tuple[Tensor, str]:
    """A long run of token ids and where they come from: Alpaca text if at hand, else Zipf's law."""
    text = common.SHARED / "instruct" / "alpaca_davinci003_9k" / "train.jsonl.zst"
    model = common.SHARED / "tokenizers" / "llama" / "tokenizer.model"
    if vocab_size == 32000 and text.is_file() and model.is_file():
        import sentencepiece
        import zstandard

        kept = common.RESULTS / "tokens.pt"  # child processes need them again
        if not kept.is_file():
            encode = sentencepiece.SentencePieceProcessor(model_file=str(model)).encode
            ids: list[int] = []
            with text.open("rb") as file:
                for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), "utf-8"):
                    row = json.loads(line)
                    ids += [*encode("\n".join((row["instruction"], row["input"], row["output"]))), 2]
            common.RESULTS.mkdir(parents=True, exist_ok=True)
            torch.save(torch.tensor(ids), kept)
        return torch.load(kept), ALPACA
    generator = torch.Generator().manual_seed(0)
    rank = torch.arange(vocab_size, dtype=torch.float64)
    ids_drawn = torch.multinomial((rank + 2.7) ** -1.07, 600_000, replacement=True, generator=generator)
    return ids_drawn, "drawn by Zipf's law (exponent 1.07)"


def fill(cost: CostEmbedding, labels: Tensor) -> None:
    """Let the cache see a batch of labels without computing any loss."""
    plan = plan_tokens(labels)
    rows = open_rows(cost, plan, plan.on(DEVICE), None, 64, 64)
    for start in range(0, len(plan), 64):
        rows.group(start, min(start + 64, len(plan)))


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
        # as the trainer has them on a GPU: planned while the step before computes
        self.plans = {i: plan_tokens(self.labels(i), pin=True) for i in range(-8, 40)} if GPU else {}

    def planned(self, i: int) -> Tensor | TokenPlan:
        """Batch `i` as the trainer hands it to the head."""
        return self.plans[i] if i in self.plans else self.labels(i)

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

    def ours(
        self, name: str, cost: CostEmbedding | None, stored: Tensor | None = None
    ) -> Callable[[int], None]:
        objective = get_objective(name)

        def run(i: int) -> None:
            labels = self.planned(i)
            sums = fused_linear_loss(self.hidden, self.weight, labels, objective, cost, stored=stored)
            self.backward(sums.loss / self.shape.N)

        return run

    def from_logits(self, name: str) -> Callable[[int], None]:
        """An objective as people write it."""
        return lambda i: self.backward(NAIVE[name](F.linear(self.hidden, self.weight), self.labels(i)))

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
        loss = common.import_peer_as("authors_emo", AUTHORS, "emo").EMOLoss
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
