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
from common.outcome import outcome
from common.provenance import code_version
from common.recipe import load_section
from experiments import READERS, report
from experiments.design import RESULTS, fill, interpreted, words
from experiments.parts import Answer, Evidence, Part
from pipeline.stop import die_with_parent

REPORT = "report.html"
COMMANDS = {"study": "experiments.known_truth.study", "sweep": "experiments"}


def gather(evidence: Evidence, jobs: int) -> dict[str, Any]:
    """Do every part and return their results."""
    left_out = _lacking(evidence)
    for answer in evidence.answers.values():
        if answer.by in left_out and evidence.parts[answer.by].otherwise is None:
            raise UserError(f"{answer.by} decides {answer.text!r} and was left out")
    parts: dict[str, Any] = {}
    began = time.monotonic()
    for name, part in evidence.parts.items():
        print(f"{name}: {left_out.get(name, part.title)}", flush=True)
        if name not in left_out or part.otherwise is not None:
            parts[name] = _do(evidence, name, part, name in left_out, jobs)
    return {
        "code": code_version(),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "verdicts": {name: _verdict(answer, parts) for name, answer in evidence.answers.items()},
        "rows": [row | {"part": name} for name, results in parts.items() for row in results["rows"]],
        "parts": parts,
        "left_out": left_out,
        "cut": evidence.cut,
    }


def _lacking(evidence: Evidence) -> dict[str, str]:
    """Return the parts whose files are not there, and what is done about each."""
    lacking = {}
    for name, part in evidence.parts.items():
        needed = [fill(path, evidence.names, f"parts.{name}.needs") for path in part.needs]
        missing = next((path for path in needed if not Path(path).exists()), None)
        if missing is not None:
            instead = "left out" if part.otherwise is None else part.otherwise.note
            lacking[name] = f"{instead}, as {missing} does not exist"
    return lacking


def _do(evidence: Evidence, name: str, part: Part, lacking: bool, jobs: int) -> dict[str, Any]:
    """Run a part's commands and return its results."""
    instead = part.otherwise if lacking else None
    where = f"parts.{name}"
    for text in instead.before if instead else []:
        _run(words(text, evidence.names, where))
    out = evidence.out / name
    command = ["python", "-m", COMMANDS[part.kind]]
    if part.kind == "sweep":
        command += ["run", "--jobs", str(jobs)]
    names = {} if instead else {key: fill(value, evidence.names, where) for key, value in part.names.items()}
    file = instead.file if instead else part.file
    _run([*command, str(file), f"out={out}", *(f"names.{key}={value}" for key, value in names.items())])
    return json.loads((out / RESULTS).read_text(encoding="utf-8"))


def _run(command: list[str]) -> None:
    """One command of the product, as a user would give it. Raises UserError when it fails."""
    print(f"$ {shlex.join(command)}", flush=True)
    code = subprocess.run(interpreted(command), preexec_fn=die_with_parent).returncode
    if code:
        raise UserError(f"{shlex.join(command)} ended with exit code {code}; cure that and run this again")


def _verdict(answer: Answer, parts: dict[str, Any]) -> dict[str, Any]:
    """Return the answer by the part that decides, and those of the others."""
    decided = parts[answer.by]["verdicts"][answer.question]
    also = {name: parts[name]["verdicts"][answer.question] for name in answer.also if name in parts}
    return decided | {"question": answer.text, "by": answer.by, "also": also}


def main(argv: list[str] | None = None) -> int:
    """Do everything and write the report. Exit codes: 0 done, 2 a mistake in the input or a failed part."""
    parser = argparse.ArgumentParser(prog="python -m experiments.evidence", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--jobs", type=int, default=2, help="runs beside each other (%(default)s)")
    args = parser.parse_intermixed_args(argv)
    return outcome(
        lambda: _main(load_section(Evidence, args.file, args.overrides, "experiment", READERS), args.jobs)
    )


def _main(evidence: Evidence, jobs: int) -> int:
    results = gather(evidence, jobs)
    page = report.evidence(results, {name: (part.title, part.about) for name, part in evidence.parts.items()})
    page.write(f"{evidence.out}/", (REPORT, RESULTS))
    for text in page.answer:
        print(text)
    print(f"{evidence.out / REPORT}; numbers: {evidence.out / RESULTS}")
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
