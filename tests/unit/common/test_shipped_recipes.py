"""The commands in the headers of launch/recipes are valid."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from emo.data_prep.config import load_data_config
from emo.data_prep.encoding.tokenizer import load_tokenizer
from emo.data_prep.sources.inputs import open_inputs
from emo.pipeline.config import load_config
from emo.pipeline.engine.device.hardware import parse_cluster
from emo.pipeline.planning.plan import print_plan
from tests.conftest import REPO

FOLDER = REPO / "launch" / "recipes"
RECIPES = sorted({*FOLDER.rglob("*.yaml")} - {*FOLDER.glob("base/*")})
CURRENT = [path for path in FOLDER.glob("*.yaml") if path.stem.endswith(("-sft", "-lora", "-cpt"))]
FIGURES = re.compile(r"^# On (\d+) x (\S+): (\d+) GiB per GPU, ([\d.]+) hours per 100 million tokens", re.M)


def commands(recipe: Path) -> list[str]:
    """Return the commands in a recipe's header, without remarks in parentheses."""
    lines = re.findall(r"^#\s*((?:emo|deepspeed) .*)$", recipe.read_text(encoding="utf-8"), re.M)
    return [re.sub(r"\s+\(.*\)$", "", line.strip()) for line in lines]


# Other recipes need a sweep, or the export of quickstart-pretrain (tests/launch/pipeline/test_job_files.py).
ALONE = [
    recipe
    for recipe in RECIPES
    if recipe.stem not in ("quickstart-continue", "quickstart-own")
    and not any(line.startswith("emo sweep ") for line in commands(recipe))
]


@pytest.mark.parametrize("recipe", ALONE, ids=lambda path: path.stem)
def test_the_commands_in_a_header_can_be_run(
    recipe: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command has all overrides that its recipe needs."""
    monkeypatch.chdir(REPO)
    for line in commands(recipe):
        if needs_files := "=DIR" in line:
            line = re.sub(r"\bDIR\b", str(request.getfixturevalue("shared_data")), line)
        command, verb, *words = shlex.split(line)
        assert recipe == REPO / next(word for word in words if word.endswith(".yaml"))
        overrides = [word for word in words if "=" in word]
        if command == "deepspeed":
            assert verb == "--num_gpus" and (REPO / words[1]).is_file()
            print_plan(load_config(recipe, overrides), int(words[0]))
            continue
        if verb == "train":
            continue  # planned by the next test
        assert verb == "prepare"
        config = load_data_config(recipe, overrides)
        if needs_files:
            assert len(open_inputs(config)) >= len(config.sources)
            load_tokenizer(config.root / str(config.tokenizer))


@pytest.mark.parametrize("recipe", CURRENT, ids=lambda path: path.stem)
def test_a_recipe_fits_its_gpus_as_its_header_and_the_readme_state(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    found = FIGURES.search(recipe.read_text(encoding="utf-8"))
    assert found is not None
    gpus, kind, gib, hours = found.groups()
    assert print_plan(load_config(recipe, []), int(gpus), parse_cluster(f"{gpus}x{kind}"))
    printed = capsys.readouterr().out
    predicted = re.findall(r"(?:memory per GPU|run)\W+([\d.]+) (?:GiB|GPU-hours per 100 million)", printed)
    memory, gpu_hours = map(float, predicted)
    assert float(gib) == pytest.approx(memory, abs=0.6)
    assert float(hours) == pytest.approx(gpu_hours / int(gpus), abs=0.06)
    cells = f"{gpus} x {kind} | {gib} | {hours} |"
    lines = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    assert any(f"`{recipe.stem}`" in line and line.endswith(cells) for line in lines)
