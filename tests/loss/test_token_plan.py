"""The order of tokens made on the host, and a loss that never waits for the device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emo.common.errors import UserError
from emo.common.labels import IGNORE
from emo.pipeline.loss.cost import CostEmbedding, plan_tokens
from emo.pipeline.loss.fused import fused_linear_loss
from emo.pipeline.loss.objectives import OBJECTIVES
from tests.helpers.waits import waits
from tests.loss.test_objectives import make

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@given(st.lists(st.lists(st.sampled_from([IGNORE, 0, 1, 5, 6, 900]), min_size=3, max_size=3), max_size=9))
def test_the_plan_is_the_valid_tokens_sorted(rows: list[list[int]]) -> None:
    """Ascending by label, equal ones in order of position; every array as its name says."""
    plan = plan_tokens(torch.tensor(rows, dtype=torch.int64).view(-1, 3))
    flat = [label for row in rows for label in row]
    want = sorted((label, position) for position, label in enumerate(flat) if label != IGNORE)
    assert plan.size == len(flat)
    assert len(plan) == len(want)
    assert list(zip(plan.labels, plan.positions, strict=True)) == want
    assert plan.targets.tolist() == sorted({label for label, _ in want})
    assert [plan.targets[i] for i in plan.which] == [label for label, _ in want]
    assert plan.counts.tolist() == [flat.count(target) for target in plan.targets]
    for tensor, name in zip(plan.on(DEVICE), ("positions", "labels", "which", "targets"), strict=True):
        assert tensor.tolist() == getattr(plan, name).tolist()


def test_labels_that_cannot_be_planned() -> None:
    with pytest.raises(UserError) as error:
        plan_tokens(torch.ones(3))
    assert error.value.code == "dtypes"
    for label in (-7, 9):
        with pytest.raises(UserError) as error:
            plan_tokens(torch.tensor([1, label, 2])).check(9)
        assert error.value.code == "label-range"
    plan_tokens(torch.tensor([IGNORE])).check(9)
    with pytest.raises(UserError) as error:
        fused_linear_loss(
            torch.zeros(4, 2), torch.zeros(9, 2), plan_tokens(torch.ones(3).long()), make("mle")
        )
    assert error.value.code == "shapes"


@pytest.mark.parametrize("cache_mb", [0.0, 0.02], ids=["exact", "cached"])
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "demd_dense"])
def test_the_loss_never_waits_for_the_device(name: str, cache_mb: float) -> None:
    """Forward and backward with planned labels; and once, to fetch them, with labels on the device."""
    torch.manual_seed(0)
    objective = make(name)
    hidden = torch.randn(90, 8, device=DEVICE, requires_grad=True)
    weight = torch.randn(200, 8, device=DEVICE, requires_grad=True)
    labels = torch.randint(200, (90,))
    labels[::5] = IGNORE
    cost = CostEmbedding.from_weight(weight.detach(), cache_mb=cache_mb) if objective.needs_cost else None
    stored = torch.full((90,), -2.0, device=DEVICE)
    plan, on_device = plan_tokens(labels, pin=DEVICE.type == "cuda"), labels.to(DEVICE)
    for _ in range(2):  # the second time the cache is not empty
        with waits() as waited:
            sums = fused_linear_loss(hidden, weight, plan, objective, cost, stored=stored, memory_mb=0.02)
            (sums.loss / sums.tokens).backward()
        assert waited == []
    with waits() as waited:
        again = fused_linear_loss(hidden, weight, on_device, objective, cost, stored=stored, memory_mb=0.02)
    assert len(waited) == 1
    assert torch.equal(again.loss, sums.loss)
