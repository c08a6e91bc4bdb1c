"""What may be evaluated: whole, finite, causal models with their own tokenizers; the rest is one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from emo.common.errors import UserError
from emo.eval.model import EvaluatedModel, clean_name, default_name
from tests.helpers.evaluating import command, tiny_model, tiny_tokenizer, write_tasks
from tests.helpers.said import lines

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    tiny_model(directory / "whole")
    write_tasks(directory / "data", ["sst2"], train=12, test=6)
    return directory


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """A copy of the whole model, to be spoilt."""
    return Path(shutil.copytree(root / "whole", tmp_path / "model"))


def change(model: Path, edit: Callable[[Weights], Any]) -> Path:
    path = model / "model.safetensors"
    weights = load_file(path)
    edit(weights)
    save_file(weights, path, metadata={"format": "pt"})
    return model


SPOILT: dict[str, Callable[[Weights], Any]] = {
    "layer missing": lambda w: w.pop("model.layers.1.mlp.up_proj.weight"),
    "one too many": lambda w: w.update(extra=torch.ones(3)),
    "classifier": lambda w: w.update({"score.weight": w.pop("lm_head.weight")[:2].clone()}),
    "wrong shape": lambda w: w.update({"model.norm.weight": torch.ones(7)}),
    "integers": lambda w: w.update({"model.norm.weight": torch.ones(32, dtype=torch.int32)}),
    "nan": lambda w: w["model.layers.0.mlp.up_proj.weight"][1].fill_(float("nan")),
    "overflow": lambda w: w["model.norm.weight"].fill_(3e38),  # every weight is finite, the scores are not
}


@pytest.mark.parametrize("kind", list(SPOILT))
def test_nothing_is_published_of_spoilt_weights(
    kind: str, copy: Path, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(copy, SPOILT[kind])
    common = ["--model", copy, "--output_path", tmp_path / "out"]
    run = command("eval", *common, "--data", root / "data", "--tasks", "sst2", "--retriever", "random")
    for code, _, err in (run, command("generate", *common, "--samples", 1)):
        assert code == 2 and len(lines(err)) == 1 and str(copy) in err
    names = ("result.json", "chunks", "sst2.json", "samples.json")
    assert not [path for name in names for path in tmp_path.rglob(f"out/**/{name}")]
    assert "LOAD REPORT" not in caplog.text


def test_tied_heads_are_whole(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    assert EvaluatedModel(str(path)).model.lm_head.weight.shape[1] == 32
    change(path, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    assert EvaluatedModel(str(path)).model.lm_head.weight.shape[1] == 32  # the same, twice
    change(path, lambda w: w["lm_head.weight"].add_(1))
    with pytest.raises(UserError):
        _ = EvaluatedModel(str(path)).model


def test_models_of_another_kind_are_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=len(tokenizer), **sizes)  # type: ignore[arg-type]
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(UserError):
        _ = EvaluatedModel(str(tmp_path / "model")).model


def test_a_tokenizer_of_a_larger_model_is_refused_but_not_for_a_padding_token(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "small", vocab_size=200)
    with pytest.raises(UserError) as error:
        _ = EvaluatedModel(str(path)).model
    assert error.value.code == "model"
    path = tiny_model(tmp_path / "model")
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(path)
    assert EvaluatedModel(str(path)).model.config.vocab_size == 384


@pytest.mark.parametrize("text", ["{", "[1]", '{"step": "ten"}'])
def test_a_bad_export_json_is_one_line(text: str, copy: Path) -> None:
    (copy / "export.json").write_text(text)
    with pytest.raises(UserError):
        _ = EvaluatedModel(str(copy)).facts


@pytest.mark.parametrize("name", [".hidden", "a/b", "a,b", "a=b", "", "x\n", "x" * 300])
def test_names_that_results_cannot_have(name: str, copy: Path) -> None:
    with pytest.raises(UserError):
        EvaluatedModel(str(copy), name)
    assert EvaluatedModel(str(copy), "emo 7B_v1.2+x").name == "emo 7B_v1.2+x"


def test_names_from_directories_are_usable() -> None:
    assert default_name(Path("/runs/$emo_1/export")) == "emo_1"
    assert default_name(Path("/runs/emo/step-000100/hf")) == "emo-step-000100"
    assert clean_name("__a=b,c$") == "a-b-c-" and clean_name("/") == "model"


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval", "--max_tokens", 2000],
        ["eval", "--num_fewshot", 99],
        ["eval", "--max_drop", "nan"],
        ["watch", "--poll", 0],
    ],
)
def test_impossible_numbers_are_one_line(arguments: list[Any], root: Path, tmp_path: Path) -> None:
    options: list[Any] = [root] if arguments[0] == "watch" else ["--model", root / "whole"]
    options += ["--data", root / "data", "--tasks", "sst2", "--retriever", "random"]
    code, _, err = command(*arguments, *options, "--output_path", tmp_path / "out")
    assert code == 2 and len(lines(err)) == 1


def test_a_result_says_under_which_conditions(root: Path, tmp_path: Path) -> None:
    arguments = ["eval", "--model", root / "whole", "--tasks", "sst2", "--retriever", "random"]

    def conditions(out: str, *options: Any, data: Path = root / "data") -> dict[str, Any]:
        command(*arguments, "--data", data, "--output_path", tmp_path / out, *options)
        view = json.loads((tmp_path / out / "models" / "whole" / "sst2.json").read_text())
        return view["result"]["conditions"]

    usual = conditions("a")
    assert usual["noted"]["prompt_version"] == "paper" and usual["compared"]["shots"] == 8
    other = Path(shutil.copytree(root / "data", tmp_path / "data"))
    test = other / "sst2" / "test.jsonl"
    test.write_text(test.read_text().replace('{"text": "', '{"text": "well, ', 1))  # the same gold labels
    for out, options, data, key in [
        ("b", ["--num_fewshot", 2], root / "data", "shots"),
        ("c", ["--limit", 3], root / "data", "test_rows"),
        ("d", ["--retriever", "bm25"], root / "data", "retriever"),
        ("e", [], other, "test_rows"),
        ("f", ["--max_tokens", 300], root / "data", "max_tokens"),
    ]:
        actual = conditions(out, *options, data=data)["compared"]
        assert {k for k in actual if actual[k] != usual["compared"][k]} == {key}
    assert conditions("g", "--dtype", "float32")["compared"] == usual["compared"]
