"""The whole story on a laptop, by the commands that a cluster runs: raw text to report in minutes.

Every step below is a command of the product, printed before it runs; nothing here trains or scores by itself.
Run it again to resume where it stopped; `rm -rf runs/quickstart` starts afresh.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.exit_codes import ExitCode
from common.provenance import REPOSITORY as SHIPPED
from common.provenance import shipped

REPOSITORY = SHIPPED if (SHIPPED / "Makefile").exists() else Path.cwd()  # a wheel is no place for runs
RUN = Path("runs/quickstart")
RECIPES = Path("launch/recipes")
BIN = Path(sys.executable).parent
RANKS = 2
NOTICE = (
    "Toy tasks. The corpora and the eight tasks come from a small generated world, and the models have a few "
    "million parameters. The numbers show that every part works; they say nothing about LLaMA or real tasks."
)


def steps() -> list[tuple[str, list[list[str]]]]:
    """Title and commands of every step, in order; the commands of a step run side by side."""
    python = str(BIN / "python")
    train = [str(shipped(Path("launch/continual.sh"))), "--num_gpus", str(RANKS), "--"]
    pretrain, adapt = RECIPES / "quickstart-pretrain.yaml", RECIPES / "quickstart-continue.yaml"
    models = {"base": RUN / "pretrain/export"} | {o: RUN / o / "export" for o in ("mle", "emo")}
    results = ["--out", str(RUN / "results")]
    evaluate, generate = [], []
    for name, path in models.items():
        model = ["--model", str(path), "--name", name, *results]
        evaluate.append([python, "-m", "eval", "run", *model, "--tasks", "all", "--data", str(RUN / "tasks")])
        generate.append([python, "-m", "eval", "generate", *model, "--samples", "8"])
    runs = {"base": "pretrain", "mle": "mle", "emo": "emo"}
    report = [python, "-m", "eval", "report", str(RUN / "results"), "--out", str(RUN), "--notice", NOTICE]
    report += [f"--run={name}={RUN / run}" for name, run in runs.items()]
    continued = {o: [f"objective.name={o}", f"run_dir={RUN / o}"] for o in ("mle", "emo")}
    return [
        ("Generate the eight tasks", [[python, "-m", "data_prep", "world", str(RUN / "tasks")]]),
        ("Tokenise the pre-training corpus", [[python, "-m", "data_prep", "prepare", str(pretrain)]]),
        ("Tokenise the adaptation corpus", [[python, "-m", "data_prep", "prepare", str(adapt)]]),
        ("Pre-train a small LLaMA with MLE (ZeRO-3, 2 ranks)", [[*train, str(pretrain)]]),
        ("Continue it with MLE (ZeRO-3, 2 ranks)", [[*train, str(adapt), *continued["mle"]]]),
        ("Continue it with EMO (ZeRO-3, 2 ranks)", [[*train, str(adapt), *continued["emo"]]]),
        ("Score the pre-trained model on the eight tasks", evaluate[:1]),
        ("Score both continued models on the eight tasks", evaluate[1:]),
        ("Sample text from all three", generate),
        ("Write the report", [report]),
    ]


def main() -> int:
    """Run all steps; stop at the first that fails, with its exit code."""
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    plan = steps()
    began = time.perf_counter()
    for number, (title, commands) in enumerate(plan, start=1):
        elapsed = time.perf_counter() - began
        print(f"\n[{number}/{len(plan)}] {title}  ({elapsed:.0f} s so far)", flush=True)
        for command in commands:
            print(f"$ {shlex.join(command).replace(str(BIN) + '/', '')}", flush=True)
        running = [subprocess.Popen(command, cwd=REPOSITORY, env=environment) for command in commands]
        try:
            failed = [code for code in (process.wait() for process in running) if code]
        except KeyboardInterrupt:  # Ctrl-C has reached the commands too
            for process in running:
                process.wait()
            print("\nstopped; run the same command again to resume", file=sys.stderr)
            return ExitCode.STOPPED
        if failed:
            print(f"error: step {number} ended with exit code {failed[0]}", file=sys.stderr)
            return failed[0]
    print(f"\nDone in {time.perf_counter() - began:.0f} s.")
    print(f"Report:  {REPOSITORY / RUN / 'report.html'}  (open it in a browser)")
    print(f"Numbers: {REPOSITORY / RUN / 'results.json'}")
    print(
        "Next:    deepspeed launch/continual.sh launch/recipes/llama-7b-wikitext103.yaml --dry-run --ranks 4"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
