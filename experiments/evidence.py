"""Does it help, and why? Every part of the evidence, one report, one answer to each question.

    python -m emo.experiments.evidence experiments/configs/evidence.yaml [key=value ...] [--jobs N]

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
from typing import Any, Literal

from pydantic import Field, model_validator

from emo.common.config.recipe import Section, load_section
from emo.common.errors import ExitCode, UserError, exit_code_of, nearest
from emo.common.provenance import code_version
from emo.pipeline.control.stop import die_with_parent

from .known_truth.study import Study
from .sweeps import report
from .sweeps.design import RESULTS, Experiment, fill_variables, read_experiment, split_command
from .sweeps.workers import command_environment

REPORT = "report.html"


class Otherwise(Section):
    """A part's replacement where the files that it needs are not there."""

    note: str  # for the report
    before: list[str] = []  # commands, in order
    file: Path  # instead of the part's


class EvidencePart(Section):
    """One study or sweep."""

    title: str
    about: str  # for the report: what it is, what is measured
    kind: Literal["study", "sweep"]
    file: Path
    needs: list[str] = []  # paths; `{name}` stands for one of `names`
    otherwise: Otherwise | None = None  # None: it is left out
    names: dict[str, str] = {}  # of the part's file


class EvidenceAnswer(Section):
    """A question, the part that answers it, and others that the report quotes."""

    text: str
    by: str  # part
    question: str  # of that part's file
    also: list[str] = []  # parts that have the same question


class Evidence(Section):
    """The whole file."""

    out: Path
    names: dict[str, str] = {}
    cut: list[str] = []  # what was made smaller or left out so that it fits its time
    parts: dict[str, EvidencePart] = Field(min_length=1)
    answers: dict[str, EvidenceAnswer] = Field(min_length=1)

    @model_validator(mode="after")
    def _parts_exist(self) -> Evidence:
        for part in (part for answer in self.answers.values() for part in (answer.by, *answer.also)):
            if part not in self.parts:
                raise ValueError(f"{part} is not one of the parts; {nearest(part, self.parts)}")
        return self


def gather_parts(evidence: Evidence, jobs: int) -> dict[str, Any]:
    """Do every part and return their results."""
    left_out = {}  # parts whose files are not there, and what is done about each
    for name, part in evidence.parts.items():
        for path in fill_variables(part.needs, evidence.names, f"parts.{name}.needs"):
            if not Path(path).exists():
                action = part.otherwise.note if part.otherwise else "left out"
                left_out[name] = f"{action}, as {path} does not exist"
    sources: dict[str, EvidencePart | Otherwise] = {}  # what is done for each part, unless it is left out
    for name, part in evidence.parts.items():
        if (source := part.otherwise if name in left_out else part) is not None:
            sources[name] = source
    for key, answer in evidence.answers.items():
        if answer.by not in sources:
            raise UserError(f"{answer.by} decides {answer.text!r} and was left out", code="part-left-out")
        for name in (part for part in (answer.by, *answer.also) if part in sources):
            file = sources[name].file
            questions = read_part_file(evidence.parts[name].kind, file).questions
            if answer.question not in questions:
                problem = f"answers.{key}: {file} has no question {answer.question}"
                raise UserError(f"{problem}; {nearest(answer.question, questions)}", code="unknown-question")
    parts: dict[str, Any] = {}
    began = time.monotonic()
    for name, part in evidence.parts.items():
        print(f"{name}: {left_out.get(name, part.title)}", flush=True)
        if name not in sources:
            continue
        out, source = evidence.out / name, sources[name]
        if isinstance(source, Otherwise):
            names = []
            for text in source.before:
                run_part_command(split_command(text, evidence.names, f"parts.{name}"))
        else:
            filled = fill_variables(source.names, evidence.names, f"parts.{name}.names")
            names = [f"names.{key}={value}" for key, value in filled.items()]
        program = ["emo", "sweep"] if part.kind == "sweep" else ["emo.experiments.known_truth.study"]
        run_part_command(
            ["python", "-m", *program, "--jobs", str(jobs), str(source.file), f"out={out}", *names]
        )
        parts[name] = json.loads((out / RESULTS).read_text(encoding="utf-8"))
    verdicts = {}
    for name, answer in evidence.answers.items():
        also = {part: parts[part]["verdicts"][answer.question] for part in answer.also if part in parts}
        decisive = parts[answer.by]["verdicts"][answer.question]
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


def read_part_file(kind: str, file: Path) -> Study | Experiment:
    """Return the file of a part."""
    return read_experiment(file, []) if kind == "sweep" else load_section(Study, file, [], "experiment")


def run_part_command(command: list[str]) -> None:
    """Run a command of the product, as a user would give it. Raises UserError when it fails."""
    print(f"$ {shlex.join(command)}", flush=True)
    program = sys.executable if command[0] == "python" else command[0]
    process = subprocess.run([program, *command[1:]], env=command_environment(), preexec_fn=die_with_parent)
    if code := process.returncode:
        problem = f"{shlex.join(command)} ended with exit code {code}; cure that and run this again"
        raise UserError(problem, code="part-failed")


def main(argv: list[str] | None = None) -> int:
    """Do everything and write the report. Exit codes: 0 done, 2 a mistake in the input or a failed part."""
    parser = argparse.ArgumentParser(prog="python -m emo.experiments.evidence", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--jobs", type=int, default=2, help="runs beside each other (%(default)s)")
    args = parser.parse_intermixed_args(argv)
    evidence = load_section(Evidence, args.file, args.overrides, "experiment")
    results = gather_parts(evidence, args.jobs)
    titles = {name: (part.title, part.about) for name, part in evidence.parts.items()}
    page = report.evidence_document(results, titles)
    page.write(f"{evidence.out}/", (REPORT, RESULTS))
    print(*page.answer, sep="\n")
    print(f"{evidence.out / REPORT}; numbers: {evidence.out / RESULTS}")
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
