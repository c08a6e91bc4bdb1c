"""`emo score`: compute a model's log-probability of every prepared token, and store it with the shards.

Training then reads the scores like tokens, without holding a second model in memory (`psft`, `excess`). With
`--top_k K` the scores are those of the K most likely tokens at each position, and of all others together, for
divergences from that model as a teacher.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emo.common.causal_lm import IGNORE
from emo.common.cli.progress import show_activity
from emo.common.errors import UserError
from emo.common.io.files import sha256
from emo.data_prep.shards import scores
from emo.data_prep.shards.format import TokenDataset, open_prepared

from ..config import RunConfig
from ..engine.device.devices import check_gpus, on_gpu, usable_attention
from ..loss import Teacher, fuse_model, get_objective, probe_model
from ..model.build import check_fits, load_pretrained, model_config

log = logging.getLogger(__name__)

TOKENS = 1024  # number of tokens whose logits are in memory at a time
LOWEST = -60000.0  # smallest stored log-probability, within the range of float16


def score(config: RunConfig, name: str, part: tuple[int, int], force: bool, top_k: int | None = None) -> bool:
    """Score the shards of a recipe's data with `config.model`. Return whether all shards have scores.

    Args:
        config: The recipe, whose model reads the data.
        name: Name of the scores.
        part: (i, n): score every n-th shard from the i-th. Any number of jobs may share the work.
        force: Score again what has scores already.
        top_k: Store the K most likely tokens per position, instead of only the token itself.
    """
    check_gpus()
    data, held_out = open_prepared(config.data)
    sets = [data, *held_out.values()]
    hf_config = model_config(config.model)
    for data in sets:
        check_fits(hf_config, config.model, data.manifest)
    if top_k is not None:
        smallest = min(rows.manifest.vocab_size for rows in sets)
        if not 0 < top_k < smallest:
            raise UserError(f"--top_k must be from 1 to {smallest - 1} (given: {top_k})", code="option-range")
    identity = _identify_scores(config, top_k)
    for data in sets:
        if force:
            scores.clear(data, name)
        scores.begin(data, name, identity)
    model = _load_model(config, usable_attention(config.model, hf_config))
    complete = True
    for data in sets:
        for shard in range(part[0], len(data.manifest.shards), part[1]):
            path = scores.shard_file(data, name, shard)
            if scores.written_hash(path) is None:
                shard_scores = _score_shard(model, data, shard, config.train.micro_batch_size, top_k)
                scores.write_scores(path, shard_scores)
        complete = scores.finish(data, name, identity) and complete
    return complete


def _identify_scores(config: RunConfig, top_k: int | None) -> dict[str, object]:
    """Return the facts that identify scores: the model and its weights, and K."""
    assert config.model.path is not None
    files = sorted(p for p in Path(config.model.path).glob("*") if p.suffix in (".safetensors", ".bin"))
    weights = hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest()
    identity = config.model.model_dump(include={"path", "revision", "dtype"})
    identity["weights"] = weights if files else None
    if config.model.rope is not None:
        identity["rope"] = config.model.rope.model_dump(exclude_none=True)
    return identity if top_k is None else identity | {"top_k": top_k}


def _load_model(config: RunConfig, attn: str) -> Any:
    source = (*config.initial_weights(), config.model.dtype, attn)
    model: Any = load_pretrained(*source, rope=config.model.rope, trained=False)
    model.eval().requires_grad_(False)
    if on_gpu():
        model.cuda()
    fuse_model(model, get_objective("mle"))
    probe_model(model)
    head = model.get_output_embeddings()
    head.spec = dataclasses.replace(head.spec, by_token=True)
    return model


@torch.no_grad()
def _score_shard(model: Any, data: TokenDataset, shard: int, micro: int, top_k: int | None) -> np.ndarray:
    """Return the scores of the tokens of a shard [tokens], nats; 0 for the first of each segment."""
    offsets = data.token_offsets(shard)
    rows = data.rows_of(shard)
    vocab_size = data.manifest.vocab_size
    dtype = np.float32 if top_k is None else scores.top_dtype(top_k, vocab_size)
    logprobs = np.zeros(int(offsets[-1]), dtype)
    head = model.get_output_embeddings()
    start_time = time.perf_counter()
    file = data.manifest.shards[shard].file
    with show_activity(f"{file}: scoring", len(rows), "row") as advance:
        for start in range(0, len(rows), micro):
            batch = data.batch(rows[start : start + micro])
            inputs = {
                key: torch.from_numpy(batch[key]).to(head.weight.device)
                for key in ("input_ids", "position_ids")
            }
            labels = torch.full_like(inputs["input_ids"], IGNORE)  # the next token of the same segment
            continues = inputs["position_ids"][:, 1:] > 0
            labels[:, :-1] = torch.where(continues, inputs["input_ids"][:, 1:], IGNORE)
            hidden = model.compute_hidden(labels.numel(), dict(inputs))
            if top_k is None:
                result = -head(hidden, labels).by_token[1].view(labels.shape).float().cpu().numpy()
            else:
                result = _most_likely(hidden, head, labels != IGNORE, top_k, vocab_size)
            if not np.isfinite(result if top_k is None else result["log_p"]).all():
                raise UserError(
                    f"the model produced NaN or infinite log-probabilities in {data.directory}",
                    code="not-finite",
                )
            for i, row in enumerate(result):
                first = offsets[start + i]
                last = offsets[start + i + 1]
                logprobs[first + 1 : last] = row[: last - first - 1]
            advance(len(rows[start : start + micro]))
    seconds = time.perf_counter() - start_time
    log.info("%s: %s tokens in %.0f s", file, f"{len(logprobs):,}", seconds)
    return logprobs


def _most_likely(hidden: Tensor, head: Any, used: Tensor, k: int, vocab_size: int) -> np.ndarray:
    """Return the k most likely of `vocab_size` tokens at each position of `used` [b, L].

    The result [b, L] has the dtype `scores.top_dtype`.
    """
    result = np.zeros(used.shape, scores.top_dtype(k, vocab_size)).reshape(-1)
    (positions,) = used.flatten().nonzero(as_tuple=True)
    teacher = Teacher(hidden, head.weight, head.bias, head.spec.terms.softcap, head.spec.logit_scale)
    for part in positions.split(TOKENS):
        best = teacher.top_k(part, vocab_size, k)
        index = part.cpu().numpy()
        result["ids"][index] = best.ids.cpu().numpy()
        result["log_p"][index] = best.log_p.clamp(min=LOWEST, max=0).cpu().numpy()
    return result.reshape(used.shape)
