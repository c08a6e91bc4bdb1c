"""Every door and every family: the logged loss is the mean per predicted token, its gradient autograd's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer

from emo.pipeline.hf import FusedLossMixin, fuse_causal_lm, loss_function
from emo.pipeline.loss import CostEmbedding
from tests.helpers.families import FAMILIES, VOCAB, family
from tests.helpers.loss_reference import cost_matrix, losses_from_logits
from tests.pipeline.test_hf import arguments

LENGTH, ROWS = 11, 6
NOT_TRAINED = ("bert",)  # not causal


class FusedTrainer(FusedLossMixin, Trainer):
    pass


def without_dropout(model: Any) -> Any:
    """Return the model, which then computes the same in training as in evaluation."""
    for module in model.modules():
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def rows() -> list[dict[str, list[int]]]:
    """Return rows with different numbers of labels, in half of them one for the first token too."""
    ids = torch.randint(1, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    for i in range(ROWS):
        labels[i, 1 : 1 + i] = -100
        labels[i, 0] = ids[i, 0] if i % 2 else -100
    return [
        {"input_ids": row, "labels": target}
        for row, target in zip(ids.tolist(), labels.tolist(), strict=True)
    ]


def naive(model: Any, objective: str) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss per predicted token of all rows, from the model's logits, and its gradients."""
    head = model.get_output_embeddings().weight.detach().clone()
    ids, labels = (torch.tensor([row[key] for row in rows()]) for key in ("input_ids", "labels"))
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1).double()
    losses, _, _ = losses_from_logits(logits, labels[:, 1:].flatten(), cost_matrix(head), objective)
    loss = losses.mean()
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def stepped(trainer: Trainer, model: Any) -> tuple[float, dict[str, Tensor]]:
    """Return the logged loss and the gradients of one step of SGD."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.train()
    rate = trainer.args.learning_rate
    return trainer.state.log_history[0]["loss"], {
        name: (before[name] - p.detach()) / rate for name, p in model.named_parameters()
    }


def through(door: str, model: Any, objective: str, directory: Path) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients that a door gives for all rows, in micro-batches of two."""
    if door == "loop":
        fuse_causal_lm(model, objective)
        micro = [rows()[i : i + 2] for i in range(0, ROWS, 2)]
        tokens = sum(label != -100 for row in rows() for label in row["labels"][1:])
        total = 0.0
        for part in micro:
            batch = {key: torch.tensor([row[key] for row in part]) for key in part[0]}
            loss = model(**batch, num_items_in_batch=tokens).loss
            loss.backward()
            total += loss.item()
        return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 1}
    args = arguments(directory, optim="sgd", learning_rate=0.5, **changes)
    if door == "mixin":
        return stepped(FusedTrainer(model, args, train_dataset=rows(), objective=objective), model)
    model.loss_type = "ForCausalLM"  # as pipeline/hf.py says: a GPT-2 would count first tokens
    cost = CostEmbedding.from_weight(model.get_output_embeddings().weight)
    function = loss_function(objective, cost)
    return stepped(Trainer(model, args, train_dataset=rows(), compute_loss_func=function), model)


TRAINED = [name for name in FAMILIES if name not in NOT_TRAINED]
CASES = [("mixin", name) for name in TRAINED]
CASES += [(door, name) for door in ("loop", "function") for name in ("gpt2", "gemma2", "granite", "mixtral")]


@pytest.mark.parametrize(("door", "name"), CASES)
def test_loss_and_gradients_are_autograds(door: str, name: str, tmp_path: Path) -> None:
    model = without_dropout(family(name)).train()
    want, gradients = naive(copy.deepcopy(model), "emo")
    loss, got = through(door, model, "emo", tmp_path)
    assert loss == pytest.approx(want, rel=1e-5)
    scale = max(float(g.norm()) for g in gradients.values())
    for key, gradient in gradients.items():
        assert float((got[key] - gradient).norm()) <= 1e-4 * scale, key
