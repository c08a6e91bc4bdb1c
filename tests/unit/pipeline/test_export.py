"""Exports as other programs read them: tensors, RoPE, tokenizer and end-of-reply tokens."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping

from emo.data_prep.config import DataConfig
from emo.data_prep.encoding.tokenizer import load_tokenizer, set_chat_template
from emo.data_prep.shards.format import MANIFEST, TokenDataset, manifest_text, read_manifest
from emo.pipeline.config import RunConfig
from emo.pipeline.loss import fuse_model, get_objective
from emo.pipeline.model.build import check_fits
from emo.pipeline.model.config import ModelConfig
from emo.pipeline.model.export import exported_names, exported_tensors, persistent_buffers, view_model
from emo.pipeline.model.readers import check_exported_tokenizer, saved_tensors, write_config, write_tokenizer
from tests.helpers.chat_templates import CHATML
from tests.helpers.corpus import prepared, run, tiny_tokenizer, write_jsonl
from tests.helpers.exporting import write
from tests.helpers.families import EXPORTED, FAMILIES, family, tiny_llama
from tests.helpers.refusals import refused

IGNORED = ("rope_parameters", "_name_or_path", "architectures", "dtype", "torch_dtype")


def without_type(rope: dict[str, Any]) -> dict[str, Any]:
    """Return RoPE's settings without the older key `type`, which transformers keeps."""
    return {k: without_type(v) if isinstance(v, dict) else v for k, v in rope.items() if k != "type"}


@pytest.mark.parametrize("name", FAMILIES | EXPORTED)
def test_names_and_rope_of_every_family(name: str, tmp_path: Path) -> None:
    """Tensors have the names and shapes of `save_pretrained`, and RoPE's settings are read back unchanged."""
    model = family(name)
    model.config.save_pretrained(tmp_path)
    write_config(tmp_path, {})
    config = json.loads((tmp_path / "config.json").read_text())
    before, after = model.config.to_dict(), AutoConfig.from_pretrained(tmp_path).to_dict()
    assert config.get("torch_dtype") == config.get("dtype")
    if (rope := before.get("rope_parameters")) is not None:
        assert without_type(rope) == without_type(after["rope_parameters"])
        known = name != "gemma4_text"  # unknown to transformers 4
        assert bool({"rope_theta", "rotary_emb_base", "global_rope_theta"} & config.keys()) == known
        assert ("rope_scaling" in config) == known
    assert {k: v for k, v in after.items() if k in before and k not in IGNORED} == {
        k: v for k, v in before.items() if k in after and k not in IGNORED
    }
    if get_model_conversion_mapping(model, add_legacy=False):
        model.save_pretrained(tmp_path)
        expected = load_file(tmp_path / "model.safetensors")
        fuse_model(model, get_objective("mle"))  # as in a run that exports it
        tensors = [(t.name, *t.parts) for t in exported_tensors(model)] + [*persistent_buffers(model)]
        written = dict(saved_tensors(model, exported_names(model), iter(tensors)))
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[key], expected[key]) for key in expected)


SETTINGS = {"padding_side": "left", "model_max_length": 256, "model_input_names": ["input_ids"]}
# Tokens that processors of images find by their role, as version 5 of transformers stores them.
SETTINGS |= {"model_specific_special_tokens": {"image_token": "<|im_start|>", "boi_token": "<gone>"}}
ROLES = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Return prepared chats, with </s> at the end of texts and <|im_end|> at the end of turns."""
    root = tmp_path_factory.mktemp("chats")
    shutil.copytree(tiny_tokenizer() / "model", root / "base")
    tokenizer = load_tokenizer(root / "base")
    tokenizer.add_special_tokens({"additional_special_tokens": ROLES})
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(root / "base")
    tree = json.loads((root / "base/tokenizer_config.json").read_text())
    (root / "base/tokenizer_config.json").write_text(json.dumps(tree | SETTINGS))
    turns = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It is said."}]
    rows = ([*turns, {"role": "user", "content": str(i)}, turns[1]] for i in range(20))
    write_jsonl(root / "a.jsonl", [{"messages": row} for row in rows])
    settings = {"kind": "instruct", "template": "chat_template", "sequence_len": 128}
    config = prepared(root, tokenizer=str(root / "base"), **settings)
    end = load_tokenizer(config.dir / "tokenizer").convert_tokens_to_ids("<|im_end|>")
    manifest = read_manifest(config.dir / "train").model_copy(update={"answer_ends": [end], "digest": ""})
    (config.dir / "train" / MANIFEST).write_text(manifest_text(manifest))
    return config


def test_all_files_of_an_export_name_the_end_of_a_turn(chats: DataConfig, tmp_path: Path) -> None:
    """The sampling settings of the base model are kept."""
    tokenizer = load_tokenizer(chats.dir / "tokenizer")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model = tiny_llama(len(tokenizer), bos_token_id=1, eos_token_id=2)
    odd = {"eos_token_id": 2, "temperature": 0.6}  # without do_sample, like some published models
    (tmp_path / "generation_config.json").write_text(json.dumps(odd))
    model.generation_config = GenerationConfig.from_pretrained(tmp_path)
    export = write(model, tmp_path / "export", chats)
    (usual := tmp_path / "usual").touch()
    assert {file.stat().st_mode for file in export.iterdir()} == {usual.stat().st_mode}
    generation = GenerationConfig.from_pretrained(export)
    assert generation.eos_token_id == AutoConfig.from_pretrained(export).eos_token_id == [2, end]
    assert generation.temperature == 0.6
    read = AutoTokenizer.from_pretrained(export)
    assert read.eos_token_id == end == load_tokenizer(export).eos_token_id
    assert read.chat_template == CHATML and read.padding_side == "left" and read.model_max_length == 256
    assert read.model_input_names == ["input_ids"]
    config = json.loads((export / "tokenizer_config.json").read_text())
    assert config["additional_special_tokens"] == ROLES
    assert config["extra_special_tokens"] == {"image_token": "<|im_start|>"}
    assert read.image_token == "<|im_start|>" and read.image_token_id == end - 1
    assert (export / "tokenizer.model").read_bytes() == (chats.root / "base/tokenizer.model").read_bytes()
    assert json.loads((export / "added_tokens.json").read_text()) == {ROLES[0]: end - 1, ROLES[1]: end}


def test_logits_are_compared_on_the_data(chats: DataConfig, tmp_path: Path) -> None:
    """In bfloat16, logits of a real model for its first tokens, which are special, are mostly noise."""
    model = tiny_llama(len(load_tokenizer(chats.dir / "tokenizer")))
    settings: dict[str, Any] = {"output_dir": tmp_path, "model": {"path": "x"}, "train": {"max_steps": 1}}
    config = RunConfig(data=chats, **settings)
    first = TokenDataset(chats.dir / "train").batch(np.array([0]))["input_ids"][:, :16]
    assert view_model(model, config).probe.equal(torch.from_numpy(first))
    other = RunConfig(data=chats.model_copy(update={"dir": tmp_path / "none"}), **settings)
    probe = view_model(model, other).probe
    assert probe.unique().numel() == 16 and probe.max() > 300


def test_eos_stays_if_the_template_writes_it_or_answers_have_several_ends(
    chats: DataConfig, tmp_path: Path
) -> None:
    shutil.copytree(chats.dir / "tokenizer", tmp_path / "tokenizer")
    file = tmp_path / "tokenizer/tokenizer_config.json"
    template = {"chat_template": CHATML + "{{ eos_token }}"}
    file.write_text(json.dumps(json.loads(file.read_text()) | template))
    end = load_tokenizer(tmp_path / "tokenizer").convert_tokens_to_ids("<|im_end|>")
    write_tokenizer(tmp_path / "tokenizer", tmp_path / "template", [end])
    write_tokenizer(chats.dir / "tokenizer", tmp_path / "several", [end - 1, end])
    for name in ("template", "several"):
        assert load_tokenizer(tmp_path / name).eos_token == "</s>"


def test_variables_of_the_data_are_defaults_of_the_exported_template(
    chats: DataConfig, tmp_path: Path
) -> None:
    """A server then prompts the model as in training, unless a request sets a variable."""
    variables = {
        "flag": False, "mood": "a \"b\" \\ {% x %}\n\U0001f642é", "number": -1.5, "nothing": None,
        "date": "2026-01-31", "list": [1],
    }  # fmt: skip
    tree = "\n{{ [flag, mood, number, nothing, date, list] | tojson }}" + CHATML
    shutil.copytree(chats.dir / "tokenizer", tmp_path / "tokenizer")
    set_chat_template(tmp_path / "tokenizer", tree.replace("date", "date | string").replace(", list", ""))
    write_tokenizer(tmp_path / "tokenizer", tmp_path / "export", [], variables=variables)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    turns = [{"role": "user", "content": "q"}]

    def first(**given: Any) -> str:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **given)
        line, _, rest = text[1:].partition("<|im_start|>")
        assert text[0] == "\n" and rest == "user\nq<|im_end|>\n<|im_start|>assistant\n"
        return json.loads(line)

    assert first() == [False, variables["mood"], -1.5, None, ""]
    assert first(flag=True, mood="calm", date="d") == [True, "calm", -1.5, None, "d"]


def test_data_prepared_with_an_export_are_those_before(chats: DataConfig, tmp_path: Path) -> None:
    """The export also fits its own training data."""
    tokenizer = load_tokenizer(chats.dir / "tokenizer")
    export = write(tiny_llama(len(tokenizer)), tmp_path / "export", chats)
    again = chats.model_copy(update={"dir": tmp_path / "data", "tokenizer": str(export)})
    run(again)
    model = ModelConfig(path=str(export))
    for directory in (chats.dir, again.dir):
        manifest = read_manifest(directory / "train")
        check_fits(AutoConfig.from_pretrained(export), model, manifest)
    first, second = (TokenDataset(d / "train").batch(np.arange(3)) for d in (chats.dir, again.dir))
    assert all(np.array_equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(("name", "replaced"), [("qwen2", True), ("qwen3", False), ("llama", False)])
def test_a_family_whose_tokenizer_transformers_replaces(name: str, replaced: bool, tmp_path: Path) -> None:
    family(name).config.save_pretrained(tmp_path)
    shutil.copytree(tiny_tokenizer(), tmp_path, dirs_exist_ok=True)
    with refused("tokenizer-class") if replaced else contextlib.nullcontext():
        check_exported_tokenizer(tmp_path, torch.arange(30)[None])
