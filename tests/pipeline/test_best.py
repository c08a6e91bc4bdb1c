"""`plan --best`: the fastest settings that surely fit, and the recipe that is written of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.errors import ExitCode, UserError
from pipeline.cli import main
from pipeline.config import RunConfig, load_config
from pipeline.planning import footprint
from pipeline.planning.best import Choice, choices, print_best
from pipeline.planning.checks import check
from pipeline.planning.footprint import GIB
from pipeline.planning.plan import parse_cluster, sizes_of
from tests.conftest import REPO

RECIPES = REPO / "launch/recipes"
LLAMA = RECIPES / "llama-7b-wikitext103.yaml"


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are not folded."""
    monkeypatch.setenv("COLUMNS", "200")


def _best(name: str, gpus: str, *overrides: str, network: float = 1600.0) -> Choice:
    """Of a run that nobody has started: `make quickstart` may have been run in this checkout."""
    cluster = parse_cluster(gpus, network)
    return print_best(load_config(RECIPES / f"{name}.yaml", ["run_dir=runs/unstarted", *overrides]), cluster)


def _every(config: RunConfig, gpus: str) -> list[Choice]:
    cluster = parse_cluster(gpus)
    ready = check(config, cluster.gpus, local=False)
    return list(choices(config, sizes_of(ready.model, ready.hf_config), ready.objective, cluster))


def _rows(printed: str) -> dict[str, list[str]]:
    """Cells of the printed table by the name of their row."""
    lines = [line.strip("│").split("│") for line in printed.splitlines() if line.startswith("│")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def test_the_best_is_the_fastest_of_all_that_surely_fit(capsys: pytest.CaptureFixture[str]) -> None:
    found = _best("llama-7b-wikitext103", "8xA100-40G")
    every = _every(load_config(LLAMA, []), "8xA100-40G")
    room = 39.4 * footprint.USABLE * GIB
    fitting = [choice for choice in every if choice.memory.surely <= room]
    assert found.memory.surely <= room and len(fitting) < len(every)
    assert found.speed >= 0.99 * max(choice.speed for choice in fitting)
    files = {choice.file.name for choice in every}
    assert files == {"zero1.json", "zero2.json", "zero3.json", "zero3_offload.json"}
    assert {choice.setup.micro for choice in every} == {1, 2}  # 16 rows on 8 GPUs
    assert {c.setup.stage for c in every if c.setup.compiled} == {1, 2}  # the trainer refuses others
    rows = _rows(capsys.readouterr().out)
    assert list(rows) == ["1", "2", "3", "recipe"]
    speeds = [int(rows[name][5].replace(",", "")) for name in "123"]
    assert speeds[0] >= speeds[1] >= speeds[2] and speeds[0] == pytest.approx(found.speed, abs=1)


@pytest.mark.parametrize(
    ("recipe", "gpus", "file", "checkpointing"),
    [
        ("llama-7b-wikitext103", "4xA100-80G", "zero2.json", False),
        ("llama-7b-wikitext103", "4xA100-40G", "zero3.json", True),  # 4 x 28 GiB of states do not fit twice
        ("llama-7b-wikitext103", "1xA100-80G", "zero3_offload.json", False),
        ("llama-13b-wikitext103", "8xH100-80G", "zero2.json", False),
        ("llama-7b-wikitext103-lora", "1xA100-80G", "zero2.json", False),
        ("gpt2-wikitext2", "1xRTX4090-24G", "zero1.json", False),
        ("quickstart-pretrain", "1xA100-80G", "zero1.json", False),  # float32, written for CPUs
    ],
)
def test_models_of_all_sizes_get_an_answer(recipe: str, gpus: str, file: str, checkpointing: bool) -> None:
    found = _best(recipe, gpus)
    assert (found.file.name, found.setup.checkpointing) == (file, checkpointing)


def test_a_second_copy_of_weights_is_for_several_nodes() -> None:
    config = load_config(RECIPES / "llama-13b-alpaca-gpt4.yaml", ["train.batch=192"])
    for gpus, offered in (("8xA100-80G", False), ("12xA100-80G", False), ("16xA100-80G", True)):
        files = {choice.file.name for choice in _every(config, gpus)}
        assert ("zero3_hpz.json" in files) == offered, gpus
    slow = _best("llama-13b-alpaca-gpt4", "16xA100-40G", network=200.0)  # where nothing hides the gathers
    assert slow.file.name == "zero3_hpz.json"


def test_nothing_that_fits_is_one_line_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", str(LLAMA), "--gpus", "1xRTX3090-24G", "--best", "data.block=65536"])
    said = capsys.readouterr()
    assert code == ExitCode.FAILURE
    assert said.err.splitlines()[-1].startswith(
        "error: nothing surely fits on 1 x RTX3090-24G: of each 21.7 GiB"
    )
    assert "zero3_offload.json with checkpointing, micro_batch 1 may need" in said.err
    assert "━" not in said.out


def test_a_batch_that_does_not_divide_is_the_recipes_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(LLAMA), "--gpus", "3xA100-80G", "--best"]) == ExitCode.MISTAKE
    assert "train.batch=16 does not divide over 3 ranks" in capsys.readouterr().err


def _plan(*argv: str, capsys: Any) -> dict[str, str]:
    """The rows of a plan's table."""
    assert main(["plan", *argv]) == ExitCode.DONE
    lines = [line.strip("│ ").split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    return {line[0].strip(): line[1].strip() for line in lines}


def test_what_is_written_is_a_recipe_with_the_same_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fast.yaml"
    overrides = ["train.batch=64", "objective.name=mle"]
    argv = [
        "plan",
        str(LLAMA),
        "--gpus",
        "8xA100-80G",
        overrides[0],
        "--best",
        "--write",
        str(file),
        overrides[1],
    ]
    assert main(argv) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert f"written: {file}" in printed
    cells = _rows(printed)["1"]
    config = load_config(file, [])
    assert (config.train.batch, config.objective.name) == (64, "mle")
    assert str(config.deepspeed) == f"ds_configs/{cells[0]}"
    assert str(config.model.activation_checkpointing).lower() == cells[1]
    assert str(config.model.compile).lower() == cells[2]
    assert config.train.micro_batch == int(cells[3])
    assert config.data == load_config(LLAMA, []).data
    rows = _plan(str(file), "--gpus", "8xA100-80G", capsys=capsys)
    assert rows["memory per GPU"].startswith(f"{cells[4]} GiB")
    assert f"{cells[5]} per GPU" in rows["speed"]
    assert rows["fits"].startswith("yes")
    assert yaml.safe_load(file.read_text())["extends"].endswith("launch/recipes/llama-7b-wikitext103.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["fast.yaml"]


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    argv = ["plan", str(LLAMA), "--gpus", "8xA100-80G", "--best", "--write"]
    assert main([*argv, str(file)]) == ExitCode.MISTAKE
    assert file.read_text() == "mine"
    assert main([*argv, str(tmp_path / "absent" / "new.yaml")]) == ExitCode.MISTAKE
    said = capsys.readouterr()
    assert "the file is there already" in said.err and "absent is not a directory" in said.err
    assert "━" not in said.out  # told before anything is searched


def test_what_cannot_be_written_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An override that replaces a section: in a file that extends another it would only complete it."""
    file = tmp_path / "fast.yaml"
    override = "objective={name: mle}"
    recipe = tmp_path / "base.yaml"
    recipe.write_text(f"extends: {LLAMA}\nobjective: {{ z_loss: 0.1 }}\n")
    argv = ["plan", str(recipe), override, "--gpus", "8xA100-80G", "--best", "--write", str(file)]
    assert main(argv) == ExitCode.MISTAKE
    assert "an override replaces a whole section" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["base.yaml"]


def test_writing_needs_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(LLAMA), "--gpus", "8xA100-80G", "--write", "x.yaml"]) == ExitCode.MISTAKE
    assert "--write goes with --best" in capsys.readouterr().err


def test_a_file_that_is_refused_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(LLAMA, [])
    whole = {choice.file.name for choice in _every(config, "8xA100-80G")}
    monkeypatch.chdir(tmp_path)  # its files go before the repository's
    (tmp_path / "ds_configs").mkdir()
    refused = {"bf16": {"enabled": True}}  # the recipe decides that
    (tmp_path / "ds_configs/zero1.json").write_text(json.dumps(refused))
    cluster = parse_cluster("8xA100-80G")
    ready = check(config, 8, local=False)
    sizes = sizes_of(ready.model, ready.hf_config)
    left = {choice.file.name for choice in choices(config, sizes, ready.objective, cluster)}
    assert left == whole - {"zero1.json"}
    for name in left:
        (tmp_path / "ds_configs" / name).write_text(json.dumps(refused))
    with pytest.raises(UserError, match=r"sets bf16; remove it and set model.dtype"):
        list(choices(config, sizes, ready.objective, cluster))


SHIPPED = sorted(path for path in RECIPES.glob("llama*.yaml") if "num_gpus" in path.read_text())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_llama_recipes_follow_the_advice(path: Path) -> None:
    """On the GPUs of their headers, of 80 GB, they surely fit and are the fastest of the uncompiled."""
    text = path.read_text(encoding="utf-8")
    gpus = int(re.search(r"--num_gpus (\d+)", text)[1])  # type: ignore[index]
    config = load_config(path, [])
    room = 79.2 * footprint.USABLE * GIB
    fitting = [c for c in _every(config, f"{gpus}xA100-80G") if c.memory.surely <= room]
    mine = next(
        choice
        for choice in fitting
        if choice.file == config.deepspeed
        and choice.setup.checkpointing == config.model.activation_checkpointing
        and not choice.setup.compiled
        and choice.setup.micro == min(config.train.micro_batch, config.train.batch // gpus)
    )
    assert mine.speed > 0.97 * max(choice.speed for choice in fitting if not choice.setup.compiled)


def test_what_headers_say_of_smaller_clusters_fits() -> None:
    said = 0
    for path in SHIPPED:
        for gpus, size, overrides in re.findall(r"# On (\d) of (40|80) GB set (.+)\.\n", path.read_text()):
            argv = [str(path), "--gpus", f"{gpus}xA100-{size}G", *overrides.split()]
            assert main(["plan", *argv]) == ExitCode.DONE, argv
            said += 1
    assert said == 3
