"""`emo score` stores another model's log-probabilities, and training reads them."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import LlamaForCausalLM

from emo.common.errors import UserError
from emo.data_prep.shards.format import TokenDataset
from emo.data_prep.shards.scores import Scores
from emo.pipeline.cli import main
from emo.pipeline.config import RunConfig, load_config
from emo.pipeline.control.run_dir import read_metrics
from emo.pipeline.model.objective.build import training_objective
from emo.pipeline.planning.checks import check_run
from tests.helpers.families import tiny_llama
from tests.helpers.launching import run_alone, tiny_recipe
from tests.helpers.refusals import refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a recipe, its prepared data and its start model."""
    directory = tmp_path_factory.mktemp("score")
    recipe = tiny_recipe(directory, max_steps=2)
    tree = yaml.safe_load(recipe.read_text())
    shape = tree["model"]["architecture"]
    del shape["model_type"]
    tiny_llama(**shape, initializer_range=0.2).save_pretrained(directory / "model")
    tree["model"] = {"path": str(directory / "model"), "dtype": "float32"}
    recipe.write_text(yaml.safe_dump(tree))
    return directory


def test_scores_are_those_of_the_model(folder: Path) -> None:
    """The scores equal a float64 forward pass of transformers over each document alone."""
    command = ["score", str(folder / "recipe.yaml"), "--model", str(folder / "model")]
    needs_teacher = ["train.keep_best=divergence", "train.load_best_at_end=true", "train.eval_steps=2"]
    assert main([*command, "data.shards=1", *needs_teacher]) == 0
    model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    for split in ("train", "validation"):
        data = TokenDataset(folder / "data" / split)
        scores = Scores(data, "reference")
        for row in range(min(len(data), 12)):
            batch, stored = data.batch(np.array([row])), scores.columns(np.array([row]))["stored"][0]
            ids, n = torch.from_numpy(batch["input_ids"][0]), data.tokens_of(row)
            starts = [*np.flatnonzero(batch["position_ids"][0][:n] == 0).tolist(), n]
            for a, b in pairwise(starts):
                with torch.no_grad():
                    log_p = model(ids[None, a:b]).logits[0, :-1].log_softmax(-1)
                want = log_p.gather(1, ids[a + 1 : b, None])[:, 0].numpy()
                np.testing.assert_allclose(stored[a : b - 1], want, rtol=1e-4, atol=1e-4)
    assert main(command) == 0


def test_training_reads_scores_and_rejects_changed_ones(folder: Path) -> None:
    """The first loss of PSFT against the initial model is -1, because every ratio is 1."""
    command = ["score", str(folder / "recipe.yaml"), "--name", "start"]
    assert main([*command, "--model", str(folder / "model")]) == 0
    changes = ["objective.name=psft", "objective.scores=start", f"output_dir={folder / 'psft'}"]
    done = run_alone(str(folder / "recipe.yaml"), *changes)
    assert done.returncode == 0, done.stdout
    first = next(record for record in read_metrics(folder / "psft") if "loss" in record)
    assert first["loss"] == pytest.approx(-1.0, abs=1e-4)
    assert main([*command, "--model", str(folder / "psft/export"), "--force"]) == 0
    with refused("changed-scores"):
        check_run(load_config(folder / "recipe.yaml", changes), 1)


def test_a_custom_objective_and_a_schedule_train(folder: Path) -> None:
    """After the weights of a sum have ramped to MLE alone, the logged loss is the NLL."""
    objective = "examples/my_objective.py:unsure"
    weights = [{"from": 1 - end, "to": end, "steps": 2} for end in (0, 1)]
    parts = [{"name": n, "weight": w} for n, w in zip((objective, "mle"), weights, strict=True)]
    run_dir = folder / "sum"
    changes = [f"objective.sum={json.dumps(parts)}", f"output_dir={run_dir}", "train.max_steps=4"]
    done = run_alone(str(folder / "recipe.yaml"), *changes)
    assert done.returncode == 0, done.stdout
    records = [record for record in read_metrics(run_dir) if "loss" in record]
    assert records[0]["loss"] > records[0]["nll"] + 0.1  # the custom objective weights all tokens above 1
    for record in records[2:]:
        assert record["loss"] == pytest.approx(record["nll"], rel=1e-6)


def test_only_the_recipes_own_model_gets_its_rope(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ropes = []

    def record(config: RunConfig, *_: object) -> bool:
        ropes.append(config.model.rope)
        return True

    monkeypatch.setattr("emo.pipeline.planning.score.score", record)
    for model in (folder / "model", f"{folder}/./model/", folder / "other"):
        rope = "model.rope={type: linear, factor: 2}"
        assert main(["score", str(folder / "recipe.yaml"), "--model", str(model), rope]) == 0
    assert [rope is None for rope in ropes] == [False, False, True]


@pytest.mark.parametrize("arguments", [["--shard", "3/2"], ["--model", "nowhere"], ["--name", "a/b"]])
def test_invalid_arguments_exit_with_code_2(folder: Path, arguments: list[str]) -> None:
    model = [] if "--model" in arguments else ["--model", str(folder / "model")]
    with pytest.raises(SystemExit) as end:
        sys.exit(main(["score", str(folder / "recipe.yaml"), *model, *arguments]))
    assert end.value.code == 2


@pytest.mark.parametrize("changes", [["objective.name=psft"], ["objective.scores=x", "objective.name=mle"]])
def test_missing_or_unused_scores_are_rejected(folder: Path, changes: list[str]) -> None:
    with pytest.raises(UserError, match="score"):
        training_objective(load_config(folder / "recipe.yaml", changes))
