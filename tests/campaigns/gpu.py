"""What a GPU has to show, in under 25 minutes on one: correctness, speed and memory beside their targets.

    python -m tests.campaigns.gpu [--parts 1 2 3] [--output_path DIR] [--quick]

1 kernels     Triton kernels beside PyTorch's and float64
2 speed       the fused loss beside its peers and beside bare matrix products; a whole step
3 waits       what makes the host wait for the device in a micro-batch; traces
4 compiler    AdamW on a host with a CUDA compiler and on one without
5 plan        a model of 1.1 billion parameters: step time and peak memory beside what `plan` predicts
6 attention   packed rows give what single documents give; memory at 4,096 tokens
7 stops       SIGTERM, resume, the stall of a save, the export
8 lora        adapters: dtype, step time and memory
9 compiled    `model.compile` under ZeRO-1

Needs no network, no pytest and no installation of the project: what the trainer imports is enough, and what
else is missing is left out with a line. Every part runs in a process of its own that is killed when its time
is over. Figures go to DIR/results.json as they come (runs/gpu unless set), traces and the end of the
output beside it: a few MB. Weights, data and runs are in runs/gpu/work whatever DIR is. Parts that are run
again replace their figures, so that several commands can share the work. Exits 1 when a target is missed or a
part failed.
`--quick` tries all of it in small on a CPU, where no target holds.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench import common
from tests.campaigns.gpu_setting import GPU, Figures, begin, kill_family, last_words, print_from, read, table


class Part(NamedTuple):
    """A part of the campaign, and the seconds that it may take."""

    name: str
    seconds: int
    module: str
    needs_gpu: bool = False


PARTS = {
    1: Part("kernels", 180, "gpu_loss"),
    2: Part("speed", 300, "gpu_loss"),
    3: Part("waits", 135, "gpu_runs"),
    4: Part("compiler", 150, "gpu_runs", needs_gpu=True),
    5: Part("plan", 240, "gpu_runs"),
    6: Part("attention", 120, "gpu_attention"),
    7: Part("stops", 180, "gpu_runs"),
    8: Part("lora", 75, "gpu_runs"),
    9: Part("compiled", 110, "gpu_runs", needs_gpu=True),
}
POLL = 0.2  # seconds between looks at the figures of a part
LOG_BYTES = 128 * 1024  # of a part's output that are kept, its end
RUNS = common.REPO / "runs"


def run_part(number: int, work: Path, out: Path, quick: bool) -> None:
    """Run a part in a process of its own, for as long as it may take; print its figures as they come."""
    part, log = PARTS[number], out / f"{PARTS[number].name}.log"
    printed, end = len(read(out)["records"]), time.monotonic() + part.seconds
    command = [sys.executable, "-m", "tests.campaigns.gpu", "--output_path", str(out)]
    command += ["--part", str(number), str(end), str(work), *(["--quick"] if quick else [])]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PIP_NO_INDEX"] = "1"  # peers that are not installed are left out, not looked for
    if not GPU:
        environment["TRITON_INTERPRET"] = "1"  # Triton looks when it is first imported
        environment["TORCHDYNAMO_DISABLE"] = "1"  # a peer would be compiled for longer than all else takes
    options: dict[str, Any] = {"cwd": common.REPO, "env": environment, "stderr": subprocess.STDOUT}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, start_new_session=True, **options)
        try:
            while process.poll() is None and time.monotonic() < end:
                time.sleep(POLL)
                printed = print_from(out, printed)
        finally:
            late = process.poll() is None
            kill_family(process)
    show, content = Figures(out, part.name), log.read_bytes()
    show("the whole part, time", time.monotonic() - end + part.seconds, "s", note=f"at most {part.seconds}")
    if late:
        show.failed("the whole part", f"killed after {part.seconds} s; see {log}")
    elif process.returncode:
        words = last_words(content.decode(errors="replace"))
        show.failed("the whole part", f"exit code {process.returncode}: {words}; see {log}")
    print_from(out, printed)
    if len(content) > LOG_BYTES:
        log.write_bytes(b"... cut: the end of %d bytes\n" % len(content) + content[-LOG_BYTES:])


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign; return 0 when all targets are met, 1 when one is missed, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", type=int, default=list(PARTS), choices=list(PARTS))
    parser.add_argument(
        "--output_path", type=Path, metavar="DIR", help="default: runs/gpu, or runs/gpu-quick"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, on a CPU too: does it run at all")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)  # the child's: number, end, work
    given = parser.parse_args(arguments)
    usual = RUNS / ("gpu-quick" if given.quick else "gpu")
    out: Path = (given.output_path or usual).resolve()
    if given.part is not None:
        number, until, work = given.part
        part = PARTS[int(number)]
        show = Figures(out, part.name, given.quick, float(until), Path(work))
        with show.attempt("the whole part"):
            getattr(importlib.import_module(f"tests.campaigns.{part.module}"), part.name)(show)
        return 0
    if not GPU and not given.quick:
        print("error: torch sees no GPU here; --quick tries the campaign on a CPU", file=sys.stderr)
        return 2
    names = [PARTS[number].name for number in given.parts]
    begin(out, names, machine=common.machine(), quick=given.quick)
    for number in given.parts:
        if PARTS[number].needs_gpu and not GPU:
            printed = len(read(out)["records"])
            Figures(out, PARTS[number].name).skip("all of it", "needs a GPU")
            print_from(out, printed)
        else:
            run_part(number, usual / "work", out, given.quick)
    return table(out)


if __name__ == "__main__":
    sys.exit(main())
