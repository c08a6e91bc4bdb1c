"""Losses and gradients in Trainer and plain loops for all kinds of heads. Also masks, packing and errors."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from emo.pipeline.loss import (
    CostEmbedding,
    Ramp,
    fused_linear_loss,
    get_objective,
    logits_loss,
    shift_left,
    weighted_sum,
)
from emo.pipeline.loss.models.hf import EMOLoss, FusedLossMixin, fuse_causal_lm, loss_function
from emo.pipeline.loss.schedule import Spaced
from tests.helpers.families import VOCAB, family, tiny_llama
from tests.helpers.loss_reference import cost_matrix, losses_from_logits, relative_error, stored_for
from tests.helpers.refusals import refused
from tests.unit.loss.test_objectives import ONE_TARGET, composes, make

LENGTH = 12


class EmoTrainer(FusedLossMixin, Trainer):
    pass


def rows() -> list[dict[str, list[int]]]:
    """Return rows with different numbers of labels. Every second row also has one for its first token."""
    ids = torch.randint(1, VOCAB, (6, LENGTH), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    for i in range(6):
        labels[i, 1 : 1 + i] = -100
        labels[i, 0] = ids[i, 0] if i % 2 else -100
    return [{"input_ids": x, "labels": y} for x, y in zip(ids.tolist(), labels.tolist(), strict=True)]


def arguments(directory: Path, kind: Any = TrainingArguments, **changes: Any) -> Any:
    step = {"max_steps": 1, "per_device_train_batch_size": 6, "learning_rate": 0.5, "optim": "sgd"}
    step |= {"lr_scheduler_type": "constant", "max_grad_norm": 0.0, "use_cpu": True}
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_steps": 1}
    return kind(output_dir=str(directory), **step | quiet | changes)


def test_mixin_evaluates_saves_and_generates(tmp_path: Path) -> None:
    model = tiny_llama(VOCAB)
    args = arguments(tmp_path, per_device_eval_batch_size=6)
    trainer = EmoTrainer(model, args, train_dataset=rows(), eval_dataset=rows(), objective="mle")
    batch = {key: torch.tensor([row[key] for row in rows()]) for key in ("input_ids", "labels")}
    with torch.no_grad():
        want = tiny_llama(VOCAB)(**batch).loss
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(want), rel=1e-5)
    trainer.save_model(str(tmp_path / "saved"))
    loaded, info = LlamaForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name), parameter)
    prompt = torch.tensor([[1, 2, 3]])
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert model.generate(prompt, **settings).tolist() == loaded.generate(prompt, **settings).tolist()


@pytest.mark.parametrize("name", ONE_TARGET)
def test_logits_loss_equals_reference(name: str) -> None:
    """Value and gradient equal float64 autograd."""
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


@pytest.mark.parametrize("name", ["mile", "eaft_full", "neg_entropy"])
def test_logits_may_be_minus_infinity(name: str) -> None:
    """Entries that can never be chosen change neither the entropy nor its gradient."""
    torch.manual_seed(0)
    z = torch.randn(2, 5, 40)
    z[..., 37:] = -math.inf
    z.requires_grad_()
    labels = torch.randint(37, (2, 5))
    loss = logits_loss(z, labels, make(name)).loss
    (got,) = torch.autograd.grad(loss, z)
    assert loss.isfinite() and got.isfinite().all() and not got[..., 37:].any()
    if name == "neg_entropy":  # the others depend on the number of entries
        few = z.detach()[..., :37].clone().requires_grad_()
        want = logits_loss(few, labels, make(name)).loss
        torch.testing.assert_close(loss, want)
        torch.testing.assert_close(got[..., :37], torch.autograd.grad(want, few)[0])


def test_evaluation_takes_the_mean_weights_of_parts_with_a_share(tmp_path: Path) -> None:
    parts = [(get_objective("mle"), 1.0), (get_objective("emo"), Spaced(1.0, Ramp(1 / 3, 1 / 3, 1)))]
    args = arguments(tmp_path, per_device_eval_batch_size=6)
    trainer = EmoTrainer(tiny_llama(VOCAB), args, eval_dataset=rows(), objective=weighted_sum(parts))
    losses = []
    for trainer.state.global_step in (1, 2, 3):
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-6)


def test_the_loss_of_a_learned_prompt_is_the_mean_over_all_tokens(tmp_path: Path) -> None:
    """The last virtual token predicts the first real one."""
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_llama(VOCAB), config)
    ids = torch.randint(1, VOCAB, (6, LENGTH))
    with torch.no_grad():
        want = copy.deepcopy(model)(input_ids=ids, labels=ids).loss
    args = arguments(tmp_path, learning_rate=0.0)
    data = [{"input_ids": row, "labels": row} for row in ids.tolist()]
    trainer = EmoTrainer(model, args, train_dataset=data, objective="mle")
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float(want), rel=1e-4)


@pytest.mark.parametrize("kind", [peft.LoraConfig, peft.VeraConfig, peft.LNTuningConfig])
def test_the_base_is_no_teacher_if_more_than_adapters_trains(kind: Any) -> None:
    targets = ["norm"] if kind is peft.LNTuningConfig else ["q_proj"]
    config = kind(target_modules=targets, task_type="CAUSAL_LM")
    fuse_causal_lm(peft.get_peft_model(tiny_llama(VOCAB), config), "kl", teacher="base")
    model = peft.get_peft_model(tiny_llama(VOCAB), config)
    model.get_output_embeddings().requires_grad_(True)
    with refused("no-adapters"):
        fuse_causal_lm(model, "kl", teacher="base")


def test_emo_loss_module() -> None:
    """Labels may be shifted by the loss or before, and may all be ignored."""
    torch.manual_seed(0)
    z, E = torch.randn(2, LENGTH, VOCAB).requires_grad_(), torch.randn(VOCAB, 5)
    labels = torch.randint(VOCAB, (2, LENGTH))
    labels[1, 5:] = -100
    target = shift_left(labels)
    assert target[:, :-1].equal(labels[:, 1:]) and (target[:, -1] == -100).all()
    losses = losses_from_logits(z.double().flatten(0, 1), target.flatten(), cost_matrix(E), "emo")[0]
    (expected,) = torch.autograd.grad(losses.mean(), z)
    loss = EMOLoss()(z, labels, E)
    assert loss.item() == pytest.approx(losses.mean().item(), rel=1e-6)
    assert relative_error(torch.autograd.grad(loss, z)[0], expected) <= 1e-5
    torch.testing.assert_close(EMOLoss(shift=False)(z, target, E), loss)
    all_ignored = EMOLoss()(z, torch.full_like(labels, -100), E)
    assert all_ignored.item() == 0
    all_ignored.backward()


def test_a_router_loss_that_would_not_be_trained_raises() -> None:
    model = family("mixtral", output_router_logits=True)
    ids = torch.arange(12)[None]
    with refused("router-loss"):
        loss_function("mle")(model(input_ids=ids), ids)


def test_labels_that_are_shifted_already_raise() -> None:
    """The first call detects labels that were shifted before, with or without ignored ones."""
    model = tiny_llama(VOCAB)
    fuse_causal_lm(model, "mle")
    ids = torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    shifted = shift_left(ids)
    with refused("labels-shifted"):
        model(input_ids=ids, labels=shifted)
    right = model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(model(input_ids=ids, shift_labels=shifted).loss, right)


def test_schedules_raise_if_the_step_is_unknown() -> None:
    """Without a step, a schedule would silently stay at its start."""
    ramps = {"emo": Ramp(1.0, 0.0, 2), "mle": Ramp(0.0, 1.0, 2)}
    moving = weighted_sum([(get_objective(name), ramp) for name, ramp in ramps.items()])
    z, labels = torch.randn(2, LENGTH, VOCAB), torch.randint(VOCAB, (2, LENGTH))
    cost = CostEmbedding.from_weight(torch.randn(VOCAB, 5))
    calls = (
        lambda: loss_function(moving, cost),
        lambda: EMOLoss(moving),
        lambda: fuse_causal_lm(tiny_llama(VOCAB), moving),
        lambda: logits_loss(z, labels, moving, cost),
        lambda: fused_linear_loss(z[..., :8], torch.randn(VOCAB, 8), labels, moving, cost),
    )
    for call in calls:
        with refused("schedule-without-step"):
            call()
    assert EMOLoss(moving.at(5))(z, labels, cost) == EMOLoss("mle")(z, labels)


def without_dropout(model: Any) -> Any:
    """Return the model without dropout."""
    for module in model.modules():
        rates = [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
        for name in (*rates, "p") if isinstance(module, torch.nn.Dropout) else rates:
            setattr(module, name, 0.0)
    return model


Documents = list[tuple[list[int], list[int]]]  # ids and labels, aligned


def naive(
    model: Any, documents: Documents, objective: str, head: Tensor, virtual: int = 0, **options: float
) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss per predicted token of separate documents, and its gradients by autograd."""
    losses, C = [], cost_matrix(head)
    for ids, labels in documents:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, virtual:-1].double()
        targets = torch.tensor(labels[1:], dtype=torch.long)
        losses.append(losses_from_logits(logits, targets, C, objective, **options)[0])
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def stepped(trainer: Trainer, model: Any) -> tuple[float, dict[str, Tensor]]:
    """Return the logged loss and the gradients of one step of SGD."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.train()
    rate = trainer.args.learning_rate
    moved = {name: (before[name] - p.detach()) / rate for name, p in model.named_parameters()}
    return trainer.state.log_history[0]["loss"], moved


def assert_close(got: dict[str, Tensor], gradients: dict[str, Tensor], bound: float) -> None:
    """Assert that every gradient has an error of at most `bound` times the largest norm."""
    scale = max(float(gradient.norm()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert float((got[name] - gradient).norm()) <= bound * scale, name


def step_through(
    entry_point: str, model: Any, objective: str, directory: Path
) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of all rows from an entry point, in micro-batches of two."""
    if entry_point == "loop":
        fuse_causal_lm(model, objective)
        tokens = sum(label != -100 for row in rows() for label in row["labels"][1:])
        total = 0.0
        for i in range(0, 6, 2):
            batch = {key: torch.tensor([row[key] for row in rows()[i : i + 2]]) for key in rows()[0]}
            loss = model(**batch, num_items_in_batch=tokens).loss
            loss.backward()
            total += loss.item()
        return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    args = arguments(directory, per_device_train_batch_size=2, gradient_accumulation_steps=3)
    if entry_point == "mixin":
        return stepped(EmoTrainer(model, args, train_dataset=rows(), objective=objective), model)
    model.loss_type = "ForCausalLM"  # else GPT-2 counts first tokens, see pipeline/loss/models/hf.py
    cost = CostEmbedding.from_weight(model.get_output_embeddings().weight)
    function = loss_function(objective, cost)
    return stepped(Trainer(model, args, train_dataset=rows(), compute_loss_func=function), model)


# Heads: tied, biased, narrower than the body, capped, scaled. Bodies: a router, a recurrence, two stacks.
PECULIAR = ("gpt2", "phi", "opt", "gemma2", "granite", "mixtral", "mamba", "bart")
CASES = [("mixin", name) for name in PECULIAR]
CASES += [
    (entry_point, name)
    for entry_point in ("loop", "function")
    for name in ("gpt2", "gemma2", "granite", "mixtral")
]


@pytest.mark.parametrize(("entry_point", "name"), CASES)
def test_loss_and_gradients_equal_autograd(entry_point: str, name: str, tmp_path: Path) -> None:
    model = without_dropout(family(name)).train()
    head = model.get_output_embeddings().weight.detach().clone()
    documents = [(row["input_ids"], row["labels"]) for row in rows()]
    want, gradients = naive(copy.deepcopy(model), documents, "emo", head)
    loss, got = step_through(entry_point, model, "emo", tmp_path)
    assert loss == pytest.approx(want, rel=1e-5)
    assert_close(got, gradients, 1e-4)


DOCUMENTS = (7, 3, 10, 1, 6)


@pytest.mark.parametrize("name", ["opt", "gpt2"])
def test_packed_and_padded_rows_train_like_single_documents(name: str, tmp_path: Path) -> None:
    """The Trainer drops columns that are not in the signature of the model's forward."""
    ids = torch.randint(1, VOCAB, (4, sum(DOCUMENTS)), generator=torch.Generator().manual_seed(5))
    documents = [(part.tolist(), part.tolist()) for row in ids for part in row.split(DOCUMENTS)]
    plain = without_dropout(family(name))
    _, gradients = naive(plain, documents, "mle", plain.get_output_embeddings().weight.detach())
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS])
    packed = [{"input_ids": row, "labels": row.masked_fill(positions == 0, -100)} for row in ids]
    ways = [[{k: v.tolist() for k, v in (row | {"position_ids": positions}).items()} for row in packed]]
    for left in (False, True)[: 1 if name == "gpt2" else 2]:  # its positions include padding on the left
        ways.append([])
        for part, _ in documents:
            fill = [0] * (10 - len(part))
            columns = (part, [-100, *part[1:]], [1] * len(part)), (fill, [-100] * len(fill), fill)
            halves = columns[::-1] if left else columns
            values = (a + b for a, b in zip(*halves, strict=True))
            ways[-1].append(dict(zip(("input_ids", "labels", "attention_mask"), values, strict=True)))
    for data in ways:
        model = without_dropout(family(name))
        args = arguments(tmp_path, per_device_train_batch_size=len(data))
        trainer = EmoTrainer(model, args, train_dataset=data, objective="mle")
        _, got = stepped(trainer, model)
        assert_close(got, gradients, 1e-3)
