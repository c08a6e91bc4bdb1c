"""The parsers of all commands, for the reference and for tests."""

from __future__ import annotations

import argparse

from emo.__main__ import COMMANDS
from emo.data_prep import cli as data
from emo.eval import cli as evaluation
from emo.experiments import cli as experiments
from emo.launch import quickstart, rank
from emo.pipeline import cli as training


def all_parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command in the order of `emo --help`.

    `report` is two commands: "report RUN_DIR" and "report RESULTS". `plan` is two as well: "plan" and
    "plan --data". Parsers have the attributes `examples` and `exit_codes`.
    """
    parsers: dict[str, argparse.ArgumentParser] = {"quickstart": quickstart.make_parser()}
    parsers["train"] = rank.make_parser()
    for parser in (data.make_parser(), training.make_parser(), evaluation.make_parser()):
        for commands in (action.choices for action in parser._actions if isinstance(action.choices, dict)):
            for name, command in commands.items():
                parsers[f"{name} {_form_of(name, command)}".strip()] = command
    parsers |= experiments.make_parsers()
    return {name: parsers[name] for key in COMMANDS for name in parsers if name.split()[0] == key}


def _form_of(name: str, command: argparse.ArgumentParser) -> str:
    """Return what tells a command from another of the same name, or an empty string."""
    for action in command._actions:
        if name == "report" and action.nargs == "+":
            return str(action.metavar)
        if name == "plan" and action.dest == "data" and action.required:
            return "--data"
    return ""
