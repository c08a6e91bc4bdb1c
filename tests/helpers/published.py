"""Published speeds of training runs. Some calibrate the constants of `plan`, and others test them.

Speeds are tokens per second and GPU of full-parameter training in bf16 with AdamW. All ranks shard weights,
gradients and optimizer (FSDP, which is ZeRO-3), or in ZERO1 only the optimizer. Each run has a mark:

    calibrates   The five constants of pipeline/planning/footprint.py were fitted to these runs of MPT-3B and
                 MPT-30B with 1,024 to 8,192 tokens on up to 64 GPUs.
    held_out     These runs of MPT, InternLM and LLaMA on up to 128 GPUs test the constants.
    outside      The prediction does not cover these runs. Their memory is nearly full and the allocator
                 stalls (30B at 8,192 tokens, A100-40G), hundreds of GPUs share a network, or the ranks of a
                 node hold a complete replica (HSDP).

MPT is from mosaicml/llm-foundry, scripts/train/benchmarking/README.md at 8c8dd48. LLaMA is from
pytorch/torchtitan, docs/performance.md at 0413364 (64 A100), foundation-model-stack/fms-fsdp, README.md at
0d31998 (128 A100 with 6 or 8 rows, HSDP), pytorch/pytorch.github.io,
_posts/2024-03-13-maximizing-training.md at 2ad1005 (128 A100 and 96 H100 with 2 rows), and
KempnerInstitute/KempnerForge, docs/reference/benchmarks.md and benchmarks/mfu_scaling at 9f3f03a (H200).
InternLM is from InternLM/InternLM, doc/en/train_performance.md at 20fe5ac (tp=1, zero1=-1). Networks are
those of the sources, or assumed (MPT on H100, torchtitan). Gradients are bf16 if the source gives no type.
"""

from __future__ import annotations

from typing import NamedTuple

from emo.pipeline.engine.device.hardware import ACCELERATORS, Accelerator
from emo.pipeline.planning import footprint
from emo.pipeline.planning.footprint import Setup, Sizes

LLAMA_7B = Sizes(6_738_415_616, 6_738_415_616, 6_476_271_616, 32, 4096, 11008, 4096, True, 32000, 291)
MPT = {"1B": (2048, 24), "3B": (2560, 32), "7B": (4096, 32)}  # hidden, layers
MPT |= {"13B": (5120, 40), "30B": (7168, 48), "70B": (8192, 80)}
LLAMA = {  # hidden, layers, inner, width of keys, vocabulary
    "LLaMA2-7B": (4096, 32, 11008, 4096, 32000),
    "LLaMA3-8B": (4096, 32, 14336, 1024, 128256),
    "LLaMA2-13B": (5120, 40, 13824, 5120, 32000),
    "LLaMA-34B": (8192, 48, 22016, 1024, 32000),
    "LLaMA2-70B": (8192, 80, 28672, 1024, 32000),
    "LLaMA3-70B": (8192, 80, 28672, 1024, 128256),
    "InternLM-7B": (4096, 32, 11008, 4096, 103168),
}

MARKS = ("calibrates", "held_out", "outside")
# MPT: mark, model, tokens per row, GPUs, rows per pass, passes per step, checkpointing, and tokens/s/GPU on
# H100-80G (400 GB/s between nodes) and on A100-80G (200 GB/s)
MPT_TABLE = """
    calibrates  30B  4096    8   1  21  yes   1802    814
    calibrates  30B  2048   32  14   3  yes   2308      -
    calibrates  30B  2048   16  10   3  yes   2263      -
    calibrates  30B  2048    8   3  21  yes   2002    916
    calibrates  30B  1024    8   6  21  yes   2084    946
    calibrates   3B  8192    8   3   6   no  16578   7695
    calibrates   3B  4096    8   5   6   no  20964   9457
    calibrates   3B  2048   64   6   3   no  22525      -
    calibrates   3B  2048   32   6   3   no  23021      -
    calibrates   3B  2048   16  10   3   no  24142      -
    calibrates   3B  1024    8  20   6   no  27046  11580
    calibrates   3B  2048    8  10   2   no      -  10811
    held_out    70B  2048  128   8   1  yes   1058      -
    held_out    30B  2048  128   8   1  yes   2199      -
    held_out    13B  2048  128  16   1  yes   5080      -
    held_out     7B  2048  128   6   1   no  10475      -
    held_out    70B  2048   64   8   4  yes   1039    410
    held_out    70B  2048   32   2  16  yes    882    373
    held_out    13B  4096    8  10   3  yes   4717   2060
    held_out    13B  2048   64   2   1   no   4800      -
    held_out    13B  2048   32   2   1   no   4811      -
    held_out    13B  2048   16   2   1   no   4767      -
    held_out    13B  2048    8   2   1   no   4792      -
    held_out    13B  1024    8  40   3  yes   5502   2330
    held_out     7B  8192    8   8   2  yes   6935   3206
    held_out     7B  4096    8  16   2  yes   8611   3684
    held_out     7B  2048    8   6   1   no  10643      -
    held_out     7B  1024    8  64   2  yes  10203   4357
    held_out     1B  8192    8   3   4   no  29157  13814
    held_out     1B  4096    8   7   4   no  38535  17807
    held_out     1B  2048   64  20   1   no  44402      -
    held_out     1B  2048   32  20   1   no  45130      -
    held_out     1B  2048   16  20   1   no  46037      -
    held_out     1B  2048    8  14   1   no  45455      -
    held_out     1B  1024    8  18   4   no  48910  22112
    held_out    13B  8192    8   5   3  yes      -   1795
    held_out    13B  2048    8   2   3   no      -   2262
    held_out     7B  2048    8   6   2   no      -   4641
    held_out     1B  2048    8  14   4   no      -  20513
    outside     70B  2048  512   8   1  yes   1007      -
    outside      7B  2048  512   6   1   no   9670      -
    outside     30B  8192    8   1  21  yes   1384    574
"""
# Others: mark, model, tokens per row, GPUs, kind, rows per pass, passes per step, checkpointing, compiled,
# GB/s between nodes, bytes of a gradient when it is reduced, tokens/s/GPU
TABLE = """
    held_out LLaMA2-13B 4096  64 A100-80G   2  1   no   no  200  4   2162
    held_out LLaMA2-70B 4096  64 A100-80G   2  1  yes   no  200  4    353
    held_out LLaMA3-70B 8192  64 A100-80G   1  1  yes   no  200  4    331
    held_out  LLaMA-34B 4096 128 A100-80G   8  1  yes   no   50  2    772
    held_out LLaMA2-70B 4096 128 A100-80G   6  1  yes   no   50  2    380
    held_out  LLaMA2-7B 4096 128 A100-80G   2  1   no   no   50  2   3700
    held_out  LLaMA2-7B 4096  96 H100-80G   2  1   no   no  100  2   7500
    held_out  LLaMA-34B 4096 128 A100-80G   2  1  yes   no   50  2    700
    held_out  LLaMA-34B 4096  96 H100-80G   2  1  yes   no  100  2   1550
    held_out LLaMA2-70B 4096 128 A100-80G   2  1  yes   no   50  2    370
    held_out LLaMA2-70B 4096  96 H100-80G   2  1  yes   no  100  2    800
    held_out  LLaMA3-8B 4096   1 H200-141G  2  4  yes  yes  400  2  10471
    held_out  LLaMA3-8B 4096   2 H200-141G  2  4  yes  yes  400  2   9364
    held_out  LLaMA3-8B 4096   4 H200-141G  4  2  yes  yes  400  2   9746
    outside         70B 2048 128 A100-40G   4  1  yes   no  200  2    376
    outside         70B 2048  64 A100-40G   2  1  yes   no  200  2    276
    outside         13B 2048   8 A100-40G   4 16  yes   no  200  2   1668
    outside          7B 2048  32 A100-40G  18  1  yes   no  200  2   3725
    outside          7B 2048   8 A100-40G  12  4  yes   no  200  2   3679
    outside   LLaMA2-7B 4096 128 A100-80G   2  1   no   no   50  2   3760
    outside  LLaMA2-13B 4096 128 A100-80G   1  1   no   no   50  2   1700
"""
# The same columns for InternLM's ZeRO-1. Norms and rotary embeddings are single kernels, as if compiled. It
# reduces gradients during the last pass. DeepSpeed reduces them after it.
ZERO1 = """
    held_out InternLM-7B 2048    8 A100-80G   2  4   no  yes   50  2   4062
    held_out InternLM-7B 2048   16 A100-80G   2  4   no  yes   50  2   3842
    held_out InternLM-7B 2048   32 A100-80G   2  4   no  yes   50  2   3752
    held_out InternLM-7B 2048   64 A100-80G   2  4   no  yes   50  2   3690
    held_out InternLM-7B 2048  128 A100-80G   2  4   no  yes   50  2   3571
    outside  InternLM-7B 2048  256 A100-80G   2  4   no  yes   50  2   3209
    outside  InternLM-7B 2048  512 A100-80G   2  4   no  yes   50  2   2861
    outside  InternLM-7B 2048 1024 A100-80G   2  4   no  yes   50  2   2271
"""

# Peak memory of LLaMA-7B under DeepSpeed 0.14.2, 8 A800, rows of 4,096 tokens (gist d4cd6a20 of chenyaofo):
# stage, checkpointing, rows per pass, passes, GiB. These runs hold complete logits, but no costs and no
# separate gradient of the head. Their speeds, 0.63 to 0.76 of the prediction for A100, are not used, because
# the source names neither attention nor links.
MEMORY = [
    (2, False, 1, 8, 44.8),
    (2, True, 1, 8, 23.5),
    (2, True, 4, 2, 38.6),
    (3, False, 2, 4, 75.7),
    (3, True, 2, 4, 20.4),
    (3, True, 8, 1, 39.1),
]

# The longest rows of LLaMA-3.1-8B that fit into each GPU in Arctic Long Sequence Training: GPU, GPUs, tokens
# per row, ranks per row, checkpoints in host memory, tiled MLPs, and weights in host memory. All use ZeRO-3
# with the optimizer in host memory, checkpointing, and Liger's kernels, also for a loss without complete
# logits. From snowflakedb/ArcticTraining, projects/sequence-parallelism at b28638e. Its larger models are
# left out, because host memory limits them.
LONGEST_ROWS = """
    H100-80G   1    500000   1  yes  yes  yes
    H100-80G   8    160000   1   no   no   no
    H100-80G   8   1100000   8   no   no   no
    H100-80G   8   1200000   8   no  yes   no
    H100-80G   8   2400000   8  yes   no   no
    H100-80G   8   3800000   8  yes  yes   no
    H100-80G  16   8000000  16  yes  yes   no
    H100-80G  32  15500000  32  yes  yes   no
    H200-141G  1    300000   1   no   no  yes
    H200-141G  1    650000   1  yes   no  yes
    H200-141G  1   1200000   1  yes  yes  yes
"""


class Run(NamedTuple):
    mark: str
    name: str
    kind: str
    sizes: Sizes
    setup: Setup
    network: float  # GB/s of a node
    speed: float  # tokens/s/GPU

    def ratio(self) -> float:
        return predicted(self.sizes, self.setup, ACCELERATORS[self.kind], self.network) / self.speed


def predicted(sizes: Sizes, setup: Setup, gpu: Accelerator, network: float) -> float:
    seconds = footprint.step_time(sizes, setup, gpu, network).total
    return setup.tokens * setup.accumulation / seconds


def sizes_of(model: str, block: int) -> Sizes:
    """Return the sizes of a published model. MPT ties its head to its embedding and learns positions."""
    if model in MPT:
        hidden, layers = MPT[model]
        body, vocabulary = 12 * layers * hidden**2, 50368
        total = body + (vocabulary + block) * hidden
        widths = (hidden, 4 * hidden, hidden)
        return Sizes(total, total, body, layers, *widths, False, vocabulary, 6 * layers + 2)
    hidden, layers, inner, keys, vocabulary = LLAMA[model]
    body = layers * (2 * hidden**2 + 2 * hidden * keys + 3 * hidden * inner)
    total = body + 2 * vocabulary * hidden
    return Sizes(total, total, body, layers, hidden, inner, keys, True, vocabulary, 9 * layers + 3)


def rows() -> list[list[str]]:
    """Return the rows of both ZeRO-3 tables with the columns of TABLE."""
    lines = [line.split() for line in TABLE.strip().splitlines()]
    for *before, micro, passes, checkpointing, h100, a100 in map(str.split, MPT_TABLE.strip().splitlines()):
        columns = [micro, passes, checkpointing, "no"]
        lines += [[*before, "H100-80G", *columns, "400", "4", h100]] if h100 != "-" else []
        lines += [[*before, "A100-80G", *columns, "200", "4", a100]] if a100 != "-" else []
    return lines


def runs() -> list[Run]:
    results = []
    lines = [(3, row) for row in rows()] + [(1, line.split()) for line in ZERO1.strip().splitlines()]
    for stage, (mark, model, block, gpus, kind, micro, passes, *switches, network, reduced, speed) in lines:
        checkpointing, compiled = (word == "yes" for word in switches)
        flags = {"checkpointing": checkpointing, "compiled": compiled, "cost": False}
        setup = Setup(int(gpus), stage, int(micro), int(block), int(passes), reduced=int(reduced), **flags)
        name, sizes = f"{model} {block} {gpus}x{kind} {micro} ZeRO-{stage}", sizes_of(model, int(block))
        results.append(Run(mark, name, kind, sizes, setup, float(network), float(speed)))
    return results


def longest_rows() -> list[tuple[str, Setup]]:
    """Return the kind of GPU and the settings of each row of LONGEST_ROWS."""
    results = []
    for kind, gpus, block, sequence, *switches in map(str.split, LONGEST_ROWS.strip().splitlines()):
        offloaded, tiled, parameters = (word == "yes" for word in switches)
        flags = {"checkpointing": True, "offload_optimizer": True, "kernels": True, "cost": False}
        flags |= {"offload_activations": offloaded, "tiled": tiled, "offload_parameters": parameters}
        setup = Setup(int(gpus), 3, 1, int(block), sequence=int(sequence), bucket=5e8, **flags)
        results.append((kind, setup))
    return results
