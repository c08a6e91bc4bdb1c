"""Replaced kernels in the layers of a model: the check, errors, and Liger if it is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys

import pytest
import torch

from emo.pipeline.model.config import ModelConfig
from emo.pipeline.model.kernels import check_kernels, check_liger_host, replaced_modules
from tests.helpers.families import by_hand, family
from tests.helpers.refusals import refused
from tests.unit.loss.test_triton import run

IDS = torch.arange(24).view(2, 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("", ""),
        ("gradient", "gradient of LlamaRMSNorm"),
        ("output", "of LlamaMLP"),
        ("nan", "of LlamaMLP"),
    ],
)
def test_kernels_may_differ_by_rounding_only(fault: str, kind: str, dtype: torch.dtype) -> None:
    """Outputs and gradients are compared. A gradient that is 10 % too small is an error."""
    changes = {"hidden_act": "gelu"} if fault == "output" else {}
    model = family("llama", **changes).to(dtype)
    by_hand(model, slope=0.9 if fault == "gradient" else 1.0)
    if fault == "nan":
        model.model.layers[1].mlp.forward = lambda x: x * torch.nan
    kernels = {module: module.forward for module in replaced_modules(model)}
    assert len(kernels) == 7

    with refused("kernels-differ") if fault else contextlib.nullcontext() as error, torch.no_grad():
        check_kernels(model, lambda: model(input_ids=IDS, use_cache=False))
    assert error is None or kind in str(error.value)
    assert all(module.forward is kernel for module, kernel in kernels.items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_host_without_gpu_or_liger_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("kernels-gpu"):
        check_liger_host()
    monkeypatch.setattr("emo.pipeline.model.kernels.on_gpu", lambda: True)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)  # as if it were not installed
    with refused("missing-extra"):
        check_liger_host()
    with pytest.raises(ValueError, match="kernels or compile"):
        ModelConfig(path="x", kernels="liger", compile=True)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
def test_liger_in_the_interpreter() -> None:
    output = run("pytest", "tests/helpers/liger_cases.py", TRITON_INTERPRET="1")
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None and int(passed[1]) >= 5 and "skipped" not in output, output[-500:]
