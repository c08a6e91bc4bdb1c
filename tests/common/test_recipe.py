"""Recipes: whatever a file or an override holds, it ends in a tree or in one line, and soon."""

from __future__ import annotations

import argparse
import errno
import re
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from common.commands import parse_arguments
from common.errors import OTHER_NAMES, UserError
from common.recipe import KEYS, Section, mark, marked, parse_section, read_recipe
from data_prep.__main__ import main as data_prep
from pipeline.__main__ import main as pipeline
from pipeline.config import RunConfig, load_config

GOOD = (
    "run_dir: runs/x\n"
    "data: { dir: d, tokenizer: t, sources: [{ files: a.txt }] }\n"
    "model: { architecture: { model_type: llama } }\n"
    "train: { steps: 10, lr: 1.0e-3 }\n"
)


def load(tmp_path: Path, content: bytes | str, *overrides: str) -> RunConfig:
    """The run configuration of a recipe with this content."""
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load_config(path, list(overrides))


def refused(tmp_path: Path, message: str, content: bytes | str, *overrides: str) -> None:
    """One short line, within three seconds of work."""
    began = time.process_time()
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path, content, *overrides)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert time.process_time() - began < 3


FILES: dict[str, tuple[bytes | str, str]] = {
    "binary": (bytes(range(256)), "byte 128 is not UTF-8 text|not YAML"),
    "UTF-16": (GOOD.encode("utf-16"), "byte 0 is not UTF-8 text"),
    "Latin-1": (GOOD.encode() + b"# caf\xe9\n", "byte .* is not UTF-8 text"),
    "NUL": (GOOD + "\0", "not YAML"),
    "empty": ("", "must be a mapping of sections"),
    "a list": ("- 1\n- 2\n", "must be a mapping of sections"),
    "two documents": (GOOD + "---\n" + GOOD, "not YAML: but found another document"),
    "unclosed": ("train: {lr: [\n", "not YAML: .*, line 2"),
    "tabs": ("train:\n\tlr: 1\n", "not YAML: .*, line 2"),
    "unknown alias": ("train: *x\n", "not YAML: found undefined alias 'x', line 1"),
    "Python object": ("train: !!python/object:os.system {}\n", "not YAML: could not determine a constructor"),
    "broken date": (GOOD.replace("steps: 10", "steps: 2024-13-45"), "cannot be read: month must be"),
    "odd timestamp": ("train: !!timestamp x\n", "not YAML"),
    "a key twice": (GOOD + "run_dir: runs/y\n", "key run_dir given twice, line 5"),
    "an inner key twice": (
        GOOD.replace("steps: 10", "steps: 10, steps: 20"),
        "key steps given twice, line 4",
    ),
    "a bomb of aliases": (f"a: &a [x, x]\nb: [{'*a, ' * 60}]\n", "more than 50 aliases, line 2"),
    "an alias in itself": ("train: &t {lr: *t}\n", "not YAML: .*recursive.*, line 1"),
    "nested deeply": ("train: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
    "very long": (GOOD + "# " + "x" * 300_000, "more than 128 KiB"),
    "unknown section": (GOOD + "trian: {lr: 1}\n", r"unknown key trian; did you mean train\?"),
    "number as a key": (GOOD + "7: 1\n", "unknown key 7; known: run_dir"),
    "a section that is a value": (GOOD.replace("train: {", "objective: 5\ntrain: {"), "objective: must be a"),
    "extends a list": (GOOD + "extends: [a.yaml]\n", "extends must be the name of one file"),
    "extends nothing": (GOOD + "extends: nowhere.yaml\n", r"nowhere\.yaml does not exist"),
    "extends itself": (GOOD + "extends: recipe.yaml\n", "in a circle: recipe.yaml -> recipe.yaml"),
    "extends a directory": (GOOD + "extends: .\n", "is not a file"),
    "extends another folder": (GOOD + "extends: ../../x.yaml\n", "neither in its folder nor part of this"),
    "extends the system": (GOOD + "extends: /etc/hostname\n", "neither in its folder nor part of this"),
    "a password": (
        GOOD.replace("steps: 10", "steps: 10, copy_to: 'https://me:hunter2@host/x'"),
        r"train\.copy_to holds a password or token",
    ),
}

OVERRIDES = {
    "train.lr=[": r"override 'train.lr=\[': the value is not YAML",
    "data.dir=*x": "the value is not YAML: found undefined alias 'x'",
    "train.lr={a: 1, a: 2}": "key a given twice",
    "train.lr=2024-13-45": "the value is month must be",
    "train.lr=" + "9" * 5000: "override .*: the value is .*4300 digits",
    "train.betas=[2,3]": r"train\.betas\.0: Input should be less than 1",
    "train.betas=[0.9]": r"train\.betas",
    "train.betas=[0.9, -0.1]": r"train\.betas\.1",
    "data.block=1e30": r"data\.block: ",
    "data.block=100000000000": r"data\.block: ",
    "data.block=1.5": r"data\.block: ",
    "data.shards=1e30": r"data\.shards: ",
    "train.steps=1e30": r"train\.steps: .*exceeded maximum size",
    "train.seed=-1e30": r"train\.seed: .*exceeded maximum size",
    "train.seed=100000000000000000": r"train\.seed: 10+ is far too large",
    "train.lr=.inf": r"train\.lr: Input should be a finite number",
    "train.lr=nan": r"train\.lr: ",
    "train.steps=true": r"train: steps must hold numbers, not true",
    "objective.params={ratio_cap: yes}": "objective: params must hold numbers, not true",
    "data.sources.0.files=x": "sources is a list; give it whole",
    "train..lr=1": "must read key.sub=value",
    "=1": "must read key.sub=value",
    "train.=1": "must read key.sub=value",
    "trian.lr=1": "unknown key trian; did you mean train",
    "dta.dir=/x": "unknown key dta; did you mean data",
}


@pytest.mark.parametrize("case", FILES)
def test_a_recipe_that_cannot_be_used_gives_one_line(tmp_path: Path, case: str) -> None:
    content, message = FILES[case]
    refused(tmp_path, message, content)


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda text: text[:30])
def test_an_override_that_cannot_be_used_gives_one_line(tmp_path: Path, override: str) -> None:
    refused(tmp_path, OVERRIDES[override], GOOD, override)


def test_recipes_in_a_circle_are_named(tmp_path: Path) -> None:
    for name, base in (("a", "b"), ("b", "c"), ("c", "b")):
        (tmp_path / f"{name}.yaml").write_text(f"extends: {base}.yaml\n")
    with pytest.raises(UserError, match=r"in a circle: b\.yaml -> c\.yaml -> b\.yaml"):
        read_recipe(tmp_path / "a.yaml", [])


def test_an_unreadable_recipe_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD)

    def denied(*_: object) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("common.recipe.read_bytes", denied)
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        read_recipe(path, [])


def test_what_yaml_allows_still_reads(tmp_path: Path) -> None:
    """Anchors, merges, a byte order mark, exponents without a point."""
    text = (
        "data: { dir: d, tokenizer: t, sources: [&s {files: a.txt, weight: 2}, {<<: *s, files: b.txt}] }\n"
        "run_dir: runs/x\nmodel: { architecture: { model_type: llama } }\ntrain: { steps: 10, lr: 2e-5 }\n"
    )
    config = load(tmp_path, b"\xef\xbb\xbf" + text.encode(), "train.eps=1e-7")
    assert [source.weight for source in config.data.sources] == [2, 2]
    assert (config.train.lr, config.train.eps) == (2e-5, 1e-7)


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


def test_fields_say_what_they_change() -> None:
    assert marked(Outer, "free") == {"inner.loose", "maybe.loose", "whole", "needed"}
    assert marked(Outer, "place") == {"place"}
    with pytest.raises(UserError, match=r"inner\.loose: Input should be greater than 0"):
        parse_section(Outer, {"needed": 1, "inner": {"loose": 0}}, "")
    with pytest.raises(UserError, match="needed: Field required"):
        parse_section(Outer, {}, "")
    with pytest.raises(UserError, match=r"unknown key many\.0\.plan; did you mean plain"):
        parse_section(Outer, {"needed": 1, "many": [{"plan": 1}]}, "")


def test_overrides_may_follow_options() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command")
    one = commands.add_parser("one")
    one.add_argument("recipe")
    one.add_argument("overrides", nargs="*")
    one.add_argument("--workers", type=int)
    commands.add_parser("two")

    def parsed(line: str) -> Any:
        return vars(parse_arguments(parser, line.split()))

    expected = {"command": "one", "recipe": "r", "overrides": ["a=1", "b=2"], "workers": 3}
    for line in (
        "r a=1 b=2 --workers 3",
        "r a=1 --workers 3 b=2",
        "--workers 3 r a=1 b=2",
        "r --workers 3 a=1 b=2",
    ):
        assert parsed(f"one {line}") == expected, line
    for line in ("one r --wrkers 3", "one r a=1 --wrkers", "two x=1"):
        with pytest.raises(SystemExit):
            parsed(line)


def test_both_commands_take_overrides_after_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD)
    assert data_prep(["prepare", str(path), "--workers", "1", "data.blok=3"]) == 2
    assert "unknown key data.blok; did you mean block?" in capsys.readouterr().err
    assert pipeline(["plan", str(path), "--gpus", "1xA100-80G", "train.stps=3"]) == 2
    assert "unknown key train.stps; did you mean steps?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("train.learning_rate", "unknown key train.learning_rate; did you mean train.lr?"),
        ("train.leraning_rate", "did you mean train.lr?"),
        ("data.max_seq_length", "did you mean data.block?"),
        ("output_dir", "unknown key output_dir; did you mean run_dir?"),
        ("train.wamup_ratio", "did you mean warmup_ratio?"),
    ],
)
def test_names_that_other_trainers_use_are_known(tmp_path: Path, key: str, hint: str) -> None:
    refused(tmp_path, re.escape(hint), GOOD, f"{key}=1")


def test_other_names_lead_to_keys_of_a_recipe() -> None:
    for key in OTHER_NAMES.values():
        section: Any = RunConfig
        for part in key.split("."):
            assert part in section.model_fields, key
            section = section.model_fields[part].annotation


def test_a_recipe_that_comes_with_this_program_is_found_by_its_name() -> None:
    for name in ("stories260k-wikitext2", "storis260k-wikitext2.yaml"):
        with pytest.raises(UserError, match=r"did you mean launch/recipes/stories260k-wikitext2\.yaml\?"):
            read_recipe(Path(name), [])
    with pytest.raises(UserError, match=r"experiment nowhere\.yaml does not exist; see .*/experiments for"):
        read_recipe(Path("nowhere.yaml"), [], noun="experiment")
