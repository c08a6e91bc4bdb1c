"""`emo score`: a model's log-probability of every prepared token, once, beside the shards.

Training then reads them at the price of reading tokens: no second model stays in memory (`psft`, `excess`).
With `--top-k K` they are those of the K most likely tokens in its place, and of all others together, for
divergences from that model as a teacher.
"""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emo.common.cli.progress import at_work
from emo.common.errors import UserError
from emo.common.io.files import sha256
from emo.common.labels import IGNORE
from emo.data_prep.shards import scores
from emo.data_prep.shards.format import TokenDataset, open_prepared

from ..config import RunConfig
from ..engine.devices import check_gpus, on_gpu, usable_attention
from ..loss import Teacher, fuse_model, get_objective, probe_model
from ..loss.fused import token_nll
from ..model.build import check_fits, load_pretrained, model_config

log = logging.getLogger(__name__)

TOKENS = 1024  # whose logits are alive at a time
LEAST = -60000.0  # what float16 can hold of a log-probability


def score(config: RunConfig, name: str, part: tuple[int, int], force: bool, top_k: int | None = None) -> bool:
    """Score the shards of a recipe's data with `config.model`; return True when all of them are done.

    `part` (i, n): this job takes every n-th shard from the i-th; any number of jobs may share the work.
    Shards that are there already are kept; with `force` all are written again.
    """
    check_gpus()
    data, held_out = open_prepared(config.data)
    sets = [data, *held_out.values()]
    hf_config = model_config(config.model)
    for data in sets:
        check_fits(hf_config, config.model, data.manifest)
    assert config.model.path is not None
    files = sorted(p for p in Path(config.model.path).glob("*") if p.suffix in (".safetensors", ".bin"))
    weights = hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest()
    about = config.model.model_dump(include={"path", "revision", "dtype"})
    about["weights"] = weights if files else None
    if top_k is not None:
        fewest = min(rows.manifest.vocab_size for rows in sets)
        if not 0 < top_k < fewest:
            raise UserError(f"--top-k must be from 1 to {fewest - 1} (given: {top_k})", code="option-range")
        about["top_k"] = top_k
    for data in sets:
        if force:
            scores.clear(data, name)
        scores.begin(data, name, about)
    attn = usable_attention(config.model, hf_config)
    model: Any = load_pretrained(*config.initial_weights(), config.model.dtype, attn)
    model.eval().requires_grad_(False)
    if on_gpu():
        model.cuda()
    fuse_model(model, get_objective("mle"))
    probe_model(model)
    complete = True
    for data in sets:
        for shard in range(part[0], len(data.manifest.shards), part[1]):
            path = scores.shard_file(data, name, shard)
            if scores.written_hash(path) is None:
                scores.write_shard(
                    path, _score_shard(model, data, shard, config.train.micro_batch_size, top_k)
                )
        complete = scores.seal(data, name, about) and complete
    return complete


@torch.no_grad()
def _score_shard(model: Any, data: TokenDataset, shard: int, micro: int, top_k: int | None) -> np.ndarray:
    """Return the scores of the tokens of a shard [tokens], nats; 0 for the first of each segment."""
    offsets, rows, vocab_size = data.token_offsets(shard), data.rows_of(shard), data.manifest.vocab_size
    dtype = np.float32 if top_k is None else scores.top_dtype(top_k, vocab_size)
    logprobs = np.zeros(int(offsets[-1]), dtype)
    head = model.get_output_embeddings()
    began = time.perf_counter()
    file = data.manifest.shards[shard].file
    with at_work(f"{file}: scoring", len(rows), "row") as advance:
        for start in range(0, len(rows), micro):
            arrays = data.batch(rows[start : start + micro])
            keys = ("input_ids", "position_ids")
            inputs = {key: torch.from_numpy(arrays[key]).to(head.weight.device) for key in keys}
            labels = torch.full_like(inputs["input_ids"], IGNORE)  # the next token of the same segment
            same = inputs["position_ids"][:, 1:] > 0
            labels[:, :-1] = torch.where(same, inputs["input_ids"][:, 1:], IGNORE)
            hidden = model.compute_hidden(labels.numel(), dict(inputs))
            if top_k is None:
                result = -token_nll(hidden, head.weight, head.bias, labels, head.spec).float().cpu().numpy()
            else:
                result = _most_likely(hidden, head, labels != IGNORE, top_k, vocab_size)
            numbers = result if top_k is None else result["log_p"]
            if not np.isfinite(numbers).all():
                raise UserError(f"the model gives log-probabilities that are not finite in {data.directory}")
            for i, row in enumerate(result):
                first, last = offsets[start + i], offsets[start + i + 1]
                logprobs[first + 1 : last] = row[: last - first - 1]
            advance(len(rows[start : start + micro]))
    seconds = time.perf_counter() - began
    log.info("%s: %s tokens in %.0f s", file, f"{len(logprobs):,}", seconds)
    return logprobs


def _most_likely(hidden: Tensor, head: Any, used: Tensor, k: int, vocab_size: int) -> np.ndarray:
    """Return the k most likely of `vocab_size` tokens after each of `used` [b, L], of `scores.top_dtype`."""
    result = np.zeros(used.shape, scores.top_dtype(k, vocab_size)).reshape(-1)
    (positions,) = used.flatten().nonzero(as_tuple=True)
    teacher = Teacher(hidden, head.weight, head.bias, head.spec.terms.softcap, head.spec.logit_scale)
    for part in positions.split(TOKENS):
        log_p, ids = (every := teacher.log_probs(part, vocab_size)).topk(k)
        rest = every.scatter_(1, ids, -torch.inf).logsumexp(1, keepdim=True).clamp(min=LEAST)
        entries = torch.cat((log_p.clamp(min=LEAST, max=0), rest.clamp(max=0)), 1)
        at = part.cpu().numpy()
        result["ids"][at] = ids.cpu().numpy()
        result["log_p"][at] = entries.cpu().numpy()
    return result.reshape(used.shape)
