"""The loss in wrapped models and in Trainer, on one of several ranks.

Every case is one step of SGD on this rank's half of a batch. Its result is compared with one plain process
on the full batch. Half of the second rank's tokens are ignored, so that a mean of means is detected.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from emo.pipeline.loss.models.hf import FusedLossMixin, fuse_causal_lm
from tests.helpers.families import tiny_llama

VOCAB, ROWS, LENGTH, RATE = 60, 4, 12, 0.5
CASES = ("ddp", "fsdp2", "sharded", "checkpointing", "autocast", "compile", "normalised", "own", "trainer")
OBJECTIVE = {"normalised": "mile", "own": "examples/my_objective.py:unsure"}  # other cases use EMO


def build(case: str, fused: bool = True) -> LlamaForCausalLM:
    model = tiny_llama(VOCAB, num_hidden_layers=2)
    if case == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if fused:
        fuse_causal_lm(model, OBJECTIVE.get(case, "emo"))
    return model.train()


def batch() -> tuple[Tensor, Tensor]:
    """Return ids and labels [ROWS, LENGTH], not shifted."""
    ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[ROWS // 2 :, : LENGTH // 2] = -100
    return ids, labels


def step(model: Any, parameters: Callable[[], Any], case: str, part: slice, share: float) -> Tensor:
    """Take a step on the rows `part` and return the loss. share: factor that undoes a wrapper's mean."""
    ids, labels = batch()
    tokens = int((labels[:, 1:] != -100).sum())
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        loss = model(input_ids=ids[part], labels=labels[part], num_items_in_batch=tokens).loss
    (loss * share).backward()
    with torch.no_grad():
        for parameter in parameters():
            parameter -= RATE * parameter.grad
    return loss.detach()


def alone(case: str) -> dict[str, Tensor]:
    """Return the reference loss and weights, from one process on the full batch."""
    model = build(case)
    loss = step(model, model.parameters, case, slice(None), 1.0)
    return {"loss": loss} | {name: p.detach() for name, p in model.named_parameters()}


class FusedTrainer(FusedLossMixin, Trainer):
    pass


def together(case: str, directory: Path) -> dict[str, Tensor]:
    """Train on this rank's part, and return the sum of the losses and the complete parameters."""
    if case == "trainer":  # two micro-batches on every rank
        ids, labels = batch()
        rows = [{"input_ids": x, "labels": y} for x, y in zip(ids.tolist(), labels.tolist(), strict=True)]
        micro = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 1}
        sgd = {"optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
        quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
        args = TrainingArguments(str(directory), use_cpu=True, ddp_backend="gloo", **micro, **sgd, **quiet)
        trained = tiny_llama(VOCAB, num_hidden_layers=2)
        trainer = FusedTrainer(trained, args, train_dataset=rows)
        trainer.train()
        logged = torch.tensor(trainer.state.log_history[0]["loss"])
        return {"loss": logged} | {name: p.detach() for name, p in trained.named_parameters()}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model: Any = build(case, fused=case != "sharded")
    wrapped = model
    if case in ("fsdp2", "sharded"):
        for layer in (*model.model.layers, model.lm_head):
            fully_shard(layer)
        fully_shard(model)
        if case == "sharded":  # fused after it is sharded
            fuse_causal_lm(model, "emo")
    else:
        if case == "compile":
            model.model.compile(backend="aot_eager")
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    part = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    loss = step(wrapped, model.parameters, case, part, float(ranks))  # both wrappers average gradients
    dist.all_reduce(loss)
    pairs = ((name, p.detach()) for name, p in model.named_parameters())
    return {"loss": loss} | {n: p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for n, p in pairs}
