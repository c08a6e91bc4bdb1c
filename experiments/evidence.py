"""Does it help, and why? Every part of the evidence, one report, one answer to each question.

    python -m experiments.evidence experiments/evidence.yaml [key=value ...] [--jobs N]

A part is a study or a sweep with an experiment file of its own. A part whose files are not there is done with
what `otherwise` names, or left out, and the report says which. Run again it repeats nothing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.exit_codes import ExitCode
from common.files import write_text
from common.outcome import outcome
from common.provenance import code_version
from common.recipe import load_section
from experiments import READERS
from experiments.design import RESULTS, executable, fill, split_command
from experiments.parts import Evidence
from experiments.report import effect, html
from pipeline.stop import die_with_parent

REPORT = "report.html"
COMMANDS = {"study": "experiments.known_truth.study", "sweep": "experiments"}


def gather(evidence: Evidence, jobs: int) -> dict[str, Any]:
    """Do every part and return their results."""
    left_out = {}  # parts whose files are not there, and what is done about each
    for name, part in evidence.parts.items():
        needs = [fill(path, evidence.names, f"parts.{name}.needs") for path in part.needs]
        missing = next((path for path in needs if not Path(path).exists()), None)
        if missing is not None:
            action = "left out" if part.otherwise is None else part.otherwise.note
            left_out[name] = f"{action}, as {missing} does not exist"
    for answer in evidence.answers.values():
        if answer.by in left_out and evidence.parts[answer.by].otherwise is None:
            raise UserError(f"{answer.by} decides {answer.text!r} and was left out", code="part-left-out")
    parts: dict[str, Any] = {}
    began = time.monotonic()
    for name, part in evidence.parts.items():
        print(f"{name}: {left_out.get(name, part.title)}", flush=True)
        if name not in left_out or part.otherwise is not None:
            parts[name] = _run_part(evidence, name, name in left_out, jobs)
    verdicts = {}
    for name, answer in evidence.answers.items():
        decisive = parts[answer.by]["verdicts"][answer.question]
        also = {part: parts[part]["verdicts"][answer.question] for part in answer.also if part in parts}
        verdicts[name] = decisive | {"question": answer.text, "by": answer.by, "also": also}
    return {
        "code": code_version(),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "verdicts": verdicts,
        "rows": [row | {"part": name} for name, results in parts.items() for row in results["rows"]],
        "parts": parts,
        "left_out": left_out,
        "cut": evidence.cut,
    }


def _run_part(evidence: Evidence, name: str, lacking: bool, jobs: int) -> dict[str, Any]:
    """Run a part's commands, where its files are lacking those of `otherwise`, and return its results."""
    part, out, key = evidence.parts[name], evidence.out / name, f"parts.{name}"
    file, names = part.file, [f"names.{k}={fill(v, evidence.names, key)}" for k, v in part.names.items()]
    if lacking and part.otherwise is not None:
        for text in part.otherwise.before:
            run_command(split_command(text, evidence.names, key))
        file, names = part.otherwise.file, []
    command = ["python", "-m", COMMANDS[part.kind]]
    if part.kind == "sweep":
        command += ["run", "--jobs", str(jobs)]
    run_command([*command, str(file), f"out={out}", *names])
    return json.loads((out / RESULTS).read_text(encoding="utf-8"))


def run_command(command: list[str]) -> None:
    """Run a command of the product, as a user would give it. Raises UserError when it fails."""
    print(f"$ {shlex.join(command)}", flush=True)
    code = subprocess.run(executable(command), preexec_fn=die_with_parent).returncode
    if code:
        raise UserError(
            f"{shlex.join(command)} ended with exit code {code}; cure that and run this again",
            code="part-failed",
        )


def main(argv: list[str] | None = None) -> int:
    """Do everything and write the report. Exit codes: 0 done, 2 a mistake in the input or a failed part."""
    parser = argparse.ArgumentParser(prog="python -m experiments.evidence", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--jobs", type=int, default=2, help="runs beside each other (%(default)s)")
    args = parser.parse_intermixed_args(argv)

    def work() -> int:
        evidence = load_section(Evidence, args.file, args.overrides, "experiment", READERS)
        results = gather(evidence, args.jobs)
        evidence.out.mkdir(parents=True, exist_ok=True)
        write_text(evidence.out / RESULTS, json.dumps(results, indent=1))
        write_text(evidence.out / REPORT, html(evidence, results))
        for verdict in results["verdicts"].values():
            _, better, interval, pairs = effect(verdict)
            print(f"{verdict['question']} {verdict['answer']} ({better} {interval}, n {pairs})")
        print(f"{evidence.out / REPORT}; numbers: {evidence.out / RESULTS}")
        return ExitCode.DONE

    return outcome(work)


if __name__ == "__main__":
    sys.exit(main())
