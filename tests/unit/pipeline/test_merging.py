"""Merging of models."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from emo.data_prep.shards.format import TokenDataset
from emo.pipeline.cli import main
from emo.pipeline.model.merging import Merge, _without_names, merge_tensors
from tests.helpers.evaluating import tiny_model
from tests.helpers.launching import tiny_recipe


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a base model and two others of the same architecture."""
    folder = tmp_path_factory.mktemp("models")
    directories = [folder / name for name in ("base", "one", "two")]
    for seed, directory in enumerate(directories):
        tiny_model(directory, seed)
    return directories


def merge(models: list[Path], out: Path, *options: str) -> int:
    return main(["merge", *map(str, models), "--output_path", str(out), *options])


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in load_file(directory / "model.safetensors").items()}


def test_each_method_equals_its_definition(models: list[Path], tmp_path: Path) -> None:
    base, one, two = map(weights, models)
    start = ["--base", str(models[0])]
    assert merge(models[1:], tmp_path / "mean") == 0
    assert merge(models[:2], tmp_path / "wise", "--weights", "0.25", "0.75") == 0
    assert merge(models[1:], tmp_path / "slerp", "--method", "slerp", "--weights", "0.25") == 0
    assert (
        merge(models[1:], tmp_path / "sum", "--method", "task_arithmetic", "--weights", "0.5", "1", *start)
        == 0
    )
    assert merge(models[1:2], tmp_path / "ties", "--method", "ties", "--density", "1", *start) == 0
    found = {path.name: weights(path) for path in tmp_path.iterdir()}
    for name in base:
        a, b = one[name].flatten(), two[name].flatten()
        angle = torch.arccos(torch.dot(a, b) / (a.norm() * b.norm()))
        rotated = (torch.sin(0.75 * angle) * a + torch.sin(0.25 * angle) * b) / torch.sin(angle)
        if a.equal(b):  # norms that are all ones
            rotated = a
        expected = {
            "mean": (one[name] + two[name]) / 2,
            "wise": 0.25 * base[name] + 0.75 * one[name],
            "slerp": rotated.view_as(one[name]),
            "sum": base[name] + 0.5 * (one[name] - base[name]) + (two[name] - base[name]),
            "ties": one[name],
        }
        for method, value in expected.items():
            assert torch.allclose(found[method][name], value, atol=1e-6), (method, name)
    AutoModelForCausalLM.from_pretrained(tmp_path / "mean")
    assert AutoTokenizer.from_pretrained(tmp_path / "mean").encode("a")


def test_the_best_coefficient_on_a_set_is_chosen(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss is the mean over the tokens of the set, and documents are read separately."""
    tiny_recipe(tmp_path, data={"tokenizer": str(models[0]), "train_tokenizer": None})
    data = TokenDataset(tmp_path / "data/validation")
    assert merge(models[:2], tmp_path / "out", "--choose", str(data.directory)) == 0
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()[1:-1]]
    expected = {}
    for name, _, _ in lines:
        weight = float(name)
        if not 0 < weight < 1:
            model = AutoModelForCausalLM.from_pretrained(models[int(weight)])
        else:
            options = ["--weights", str(1 - weight), name]
            assert merge(models[:2], tmp_path / name, *options) == 0
            model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        texts = [
            torch.from_numpy(ids.astype("int64"))
            for row in range(len(data))
            for ids in data.documents_of(row)
        ]
        losses = [
            float(model(ids[None], labels=ids[None]).loss) * (len(ids) - 1) for ids in texts if len(ids) > 1
        ]
        expected[name] = sum(losses) / sum(len(ids) - 1 for ids in texts)
    assert {name: float(loss) for name, loss, _ in lines} == pytest.approx(expected, abs=1e-4)
    best = min(expected, key=lambda name: expected[name])
    assert [name for name, _, change in lines if change == "best"] == [best]
    assert all(re.fullmatch(r"\+\S+ \[\S+, \S+\]", change) for name, _, change in lines if name != best)
    chosen = json.loads((tmp_path / "out/export.json").read_text())["merged"]["weights"]
    assert chosen == [1 - float(best), float(best)]
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out"]
    assert merge(models[:2], tmp_path / "other", "--choose", str(tmp_path)) == 2
    assert not list(tmp_path.glob("other*"))


def test_ties_keeps_large_changes_of_the_elected_sign() -> None:
    base = torch.zeros(4)
    changes = [torch.tensor([4.0, 1.0, -3.0, 0.5]), torch.tensor([2.0, -1.0, 5.0, 0.1])]
    merged = merge_tensors(changes, base, Merge("ties", (1.0, 1.0), 0.5))
    assert merged.tolist() == [3.0, 0.0, 5.0, 0.0]  # the third changes by 5 - 3, so its sign is positive


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--method", "ties"], "needs --base"),
        (["--weights", "1"], "give 2"),
        (["--weights", "1", "1"], "sum to 1 for --method linear: 0.5 0.5"),
        (["--density", "0", "--method", "ties", "--base", "."], "--density"),
        (["--base", "."], "has no --base"),
        (["--choose", ".", "--weights", "1", "0"], "--choose replaces"),
    ],
)
def test_options_that_do_not_fit_are_rejected(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], problem: str
) -> None:
    assert merge(models[1:], tmp_path / "out", *options) == 2
    assert problem in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_file_may_repeat_a_tied_embedding(tmp_path: Path) -> None:
    """Some published files do, and others have buffers that models now compute. Exports have neither."""
    base, tuned = (tiny_model(tmp_path / name, i, tie_word_embeddings=True) for i, name in enumerate("ab"))
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.masked_bias"] = torch.zeros(1)
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    for number, order in enumerate(([base, tuned], [tuned, base])):
        out = tmp_path / f"out{number}"
        assert merge(order, out) == 0
        assert weights(out).keys() == weights(tuned).keys()


def test_dtypes_of_nested_settings_do_not_matter() -> None:
    """transformers writes a dtype into the settings of text and images, which published files lack."""
    nested = {"text_config": {"dtype": "bfloat16", "layers": 2}, "dtype": "bfloat16", "size": 1}
    plain = {"text_config": {"dtype": None, "layers": 2}, "size": 1}
    assert _without_names(nested) == _without_names(plain) == {"text_config": {"layers": 2}, "size": 1}


def test_models_of_another_architecture_are_rejected(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_model(tmp_path / "other", num_hidden_layers=3)
    assert merge([models[0], other], tmp_path / "out") == 2
    assert "differ in" in capsys.readouterr().err
    damaged = tiny_model(tmp_path / "damaged")
    (damaged / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    assert merge([models[0], damaged], tmp_path / "out") == 2
    assert "is damaged" in capsys.readouterr().err
    published = json.loads((other / "config.json").read_text()) | {"num_hidden_layers": 2}
    short = {key: value for key, value in published.items() if key not in ("rope_parameters", "head_dim")}
    shutil.copytree(models[0], tmp_path / "published")
    (tmp_path / "published/config.json").write_text(json.dumps(short))  # as older programs write it
    assert merge([tmp_path / "published", models[0]], tmp_path / "same") == 0
    assert merge([models[0], tmp_path], tmp_path / "out") == 2
    assert "is not a model directory" in capsys.readouterr().err
