"""lm-eval's model interface over our models and our store.

The requests of a task are answered in chunks, which are stored like rows of our own tasks. A killed job
therefore resumes, and several processes share the work. The answers come from lm-eval's HFLM with our loaded
model.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import cached_property
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from lm_eval.api.model import LM, CacheHook
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs

from emo.common.cli.progress import show_activity
from emo.common.errors import UserError

from ..models.base import BUDGET
from ..models.model import EvaluatedModel, quiet_libraries
from ..results import store
from ..results.directory import Record

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from ..icl.job import Job

VERSION = 2  # of the answers, of the records and of the results made from them
CHUNKS = {"generate_until": 64}  # requests of a kind that a killed job loses at most
CHUNK = 512  # of the other kinds
USUAL = 2048  # tokens: prompts are rarely longer
SCORER = f"lm-eval {metadata.version('lm_eval')}, {VERSION}"


class Fate(NamedTuple):
    """The parts of a request and its answer that limits removed."""

    lost: int = 0  # tokens of the prompt that the context had no space for
    cut: bool = False  # whether the answer reached the length limit


class StoredAnswers(LM):
    """A model for lm_eval.evaluate whose answers are in the store, or are computed into it.

    fates: by task and number of the row. contents: digests of the requests of each kind. dtype: that of the
    weights that made the answers.
    """

    def __init__(self, job: Job, label: str) -> None:
        super().__init__()
        self.job = job
        self.label = label
        self.fates: dict[tuple[str, int], Fate] = {}
        self.contents: list[str] = []
        self.dtype = ""

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether it is the greedy one."""
        return [(float(total), bool(greedy)) for total, greedy in self._answer("loglikelihood", requests)]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Return the log-probability of each text."""
        return self._answer("loglikelihood_rolling", requests)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return the model's answer to each prompt."""
        return self._answer("generate_until", requests)

    @cached_property
    def _scorer(self) -> RecordingHFLM:
        model = self.job.model
        assert isinstance(model, EvaluatedModel)  # checked by `evaluate_harness_task`
        self.job.say(f"{model.name}: loading {model.source}")
        quiet_libraries()
        return RecordingHFLM(model, self.job.settings.max_tokens, self.job.settings.batch_size)

    def _answer(self, kind: str, requests: list[Instance]) -> list[Any]:
        job = self.job
        model = job.model
        assert isinstance(model, EvaluatedModel)
        content = store.digest_json([kind, [[*request.args] for request in requests]])
        self.contents.append(content)
        identity = {
            "weights": model.digest,
            "generation": model.generation_digest,
            "tokenizer": model.tokenizer_digest,
            "dtype": model.dtype,
            "max_tokens": job.settings.max_tokens,
            "requests": content,
            "scorer": SCORER,
        }
        entry = store.Entry(job.out / store.STORE, identity, job.say)
        chunk = CHUNKS.get(kind, CHUNK)
        if not entry.is_complete(len(requests), chunk):
            _ = self._scorer  # it logs lines, so load it before the bar appears
        with show_activity(f"{model.name} {self.label}", len(requests), "request") as advance:

            def compute(numbers: range) -> list[Record]:
                answers = self._scorer.answer(kind, [requests[number] for number in numbers])
                job.computed += 1
                advance(len(numbers))
                found = zip(numbers, answers, strict=True)
                return [{"row": row, "answer": answer, **fate._asdict()} for row, (answer, fate) in found]

            records = store.complete(entry, len(requests), chunk, compute, advance)
        if entry.result() is None:
            entry.finish({"requests": len(requests), "dtype": model.computed_dtype})
        self.dtype = (entry.result() or {}).get("dtype", model.dtype)
        for request, record in zip(requests, records, strict=True):
            row = str(request.task_name), int(request.doc_id or 0)
            before = self.fates.get(row, Fate())
            self.fates[row] = Fate(max(before.lost, record["lost"]), before.cut or record["cut"])
        return [record["answer"] for record in records]


class RecordingHFLM(HFLM):
    """lm-eval's HFLM that also records which prompts and answers were cut. It shows no progress bars."""

    def __init__(self, model: EvaluatedModel, max_tokens: int | None, batch_size: int | None) -> None:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        context = max_tokens or model.context
        if model.context is not None and max_tokens is not None and max_tokens > model.context:
            raise UserError(
                f"--max_tokens {max_tokens} exceeds the model's context of {model.context} tokens",
                code="context",
            )
        size = batch_size or max(1, BUDGET // min(context or USUAL, USUAL))
        super().__init__(
            pretrained=model.model,
            tokenizer=model.fresh_tokenizer(),
            batch_size=size,
            max_length=max_tokens,
            softmax_dtype="float32",  # sums of probabilities in bfloat16 make different answers equal
        )
        self.source = model.source
        self.ends = {*model.ends}
        self.fates: list[Fate] = []

    def answer(self, kind: str, requests: list[Instance]) -> list[tuple[Any, Fate]]:
        """Return the answer to each request, and what was cut."""
        self.fates = []
        marks = Marks(self)
        self.set_cache_hook(marks)
        answers = getattr(self, kind)(requests, disable_tqdm=True)
        fates = self.fates
        if kind == "generate_until":
            fates = [marks.take(request.args) for request in requests]
        elif kind == "loglikelihood_rolling":  # reads long texts window by window
            fates = [Fate()] * len(requests)
        for value in answers if kind != "generate_until" else ():
            total = value[0] if isinstance(value, tuple) else value
            if math.isnan(total) or total > 0 or total == -math.inf:
                raise UserError(
                    f"{self.source}: a score is not finite: {total:g}. Nothing is published. "
                    "Try --dtype float32.",
                    code="not-finite",
                )
        return list(zip(answers, fates, strict=True))

    def _loglikelihood_tokens(self, requests: Sequence[Any], **options: Any) -> list[tuple[float, bool]]:
        lengths = [len(context or ()) + len(tail) for _, context, tail in requests]
        self.fates += [Fate(max(0, n - self.max_length - 1)) for n in lengths]  # the last token is not read
        return super()._loglikelihood_tokens(requests, **options | {"disable_tqdm": True})

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **options: Any) -> Any:
        output = super()._model_generate(context, max_length, stop, **options)
        self.fates = []
        for ids in output[:, context.shape[1] :].tolist():
            ended = len(ids) < max_length - context.shape[1] or not self.ends.isdisjoint(ids)
            text = "" if ended else self.tok_decode(ids)
            self.fates.append(Fate(cut=not ended and not any(end in text for end in stop if end)))
        return output


class Marks(CacheHook):
    """Receives each generated answer from HFLM right after its batch, and notes what was cut."""

    def __init__(self, scorer: RecordingHFLM) -> None:
        super().__init__(None)
        self.scorer = scorer
        self.fates: defaultdict[str, deque[Fate]] = defaultdict(deque)

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        """Note the next answer of the current batch."""
        if attr == "generate_until":
            context, options = req
            scorer = self.scorer
            budget = normalize_gen_kwargs(options, scorer.max_gen_toks)["max_gen_toks"]
            lost = max(0, len(scorer.tok_encode(context)) - (scorer.max_length - budget))
            self.fates[repr(req)].append(Fate(lost, scorer.fates.pop(0).cut))

    def take(self, arguments: Any) -> Fate:
        """Return the fate of the next answer to these arguments."""
        return self.fates[repr((arguments[0], arguments[1]))].popleft()
