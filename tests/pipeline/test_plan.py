"""Dry runs: every recipe plans without network or data, and mistakes stop it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from emo.common.errors import UserError
from emo.data_prep.config import load_data_config
from emo.pipeline.config import load_config
from emo.pipeline.order import MixedOrder
from emo.pipeline.planning.checks import check
from emo.pipeline.planning.plan import domain_rows, model_sizes, print_plan, remarks
from tests.common.test_shipped_recipes import ALONE
from tests.conftest import REPO
from tests.helpers import corpus

QUICKSTART = REPO / "launch/recipes/quickstart-pretrain.yaml"
RECIPES = sorted((REPO / "launch" / "recipes").glob("*.yaml"))
# Those with commands of their own are planned by them (tests/common/test_shipped_recipes.py), and the
# checkpoint that stories260k continues must be there.
OTHERS = [p for p in RECIPES if p not in ALONE and not p.stem.startswith("stories260k")]


@pytest.mark.parametrize("path", OTHERS, ids=lambda p: p.stem)
def test_every_recipe_plans(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(path, [f"output_dir={tmp_path / 'run'}"])  # the recipe's own may hold a run
    if config.model.architecture is None:  # continues an export that `make quickstart` writes
        config = config.model_copy(update={"model": load_config(QUICKSTART, []).model})
    print_plan(config, ranks=4)
    printed = capsys.readouterr().out
    assert "rows per step" in printed and "states per rank" in printed


def test_published_parameter_counts() -> None:
    for name, parameters in {
        "llama-7b-wikitext103": 6_738_415_616,
        "llama-13b-wikitext103": 13_015_864_320,
        "gpt2-wikitext2": 124_439_808,
        "opt-125m-wikitext2": 125_239_296,
    }.items():
        sizes = model_sizes(load_config(REPO / "launch" / "recipes" / f"{name}.yaml", []))
        assert (sizes.parameters, sizes.trainable) == (parameters, parameters)
    sizes = model_sizes(load_config(REPO / "launch/recipes/llama-7b-wikitext103-lora.yaml", []))
    # r (in + out) for q, k, v, o of 4096 x 4096 and gate, up, down of 4096 x 11008, in 32 layers
    assert sizes.trainable == 32 * 32 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    assert sizes.parameters == 6_738_415_616 + sizes.trainable


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


def test_a_plan_says_what_each_domain_gets(
    two_domains: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(QUICKSTART, [*two_domains, f"train.mixture={MIXTURE}"])
    ready = check(config, 1, local=False)
    assert ready.data is not None and isinstance(ready.order, MixedOrder) and ready.steps is not None
    rows = dict(domain_rows(config, ready))
    assert rows["mixture"].startswith(
        "0.25 home + (0.75 to 0.25) abroad, by tokens; at most 2 epochs of abroad"
    )
    assert rows["domain home"].startswith("25.0% to 50.0% of tokens; ")
    assert rows["domain home"].endswith("epochs, more than 4")
    taken = np.concatenate([ready.order.step_rows(step) for step in range(ready.steps)])
    for domain, portion in enumerate(ready.order.portions(ready.steps)):
        of_domain = taken[ready.data.domain[taken] == domain]
        assert portion.rows == len(of_domain)
        assert portion.tokens == pytest.approx(ready.data.valid[of_domain].sum(), rel=0.1)
        assert portion.name == "home" or portion.epochs <= 2
    (warning,) = remarks(config, ready, on_cpu=False)
    assert "domain home is gone through" in warning and "max_epochs" in warning
    print_plan(config, ranks=1)
    assert "domain home" in capsys.readouterr().out


def test_a_plan_without_a_mixture_says_what_is_there(two_domains: list[str]) -> None:
    config = load_config(QUICKSTART, two_domains)
    ready = check(config, 1, local=False)
    rows = domain_rows(config, ready)
    assert [name for name, _ in rows] == ["domain home", "domain abroad"]
    shares = [float(text.split("%")[0]) for _, text in rows]
    assert sum(shares) == pytest.approx(100, abs=0.2) and remarks(config, ready, on_cpu=False) == []


@pytest.mark.parametrize(
    "mixture",
    [
        "{shares: {home: 1}}",
        "{shares: {home: 1, abroad: 1, sea: 1}}",
        "{temperature: 1, max_epochs: {home: 1, abroad: 1}}",
        "{}",
        "{temperature: 2, shares: {home: 1}}",
        "{shares: {home: -1, abroad: 1}}",
        "{shares: {home: {from: 1, to: 0, steps: 9}}}",
        "{shares: {home: {from: 1, to: 0}}}",
        "{temperature: 2, max_epochs: {home: 0}}",
        "{temperature: 2, by: words}",
    ],
)
def test_a_mixture_that_cannot_be_is_refused(two_domains: list[str], mixture: str) -> None:
    with pytest.raises(UserError, match="mixture"):
        check(load_config(QUICKSTART, [*two_domains, f"train.mixture={mixture}"]), 1, local=False)


def test_a_misspelt_domain_is_refused_before_preparation(two_domains: list[str], tmp_path: Path) -> None:
    mixture = "train.mixture={shares: {home: 1, abroda: 1}}"
    with pytest.raises(UserError) as error:
        check(load_config(QUICKSTART, [*two_domains, f"data.dir={tmp_path}", mixture]), 1, local=False)
    assert error.value.code == "mixture-domains"


def test_what_a_user_may_not_expect_is_remarked(two_domains: list[str]) -> None:
    settings = [*two_domains, "train.max_steps=null", "train.num_train_epochs=1", "model.dtype=bfloat16"]
    long = load_config(QUICKSTART, [*settings, "train.global_batch_size=1", "train.micro_batch_size=1"])
    ready = check(long, 1, local=False)
    assert remarks(long, ready, on_cpu=False) == []
    rows = len(ready.data or ())
    short = load_config(
        QUICKSTART, [*settings, f"train.global_batch_size={rows}", "train.micro_batch_size=1"]
    )
    slow, few = remarks(short, check(short, 1, local=False), on_cpu=True)
    assert "model.dtype=float32" in slow
    assert few.startswith(f"only 1 step: 1 epoch of {rows} packed rows of ")
