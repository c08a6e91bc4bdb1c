"""Recipes end in a tree or in one line, and soon; what a message advises is a cure."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import pytest
from pydantic import Field

from emo.common.commands import parse_arguments
from emo.common.errors import UserError
from emo.common.recipe import Section, mark, marked, parse_section, read_recipe
from emo.pipeline.config import RunConfig, load_config

GOOD = (
    "output_dir: runs/x\n"
    "data: { dir: d, tokenizer: t, sources: [{ files: a.txt }] }\n"
    "model: { architecture: { model_type: llama } }\n"
    "train: { max_steps: 10, learning_rate: 1.0e-3 }\n"
)


def load(tmp_path: Path, content: bytes | str, *overrides: str) -> RunConfig:
    """Return the run configuration of a recipe with this content."""
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load_config(path, list(overrides))


UNREADABLE: list[bytes | str] = [
    GOOD.encode("utf-16"),
    "- 1\n- 2\n",
    GOOD + "---\n" + GOOD,
    "train: !!python/object:os.system {}\n",
    GOOD + "output_dir: runs/y\n",
    "train: &t {learning_rate: *t}\n",
    "train: " + "[" * 5000 + "]" * 5000,
    GOOD + "# " + "x" * 300_000,
]
FILES: list[tuple[bytes | str, str]] = [
    *((content, "recipe-unreadable") for content in UNREADABLE),
    (GOOD + "trian: {lr: 1}\n", "unknown-key"),
    (GOOD.replace("train: {", "objective: 5\ntrain: {"), "bad-value"),
    (GOOD + "extends: ../../x.yaml\n", "extends"),
    (GOOD + "extends: nowhere.yaml\n", "no-recipe"),
    (GOOD + "extends: recipe.yaml\n", "recipe-circle"),
    (GOOD.replace("max_steps: 10", "max_steps: 10, copy_to: 'https://me:hunter2@host/x'"), "secret"),
]
OVERRIDES = {
    "bad-override": ["train.learning_rate=[", "data.sources.0.files=x", "train.learning_rate=" + "9" * 5000],
    "bad-value": [
        *("train.betas=[2,3]", "data.sequence_len=1.5", "train.learning_rate=.inf", "train.max_steps=true"),
        "train.seed=100000000000000000",
    ],
    "unknown-key": ["trian.lr=1"],
}


@pytest.mark.parametrize(
    ("content", "overrides", "code"),
    [
        *((content, [], code) for content, code in FILES),
        *((GOOD, [override], code) for code, several in OVERRIDES.items() for override in several),
    ],
)
def test_what_cannot_be_used_is_one_line_and_soon(
    tmp_path: Path, content: bytes | str, overrides: list[str], code: str
) -> None:
    began = time.process_time()
    with pytest.raises(UserError) as error:
        load(tmp_path, content, *overrides)
    assert error.value.code == code and "hunter2" not in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    assert time.process_time() - began < 3


def test_what_yaml_allows_still_reads(tmp_path: Path) -> None:
    """Anchors, merges, a byte order mark, exponents without a point."""
    text = (
        "data: { dir: d, tokenizer: t, sources: [&s {files: a.txt, weight: 2}, {<<: *s, files: b.txt}] }\n"
        "output_dir: runs/x\nmodel: { architecture: { model_type: llama } }\ntrain: "
        "{ max_steps: 10, learning_rate: 2e-5 }\n"
    )
    config = load(tmp_path, b"\xef\xbb\xbf" + text.encode(), "train.eps=1e-7")
    assert [source.weight for source in config.data.sources] == [2, 2]
    assert (config.train.learning_rate, config.train.eps) == (2e-5, 1e-7)


def test_an_override_changes_one_place_only(tmp_path: Path) -> None:
    """Sections that share an anchor stay apart."""
    path = tmp_path / "recipe.yaml"
    path.write_text("objective: { params: &p { a: 1 } }\nmodel: { architecture: *p }\n")
    tree = read_recipe(path, ["objective.params.a=2"])
    assert tree == {"objective": {"params": {"a": 2}}, "model": {"architecture": {"a": 1}}}


class Inner(Section):
    plain: int = 1
    loose: int = mark("free", 2, gt=0)


class Outer(Section):
    inner: Inner = Inner()
    maybe: Inner | None = None
    many: list[Inner] = []
    whole: Inner = mark("free", Inner())
    needed: int = mark("free")
    place: str = mark("place", "x")
    other: float = Field(1.0, gt=0)


def test_fields_have_marks_limits_and_neighbours() -> None:
    assert marked(Outer, "free") == {"inner.loose", "maybe.loose", "whole", "needed"}
    assert marked(Outer, "place") == {"place"}
    for tree, key in (
        ({"needed": 1, "inner": {"loose": 0}}, r"inner\.loose"),
        ({}, "needed"),
        ({"needed": 1, "many": [{"plan": 1}]}, r"many\.0\.plan; did you mean plain"),
    ):
        with pytest.raises(UserError, match=key):
            parse_section(Outer, tree, "")


def test_overrides_may_follow_options() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command")
    first = commands.add_parser("first")
    first.add_argument("recipe")
    first.add_argument("overrides", nargs="*")
    first.add_argument("--workers", type=int)
    commands.add_parser("second")
    expected = {"command": "first", "recipe": "r", "overrides": ["a=1", "b=2"], "workers": 3}
    for line in ("r a=1 b=2 --workers 3", "r a=1 --workers 3 b=2", "--workers 3 r a=1 b=2"):
        assert vars(parse_arguments(parser, ["first", *line.split()])) == expected, line
    for line in ("first r --wrkers 3", "first r a=1 --wrkers", "second x=1"):
        with pytest.raises(SystemExit):
            parse_arguments(parser, line.split())
