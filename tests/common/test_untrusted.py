"""Files of others are read within bounds and run no code; their texts act on nothing and tell no secrets."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from emo.common.errors import UserError, one_line
from emo.common.text import markdown, on_one_line, printable, publishable, without_secrets
from emo.common.untrusted import arrays, is_plain_name, read_json
from emo.common.weights import load_causal_lm, load_config

LLAMA = {"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8}


def test_json_is_read_or_a_value_error(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content in ("[" * 100_000, "{"):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"."):
            read_json(path)


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"'<f4'", b"'<f4("), (b"NUMPY", b"NUMBY")],
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


@pytest.mark.parametrize("name", ["../other/model.safetensors", 3])
def test_an_index_names_files_beside_it(tmp_path: Path, name: object) -> None:
    directory = model(tmp_path / "m", num_attention_heads=2)
    index = {"weight_map": {"lm_head.weight": name}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError) as error:
        load_causal_lm(directory)
    assert error.value.code == "model-index"


@pytest.mark.parametrize("config", [{"vocab_size": [[]]}])
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


TITLE = "\x1b]0;owned\a"  # an OSC sequence, which sets a terminal's title
ACTING = ["\x1b[2J", TITLE, "a\rb", "\x9b31m", "\u202egpj.exe", "\u2066x\u2069", "\u2028", "\ud800", "\x7f"]


@pytest.mark.parametrize("text", ACTING)
def test_what_acts_on_a_terminal_is_written_out(text: str) -> None:
    for shown in (printable(text), on_one_line(text), markdown(text), str(UserError(text)), one_line(text)):
        shown.encode()
        assert not set(shown) & set("\x1b\a\b\r\x7f\x9b\u202e\u2066\u2069\u2028\ud800")


def test_markdown_makes_no_links_tags_or_cells() -> None:
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


def test_secrets_are_left_out() -> None:
    for text, expected in SECRETS.items():
        assert without_secrets(text) == expected
        assert expected in str(UserError(f"cannot read {text}"))
        assert expected in one_line(ValueError(text))
    assert [without_secrets(text) for text in INNOCENT] == INNOCENT


PUBLISHABLE = {
    "/home/me/runs/emo": "emo",
    "['/data/a/*.jsonl', '/data/b.txt']": "['*.jsonl', 'b.txt']",
    "from ~me/models/base, /mnt/x/cost.pt:f": "from base, cost.pt:f",
    "https://me:hunter2@host/a/b": "https://***@host/a/b",
}


def test_what_is_published_names_no_folder() -> None:
    for text, expected in PUBLISHABLE.items():
        assert publishable(text) == expected
    for text in ("runs/emo", "and/or", "https://h/a/b c/d", "s3://bucket/a/b", "/ 1/2"):
        assert publishable(text) == text


def test_long_texts_take_no_time() -> None:
    for text in ("a-" * 100_000, "://" + ":" * 100_000, "?" + "a" * 100_000, "://a" * 50_000):
        assert without_secrets(text) == text
    for text in ("~" * 100_000, "/" * 100_000, "a/" * 50_000, "/" + "!" * 100_000):
        assert publishable(text) == text
