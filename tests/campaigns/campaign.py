"""Shared parts of campaigns. Findings are printed immediately, and at the end as a table and as JSON."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from emo.common.cli.progress import make_console
from tests.conftest import REPO


class Campaign:
    """The findings of a campaign in order. Call it to add a finding."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: list[dict[str, Any]] = []

    def __call__(self, part: str, case: str, results: str, good: bool, otherwise: str | None = None) -> None:
        """Add a finding. `otherwise` replaces `results` if the finding is not good."""
        results = results if good or otherwise is None else otherwise
        self.rows.append({"part": part, "what": case, "found": results, "good": good})
        print(f"{part}: {case}: {results}", flush=True)

    def finish(self, args: argparse.Namespace) -> int:
        """Print the table, write runs/NAME.json, and return 1 if a finding is not good, else 0."""
        table = Table("part", "what", "found", "")
        for row in self.rows:
            table.add_row(row["part"], row["what"], row["found"], "ok" if row["good"] else "FAILED")
        make_console().print(table)
        target = REPO / "runs" / f"{self.name}.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(
            json.dumps({"settings": vars(args), "rows": self.rows}, indent=1, default=str) + "\n"
        )
        return int(not all(row["good"] for row in self.rows))


def conduct(
    name: str, run: Callable[[Path, argparse.Namespace, Campaign], object], about: str | None, **options: Any
) -> int:
    """Run a campaign in a temporary directory and return its exit code.

    options: the command's options with their defaults. An option with a list as default takes several values.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in options.items():
        settings: dict[str, Any] = {"type": type(default)}
        if isinstance(default, bool):
            settings = {"action": "store_true"}
        elif isinstance(default, list):
            settings = {"nargs": "+", "choices": default or None}
        parser.add_argument(f"--{option.replace('_', '-')}", default=default, **settings)
    args, show = parser.parse_args(), Campaign(name)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)  # services and containers of other users read it
        run(Path(directory).resolve(), args, show)
    return show.finish(args)


def call(*command: str | Path, cwd: Path | None = None) -> str:
    """Return the standard output of a command. Raises CalledProcessError if it fails."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=cwd).stdout.strip()


def copy_checkout(directory: Path) -> Path:
    """Copy the tracked files as they are in the working tree, and return the directory."""
    for name in call("git", "ls-files", cwd=REPO).splitlines():
        if (REPO / name).exists():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, directory / name, follow_symlinks=False)  # emo/ contains links
    return directory


def can_install(show: Campaign, part: str, packages: list[str]) -> bool:
    """Install missing Debian packages without starting services. Return False if that is impossible here."""
    if os.geteuid() or shutil.which("apt-get") is None:
        show(part, "everything", "skipped: needs root on Debian", True)
        return False
    missing = [p for p in packages if subprocess.run(["dpkg", "-s", p], capture_output=True).returncode]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *missing]):
        if missing:
            subprocess.run(["apt-get", *command], env=environment, check=True, stdout=subprocess.DEVNULL)
    return True
