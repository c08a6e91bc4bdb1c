"""Documents name only links, files, options and keys that exist. `make docs-test` runs their commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.helpers import documents, reference, site

NAMING = {".py", ".yaml", ".sh", ".sbatch", ".scron", ".toml"}
DOCUMENT = re.compile(r"(?<![\w/.])docs/[\w/-]+\.(?:md|svg|json|ipynb|png)")
WALK = re.compile(r"^\| (`[\w/.]+\.py`(?:, `[\w/.]+\.py`)*) \| (`.*?`) \|", re.M)


def title(path: Path) -> str:
    return str(path.relative_to(REPO))


@pytest.mark.parametrize("path", documents.documents(), ids=title)
def test_a_document_names_what_exists(path: Path) -> None:
    """A recipe also sets a dtype, because the default bfloat16 turns minutes into an hour on a CPU."""
    assert documents.faults(path) == []


def test_the_reference_has_every_key_of_the_models() -> None:
    for path, text in ((reference.PAGE, reference.page()), (reference.SCHEMA, reference.schema_text())):
        assert path.read_text(encoding="utf-8") == text, "run make reference"


def test_the_schema_asks_for_no_key() -> None:
    """The schema requires no key, because a recipe may get any key from the recipe that it extends."""
    assert '"required"' not in reference.schema_text()


def test_the_navigation_has_every_page() -> None:
    pages = {site.site_path(path) for path in documents.documents()[1:]} | site.PAGES.keys()
    assert {name for name in documents.navigation() if not name.startswith("source/")} == pages


def test_code_names_documents_that_exist() -> None:
    """Every document that a docstring, message or script names exists."""
    files = [path for part in documents.ROOMS.split("|") for path in (REPO / part).rglob("*.*")]
    files += [*REPO.glob("*.*"), *REPO.glob("examples/*.py"), *REPO.glob("tests/campaigns/*.py")]
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.suffix in NAMING}
    named = {(path, name) for path, text in texts.items() for name in DOCUMENT.findall(text)}
    missing = [pair for pair in named if not (REPO / pair[1]).exists() and pair[1][5:] not in site.PAGES]
    assert not missing


def test_a_walk_names_functions_that_exist() -> None:
    """The tables of CONTRIBUTING.md name only functions that the files in the same row define."""
    stations = WALK.findall((REPO / "CONTRIBUTING.md").read_text())
    assert len(stations) > 30
    for files, names in stations:
        defined = set().union(*(documents.functions(REPO / file) for file in re.findall(r"`(.*?)`", files)))
        assert set(re.findall(r"`(.*?)`", names)) <= defined, files


MISTAKES = {
    "[x](nowhere.md)": "nowhere.md",
    "[x](#no-heading)": "#no-heading",
    "    make quickstart\n": "indented",
    "```sh\nmake\n```": "language",
    "<!-- needs: luck -->\n```bash\nmake\n```": "luck",
    "```bash\nemo plan RECIPE --seeds 1\n```": "--seeds",  # an option of eval
    "```bash\n./launch/continual.sh launch/recipes/none.yaml\n```": "launch/recipes/none.yaml",
    "`emo prepare --bst`": "--bst",
    "`train.saveevery` says how often": "train.saveevery",
    "```yaml\ntrain: { rate: 1 }\n```": "train.rate",
    "```yaml\nmodel: { path: a }\n```": "dtype",
    "```yaml\n# a.yaml\ndata: { dir: a, tokenizer: b }\n```": "sources",
}


def test_a_notebook_is_read_as_a_program(tmp_path: Path) -> None:
    cells = [
        ("markdown", "[x](nowhere.md)"),
        ("code", "%%bash\nemo plan"),
        ("code", "n = 7\n!echo {n} > out\n!emo prepare --bst"),
    ]
    tree = {"cells": [{"cell_type": kind, "source": text.splitlines(True)} for kind, text in cells]}
    notebook = tmp_path / "page.ipynb"
    notebook.write_text(json.dumps(tree))
    assert [fault.split(": ")[-1] for fault in documents.faults(notebook)] == [
        "a link to nowhere.md, which is not there",
        "emo prepare has no option --bst",
    ]


def test_mistakes_are_found(tmp_path: Path) -> None:
    for text, fault in MISTAKES.items():
        (tmp_path / "page.md").write_text(f"# Page\n\n{text}\n")
        assert any(fault in line for line in documents.faults(tmp_path / "page.md")), text
