"""What decides a run's numbers may not change between two launches: one line, with a code, exit 2."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer

from emo.common.errors import UserError
from emo.data_prep import scores
from emo.data_prep.config import DataConfig
from emo.data_prep.prepare import prepare
from emo.data_prep.shards import open_prepared
from emo.pipeline import identity
from emo.pipeline.config import RunConfig, load_config
from emo.pipeline.planning.checks import check
from tests.helpers import launching
from tests.helpers.families import family

PLUGIN = """
from torch import Tensor
import helper_of_objective


def mine(m: Tensor, *, strength: float = 1.0) -> Tensor:
    return strength * helper_of_objective.weight(m)
"""
HELPER = "def weight(m):\n    return 1 + 0 * m\n"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launching.tiny_recipe(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the recipe and its data, and an objective in a file with a module that it imports."""
    shutil.copytree(prepared.parent, tmp_path, dirs_exist_ok=True)
    tree = yaml.safe_load(prepared.read_text(encoding="utf-8"))
    tree["output_dir"], tree["data"]["dir"] = str(tmp_path / "run"), str(tmp_path / "data")
    tree["data"]["root"] = str(tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "helper_of_objective.py").write_text(HELPER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "helper_of_objective", raising=False)
    return tmp_path


def recipe(folder: Path, *overrides: str) -> RunConfig:
    return load_config(folder / "recipe.yaml", list(overrides))


def begun(config: RunConfig) -> None:
    """What the first launch of a run leaves."""
    config.output_dir.mkdir(exist_ok=True)
    identity.claim(config, check(config, ranks=1, local=True).identity)
    check(config, ranks=1, local=True)


def refused(config: RunConfig, code: str, ranks: int = 1) -> None:
    with pytest.raises(UserError) as error:
        check(config, ranks=ranks, local=True)
    assert error.value.code == code and "\n" not in str(error.value)


def write_scores(folder: Path, value: float) -> None:
    """Leave what `emo score --force` leaves of some model."""
    data, validation = open_prepared(recipe(folder).data)
    model = {"path": "reference", "value": value}
    for rows in (data, *validation.values()):
        scores.clear(rows, "reference")
        scores.begin(rows, "reference", model)
        for index, info in enumerate(rows.manifest.shards):
            scores.write_shard(scores.shard_file(rows, "reference", index), np.full(info.tokens, value))
        assert scores.seal(rows, "reference", model)


@pytest.mark.parametrize("part", ["file", "default", "import"])
def test_a_changed_program(folder: Path, part: str) -> None:
    config = recipe(folder, f"objective.name={folder / 'mine.py'}:mine")
    begun(config)
    changed = folder / ("helper_of_objective.py" if part == "import" else "mine.py")
    old, new = {
        "file": ("return strength", "return 2 * strength"),
        "default": ("1.0", "0.5"),
        "import": ("1 +", "2 +"),
    }[part]
    changed.write_text(changed.read_text().replace(old, new))
    refused(config, "changed-objective" if part == "default" else "changed-program")


def test_a_changed_module_that_is_imported_by_name(folder: Path) -> None:
    program = folder / "mine.py"
    by_name = 'import importlib\n\nhelper_of_objective = importlib.import_module("helper_of_objective")'
    program.write_text(program.read_text().replace("import helper_of_objective", by_name))
    config = recipe(folder, f"objective.name={program}:mine")
    begun(config)
    helper = folder / "helper_of_objective.py"
    helper.write_text(helper.read_text().replace("1 +", "2 +"))
    refused(config, "changed-program")


def test_changed_scores(folder: Path) -> None:
    config = recipe(folder, "objective.name=excess", "objective.scores=reference")
    write_scores(folder, -1.0)
    begun(config)
    write_scores(folder, -1.0)
    check(config, ranks=1, local=True)
    write_scores(folder, -2.0)
    refused(config, "changed-scores")


def test_a_changed_validation_set(folder: Path) -> None:
    """Its text, under the same name; and a set that is new."""
    config = recipe(folder)
    begun(config)
    tree = yaml.safe_load((folder / "recipe.yaml").read_text())
    tree["data"]["validation_fraction"] = 0.0
    (folder / "held.txt").write_text("\n".join(f"Something else, number {i}." for i in range(60)))
    for validation in ([{"files": "held.txt", "format": "lines"}], {"new": [{"files": "held.txt"}]}):
        tree["data"]["validation"] = validation
        # Rows of the training data stay what they were: only the other set is prepared anew.
        data = DataConfig(**tree["data"] | {"dir": folder / "other"})
        prepare(data, (0, 1), 1, True, False, lambda _: None)
        name = data.splits[1]
        train = open_prepared(config.data)[0]
        now = identity.of_data(train, {name: open_prepared(data)[1][data.validation_sets[0]]})
        with pytest.raises(UserError) as error:
            identity.compare(config, now)
        assert error.value.code == "changed-validation"


def test_a_changed_deepspeed_file(folder: Path) -> None:
    """By what it says, not by its name: buckets may differ, dtypes of communication not."""
    file, other = folder / "a.json", folder / "b.json"
    tree: dict[str, Any] = {"zero_optimization": {"stage": 1}}
    file.write_text(json.dumps(tree))
    begun(recipe(folder, f"deepspeed={file}"))
    tree["zero_optimization"] |= {"reduce_bucket_size": 1000, "reduce_scatter": True, "overlap_comm": True}
    other.write_text(json.dumps(tree))
    check(recipe(folder, f"deepspeed={other}"), ranks=1, local=True)
    for change in (
        {"communication_data_type": "fp32"},
        {"data_types": {"grad_accum_dtype": "bf16"}},
        {"prescale_gradients": True},
        {"zero_optimization": {"stage": 2}},
        {"zero_optimization": {"stage": 1, "round_robin_gradients": True}},
    ):
        other.write_text(json.dumps(tree | change))
        refused(recipe(folder, f"deepspeed={other}"), "changed-deepspeed")


def test_a_pass_over_fewer_rows(folder: Path) -> None:
    """`mile` divides weights by the mean of those that go through together; others do not care."""
    for name, code in (("emo", None), ("mile", "changed-normalisation")):
        config = recipe(folder, f"objective.name={name}", f"output_dir={folder / name}")
        begun(config)
        for changed, ranks in (({"micro_batch_size": 1}, 1), ({}, 2)):
            other = config.model_copy(update={"train": config.train.model_copy(update=changed)})
            if code is None:
                check(other, ranks=ranks, local=True)
            else:
                refused(other, code, ranks)
    whole = recipe(
        folder, "objective.name=mile", "train.micro_batch_size=8", f"output_dir={folder / 'whole'}"
    )
    begun(whole)
    check(
        recipe(folder, "objective.name=mile", "train.micro_batch_size=4", f"output_dir={whole.output_dir}"),
        2,
        local=True,
    )


def test_a_swapped_tokenizer(folder: Path) -> None:
    """Two ids exchanged in the tokenizer that would be exported, after the rows were prepared."""
    file = folder / "data/tokenizer/tokenizer.json"
    tree = json.loads(file.read_text())
    vocab = tree["model"]["vocab"]
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(tree))
    refused(recipe(folder), "changed-tokenizer")
    file.write_text("{")
    with pytest.raises(UserError):
        check(recipe(folder), ranks=1, local=True)


@pytest.mark.parametrize("form", ["same", "rewritten", "other"])
def test_costs_of_another_tokenizer(folder: Path, form: str) -> None:
    """What matters is which token has which id, however the file is written."""
    model = folder / "model"
    family("llama", vocab_size=384).save_pretrained(model)
    shutil.copytree(folder / "data/tokenizer", model, dirs_exist_ok=True)
    file = model / "tokenizer.json"
    tree = json.loads(file.read_text())
    if form == "rewritten":
        tree["normalizer"], tree["post_processor"] = None, None
        tree["added_tokens"] = tree["added_tokens"][:1]
    if form == "other":
        vocab = tree["model"]["vocab"]
        pieces = list(vocab)
        tree["model"]["vocab"] = dict(zip(pieces, [*range(200), *range(383, 199, -1)], strict=True))
    file.write_text(json.dumps(tree, indent=3 if form == "rewritten" else 1))
    Tokenizer.from_file(str(file))
    config = recipe(folder, f"objective.cost={model}")
    if form == "other":
        refused(config, "cost-tokenizer")
    else:
        check(config, ranks=1, local=True)
