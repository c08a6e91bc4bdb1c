"""Liger's kernels in the layers of a causal LM, and their check against the layers as transformers has them.

RMSNorm, rotary embedding and the gated product (SwiGLU, GEGLU) are a dozen kernels each in transformers and
one in Liger (Hsu et al., arXiv 2410.10989), each forward and backward. Its losses are left out: the output
head has one of its own. Parameters, their names and saved files stay as they are.

Liger knows a family by its name alone, and some of its kernels write over their inputs. So at every start
each layer that has a kernel is computed both ways, on the run's first rows and with its weights, forward and
backward. The two may differ by rounding; how much that is, says the layer itself: it is computed a third
time, with every number of its input moved by one unit in the last place.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from emo.common.errors import UserError, one_line

from ..engine.devices import on_gpu

log = logging.getLogger(__name__)

KEY = "model.kernels=liger"
CURE = "leave model.kernels out"
# Times what a unit in the last place of the input changes. Each way rounds every number by half a unit at
# most, at a few places in a row; Liger's layers of 11 families came to 0.7 at most (docs/cluster.md).
TOLERANCE = 4.0


def check_host() -> None:
    """Raise UserError where this host cannot run Liger's kernels."""
    if not on_gpu():
        raise UserError(f"{KEY} needs a GPU, for which its kernels are compiled; {CURE}", code="kernels-gpu")
    if importlib.util.find_spec("liger_kernel") is None:
        cure = f"pip install --no-deps liger-kernel, or {CURE}"
        raise UserError(f"{KEY}: liger-kernel is not installed: {cure}", code="missing-extra")


def use_liger(model: nn.Module) -> None:
    """Let the layers of a Hugging Face causal LM compute with Liger's kernels, in place.

    Only this model changes. Raises UserError for a family that Liger has no kernels for.
    """
    from liger_kernel.transformers import monkey_patch

    family = model.config.model_type  # type: ignore[union-attr]
    sources = {name: vars(sys.modules[name]) for name in {type(m).__module__ for m in model.modules()}}
    before = {name: dict(names) for name, names in sources.items()}
    try:
        monkey_patch._apply_liger_kernel_to_instance(
            model, fused_linear_cross_entropy=False, cross_entropy=False
        )
    except Exception as error:  # whatever a version of Liger makes of a version of transformers
        raise UserError(
            f"{KEY}: Liger fails on {family} ({one_line(error)}); {CURE}", code="kernels"
        ) from None
    finally:
        # What it changed for every model of the family is taken back, and functions go to these layers alone.
        changed = {
            name: {key: value for key, value in names.items() if before[name].get(key) is not value}
            for name, names in sources.items()
        }
        for name, names in sources.items():
            names.update(before[name])
    for module in model.modules():
        forward = type(module).forward
        functions = {k: v for k, v in changed.get(forward.__module__, {}).items() if inspect.isfunction(v)}
        if isinstance(forward, FunctionType) and functions.keys() & set(forward.__code__.co_names):
            copied = FunctionType(
                forward.__code__,
                forward.__globals__ | functions,
                forward.__name__,
                forward.__defaults__,
                forward.__closure__,
            )
            copied.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(copied, module)
    if not replaced(model):
        raise UserError(f"{KEY}: Liger has no kernels for {family} models; {CURE}", code="kernels")


def replaced(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model whose forward is not that of their class."""
    return [module for module in model.modules() if "forward" in vars(module)]


@contextlib.contextmanager
def compared(model: nn.Module) -> Iterator[dict[str, float]]:
    """Compute the replaced modules of `model` both ways within the block, where they are called.

    Yields what is filled there: the largest difference of each kind of module in its output and its
    gradients, in multiples of what a unit in the last place of the input changes.
    """
    worst: dict[str, float] = {}
    kernels = {module: module.forward for module in replaced(model)}
    try:
        for module, kernel in kernels.items():
            module.forward = functools.partial(_both, module, kernel, worst)
        yield worst
    finally:
        for module, kernel in kernels.items():
            module.forward = kernel


def check_kernels(model: nn.Module, run: Callable[[], object]) -> None:
    """Raise UserError where a replaced module of `model` differs by more than rounding while `run` runs."""
    with compared(model) as worst:
        run()
    name = max(worst, key=lambda key: worst[key])
    if worst[name] > TOLERANCE:
        problem = f"{KEY}: {name} is {worst[name]:.3g} times as far from the model's own as rounding goes"
        raise UserError(f"{problem} (at most {TOLERANCE:g}); {CURE}", code="kernels-differ")
    kinds = Counter(type(module).__name__ for module in replaced(model))
    words = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    log.info("Liger computes %s: off by at most %.2g of what rounding explains", words, worst[name])


def _both(
    module: nn.Module, kernel: Callable[..., Any], worst: dict[str, float], *args: Any, **kwargs: Any
) -> Any:
    """Return what the module itself makes of its arguments, once the comparison is noted in `worst`."""
    ordinary = functools.partial(type(module).forward, module)
    first = args[0] if args else kwargs["hidden_states"]
    signs = torch.empty_like(first).bernoulli_(generator=_generator(first)).mul_(2).sub_(1)
    moved = first + first * signs * torch.finfo(first.dtype).eps
    calls = ((kernel, first), (ordinary, first), (ordinary, moved))
    fused, plain, near = (_results(module, call, x, args, kwargs) for call, x in calls)
    for kind, a, b, c in zip(
        ("output", "input's gradient", "weight's gradient"), fused, plain, near, strict=False
    ):
        a, b, c = a.float(), b.float(), c.float()
        difference = float((a - b).norm() / ((c - b).norm() + torch.finfo(first.dtype).eps * b.norm()))
        key = f"the {kind} of {type(module).__name__}"
        worst[key] = max(worst.get(key, 0.0), difference if difference == difference else torch.inf)
    return ordinary(*args, **kwargs)


def _generator(like: Tensor) -> torch.Generator:
    return torch.Generator(like.device).manual_seed(0)


def _results(
    module: nn.Module, call: Callable[..., Any], x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the output of a call, and its gradients by its input `x` and by the module's own weights."""
    x = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        out = call(x, *args[1:], **kwargs) if args else call(**kwargs | {"hidden_states": x})
        out = out[0] if isinstance(out, tuple) else out
        towards = torch.randn(out.shape, generator=_generator(out), device=out.device).to(out.dtype)
        inputs = [x, *(p for p in module.parameters(recurse=False) if p.requires_grad)]
        gradients = torch.autograd.grad(out, inputs, towards)  # some kernels write over `towards`
    return [out.detach(), *gradients]
