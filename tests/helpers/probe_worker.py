"""One rank of the start-up probe under ZeRO-3, whose weights lie in pieces on two ranks."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import deepspeed
import torch

from emo.common.errors import UserError
from emo.pipeline.engine import start_world
from emo.pipeline.loss import fuse_model, get_objective, probe_model
from emo.pipeline.loss.varlen import VARLEN
from tests.helpers.families import family
from tests.helpers.zero_worker import Case, ds_config

CONFIG: dict[str, Any] = ds_config(Case()) | {"train_micro_batch_size_per_gpu": 1}


def outcome(name: str, scale: float | None = None, attn: str | None = None) -> str:
    """Return the probe's verdict on a family, after two training steps where it is admitted."""
    model = family(name, attn)
    fuse_model(model, get_objective("mle"), **({} if scale is None else {"logit_scale": scale}))
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG, model_parameters=list(model.parameters()))
    try:
        packing = probe_model(model, engine, packed=False, collective=True, device=torch.device("cpu"))
    except UserError as error:
        return error.code
    ids = torch.arange(12)[None]
    for _ in range(2):
        sums = engine(input_ids=ids, labels=ids, position_ids=ids)
        engine.backward(sums.loss / 12)
        engine.step()
    engine.destroy()
    return packing


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start_world()
    lines = [outcome("llama"), outcome("opt"), outcome("bloom"), outcome("granite", 0.3)]
    lines.append(outcome("opt", attn=VARLEN))
    if torch.distributed.get_rank() == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write("\n".join(lines))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
