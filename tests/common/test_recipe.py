"""Recipes: whatever a file or an override holds, it ends in a tree or in one line, and soon."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from emo.common.commands import parse_arguments
from emo.common.errors import UserError
from emo.common.recipe import KEYS, OTHER_NAMES, Section, mark, marked, parse_section, read_recipe
from emo.data_prep.cli import main as data_prep
from emo.pipeline.cli import main as pipeline
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
    bytes(range(256)),
    GOOD.encode("utf-16"),
    GOOD.encode() + b"# caf\xe9\n",
    GOOD + "\0",
    "",
    "- 1\n- 2\n",
    GOOD + "---\n" + GOOD,
    "train: {learning_rate: [\n",
    "train:\n\tlr: 1\n",
    "train: *x\n",
    "train: !!python/object:os.system {}\n",
    GOOD.replace("max_steps: 10", "steps: 2024-13-45"),
    "train: !!timestamp x\n",
    GOOD + "output_dir: runs/y\n",
    GOOD.replace("max_steps: 10", "max_steps: 10, max_steps: 20"),
    f"a: &a [x, x]\nb: [{'*a, ' * 60}]\n",  # a bomb of aliases
    "train: &t {learning_rate: *t}\n",
    "train: " + "[" * 5000 + "]" * 5000,
    GOOD + "# " + "x" * 300_000,
    GOOD + "extends: .\n",
    'output_dir: "\\ud800\\udc00"\n',  # half characters
]
FILES: list[tuple[bytes | str, str]] = [
    *((content, "recipe-unreadable") for content in UNREADABLE),
    (GOOD + "trian: {lr: 1}\n", "unknown-key"),
    (GOOD + "7: 1\n", "unknown-key"),
    (GOOD.replace("train: {", "objective: 5\ntrain: {"), "bad-value"),
    (GOOD + "extends: [a.yaml]\n", "extends"),
    (GOOD + "extends: ../../x.yaml\n", "extends"),
    (GOOD + "extends: /etc/hostname\n", "extends"),
    (GOOD + "extends: nowhere.yaml\n", "no-recipe"),
    (GOOD + "extends: recipe.yaml\n", "recipe-circle"),
    (GOOD.replace("max_steps: 10", "max_steps: 10, copy_to: 'https://me:hunter2@host/x'"), "secret"),
]
OVERRIDES = {
    "bad-override": [
        *(
            "train.learning_rate=[",
            "data.dir=*x",
            "train.learning_rate={a: 1, a: 2}",
            "train.learning_rate=2024-13-45",
        ),
        *(
            "train.learning_rate=" + "9" * 5000,
            "data.sources.0.files=x",
            "train..lr=1",
            "=1",
            "train.=1",
            "train.learning_rate",
        ),
    ],
    "bad-value": [
        *("train.betas=[2,3]", "train.betas=[0.9]", "train.betas=[0.9, -0.1]", "data.sequence_len=1e30"),
        *(
            "data.sequence_len=100000000000",
            "data.sequence_len=1.5",
            "data.shards=1e30",
            "train.max_steps=1e30",
        ),
        *(
            "train.seed=-1e30",
            "train.seed=100000000000000000",
            "train.learning_rate=.inf",
            "train.learning_rate=nan",
        ),
        *("train.max_steps=true", "objective.params={ratio_cap: yes}"),
    ],
    "unknown-key": ["trian.lr=1", "dta.dir=/x"],
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


def test_recipes_in_a_circle_are_named(tmp_path: Path) -> None:
    for name, base in (("a", "b"), ("b", "c"), ("c", "b")):
        (tmp_path / f"{name}.yaml").write_text(f"extends: {base}.yaml\n")
    with pytest.raises(UserError, match=r"b\.yaml -> c\.yaml -> b\.yaml"):
        read_recipe(tmp_path / "a.yaml", [])


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


def test_the_top_level_keys_are_those_of_a_run() -> None:
    assert set(KEYS) == set(RunConfig.model_fields)


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


def test_overrides_may_follow_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command")
    first = commands.add_parser("first")
    first.add_argument("recipe")
    first.add_argument("overrides", nargs="*")
    first.add_argument("--workers", type=int)
    commands.add_parser("second")
    expected = {"command": "first", "recipe": "r", "overrides": ["a=1", "b=2"], "workers": 3}
    for line in (
        "r a=1 b=2 --workers 3",
        "r a=1 --workers 3 b=2",
        "--workers 3 r a=1 b=2",
        "r --workers 3 a=1 b=2",
    ):
        assert vars(parse_arguments(parser, ["first", *line.split()])) == expected, line
    for line in ("first r --wrkers 3", "first r a=1 --wrkers", "second x=1"):
        with pytest.raises(SystemExit):
            parse_arguments(parser, line.split())
    (tmp_path / "recipe.yaml").write_text(GOOD)
    recipe = str(tmp_path / "recipe.yaml")
    assert data_prep(["prepare", recipe, "--workers", "1", "data.sequence_length=3"]) == 2
    assert pipeline(["plan", recipe, "--gpus", "1xA100-80G", "train.max_stps=3"]) == 2
    assert re.findall(r"mean (\w+)\?", capsys.readouterr().err) == ["sequence_len", "max_steps"]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.lr", "train.learning_rate"),
        ("train.leraning_rate", "learning_rate"),
        ("data.max_seq_length", "data.sequence_len"),
        ("run_dir", "output_dir"),
        ("train.wamup_ratio", "warmup_ratio"),
    ],
)
def test_names_that_other_trainers_use_are_known(tmp_path: Path, key: str, meant: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"did you mean {meant}?")):
        load(tmp_path, GOOD, f"{key}=1")


def test_other_names_lead_to_keys_of_a_recipe() -> None:
    for key in OTHER_NAMES.values():
        section: Any = RunConfig
        for part in key.split("."):
            assert part in section.model_fields, key
            section = section.model_fields[part].annotation


@pytest.mark.parametrize("name", ["stories260k-wikitext2", "storis260k-wikitext2.yaml"])
def test_a_recipe_that_comes_with_this_program_is_found_by_its_name(name: str) -> None:
    with pytest.raises(UserError, match=r"launch/recipes/stories260k-wikitext2\.yaml\?"):
        read_recipe(Path(name), [])
