"""Engines that generate text (Transformers, and vLLM if installed), and jobs that store rows of texts."""

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

from ..models.model import EvaluatedModel
from ..results import store
from ..results.directory import Record
from .decoding import CHANNEL, Beams, Decoding, Request, hides_thinking, text_after, until_end

if TYPE_CHECKING:
    from .fixed_point import FixedPoint
    from .sampling import Sampler

Reply = tuple[list[int], Record]  # new ids, and {text, ended: whether an end token ended it, tokens}
Progress = Callable[[int], Any]
ABOUT = "about.json"
UNBIASED = Decoding()


class Transformers:
    """The weights in this process. Texts are sampled by `sampling`, or found by beam search."""

    def __init__(self, model: EvaluatedModel, decoding: Decoding | Beams = UNBIASED, batch: int = 64) -> None:
        if batch < 1:
            raise UserError(f"--batch_size {batch} must be at least 1", code="option-value")
        self.model = model
        self.decoding = decoding
        self.batch = batch

    @property
    def identity(self) -> Record:
        """Everything that affects the texts. In half precision the batch may decide close calls."""
        dtype = self.model.model.dtype
        sampled = isinstance(self.decoding, Decoding)
        batch = self.batch if sampled and dtype.itemsize < 4 else None
        return {"engine": "transformers", **self._identity, "dtype": str(dtype), "batch": batch}

    @property
    def _identity(self) -> Record:
        model = self.model
        digests: Record = {"weights": model.digest, "generation_config": model.generation_digest}
        digests |= {"tokenizer": model.tokenizer_digest, "ends": model.ends}
        # Earlier versions left such end tokens in the texts, and the names of channels, and removed some
        # tokens around reasoning.
        plain = sorted({*model.ends} - {*model.tokenizer.all_special_ids})
        digests |= {"ends_in_no_text": plain} if plain else {}
        digests |= {"channels": True} if CHANNEL in model.tokenizer.get_added_vocab() else {}
        digests |= {"thinking": True} if hides_thinking(model.tokenizer) else {}
        return digests | self.decoding_identity

    @property
    def decoding_identity(self) -> Record:
        """How tokens are chosen: `decoding`, and the digest of another model's `cost`."""
        chosen = {name: value for name, value in asdict(self.decoding).items() if value != ""}
        cost = self.fixed_point.fingerprint if self.fixed_point else None
        return {"decoding": chosen} | ({"cost": cost} if cost else {})

    @cached_property
    def sampler(self) -> Sampler:
        """The sampler, with the weights loaded."""
        from .sampling import Sampler

        assert isinstance(self.decoding, Decoding)
        return Sampler(self.model.model, self.decoding, self.model.ends, self.batch, self.fixed_point)

    @cached_property
    def fixed_point(self) -> FixedPoint | None:
        """The transformation of the model's distributions, if the decoding has an objective."""
        from .fixed_point import FixedPoint

        if isinstance(self.decoding, Beams) or not self.decoding.objective:
            return None
        return FixedPoint(self.model, self.decoding)

    def reply(self, requests: Sequence[Request], tokens: int, progress: Progress) -> list[Reply]:
        """Return a text of at most `tokens` tokens for each request, without its end token."""
        replies: list[Reply] = []
        for request, (ids, ended) in zip(requests, self._ids(requests, tokens, progress), strict=True):
            text = text_after(self.model.tokenizer, list(request.prompt), ids[:-1] if ended else ids)
            replies.append((ids, {"text": text, "ended": ended, "tokens": len(ids)}))
        return replies

    def _ids(
        self, requests: Sequence[Request], tokens: int, progress: Progress
    ) -> Sequence[tuple[list[int], bool]]:
        """Return the new ids of each request, and whether an end token ends them."""
        if isinstance(self.decoding, Decoding):
            return self.sampler.run(requests, tokens, progress)
        import torch
        from transformers import GenerationConfig

        from .sampling import plain_settings

        model = self.model.model
        ends = self.model.ends
        settings = GenerationConfig(
            max_new_tokens=tokens, do_sample=False, early_stopping=True, num_beams=self.decoding.beams,
            repetition_penalty=self.decoding.penalty, eos_token_id=ends or None,
            pad_token_id=min(ends, default=0),
        )  # fmt: skip
        texts = []
        with plain_settings(model), torch.inference_mode():
            for request in requests:
                prompt = torch.tensor([list(request.prompt)], device=model.device)
                mask = torch.ones_like(prompt)
                output = model.generate(prompt, attention_mask=mask, generation_config=settings)
                ids = output[0, prompt.shape[1] :].tolist()
                texts.append((ids, bool(ids) and ids[-1] in ends))
                progress(1)
        return texts


class Vllm(Transformers):
    """vLLM's offline interface on this machine's GPUs."""

    decoding: Decoding

    def __init__(self, model: EvaluatedModel, decoding: Decoding | Beams, batch: int = 1) -> None:
        super().__init__(model, decoding, batch)
        if find_spec("vllm") is None:
            raise UserError(
                "--engine vllm: vLLM is not installed. Install it, or remove --engine.", code="missing-extra"
            )
        if isinstance(decoding, Beams):
            raise UserError(
                "--engine vllm: its beam search lacks the repetition penalty of this judge",
                code="options-clash",
            )
        if model.has_adapter:
            raise UserError(
                f"--engine vllm: {model.source} has an adapter, which vLLM does not apply. Merge it first.",
                code="adapter",
            )

    @cached_property
    def llm(self) -> Any:
        """The model in vLLM, over all GPUs that this process sees."""
        import torch
        from vllm import LLM

        count = max(1, torch.cuda.device_count())
        self.model.require_unchanged()
        with linked_directory(self.model.files()) as directory:  # vLLM loads every weight file in a directory
            llm = LLM(str(directory), dtype=self.model.dtype, tensor_parallel_size=count, seed=0)
        self.model.require_unchanged()
        return llm

    @property
    def identity(self) -> Record:
        """Everything that affects the texts, including vLLM's version, which may change rounding."""
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
                top_k=self.decoding.top_k or -1,  # -1: all. vLLM before 0.9 rejects 0.
                seed=int(store.digest_json(request.seed)[:15], 16),
                stop_token_ids=self.model.ends,
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        outputs = [output.outputs[0] for output in self.llm.generate(prompts, settings, use_tqdm=False)]
        progress(len(requests))
        return [until_end(list(output.token_ids), self.model.ends) for output in outputs]


ENGINES = {"transformers": Transformers, "vllm": Vllm}


def make_engine(name: str, model: EvaluatedModel, decoding: Decoding | Beams, batch: int) -> Transformers:
    """Return the engine called `name`, or raise UserError if it is unknown or not installed."""
    if name not in ENGINES:
        raise UserError(
            f"--engine {name!r} is not known. Choose from {', '.join(ENGINES)}.", code="option-value"
        )
    return ENGINES[name](model, decoding, batch)


class TextJob(ABC):
    """Rows of texts from an engine, generated in chunks that processes share.

    A subclass defines the requests and the record of a row. computed: rows that this process generated.
    """

    directory: Path  # of the published texts

    chunk = 64  # rows, the most work that a killed process loses
    unit = "text"  # of the progress bar
    per_row = 1  # largest number of texts per row

    def __init__(self, engine: Transformers, tokens: int, out: Path) -> None:
        if tokens < 1:
            raise UserError(f"--max_new_tokens {tokens} must be at least 1", code="option-value")
        self.engine = engine
        self.model = engine.model
        self.tokens = tokens
        self.out = out
        self.context = engine.model.context
        self.computed = 0

    @abstractmethod
    def prepare(self, row: int) -> tuple[Record, list[Request]]:
        """Return the part of a row's record that is known before generation, and the row's requests."""

    def record(self, facts: Record, replies: list[Reply]) -> Record:
        """Return the record of a row from the results of `prepare` and the replies."""
        return facts | (replies[0][1] if replies else {})

    def complete(self, identity: Record, rows: int, label: str) -> list[Record]:
        """Return the records of all rows, each with its number as `row`.

        identity: everything that affects the records. label: of the progress bar.
        """
        per_row = self.per_row
        entry = store.Entry(self.out / store.STORE, identity)
        with show_activity(label, per_row * rows, self.unit) as advance:

            def compute(part: range) -> list[Record]:
                prepared = [self.prepare(row) for row in part]
                requests = [request for _, row_requests in prepared for request in row_requests]
                advance(per_row * len(part) - len(requests))
                replies = iter(self.engine.reply(requests, self.tokens, advance) if requests else [])
                self.computed += len(part)
                return [
                    {"row": row} | self.record(facts, list(islice(replies, len(row_requests))))
                    for row, (facts, row_requests) in zip(part, prepared, strict=True)
                ]

            return store.complete(entry, rows, self.chunk, compute, lambda count: advance(per_row * count))

    def write_about(
        self, rows: int, about: Record, ignored: Sequence[str], say: Callable[[str], None]
    ) -> None:
        """Write the facts about the texts in `directory`, and report which facts replaced others.

        ignored: facts whose changes are not reported.
        """
        path = self.directory / ABOUT
        before = store.read_json_or_none(path)
        store.replace(path, store.dump(about))
        if change := store.describe_replacement(before, about, ignored):
            say(f"{self.directory} {change}")
        size = f"{counted(rows, self.unit)} ({rows - self.computed} already known)"
        say(f"{self.model.name}: {size} in {self.directory}")
