"""Dry runs and `plan`: every recipe plans without network, mistakes stop it, and `--best` is the fastest."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from emo.common.errors import ExitCode, UserError
from emo.data_prep.config import load_data_config
from emo.pipeline.cli import main
from emo.pipeline.config import RunConfig, load_config
from emo.pipeline.order import MixedOrder
from emo.pipeline.planning import footprint
from emo.pipeline.planning.checks import check
from emo.pipeline.planning.footprint import GIB
from emo.pipeline.planning.plan import (
    Choice,
    choices,
    domain_rows,
    parse_cluster,
    print_best,
    print_plan,
    remarks,
    sizes_of,
)
from tests.common.test_shipped_recipes import ALONE
from tests.conftest import REPO
from tests.helpers import corpus

RECIPES = REPO / "launch/recipes"
LLAMA, QUICKSTART = RECIPES / "llama-7b-wikitext103.yaml", RECIPES / "quickstart-pretrain.yaml"
EIGHT = ["--gpus", "8xA100-80G"]
# Those with commands of their own are planned by them (tests/common/test_shipped_recipes.py), and the
# checkpoint that stories260k continues must be there.
OTHERS = [p for p in sorted(RECIPES.glob("*.yaml")) if p not in ALONE and "stories260k" not in p.stem]
LLAMAS = sorted(path for path in RECIPES.glob("llama*.yaml") if "num_gpus" in path.read_text())


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are not folded."""
    monkeypatch.setenv("COLUMNS", "200")


def every_choice(config: RunConfig, gpus: str) -> list[Choice]:
    cluster = parse_cluster(gpus)
    ready = check(config, cluster.gpus, local=False)
    return list(choices(config, sizes_of(ready.model, ready.hf_config), ready.objective, cluster))


def cells(printed: str) -> dict[str, list[str]]:
    """Return the cells of the printed table by the name of their row."""
    lines = [line.strip("│").split("│") for line in printed.splitlines() if line.startswith("│")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in lines}


@pytest.mark.parametrize("path", OTHERS, ids=lambda p: p.stem)
def test_every_recipe_plans(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(path, [f"output_dir={tmp_path / 'run'}"])  # the recipe's own may hold a run
    if config.model.architecture is None:  # continues an export that `make quickstart` writes
        config = config.model_copy(update={"model": load_config(QUICKSTART, []).model})
    print_plan(config, ranks=4)
    printed = capsys.readouterr().out
    assert "rows per step" in printed and "states per rank" in printed


def test_published_parameter_counts() -> None:
    # LoRA: r (in + out) for q, k, v, o of 4096 x 4096 and gate, up, down of 4096 x 11008, in 32 layers
    lora = 32 * 32 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    for name, parameters, trainable in (
        ("llama-7b-wikitext103", 6_738_415_616, 6_738_415_616),
        ("llama-13b-wikitext103", 13_015_864_320, 13_015_864_320),
        ("gpt2-wikitext2", 124_439_808, 124_439_808),
        ("llama-7b-wikitext103-lora", 6_738_415_616 + lora, lora),
    ):
        ready = check(load_config(RECIPES / f"{name}.yaml", []), 1, local=False)
        sizes = sizes_of(ready.model, ready.hf_config)
        assert (sizes.parameters, sizes.trainable) == (parameters, trainable)


MIXTURE = "{shares: {home: 0.25, abroad: {from: 0.75, to: 0.25, steps: 20}}, max_epochs: {abroad: 2}}"


@pytest.fixture(scope="module")
def two_domains(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a small recipe whose data, prepared, are of two domains."""
    directory = tmp_path_factory.mktemp("domains")
    limits = {"home": 30, "abroad": 60}
    sources = [{"embedded": f"world-{name}", "limit": n, "domain": name} for name, n in limits.items()]
    overrides = [f"output_dir={directory}/run", f"data.dir={directory}/data", "data.sequence_len=32"]
    overrides += [f"data.sources={json.dumps(sources)}", "data.train_tokenizer=384", "train.max_steps=200"]
    overrides += ["train.num_train_epochs=null", "data.validation_fraction=0"]
    corpus.run(load_data_config(QUICKSTART, overrides))
    return overrides


def test_a_plan_says_what_each_domain_gets(two_domains: list[str]) -> None:
    config = load_config(QUICKSTART, [*two_domains, f"train.mixture={MIXTURE}"])
    ready = check(config, 1, local=False)
    assert ready.data is not None and isinstance(ready.order, MixedOrder) and ready.steps is not None
    rows = dict(domain_rows(config, ready))
    assert rows["domain home"].startswith("25.0% to 50.0% of tokens; ")
    taken = np.concatenate([ready.order.step_rows(step) for step in range(ready.steps)])
    for domain, portion in enumerate(ready.order.portions(ready.steps)):
        of_domain = taken[ready.data.domain[taken] == domain]
        assert portion.rows == len(of_domain)
        assert portion.tokens == pytest.approx(ready.data.valid[of_domain].sum(), rel=0.1)
        assert portion.name == "home" or portion.epochs <= 2
    assert len(remarks(config, ready, on_cpu=False)) == 1
    plain = load_config(QUICKSTART, two_domains)
    shares = [float(text.split("%")[0]) for _, text in domain_rows(plain, check(plain, 1, local=False))]
    assert len(shares) == 2 and sum(shares) == pytest.approx(100, abs=0.2)
    few = ["train.max_steps=null", "train.num_train_epochs=1", "train.global_batch_size=64"]
    short = load_config(QUICKSTART, [*two_domains, *few, "model.dtype=bfloat16"])
    assert len(remarks(short, check(short, 1, local=False), on_cpu=True)) == 2


@pytest.mark.parametrize(
    "mixture",
    [
        "{shares: {home: 1}}",
        "{temperature: 1, max_epochs: {home: 1, abroad: 1}}",
        "{shares: {home: 1, abroda: 1}}",
        "{shares: {home: {from: 1, to: 0, steps: 9}}}",
    ],
)
def test_a_mixture_that_cannot_be_is_refused(two_domains: list[str], mixture: str, tmp_path: Path) -> None:
    """Names of domains before the data are prepared, too."""
    for directory in [[], [f"data.dir={tmp_path}"]] if "abroda" in mixture else [[]]:
        with pytest.raises(UserError, match="mixture"):
            check(
                load_config(QUICKSTART, [*two_domains, f"train.mixture={mixture}", *directory]),
                1,
                local=False,
            )


def test_the_best_is_the_fastest_of_all_that_surely_fit(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(LLAMA, ["output_dir=runs/unstarted"])
    alone = print_best(config, parse_cluster("1xA100-80G"))
    assert alone.file.name == "zero3_offload.json"
    capsys.readouterr()
    best = print_best(config, parse_cluster("8xA100-40G"))
    every = every_choice(config, "8xA100-40G")
    room = 39.4 * footprint.USABLE * GIB
    fitting = [choice for choice in every if choice.memory.surely <= room]
    assert best.memory.surely <= room and len(fitting) < len(every)
    assert best.speed >= 0.99 * max(choice.speed for choice in fitting)
    files = {choice.file.name for choice in every}
    assert files == {"zero1.json", "zero2.json", "zero3.json", "zero3_offload.json"}
    assert {choice.setup.micro for choice in every} == {1, 2}  # 16 rows on 8 GPUs
    assert {c.setup.stage for c in every if c.setup.compiled} == {1, 2}  # the trainer refuses others
    rows = cells(capsys.readouterr().out)
    assert list(rows) == ["1", "2", "3", "recipe"]
    speeds = [int(rows[name][5].replace(",", "")) for name in "123"]
    assert speeds[0] >= speeds[1] >= speeds[2] and speeds[0] == pytest.approx(best.speed, abs=1)


def test_what_is_refused_before_or_after_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing that fits, a batch that does not divide, a target that is there, no such GPU."""
    existing = tmp_path / "mine.yaml"
    existing.write_text("mine")
    for code, argv in (
        (ExitCode.FAILURE, ["--gpus", "1xRTX3090-24G", "--best", "data.sequence_len=65536"]),
        (ExitCode.FAILURE, ["--gpus", "1xA100-80G"]),
        (ExitCode.MISTAKE, ["--gpus", "3xA100-80G", "--best"]),
        (ExitCode.MISTAKE, ["--gpus", "8xB300"]),
        (ExitCode.MISTAKE, [*EIGHT, "--write", "x.yaml"]),
        (ExitCode.MISTAKE, [*EIGHT, "--best", "--write", str(existing)]),
    ):
        assert main(["plan", str(LLAMA), *argv]) == code
        assert ("NO; " in capsys.readouterr().out) == (argv == ["--gpus", "1xA100-80G"])
    assert existing.read_text() == "mine"


def test_what_is_written_is_a_recipe_with_the_same_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fast.yaml"
    argv = ["plan", str(LLAMA), *EIGHT, "train.global_batch_size=64", "--best", "--write", str(file)]
    assert main([*argv, "objective.name=mle"]) == ExitCode.DONE
    name, checkpointing, compiled, micro, memory, speed, *_ = cells(capsys.readouterr().out)["1"]
    config = load_config(file, [])
    assert (config.train.global_batch_size, config.objective.name) == (64, "mle")
    assert (str(config.deepspeed), config.train.micro_batch_size) == (f"ds_configs/{name}", int(micro))
    assert str(config.model.activation_checkpointing).lower() == checkpointing
    assert str(config.model.compile).lower() == compiled
    assert yaml.safe_load(file.read_text())["extends"].endswith("launch/recipes/llama-7b-wikitext103.yaml")
    assert main(["plan", str(file), *EIGHT]) == ExitCode.DONE
    plan = {name: row[0] for name, row in cells(capsys.readouterr().out).items() if row}
    assert plan["memory per GPU"].startswith(f"{memory} GiB") and plan["fits"].startswith("yes")
    assert f"{speed} per GPU" in plan["speed"]
    # an override that replaces a section: in a file that extends another it would only complete it
    recipe = tmp_path / "base.yaml"
    recipe.write_text(f"extends: {LLAMA}\nobjective: {{ z_loss: 0.1 }}\n")
    replacing = ["plan", str(recipe), "objective={name: mle}", *EIGHT, "--best"]
    assert main([*replacing, "--write", str(tmp_path / "none.yaml")]) == ExitCode.MISTAKE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.yaml", "fast.yaml"]


@pytest.mark.parametrize("path", LLAMAS, ids=lambda path: path.stem)
def test_shipped_llama_recipes_follow_the_advice(path: Path) -> None:
    """On the GPUs of their headers, of 80 GB, they surely fit and are the fastest of the uncompiled."""
    text = path.read_text(encoding="utf-8")
    gpus = int(re.search(r"--num_gpus (\d+)", text)[1])  # type: ignore[index]
    config = load_config(path, [])
    room = 79.2 * footprint.USABLE * GIB
    fitting = [c for c in every_choice(config, f"{gpus}xA100-80G") if c.memory.surely <= room]
    mine = next(
        choice
        for choice in fitting
        if choice.file == config.deepspeed
        and choice.setup.checkpointing == config.model.activation_checkpointing
        and not choice.setup.compiled
        and choice.setup.micro == min(config.train.micro_batch_size, config.train.global_batch_size // gpus)
    )
    assert mine.speed > 0.97 * max(choice.speed for choice in fitting if not choice.setup.compiled)
    for number, size, overrides in re.findall(r"# On (\d) of (40|80) GB set (.+)\.\n", text):
        argv = ["plan", str(path), "--gpus", f"{number}xA100-{size}G", *overrides.split()]
        assert main(argv) == ExitCode.DONE, argv
