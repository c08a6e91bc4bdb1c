"""Sampled text on disk, generated in chunks that any number of processes share.

OUT/store/KEY/                                   chunks and leases, as for tasks
OUT/models/NAME/generated/CORPUS-DECODING/
    records.jsonl       one text per line: prefix, continuation, its tokens, the human continuation
    about.json          model, corpus, decoding, seeds
OUT/models/NAME/samples.json                     the first unbiased texts, for the report
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from emo.common.errors import UserError
from emo.common.io.untrusted import read_json
from emo.data_prep.encoding.tokenizer import text_ids
from emo.data_prep.sources.files import read_text

from ..results import store
from ..results.directory import MODELS, SAMPLES, Record
from .decoding import Request, prompt_ids, split_ids
from .engines import ABOUT, UNBIASED, Reply, TextJob, Transformers
from .prefixes import Prefixes

IN_REPORT = 16  # texts kept for the report
VERSION = 2  # of everything that affects the text of a seed
RECORDS = "records.jsonl"


class Generation(TextJob):
    """Samples `samples` texts of at most `tokens` tokens per prefix and seed."""

    chunk = 256

    def __init__(
        self, engine: Transformers, prefixes: Prefixes, tokens: int, samples: int, seeds: tuple[int, ...],
        out: Path,
    ) -> None:  # fmt: skip
        super().__init__(engine, tokens, out)
        self.prefixes = prefixes
        self.samples = samples
        self.seeds = seeds
        self.decoding = engine.decoding
        if samples < 1:
            raise UserError(f"--samples {samples} must be at least 1", code="option-value")
        if len(set(seeds)) != len(seeds):
            raise UserError(
                f"--seeds {','.join(map(str, seeds))} must be different numbers", code="option-value"
            )
        if self.decoding.deterministic and (samples > 1 or len(seeds) > 1):
            name = self.decoding.name
            raise UserError(
                f"{name} produces one text per prefix. Set --samples 1 and a single seed.",
                code="options-clash",
            )
        self.name = f"{prefixes.name}-{self.decoding.name}"
        self.directory = out / MODELS / self.model.name / "generated" / self.name
        self.prompts = [prompt_ids(self.model, text) for text in prefixes.texts]
        self.seed = seeds[0]  # of the rows that are being generated
        self._human = functools.cache(self._human_continuation)
        longest = max(range(len(self.prompts)), key=lambda p: len(self.prompts[p]))
        length = len(self.prompts[longest])
        if self.context is not None and length + tokens > self.context:
            raise UserError(
                f"prefix {longest} has {length} tokens. With --max_new_tokens {tokens} it exceeds the "
                f"context of {self.model.source}, {self.context} tokens. Shorten one of them.",
                code="context",
            )

    def run(self) -> list[Record]:
        """Return all records, generated or read."""
        identity = self.engine.identity | {"generation": VERSION, "prompts": store.digest_json(self.prompts)}
        identity |= {"prefixes": store.digest_json([self.prefixes.texts, self.prefixes.references])}
        identity |= {"tokens": self.tokens, "samples": self.samples}
        del identity["engine"]  # always Transformers
        records = []
        for seed in self.seeds:
            self.seed = seed
            rows = len(self.prompts) * self.samples
            records += self.complete(identity | {"seed": seed}, rows, f"{self.model.name} {self.name}")
        return records

    def prepare(self, row: int) -> tuple[Record, list[Request]]:
        """Return the facts and the request of sample row % samples of prefix row // samples."""
        p, sample = divmod(row, self.samples)
        facts = {"seed": self.seed, "prefix_number": p, "sample": sample, "prefix": self.prefixes.texts[p]}
        return facts | self._human(p), [Request(self.prompts[p], [self.seed, p, sample])]

    def record(self, facts: Record, replies: list[Reply]) -> Record:
        """Return the record of a text with its ids."""
        ((ids, reply),) = replies
        return facts | {"ids": ids} | reply

    def _human_continuation(self, p: int) -> Record:
        """Return the human continuation of a prefix, and the same cut to the length of sampled texts."""
        if self.prefixes.references is None:
            return {}
        reference = self.prefixes.references[p]
        tokenizer = self.model.tokenizer
        prefix = self.prefixes.texts[p]
        start, ids = split_ids(tokenizer, prefix, reference)
        # A token may span the end of the prefix, so `start` may be shorter than the prefix.
        before = tokenizer.decode(text_ids(tokenizer, prefix), skip_special_tokens=True)
        text = tokenizer.decode([*start, *ids[: self.tokens]], skip_special_tokens=True)
        return {"reference": reference, "human": text[len(before) :]}

    def publish(self, records: list[Record], say: Callable[[str], None]) -> None:
        """Write the records, and facts about them, into `directory`."""
        model = self.model
        seeds = list(self.seeds)
        about: dict[str, Any] = {"model": model.name, "path": model.source, "weights": model.digest}
        about |= {"dtype": str(model.model.dtype), "tokenizer": model.tokenizer_digest}
        about |= {"ends": model.ends, "corpus": self.prefixes.name, "prefix_words": self.prefixes.words}
        about |= self.engine.decoding_identity
        about["decoding"]["name"] = self.decoding.name
        about |= {"tokens": self.tokens, "samples": self.samples, "seeds": seeds}
        about |= {"prefixes": len(self.prompts), "prefix_texts": store.digest_json(self.prefixes.texts)}
        about |= {"records": len(records)}
        lines = [json.dumps(record, ensure_ascii=False, sort_keys=True) + "\n" for record in records]
        store.replace(self.directory / RECORDS, "".join(lines))
        if self.decoding == UNBIASED:
            names = ("prefix", "text", "ended", "tokens")
            view = {"weights": model.digest, "seed": seeds[0], "max_tokens": self.tokens}
            samples = [{name: record[name] for name in names} for record in records[:IN_REPORT]]
            path = self.out / MODELS / model.name / SAMPLES
            store.replace(path, store.dump(view | {"samples": samples}))
        self.write_about(len(records), about, ("path", "records"), say)


def read_generated(directory: Path) -> tuple[dict[str, Any], list[Record]]:
    """Return the facts and the records that `Generation` wrote into a directory."""
    if not (directory / ABOUT).is_file() or not (directory / RECORDS).is_file():
        raise UserError(f"{directory} has no {RECORDS}. Create it with: emo generate", code="no-results")
    about = read_json(directory / ABOUT)
    lines = read_text(directory / RECORDS).split("\n")
    if lines[-1] or len(lines) != about["records"] + 1:
        raise UserError(
            f"{directory / RECORDS} is incomplete or was changed. Generate it again.",
            code="incomplete-results",
        )
    return about, [json.loads(line) for line in lines[:-1]]
