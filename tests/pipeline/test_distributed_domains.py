"""Real runs on two domains: what a mixture asks for is trained, and told right on any number of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from emo.data_prep.shards import TokenDataset
from emo.pipeline.config import MixtureConfig
from emo.pipeline.order import Holding, MixedOrder
from emo.pipeline.run_dir import CONFIG, EXPORT, LAUNCHES, read_metrics, read_records, step_directory
from tests.helpers import launching

SHARES = {"home": {"from": 0.2, "to": 0.5, "steps": 4}, "abroad": 0.5}
LATER = {"home": 0.1, "abroad": 0.9}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = [{"embedded": f"world-{name}", "limit": 400, "domain": name} for name in ("home", "abroad")]
    directory = tmp_path_factory.mktemp("domains")
    return launching.tiny_recipe(
        directory,
        data={"sources": sources},
        mixture={"shares": SHARES},
        logging_steps=2,
        save_steps=3,
        save_total_limit=5,
    )


@pytest.fixture(scope="module")
def mixed(recipe: Path) -> Path:
    """The run directory of a finished run on two ranks, in several passes each."""
    run_dir = recipe.parent / "mixed"
    done = launching.run_ranks(2, str(recipe), f"output_dir={run_dir}")
    assert done.returncode == 0, done.stdout
    assert "domain home: 28.6% to 50.0% of tokens" in done.stdout
    return run_dir


def rows_of(recipe: Path, history: list[Holding], steps: range) -> tuple[np.ndarray, np.ndarray]:
    """Domain and supervised tokens of the rows that these steps take."""
    data = TokenDataset(recipe.parent / "data" / "train")
    order = MixedOrder(data.domain, data.valid, data.domains, 8, 42, history)
    rows = np.concatenate([order.step_rows(step) for step in steps])
    return data.domain[rows], data.valid[rows]


def first_mixture() -> Holding:
    return Holding(0, MixtureConfig.model_validate({"shares": SHARES}))


def trained(run_dir: Path) -> list[dict]:
    return [record for record in read_metrics(run_dir) if "lr" in record]


def test_the_parts_are_the_whole(recipe: Path, mixed: Path) -> None:
    """Tokens are those of the order; losses and NLLs of the domains add up to those of the step."""
    before = dict.fromkeys(("home", "abroad"), 0)
    for index, record in enumerate(trained(mixed)):
        domain, tokens = rows_of(recipe, [first_mixture()], range(2 * index + 2))
        parts = record["domains"]
        assert [parts[name]["tokens"] for name in before] == [tokens[domain == d].sum() for d in (0, 1)]
        counts = {name: part["tokens"] - before[name] for name, part in parts.items()}
        for key in ("nll", "loss"):
            whole = sum(counts[name] * part[key] for name, part in parts.items()) / sum(counts.values())
            assert whole == pytest.approx(record[key], rel=1e-5)
        before = {name: part["tokens"] for name, part in parts.items()}


def test_a_mixture_changes_at_a_resume(recipe: Path, mixed: Path) -> None:
    """From the checkpoint of step 3: by its key alone, recorded, and without a row that comes early."""
    run_dir = recipe.parent / "changed"
    shutil.copytree(mixed, run_dir)
    shutil.rmtree(run_dir / EXPORT)
    for step in (6, 8):
        shutil.rmtree(step_directory(run_dir, step))
    arguments = (str(recipe), f"output_dir={run_dir}", f"train.mixture={json.dumps({'shares': LATER})}")
    done = launching.run_ranks(2, *arguments, "train.mixture_from=3")
    assert done.returncode == 0, done.stdout
    history = [first_mixture(), Holding(3, MixtureConfig.model_validate({"shares": LATER}))]
    domain, tokens = rows_of(recipe, history, range(8))
    last = trained(run_dir)[-1]["domains"]
    assert [last[name]["tokens"] for name in ("home", "abroad")] == [
        tokens[domain == d].sum() for d in (0, 1)
    ]
    assert last != trained(mixed)[-1]["domains"]
    assert trained(run_dir)[0] == trained(mixed)[0]
    written = yaml.safe_load((run_dir / CONFIG).read_text())["mixtures"]
    assert [entry["step"] for entry in written] == [0, 3] and written[1]["mixture"]["shares"] == LATER
    begun = [line for line in read_records(run_dir / LAUNCHES)[0] if line["event"] == "begin"]
    assert begun[-1]["mixtures"][1] == {"step": 3, "mixture": "0.1 home + 0.9 abroad, by tokens"}
