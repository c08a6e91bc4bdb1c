"""Setting of the objectives bench: heads, batches of real labels, and losses of other projects.

The naive objectives are written as they usually are, from the logits of all tokens.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emo.data_prep.sources.files import open_text
from emo.pipeline.loss.cost import CostEmbedding, TokenPlan, open_rows, plan_tokens
from emo.pipeline.loss.fused import fused_linear_loss
from emo.pipeline.loss.objectives import get_objective
from tests.bench import common

AUTHORS, LIGER, CCE, TRL = "EMOLoss==0.0.2", "liger-kernel==0.8.5", "cut-cross-entropy==25.1.1", "trl==1.16.0"
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
CACHE_MB = 512.0
WARM_BATCHES = 150  # of text that fill the cache before the measured batches
# Largest time of EMO with cached cost rows / MLE: head and loss, and a training step. The head is wider
# on a GPU, so that cost rows take a smaller part of the time. `make gpu-test` has the same targets.
HEAD_TIME, STEP_TIME = (1.02, 1.005) if GPU else (1.05, 1.03)
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # takes hidden states, head and labels


@dataclass(frozen=True)
class Shape:
    """The sizes of a head and a batch."""

    label: str
    N: int
    V: int
    H: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.label} N={self.N} V={self.V} H={self.H} {self.dtype}"


def shapes(quick: bool) -> list[Shape]:
    """Return the sizes to measure. Targets refer to the sizes without --quick."""
    heads = [("LLaMA-like head", 2048, 32000, 1024), ("GPT-2 head", 1024, 50257, 768)]
    if quick:
        heads = [("small", 256, 5000, 64)]
    elif GPU:
        heads = [("LLaMA-7B head", 8192, 32000, 4096), ("GPT-2 head", 8192, 50257, 768)]
    dtypes = ("bfloat16",) if GPU and not quick else ("float32", "bfloat16")
    return [Shape(*head, dtype) for head in heads for dtype in dtypes]


@functools.cache
def text_tokens(vocab_size: int) -> tuple[Tensor, str]:
    """Return a long sequence of token ids and its source: Alpaca text if available, else Zipf's law."""
    text = common.SHARED / "instruct" / "alpaca_davinci003_9k" / "train.jsonl.zst"
    model = common.SHARED / "tokenizers" / "llama" / "tokenizer.model"
    if vocab_size == 32000 and text.is_file() and model.is_file():
        import sentencepiece

        cache = common.RESULTS / "tokens.pt"  # reused by child processes
        if not cache.is_file():
            encode = sentencepiece.SentencePieceProcessor(model_file=str(model)).encode
            with open_text(text) as stream:
                rows = [json.loads(line) for line in stream.read().splitlines()]
            texts = ["\n".join((row["instruction"], row["input"], row["output"])) for row in rows]
            common.RESULTS.mkdir(parents=True, exist_ok=True)
            torch.save(torch.tensor([token for ids in encode(texts) for token in (*ids, 2)]), cache)
        return torch.load(cache), "9,229 Alpaca rows, LLaMA tokenizer"
    generator = torch.Generator().manual_seed(0)
    rank = torch.arange(vocab_size, dtype=torch.float64)
    ids_drawn = torch.multinomial((rank + 2.7) ** -1.07, 600_000, replacement=True, generator=generator)
    return ids_drawn, "drawn by Zipf's law (exponent 1.07)"


def fill(cost: CostEmbedding, labels: Tensor) -> None:
    """Fill the cache with the rows of a batch of labels, without computing a loss."""
    plan = plan_tokens(labels)
    rows = open_rows(cost, plan, plan.to_device(DEVICE), None, 64, 64)
    for start in range(0, len(plan), 64):
        rows.read_group(start, min(start + 64, len(plan)))


class Setting:
    """Tensors of one shape, and a forward and backward pass of each loss on them."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self.shape, self.dtype = shape, getattr(torch, shape.dtype)
        weight = torch.randn(shape.V, shape.H, device=DEVICE) * shape.H**-0.5
        self.weight = weight.to(self.dtype).requires_grad_()
        self.hidden = torch.randn(shape.N, shape.H, device=DEVICE).to(self.dtype).requires_grad_()
        self.tokens, self.source = text_tokens(shape.V)
        self.cost = CostEmbedding.from_weight(self.weight)
        # as in the trainer on a GPU, which plans a batch while the step before computes
        self.plans = {i: plan_tokens(self.labels(i), pin=True) for i in range(-8, 40)} if GPU else {}

    def labels(self, i: int) -> Tensor:
        """Return batch `i` of the second half of the text. Warm-up rounds have negative numbers."""
        N = self.shape.N
        start = len(self.tokens) // 2 + (i + 8) * N
        return self.tokens[start : start + N].to(DEVICE)

    @functools.cached_property
    def cached_cost(self) -> CostEmbedding:
        """A cost embedding whose cache is filled from other text."""
        cost = self.cost.cached(CACHE_MB).prepared_for(DEVICE, self.dtype)
        N = self.shape.N
        for i in range(min(WARM_BATCHES, len(self.tokens) // 2 // N)):
            fill(cost, self.tokens[i * N : (i + 1) * N].to(DEVICE))
        return cost

    def backward(self, loss: Tensor) -> None:
        self.hidden.grad = self.weight.grad = None
        loss.backward()

    def ours(self, name: str, exact: bool = False) -> Callable[[int], None]:
        """Return a step with an objective. Its batches have the form that the trainer passes to the head."""
        objective = get_objective(name)
        cost = (self.cost if exact else self.cached_cost) if objective.needs_cost else None
        stored = torch.full((self.shape.N,), -2.0, device=DEVICE) if "stored" in objective.needs else None

        def run(i: int) -> None:
            labels: Tensor | TokenPlan = self.plans[i] if i in self.plans else self.labels(i)
            sums = fused_linear_loss(self.hidden, self.weight, labels, objective, cost, stored=stored)
            self.backward(sums.loss / self.shape.N)

        return run

    def other(self, loss: Loss) -> Callable[[int], None]:
        return lambda i: self.backward(loss(self.hidden, self.weight, self.labels(i)))


# --- losses of other projects, which raise ImportError if they cannot run here ------------------------------


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    m = F.cross_entropy(logits.float(), labels, reduction="none")
    return ((1 - torch.exp(-m)) ** 2 * m).mean()


def dft(logits: Tensor, labels: Tensor) -> Tensor:
    m = F.cross_entropy(logits.float(), labels, reduction="none")
    return (torch.exp(-m).detach() * m).mean()


def mile(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits.float()
    m = F.cross_entropy(logits, labels, reduction="none")
    with torch.no_grad():
        log_p = logits.log_softmax(-1)
        weight = 1 - (log_p.exp() * log_p).sum(-1)
    return (weight / weight.mean() * m).mean()


def deft(logits: Tensor, labels: Tensor) -> Tensor:
    log_p = logits.float().log_softmax(-1)
    a = log_p.detach().exp().square().sum(-1)
    p = log_p.gather(-1, labels[:, None])[:, 0].exp()
    return ((1 - p**a) / a).mean()


def neg_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    log_p = logits.float().log_softmax(-1)
    return (log_p.exp() * log_p).sum(-1).mean()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


NAIVE = {function.__name__: function for function in (focal, dft, mile, deft, neg_entropy)}


def from_logits(loss: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    return lambda hidden, weight, labels: loss(F.linear(hidden, weight), labels)


def chunked() -> Loss:
    return functools.partial(F.linear_cross_entropy, options=nn.LinearCrossEntropyOptions())


def liger() -> Loss:
    if not GPU:
        raise ImportError("its kernel is written in Triton and needs a GPU")
    loss = common.import_peer(LIGER, "liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, labels: loss(weight, hidden, labels)


def cut() -> Loss:
    loss = common.import_peer(CCE, "cut_cross_entropy").linear_cross_entropy
    return functools.partial(loss, impl="cce" if GPU else "torch_compile")


def trl() -> Loss:
    chunks = common.import_peer(TRL, "trl.kernels.chunked_logprob").ChunkedLogProbFunction
    options = (1.0, 8192, None, 1.0, ())
    return lambda hidden, weight, labels: -chunks.apply(hidden, weight, None, labels, *options)[0].mean()


def authors(embedding: Tensor) -> Loss:
    """Return the authors' loss. It shifts labels itself, so it gets a row and a label as padding."""
    loss = common.import_peer(AUTHORS, "emo", "authors_emo").EMOLoss

    def padded(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        rows = torch.cat((hidden, hidden[:1].detach()))
        return loss(F.linear(rows, weight)[None], torch.cat((labels[:1], labels))[None], embedding)

    return padded
