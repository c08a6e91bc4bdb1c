"""Files of others: read within bounds, and nowhere but beside them; no code of theirs runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from emo.common.errors import UserError
from emo.common.untrusted import arrays, is_plain_name, read_bytes, read_json
from emo.common.weights import check_directory, load_causal_lm, load_config

LLAMA = {"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8}


def test_reading_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content, limit in (("[" * 100_000, 1 << 20), ('"' + "x" * 2000 + '"', 1024), ("{", 1024)):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"."):
            read_json(path, limit)
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(ValueError, match="not a file"):
            read_bytes(tmp_path / name, 10)


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"'<f4'", b"'<f4("), (b"'descr'", b"'d\\x'cr"), (b"NUMPY", b"NUMBY"), (b"(9,)", b"(8,,")],
)
def test_damaged_arrays_are_value_errors(before: bytes, after: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.zeros(9, np.float32))
    for content in (path.read_bytes().replace(before, after), b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"."), arrays():
            np.load(path)


def test_plain_names() -> None:
    assert all(map(is_plain_name, ("a", "a.b", "..a", " ")))
    assert not any(map(is_plain_name, ("", ".", "..", "a/b", "/a", "a\\b", "a\0", "a" * 300, 3, None)))


def model(directory: Path, **config: object) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(LLAMA | config))
    return directory


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/hostname", 3])
def test_an_index_names_files_beside_it(tmp_path: Path, name: object) -> None:
    directory = model(tmp_path / "m")
    index = {"weight_map": {"lm_head.weight": name}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for read in (check_directory, load_causal_lm):
        with pytest.raises(UserError) as error:
            read(directory)
        assert error.value.code == "model-index"


@pytest.mark.parametrize("config", [{"vocab_size": [[]]}, {"dtype": "os"}, {"num_hidden_layers": 10**12}])
def test_a_configuration_that_cannot_be_is_a_value_error(tmp_path: Path, config: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"config.json: |vocab_size|dtype"):
        load_config(model(tmp_path / "m", **config))


def test_code_in_a_model_is_not_run(tmp_path: Path) -> None:
    directory = model(tmp_path / "m", model_type="own", auto_map={"AutoConfig": "own.Config"})
    (directory / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    for read in (load_config, load_causal_lm):
        with pytest.raises(UserError) as error:
            read(directory)
        assert error.value.code == "remote-code"
    assert not (tmp_path / "ran").exists()


class Harmful:
    """An object whose pickle runs a command."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.proof}",)


def test_pickled_weights_are_tensors_or_nothing(tmp_path: Path) -> None:
    """`.bin` is read with weights_only: sound ones load, harmful ones do no harm."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = model(tmp_path / "m", num_attention_heads=2, num_hidden_layers=1)
    weights = LlamaForCausalLM(LlamaConfig.from_pretrained(directory)).state_dict()
    torch.save(weights, directory / "pytorch_model.bin")
    assert not load_causal_lm(directory).missing
    torch.save(weights | {"x": Harmful(tmp_path / "ran")}, directory / "pytorch_model.bin")
    with pytest.raises(UserError) as error:
        load_causal_lm(directory)
    assert error.value.code == "pickle" and not (tmp_path / "ran").exists()
