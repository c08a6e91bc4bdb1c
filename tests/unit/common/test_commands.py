"""The `emo` command: help, exit codes and suggestions."""

from __future__ import annotations

import errno
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

import emo.pipeline.cli
import emo.pipeline.control.stop
from emo.__main__ import COMMANDS, main
from emo.common.cli.commands import Parser, parse_arguments
from emo.common.errors import DiskFullError, ExitCode, FailureError, UserError, exit_code_of
from emo.common.io.hub import explain_hub_error
from emo.eval.icl.tasks import known_tasks
from tests.conftest import REPO
from tests.helpers.parsers import all_parsers


def test_every_help_has_a_purpose_examples_and_exit_codes() -> None:
    parsers = all_parsers()
    assert {name.split()[0] for name in parsers} == COMMANDS.keys()
    for name, parser in parsers.items():
        assert isinstance(parser, Parser) and parser.description and parser.exit_codes, name
        text = parser.format_help()
        assert text.startswith("usage: emo ") and f"\n  {ExitCode.MISTAKE.value}  " in text, name
        assert all(action.help for action in parser._actions), name
        flags = [flag for action in parser._actions for flag in action.option_strings]
        assert not [flag for flag in flags if "-" in flag.strip("-")], name
        for example in parser.examples:
            program, verb, *words = shlex.split(example)
            assert (program, verb) == ("emo", name.split()[0])
            words = words[words.index("--") + 1 :] if verb == "train" and "--" in words else words
            parse_arguments(parser, words)


@pytest.mark.parametrize("words", [["help", "plan"], ["plan", "--help"], ["help", "report"], ["--help"]])
def test_help_is_printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        sys.exit(main(words))
    assert not end.value.code and capsys.readouterr().out.startswith("usage: emo ")


def test_emo_lists_its_commands_and_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == ExitCode.MISTAKE
    listed = capsys.readouterr().err
    assert all(f"\n  {name} " in listed for name in COMMANDS) and main(["help"]) == main(["version"]) == 0
    capsys.readouterr()
    assert main(["tasks"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{name} " in printed for name in known_tasks())


def test_other_systems_are_rejected_in_one_line() -> None:
    """macOS has no EREMOTEIO."""
    code = """
import errno, sys
del errno.EREMOTEIO
sys.platform = "darwin"
from emo.__main__ import main
sys.exit(main(["plan", "recipe.yaml"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == ExitCode.MISTAKE and done.stderr.startswith("error: emo needs Linux")
    assert len(done.stderr.splitlines()) == 1


def test_missing_packages_are_reported_in_one_line() -> None:
    command = [sys.executable, "-S", "-m", "emo", "--version"]  # -S hides site-packages
    done = subprocess.run(command, env={"PATH": os.environ["PATH"]}, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("no such key", code="test"), 2),
        (FailureError("a worker was killed", code="test"), 1),
        (DiskFullError("no space left"), 1),
        (OSError(errno.ESTALE, "Stale file handle"), 1),
        (OSError("nobody knows"), 1),
        (PermissionError(errno.EACCES, "Permission denied"), 2),
        (FileNotFoundError("not in the cache, and the hub cannot be reached"), 2),  # has no errno
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1),  # of a connection, while the output is read
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_are_one_line_and_an_exit_code(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        raise error

    assert exit_code_of(work) == code
    assert capsys.readouterr().err.count("\n") == 1


RECIPE = "launch/recipes/quickstart-pretrain.yaml"


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("train R --learning_rate 1e-5", "train.learning_rate=1e-5"),
        ("train --learning-rate=1e-5 R", "train.learning_rate=1e-5"),
        ("train R --lr 1e-5", "train.learning_rate=1e-5"),
        ("train R --num_train_epochs 3", "train.num_train_epochs=3"),
        ("train R --per_device_train_batch_size 4", "train.micro_batch_size=4"),
        ("train R --model_name_or_path gpt2", "model.path=gpt2"),
        ("train R --deepspeed ds.json", "deepspeed=ds.json"),
        ("train R --output_dir X", "output_dir=X"),
        ("train R --weight_decay train.seed=1", "train.weight_decay=VALUE"),
        ("train R --resume", "remove it: the same command resumes"),
        ("train R --num_gpus 2", "--num_gpus 8 -- RECIPE"),
        ("train --config R", "emo train RECIPE"),
        ("train R --dry-run", "did you mean --dry_run?"),
        ("train", "RECIPE"),
        ("train R train.report_to=wandb", "for example [wandb]"),
        ("train R train.gradient_accumulation_steps=4", "train.global_batch_size"),
        ("train R base_model=gpt2", "model.path"),
        ("train R micro_batch_size=4", "train.micro_batch_size"),
        ("train chat.jsonl", "emo sniff chat.jsonl"),
        ("prepare chat.jsonl.zst", "emo sniff chat.jsonl.zst"),
        ("prepare R --num_proc 8", "--workers N"),
        ("plan R --gpus 8xB200", "H100-80G"),
        ("plan R --gpus 8xA100", "8xA100-80G"),
        ("plan R --gpus 8xH100 --network 0", "positive"),
        ("train R --dry_run --ranks -2", "from 1"),
        ("plan R --gpus y --bst a=1", "--best"),
        ("report x --out y", "does not exist"),
        ("eval --model x --data y --tasks hellaswag", "emo tasks"),
        ("eval --model_args x", "--model?"),
        ("eval --model x --data y --output_path s3://b/c", "of this machine"),
        ("train R output_dir=s3://b/c", "train.copy_to"),
        ("top s3:/b/c", "s3://BUCKET/DIRECTORY"),
        ("sft R", "emo train"),
        ("lm_eval R", "emo eval"),
        ("repot x", "emo report"),
    ],
)
def test_wrong_arguments_are_answered_with_what_to_type(
    words: str, cure: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emo.pipeline.cli, "leave", sys.exit)
    monkeypatch.setattr(emo.pipeline.control.stop, "leave_early", lambda: None)
    with pytest.raises(SystemExit) as end:
        sys.exit(main(words.replace(" R", f" {REPO / RECIPE}").split()))
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1 and cure in error


@pytest.mark.parametrize("error", [OSError("You are trying to access a gated repo."), OSError("unreachable")])
def test_models_that_cannot_be_reached_are_explained(error: OSError) -> None:
    assert re.search("licence at .*/some/model and set HF_TOKEN", explain_hub_error("some/model", error))


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_fail_a_command(closed: str, tmp_path: pathlib.Path) -> None:
    """A file that the command opens does not get the descriptor of a closed stream."""
    program = "import sys; from emo.common.errors import exit_code_of; "
    program += "sys.exit(exit_code_of(lambda: print('said') or int(open('file', 'w').fileno() < 3)))"
    command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(program)} {closed}"
    environment = {"PYTHONPATH": str(REPO)}
    assert subprocess.run(["sh", "-c", command], env=environment, cwd=tmp_path).returncode == 0


def test_a_report_on_a_missing_path_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--over=tokens", "/no/where"]) == 2
    assert capsys.readouterr().err.startswith("error: /no/where does not exist; ")


def test_a_full_stdout_is_named_in_the_error() -> None:
    program = "import sys; from pathlib import Path; from emo.common.errors import exit_code_of; "
    program += "from emo.common.io.files import full_disk; from emo.data_prep.cli import _say\n"
    program += "def work():\n with full_disk(Path('data')): _say('x')\nsys.exit(exit_code_of(work))"
    with open("/dev/full", "w", encoding="utf-8") as full:  # noqa: PTH123
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "standard output" in done.stderr and "data" not in done.stderr


def test_a_signal_during_imports_stops_the_command() -> None:
    program = "import os, signal; from emo.pipeline.control.stop import leave_early; leave_early(); "
    program += "os.kill(os.getpid(), signal.SIGTERM)"
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 75 and "SIGTERM" in done.stderr and done.stderr.count("\n") == 1


RICH = "__import__('emo.common.cli.progress').common.cli.progress.make_console().print('x')"


# Printing fails when the process exits, or at once.
@pytest.mark.parametrize("printing", ["print('x')", "print('x' * 10**6)", RICH])
def test_a_closed_pipe_ends_the_command_quietly(printing: str) -> None:
    program = "import sys; from emo.common.errors import exit_code_of; "
    program += f"sys.exit(exit_code_of(lambda: {printing} or 0))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", program], env={}, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("error", "printed"),
    [
        (OSError(30, "Read-only file system"), "error: Read-only file system"),
        (OSError(30, "Read-only file system", b"/x\xff"), "/x"),
        (FileNotFoundError(2, "No such file or directory", "/a", None, "/b"), "error: /a: /b: No such file"),
        (FileNotFoundError(2, "No such file or directory", 3), "error: No such file"),
        (OSError("no number"), "error: no number"),
    ],
)
def test_an_error_of_the_system_names_its_paths(
    error: OSError, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    assert exit_code_of(fail) in (ExitCode.FAILURE, ExitCode.MISTAKE)
    text = capsys.readouterr().err
    assert printed in text and text.count("\n") == 1 and "[system]" in text and "Errno" not in text
