"""Examples and the README's snippets run as they stand; an own objective is the same through every door."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import REPO
from tests.helpers.corpus import texts, tiny_tokenizer
from tests.helpers.families import family, tiny_llama

OWN = "examples/my_objective.py:unsure"
VOCAB = 400


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, REPO / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with its tokenizer, a text, and the repository as the working directory."""
    from emo.data_prep.tokenizer import load_tokenizer

    tiny_llama(VOCAB).save_pretrained(tmp_path / "model")
    load_tokenizer(str(tiny_tokenizer())).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join(texts(400)), encoding="utf-8")
    rows = ({"prompt": f"Say {i}.", "completion": text} for i, text in enumerate(texts(20)))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    monkeypatch.chdir(REPO)
    return tmp_path


@pytest.mark.parametrize("name", ["plain_loop", "trainer", "sft_trainer"])
def test_examples(folder: Path, name: str) -> None:
    texts = "rows.jsonl" if name == "sft_trainer" else "text.txt"
    out = [] if name == "plain_loop" else [str(folder / "out")]
    losses = example(name).main(str(folder / "model"), str(folder / texts), OWN, *out)
    assert len(losses) == 5 and all(0 < loss < 20 for loss in losses)


def test_the_snippet_of_the_readme(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed, on a machine without a GPU too; only the model is another GPT-2."""
    text = (REPO / "README.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    hub = "openai-community/gpt2"
    assert hub in snippet
    family("gpt2", vocab_size=VOCAB, n_positions=256).save_pretrained(folder / "model")
    (folder / "text.txt").rename(folder / "notes.txt")
    monkeypatch.chdir(folder)
    exec(snippet.replace(hub, str(folder / "model")), {"__name__": "snippet"})
