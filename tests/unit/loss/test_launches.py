"""What the head needs of a GPU: kernel launches, memory, and no waiting host, traced without a GPU."""

from __future__ import annotations

import collections
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from emo.pipeline.loss import Teacher, TopK, fused, rows
from emo.pipeline.loss.cost import CostEmbedding, plan_tokens
from emo.pipeline.loss.objectives import BUILT_IN, get_objective, weighted_sum
from tests.helpers.accelerator import Trace, traced

MIB = 2**20


class Kernel:
    """A stand-in for a Triton kernel that adds its launches to a trace."""

    def __init__(self, name: str, trace: Trace) -> None:
        self.name, self.trace = name, trace

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: self.trace.launches.update([self.name])


def head(
    monkeypatch: pytest.MonkeyPatch,
    objective: str,
    V: int,
    targets: int,
    cache_mb: float = 0.0,
    calls: int = 1,
    teacher: str | None = None,
) -> Trace:
    """Return the trace of the last of `calls` passes over 8,192 tokens of width 4,096 in bfloat16.

    teacher: "live" (of the same width) or "stored" (with 64 entries).
    """
    kernels_triton = pytest.importorskip("emo.pipeline.loss.kernels.objectives")
    kernels_teacher = pytest.importorskip("emo.pipeline.loss.kernels.teacher")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    labels = torch.randint(0, targets, (8192,), generator=torch.Generator().manual_seed(0))
    hidden, weight = (torch.empty(n, 4096, dtype=torch.bfloat16, device="meta") for n in (8192, V))
    parts = [(get_objective(name), 1.0) for name in objective.split(" + ")]
    minimised = weighted_sum(parts) if parts[1:] else parts[0][0]
    cost = None
    if minimised.needs_cost:
        cost = CostEmbedding(torch.empty(V, 4096, dtype=torch.float16, device="meta"), cache_mb)
    spec = fused.make_spec(minimised, cost, kernels="triton")
    side: Any = None
    if teacher == "live":
        side = Teacher(torch.empty_like(hidden), torch.empty_like(weight))
    elif teacher == "stored":
        side = TopK(labels.new_empty(8192, 64, device="meta"), torch.empty(8192, 65, device="meta"))
    for _ in range(calls):
        tensors = [hidden, weight, *([] if cost is None else [cost.rows]), *(side or ())[:2]]
        tensors += [cost.cache.rows] if cost is not None and cost.cache is not None else []
        with traced(*tensors) as trace:
            for name in ("statistics_kernel", "gradient_kernel"):
                monkeypatch.setattr(kernels_triton, name, Kernel(name, trace))
            for name in ("live_kernel", "stored_kernel"):
                monkeypatch.setattr(kernels_teacher, name, Kernel(name, trace))

            def at_once(*arguments: Any) -> Any:  # one kernel, as in `test_solve_compiles_to_one_kernel`
                before = trace.launches.copy()
                result = rows.solve(*arguments)
                trace.launches = before + collections.Counter(solve=1)
                return result

            monkeypatch.setattr(kernels_triton, "compiled_solve", at_once)
            context = SimpleNamespace(mark_non_differentiable=lambda *sums: None)
            inputs = (hidden, weight, None, plan_tokens(labels), spec, (True, True, False), side, None, None)
            fused._FusedLoss.forward(context, *inputs)
            del context
    return trace


@pytest.mark.parametrize(
    ("objective", "V", "targets", "cache_mb", "calls", "launches", "mebibytes"),
    [
        ("mle", 32000, 32000, 0, 1, 65, 1200),
        ("emo", 32000, 32000, 0, 1, 105, 1330),  # almost all targets differ
        ("emo", 32000, 2500, 0, 1, 80, 1330),  # as many targets as in text
        ("emo", 32000, 2500, 1024, 1, 145, 1330),  # the first call of a run, with an empty table
        ("emo", 32000, 2500, 1024, 2, 75, 1330),
        ("emo", 152064, 2500, 0, 1, 360, 3200),
    ],
)
def test_the_head_launches_few_kernels(
    monkeypatch: pytest.MonkeyPatch,
    objective: str,
    V: int,
    targets: int,
    cache_mb: float,
    calls: int,
    launches: int,
    mebibytes: float,
) -> None:
    trace = head(monkeypatch, objective, V, targets, cache_mb, calls)
    assert sum(trace.launches.values()) <= launches
    assert trace.peak / MIB <= mebibytes


@pytest.mark.parametrize(
    ("objective", "teacher", "launches", "mebibytes"),
    [
        ("kl", "live", 175, 1500),
        ("mle + kl", "live", 265, 1400),
        ("kl", "stored", 68, 1230),
        ("mle + kl", "stored", 145, 1330),
        ("emo_dense", "live", 450, 1760),
    ],
)
def test_a_teacher_adds_few_kernels(
    monkeypatch: pytest.MonkeyPatch, objective: str, teacher: str, launches: int, mebibytes: float
) -> None:
    trace = head(monkeypatch, objective, 32000, 2500, teacher=teacher)
    assert sum(trace.launches.values()) <= launches
    assert trace.peak / MIB <= mebibytes


def test_solve_compiles_to_one_kernel() -> None:
    """Compiled, `solve` is one kernel with the same results. New weights need no other kernel."""
    from torch._inductor import metrics

    compiled = torch.compile(rows.solve, dynamic=True, fullgraph=True)
    metrics.reset()
    for count, weight in ((64, 0.5), (80, 0.75)):
        objective = weighted_sum([(get_objective("mle"), 1.0), (get_objective("emo"), weight)])
        numbers = torch.rand(4, count, generator=torch.Generator().manual_seed(count)).unbind()
        arguments = (rows.Terms(objective), rows.Statistics(*numbers), None, 32000, False)
        (tokens, update), (expected, expected_update) = compiled(*arguments), rows.solve(*arguments)
        assert torch.allclose(tokens.loss, expected.loss, rtol=1e-5)
        assert torch.allclose(update.target, expected_update.target, rtol=1e-5)
        assert update.beta is not None and expected_update.beta is not None
        assert torch.allclose(update.beta, expected_update.beta, rtol=1e-5)
    assert metrics.generated_kernel_count == 1


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_solve_compiles_for_every_objective(name: str) -> None:
    torch.compiler.reset()  # the compiler gives up after many variants of a function
    numbers = torch.rand(9, 8, generator=torch.Generator().manual_seed(1)).unbind()
    statistics = rows.Statistics(*numbers[:4], H=numbers[4], S=numbers[5], top=numbers[6])
    statistics = statistics._replace(likeliest=torch.stack(numbers[:3], 1))
    arguments = (rows.Terms(get_objective(name)), statistics, numbers[7], 32000, False)
    compiled = torch.compile(rows.solve, dynamic=True, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*arguments)[0].loss, rows.solve(*arguments)[0].loss)
