"""What writes texts: Transformers everywhere, vLLM where it is installed; and the rows of texts it writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emo.common.cli.progress import show_activity
from emo.common.errors import UserError
from emo.common.io.weights import linked_directory
from emo.common.text import counted

from ..model import EvaluatedModel
from ..results import store
from .decoding import Beams, Decoding, Request, text_after, until_end

if TYPE_CHECKING:
    from .settled import Settled

Record = dict[str, Any]
Reply = tuple[list[int], Record]  # new ids, and {text, ended: by an end token, tokens}
Progress = Callable[[int], Any]
ABOUT = "about.json"
UNBIASED = Decoding()


class Transformers:
    """The weights in this process; texts as `sampling` draws them, or by beam search."""

    def __init__(self, model: EvaluatedModel, decoding: Decoding | Beams = UNBIASED, batch: int = 64) -> None:
        if batch < 1:
            raise UserError(f"--batch_size {batch} must be at least 1")
        self.model, self.decoding, self.batch = model, decoding, batch

    @property
    def identity(self) -> Record:
        """Return all that decides what it writes; the batch may decide close calls in half precision."""
        dtype, sampled = self.model.model.dtype, isinstance(self.decoding, Decoding)
        batch = self.batch if sampled and dtype.itemsize < 4 else None
        return {"engine": "transformers", **self._identity, "dtype": str(dtype), "batch": batch}

    @property
    def _identity(self) -> Record:
        model = self.model
        digests: Record = {"weights": model.digest, "generation_config": model.generation_digest}
        digests |= {"tokenizer": model.tokenizer_digest, "ends": model.ends}
        # Texts of an earlier version held such ends.
        plain = sorted({*model.ends} - {*model.tokenizer.all_special_ids})
        return digests | ({"ends_in_no_text": plain} if plain else {}) | self.decoding_identity

    @property
    def decoding_identity(self) -> Record:
        """Return how tokens are chosen: `decoding`, and the digest of a foreign `cost`; for records."""
        chosen = {name: value for name, value in asdict(self.decoding).items() if value != ""}
        cost = self.settled.fingerprint if self.settled else None
        return {"decoding": chosen} | ({"cost": cost} if cost else {})

    @cached_property
    def sampler(self) -> Any:
        """Return what draws the texts, with the weights."""
        from .sampling import Sampler

        assert isinstance(self.decoding, Decoding)
        return Sampler(self.model.model, self.decoding, self.model.ends, self.batch, self.settled)

    @cached_property
    def settled(self) -> Settled | None:
        """Return what makes other distributions of the model's, if the decoding does."""
        from .settled import Settled

        if isinstance(self.decoding, Beams) or not self.decoding.objective:
            return None
        return Settled(self.model, self.decoding)

    def reply(self, requests: Sequence[Request], tokens: int, progress: Progress) -> list[Reply]:
        """Return a text of at most `tokens` tokens per request, in their order; no text has its end token."""
        replies: list[Reply] = []
        for request, (ids, ended) in zip(requests, self._ids(requests, tokens, progress), strict=True):
            text = text_after(self.model.tokenizer, list(request.prompt), ids[:-1] if ended else ids)
            replies.append((ids, {"text": text, "ended": ended, "tokens": len(ids)}))
        return replies

    def _ids(
        self, requests: Sequence[Request], tokens: int, progress: Progress
    ) -> Sequence[tuple[list[int], bool]]:
        """Return (new ids, whether an end token ends them) of each request."""
        import torch
        from transformers import GenerationConfig

        model, ends, decoding = self.model.model, self.model.ends, self.decoding
        if isinstance(decoding, Decoding):
            return self.sampler.run(requests, tokens, progress)
        texts = []
        settings = GenerationConfig(
            max_new_tokens=tokens, do_sample=False, early_stopping=True, num_beams=decoding.beams,
            repetition_penalty=decoding.penalty, eos_token_id=ends or None, pad_token_id=min(ends, default=0),
        )  # fmt: skip
        for request in requests:
            prompt = torch.tensor([list(request.prompt)], device=model.device)
            mask = torch.ones_like(prompt)
            with torch.inference_mode():
                whole = model.generate(prompt, attention_mask=mask, generation_config=settings)
            ids = whole[0, prompt.shape[1] :].tolist()
            texts.append((ids, bool(ids) and ids[-1] in ends))
            progress(1)
        return texts


class Vllm(Transformers):
    """vLLM's offline interface on this machine's GPUs."""

    decoding: Decoding

    def __init__(self, model: EvaluatedModel, decoding: Decoding | Beams, batch: int = 1) -> None:
        super().__init__(model, decoding, batch)
        if find_spec("vllm") is None:
            raise UserError("--engine vllm: vLLM is not installed; install it, or leave --engine out")
        if isinstance(decoding, Beams):
            raise UserError(
                "--engine vllm: its beam search has no repetition penalty, which this judge needs"
            )
        if model.has_adapter:
            raise UserError(
                f"--engine vllm: {model.given} holds an adapter, which is not applied there; merge it",
                code="adapter",
            )

    @cached_property
    def llm(self) -> Any:
        """Return the model in vLLM, over all GPUs that this process sees."""
        import torch
        from vllm import LLM

        count = max(1, torch.cuda.device_count())
        self.model.require_unchanged()
        with linked_directory(self.model.files()) as directory:  # vLLM takes every weight file that it finds
            llm = LLM(str(directory), dtype=self.model.dtype, tensor_parallel_size=count, seed=0)
        self.model.require_unchanged()
        return llm

    @property
    def identity(self) -> Record:
        """Return all that decides what it writes; its own rounding may change with its version."""
        return {"engine": "vllm", "version": version("vllm"), "dtype": self.model.dtype, **self._identity}

    def _ids(
        self, requests: Sequence[Request], tokens: int, progress: Progress
    ) -> Sequence[tuple[list[int], bool]]:
        from vllm import SamplingParams

        settings = [
            SamplingParams(
                max_tokens=min(request.limit or tokens, tokens),
                temperature=0.0 if self.decoding.greedy else self.decoding.temperature,
                top_p=self.decoding.top_p,
                top_k=self.decoding.top_k or -1,  # all; 0 is refused before vLLM 0.9
                seed=int(store.digest(request.seed)[:15], 16),
                stop_token_ids=self.model.ends,
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        outputs = [output.outputs[0] for output in self.llm.generate(prompts, settings, use_tqdm=False)]
        progress(len(requests))
        return [until_end(list(output.token_ids), self.model.ends) for output in outputs]


ENGINES = {"transformers": Transformers, "vllm": Vllm}


def engine(name: str, model: EvaluatedModel, decoding: Decoding | Beams, batch: int) -> Transformers:
    """Return the engine called `name`. UserError where it is unknown, not installed, or cannot decode so."""
    if name not in ENGINES:
        raise UserError(f"--engine {name!r} is not known; known: {', '.join(ENGINES)}")
    return ENGINES[name](model, decoding, batch)


class TextJob(ABC):
    """Rows of texts by an engine, made in chunks that processes share, or read where they are done.

    A subclass says what is asked for a row and recorded of it. computed: rows that this process made.
    """

    directory: Path  # where the texts are shown

    chunk = 64  # rows; what a killed process loses at most
    unit, per_row = "text", 1  # of the progress bar: texts of a row at most

    def __init__(self, engine: Transformers, tokens: int, out: Path) -> None:
        if tokens < 1:
            raise UserError(f"--max_new_tokens {tokens} must be at least 1")
        self.engine, self.model, self.tokens, self.out = engine, engine.model, tokens, out
        self.context, self.computed = engine.model.context, 0

    @abstractmethod
    def prepare(self, row: int) -> tuple[Record, list[Request]]:
        """Return what is recorded of a row before it is written, and what is asked for it."""

    def record(self, facts: Record, replies: list[Reply]) -> Record:
        """Return the record of a row, from what `prepare` returned and the replies to its requests."""
        return facts | (replies[0][1] if replies else {})

    def complete(self, identity: Record, rows: int, label: str) -> list[Record]:
        """Return the records of all rows, each with its number as `row`; identity: what decides them."""
        per_row, entry = self.per_row, store.Entry(self.out / store.STORE, identity)
        with show_activity(label, per_row * rows, self.unit) as advance:

            def compute(part: range) -> list[Record]:
                prepared = [self.prepare(row) for row in part]
                requests = [request for _, of_row in prepared for request in of_row]
                advance(per_row * len(part) - len(requests))
                replies = iter(self.engine.reply(requests, self.tokens, advance) if requests else [])
                self.computed += len(part)
                return [
                    {"row": row} | self.record(facts, list(islice(replies, len(of_row))))
                    for row, (facts, of_row) in zip(part, prepared, strict=True)
                ]

            return store.complete(entry, rows, self.chunk, compute, lambda count: advance(per_row * count))

    def show(self, rows: int, about: Record, ignored: Sequence[str], say: Callable[[str], None]) -> None:
        """Write what the texts in `directory` are of; say what else, but for `ignored`, was there before."""
        path = self.directory / ABOUT
        before = store.read_json(path)
        store.replace(path, store.dump(about))
        if other := store.said_of(before, about, ignored):
            say(f"{self.directory} {other}")
        size = f"{counted(rows, self.unit)} ({rows - self.computed} already known)"
        say(f"{self.model.name}: {size} in {self.directory}")
