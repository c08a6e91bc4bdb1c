"""What a run directory's second start must have in common with its first."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from emo.common.errors import UserError
from emo.common.recipe import marked
from emo.pipeline import checkpoint, identity
from emo.pipeline.config import FREE, RunConfig, dump_config, load_config
from emo.pipeline.order import Holding
from emo.pipeline.ranks import World
from emo.pipeline.run_dir import CONFIG, STATE, describe, list_files, partial_directory
from tests.conftest import REPO

DATA = {"data": "f" * 64}  # an identity
RECIPE = REPO / "launch/recipes/quickstart-pretrain.yaml"


def config(run_dir: Path, *overrides: str) -> RunConfig:
    return load_config(RECIPE, [f"output_dir={run_dir}", *overrides])


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (["objective.params.ratio_cap=3"], []),
        ([], ["objective.params.ratio_cap=3"]),
        (["model.lora.r=8"], []),
        ([], ["model.lora.r=8"]),
        (["model.architecture.rope_theta=5000"], []),
        (["train.max_grad_norm=0.5"], []),
        (["train.num_train_epochs=null", "train.max_steps=9"], []),
    ],
)
def test_keys_changed_added_or_removed_are_refused(tmp_path: Path, first: list[str], then: list[str]) -> None:
    identity.claim(config(tmp_path, *first), DATA)
    before = (tmp_path / CONFIG).read_text()
    with pytest.raises(UserError) as error:
        identity.compare(config(tmp_path, *then), DATA)
    assert error.value.code == "changed-key"
    assert (tmp_path / CONFIG).read_text() == before


MIXED = "train.mixture={shares: {home: 0.5, abroad: 0.5}}"
OTHER = "train.mixture={shares: {home: 0.9, abroad: 0.1}, by: rows}"


def claim_mixed(run_dir: Path) -> None:
    """A run that was trained with MIXED, and has a checkpoint of step 3."""
    identity.claim(config(run_dir, MIXED), DATA)
    written(run_dir, STATE_NOW)


def test_a_mixture_changes_by_its_key_alone(tmp_path: Path) -> None:
    claim_mixed(tmp_path)
    before = (tmp_path / CONFIG).read_text()
    identity.compare(config(tmp_path, MIXED), DATA)
    for overrides, code in (
        ([OTHER], "changed-mixture"),
        (["train.mixture_from=3"], "mixture-gone"),
        (
            [OTHER, "train.mixture_from=3", "train.learning_rate=1"],
            "changed-key",
        ),  # the key allows nothing else
    ):
        with pytest.raises(UserError) as error:
            identity.compare(config(tmp_path, *overrides), DATA)
        assert error.value.code == code
    assert (tmp_path / CONFIG).read_text() == before


def test_a_mixture_holds_from_the_checkpoint_on(tmp_path: Path) -> None:
    """Where the run goes on from another step, nothing is trained with it."""
    claim_mixed(tmp_path)
    for start, step in ((2, 3), (3, 0)):
        changed = config(tmp_path, OTHER, f"train.mixture_from={start}")
        identity.compare(changed, DATA)
        with pytest.raises(UserError) as error:
            identity.check_mixture(changed, step)
        assert error.value.code == "mixture-step"
    identity.check_mixture(config(tmp_path, OTHER, "train.mixture_from=3"), 3)
    identity.check_mixture(config(tmp_path, MIXED, "train.mixture_from=2"), 3)  # nothing has changed


def test_a_changed_mixture_is_recorded_and_needs_its_key_once(tmp_path: Path) -> None:
    claim_mixed(tmp_path)
    first, other = config(tmp_path, MIXED), config(tmp_path, OTHER, "train.mixture_from=3")
    holdings = [Holding(0, first.train.mixture), Holding(3, other.train.mixture)]
    assert identity.mixtures(other) == holdings
    identity.claim(other, DATA)
    for again in (other, config(tmp_path, OTHER)):
        identity.compare(again, DATA)
        assert identity.mixtures(again) == holdings
        identity.check_mixture(again, 0)  # an older checkpoint is read again: the record says what held there
    back = config(tmp_path, MIXED, "train.mixture_from=5")
    assert identity.mixtures(back) == [*holdings, Holding(5, first.train.mixture)]
    assert identity.mixtures(config(tmp_path, MIXED, "train.mixture_from=3")) == holdings[:1]
    third = config(tmp_path, "train.mixture={temperature: 2}", "train.mixture_from=0")
    assert identity.mixtures(third) == [Holding(0, third.train.mixture)]


def test_a_mixture_may_begin_in_a_run_without_one(tmp_path: Path) -> None:
    identity.claim(config(tmp_path), DATA)
    later = config(tmp_path, MIXED, "train.mixture_from=3")
    identity.compare(later, DATA)
    assert identity.mixtures(later) == [Holding(0, None), Holding(3, later.train.mixture)]


def test_other_data_are_refused(tmp_path: Path) -> None:
    """A hash is named by its beginning."""
    identity.claim(config(tmp_path), DATA)
    with pytest.raises(UserError) as error:
        identity.compare(config(tmp_path), {"data": "e" * 64})
    assert error.value.code == "changed-data"
    assert "e" * 12 in str(error.value) and "e" * 13 not in str(error.value)


def test_free_fields_may_change(tmp_path: Path) -> None:
    identity.claim(config(tmp_path), DATA)
    changed = ["train.logging_steps=3", "train.project=x", "train.profile=[1,2]", "data.root=/elsewhere"]
    identity.compare(config(tmp_path, *changed, "model.attn_implementation=eager"), DATA)


def test_what_is_free_changes_nothing_that_is_learned() -> None:
    """A new field is not free unless it says so."""
    free = marked(RunConfig, FREE)
    assert {"output_dir", "data", "train.micro_batch_size", "train.save_steps", "train.copy_to"} <= free
    for key in (
        "train.learning_rate",
        "train.global_batch_size",
        "train.seed",
        "train.max_steps",
        "objective.params",
        "model.dtype",
    ):
        assert key not in free


def test_a_damaged_or_missing_config_is_refused(tmp_path: Path) -> None:
    identity.compare(config(tmp_path), DATA)  # a new directory
    for content in (b"{", b"\xff\xfe", b"- 3"):
        (tmp_path / CONFIG).write_bytes(content)
        with pytest.raises(UserError) as error:
            identity.compare(config(tmp_path), DATA)
        assert error.value.code == "config-unreadable"
    (tmp_path / CONFIG).unlink()
    written(tmp_path, {})
    with pytest.raises(UserError) as error:
        identity.compare(config(tmp_path), DATA)
    assert error.value.code == "config-missing"


def test_first_weights_of_a_launch_that_failed_are_not_taken(tmp_path: Path) -> None:
    """A mistake that ends a launch before its first step must not decide what the next one trains."""
    (tmp_path / "initial").mkdir()
    identity.clear_unstarted(config(tmp_path))
    assert not (tmp_path / "initial").exists()
    (tmp_path / "initial").mkdir()
    (tmp_path / CONFIG).write_text(dump_config(config(tmp_path)))
    identity.clear_unstarted(config(tmp_path))
    assert (tmp_path / "initial").exists()


def written(run_dir: Path, state: dict) -> Path:
    partial = partial_directory(run_dir, 3)
    partial.mkdir(parents=True)
    (partial / STATE).write_text(json.dumps(state))
    checkpoint.write_complete(partial, describe(partial, list_files(partial)))
    return checkpoint.publish(run_dir, 3)


STATE_NOW = {
    "step": 3,
    "tokens": 9,
    "ranks": 1,
    "groups": [4, 2],
    "frozen": 0,
    "identity": {"data": "f", "cost": None},
    "progress": {},
}


def test_a_checkpoint_of_another_layout_is_refused(tmp_path: Path) -> None:
    saved = checkpoint.read_saved(written(tmp_path, STATE_NOW))
    checkpoint.check_engine(saved, SimpleNamespace(groups=[4, 2], frozen=0))  # type: ignore[arg-type]
    for engine, code in (
        (SimpleNamespace(groups=[6], frozen=0), "changed-groups"),
        (SimpleNamespace(groups=[4, 2], frozen=1), "changed-base"),
    ):
        with pytest.raises(UserError) as error:
            checkpoint.check_engine(saved, engine)  # type: ignore[arg-type]
        assert error.value.code == code
    with pytest.raises(UserError) as error:
        checkpoint.read_saved(written(tmp_path, {k: v for k, v in STATE_NOW.items() if k != "groups"}))
    assert error.value.code == "other-version"


def test_the_state_of_muon_needs_as_many_ranks(tmp_path: Path) -> None:
    saved = checkpoint.read_saved(written(tmp_path, STATE_NOW))
    world = World(0, saved.ranks + 1, torch.device("cpu"))
    muon = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "Muon"}}
    with pytest.raises(UserError) as error:
        checkpoint.loadable(saved, muon, world)
    assert error.value.code == "muon-ranks"
    assert checkpoint.loadable(saved, muon, world._replace(ranks=saved.ranks)) == (saved.directory, False)
