"""The documents name links, files, options and keys that exist. `make docs-test` runs their commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.conftest import REPO
from tests.helpers import documents, reference

WALK = re.compile(r"^\| (`[\w/.]+\.py`(?:, `[\w/.]+\.py`)*) \| (`.*?`) \|", re.M)


@pytest.mark.parametrize("path", documents.documents(), ids=lambda path: path.stem)
def test_a_document_names_what_exists(path: Path) -> None:
    assert documents.faults(path) == []


def test_the_reference_has_every_key_of_the_models() -> None:
    for path, text in ((reference.PAGE, reference.page()), (reference.SCHEMA, reference.schema_text())):
        assert path.read_text(encoding="utf-8") == text, "run make reference"


def test_the_schema_asks_for_no_key() -> None:
    """The recipe that a recipe extends may have it."""
    assert '"required"' not in reference.schema_text()


@pytest.mark.parametrize("path", documents.documents(), ids=lambda path: path.stem)
def test_a_recipe_says_what_a_model_computes_in(path: Path) -> None:
    """Without a GPU the default of bfloat16 makes minutes an hour."""
    for block in re.findall(r"(?ms)^```yaml\n(.*?)^```", path.read_text(encoding="utf-8")):
        model = (yaml.safe_load(block) or {}).get("model", {})
        assert "dtype" in model or not {"path", "architecture"} & model.keys(), block


def test_every_page_is_linked_from_the_readme() -> None:
    readme = (REPO / "README.md").read_text()
    assert [path.name for path in (REPO / "docs").glob("*.md") if f"(docs/{path.name})" not in readme] == []


def test_a_walk_names_functions_that_exist() -> None:
    """In the tables of architecture.md: files, what is called there, and what happens."""
    stations = WALK.findall((REPO / "docs" / "explanation" / "architecture.md").read_text())
    assert len(stations) > 30
    for files, names in stations:
        defined = set().union(*(documents.functions(REPO / file) for file in re.findall(r"`(.*?)`", files)))
        assert set(re.findall(r"`(.*?)`", names)) <= defined, files


MISTAKES = {
    "[x](nowhere.md)": "nowhere.md",
    "[x](#no-heading)": "#no-heading",
    "    make quickstart\n": "indented",
    "```sh\nmake\n```": "language",
    "```bash\n# needs: luck\nmake\n```": "luck",
    "```bash\nemo plan RECIPE --seeds 1\n```": "--seeds",  # eval's
    "```bash\n./launch/continual.sh launch/recipes/none.yaml\n```": "launch/recipes/none.yaml",
    "`emo prepare --bst`": "--bst",
    "`train.saveevery` says how often": "train.saveevery",
    "```yaml\ntrain: { rate: 1 }\n```": "train.rate",
    "```yaml\n# a.yaml\ndata: { dir: a, tokenizer: b }\n```": "sources",
}


def test_mistakes_are_found(tmp_path: Path) -> None:
    for text, fault in MISTAKES.items():
        (tmp_path / "page.md").write_text(f"# Page\n\n{text}\n")
        assert any(fault in line for line in documents.faults(tmp_path / "page.md")), text
