"""Untrusted files are read within limits and run no code. Texts are escaped, and secrets are removed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from emo.common.errors import UserError, one_line
from emo.common.io.untrusted import is_plain_name, numpy_value_errors, read_json
from emo.common.io.weights import load_causal_lm, load_model_config
from emo.common.text import markdown, on_one_line, printable, publishable, without_secrets
from tests.helpers.refusals import refused


def test_damaged_json_and_arrays_are_value_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.zeros(9, np.float32))
    sound = path.read_bytes()
    for content in (sound.replace(b"'<f4'", b"'<f4("), sound.replace(b"NUMPY", b"NUMBY"), b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"."), numpy_value_errors():
            np.load(path)
    for text in ("[" * 100_000, "{"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"."):
            read_json(path)


def test_plain_names() -> None:
    assert all(map(is_plain_name, ("a", "a.b", "..a", " ")))
    assert not any(map(is_plain_name, ("", ".", "..", "a/b", "/a", "a\\b", "a\0", "a" * 300, 3, None)))


LLAMA = {"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8}
LLAMA |= {"num_attention_heads": 2, "num_hidden_layers": 1}


def model(directory: Path, **config: object) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(LLAMA | config))
    return directory


def test_an_index_must_name_files_in_its_directory(tmp_path: Path) -> None:
    directory = model(tmp_path / "m")
    index = {"weight_map": {"lm_head.weight": "../other/model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused("model-index"):
        load_causal_lm(directory)


def test_custom_code_of_a_model_is_not_run(tmp_path: Path) -> None:
    directory = model(tmp_path / "m", model_type="own", auto_map={"AutoConfig": "own.Config"})
    (directory / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    for read in (load_model_config, load_causal_lm):
        with refused("remote-code"):
            read(directory)
    assert not (tmp_path / "ran").exists()


class Harmful:
    """An object whose pickle runs a command."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.proof}",)


def test_pickles_with_more_than_tensors_are_not_loaded(tmp_path: Path) -> None:
    """`.bin` files are read with weights_only, so they cannot run code."""
    directory = model(tmp_path / "m")
    weights = LlamaForCausalLM(LlamaConfig.from_pretrained(directory)).state_dict()
    torch.save(weights, directory / "pytorch_model.bin")
    assert not load_causal_lm(directory).missing
    torch.save(weights | {"x": Harmful(tmp_path / "ran")}, directory / "pytorch_model.bin")
    with refused("pickle"):
        load_causal_lm(directory)
    assert not (tmp_path / "ran").exists()


def test_control_characters_are_escaped() -> None:
    """Escape sequences, carriage returns, surrogates and direction marks are not printed."""
    text = "\x1b[2J \x1b]0;owned\a a\rb \x9b31m \u202egpj.exe \u2066x\u2069 \u2028 \ud800 \x7f"
    for rendering in (
        printable(text),
        on_one_line(text),
        markdown(text),
        str(UserError(text, code="test")),
        one_line(text),
    ):
        rendering.encode()
        assert not set(rendering) & set("\x1b\a\b\r\x7f\x9b\u202e\u2066\u2069\u2028\ud800")


def test_markdown_is_escaped() -> None:
    assert markdown("see https://x.org and www.x.org") == "see https&#58;//x.org and www&#46;x.org"
    assert markdown("<b>|[a](b)`c`") == "&lt;b&gt;\\|\\[a\\](b)\\`c\\`"


SECRETS = {
    "https://me:hunter2@host/x": "https://***@host/x",
    "https://h/x?a=1&X-Amz-Signature=abc123&b=2": "https://h/x?a=1&X-Amz-Signature=***&b=2",
    "Authorization: Bearer abcdefghijklmnopqrstuvwxyz": "Authorization: Bearer ***",
    "401 for hf_" + "aB3" * 11: "401 for hf_***",
    "glpat-abcdefghijklmnopqrst": "glpat-***",
}
INNOCENT = ["https://h:8080/x", "hf_checkpoints_of_a_llama", "the bearer of it", "git@host:a/b"]
LONG = ["a-" * 100_000, "://" + ":" * 100_000, "?" + "a" * 100_000, "://a" * 50_000]


def test_secrets_are_removed_and_long_texts_are_fast() -> None:
    for text, expected in SECRETS.items():
        assert without_secrets(text) == expected
        assert expected in str(UserError(f"cannot read {text}", code="test"))
        assert expected in one_line(ValueError(text))
    for text in (*INNOCENT, *LONG):
        assert without_secrets(text) == text


PUBLISHABLE = {
    "/home/me/runs/emo": "emo",
    "['/data/a/*.jsonl', '/data/b.txt']": "['*.jsonl', 'b.txt']",
    "from ~me/models/base, /mnt/x/cost.pt:f": "from base, cost.pt:f",
    "https://me:hunter2@host/a/b": "https://***@host/a/b",
}
WITHOUT_FOLDERS = ["runs/emo", "and/or", "https://h/a/b c/d", "s3://bucket/a/b", "/ 1/2"]
WITHOUT_FOLDERS += ["~" * 100_000, "/" * 100_000, "a/" * 50_000, "/" + "!" * 100_000]


def test_published_texts_have_no_folders() -> None:
    for text, expected in PUBLISHABLE.items():
        assert publishable(text) == expected
    for text in WITHOUT_FOLDERS:
        assert publishable(text) == text
