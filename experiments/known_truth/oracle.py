"""Compare a learner with its oracle by their next-token distributions on held-out text.

    python -m emo.experiments.known_truth.oracle --oracle DIR --model DIR --texts FILE.jsonl
        --output_path FILE.json [--baseline DIR [--decode OBJECTIVE [--cost SOURCE]]] [--dev FILE.jsonl]
        [--samples N --max_new_tokens N]

`--baseline` adds the differences from the baseline at the temperature at which it has the model's entropy.
This removes the effect of mere sharpening.
`--decode` adds the differences from the baseline as `emo generate --decode` draws from it. If the
model is the baseline itself, it is measured with this decoding.
`--dev` adds the model at its best temperature on the development text.
`decoded`: the model's distributions after temperatures and nuclei. `locks` and `forks`: contexts with an
oracle entropy below and above the median. `bound_js`: the divergence with the best temperature of TEMPERED in
each context, a bound for any single temperature.
`--samples` adds the oracle's loss on texts by the model, and on its own texts as the floor.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from emo.common.errors import ExitCode, UserError, exit_code_of
from emo.common.io.files import write_text
from emo.data_prep.sources.files import read_text
from emo.eval.generation import distributions, likelihood
from emo.eval.generation.decoding import Decoding, prompt_ids
from emo.eval.generation.fixed_point import FixedPoint
from emo.eval.models.model import EvaluatedModel

from ..sweeps.statistics import find_best_temperature
from .corpus import sample_texts

CONTEXTS = 40_000  # rows of logits, for each of three models
SAMPLES_SEED = 4  # differs from the corpus's seeds
TEMPERED = [Decoding(temperature=t) for t in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)]
NUCLEI = [Decoding(top_p=p) for p in (0.8, 0.9, 0.95)]


def main(argv: list[str] | None = None) -> int:
    """Measure and write. Exit codes: 0 done, 1 a failure, 2 invalid input."""
    parser = argparse.ArgumentParser(prog="python -m emo.experiments.known_truth.oracle", description=__doc__)
    for name in ("--oracle", "--model", "--texts", "--output_path"):
        parser.add_argument(name, required=True, type=Path)
    for name in ("--baseline", "--dev"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--max_new_tokens", type=int, default=160, help="length of a sample (%(default)s)")
    parser.add_argument("--contexts", type=int, default=CONTEXTS, help="maximum number (%(default)s)")
    parser.add_argument("--decode", default="", metavar="OBJECTIVE", help="decoding of the baseline")
    parser.add_argument("--cost", default="", metavar="SOURCE", help="cost of --decode")
    args = parser.parse_args(argv)
    decoding = Decoding(objective=args.decode, cost=args.cost)
    if args.decode and args.baseline is None:
        raise UserError("--decode needs --baseline", code="no-baseline")
    oracle = EvaluatedModel(str(args.oracle))
    model = EvaluatedModel(str(args.model))
    results = compare_with_oracle(oracle, model, args.texts, args.baseline, args.dev, args.contexts, decoding)
    if args.samples:
        begin = prompt_ids(oracle, "")
        samples = {}
        for key, writer in (("oracle_nats", model), ("floor_nats", oracle)):  # per token: log PPL_oracle
            out = args.output_path.parent
            rows = sample_texts(writer, args.samples, args.max_new_tokens, SAMPLES_SEED, out)
            pairs = [(begin, row[len(begin) :]) for row in rows]
            samples[key] = likelihood.continuations(oracle, pairs).per_token
        results["samples"] = samples
    args.output_path.parent.mkdir(parents=True, exist_ok=True)
    write_text(args.output_path, json.dumps(results, indent=1))
    return ExitCode.DONE


def compare_with_oracle(
    oracle: EvaluatedModel,
    model: EvaluatedModel,
    texts: Path,
    baseline: Path | None,
    dev: Path | None,
    contexts: int,
    decoding: Decoding,
) -> dict[str, object]:
    """Return the mean measures over contexts. Raises UserError if the tokenizers differ.

    Args:
        oracle: The truth.
        model: The learner.
        texts: Held-out texts, see `read_token_rows`.
        baseline: Model that differences refer to.
        dev: Texts on which the temperature is chosen.
        contexts: Maximum number of contexts.
        decoding: Decoding of the baseline.
    """
    if oracle.tokenizer_digest != model.tokenizer_digest:
        problem = f"{model.source} and {oracle.source} have different tokenizers and cannot be compared"
        raise UserError(problem, code="other-tokenizer")
    shared = min(oracle.model.config.vocab_size, model.model.config.vocab_size)  # heads may be padded
    longest = min(each.model.config.max_position_embeddings for each in (oracle, model))
    rows, targets = read_token_rows(oracle.tokenizer, texts, longest, contexts)
    p = distributions.log_probs(compute_logits(oracle.model, rows, shared))
    q = compute_logits(model.model, rows, shared)
    at_1 = summarize_divergences(p, q, targets)
    results: dict[str, object] = {"contexts": len(targets), "at_1": at_1}
    values = measure_decodings(p, q)
    results["decoded"] = {choice.name.replace(".", "_"): _means(each) for choice, each in values.items()}
    results |= divide_contexts(p, {choice.temperature: values[choice]["js"] for choice in TEMPERED})
    if dev is not None:
        dev_rows, dev_targets = read_token_rows(oracle.tokenizer, dev, longest, contexts)
        logits = compute_logits(model.model, dev_rows, shared)
        best = find_best_temperature(lambda t: mean_nats(logits, dev_targets, t))
        results["temperature"] = best
        results["tempered"] = summarize_divergences(p, q / best, targets)
    if baseline is not None:
        reference = EvaluatedModel(str(baseline))
        logits = compute_logits(reference.model, rows, reference.model.config.vocab_size)
        temperature = distributions.matching_temperature(logits[:, :shared], at_1["entropy_q"])
        results["baseline_temperature"] = temperature
        tempered = summarize_divergences(p, logits[:, :shared] / temperature, targets)
        results["over_tempered_baseline"] = _subtract(at_1, tempered)
        if decoding.objective:
            decoded = _measure_settled(p, logits, targets, FixedPoint(reference, decoding))
            measured = decoded if reference.digest == model.digest else at_1
            results["over_decoded_baseline"] = _subtract(measured, decoded)
    return results


def _measure_settled(p: Tensor, logits: Tensor, targets: Tensor, settled: FixedPoint) -> dict[str, float]:
    """Return the measures of a decoding that needs the logits of the full vocabulary."""
    drawn = distributions.by_rows(lambda logits: {"log_q": settled(logits)}, logits)["log_q"]
    return summarize_divergences(p, drawn[:, : p.shape[-1]], targets)


def _subtract(values: dict[str, float], others: dict[str, float]) -> dict[str, float]:
    return {key: values[key] - others[key] for key in others}


def token_nats(log_q: Tensor, targets: Tensor) -> Tensor:
    """Return the nats [n] of targets [n] under log probabilities [n, V]."""
    return -log_q.gather(-1, targets[:, None])[:, 0]


def mean_nats(logits: Tensor, targets: Tensor, temperature: float) -> float:
    """Return the mean nats of targets [n] under logits [n, V] at a temperature."""

    def measured(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"nats": token_nats(distributions.log_probs(logits, temperature), targets)}

    return _means(distributions.by_rows(measured, logits, targets))["nats"]


def summarize_divergences(log_p: Tensor, q_logits: Tensor, targets: Tensor) -> dict[str, float]:
    """Return the means over contexts [n] of all measures, and the nats per token of the text."""

    def measured(log_p: Tensor, q_logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        log_q = distributions.log_probs(q_logits)
        of_text = {"test_nats": token_nats(log_q, targets), "floor_nats": token_nats(log_p, targets)}
        return distributions.measures(log_p, log_q) | of_text

    return _means(distributions.by_rows(measured, log_p, q_logits, targets))


def measure_decodings(log_p: Tensor, q_logits: Tensor) -> dict[Decoding, dict[str, Tensor]]:
    """Return the divergences [n] of each decoding's distributions."""

    def measured(log_p: Tensor, q_logits: Tensor, choice: Decoding) -> dict[str, Tensor]:
        logits = q_logits / choice.temperature
        if choice.top_p < 1:
            logits = TopPLogitsWarper(choice.top_p)(None, logits)
        log_q = distributions.log_probs(logits)
        return {"js": distributions.js(log_p, log_q), "kl_qp": distributions.kl(log_q, log_p)}

    choices = TEMPERED + NUCLEI
    return {c: distributions.by_rows(partial(measured, choice=c), log_p, q_logits) for c in choices}


def divide_contexts(log_p: Tensor, tempered: dict[float, Tensor]) -> dict[str, object]:
    """Return mean divergences by the oracle's entropy, and their minimum over temperatures.

    tempered: divergences [n] by temperature.
    """
    js = tempered[1.0]
    least = torch.stack(list(tempered.values())).amin(0)
    entropy = distributions.by_rows(lambda p: {"entropy": distributions.entropy(p)}, log_p)["entropy"]
    order = entropy.argsort()
    deciles = [{"entropy": float(entropy[i].mean()), "js": float(js[i].mean())} for i in order.chunk(10)]
    locks, forks = js[order].chunk(2)
    return {"deciles": deciles, **_means({"locks_js": locks, "forks_js": forks, "bound_js": least})}


def _means(values: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value.mean()) for name, value in values.items()}


def read_token_rows(
    tokenizer: Any, path: Path, longest: int, contexts: int
) -> tuple[list[list[int]], Tensor]:
    """Read the first `longest` token ids of each text in a jsonl file, and all targets [n], n <= contexts.

    A line has `ids`, or `text` to tokenize.
    """
    rows: list[list[int]] = []
    targets: list[int] = []
    text = read_text(path).removeprefix("\ufeff")  # byte order mark
    for number, line in enumerate(io.StringIO(text), 1):
        try:
            record = json.loads(line)
            row = record["ids"] if "ids" in record else tokenizer(record["text"]).input_ids
            if not all(0 <= token < len(tokenizer) for token in row):
                raise ValueError
            row = row[:longest]
        except (ValueError, LookupError, TypeError):
            problem = "expected an object with text or with valid token ids"
            raise UserError(f"{path}, line {number}: {problem}", code="no-row") from None
        if len(row) > 1 and len(targets) + len(row) - 1 <= contexts:
            rows.append(row)
            targets += row[1:]
    if not rows:
        raise UserError(f"{path} has no text with at least two tokens", code="no-text")
    return rows, torch.tensor(targets)


@torch.no_grad()
def compute_logits(model: Any, rows: list[list[int]], vocabulary: int) -> Tensor:
    """Return the logits [n, V] float32 of the first `vocabulary` tokens at each context."""
    parts = []
    for row in rows:
        ids = torch.tensor([row[:-1]], device=model.device)
        parts.append(model(input_ids=ids).logits[0, :, :vocabulary].float().cpu())
    logits = torch.cat(parts)
    if not torch.isfinite(logits).all():
        raise UserError("the model's logits are not finite", code="not-finite")
    return logits


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
