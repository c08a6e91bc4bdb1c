"""States, recipes and DeepSpeed files of others do no harm, and no secret is published."""

from __future__ import annotations

import logging
import pickle
import sys
from pathlib import Path

import pytest
import torch

from emo.common.errors import UserError
from emo.pipeline import identity
from emo.pipeline.cli import Printable
from emo.pipeline.config import RunConfig, dump_config, load_config
from emo.pipeline.engine import STATE_CLASSES, _only_data
from emo.pipeline.export import _model_card
from emo.pipeline.run_dir import CONFIG
from tests.common.test_untrusted import Harmful
from tests.conftest import REPO

RECIPE = REPO / "launch/recipes/quickstart-pretrain.yaml"
OWN = "examples/my_objective.py:unsure"


def config(run_dir: Path, *overrides: str) -> RunConfig:
    return load_config(RECIPE, [f"output_dir={run_dir}", *overrides])


def test_states_are_read_as_data_whatever_deepspeed_asks(tmp_path: Path) -> None:
    state = tmp_path / "a.pt"
    torch.save({"x": torch.ones(2), "scale": STATE_CLASSES[0](1.0)}, state)
    with _only_data(tmp_path):
        assert torch.load(state, weights_only=False)["x"].tolist() == [1, 1]
    torch.save({"x": Harmful(tmp_path / "ran")}, state)
    with pytest.raises(UserError, match=r"more than data \(posix.system\)"), _only_data(tmp_path):
        torch.load(state, weights_only=False)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(pickle.UnpicklingError, match="LossScaler"):  # outside the block nothing is allowed
        torch.save(STATE_CLASSES[0](1.0), state)
        torch.load(state, weights_only=True)


def test_no_recipe_runs_a_program_by_itself(tmp_path: Path) -> None:
    """An objective of one's own is one; whoever runs the recipe names it in the command."""
    losses = tmp_path / "own.py"
    losses.write_text("raise SystemExit('ran')\n")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE.read_text().replace("{ name: mle }", f"{{ name: '{losses}:f' }}"))
    with pytest.raises(UserError) as error:
        load_config(recipe, [])
    assert error.value.code == "objective-program"
    parts = f"[{{name: mle}}, {{name: '{OWN}'}}]"
    recipe.write_text(RECIPE.read_text().replace("{ name: mle }", f"{{ sum: {parts} }}"))
    with pytest.raises(UserError, match="is a program"):
        load_config(recipe, [f"output_dir=runs/{OWN}"])
    assert load_config(recipe, [f"objective.sum={parts}"]).objective.sum
    assert config(tmp_path, f"objective.name={OWN}").objective.name == OWN


def test_secrets_are_kept_out_of_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for override in ("train.copy_to=https://me:hunter2@host/x", "model.path=hf_" + "hunter2" * 5):
        with pytest.raises(UserError) as caught:
            config(tmp_path, override)
        assert caught.value.code == "secret" and "hunter2" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "s3cret" * 6)
    written = config(tmp_path)
    identity.claim(written, {"data": "f"})
    text = (tmp_path / CONFIG).read_text() + dump_config(written) + _model_card(written, {"step": 1})
    assert "s3cret" not in text


def test_log_lines_cannot_act_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(Printable())
    log = logging.getLogger("hostile")
    log.addHandler(handler)
    log.warning("%s is not used: %s", "step-\x1b]0;owned\a", "https://me:hunter2@host")
    assert capsys.readouterr().out == "step-\\x1b]0;owned\\x07 is not used: https://***@host\n"


def test_a_model_card_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    """It is published with the model."""
    names = config(
        tmp_path / "emo", f"data.sources=[{{files: {tmp_path}/mine/*.jsonl}}]", "model.path=/m/base"
    )
    card = _model_card(names, {"run": str(tmp_path / "emo"), "params": {"cost": "/mnt/x/cost.pt"}})
    assert str(tmp_path) not in card and "/mnt" not in card and "/m/" not in card
    assert "| run | emo |" in card and "Trained from base with" in card and ".jsonl" in card
