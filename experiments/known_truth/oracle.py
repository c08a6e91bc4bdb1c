"""A learner beside its oracle: exact next-token distributions of both at every context of held-out text.

    python -m emo.experiments.known_truth.oracle --oracle DIR --model DIR --texts FILE.jsonl
        --output_path FILE.json [--baseline DIR [--decode OBJECTIVE [--cost SOURCE]]] [--dev FILE.jsonl]
        [--samples N --max_new_tokens N]

With `--baseline` every measure is also reported as the difference from the baseline at the temperature at
which it is as certain as the model: what is left of an effect when sharpening alone is taken away.
With `--decode` also from the baseline as `emo generate --decode` draws from it, which the baseline itself
then counts as: what training adds to a decoding.
With `--dev` the model is reported at the temperature that suits the development text best, too.
`decoded`: the model's distributions as temperatures and nuclei leave them; `locks` and `forks`: the contexts
in which the oracle is more certain than in the median one, and the others; `bound_js`: the divergence where
every context has the best temperature of TEMPERED, which no single temperature can be better than.
With `--samples` the oracle reads so many texts of the model's own, and as many of its own: the floor.
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

from emo.common.errors import ExitCode, UserError, outcome
from emo.common.io.files import write_text
from emo.data_prep.sources.files import read_text
from emo.eval.generation import distributions, likelihood
from emo.eval.generation.decoding import Decoding, prompt_ids
from emo.eval.generation.settled import Settled
from emo.eval.model import EvaluatedModel

from ..sweeps.statistics import best_temperature
from .corpus import sample

CONTEXTS = 40_000  # a row of logits each, three models
SAMPLES_SEED = 4  # not one of the corpus's
TEMPERED = [Decoding(temperature=t) for t in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)]
NUCLEI = [Decoding(top_p=p) for p in (0.8, 0.9, 0.95)]


def main(argv: list[str] | None = None) -> int:
    """Measure and write. Exit codes: 0 done, 1 a failure, 2 a mistake in the input."""
    parser = argparse.ArgumentParser(prog="python -m emo.experiments.known_truth.oracle", description=__doc__)
    for name in ("--oracle", "--model", "--texts", "--output_path"):
        parser.add_argument(name, required=True, type=Path)
    for name in ("--baseline", "--dev"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--max_new_tokens", type=int, default=160, help="of a sample (%(default)s)")
    parser.add_argument("--contexts", type=int, default=CONTEXTS, help="at most (%(default)s)")
    parser.add_argument("--decode", default="", metavar="OBJECTIVE", help="of the baseline")
    parser.add_argument("--cost", default="", metavar="SOURCE", help="with --decode")
    args = parser.parse_args(argv)
    decoding = Decoding(objective=args.decode, cost=args.cost)
    if args.decode and args.baseline is None:
        raise UserError("--decode is of the baseline; give --baseline", code="no-baseline")
    oracle, model = EvaluatedModel(str(args.oracle)), EvaluatedModel(str(args.model))
    results = measure(oracle, model, args.texts, args.baseline, args.dev, args.contexts, decoding)
    if args.samples:
        begin, samples = prompt_ids(oracle, ""), {}
        for key, writer in (("oracle_nats", model), ("floor_nats", oracle)):  # per token: log PPL_oracle
            out = args.output_path.parent
            rows = sample(writer, args.samples, args.max_new_tokens, SAMPLES_SEED, out)
            pairs = [(begin, row[len(begin) :]) for row in rows]
            samples[key] = likelihood.continuations(oracle, pairs).per_token
        results["samples"] = samples
    args.output_path.parent.mkdir(parents=True, exist_ok=True)
    write_text(args.output_path, json.dumps(results, indent=1))
    return ExitCode.DONE


def measure(
    oracle: EvaluatedModel,
    model: EvaluatedModel,
    texts: Path,
    baseline: Path | None,
    dev: Path | None,
    contexts: int,
    decoding: Decoding,
) -> dict[str, Any]:
    """Return mean measures per context. Raises UserError for models whose tokenizers differ."""
    if oracle.tokenizer_digest != model.tokenizer_digest:
        problem = f"{model.given} and {oracle.given} have different tokenizers and cannot be compared"
        raise UserError(problem, code="other-tokenizer")
    shared = min(oracle.model.config.vocab_size, model.model.config.vocab_size)  # heads may be padded
    longest = min(each.model.config.max_position_embeddings for each in (oracle, model))
    rows, targets = token_rows(oracle.tokenizer, texts, longest, contexts)
    p = distributions.log_probs(logits_of(oracle.model, rows, shared))
    q = logits_of(model.model, rows, shared)
    results: dict[str, Any] = {"contexts": len(targets), "at_1": summary(p, q, targets)}
    values = decoded(p, q)
    results["decoded"] = {choice.name.replace(".", "_"): _means(each) for choice, each in values.items()}
    results |= divided(p, {choice.temperature: values[choice]["js"] for choice in TEMPERED})
    if dev is not None:
        dev_rows, dev_targets = token_rows(oracle.tokenizer, dev, longest, contexts)
        logits = logits_of(model.model, dev_rows, shared)
        best = best_temperature(lambda t: mean_nats(logits, dev_targets, t))
        results["temperature"] = best
        results["tempered"] = summary(p, q / best, targets)
    if baseline is not None:
        reference = EvaluatedModel(str(baseline))
        whole = logits_of(reference.model, rows, reference.model.config.vocab_size)
        base = whole[:, :shared]
        temperature = distributions.matching_temperature(base, results["at_1"]["entropy_q"])
        tempered = summary(p, base / temperature, targets)
        results["baseline_temperature"] = temperature
        results["over_tempered_baseline"] = {k: results["at_1"][k] - tempered[k] for k in tempered}
        if decoding.objective:
            settled = Settled(reference, decoding)
            drawn = distributions.by_rows(lambda logits: {"log_q": settled(logits)}, whole)["log_q"]
            decoded_baseline = summary(p, drawn[:, :shared], targets)
            measured = decoded_baseline if reference.digest == model.digest else results["at_1"]
            results["over_decoded_baseline"] = {k: measured[k] - decoded_baseline[k] for k in measured}
    return results


def nats(log_q: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log-likelihood [n] of targets [n] under log probabilities [n, V]."""
    return -log_q.gather(-1, targets[:, None])[:, 0]


def mean_nats(logits: Tensor, targets: Tensor, temperature: float) -> float:
    """Return the mean of `nats` under logits [n, V] at a temperature."""

    def measured(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"nats": nats(distributions.log_probs(logits, temperature), targets)}

    return _means(distributions.by_rows(measured, logits, targets))["nats"]


def summary(log_p: Tensor, q_logits: Tensor, targets: Tensor) -> dict[str, float]:
    """Return means over contexts [n] of every measure, and the nats per token of the text itself."""

    def measured(log_p: Tensor, q_logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        log_q = distributions.log_probs(q_logits)
        of_text = {"test_nats": nats(log_q, targets), "floor_nats": nats(log_p, targets)}
        return distributions.measures(log_p, log_q) | of_text

    return _means(distributions.by_rows(measured, log_p, q_logits, targets))


def decoded(log_p: Tensor, q_logits: Tensor) -> dict[Decoding, dict[str, Tensor]]:
    """Return divergences [n] of the distributions that each decoding draws from."""

    def measured(log_p: Tensor, q_logits: Tensor, choice: Decoding) -> dict[str, Tensor]:
        logits = q_logits / choice.temperature
        if choice.top_p < 1:
            logits = TopPLogitsWarper(choice.top_p)(None, logits)
        log_q = distributions.log_probs(logits)
        return {"js": distributions.js(log_p, log_q), "kl_qp": distributions.kl(log_q, log_p)}

    choices = TEMPERED + NUCLEI
    return {c: distributions.by_rows(partial(measured, choice=c), log_p, q_logits) for c in choices}


def divided(log_p: Tensor, tempered: dict[float, Tensor]) -> dict[str, Any]:
    """Return mean divergences of the contexts in which the oracle is certain and not, and their least one.

    tempered: divergences [n] by temperature.
    """
    js, least = tempered[1.0], torch.stack(list(tempered.values())).amin(0)
    entropy = distributions.by_rows(lambda p: {"entropy": distributions.entropy(p)}, log_p)["entropy"]
    order = entropy.argsort()
    deciles = [{"entropy": float(entropy[i].mean()), "js": float(js[i].mean())} for i in order.chunk(10)]
    locks, forks = js[order].chunk(2)
    return {"deciles": deciles, **_means({"locks_js": locks, "forks_js": forks, "bound_js": least})}


def _means(values: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value.mean()) for name, value in values.items()}


def token_rows(tokenizer: Any, path: Path, longest: int, contexts: int) -> tuple[list[list[int]], Tensor]:
    """Return the first `longest` token ids of a jsonl file's texts, and all targets [n], n <= contexts.

    A line has `ids` or `text`, which is tokenized.
    """
    rows: list[list[int]] = []
    targets: list[int] = []
    text = read_text(path).removeprefix("\ufeff")  # the mark that some programs begin a file with
    for number, line in enumerate(io.StringIO(text), 1):
        try:
            record = json.loads(line)
            row = record["ids"] if "ids" in record else tokenizer(record["text"]).input_ids
            if not all(0 <= token < len(tokenizer) for token in row):
                raise ValueError
            row = row[:longest]
        except (ValueError, LookupError, TypeError):
            problem = "expected an object with text, or with ids of the tokenizer"
            raise UserError(f"{path}, line {number}: {problem}", code="no-row") from None
        if len(row) > 1 and len(targets) + len(row) - 1 <= contexts:
            rows.append(row)
            targets += row[1:]
    if not rows:
        raise UserError(f"{path} holds no text of two tokens or more", code="no-text")
    return rows, torch.tensor(targets)


@torch.no_grad()
def logits_of(model: Any, rows: list[list[int]], vocabulary: int) -> Tensor:
    """Return logits of the first `vocabulary` tokens where a token follows, [n, V] float32."""
    parts = []
    for row in rows:
        ids = torch.tensor([row[:-1]], device=model.device)
        parts.append(model(input_ids=ids).logits[0, :, :vocabulary].float().cpu())
    logits = torch.cat(parts)
    if not torch.isfinite(logits).all():
        raise UserError("the model's logits are not finite")
    return logits


if __name__ == "__main__":
    sys.exit(outcome(main))
