"""Trainer, TRL and plain loops get the same losses as the fused path; every docstring example runs."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import emo.pipeline.hf
from emo.common.errors import UserError
from emo.pipeline.hf import EMOLoss, FusedLossMixin, fuse_causal_lm, loss_function
from emo.pipeline.loss import (
    CostEmbedding,
    Ramp,
    fused_linear_loss,
    get_objective,
    logits_loss,
    shift_left,
    weighted_sum,
)
from tests.helpers.families import tiny_llama
from tests.helpers.loss_reference import cost_matrix, losses_from_logits, relative_error, stored_for
from tests.loss.test_objectives import ONE_TARGET, composes, make

VOCAB, LENGTH = 61, 12


class EmoTrainer(FusedLossMixin, Trainer):
    pass


def rows(n: int = 24) -> list[dict[str, list[int]]]:
    """Examples with very different numbers of supervised tokens."""
    generator = torch.Generator().manual_seed(3)
    result = []
    for i in range(n):
        ids = torch.randint(VOCAB, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: (i * 5) % LENGTH] = -100
        result.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return result


def arguments(directory: Path, **changes: Any) -> TrainingArguments:
    step = {"max_steps": 3, "per_device_train_batch_size": 6, "learning_rate": 1e-2, "adam_epsilon": 1e-3}
    step |= {
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "seed": 1,
        "data_seed": 1,
        "use_cpu": True,
    }
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_steps": 1}
    return TrainingArguments(output_dir=str(directory), **step | quiet | changes)


def parameters(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(kind: str, directory: Path, **changes: Any) -> tuple[Tensor, list[float]]:
    """Train three steps; parameters and logged losses."""
    model = tiny_llama(VOCAB)
    settings = {"args": arguments(directory, **changes), "train_dataset": rows()}
    if kind == "mixin":
        trainer: Trainer = EmoTrainer(model=model, objective="emo", **settings)
    else:
        cost = CostEmbedding.from_weight(model.lm_head.weight)
        trainer = Trainer(model=model, compute_loss_func=loss_function("emo", cost), **settings)
    trainer.train()
    return parameters(model), [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize("kind", ["mixin", "function"])
def test_accumulation_does_not_change_training(kind: str, tmp_path: Path) -> None:
    """num_items_in_batch is honoured: 1 x 6 rows and 3 x 2 rows take the same steps."""
    whole, losses = train(kind, tmp_path)
    pieces, losses_of_pieces = train(
        kind, tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=3
    )
    assert relative_error(pieces, whole) <= 1e-6
    assert losses_of_pieces == pytest.approx(losses, rel=1e-5)


def test_mixin_evaluates_saves_and_generates(tmp_path: Path) -> None:
    """Evaluation gives the mean loss; saved files are those of the ordinary model; generation works."""
    model = tiny_llama(VOCAB)
    args = arguments(tmp_path, per_device_eval_batch_size=24)
    trainer = EmoTrainer(model, args, train_dataset=rows(), eval_dataset=rows(), objective="mle")
    batch = {key: torch.tensor([row[key] for row in rows()]) for key in ("input_ids", "labels")}
    with torch.no_grad():
        want = tiny_llama(VOCAB)(**batch).loss
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(want), rel=1e-5)
    trainer.save_model(str(tmp_path / "saved"))
    loaded, info = LlamaForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(parameters(loaded), parameters(model))
    prompt = torch.tensor([[1, 2, 3]])
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert model.generate(prompt, **settings).tolist() == loaded.generate(prompt, **settings).tolist()


@pytest.mark.parametrize("name", ONE_TARGET)
def test_logits_loss_equals_reference(name: str) -> None:
    """Value and gradient against float64 autograd."""
    torch.manual_seed(0)
    vocab = 1500
    z = (torch.randn(3, 9, vocab) * 3).requires_grad_()
    labels = torch.randint(vocab, (3, 9))
    labels[0, ::2] = -100
    E = torch.randn(vocab, 7)
    options = {"z_loss": 0.01, "label_smoothing": 0.1}
    options = options if composes(name, options) else {}
    cost, stored = CostEmbedding.from_weight(E), stored_for(labels)
    sums = logits_loss(z, labels, make(name), cost, stored=stored, memory_mb=0.1, **options)
    sums.loss.backward()
    wide = z.detach().double().view(-1, vocab).requires_grad_()
    loss, m, D = losses_from_logits(wide, labels.flatten(), cost_matrix(E), name, **options)
    loss.sum().backward()
    for got, want in ((sums.loss.detach(), loss.sum()), (sums.nll, m.sum()), (sums.demd, D.sum())):
        assert relative_error(got, want.detach()) <= 1e-5
    assert relative_error(z.grad.view(-1, vocab), wide.grad) <= 1e-5


def test_emo_loss_module() -> None:
    """Shifted and unshifted, half precision, and nothing to predict."""
    torch.manual_seed(0)
    z, E = torch.randn(2, LENGTH, VOCAB).requires_grad_(), torch.randn(VOCAB, 5)
    labels = torch.randint(VOCAB, (2, LENGTH))
    labels[1, 5:] = -100
    wide = z.detach().double().requires_grad_()
    target = shift_left(labels)
    assert target[:, :-1].equal(labels[:, 1:]) and (target[:, -1] == -100).all()
    want = losses_from_logits(wide.flatten(0, 1), target.flatten(), cost_matrix(E), "emo")[0].mean()
    module = EMOLoss()
    loss = module(z, labels, E)
    loss.backward()
    want.backward()
    assert relative_error(loss.detach(), want.detach()) <= 1e-6
    assert relative_error(z.grad, wide.grad) <= 1e-5
    torch.testing.assert_close(EMOLoss(shift=False)(z, target, E), loss)
    half = z.detach().bfloat16().requires_grad_()
    value = module(half, labels, E)
    value.backward()
    assert (value.dtype, half.grad.dtype) == (torch.float32, torch.bfloat16)
    assert relative_error(half.grad, wide.grad) <= 2e-2
    assert EMOLoss("mle")(z, labels).item() == pytest.approx(
        torch.nn.functional.cross_entropy(z.flatten(0, 1), target.flatten()).item()
    )
    all_ignored = module(z, torch.full_like(labels, -100), E)
    assert all_ignored.item() == 0
    all_ignored.backward()


def test_examples_of_the_docstring_run(tmp_path: Path) -> None:
    """Its indented blocks."""
    blocks = re.findall(r"(?:^(?: {4}.*)?\n)+", emo.pipeline.hf.__doc__ or "", re.MULTILINE)
    examples = [textwrap.dedent(block) for block in blocks if block.strip()]
    assert len(examples) == 3
    for example in examples:
        model = tiny_llama(VOCAB)
        before = parameters(model)
        names = {"model": model, "args": arguments(tmp_path), "dataset": rows()}
        names["logits"] = torch.randn(2, LENGTH, VOCAB, requires_grad=True)
        names["labels"] = torch.randint(VOCAB, (2, LENGTH))
        names["cost_embedding"] = torch.randn(VOCAB, 8)
        exec(example, names)
        trained = relative_error(parameters(model), before) > 1e-3
        assert trained if "trainer" in names else names["logits"].grad.abs().sum() > 0


def test_labels_that_were_shifted_already() -> None:
    """They would be shifted a second time; said at the first call, whatever is ignored."""
    model = tiny_llama(VOCAB)
    fuse_causal_lm(model, "mle")
    ids = torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    shifted = shift_left(ids)
    with pytest.raises(UserError) as error:
        model(input_ids=ids, labels=shifted)
    assert error.value.code == "labels-shifted"
    right = model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(model(input_ids=ids, shift_labels=shifted).loss, right)
    # seen to be right once, and not looked at again
    assert model.aligned
    model(input_ids=ids, labels=shifted)


def test_a_schedule_is_refused_where_nobody_tells_the_step() -> None:
    """It would stay at its first step, without a word; given for a step, it is what it is there."""
    moving = weighted_sum(
        [(get_objective("emo"), Ramp(1.0, 0.0, 2)), (get_objective("mle"), Ramp(0.0, 1.0, 2))]
    )
    z, labels = torch.randn(2, LENGTH, VOCAB), torch.randint(VOCAB, (2, LENGTH))
    cost = CostEmbedding.from_weight(torch.randn(VOCAB, 5))
    doors = (
        lambda: loss_function(moving, cost),
        lambda: EMOLoss(moving),
        lambda: fuse_causal_lm(tiny_llama(VOCAB), moving),
        lambda: logits_loss(z, labels, moving, cost),
        lambda: fused_linear_loss(z[..., :8], torch.randn(VOCAB, 8), labels, moving, cost),
    )
    for door in doors:
        with pytest.raises(UserError) as error:
            door()
        assert error.value.code == "schedule-without-step"
    assert EMOLoss(moving.at(5))(z, labels, cost) == EMOLoss("mle")(z, labels)


def test_a_batch_without_anything_to_predict(tmp_path: Path) -> None:
    """Its loss is 0, and no weight becomes NaN."""
    model = tiny_llama(VOCAB)
    before = parameters(model)
    data = [{"input_ids": row["input_ids"], "labels": [-100] * LENGTH} for row in rows()]
    trainer = EmoTrainer(model, arguments(tmp_path), train_dataset=data)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == 0
    torch.testing.assert_close(parameters(model), before, rtol=0, atol=0)
