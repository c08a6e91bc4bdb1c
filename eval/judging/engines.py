"""What writes answers and verdicts: Transformers everywhere, vLLM where it is installed and asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from emo.common.errors import UserError
from emo.common.weights import shown
from emo.eval import store
from emo.eval.generation.decoding import Decoding, end_ids, identity_of, text_after

if TYPE_CHECKING:
    from emo.eval.generation.sampling import Request
    from emo.eval.model import EvaluatedModel

Progress = Callable[[int], Any]


@dataclass(frozen=True)
class Beams:
    """Beam search: the likeliest of `beams` texts, repeated tokens made less likely by `penalty`."""

    beams: int
    penalty: float


class Transformers:
    """The weights in this process; texts as `emo generate` samples them, or by beam search."""

    def __init__(self, model: EvaluatedModel, decoding: Decoding | Beams, batch: int) -> None:
        if batch < 1:
            raise UserError(f"--batch_size {batch} must be at least 1")
        self.model, self.decoding, self.batch = model, decoding, batch

    @property
    def identity(self) -> dict[str, Any]:
        """Return all that decides what it writes."""
        batch = None if isinstance(self.decoding, Beams) else self.batch
        return {"engine": "transformers", **identity_of(self.model, self.decoding, batch)}

    def reply(self, requests: Sequence[Request], tokens: int, progress: Progress) -> list[dict[str, Any]]:
        """Return {text, ended: by an end token, tokens: at most `tokens`} per request, in their order."""
        replies = []
        for request, (ids, ended) in zip(requests, self._ids(requests, tokens, progress), strict=True):
            text = text_after(self.model.tokenizer, list(request.prompt), ids)
            replies.append({"text": text, "ended": ended, "tokens": len(ids)})
        return replies

    def _ids(
        self, requests: Sequence[Request], tokens: int, progress: Progress
    ) -> Sequence[tuple[list[int], bool]]:
        """Return (new ids, whether an end token ends them) of each request."""
        import torch
        from transformers import GenerationConfig

        from emo.eval.generation.sampling import Sampler

        model, ends = self.model.model, sorted(end_ids(self.model))
        if isinstance(self.decoding, Decoding):
            return Sampler(model, self.decoding, ends, self.batch).run(requests, tokens, progress)
        texts, beams = [], self.decoding
        for request in requests:
            settings = GenerationConfig(
                max_new_tokens=min(request.limit or tokens, tokens), do_sample=False, early_stopping=True,
                num_beams=beams.beams, repetition_penalty=beams.penalty, eos_token_id=ends or None,
                pad_token_id=ends[0] if ends else 0,
            )  # fmt: skip
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
        with shown(self.model.files()) as directory:  # vLLM takes every weight file that it finds
            llm = LLM(str(directory), dtype=self.model.dtype, tensor_parallel_size=count, seed=0)
        self.model.require_unchanged()
        return llm

    @property
    def identity(self) -> dict[str, Any]:
        """Return all that decides what it writes; its own rounding may change with its version."""
        return {
            "engine": "vllm",
            "version": version("vllm"),
            "weights": self.model.digest,
            "tokenizer": self.model.tokenizer_digest,
            "generation_config": self.model.generation_digest,
            "dtype": self.model.dtype,
            "decoding": asdict(self.decoding),
        }

    def _ids(
        self, requests: Sequence[Request], tokens: int, progress: Progress
    ) -> Sequence[tuple[list[int], bool]]:
        prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        settings = [self._sampling(request, tokens) for request in requests]
        outputs = [output.outputs[0] for output in self.llm.generate(prompts, settings, use_tqdm=False)]
        progress(len(requests))
        return [(list(output.token_ids), output.finish_reason == "stop") for output in outputs]

    def _sampling(self, request: Request, tokens: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=min(request.limit or tokens, tokens),
            temperature=0.0 if self.decoding.greedy else self.decoding.temperature,
            top_p=self.decoding.top_p,
            top_k=self.decoding.top_k or -1,  # all; 0 is refused before vLLM 0.9
            seed=int(store.digest(request.seed)[:15], 16),
        )


ENGINES = {"transformers": Transformers, "vllm": Vllm}


def engine(name: str, model: EvaluatedModel, decoding: Decoding | Beams, batch: int) -> Transformers:
    """Return the engine called `name`. UserError where it is unknown, not installed, or cannot decode so."""
    if name not in ENGINES:
        raise UserError(f"--engine {name!r} is not known; known: {', '.join(ENGINES)}")
    return ENGINES[name](model, decoding, batch)
