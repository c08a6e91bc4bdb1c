"""What a run directory's second start must have in common with its first."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from common.errors import UserError
from common.recipe import marked
from pipeline import checkpoint, resume
from pipeline.config import FREE, RunConfig, dump_config, load_config
from pipeline.identity import check_same
from pipeline.loss.cost_files import load_cost
from pipeline.order import Holding
from pipeline.ranks import World
from pipeline.run_dir import CONFIG, STATE, describe, list_files, partial_directory
from tests.conftest import REPO

DATA = {"data": "f" * 64}  # an identity
RECIPE = REPO / "launch/recipes/quickstart-pretrain.yaml"


def config(run_dir: Path, *overrides: str) -> RunConfig:
    return load_config(RECIPE, [f"run_dir={run_dir}", *overrides])


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (
            ["objective.params.ratio_cap=3"],
            [],
            "params.ratio_cap=3.0, and .* no objective.params",
        ),
        (
            [],
            ["objective.params.ratio_cap=3"],
            "started with no objective.params.ratio_cap, and .*",
        ),
        (["model.lora.r=8"], [], "with model.lora.r=8, and the recipe now has no model.lora.r"),
        ([], ["model.lora.r=8"], "and the recipe now has model.lora.r=8"),
        (["model.architecture.rope_theta=5000"], [], "with model.architecture.rope_theta=5000, and"),
        (["train.clip=0.5"], [], r"with train.clip=0.5, and the recipe now has train.clip=1.0"),
        (["train.epochs=null", "train.steps=9"], [], "train.epochs=None"),
    ],
)
def test_keys_changed_added_or_removed_are_refused(
    tmp_path: Path, first: list[str], then: list[str], message: str
) -> None:
    """defects A8"""
    resume.claim(config(tmp_path, *first), DATA)
    before = (tmp_path / CONFIG).read_text()
    with pytest.raises(UserError, match=message):
        resume.compare(config(tmp_path, *then), DATA)
    assert (tmp_path / CONFIG).read_text() == before


def test_a_key_taken_out_of_the_file_is_seen_too(tmp_path: Path) -> None:
    """defects A8: both directions, whatever the reason."""
    resume.claim(config(tmp_path), DATA)
    tree = yaml.safe_load((tmp_path / CONFIG).read_text())
    del tree["train"]["lr"]
    tree["train"]["rate"] = 1.0
    (tmp_path / CONFIG).write_text(yaml.safe_dump(tree))
    with pytest.raises(UserError, match=r"no train\.lr, and the recipe now has train\.lr="):
        resume.compare(config(tmp_path), DATA)


MIXED = "train.mixture={shares: {home: 0.5, abroad: 0.5}}"
OTHER = "train.mixture={shares: {home: 0.9, abroad: 0.1}, by: rows}"


def claim_mixed(run_dir: Path) -> None:
    """A run that was trained with MIXED, and has a checkpoint of step 3."""
    resume.claim(config(run_dir, MIXED), DATA)
    written(run_dir, STATE_NOW)


def test_a_mixture_changes_by_its_key_alone(tmp_path: Path) -> None:
    claim_mixed(tmp_path)
    before = (tmp_path / CONFIG).read_text()
    resume.compare(config(tmp_path, MIXED), DATA)
    with pytest.raises(UserError, match=r"another train\.mixture; set train\.mixture_from=3 to"):
        resume.compare(config(tmp_path, OTHER), DATA)
    with pytest.raises(UserError, match=r"trained with a train\.mixture, and without one"):
        resume.compare(config(tmp_path, "train.mixture_from=3"), DATA)
    with pytest.raises(UserError, match=r"with train\.lr="):  # the key allows nothing else
        resume.compare(config(tmp_path, OTHER, "train.mixture_from=3", "train.lr=1"), DATA)
    assert (tmp_path / CONFIG).read_text() == before


def test_a_mixture_holds_from_the_checkpoint_on(tmp_path: Path) -> None:
    """Where that is another than was said, nothing is trained with it."""
    claim_mixed(tmp_path)
    saved = resume._read(tmp_path / "step-000003")
    for given, newest, named in ((2, saved, 3), (3, None, 0)):
        changed = config(tmp_path, OTHER, f"train.mixture_from={given}")
        resume.compare(changed, DATA)
        with pytest.raises(UserError, match=f"goes on from step {named}; set train.mixture_from={named}"):
            resume.check_mixture(changed, newest)
    resume.check_mixture(config(tmp_path, OTHER, "train.mixture_from=3"), saved)
    resume.check_mixture(config(tmp_path, MIXED, "train.mixture_from=2"), saved)  # nothing has changed


def test_a_changed_mixture_is_recorded_and_needs_its_key_once(tmp_path: Path) -> None:
    claim_mixed(tmp_path)
    first, other = config(tmp_path, MIXED), config(tmp_path, OTHER, "train.mixture_from=3")
    held = [Holding(0, first.train.mixture), Holding(3, other.train.mixture)]
    assert resume.mixtures(other) == held
    resume.claim(other, DATA)
    for again in (other, config(tmp_path, OTHER)):
        resume.compare(again, DATA)
        assert resume.mixtures(again) == held
        resume.check_mixture(
            again, None
        )  # an older checkpoint is read again: the record says what held there
    back = config(tmp_path, MIXED, "train.mixture_from=5")
    assert resume.mixtures(back) == [*held, Holding(5, first.train.mixture)]
    assert resume.mixtures(config(tmp_path, MIXED, "train.mixture_from=3")) == held[:1]
    third = config(tmp_path, "train.mixture={temperature: 2}", "train.mixture_from=0")
    assert resume.mixtures(third) == [Holding(0, third.train.mixture)]


def test_a_mixture_may_begin_in_a_run_without_one(tmp_path: Path) -> None:
    resume.claim(config(tmp_path), DATA)
    later = config(tmp_path, MIXED, "train.mixture_from=3")
    resume.compare(later, DATA)
    assert resume.mixtures(later) == [Holding(0, None), Holding(3, later.train.mixture)]


@pytest.mark.parametrize("damage", ["3", "[{step: x, mixture: null}]", "[{step: 0, mixture: {by: x}}]"])
def test_a_damaged_record_of_mixtures_is_one_line(tmp_path: Path, damage: str) -> None:
    claim_mixed(tmp_path)
    with (tmp_path / CONFIG).open("a") as file:
        file.write(f"mixtures: {damage}\n")
    resume.compare(config(tmp_path, MIXED), DATA)
    with pytest.raises(UserError, match=r"config\.yaml does not say which mixtures"):
        resume.mixtures(config(tmp_path, MIXED))


def test_other_data_are_refused(tmp_path: Path) -> None:
    resume.claim(config(tmp_path), DATA)
    with pytest.raises(UserError) as error:
        resume.compare(config(tmp_path), {"data": "e" * 64})
    assert error.value.code == "changed-data"


def test_free_fields_may_change(tmp_path: Path) -> None:
    resume.claim(config(tmp_path), DATA)
    changed = ["train.log_every=3", "train.wandb=x", "train.profile=[1,2]", "data.root=/elsewhere"]
    resume.compare(config(tmp_path, *changed, "model.attn_implementation=eager"), DATA)


def test_what_is_free_changes_nothing_that_is_learned() -> None:
    """A new field is not free unless it says so."""
    free = marked(RunConfig, FREE)
    assert {"run_dir", "data", "train.micro_batch", "train.save_every", "train.copy_to"} <= free
    for key in ("train.lr", "train.batch", "train.seed", "train.steps", "objective.params", "model.dtype"):
        assert key not in free


def test_a_damaged_or_missing_config_is_one_line(tmp_path: Path) -> None:
    resume.compare(config(tmp_path), DATA)  # a new directory
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(UserError, match=r"config.yaml cannot be read"):
        resume.compare(config(tmp_path), DATA)
    (tmp_path / CONFIG).write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"config.yaml cannot be read"):
        resume.compare(config(tmp_path), DATA)
    (tmp_path / CONFIG).unlink()
    written(tmp_path, {})
    with pytest.raises(UserError, match=r"holds checkpoints but not the config.yaml"):
        resume.compare(config(tmp_path), DATA)


def test_first_weights_of_a_launch_that_failed_are_not_taken(tmp_path: Path) -> None:
    """A mistake that ends a launch before its first step must not decide what the next one trains."""
    (tmp_path / "initial").mkdir()
    resume.clear_unstarted(config(tmp_path))
    assert not (tmp_path / "initial").exists()
    (tmp_path / "initial").mkdir()
    (tmp_path / CONFIG).write_text(dump_config(config(tmp_path)))
    resume.clear_unstarted(config(tmp_path))
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


def test_a_checkpoint_of_another_layout_is_one_line(tmp_path: Path) -> None:
    """defects A18: one optimizer group became two."""
    saved = resume._read(written(tmp_path, STATE_NOW))
    resume.check_groups(saved, [4, 2])
    with pytest.raises(UserError, match=r"saved with \[4, 2\] parameters .* this run has \[6\]"):
        resume.check_groups(saved, [6])
    with pytest.raises(UserError, match="was written by another version of this program"):
        resume._read(written(tmp_path, {k: v for k, v in STATE_NOW.items() if k != "groups"}))


def test_what_a_checkpoint_cannot_become(tmp_path: Path) -> None:
    """Muon's momentum on another number of ranks."""
    saved = resume._read(written(tmp_path, STATE_NOW))
    world = World(0, saved.ranks + 1, torch.device("cpu"))
    muon = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "Muon"}}
    with pytest.raises(UserError, match=f"cannot convert the state of Muon for {world.ranks}; start"):
        resume.loadable(saved, muon, world)
    assert resume.loadable(saved, muon, world._replace(ranks=saved.ranks)) == (saved.directory, False)


def test_a_replaced_base_model_is_refused(tmp_path: Path, shared_data: Path) -> None:
    """The fingerprint is of the tensor that costs are made of."""
    model = tmp_path / "model"
    shutil.copytree(shared_data / "models" / "stories260K", model)
    first = {"cost": load_cost(str(model), 512).fingerprint}
    check_same(tmp_path, first, {"cost": load_cost(str(model), 512).fingerprint})
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    name = next(n for n in tensors if "embed" in n)
    tensors[name][5] *= 1.5  # of the same direction: even the costs would be the same
    save_file(tensors, file, metadata={"format": "pt"})
    for other in (load_cost(str(model), 512).fingerprint, None):
        with pytest.raises(UserError) as error:
            check_same(tmp_path, first, {"cost": other})
        assert error.value.code == "changed-cost"


def test_costs_are_read_at_the_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    """defects A7: every file of the cost embedding comes from model.revision."""
    import transformers.utils
    from transformers import AutoConfig, LlamaConfig

    asked: list[str | None] = []

    def configuration(source: str, revision: str | None = None, **options: object) -> LlamaConfig:
        asked.append(revision)
        return LlamaConfig(vocab_size=8, hidden_size=32, intermediate_size=8, num_hidden_layers=1)

    def cached_file(source: str, name: str, revision: str | None = None, **kwargs: object) -> None:
        asked.append(revision)

    monkeypatch.setattr(AutoConfig, "from_pretrained", configuration)
    monkeypatch.setattr(transformers.utils, "cached_file", cached_file)
    with pytest.raises(UserError, match="holds none of the head's tensors"):
        load_cost("owner/name", 8, revision="abc123")
    assert len(asked) > 3 and set(asked) == {"abc123"}
