"""The loss library stands alone, and light doors stay light."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import REPO
from tests.test_repository import imports


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("pipeline.loss", ("deepspeed", "transformers", "data_prep", "pipeline.config", "pipeline.engine")),
        ("pipeline.run_dir", ("torch", "deepspeed", "transformers", "numpy")),
    ],
)
def test_what_importing_does_not_load(module: str, absent: tuple[str, ...]) -> None:
    # defects D7
    code = f"import sys, {module}; print([m for m in {absent} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_library_imports_nothing_of_runs_and_no_circles() -> None:
    found = {}
    for path in (REPO / "pipeline" / "loss").glob("*.py"):
        names = imports(path)
        for name in names:
            if name.split(".")[0] in ("data_prep", "pipeline", "eval", "tests"):
                assert name.startswith("pipeline.loss"), f"{path.name} imports {name}"
        own = {name.split(".")[2] for name in names if name.startswith("pipeline.loss.")}
        found[path.stem] = own & {p.stem for p in path.parent.glob("*.py")}

    def reached(start: str, seen: frozenset[str] = frozenset()) -> None:
        assert start not in seen, f"{start} imports itself through {sorted(seen)}"
        for name in found[start]:
            reached(name, seen | {start})

    for name in found:
        reached(name)
