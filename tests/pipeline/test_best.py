"""`plan --best`: the fastest settings that surely fit, and the recipe that is written of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from emo.common.errors import ExitCode, UserError
from emo.pipeline.cli import main
from emo.pipeline.config import RunConfig, load_config
from emo.pipeline.planning import footprint
from emo.pipeline.planning.best import Choice, choices, print_best
from emo.pipeline.planning.checks import check
from emo.pipeline.planning.footprint import GIB
from emo.pipeline.planning.plan import parse_cluster, sizes_of
from tests.conftest import REPO

RECIPES = REPO / "launch/recipes"
LLAMA = RECIPES / "llama-7b-wikitext103.yaml"
REFUSED = '{"bf16": {"enabled": true}}'  # the recipe decides that


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are not folded."""
    monkeypatch.setenv("COLUMNS", "200")


def _best(name: str, gpus: str, *overrides: str, network: float = 1600.0) -> Choice:
    """Of a run that nobody has started: `make quickstart` may have been run in this checkout."""
    config = load_config(RECIPES / f"{name}.yaml", ["output_dir=runs/unstarted", *overrides])
    return print_best(config, parse_cluster(gpus, network))


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
    config = load_config(RECIPES / "llama-13b-alpaca-gpt4.yaml", ["train.global_batch_size=192"])
    for gpus, offered in (("8xA100-80G", False), ("12xA100-80G", False), ("16xA100-80G", True)):
        files = {choice.file.name for choice in _every(config, gpus)}
        assert ("zero3_hpz.json" in files) == offered, gpus
    slow = _best("llama-13b-alpaca-gpt4", "16xA100-40G", network=200.0)  # where nothing hides the gathers
    assert slow.file.name == "zero3_hpz.json"


def test_what_is_refused_before_or_after_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing that fits, a batch that does not divide, a target that is there, or in no directory."""
    existing, cluster = tmp_path / "mine.yaml", ["--gpus", "8xA100-80G"]
    existing.write_text("mine")
    for code, argv in (
        (ExitCode.FAILURE, ["--gpus", "1xRTX3090-24G", "--best", "data.sequence_len=65536"]),
        (ExitCode.MISTAKE, ["--gpus", "3xA100-80G", "--best"]),
        (ExitCode.MISTAKE, [*cluster, "--write", "x.yaml"]),
        (ExitCode.MISTAKE, [*cluster, "--best", "--write", str(existing)]),
        (ExitCode.MISTAKE, [*cluster, "--best", "--write", str(tmp_path / "absent" / "new.yaml")]),
    ):
        assert main(["plan", str(LLAMA), *argv]) == code
        assert "━" not in capsys.readouterr().out
    assert existing.read_text() == "mine"


def test_what_is_written_is_a_recipe_with_the_same_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fast.yaml"
    argv = [
        "plan",
        str(LLAMA),
        "--gpus",
        "8xA100-80G",
        "train.global_batch_size=64",
        "--best",
        "--write",
        str(file),
    ]
    assert main([*argv, "objective.name=mle"]) == ExitCode.DONE
    name, checkpointing, compiled, micro, memory, speed, *_ = _rows(capsys.readouterr().out)["1"]
    config = load_config(file, [])
    assert (config.train.global_batch_size, config.objective.name) == (64, "mle")
    assert (str(config.deepspeed), config.train.micro_batch_size) == (f"ds_configs/{name}", int(micro))
    assert str(config.model.activation_checkpointing).lower() == checkpointing
    assert str(config.model.compile).lower() == compiled
    assert config.data == load_config(LLAMA, []).data
    assert yaml.safe_load(file.read_text())["extends"].endswith("launch/recipes/llama-7b-wikitext103.yaml")
    assert main(["plan", str(file), "--gpus", "8xA100-80G"]) == ExitCode.DONE
    plan = {name: cells[0] for name, cells in _rows(capsys.readouterr().out).items() if cells}
    assert plan["memory per GPU"].startswith(f"{memory} GiB") and plan["fits"].startswith("yes")
    assert f"{speed} per GPU" in plan["speed"]
    assert [path.name for path in tmp_path.iterdir()] == ["fast.yaml"]


def test_what_cannot_be_written_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An override that replaces a section: in a file that extends another it would only complete it."""
    recipe = tmp_path / "base.yaml"
    recipe.write_text(f"extends: {LLAMA}\nobjective: {{ z_loss: 0.1 }}\n")
    argv = ["plan", str(recipe), "objective={name: mle}", "--gpus", "8xA100-80G", "--best"]
    assert main([*argv, "--write", str(tmp_path / "fast.yaml")]) == ExitCode.MISTAKE
    assert [path.name for path in tmp_path.iterdir()] == ["base.yaml"]


def test_a_file_that_is_refused_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(LLAMA, [])
    whole = {choice.file.name for choice in _every(config, "8xA100-80G")}
    monkeypatch.chdir(tmp_path)  # its files go before the repository's
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "ds_configs/zero1.json").write_text(REFUSED)
    assert {choice.file.name for choice in _every(config, "8xA100-80G")} == whole - {"zero1.json"}
    ready = check(config, 8, local=False)
    for name in whole:
        (tmp_path / "ds_configs" / name).write_text(REFUSED)
    sizes = sizes_of(ready.model, ready.hf_config)
    with pytest.raises(UserError) as error:
        list(choices(config, sizes, ready.objective, parse_cluster("8xA100-80G")))
    assert error.value.code == "ds-owned"


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
        and choice.setup.micro == min(config.train.micro_batch_size, config.train.global_batch_size // gpus)
    )
    assert mine.speed > 0.97 * max(choice.speed for choice in fitting if not choice.setup.compiled)


def test_what_headers_say_of_smaller_clusters_fits() -> None:
    pattern = r"# On (\d) of (40|80) GB set (.+)\.\n"
    lines = [(path, *line) for path in SHIPPED for line in re.findall(pattern, path.read_text())]
    assert len(lines) == 3
    for path, gpus, size, overrides in lines:
        argv = ["plan", str(path), "--gpus", f"{gpus}xA100-{size}G", *overrides.split()]
        assert main(argv) == ExitCode.DONE, argv
