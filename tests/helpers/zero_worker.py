"""One rank of the ZeRO parity test: train a tiny LLaMA with the fused head in several set-ups.

Run by two processes for the sharded runs, and imported for the unsharded one they are compared with.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from emo.common.errors import UserError
from emo.pipeline.engine import start_world
from emo.pipeline.loss import fuse_model, probe_model
from emo.pipeline.loss.cost import CostEmbedding
from emo.pipeline.loss.dense import Teacher
from emo.pipeline.loss.fused import LossSums, fused_linear_loss
from emo.pipeline.loss.head import fuse_head
from emo.pipeline.loss.objectives import get_objective
from emo.pipeline.loss.varlen import VARLEN
from tests.helpers.families import family, tiny_llama
from tests.helpers.loss_reference import stored_for

VOCAB, BLOCK, ROWS, STEPS = 96, 16, 6, 3  # rows of the global batch
OPTIMIZER = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0}  # a tiny eps would amplify rounding

ZERO = {"overlap_comm": False, "stage3_param_persistence_threshold": 0}


@dataclass(frozen=True)
class Case:
    objective: str = "emo"
    stage: int = 3
    tied: bool = False
    checkpointing: bool = False
    accumulation: int = 1
    zero_init: bool = False  # built in pieces from the start, cost embedding gathered
    frozen_head: bool = False
    external: bool = False  # the head's weight is used without calling it


class WithLoss(nn.Module):
    """A causal LM that returns the loss sums, as the trainer's model does."""

    def __init__(self, model: nn.Module, external: bool) -> None:
        super().__init__()
        self.model, self.external = model, external

    def forward(self, ids: Tensor, labels: Tensor) -> LossSums:
        hidden, head = self.model.model(ids).last_hidden_state, self.model.lm_head
        if self.external:
            return fused_linear_loss(hidden, head.weight, labels, head.objective, head.cost)
        teacher = None
        if head.spec.terms.objective.dense:
            generator = torch.Generator().manual_seed(7)
            states = torch.randn(VOCAB, 8, generator=generator)[ids]  # a teacher that sees one token
            teacher = Teacher(states, torch.randn(VOCAB, 8, generator=generator))
        return head(hidden, labels, teacher, stored_for(labels))


def build(case: Case) -> WithLoss:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.2}
    model = tiny_llama(VOCAB, tie_word_embeddings=case.tied, **shape)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return WithLoss(model, case.external)


def prepare(model: WithLoss, case: Case) -> None:
    head = model.model.lm_head
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        objective = get_objective(case.objective)
    head.objective, head.cost = objective, CostEmbedding.from_weight(head.weight)
    if not case.external:
        fuse_head(head, objective, head.cost, memory_mb=16 * VOCAB * 4 / 2**20)
    head.weight.requires_grad_(not case.frozen_head)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The global batch: ids and labels [ROWS, BLOCK]; a different number of valid tokens per row."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(VOCAB, (ROWS, BLOCK), generator=generator)
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = -100
    for row in range(ROWS):
        labels[row, : 2 * row] = -100
    if step == 1:
        labels[: ROWS // 2] = -100  # one rank has nothing to learn from in this step
    return ids, labels


def run_unsharded(case: Case) -> dict[str, Tensor]:
    """The truth: one process, whole batch, torch's own AdamW."""
    model = build(case)
    prepare(model, case)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), **OPTIMIZER)
    losses, first = [], {}
    for step in range(STEPS):
        ids, labels = batch(step)
        sums = model(ids, labels)
        loss = sums.loss / sums.tokens
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(loss.detach())
    state = {f"param.{name}": p.detach().clone() for name, p in model.named_parameters()}
    return {"losses": torch.stack(losses)} | {f"grad.{n}": g for n, g in first.items()} | state


def ds_config(case: Case) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS // 2 // case.accumulation,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 0.0,  # the default is 1.0
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, **OPTIMIZER}},
        "zero_optimization": ZERO | {"stage": case.stage},
    }


def run_sharded(case: Case) -> dict[str, Tensor]:
    """This rank's part under DeepSpeed; every rank returns the gathered results."""
    config = ds_config(case)
    if case.zero_init:
        source = build(case).state_dict()
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = build(case)
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            if dist.get_rank() == 0:
                model.load_state_dict(source)
    else:
        model = build(case)
    prepare(model, case)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trained)
    rank, losses = dist.get_rank(), []
    grads: dict[str, Tensor] = {}
    for step in range(STEPS):
        ids, labels = (x.view(2, case.accumulation, -1, BLOCK)[rank] for x in batch(step))
        tokens = int((batch(step)[1] != -100).sum())
        total = torch.zeros(())
        for i in range(case.accumulation):
            sums = engine(ids[i], labels[i])
            # DeepSpeed divides by ranks and accumulation, we by the tokens of the global batch
            engine.backward(sums.loss * (2 * case.accumulation / tokens))
            total += sums.loss.detach() / tokens
            if step == 0 and i == case.accumulation - 1:
                for name, p in engine.module.named_parameters():
                    if p.requires_grad and case.stage > 0:
                        grads[f"grad.{name}"] = safe_get_full_grad(p).clone()
            engine.step()
        dist.all_reduce(total)
        losses.append(total)
    state = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], modifier_rank=None):
            state[f"param.{name}"] = p.detach().clone()
    engine.destroy()
    return {"losses": torch.stack(losses)} | grads | state


CASES = [
    Case(objective="mile"),
    Case(objective="demd_dense"),
    Case(tied=True, checkpointing=True, accumulation=3),
    Case(stage=0, tied=True, accumulation=3),
    Case(stage=1, accumulation=3),
    Case(stage=2, tied=True, accumulation=3),
    Case(zero_init=True, tied=True),
    Case(frozen_head=True),
    Case(external=True),
]


def probed(name: str, scale: float | None = None, attn: str | None = None) -> str:
    """Return the start-up probe's verdict on a family, after two training steps where it is admitted."""
    model = family(name, attn)
    fuse_model(model, get_objective("mle"), **({} if scale is None else {"logit_scale": scale}))
    config = ds_config(Case()) | {"train_micro_batch_size_per_gpu": 1}
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
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
    if sys.argv[2:] == ["probe"]:
        results: list[Any] = [probed("llama"), probed("opt"), probed("bloom"), probed("granite", 0.3)]
        results.append(probed("opt", attn=VARLEN))
    else:
        results = [run_sharded(case) for case in CASES]
    if dist.get_rank() == 0:
        torch.save(results, Path(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
