"""Dry runs: every recipe plans without network or data, and mistakes stop it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from data_prep.config import load_data_config
from pipeline.config import load_config
from pipeline.order import MixedOrder
from pipeline.planning.checks import check
from pipeline.planning.plan import domain_rows, memory_line, model_sizes, print_plan, remarks, repeated
from tests.conftest import REPO
from tests.helpers import corpus

QUICKSTART = REPO / "launch/recipes/quickstart-pretrain.yaml"
RECIPES = sorted((REPO / "launch" / "recipes").glob("*.yaml"))
OFFLINE = [p for p in RECIPES if not p.stem.startswith("stories260k")]  # those need the checkpoint itself


@pytest.mark.parametrize("path", OFFLINE, ids=lambda p: p.stem)
def test_every_recipe_plans(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(path, [f"run_dir={tmp_path / 'run'}"])  # the recipe's own may hold a run
    if config.model.architecture is None:  # continues an export that `make quickstart` writes
        config = config.model_copy(
            update={"model": load_config(REPO / "launch/recipes/quickstart-pretrain.yaml", []).model}
        )
    print_plan(config, ranks=4)
    printed = capsys.readouterr().out
    assert "rows per step" in printed
    assert "states per rank" in printed


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-7b-wikitext103", 6_738_415_616),
        ("llama-13b-wikitext103", 13_015_864_320),
        ("gpt2-wikitext2", 124_439_808),
        ("opt-125m-wikitext2", 125_239_296),
    ],
)
def test_published_parameter_counts(name: str, parameters: int) -> None:
    config = load_config(REPO / "launch" / "recipes" / f"{name}.yaml", [])
    sizes = model_sizes(config)
    assert (sizes.parameters, sizes.trainable) == (parameters, parameters)


def test_lora_trains_only_the_adapters() -> None:
    config = load_config(REPO / "launch/recipes/llama-7b-wikitext103-lora.yaml", [])
    sizes = model_sizes(config)
    total, trainable = sizes.parameters, sizes.trainable
    # r (in + out) for q, k, v, o of 4096 x 4096 and gate, up, down of 4096 x 11008, in 32 layers
    assert trainable == 32 * 32 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    assert total == 6_738_415_616 + trainable


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batch=6", "does not divide over 4 ranks"),
        ("objective.name=emoo", "emo"),
        ("deepspeed=ds_configs/zero4.json", "zero4.json is not a file"),
        ("model.architecture.model_type=lama", "model.architecture"),
    ],
)
def test_a_mistake_stops_the_plan(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        print_plan(load_config(REPO / "launch/recipes/llama-7b-wikitext103.yaml", [override]), ranks=4)


MIXTURE = "{shares: {home: 0.25, abroad: {from: 0.75, to: 0.25, steps: 20}}, max_epochs: {abroad: 2}}"


@pytest.fixture(scope="module")
def two_domains(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a small recipe whose data, prepared, are of two domains."""
    directory = tmp_path_factory.mktemp("domains")
    limits = {"home": 30, "abroad": 60}
    sources = [{"embedded": f"world-{name}", "limit": n, "domain": name} for name, n in limits.items()]
    overrides = [
        f"run_dir={directory}/run",
        f"data.dir={directory}/data",
        "data.block=32",
        "train.epochs=null",
    ]
    overrides += [
        f"data.sources={json.dumps(sources)}",
        "data.train_tokenizer=384",
        "train.steps=200",
        "train.epochs=null",
    ]
    overrides.append("data.validation_fraction=0")
    corpus.run(load_data_config(QUICKSTART, overrides))
    return overrides


def test_a_plan_says_what_each_domain_gets(
    two_domains: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ready = check(load_config(QUICKSTART, [*two_domains, f"train.mixture={MIXTURE}"]), 1, local=False)
    assert ready.data is not None and isinstance(ready.order, MixedOrder) and ready.steps is not None
    rows = dict(domain_rows(load_config(QUICKSTART, [*two_domains, f"train.mixture={MIXTURE}"]), ready))
    assert rows["mixture"].startswith(
        "0.25 home + (0.75 to 0.25) abroad, by tokens; at most 2 epochs of abroad"
    )
    assert rows["domain home"].startswith("25.0% to 50.0% of tokens; ")
    assert rows["domain home"].endswith("epochs, more than 4")
    taken = np.concatenate([ready.order.step_rows(step) for step in range(ready.steps)])
    for place, portion in enumerate(ready.order.portions(ready.steps)):
        mine = taken[ready.data.domain[taken] == place]
        assert portion.rows == len(mine)
        assert portion.tokens == pytest.approx(ready.data.valid[mine].sum(), rel=0.1)
    assert [p.epochs for p in ready.order.portions(ready.steps)][1] <= 2
    warned = repeated(ready)
    assert len(warned) == 1 and "domain home is gone through" in warned[0] and "max_epochs" in warned[0]
    print_plan(load_config(QUICKSTART, [*two_domains, f"train.mixture={MIXTURE}"]), ranks=1)
    assert "domain home" in capsys.readouterr().out


def test_a_plan_without_a_mixture_says_what_is_there(two_domains: list[str]) -> None:
    config = load_config(QUICKSTART, two_domains)
    ready = check(config, 1, local=False)
    rows = domain_rows(config, ready)
    assert [name for name, _ in rows] == ["domain home", "domain abroad"]
    shares = [float(text.split("%")[0]) for _, text in rows]
    assert sum(shares) == pytest.approx(100, abs=0.2) and repeated(ready) == []


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ("{shares: {home: 1}}", "says nothing of abroad"),
        ("{shares: {home: 1, abroad: 1, sea: 1}}", "names sea, of which the data hold no rows"),
        ("{temperature: 1, max_epochs: {home: 1, abroad: 1}}", r"max_epochs after \d+ steps; raise them"),
        ("{}", "give exactly one of shares and temperature"),
        ("{temperature: 2, shares: {home: 1}}", "give exactly one of shares and temperature"),
        ("{shares: {home: -1, abroad: 1}}", "the share of home must not be negative"),
        ("{shares: {home: {from: 1, to: 0, steps: 9}}}", "the shares are all 0 in the end"),
        ("{shares: {home: {from: 1, to: 0}}}", "steps: Field required"),
        ("{temperature: 2, max_epochs: {home: 0}}", "max_epochs of home must be above 0"),
        ("{temperature: 2, by: words}", "by: .*'tokens' or 'rows'"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(two_domains: list[str], mixture: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(load_config(QUICKSTART, [*two_domains, f"train.mixture={mixture}"]), 1, local=False)


def test_a_misspelt_domain_is_refused_before_preparation(two_domains: list[str], tmp_path: Path) -> None:
    mixture = "train.mixture={shares: {home: 1, abroda: 1}}"
    with pytest.raises(UserError, match=r"names abroda, .*; did you mean abroad"):
        check(load_config(QUICKSTART, [*two_domains, f"data.dir={tmp_path}", mixture]), 1, local=False)


@pytest.mark.parametrize(
    ("zero", "override", "message"),
    [
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, "train.clip=1", "optimizer on NVMe"),
        ({"stage": 3}, "model.compile=true", "does not help under ZeRO-3"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, zero: dict, override: str, message: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": zero}))
    overrides = [f"deepspeed={path}", override]
    config = load_config(REPO / "launch/recipes/llama-7b-wikitext103.yaml", overrides)
    with pytest.raises(UserError, match=message):
        print_plan(config, ranks=4)


def test_a_deepspeed_file_must_not_own_what_the_recipe_owns(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 4, "zero_optimization": {"stage": 2}}')
    config = load_config(REPO / "launch/recipes/llama-7b-wikitext103.yaml", [f"deepspeed={path}"])
    with pytest.raises(UserError, match=r"sets train_batch_size; remove it and set train.batch"):
        print_plan(config, ranks=4)


def test_what_a_user_may_not_expect_is_remarked(two_domains: list[str]) -> None:
    given = [*two_domains, "train.steps=null", "train.epochs=1", "model.dtype=bfloat16"]
    long = load_config(QUICKSTART, [*given, "train.batch=1", "train.micro_batch=1"])
    assert remarks(long, check(long, 1, local=False), on_cpu=False) == []
    rows = len(check(long, 1, local=False).data or ())
    short = load_config(QUICKSTART, [*given, f"train.batch={rows}", "train.micro_batch=1"])
    slow, few = remarks(short, check(short, 1, local=False), on_cpu=True)
    assert "model.dtype=float32" in slow
    assert (
        few.startswith(f"only 1 step: 1 epoch of {rows} packed rows of ") and f", {rows} rows per step" in few
    )


def test_little_memory_is_told_in_mib() -> None:
    assert memory_line({"weights": 2.0 * 2**20, "optimizer": 0.0}, 2) == "2.0 MiB = weights 2.0"
    assert memory_line({"weights": 2.0 * 2**30}, 2) == "2.00 GiB = weights 2.00"
    assert memory_line({"weights": 0.0}, 2) == "0.0 MiB"
