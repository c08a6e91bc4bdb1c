"""Sampled text on disk: made in chunks that any number of processes share, then one file of records.

OUT/store/KEY/                                   chunks and leases, as evaluations have them
OUT/models/NAME/generated/CORPUS-DECODING/
    records.jsonl       one text per line: prefix, continuation, its tokens, the human continuation
    about.json          model, corpus, decoding, seeds
OUT/models/NAME/samples.json                     the first few unbiased ones, for the report
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from emo.common.errors import UserError
from emo.common.untrusted import read_json
from emo.data_prep.inputs import read_text
from emo.eval import store
from emo.eval.generation.decoding import (
    Decoding,
    context_of,
    end_ids,
    identity_of,
    prompt_ids,
    split_ids,
    text_after,
)
from emo.eval.generation.prefixes import Prefixes
from emo.eval.generation.sampling import BATCH, Request, Sampler
from emo.eval.model import EvaluatedModel
from emo.eval.results import MODELS, SAMPLES

CHUNK = 256  # texts; what a killed process loses at most
SHOWN = 16  # texts kept for the report
VERSION = 1  # of everything that decides what a seed gives
RECORDS, ABOUT = "records.jsonl", "about.json"

Record = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The texts to be written: per seed, `samples` texts of at most `tokens` tokens after every prefix."""

    prefixes: Prefixes
    decoding: Decoding
    tokens: int
    samples: int = 1
    seeds: tuple[int, ...] = (0,)
    batch: int = BATCH

    def __post_init__(self) -> None:
        for name in ("tokens", "samples", "batch"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)} must be at least 1")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise UserError(f"--seeds {','.join(map(str, self.seeds))} must be different numbers")
        if self.decoding.greedy and (self.samples > 1 or len(self.seeds) > 1):
            raise UserError("--greedy gives one text per prefix; use it with --samples 1 and one seed")


class Generation:
    """Writes the texts of a plan into `directory`; `computed` counts those that this process sampled."""

    def __init__(self, model: EvaluatedModel, plan: Plan, out: Path) -> None:
        self.model, self.plan, self.out, self.computed = model, plan, out, 0
        name = f"{plan.prefixes.name}-{plan.decoding.name}"
        self.directory = out / MODELS / model.name / "generated" / name
        self.prompts = [prompt_ids(model, text) for text in plan.prefixes.texts]
        context, lengths = context_of(model), [len(prompt) for prompt in self.prompts]
        if context is not None and max(lengths) + plan.tokens > context:
            raise UserError(
                f"prefix {lengths.index(max(lengths))} has {max(lengths)} tokens and --max_new_tokens is "
                f"{plan.tokens}, together more than the context of {model.given}, {context} tokens; shorten "
                "one of them"
            )

    def run(self, publish: bool = True) -> list[Record]:
        """Return all records, sampled or read; with `publish` in their file too."""
        model, plan, records = self.model, self.plan, []
        sampler = Sampler(model.model, plan.decoding, end_ids(model), plan.batch)
        count = len(self.prompts) * plan.samples
        label = f"{model.name} {plan.prefixes.name}-{plan.decoding.name}"
        with tqdm(total=count * len(plan.seeds), desc=label, unit="text", disable=None) as bar:
            for seed in plan.seeds:
                identity = identity_of(model, plan.decoding, plan.batch) | {"generation": VERSION}
                identity |= {"tokens": plan.tokens, "samples": plan.samples, "seed": seed}
                identity["prompts"] = store.digest(self.prompts)
                identity["prefixes"] = store.digest([plan.prefixes.texts, plan.prefixes.references])
                entry = store.Entry(self.out / store.STORE, identity)
                sample = partial(self._sample, sampler, seed, bar)
                records += store.complete(entry, count, CHUNK, sample, bar.update)
        if publish:
            self._write(records)
        return records

    def _write(self, records: list[Record]) -> None:
        model, plan = self.model, self.plan
        about: dict[str, Any] = {"model": model.name, "path": model.given, "weights": model.digest}
        about |= {"dtype": str(model.model.dtype), "tokenizer": model.tokenizer_digest}
        about |= {"corpus": plan.prefixes.name, "prefix_words": plan.prefixes.words}
        about |= {"decoding": asdict(plan.decoding) | {"name": plan.decoding.name}, "tokens": plan.tokens}
        about |= {"samples": plan.samples, "seeds": list(plan.seeds)}
        about |= {"prefixes": len(self.prompts), "records": len(records)}
        lines = [json.dumps(record, ensure_ascii=False, sort_keys=True) + "\n" for record in records]
        store.replace(self.directory / RECORDS, "".join(lines))
        store.replace(self.directory / ABOUT, store.dump(about))
        if plan.decoding == Decoding():
            names = ("prefix", "text", "ended", "tokens")
            samples = [{name: record[name] for name in names} for record in records[:SHOWN]]
            view = {"weights": model.digest, "seed": plan.seeds[0], "max_tokens": plan.tokens}
            view["samples"] = samples
            store.replace(self.out / MODELS / model.name / SAMPLES, store.dump(view))

    def _sample(self, sampler: Sampler, seed: int, bar: Any, numbers: range) -> list[Record]:
        """Return records of continuations; number n is sample n % samples of prefix n // samples.

        The human continuation is cut to as many tokens as a sampled one may have.
        """
        plan, tokenizer = self.plan, self.model.tokenizer
        draws = [divmod(n, plan.samples) for n in numbers]
        requests = [Request(self.prompts[p], [seed, p, s]) for p, s in draws]
        samples = sampler.run(requests, plan.tokens, bar.update)
        self.computed += len(samples)
        human = {}
        if plan.prefixes.references is not None:
            for p in {p for p, _ in draws}:
                reference = plan.prefixes.references[p]
                start, ids = split_ids(tokenizer, plan.prefixes.texts[p], reference)
                shortened = text_after(tokenizer, start, ids[: plan.tokens])
                human[p] = {"reference": reference, "human": shortened}
        records = []
        for row, (p, s), (ids, ended) in zip(numbers, draws, samples, strict=True):
            record = {"row": row, "seed": seed, "prefix_number": p, "sample": s, "ids": ids, "ended": ended}
            record |= {"prefix": plan.prefixes.texts[p], "tokens": len(ids), **human.get(p, {})}
            records.append(record | {"text": text_after(tokenizer, self.prompts[p], ids)})
        return records


def read_records(directory: Path) -> tuple[dict[str, Any], list[Record]]:
    """Return (about, records) of a directory that `Generation` wrote."""
    if not (directory / ABOUT).is_file() or not (directory / RECORDS).is_file():
        raise UserError(f"{directory} has no {RECORDS}; make it with: emo generate")
    about, lines = read_json(directory / ABOUT), read_text(directory / RECORDS).split("\n")
    if lines[-1] or len(lines) != about["records"] + 1:
        raise UserError(f"{directory / RECORDS} is not as it was written; generate again")
    return about, [json.loads(line) for line in lines[:-1]]
