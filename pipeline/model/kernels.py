"""Liger's kernels in the layers of a causal LM, and a check of them against the layers of transformers.

RMSNorm, rotary embedding and the gated product (SwiGLU, GEGLU) take a dozen kernels each in transformers and
one in Liger (Hsu et al., arXiv 2410.10989), in each direction. Liger's losses are not used, since the output
head is fused already. Parameters, their names and saved files do not change.

Liger selects its kernels by the name of the model family, and some of them overwrite their inputs. Therefore
every start computes each replaced layer in both ways, forward and backward, on the run's first rows with its
weights. They may differ by rounding. To measure how much rounding matters, the layer is computed a third time
with every input moved by one unit in the last place.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from emo.common.errors import UserError, one_line

from ..engine.device.devices import on_gpu

log = logging.getLogger(__name__)

KEY = "model.kernels=liger"
CURE = "remove model.kernels"
# Largest difference, in multiples of the effect of one unit in the last place of the input. Each computation
# rounds a few times in a row, by at most half a unit. Liger's layers of 11 families reach 0.7.
TOLERANCE = 4.0


def check_liger_host() -> None:
    """Raise UserError if this host cannot run Liger's kernels."""
    if not on_gpu():
        raise UserError(f"{KEY} needs a GPU. Without one, {CURE}.", code="kernels-gpu")
    if importlib.util.find_spec("liger_kernel") is None:
        cure = f"Run pip install --no-deps liger-kernel, or {CURE}."
        raise UserError(f"{KEY}: liger-kernel is not installed. {cure}", code="missing-extra")


def use_liger(model: nn.Module) -> None:
    """Replace layers of this Hugging Face causal LM by Liger's kernels, in place.

    Liger patches whole modules of transformers. That is undone, so that other models do not change. Raises
    UserError for a family that Liger has no kernels for.
    """
    from liger_kernel.transformers import monkey_patch

    family = model.config.model_type  # type: ignore[union-attr]
    namespaces = {name: vars(sys.modules[name]) for name in {type(m).__module__ for m in model.modules()}}
    before = {name: dict(names) for name, names in namespaces.items()}
    try:
        monkey_patch._apply_liger_kernel_to_instance(
            model, fused_linear_cross_entropy=False, cross_entropy=False
        )
    except Exception as error:  # versions of Liger and transformers may not match
        problem = f"Liger fails on {family} models ({one_line(error)})"
        raise UserError(f"{KEY}: {problem}. To train without it, {CURE}.", code="kernels") from None
    finally:
        changed = {
            name: {key: value for key, value in names.items() if before[name].get(key) is not value}
            for name, names in namespaces.items()
        }
        for name, names in namespaces.items():
            names.update(before[name])
    for module in model.modules():
        _bind_functions(module, changed.get(type(module).forward.__module__, {}))
    if not replaced_modules(model):
        raise UserError(f"{KEY}: Liger has no kernels for {family} models; {CURE}", code="kernels")


def _bind_functions(module: nn.Module, changed: Mapping[str, object]) -> None:
    """Make the forward of this module alone use the functions that Liger replaced in its namespace."""
    forward = type(module).forward
    functions = {name: value for name, value in changed.items() if inspect.isfunction(value)}
    if isinstance(forward, FunctionType) and functions.keys() & set(forward.__code__.co_names):
        namespace = forward.__globals__ | functions
        copied = FunctionType(
            forward.__code__, namespace, forward.__name__, forward.__defaults__, forward.__closure__
        )
        copied.__kwdefaults__ = forward.__kwdefaults__
        module.forward = MethodType(copied, module)


def replaced_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model whose forward was replaced."""
    return [module for module in model.modules() if "forward" in vars(module)]


@contextlib.contextmanager
def compare_kernels(model: nn.Module) -> Iterator[dict[str, float]]:
    """Compute the replaced modules of `model` in both ways whenever they are called within the block.

    Yields a dict that is filled with the largest difference of each kind of module, in its output and its
    gradients, in multiples of the effect of one unit in the last place of the input.
    """
    worst: dict[str, float] = {}
    kernels = {module: module.forward for module in replaced_modules(model)}
    try:
        for module, kernel in kernels.items():
            module.forward = functools.partial(_compare_call, module, kernel, worst)
        yield worst
    finally:
        for module, kernel in kernels.items():
            module.forward = kernel


def check_kernels(model: nn.Module, run: Callable[[], object], setting: str = KEY) -> None:
    """Raise UserError if a replaced module of `model` differs by more than rounding while `run` runs.

    setting: the keys of the recipe that replaced modules, for messages.
    """
    with compare_kernels(model) as worst:
        run()
    name = max(worst, key=lambda key: worst[key])
    if worst[name] > TOLERANCE:
        problem = f"{name} differs from the model's own by {worst[name]:.3g} times the effect of rounding"
        cure = f"remove {setting.partition('=')[0]}"
        raise UserError(f"{setting}: {problem} (at most {TOLERANCE:g}); {cure}", code="kernels-differ")
    kinds = Counter(type(module).__name__ for module in replaced_modules(model))
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    difference = worst[name]
    log.info("%s computes %s. The largest difference is %.2g of rounding.", setting, listed, difference)


def _compare_call(
    module: nn.Module, kernel: Callable[..., Any], worst: dict[str, float], *args: Any, **kwargs: Any
) -> Any:
    """Return the output of the module's own forward, and record in `worst` how the kernel differs."""
    ordinary = functools.partial(type(module).forward, module)
    first = args[0] if args else kwargs["hidden_states"]
    signs = torch.empty_like(first).bernoulli_(generator=_generator(first)).mul_(2).sub_(1)
    moved = first + first * signs * torch.finfo(first.dtype).eps
    calls = ((kernel, first), (ordinary, first), (ordinary, moved))
    fused, plain, near = (_compute_tensors(module, call, x, args, kwargs) for call, x in calls)
    names = ("output", "input's gradient", "weight's gradient")
    for name, a, b, c in zip(names, fused, plain, near, strict=False):
        a = a.float()
        b = b.float()
        c = c.float()
        difference = float((a - b).norm() / ((c - b).norm() + torch.finfo(first.dtype).eps * b.norm()))
        key = f"the {name} of {type(module).__name__}"
        worst[key] = max(worst.get(key, 0.0), difference if difference == difference else torch.inf)
    return ordinary(*args, **kwargs)


@contextlib.contextmanager
def frozen(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Let no gradient reach parameters within the block: tiles would add it to the one of training."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def _generator(like: Tensor) -> torch.Generator:
    return torch.Generator(like.device).manual_seed(0)


def _compute_tensors(
    module: nn.Module, call: Callable[..., Any], x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the output of a call, and its gradients by its input `x` and by the module's own weights."""
    x = x.detach().clone().requires_grad_()
    inner = [p for part in module.children() for p in part.parameters() if p.requires_grad]
    with torch.enable_grad(), frozen(inner):
        out = call(x, *args[1:], **kwargs) if args else call(**kwargs | {"hidden_states": x})
        out = out[0] if isinstance(out, tuple) else out
        towards = torch.randn(out.shape, generator=_generator(out), device=out.device).to(out.dtype)
        inputs = [x, *(p for p in module.parameters(recurse=False) if p.requires_grad)]
        gradients = torch.autograd.grad(out, inputs, towards)  # some kernels overwrite `towards`
    return [out.detach(), *gradients]
