"""Test Liger's kernels in tiny models with Triton's interpreter.

Only `tests/unit/pipeline/test_kernels.py` collects these tests, in a separate process, if liger-kernel is
installed. The interpreter passes Python floats to kernels, and lacks the functions of CUDA's library. Both
are fixed here. The interpreter cannot compute in bfloat16.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from liger_kernel.ops import geglu, rms_norm
from numpy import array, float32
from torch import Tensor
from transformers.models.llama import modeling_llama
from triton.runtime import interpreter

from emo.pipeline.loss import fuse_model, get_objective
from emo.pipeline.model.kernels import check_kernels, compare_kernels, replaced_modules, use_liger
from tests.helpers.families import family
from tests.helpers.refusals import refused

converted = interpreter._implicit_cvt


def with_floats(value: object) -> object:
    if not isinstance(value, float):
        return converted(value)
    return tl.tensor(interpreter.TensorHandle(array([value], dtype=float32), tl.float32), tl.float32)


@triton.jit
def rsqrt(x):  # type: ignore[no-untyped-def]
    return tl.rsqrt(x)


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


interpreter._implicit_cvt = with_floats
rms_norm.rsqrt, geglu.tanh = rsqrt, tanh
IDS = torch.arange(10)[None]
POSITIONS = torch.tensor([[*range(7), *range(3)]])  # two documents


def small(name: str, **changes: object) -> object:
    return family(name, num_hidden_layers=1, **changes)


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", torch.float16), ("qwen3", torch.float32), ("gemma2", torch.float32)]
)
def test_layers_differ_by_rounding(name: str, dtype: torch.dtype) -> None:
    model = small(name).to(dtype)
    names, kinds = list(model.state_dict()), {type(module) for module in model.modules()}
    use_liger(model)
    assert list(model.state_dict()) == names and {type(module) for module in model.modules()} == kinds
    with torch.no_grad(), compare_kernels(model) as worst:
        model(input_ids=IDS, position_ids=POSITIONS, use_cache=False)
    kinds = {key.rpartition(" ")[2] for key in worst}
    assert {kind[-3:] for kind in kinds} == {"orm", "ion", "MLP"} and max(worst.values()) < 1


def test_a_step_of_a_llama() -> None:
    """The loss and all gradients equal those of the original layers. Other models keep their layers."""
    models = [small("llama") for _ in range(2)]
    original = dict(vars(modeling_llama))
    use_liger(models[0])
    assert dict(vars(modeling_llama)) == original and not replaced_modules(models[1])
    results: list[dict[str, Tensor]] = []
    for model in models:
        fuse_model(model, get_objective("mle"))
        loss = model(input_ids=IDS, labels=IDS, position_ids=POSITIONS).loss
        loss.backward()
        results.append({"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()})
    for key, value in results[1].items():
        torch.testing.assert_close(results[0][key], value, rtol=1e-4, atol=1e-6)


def test_an_activation_that_liger_takes_for_another_is_refused() -> None:
    model = small("llama", hidden_act="gelu")
    use_liger(model)
    with torch.no_grad(), refused("kernels-differ") as error:
        check_kernels(model, lambda: model(input_ids=IDS, use_cache=False))
    assert "LlamaMLP" in str(error.value)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_families_without_kernels_are_refused(name: str) -> None:
    with refused("kernels"):
        use_liger(small(name, **({"n_layer": 1} if name == "gpt2" else {})))
