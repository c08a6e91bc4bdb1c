"""Compile the Triton kernels for GPUs, without a GPU, and report registers, spills, vectors and bytes.

    python -m tests.bench.kernels_static [--quick]

The loss runs on tensors without data, so that flags, types, strides and alignments match real calls. Each
launch is compiled ahead of time for an A100 (sm_80) and an H100 (sm_90). Bytes per logit in the loop over a
row are compared with the minimum. The minimum reads every logit once for the statistics, reads and writes it
once for the gradient, and reads the costs in each pass that needs them. Notes at the end estimate the cost of
other sizes of chunks, each of which reads and writes the float32 sum of the head's gradient.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from emo.pipeline.loss.cost import CostCache, CostEmbedding, CostRows, padded_rows
from emo.pipeline.loss.divergences import DIVERGENCES
from emo.pipeline.loss.fused import CHUNK_MB, add_divergences, process_chunk
from emo.pipeline.loss.kernels import objectives as kernels_triton
from emo.pipeline.loss.kernels import teacher as kernels_teacher
from emo.pipeline.loss.objectives import get_objective
from emo.pipeline.loss.rows import Chunk, Terms, Tokens, statistics_dtype
from emo.pipeline.loss.teacher import Teacher, TeacherRows, TopK
from tests.bench import common
from tests.helpers.accelerator import traced

META = torch.device("meta")
VOCABULARIES = (32000, 50257, 128256, 152064)
CAPABILITIES = (80, 90)
TOKENS = 64  # per chunk, of which the kernels see one row at a time
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64"}
SIZES = ("BLOCK", "ENTRIES")  # arguments that are constants of the compiled code
# Bytes/s of an H100, and bf16 operations/s of a large product on it.
BANDWIDTH, PRODUCTS = 3.35e12, 660e12


class Flavour(NamedTuple):
    """One way in which objectives use the kernels."""

    objective: str
    costs: str | None = None  # exact, cached
    bias: bool = False
    terms: dict[str, float] = {}


SMOOTH = {"z_loss": 1e-4, "label_smoothing": 0.1}
FLAVOURS = {
    "mle": Flavour("mle"),
    "emo, exact costs": Flavour("emo", "exact"),
    "emo, cached costs": Flavour("emo", "cached"),
    "emo2, exact costs": Flavour("emo2", "exact"),
    "neg_entropy": Flavour("neg_entropy"),
    "mile": Flavour("mile"),
    "eaft": Flavour("eaft"),
    "smoothed, exact costs": Flavour("smoothed", "exact"),
    "deft": Flavour("deft"),
    "gem": Flavour("gem"),
    "gem, exact costs reported": Flavour("gem", "exact"),
    "mle, soft cap": Flavour("mle", terms={"softcap": 30.0}),
    "emo, exact, z-loss and smoothing": Flavour("emo", "exact", terms=SMOOTH),
    "emo, exact, soft cap and bias": Flavour("emo", "exact", True, {"softcap": 30.0}),
}


class Against(NamedTuple):
    """One way in which divergences use the kernels, with a live teacher or with k stored entries."""

    objective: str
    k: int = 0
    sides: bool = False  # student and teacher have a bias, a cap and a temperature
    sum: bool = False  # in a sum with MLE


AGAINST = {f"{name}, live": Against(name) for name in DIVERGENCES} | {
    "kl, live, caps and biases": Against("kl", sides=True),
    "emo_dense, live, caps and biases": Against("emo_dense", sides=True),
    "jsd, live, in a sum": Against("jsd", sum=True),
    "kl, top 64": Against("kl", 64),
    "jsd, top 64, cap and bias, in a sum": Against("jsd", 64, sides=True, sum=True),
}


# With these, every branch of every kernel is compiled. The others combine fewer branches than one of these.
QUICK = (
    "mle",
    "emo, cached costs",
    "neg_entropy",
    "smoothed, exact costs",
    "deft",
    "gem, exact costs reported",
    "emo, exact, z-loss and smoothing",
    "emo, exact, soft cap and bias",
    "skew_kl, live",
    "emo_dense, live, caps and biases",
    "jsd, top 64, cap and bias, in a sum",
)


class Launch(NamedTuple):
    """A kernel, the arguments of its call, and its number of warps."""

    kernel: Any
    arguments: dict[str, Any]
    warps: int


class Recorder:
    """A stand-in for a kernel, which records launches instead of running them."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, num_warps: int, **flags: Any) -> None:
            by_name = dict(zip(self.kernel.arg_names, arguments, strict=False)) | flags
            self.launches.append(Launch(self.kernel, by_name, num_warps))

        return launch


def launches(V: int, dtype: torch.dtype, flavour: Flavour | Against) -> list[Launch]:
    """Return the kernel launches of a chunk's loss, forward and backward."""
    if isinstance(flavour, Against):
        return against_launches(V, dtype, flavour)
    objective = get_objective(flavour.objective)
    wide = statistics_dtype(dtype)
    logits = padded_rows(TOKENS, V, dtype, META)
    scalar = torch.empty(TOKENS, dtype=wide, device=META)
    labels = torch.empty(TOKENS, dtype=torch.int64, device=META)
    bias = torch.empty(V, dtype=wide, device=META) if flavour.bias else None
    costs = None  # rows of costs as the kernels get them on an accelerator, the same for all tokens
    if flavour.costs == "cached":
        costs = CostRows(CostCache(V, 1024 * V * 4 / 2**20, META).rows, labels)
    elif flavour.costs == "exact":
        costs = CostRows(padded_rows(TOKENS, V, torch.float32, META), labels, similarity=True)
    rows = costs and SimpleNamespace(read_group=lambda start, stop: costs, group_end=lambda start, stop: stop)
    chunk = Chunk(0, labels, scalar, scalar, bias)
    results: list[Launch] = []
    names = ("statistics_kernel", "gradient_kernel")
    recorders = {name: Recorder(getattr(kernels_triton, name), results) for name in names}
    with mock.patch.multiple(kernels_triton, **recorders):
        process_chunk(logits, chunk, rows, Terms(objective, **flavour.terms), gradient=True, triton=True)
    return results


def against_launches(V: int, dtype: torch.dtype, flavour: Against) -> list[Launch]:
    """Return the kernel launches of a chunk's divergence from a teacher."""
    params = {"temperature": 2.0} if flavour.sides else {}
    objective = get_objective(flavour.objective, **params)
    wide, n = statistics_dtype(dtype), TOKENS
    logits = padded_rows(n, V, dtype, META)
    scalar, labels = torch.empty(n, dtype=wide, device=META), torch.empty(n, dtype=torch.int64, device=META)
    bias = torch.empty(V, dtype=wide, device=META) if flavour.sides else None
    numbers = (bias, 30.0, 1.0, 2.0) if flavour.sides else ()
    side: TeacherRows | TopK = TeacherRows(padded_rows(n, V, wide, META), Teacher(logits, None, *numbers))
    if flavour.k:
        masses = torch.empty(n, flavour.k + 1, dtype=wide, device=META)
        side = TopK(masses[:, 1:].long(), masses)
    cost = CostEmbedding(torch.empty(V, 64, dtype=torch.float16, device=META))
    chunk, terms = Chunk(0, labels, scalar, scalar, bias), Terms(objective, 30.0 if flavour.sides else None)
    tokens = Tokens(*[scalar] * 5) if flavour.sum else None
    results: list[Launch] = []
    names = ("live_kernel", "stored_kernel")
    recorders = {name: Recorder(getattr(kernels_teacher, name), results) for name in names}
    with mock.patch.multiple(kernels_teacher, **recorders), traced():
        add_divergences(padded_rows(n, V, dtype, META), logits, chunk, side, cost, terms, True, True, tokens)
    return results


def signature(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
    """Return the types, constants and alignments that Triton derives from a call."""
    types, constants, attributes = {}, {}, {}
    for index, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments[name]
        aligned = False
        if isinstance(value, Tensor):
            types[name], aligned = "*" + TYPES[value.dtype], value.data_ptr() % 16 == 0
        elif isinstance(value, bool | str) or name in SIZES or (value == 1 and isinstance(value, int)):
            types[name], constants[name] = "constexpr", value
        elif isinstance(value, int):
            types[name] = "i32" if abs(value) < 2**31 else "i64"
            aligned = value % 16 == 0
        else:
            types[name] = "fp32"
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return types, constants, attributes


class Code(NamedTuple):
    """Properties of the compiled code of a launch."""

    registers: int  # per thread
    spilled: int  # bytes
    vectors: int  # loads and stores of 8 or 16 bytes in the loop over a row
    narrow: int  # loads and stores of fewer bytes
    bytes: float  # loaded and stored per column, by the loop


ACCESS = re.compile(r"\b(?:ld|st)\.global\S*?(?:\.v(\d))?\.[bfsu](\d+)\s")
LABEL, BRANCH = re.compile(r"^(\$L__BB\w+):"), re.compile(r"\bbra\S*\s+(\$L__BB\w+)")


def compiled(launch: Launch, capability: int) -> Code:
    """Compile a launch for a GPU of a compute capability. This needs no GPU."""
    types, constants, attributes = signature(launch)
    source = ASTSource(launch.kernel, types, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    ptx = triton.compile(source, target=target, options={"num_warps": launch.warps}).asm["ptx"]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "kernel.ptx"
        file.write_text(ptx)
        gpu = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)[0]
        command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={gpu}", str(file), "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (registers,), spills = (
        re.findall(r"Used (\d+) registers", report),
        re.findall(r"(\d+) bytes spill", report),
    )
    assert spills, report
    sizes = list(accesses(ptx))
    vectors = sum(size >= 8 for size in sizes)
    moved = sum(sizes) * 32 * launch.warps / launch.arguments["BLOCK"]
    return Code(int(registers), sum(map(int, spills)), vectors, len(sizes) - vectors, moved)


def accesses(ptx: str) -> Iterator[int]:
    """Yield the bytes per thread of each load and store of global memory inside a loop."""
    lines = ptx.splitlines()
    labels = {match[1]: i for i, line in enumerate(lines) if (match := LABEL.match(line))}
    backward = [(i, labels[match[1]]) for i, line in enumerate(lines) if (match := BRANCH.search(line))]
    loops = [range(start, end) for end, start in backward if start < end]
    for i, line in enumerate(lines):
        match = ACCESS.search(line)
        if match and any(i in loop for loop in loops):
            yield int(match[1] or 1) * int(match[2]) // 8


def least(launch: Launch) -> int:
    """Return the minimum bytes per logit of a launch, for logits, bias and costs."""
    arguments = launch.arguments
    if "WRITES" in arguments:
        return least_against(arguments)
    passes = 2 if "target" in arguments else 1  # the gradient is also written
    bias = arguments["bias"].element_size() if arguments["HAS_BIAS"] else 0
    costs = arguments["costs"].element_size() if arguments["HAS_COST"] else 0
    return arguments["logits"].element_size() * passes + bias + costs


def least_against(arguments: dict[str, Any]) -> int:
    """Return the minimum with a teacher: three passes (two if it is stored) and the gradient."""
    student = arguments["logits"].element_size()
    gradient = student * (1 + arguments["ADDS"])
    bias = arguments["bias"].element_size() if arguments["HAS_BIAS"] else 0
    if "ENTRIES" in arguments:
        return 2 * (student + bias) + gradient
    teacher = arguments["teacher"].element_size()
    teacher += arguments["teacher_bias"].element_size() if arguments["TEACHER_BIAS"] else 0
    transport = arguments["transport"].element_size() if arguments["HAS_TRANSPORT"] else 0
    return 3 * (student + bias + teacher) + 2 * transport + gradient


def measure(report: common.Report, quick: bool) -> None:
    """Report a row for every kernel, and compare the worst figures with their targets."""
    codes: dict[str, Code] = {}
    worst = {capability: [0.0, 0.0, 0.0] for capability in CAPABILITIES}
    flavours = FLAVOURS | AGAINST
    cases = itertools.product(
        (50257,) if quick else VOCABULARIES,
        (torch.bfloat16,) if quick else (torch.bfloat16, torch.float32),
        ({name: flavours[name] for name in QUICK} if quick else flavours).items(),
    )
    for V, dtype, (name, flavour) in cases:
        listed = launches(V, dtype, flavour)
        for capability in CAPABILITIES:
            moved = 0.0
            for launch in listed:
                key = f"{launch.kernel.__name__} {signature(launch)} {launch.warps} {capability}"
                code = codes[key] if key in codes else codes.setdefault(key, compiled(launch, capability))
                issued = code.bytes * launch.arguments["width"] / V
                cells = {"V": V, "logits": TYPES[dtype], "flavour": name, "gpu": f"sm_{capability}"}
                cells |= {"kernel": launch.kernel.__name__.removesuffix("_kernel"), **code._asdict()}
                report.row(**cells | {"bytes": issued, "least": least(launch)})
                moved += issued
                worst[capability][1:] = map(max, worst[capability][1:], (code.spilled, code.narrow))
            worst[capability][0] = max(worst[capability][0], moved / sum(map(least, listed)))
    for capability, (moved, spilled, narrow) in worst.items():
        report.ratio(f"sm_{capability}: bytes / least, at worst", moved, at_most=1.15)
        report.ratio(f"sm_{capability}: bytes spilled, at worst", spilled, at_most=0)
        report.ratio(f"sm_{capability}: loads and stores below 8 bytes, at worst", narrow, at_most=0)


def chunk_notes(report: common.Report) -> None:
    """Note the costs of chunk sizes on an H100, if products hide no traffic."""
    for N, V, H in ((8192, 32000, 4096), (8192, 152064, 4096)):
        products = 3 * 2 * N * V * H / PRODUCTS
        for megabytes in (64, 128, 256, 512, 1024):
            tokens = min(N, megabytes * 2**20 // (2 * V))
            chunks = -(-N // tokens)
            traffic = chunks * (8 + 4) * V * H / BANDWIDTH  # reads and writes the sum, reads the head twice
            chosen = " (the default)" if megabytes == CHUNK_MB else ""
            report.note(
                f"N={N} V={V} H={H}, chunks of {megabytes} MB{chosen}: {chunks} of {tokens} tokens; head and "
                f"its sum cross memory in {traffic * 1e3:.1f} ms, products take {products * 1e3:.1f} ms"
            )


def main(arguments: list[str] | None = None) -> int:
    """Print the report, and return 1 if a target is missed."""
    args = common.parser(__doc__).parse_args(arguments)
    report = common.Report("kernels_static")
    measure(report, args.quick)
    chunk_notes(report)
    return report.finish(quick=args.quick, triton=triton.__version__)


if __name__ == "__main__":
    sys.exit(main())
