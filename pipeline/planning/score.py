"""`emo score`: a model's log-probability of every prepared token, once, beside the shards.

Training then reads them at the price of reading tokens: no second model stays in memory (`psft`, `excess`).
"""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from emo.common.errors import UserError
from emo.common.files import sha256
from emo.common.labels import IGNORE
from emo.data_prep import scores
from emo.data_prep.shards import TokenDataset, open_prepared
from emo.pipeline.config import RunConfig
from emo.pipeline.loss import fuse_model, get_objective, probe_model
from emo.pipeline.loss.fused import token_nll
from emo.pipeline.model import check_fits, load_pretrained, model_config, origin
from emo.pipeline.planning.host import check_gpus, on_gpu, usable_attention

log = logging.getLogger(__name__)


def score(config: RunConfig, name: str, part: tuple[int, int], force: bool) -> bool:
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
    for data in sets:
        if force:
            scores.clear(data, name)
        scores.begin(data, name, about)
    attn = usable_attention(config.model, hf_config)
    model: Any = load_pretrained(*origin(config), config.model.dtype, attn)
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
                scores.write_shard(path, _score_shard(model, data, shard, config.train.micro_batch_size))
        complete = scores.seal(data, name, about) and complete
    return complete


@torch.no_grad()
def _score_shard(model: Any, data: TokenDataset, shard: int, micro: int) -> np.ndarray:
    """Return log p of the tokens of a shard [tokens], nats; 0 for the first of each segment."""
    offsets, rows = data.token_offsets(shard), data.rows_of(shard)
    logprobs = np.zeros(int(offsets[-1]), np.float32)
    head = model.get_output_embeddings()
    began = time.perf_counter()
    for start in tqdm(range(0, len(rows), micro), desc=data.manifest.shards[shard].file, disable=None):
        arrays = data.batch(rows[start : start + micro])
        keys = ("input_ids", "position_ids")
        inputs = {key: torch.from_numpy(arrays[key]).to(head.weight.device) for key in keys}
        labels = torch.full_like(inputs["input_ids"], IGNORE)  # the next token of the same segment
        same = inputs["position_ids"][:, 1:] > 0
        labels[:, :-1] = torch.where(same, inputs["input_ids"][:, 1:], IGNORE)
        hidden = model.before_head(labels.numel(), dict(inputs))
        nll = token_nll(hidden, head.weight, head.bias, labels, head.spec).float()
        if not bool(torch.isfinite(nll).all()):
            raise UserError(f"the model gives log-probabilities that are not finite in {data.directory}")
        for i, row_nll in enumerate(nll.cpu().numpy()):
            first, last = offsets[start + i], offsets[start + i + 1]
            logprobs[first + 1 : last] = -row_nll[: last - first - 1]
    seconds = time.perf_counter() - began
    log.info("%s: %s tokens in %.0f s", data.manifest.shards[shard].file, f"{len(logprobs):,}", seconds)
    return logprobs
