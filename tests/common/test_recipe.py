"""Recipes end in a tree or in one line, and soon."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from emo.common.errors import UserError
from emo.common.recipe import read_recipe
from emo.pipeline.config import RunConfig, load_config
from tests.helpers.refusals import refused

GOOD = (
    "output_dir: runs/x\n"
    "data: { dir: d, tokenizer: t, sources: [{ files: a.txt }] }\n"
    "model: { architecture: { model_type: llama } }\n"
    "train: { max_steps: 10, learning_rate: 1.0e-3 }\n"
)
MISTAKES: dict[str, list[bytes | str]] = {  # recipes by the code of their refusal
    "recipe-unreadable": [
        GOOD.encode("utf-16"),
        "- 1\n- 2\n",
        "train: !!python/object:os.system {}\n",
        GOOD + "output_dir: runs/y\n",
        "train: " + "[" * 5000 + "]" * 5000,
        GOOD + "# " + "x" * 300_000,
    ],
    "unknown-key": [GOOD + "trian: {lr: 1}\n"],
    "bad-value": [GOOD + "objective: 5\n"],
    "extends": [GOOD + "extends: ../../x.yaml\n"],
    "no-recipe": [GOOD + "extends: nowhere.yaml\n"],
    "recipe-circle": [GOOD + "extends: recipe.yaml\n"],
    "secret": [GOOD.replace("max_steps", "copy_to: 'https://me:hunter2@host/x', max_steps")],
}
OVERRIDES = {
    "bad-override": ["train.learning_rate=[", "data.sources.0.files=x", "train.learning_rate=" + "9" * 5000],
    "bad-value": [
        *("train.betas=[2,3]", "data.sequence_len=1.5", "train.learning_rate=.inf", "train.max_steps=true"),
        "train.seed=100000000000000000",
    ],
    "unknown-key": ["trian.lr=1"],
}


def load(tmp_path: Path, content: bytes | str, *overrides: str) -> RunConfig:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load_config(path, list(overrides))


@pytest.mark.parametrize(
    ("content", "overrides", "code"),
    [
        *((content, [], code) for code, contents in MISTAKES.items() for content in contents),
        *((GOOD, [override], code) for code, several in OVERRIDES.items() for override in several),
    ],
)
def test_what_cannot_be_used_is_one_line_and_soon(
    tmp_path: Path, content: bytes | str, overrides: list[str], code: str
) -> None:
    began = time.process_time()
    with refused(code) as error:
        load(tmp_path, content, *overrides)
    assert "hunter2" not in str(error.value) and len(str(error.value)) < 400
    assert time.process_time() - began < 3


def test_what_yaml_allows_is_read(tmp_path: Path) -> None:
    """Anchors, merges, a byte order mark, exponents without a point."""
    text = (
        "data: { dir: d, tokenizer: t, sources: [&s {files: a.txt, weight: 2}, {<<: *s, files: b.txt}] }\n"
        "output_dir: runs/x\nmodel: { architecture: { model_type: llama } }\ntrain: "
        "{ max_steps: 10, learning_rate: 2e-5 }\n"
    )
    config = load(tmp_path, text.encode("utf-8-sig"), "train.eps=1e-7")
    assert [source.weight for source in config.data.sources] == [2, 2]
    assert (config.train.learning_rate, config.train.eps) == (2e-5, 1e-7)


def test_a_misspelt_key_in_a_list_is_answered_with_its_neighbour(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.sources\.0\.fiels; did you mean files"):
        load(tmp_path, GOOD.replace("files", "fiels"))


def test_sections_that_share_an_anchor_are_overridden_apart(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("objective: { params: &p { a: 1 } }\nmodel: { architecture: *p }\n")
    tree = read_recipe(path, ["objective.params.a=2"])
    assert tree == {"objective": {"params": {"a": 2}}, "model": {"architecture": {"a": 1}}}
