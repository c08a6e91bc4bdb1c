"""Extended vocabularies."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

from emo.data_prep.encoding.vocabulary import extend_vocabulary
from emo.data_prep.shards.format import open_prepared
from emo.data_prep.sources.world import corpus, read_json_lines
from emo.pipeline.cli import main
from emo.pipeline.config import load_config
from emo.pipeline.model.build import check_fits, model_config
from tests.helpers.evaluating import tiny_model, tiny_tokenizer
from tests.helpers.launching import prepare
from tests.helpers.refusals import refused

TEXTS = [str(row["text"]) for row in islice(read_json_lines(corpus("world")), 200)]


def byte_bpe() -> Tokenizer:
    """Return a tokenizer like GPT-2's, with an end token after the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS[:50], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def tokenizers(tmp_path: Path) -> dict[str, Tokenizer]:
    return {"bytes": byte_bpe(), "sentencepiece": tiny_tokenizer(tmp_path / "sp").backend_tokenizer}


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_text_needs_fewer_tokens_and_old_ids_stay(tmp_path: Path, kind: str) -> None:
    old = tokenizers(tmp_path)[kind]
    extension = extend_vocabulary(old, TEXTS, 100, ["<|new|>"])
    new = extension.tokenizer
    assert len(extension.parts) == 101
    assert old.get_vocab().items() <= new.get_vocab().items()
    size = max(old.get_vocab().values()) + 1
    assert sorted(extension.parts) == list(range(size, size + 101))
    assert new.token_to_id("<|new|>") == size + 100 and extension.parts[size + 100] == []
    before = [old.encode(text, add_special_tokens=False).ids for text in TEXTS]
    after = [new.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert sum(map(len, after)) < 0.9 * sum(map(len, before))
    expanded = [[part for i in ids for part in extension.parts.get(i, [i])] for ids in after]
    assert expanded == before  # the parts of new pieces are the old pieces
    pieces = {number: piece for piece, number in new.get_vocab().items()}
    del extension.parts[size + 100]
    for number, parts in extension.parts.items():  # FVT uses the mean of these parts
        assert [token.id for token in old.model.tokenize(pieces[number])] == parts
    assert [new.decode(ids) for ids in after] == [old.decode(ids) for ids in before]


def test_frequent_characters_get_a_piece_instead_of_bytes(tmp_path: Path) -> None:
    old = tokenizers(tmp_path)["sentencepiece"]
    new = extend_vocabulary(old, ["грядка и грач"] * 3, 40).tokenizer
    tokens = new.encode("грядка", add_special_tokens=False).tokens
    assert len(tokens) < len(old.encode("грядка", add_special_tokens=False).tokens) / 2
    assert not any(token.startswith("<0x") for token in tokens)


def test_a_tokenizer_that_is_not_bpe_is_rejected() -> None:
    from tests.helpers.refusals import refused

    with refused("extension"):
        extend_vocabulary(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), ["a"], 1)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a recipe with prepared data and a pre-trained model, and return its path."""
    folder = tmp_path_factory.mktemp("vocabulary")
    model = tiny_model(folder / "model")
    (folder / "text.txt").write_text("\n".join(text.replace("\n", " ") for text in TEXTS))
    tree: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "data": {"dir": str(folder / "data"), "tokenizer": str(model), "sequence_len": 64, "shards": 1},
        "model": {"path": str(model), "dtype": "float32"},
        "train": {"max_steps": 2},
    }
    tree["data"] |= {
        "sources": [{"files": str(folder / "text.txt"), "format": "lines"}],
        "validation_fraction": 0.1,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert prepare(["prepare", str(path), "--workers", "1"]) == 0
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_new_rows_are_the_mean_of_their_old_pieces(
    recipe: Path, tmp_path: Path, tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(tmp_path / "base", tie_word_embeddings=tied)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    out = tmp_path / "out"
    options = ["--pieces", "50", "--special", "<|im_start|>", "--pad_to_multiple_of", "64"]
    command = ["extend-vocabulary", str(recipe), f"model.path={tmp_path / 'base'}", *options]
    code = main([*command, "--output_path", str(out)])
    printed, problem = capsys.readouterr()
    assert code == 0 and "51 new tokens" in printed, problem
    model = AutoModelForCausalLM.from_pretrained(out)
    assert "rope_theta" in json.loads((out / "config.json").read_text())  # which transformers 4 reads
    assert len(model.get_input_embeddings().weight) % 64 == 0
    tokenizer = AutoTokenizer.from_pretrained(out)
    old = AutoTokenizer.from_pretrained(tmp_path / "base")
    for layer, before in (
        (model.get_input_embeddings(), base.get_input_embeddings()),
        (model.get_output_embeddings(), base.get_output_embeddings()),
    ):
        assert layer.weight[: len(old)].equal(before.weight)
        merges = json.loads((out / "tokenizer.json").read_text())["model"]["merges"][-1]
        left, right = merges if isinstance(merges, list) else merges.split(" ")
        new, ids = (
            tokenizer.convert_tokens_to_ids(left + right),
            tokenizer.convert_tokens_to_ids([left, right]),
        )
        assert new >= len(old) and max(ids) < len(old)
        assert torch.allclose(layer.weight[new], before.weight[ids].mean(0))
    rates = [float(line.split()[1]) for line in printed.splitlines() if "per character" in line]
    assert rates[1] < rates[0]


def test_an_existing_directory_is_kept(recipe: Path, tmp_path: Path) -> None:
    assert main(["extend-vocabulary", str(recipe), "--pieces", "5", "--output_path", str(tmp_path)]) == 2
    assert main(["extend-vocabulary", str(recipe), "--output_path", str(tmp_path / "new")]) == 2
    assert not list(tmp_path.iterdir())


def test_a_special_token_without_an_embedding_is_accepted(recipe: Path, tmp_path: Path) -> None:
    """The text-only models of Gemma 3 have such a token, which is for images."""
    size = len(AutoTokenizer.from_pretrained(recipe.parent / "model"))
    tokenizer = AutoTokenizer.from_pretrained(recipe.parent / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    model = tiny_model(tmp_path / "model", tokenizer=tokenizer, vocab_size=size)
    changes = [f"data.dir={tmp_path / 'data'}", f"data.tokenizer={model}", f"model.path={model}"]
    assert prepare(["prepare", str(recipe), "--workers", "1", *changes]) == 0
    config = load_config(recipe, changes)
    manifest = open_prepared(config.data)[0].manifest
    assert manifest.used_ids <= size < manifest.vocab_size
    check_fits(model_config(config.model), config.model, manifest)
    out = tmp_path / "out"
    assert main(["extend-vocabulary", str(recipe), *changes, "--pieces", "5", "--output_path", str(out)]) == 0
    extended = AutoModelForCausalLM.from_pretrained(out)
    old = AutoModelForCausalLM.from_pretrained(model).get_input_embeddings().weight
    assert extended.get_input_embeddings().weight[:size].equal(old)
    shards = [shard.model_copy(update={"largest_id": size}) for shard in manifest.shards]
    with refused("vocabulary"):
        check_fits(model_config(config.model), config.model, manifest.model_copy(update={"shards": shards}))
