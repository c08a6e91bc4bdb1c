"""The evidence on EMO: run studies and sweeps, and write one report with an answer to each question.

    python -m emo.experiments.evidence experiments/configs/evidence.yaml [key=value ...] [--jobs N]

A part is a study or a sweep with its own experiment file. If the files that it needs are missing, it is
replaced by its `otherwise` or left out, and the report notes it. A second run repeats nothing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

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
    """The replacement of a part if the files that it needs are missing."""

    note: str  # for the report
    before: list[str] = []  # commands, in order
    file: Path  # experiment file


class EvidencePart(Section):
    """One study or sweep."""

    title: str
    about: str  # for the report
    kind: Literal["study", "sweep"]
    file: Path
    needs: list[str] = []  # paths, which may use `{name}`
    otherwise: Otherwise | None = None
    names: dict[str, str] = {}  # names of the part's file


class EvidenceAnswer(Section):
    """A question, the part that decides it, and other parts that the report quotes."""

    text: str
    by: str  # part
    question: str  # in the files of the parts
    also: list[str] = []  # parts


class Evidence(Section):
    """An evidence file."""

    out: Path
    names: dict[str, str] = {}
    cut: list[str] = []  # for the report: what was reduced to save time
    parts: dict[str, EvidencePart] = Field(min_length=1)
    answers: dict[str, EvidenceAnswer] = Field(min_length=1)

    @model_validator(mode="after")
    def _parts_exist(self) -> Evidence:
        for part in (part for answer in self.answers.values() for part in (answer.by, *answer.also)):
            if part not in self.parts:
                raise ValueError(f"{part} is not one of the parts; {nearest(part, self.parts)}")
        return self


def gather_parts(evidence: Evidence, jobs: int) -> report.Json:
    """Run all parts and return their results."""
    left_out = find_missing_files(evidence)
    sources: dict[str, EvidencePart | Otherwise] = {}  # what runs for each part
    for name, part in evidence.parts.items():
        if (source := part.otherwise if name in left_out else part) is not None:
            sources[name] = source
    check_questions(evidence, sources)
    parts: dict[str, report.Json] = {}
    started = time.monotonic()
    for name, part in evidence.parts.items():
        print(f"{name}: {left_out.get(name, part.title)}", flush=True)
        if name in sources:
            parts[name] = run_part(evidence, name, sources[name], jobs)
    verdicts = {}
    for name, answer in evidence.answers.items():
        also = {part: parts[part]["verdicts"][answer.question] for part in answer.also if part in parts}
        decisive = parts[answer.by]["verdicts"][answer.question]
        verdicts[name] = decisive | {"question": answer.text, "by": answer.by, "also": also}
    return {
        "code": code_version(),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "verdicts": verdicts,
        "rows": [row | {"part": name} for name, results in parts.items() for row in results["rows"]],
        "parts": parts,
        "left_out": left_out,
        "cut": evidence.cut,
    }


def find_missing_files(evidence: Evidence) -> dict[str, str]:
    """Return the parts with missing files, and what happens to each."""
    missing = {}
    for name, part in evidence.parts.items():
        for path in fill_variables(part.needs, evidence.names, f"parts.{name}.needs"):
            if not Path(path).exists():
                action = part.otherwise.note if part.otherwise else "left out"
                missing[name] = f"{action}, because {path} does not exist"
    return missing


def check_questions(evidence: Evidence, sources: Mapping[str, EvidencePart | Otherwise]) -> None:
    """Raise UserError if a deciding part was left out, or if a part does not have the question."""
    for key, answer in evidence.answers.items():
        if answer.by not in sources:
            raise UserError(f"{answer.by} decides {answer.text!r} and was left out", code="part-left-out")
        for name in (part for part in (answer.by, *answer.also) if part in sources):
            file = sources[name].file
            questions = read_part_file(evidence.parts[name].kind, file).questions
            if answer.question not in questions:
                problem = f"answers.{key}: {file} has no question {answer.question}"
                raise UserError(f"{problem}; {nearest(answer.question, questions)}", code="unknown-question")


def run_part(evidence: Evidence, name: str, source: EvidencePart | Otherwise, jobs: int) -> report.Json:
    """Run a part or its replacement, and return its results."""
    names = []
    if isinstance(source, Otherwise):
        for text in source.before:
            run_part_command(split_command(text, evidence.names, f"parts.{name}"))
    else:
        filled = fill_variables(source.names, evidence.names, f"parts.{name}.names")
        names = [f"names.{key}={value}" for key, value in filled.items()]
    is_sweep = evidence.parts[name].kind == "sweep"
    program = ["emo", "sweep"] if is_sweep else ["emo.experiments.known_truth.study"]
    out = evidence.out / name
    run_part_command(["python", "-m", *program, "--jobs", str(jobs), str(source.file), f"out={out}", *names])
    results: report.Json = json.loads((out / RESULTS).read_text(encoding="utf-8"))
    return results


def read_part_file(kind: str, file: Path) -> Study | Experiment:
    """Read the experiment file of a part."""
    return read_experiment(file, []) if kind == "sweep" else load_section(Study, file, [], "experiment")


def run_part_command(command: list[str]) -> None:
    """Run a command and print it first. Raises UserError if it fails."""
    print(f"$ {shlex.join(command)}", flush=True)
    program = sys.executable if command[0] == "python" else command[0]
    process = subprocess.run([program, *command[1:]], env=command_environment(), preexec_fn=die_with_parent)
    if code := process.returncode:
        problem = f"{shlex.join(command)} exited with code {code}; fix the error and run this command again"
        raise UserError(problem, code="part-failed")


def main(argv: list[str] | None = None) -> int:
    """Run all parts and write the report. Exit codes: 0 done, 2 invalid input or a failed part."""
    parser = argparse.ArgumentParser(prog="python -m emo.experiments.evidence", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--jobs", type=int, default=2, help="number of parallel runs (%(default)s)")
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
