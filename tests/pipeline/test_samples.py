"""train.sample_prompts: what is refused before anything is loaded, and what a resumed run keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emo.common.errors import UserError
from emo.data_prep.tokenizer import load_tokenizer
from emo.pipeline.config import RunConfig, load_config
from emo.pipeline.report.samples import Samples, prompt_ids
from emo.pipeline.run_dir import SAMPLES, read_records
from tests.helpers import launching


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launching.tiny_recipe(tmp_path_factory.mktemp("tiny"))


def config(recipe: Path, *prompts: str, tokens: int = 4, **settings: object) -> RunConfig:
    overrides = [f"train.sample_prompts={json.dumps(prompts)}", f"train.sample_tokens={tokens}"]
    return load_config(recipe, [*overrides, *(f"{key}={value}" for key, value in settings.items())])


def test_prompts_begin_as_documents_do_and_fit(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are of 32 tokens, and the model has seen no longer ones."""
    tokenizer = load_tokenizer(recipe.parent / "data" / "tokenizer")
    (ids,) = prompt_ids(config(recipe, "The man"))
    assert ids[0] == tokenizer.bos_token_id and tokenizer.decode(ids[1:]) == "The man"
    assert prompt_ids(config(recipe, "")) == [[tokenizer.bos_token_id]], "a document from its beginning"
    assert prompt_ids(config(recipe)) == []
    tokenizer.bos_token = None
    monkeypatch.setattr("emo.pipeline.report.samples.load_tokenizer", lambda _: tokenizer)
    long = "The man saw a fish on day 3. " * 5
    for mistake in (config(recipe, "The", long), config(recipe, "The", tokens=99), config(recipe, "")):
        with pytest.raises(UserError) as error:
            prompt_ids(mistake)
        assert error.value.code == "sample-prompts"


def test_a_resumed_run_drops_what_it_samples_again(recipe: Path, tmp_path: Path) -> None:
    """Also when the prompts are gone from the recipe, which may change."""
    lines = ['{"step": 3, "prompt": "a", "text": "b"}', '{"step": 6, "prompt": "a", "text": "c"}', '{"st']
    (tmp_path / SAMPLES).write_text("\n".join(lines))
    for step, writes, steps in ((3, False, [3, 6]), (3, True, [3]), (0, True, [])):
        Samples(config(recipe, output_dir=tmp_path), step=step, writes=writes)
        assert [r["step"] for r in read_records(tmp_path / SAMPLES)[0]] == steps
