"""All code that encodes text begins it in the same way, with BOS if the tokenizer adds one."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from emo.data_prep.encoding.templates import Conversation, Exchange
from emo.data_prep.encoding.tokenizer import (
    load_tokenizer,
    save_tokenizer,
    tokenizer_facts,
    tokenizer_fingerprint,
)
from emo.data_prep.shards.encode import EncodeSettings, RowEncoder
from emo.eval.generation import likelihood
from emo.eval.generation.decoding import Beams, prompt_ids, split_ids
from emo.eval.generation.engines import Transformers
from emo.eval.icl.prompts import PromptBuilder, Sample
from emo.eval.judging import answers
from emo.eval.judging.judges import JUDGES
from emo.eval.judging.judging import Judging
from emo.eval.judging.pairs import Pair, Pairs
from emo.eval.models.model import EvaluatedModel
from emo.pipeline.planning import checks
from tests.helpers.evaluating import tiny_model
from tests.helpers.refusals import refused

TEXT, BOS, EOS = "The town", 1, 2
FLAGS, YES_NO = (True, False, None), (True, False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("beginnings") / "model")


def with_tokenizer(model: Path, directory: Path, around: tuple[list[str], list[str]], **config: Any) -> Path:
    """Return a copy of the model whose tokenizer.json adds tokens before and after a text."""
    shutil.copytree(model, directory)
    backend = load_tokenizer(model).backend_tokenizer
    start, end = around
    special: Any = [(token, backend.token_to_id(token)) for token in {*start, *end}]
    backend.post_processor = processors.TemplateProcessing(
        single=[*start, "$A", *end], pair=[*start, "$A", "$B", *end], special_tokens=special
    )
    backend.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names | config))
    return directory


def beginnings(directory: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Return the ids that each caller gives TEXT or a prompt. `copy` receives the exported tokenizer."""
    facts = save_tokenizer(directory, None, copy)
    assert facts == tokenizer_facts(copy)
    rows = RowEncoder(EncodeSettings(copy, facts, "alpaca", 512, "drop", None))
    found: dict[str, Any] = {"rows": rows.texts([TEXT], "a").ids.tolist()[:-1]}
    found["examples"] = rows.conversations([Conversation((Exchange("Why?", "So."),))]).ids.tolist()
    found["export"] = AutoTokenizer.from_pretrained(copy)(TEXT).input_ids
    model = EvaluatedModel(str(directory))
    sample = Sample({}, [], [TEXT])
    PromptBuilder._tokenise(SimpleNamespace(encode=model.encode), [sample])  # type: ignore[arg-type]
    found["tasks"] = sample.ids[0].tolist()
    found["generate"] = prompt_ids(model, TEXT)
    found["scored"] = split_ids(model.tokenizer, TEXT, " was old")[0]
    question = answers.Question("", "Why?")
    found["answer"] = answers.conversation_ids(model, "alpaca", [], question)
    pair = Pair("1", question, "x", "y")
    judging = Judging(JUDGES["pandalm"], Pairs("a", "b", [pair]), Transformers(model, Beams(2)), copy, 9)
    found["judge"] = (judging._fitting_ids(pair, None) or [])[0]
    read: list[Any] = []
    nothing = np.zeros(1), np.zeros(1)
    monkeypatch.setattr(likelihood, "continuations", lambda _, pairs: read.extend(pairs) or nothing)
    likelihood.score_texts(model, [TEXT])
    found["perplexity"] = [*read[0][0], *read[0][1]]
    data = SimpleNamespace(dir=directory.parent, sequence_len=512)
    (directory.parent / "tokenizer").symlink_to(copy)
    train = SimpleNamespace(sample_prompts=[TEXT], sample_tokens=2)
    found["samples"] = checks.encode_sample_prompts(SimpleNamespace(data=data, train=train))[0]  # type: ignore[arg-type]
    assert tokenizer_fingerprint(load_tokenizer(directory)) == facts.fingerprint
    return found


@pytest.mark.parametrize(("flag", "adds", "named"), itertools.product(FLAGS, YES_NO, YES_NO))
def test_all_users_of_a_tokenizer_encode_the_same_beginning(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: bool | None, adds: bool, named: bool
) -> None:
    """The setting add_bos_token decides. Without it tokenizer.json decides, and bos_token never does."""
    config = ({"bos_token": "<s>"} if named else {}) | ({} if flag is None else {"add_bos_token": flag})
    directory = with_tokenizer(model, tmp_path / "model", (["<s>"] if adds else [], []), **config)
    if flag and not adds and not named:
        for read in (load_tokenizer, lambda path: EvaluatedModel(str(path)).tokenizer):
            with refused("tokenizer"):
                read(directory)
        return
    expected = [BOS] if (adds if flag is None else flag) else []
    plain = load_tokenizer(model)(TEXT, add_special_tokens=False).input_ids
    for user, ids in beginnings(directory, tmp_path / "copy", monkeypatch).items():
        if user in ("examples", "answer", "judge"):
            assert (ids[:1] == [BOS]) is bool(expected) and BOS not in ids[1:], user
        else:
            assert ids == expected + plain, user


def test_a_tokenizer_may_add_two_tokens(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GLM's tokenizers add two tokens before a text. An EOS after a text is not part of a prompt."""
    around = (["<s>", "<unk>"], ["</s>"])
    directory = with_tokenizer(model, tmp_path / "model", around, bos_token="<s>")
    for user, ids in beginnings(directory, tmp_path / "copy", monkeypatch).items():
        assert ids[:2] == [BOS, 0], user
        assert (ids[-1] == EOS) is (user in ("examples", "export", "tasks")), user


def test_an_empty_prompt_begins_with_bos_or_eos(model: Path, tmp_path: Path) -> None:
    """A prompt must have a first token, even if the tokenizer adds none."""
    for names, first in (({"bos_token": "<s>"}, BOS), ({}, EOS)):
        directory = with_tokenizer(model, tmp_path / str(first), ([], []), **names)
        assert prompt_ids(EvaluatedModel(str(directory)), "") == [first]
        assert split_ids(load_tokenizer(directory), "", TEXT)[0] == [first]
