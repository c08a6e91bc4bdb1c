"""Runs measure KL(base, model) on validation sets, with the base in memory or stored predictions."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from emo.common.causal_lm import IGNORE
from emo.common.errors import ExitCode
from emo.data_prep.shards.format import TokenDataset
from emo.pipeline.control.run_dir import EXPORT, VALIDATION, read_metrics
from tests.helpers import launching
from tests.helpers.families import tiny_llama

KEY = "validation_kl_from_base"
ROWS = 7  # train.eval_rows, which two ranks cannot share evenly
STORED = ("train.kl_from_base=24",)
LORA = ('model.lora={"r": 4, "dropout": 0.1}', "train.learning_rate=0.01")
ZERO1 = "deepspeed=ds_configs/zero1.json"
ANCHOR = ('objective={"sum": [{"name": "mle"}, {"name": "kl", "teacher": "base", "weight": 0.3}]}',)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recipe with prepared data and a start model."""
    directory = tmp_path_factory.mktemp("kl")
    options = {"max_steps": 4, "save_steps": 2, "eval_steps": 2, "logging_steps": 1, "eval_rows": ROWS}
    path = launching.tiny_recipe(directory, **options)
    tree = yaml.safe_load(path.read_text())
    shape = tree["model"]["architecture"]
    del shape["model_type"]
    torch.manual_seed(0)
    tiny_llama(**shape, initializer_range=0.2).save_pretrained(directory / "model")
    tree["model"] = {"path": str(directory / "model"), "dtype": "float32"}
    path.write_text(yaml.safe_dump(tree))
    return path


def measured(run_dir: Path) -> dict[int, float]:
    """Return the KL from the base by step."""
    return {r["step"]: r[KEY] for r in read_metrics(run_dir) if KEY in r}


def train(recipe: Path, name: str, *options: str, ranks: int = 1) -> dict[int, float]:
    """Train under ZeRO-1, or ZeRO-3 on two ranks, and return the KL from the base by step."""
    arguments = (str(recipe), f"output_dir={recipe.parent / name}", *options)
    if ranks == 1:
        done = launching.run_alone(*arguments, ZERO1)
    else:
        done = launching.run_ranks("launch/continual.sh", *arguments)
    assert done.returncode == ExitCode.DONE, done.stdout
    return measured(recipe.parent / name)


@torch.no_grad()
def dense_kl(recipe: Path, name: str, k: int | None = None) -> float:
    """Return the mean KL from the base to an export in float64, over all tokens or the top k and the rest."""
    data = TokenDataset(recipe.parent / "data" / VALIDATION)
    base, model = (
        AutoModelForCausalLM.from_pretrained(recipe.parent / path, dtype=torch.float64)
        for path in ("model", f"{name}/{EXPORT}")
    )
    values = []
    for ids, labels, positions in zip(*data.batch(np.arange(ROWS)).values(), strict=True):
        starts = [*np.flatnonzero(positions == 0), len(ids)]
        for a, b in pairwise(starts):
            used = torch.from_numpy(labels[a:b] != IGNORE)
            p, q = (m(torch.from_numpy(ids[None, a:b])).logits[0, used].softmax(-1) for m in (base, model))
            if k is not None:
                top = p.topk(k).indices
                listed = [x.gather(1, top) for x in (p, q)]
                p, q = (torch.cat((x, 1 - x.sum(1, keepdim=True)), 1) for x in listed)
            values.append((p * (p / q).log()).sum(1))
    return float(torch.cat(values).mean())


@pytest.fixture(scope="module")
def stored(recipe: Path) -> dict[int, float]:
    return train(recipe, "stored", *STORED)


def test_stored_predictions_give_their_divergence(recipe: Path, stored: dict[int, float]) -> None:
    """The KL from stored predictions is a lower bound of the exact KL."""
    assert list(stored) == [0, 2, 4] and stored[0] == 0 < stored[2] < stored[4]
    assert stored[4] == pytest.approx(dense_kl(recipe, "stored", 24), abs=1e-6)
    assert stored[4] < dense_kl(recipe, "stored")


def test_two_ranks_that_were_killed_measure_the_same(recipe: Path, stored: dict[int, float]) -> None:
    """Two ranks under ZeRO-3 store the predictions. Two ranks and one rank read them after a kill."""
    run_dir = recipe.parent / "killed"
    launching.kill_ranks(run_dir, 3, "launch/continual.sh", str(recipe), f"output_dir={run_dir}", *STORED)
    files = sorted(path.name for path in (run_dir / VALIDATION / "validation").glob("base-*"))
    assert files == ["base-000000-000004.npy", "base-000004-000007.npy"]
    assert train(recipe, "killed", *STORED, ranks=2) == pytest.approx(stored, rel=1e-4)
    shutil.rmtree(run_dir / EXPORT)
    shutil.rmtree(run_dir / "step-000004")
    done = launching.run_alone(str(recipe), f"output_dir={run_dir}", *STORED)
    assert done.returncode == ExitCode.DONE, done.stdout
    assert measured(run_dir) == pytest.approx(stored, rel=1e-4)
    assert sorted(path.name for path in (run_dir / VALIDATION / "validation").glob("base-*")) == files


def test_a_run_without_its_stored_predictions_resumes(recipe: Path, stored: dict[int, float]) -> None:
    """If rows were not stored or a file is damaged, the run warns and does not measure the KL."""
    for name, option in (("more", ("train.eval_rows=8",)), ("damaged", ())):
        run_dir = recipe.parent / name
        shutil.copytree(recipe.parent / "stored", run_dir)
        shutil.rmtree(run_dir / EXPORT)
        shutil.rmtree(run_dir / "step-000004")
        if name == "damaged":
            (file,) = (run_dir / VALIDATION / "validation").glob("base-*.npy")
            file.write_bytes(file.read_bytes()[:-8])
        done = launching.run_alone(str(recipe), f"output_dir={run_dir}", ZERO1, *STORED, *option)
        assert done.returncode == ExitCode.DONE and "kl_from_base is not measured" in done.stdout, done.stdout
        assert list(measured(run_dir)) == [0, 2]


def test_adapters_are_measured_exactly_by_default(recipe: Path) -> None:
    """The run stores no predictions, and train.kl_from_base=0 turns the measurement off."""
    kl = train(recipe, "adapters", *LORA)
    assert list(kl) == [0, 2, 4] and kl[0] == 0 < kl[2] < kl[4]
    assert kl[4] == pytest.approx(dense_kl(recipe, "adapters"), abs=1e-6)
    assert not list((recipe.parent / "adapters" / VALIDATION).rglob("base-*"))
    assert train(recipe, "off", *LORA, "train.kl_from_base=0", "train.max_steps=2") == {}


def test_a_teacher_that_is_the_base_measures_it_exactly(recipe: Path) -> None:
    kl = train(recipe, "anchored", *ANCHOR, ranks=2)
    assert kl[4] == pytest.approx(dense_kl(recipe, "anchored"), abs=1e-6)
    records = [r for r in read_metrics(recipe.parent / "anchored") if KEY in r]
    assert all(r["validation_divergence"] == pytest.approx(r[KEY], abs=1e-6) for r in records)
