"""What writes answers and verdicts: Transformers everywhere, vLLM where it is installed and asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from emo.common.errors import UserError
from emo.common.weights import shown
from emo.eval import store
from emo.eval.generation.decoding import Decoding, end_ids, identity_of, text_after

if TYPE_CHECKING:
    from emo.eval.generation.sampling import Request
    from emo.eval.model import EvaluatedModel

ENGINES = ("transformers", "vllm")
Progress = Callable[[int], Any]


@dataclass(frozen=True)
class Beams:
    """Beam search: the likeliest of `beams` texts, repeated tokens made less likely by `penalty`."""

    beams: int
    penalty: float


class Reply(NamedTuple):
    """ended: by an end token, not by the limit."""

    text: str
    ended: bool
    tokens: int


class Transformers:
    """The weights in this process; texts as `emo generate` samples them, or by beam search."""

    name = "transformers"

    def __init__(self, model: EvaluatedModel, decoding: Decoding | Beams, batch: int) -> None:
        if batch < 1:
            raise UserError(f"--batch_size {batch} must be at least 1")
        self.model, self.decoding, self.batch = model, decoding, batch

    @property
    def identity(self) -> dict[str, Any]:
        """Return all that decides what it writes."""
        batch = None if isinstance(self.decoding, Beams) else self.batch
        return {"engine": self.name, **identity_of(self.model, self.decoding, batch)}

    def reply(self, requests: Sequence[Request], tokens: int, progress: Progress) -> list[Reply]:
        """A text of at most `tokens` tokens per request, in their order."""
        if isinstance(self.decoding, Beams):
            return [self._searched(request, tokens, progress) for request in requests]
        from emo.eval.generation.sampling import Sampler

        sampler = Sampler(self.model.model, self.decoding, end_ids(self.model), self.batch)
        texts = sampler.run(requests, tokens, progress)
        return [
            Reply(text_after(self.model.tokenizer, list(r.prompt), c.tokens), c.ended, len(c.tokens))
            for r, c in zip(requests, texts, strict=True)
        ]

    def _searched(self, request: Request, tokens: int, progress: Progress) -> Reply:
        import torch
        from transformers import GenerationConfig

        assert isinstance(self.decoding, Beams)
        model, ends = self.model.model, sorted(end_ids(self.model))
        settings = GenerationConfig(
            max_new_tokens=min(request.limit or tokens, tokens),
            num_beams=self.decoding.beams,
            repetition_penalty=self.decoding.penalty,
            early_stopping=True,
            do_sample=False,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
        )
        prompt = torch.tensor([list(request.prompt)], device=model.device)
        with torch.inference_mode():
            whole = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
        ids = whole[0, prompt.shape[1] :].tolist()
        progress(1)
        ended = bool(ids) and ids[-1] in ends
        return Reply(text_after(self.model.tokenizer, list(request.prompt), ids), ended, len(ids))


class Vllm:
    """vLLM's offline interface on this machine's GPUs."""

    name = "vllm"

    def __init__(self, model: EvaluatedModel, decoding: Decoding | Beams) -> None:
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
        self.model, self.decoding = model, decoding

    @cached_property
    def llm(self) -> Any:
        """The model in vLLM, over all GPUs that this process sees."""
        import torch
        from vllm import LLM

        count = max(1, torch.cuda.device_count())
        self.model.require_unchanged()
        with shown(self.model.files()) as directory:  # vLLM takes every weight file that it finds
            llm = LLM(str(directory), dtype=self.model.dtype, tensor_parallel_size=count, seed=0)
        self.model.require_unchanged()
        return llm

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides what it writes, its own rounding aside: that may change with its version."""
        return {
            "engine": self.name,
            "version": version("vllm"),
            "weights": self.model.digest,
            "tokenizer": self.model.tokenizer_digest,
            "generation_config": self.model.generation_digest,
            "dtype": self.model.dtype,
            "decoding": asdict(self.decoding),
        }

    def reply(self, requests: Sequence[Request], tokens: int, progress: Progress) -> list[Reply]:
        """A text of at most `tokens` tokens per request, in their order."""
        prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        outputs = self.llm.generate(prompts, [self._sampling(r, tokens) for r in requests], use_tqdm=False)
        progress(len(requests))
        replies = []
        for request, output in zip(requests, outputs, strict=True):
            ids, reason = list(output.outputs[0].token_ids), output.outputs[0].finish_reason
            text = text_after(self.model.tokenizer, list(request.prompt), ids)
            replies.append(Reply(text, reason == "stop", len(ids)))
        return replies

    def _sampling(self, request: Request, tokens: int) -> Any:
        from vllm import SamplingParams

        decoding = self.decoding
        assert isinstance(decoding, Decoding)
        return SamplingParams(
            max_tokens=min(request.limit or tokens, tokens),
            temperature=0.0 if decoding.greedy else decoding.temperature,
            top_p=decoding.top_p,
            top_k=decoding.top_k or -1,  # all; 0 is refused before vLLM 0.9
            seed=int(store.digest(request.seed)[:15], 16),
        )


def engine(name: str, model: EvaluatedModel, decoding: Decoding | Beams, batch: int) -> Transformers | Vllm:
    """The engine called `name`. UserError where it is unknown, not installed, or cannot decode so."""
    if name not in ENGINES:
        raise UserError(f"--engine {name!r} is not known; known: {', '.join(ENGINES)}")
    return Vllm(model, decoding) if name == "vllm" else Transformers(model, decoding, batch)
