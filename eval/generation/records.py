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
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from emo.common.errors import UserError, one_line
from emo.common.untrusted import parse_json, read_json
from emo.data_prep.inputs import read_text
from emo.eval import store
from emo.eval.generation.decoding import Decoding
from emo.eval.generation.prefixes import Prefixes
from emo.eval.generation.sampling import BATCH, Request, Sampler
from emo.eval.generation.tokens import context_of, end_ids, identity_of, prompt_ids, split_ids, text_after
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

    @property
    def name(self) -> str:
        return f"{self.prefixes.name}-{self.decoding.name}"


class Generation:
    """Writes the texts of a plan; `computed` counts those that this process sampled."""

    def __init__(self, model: EvaluatedModel, plan: Plan, out: Path) -> None:
        self.model = model
        self.plan = plan
        self.out = out
        self.computed = 0
        self.prompts = [prompt_ids(model, text) for text in plan.prefixes.texts]
        context = context_of(model)
        longest = max(range(len(self.prompts)), key=lambda i: len(self.prompts[i]))
        count = len(self.prompts[longest])
        if context is not None and count + plan.tokens > context:
            raise UserError(
                f"prefix {longest} has {count} tokens and --max_new_tokens is {plan.tokens}, together "
                f"more than "
                f"the context of {model.given}, {context} tokens; shorten one of them"
            )

    @cached_property
    def sampler(self) -> Sampler:
        return Sampler(self.model.model, self.plan.decoding, end_ids(self.model), self.plan.batch)

    @property
    def directory(self) -> Path:
        """Return where the records of this model, corpus and decoding are."""
        return self.out / MODELS / self.model.name / "generated" / self.plan.name

    def run(self, publish: bool = True) -> list[Record]:
        """All records, sampled or found; with `publish` in their file too."""
        plan, records = self.plan, []
        total = len(self.prompts) * plan.samples * len(plan.seeds)
        label = f"{self.model.name} {plan.name}"
        with tqdm(total=total, desc=label, unit="text", disable=None) as bar:
            for seed in plan.seeds:
                identity = {
                    "generation": VERSION,
                    **identity_of(self.model, plan.decoding, plan.batch),
                    "prompts": store.digest(self.prompts),
                    "prefixes": plan.prefixes.digest,
                    "tokens": plan.tokens,
                    "samples": plan.samples,
                    "seed": seed,
                }
                entry = store.Entry(self.out / store.STORE, identity)
                count = len(self.prompts) * plan.samples
                records += store.complete(entry, count, CHUNK, partial(self._sample, seed, bar), bar.update)
        if publish:
            self._write(records)
        return records

    def _write(self, records: list[Record]) -> None:
        plan = self.plan
        text = "".join(json.dumps(r, ensure_ascii=False, sort_keys=True) + "\n" for r in records)
        about = {
            "model": self.model.name,
            "path": self.model.given,
            "weights": self.model.digest,
            "dtype": str(self.model.model.dtype),
            "tokenizer": self.model.tokenizer_digest,
            "corpus": plan.prefixes.name,
            "prefix_words": plan.prefixes.words,
            "prefixes": len(self.prompts),
            "decoding": asdict(plan.decoding) | {"name": plan.decoding.name},
            "tokens": plan.tokens,
            "samples": plan.samples,
            "seeds": list(plan.seeds),
            "records": len(records),
        }
        store.replace(self.directory / RECORDS, text)
        store.replace(self.directory / ABOUT, store.dump(about))
        if plan.decoding.unbiased:
            names = ("prefix", "text", "ended", "tokens")
            view = {
                "weights": self.model.digest,
                "seed": plan.seeds[0],
                "max_tokens": plan.tokens,
                "samples": [{name: record[name] for name in names} for record in records[:SHOWN]],
            }
            store.replace(self.out / MODELS / self.model.name / SAMPLES, store.dump(view))

    def _sample(self, seed: int, bar: Any, numbers: range) -> list[Record]:
        """Records of some continuations; number n is sample n % samples of prefix n // samples."""
        plan = self.plan
        draws = [divmod(n, plan.samples) for n in numbers]
        requests = [Request(self.prompts[p], [seed, p, s]) for p, s in draws]
        samples = self.sampler.run(requests, plan.tokens, bar.update)
        self.computed += len(samples)
        records = []
        for row, (prefix, sample), text in zip(numbers, draws, samples, strict=True):
            record = {
                "row": row,
                "seed": seed,
                "prefix_number": prefix,
                "sample": sample,
                "prefix": plan.prefixes.texts[prefix],
                "text": text_after(self.model.tokenizer, self.prompts[prefix], text.tokens),
                "ids": text.tokens,
                "ended": text.ended,
                "tokens": len(text.tokens),
            }
            if plan.prefixes.references is not None:
                record["reference"] = plan.prefixes.references[prefix]
                record["human"] = self.human(prefix)
            records.append(record)
        return records

    @cache  # noqa: B019 - lives as long as the command
    def human(self, prefix: int) -> str:
        """The human continuation of a prefix, cut to as many tokens as a continuation may have."""
        assert self.plan.prefixes.references is not None
        text, reference = self.plan.prefixes.texts[prefix], self.plan.prefixes.references[prefix]
        start, ids = split_ids(self.model.tokenizer, text, reference)
        return text_after(self.model.tokenizer, start, ids[: self.plan.tokens])


def read_records(directory: Path) -> tuple[dict[str, Any], list[Record]]:
    """Return (about, records) of a directory that `Generation` wrote."""
    if not (directory / ABOUT).is_file() or not (directory / RECORDS).is_file():
        raise UserError(f"{directory} has no {RECORDS}; make it with: emo generate")
    try:
        about = read_json(directory / ABOUT)
        records = [parse_json(line) for line in read_text(directory / RECORDS).split("\n") if line]
        written = about["records"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{directory} is damaged ({one_line(error, 120)}); generate again") from None
    if not records or len(records) != written:
        raise UserError(f"{directory}: {len(records)} records where {written} were written; generate again")
    return about, records
