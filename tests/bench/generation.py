"""Compare batched sampling and likelihoods with single sampling and transformers' generate in CPU time.

    python -m tests.bench.generation [--rounds 3] [--quick]

All contestants continue the same 64 prefixes of different lengths by the same largest number of tokens, from
the full distribution. Sampling one by one is measured on some prefixes and scaled to all. Likelihoods are
compared with a plain dense forward of as many tokens as are distinct, including the head.
"""

from __future__ import annotations

import os
import statistics
import sys
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from emo.eval.generation import likelihood
from emo.eval.generation.decoding import Request
from emo.eval.generation.sampling import Sampler
from emo.eval.models.prefix_scorer import PrefixScorer
from tests.bench import common

PREFIXES, TOKENS, LONGEST, END = 64, 80, 30, 2
BATCHED, TRANSFORMERS, FORWARD = 5.0, 1.0, 0.8  # targets
TEXTS = 5  # continuations per prefix
RANDOM = "llama-21M"
MODELS = {"stories260K": 8, RANDOM: 4}  # with the number of prefixes to sample one by one


def load(name: str) -> Any:
    """Return a real model of 260,000 parameters, or a random one of 21 million."""
    if name == RANDOM:
        return common.random_llama(32000, 2048)
    path = common.SHARED / "models" / name
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def prefixes(vocabulary: int) -> list[list[int]]:
    """Return 64 prefixes of 1 to 30 tokens."""
    random = np.random.default_rng(0)
    return [random.integers(3, vocabulary, random.integers(1, LONGEST + 1)).tolist() for _ in range(PREFIXES)]


def sampling(report: common.Report, name: str, rounds: int, tokens: int) -> None:
    """Compare three ways to sample, and check that ours gives equal texts in all batch sizes."""
    model, few = load(name), MODELS[name]
    prompts = prefixes(model.config.vocab_size)
    width = max(map(len, prompts))

    def ours(number: int, batch: int = PREFIXES, count: int = PREFIXES) -> Any:
        requests = [Request(prompt, [number, i]) for i, prompt in enumerate(prompts[:count])]
        return Sampler(model, ends=[END], batch=batch).run(requests, tokens)

    @torch.inference_mode()
    def transformers(number: int) -> Any:
        """Call `generate` on one left-padded batch."""
        torch.manual_seed(number)
        return model.generate(
            torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
            attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=tokens, eos_token_id=END, pad_token_id=0,
        )  # fmt: skip

    contestants = {"batched": ours, "one by one": lambda i: ours(i, 1, few), "transformers": transformers}
    times = common.race(contestants, rounds)
    times["one by one"] = [took * PREFIXES / few for took in times["one by one"]]
    for way, took in times.items():
        report.row(model=name, what="sampling", who=way, seconds=statistics.median(took))
    for way, target in (("one by one", BATCHED), ("transformers", TRANSFORMERS)):
        report.ratio(f"{name}: {way} / batched", common.ratio(times, way, "batched"), at_least=target)
    same = sum(a == b for a, b in zip(ours(0)[:few], ours(0, 1, few), strict=True))
    report.ratio(f"{name}: equal texts of {few}", same / few, at_least=1.0)


def likelihoods(report: common.Report, name: str, rounds: int, tokens: int) -> None:
    """Compare perplexities with shared prefixes, and cross-entropies, with the plain forward."""
    model, other = load(name), load(name)
    scorer, random = PrefixScorer(model), np.random.default_rng(1)
    vocabulary = model.config.vocab_size
    prompts = prefixes(vocabulary)[: PREFIXES // 4]
    pairs = [(p, random.integers(3, vocabulary, tokens - i).tolist()) for p in prompts for i in range(TEXTS)]
    distinct = sum(map(len, prompts)) + sum(len(tail) - 1 for _, tail in pairs)
    rows = [random.integers(3, vocabulary, tokens + 1 - i % 16).tolist() for i in range(PREFIXES // 2)]
    contestants: common.Contestants = {
        "perplexity": lambda _: likelihood.continuation_nll(scorer, pairs),
        "forward": lambda _: plain(model, distinct, tokens),
        "cross-entropies": lambda _: likelihood.mean_cross_entropies(model, other, rows),
        "two forwards": lambda _: [plain(m, sum(map(len, rows)), tokens) for m in (model, other)],
    }
    times = report.race(contestants, rounds, "who", model=name, what="likelihood")
    for base, way in (("forward", "perplexity"), ("two forwards", "cross-entropies")):
        report.ratio(f"{name}: {base} / {way}", common.ratio(times, base, way), at_least=FORWARD)


@torch.inference_mode()
def plain(model: Any, count: int, width: int, batch: int = 16) -> None:
    """Compute the logits of `count` tokens in full rows of `width`, without padding."""
    ids = torch.arange(batch * width).view(batch, width) % model.config.vocab_size
    for start in range(0, count // width, batch):
        model(input_ids=ids[: count // width - start], use_cache=False)


PARTS = {"sampling": sampling, "likelihoods": likelihoods}


def main() -> int:
    parser = common.parser(__doc__, rounds=3, parts=PARTS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    args = parser.parse_args()
    rounds, tokens = (1, 20) if args.quick else (args.rounds, TOKENS)
    report = common.Report("generation", judged=not args.quick)
    for name in args.models:
        if name != RANDOM and not (common.SHARED / "models" / name).is_dir():
            report.skip(name, f"not in {common.SHARED}/models; set SHARED_DATA")
            continue
        for part in args.parts:
            PARTS[part](report, name, rounds, tokens)
    return report.finish(rounds=rounds, tokens=tokens, prefixes=PREFIXES, texts=TEXTS)


if __name__ == "__main__":
    sys.exit(main())
