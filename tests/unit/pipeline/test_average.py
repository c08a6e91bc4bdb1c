"""A teacher that averages the student's weights: its values, and the loss against it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from emo.pipeline.control.world import World
from emo.pipeline.engine.average import WeightAverage
from emo.pipeline.loss import fuse_model, get_objective
from emo.pipeline.loss.models.frozen import FrozenCausalLM, LiveTeacher
from emo.pipeline.model.build import add_lora
from emo.pipeline.model.config import LoraConfig, ModelConfig
from emo.pipeline.model.teacher import add_averaged_adapters
from tests.helpers.families import family
from tests.helpers.refusals import refused

WORLD = World(0, 1, torch.device("cpu"))


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Run as a single rank without a process group."""
    with mock.patch("emo.pipeline.engine.average.gather_objects", lambda value: [value]):
        yield


def average_of(student: nn.Module, teacher: nn.Module, decay: float) -> WeightAverage:
    return WeightAverage(student, dict(teacher.requires_grad_(False).named_parameters()), decay, WORLD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999])
def test_the_average_equals_a_loop_in_float64(dtype: torch.dtype, decay: float, tmp_path: Path) -> None:
    """This includes an average that another process continues from its file."""
    torch.manual_seed(0)
    student = nn.Linear(5, 7).to(dtype)
    teacher = copy.deepcopy(student)
    average = average_of(student, teacher, decay)
    want = [p.detach().double() for p in student.parameters()]
    for step in range(6):
        for number, parameter in enumerate(student.parameters()):
            parameter.data += torch.randn_like(parameter)
            want[number] = decay * want[number] + (1 - decay) * parameter.detach().double()
        if step == 3:
            torch.save(average.state(), average.file(tmp_path))
            other = copy.deepcopy(student)
            average, teacher = average_of(student, other, decay), other
            average.load(tmp_path)
        average.update()
    for held, exact, values in zip(average.state().values(), want, teacher.parameters(), strict=True):
        assert held.dtype == torch.float32
        torch.testing.assert_close(held.double(), exact.flatten(), rtol=1e-6, atol=1e-6)
        assert torch.equal(values.flatten(), held.to(dtype))


def test_a_teacher_must_start_from_the_weights_of_the_student(tmp_path: Path) -> None:
    student = nn.Linear(2, 2)
    with refused("teacher-start"):
        average_of(student, nn.Linear(2, 2), 0.5)
    average = average_of(student, copy.deepcopy(student), 0.5)
    torch.save({"weight": torch.zeros(4)}, average.file(tmp_path))
    with refused("checkpoint-damaged"):
        average.load(tmp_path)


def dense_loss(student: Any, teacher_logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    p = (teacher_logits[:, :-1] / temperature).log_softmax(-1)
    q = student(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum()


@pytest.mark.parametrize("lora", [False, True])
def test_loss_and_gradients_equal_dense_autograd(lora: bool) -> None:
    """The student has moved away from its average. With adapters, the teacher shares the base weights."""
    torch.manual_seed(0)
    temperature = 2.0
    model = family("llama").double().eval()
    trained = model
    if lora:
        settings = LoraConfig(r=2, alpha=4, dropout=0.0, targets="all-linear")
        trained = add_lora(model, ModelConfig(path="x", lora=settings), 0)
    fuse_model(model, get_objective("kl"))
    if lora:
        copies = add_averaged_adapters(trained, temperature)
        average = WeightAverage(trained, copies, 0.7, WORLD)
    else:
        teacher = family("llama").double().eval()
        teacher.load_state_dict(model.state_dict())
        fuse_model(teacher, get_objective("mle"), forward=FrozenCausalLM)
        average = average_of(model, teacher, 0.7)
        model.teacher = LiveTeacher(teacher, temperature)
    weights = {name: p for name, p in trained.named_parameters() if p.requires_grad}
    shifted = torch.Generator().manual_seed(1)
    for _ in range(3):
        for parameter in weights.values():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=shifted, dtype=torch.float64)
        average.update()
    ids = torch.randint(model.config.vocab_size, (2, 12))
    labels = torch.cat((ids[:, 1:], torch.full((2, 1), -100)), 1)
    sums = model(input_ids=ids, labels=labels)
    sums.loss.backward()
    ours = {name: p.grad for name, p in weights.items()}
    trained.zero_grad()
    now = {name: p.detach().clone() for name, p in weights.items()}
    averages = average.state()
    with torch.no_grad():  # with averaged weights the student gives the teacher's logits
        for name, parameter in weights.items():
            parameter.copy_(averages[name].view_as(parameter))
        expected = model(input_ids=ids).logits
        for name, parameter in weights.items():
            parameter.copy_(now[name])
    want = dense_loss(model, expected, ids, temperature)
    want.backward()
    assert want > 0.01
    torch.testing.assert_close(sums.loss, want, rtol=1e-6, atol=1e-8)
    for name, parameter in weights.items():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-6, atol=1e-8)
