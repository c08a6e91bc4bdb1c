"""Loss by position and passkeys: naive references, resumed measurements, comparison and report."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from emo.eval.harness.tasks import select_all
from emo.eval.icl.job import Job
from emo.eval.icl.lengths import DEPTHS, PasskeyTask, PositionTask
from emo.eval.icl.settings import Settings
from emo.eval.models.model import EvaluatedModel
from emo.eval.models.prefix_scorer import FORWARD, PrefixScorer
from emo.eval.report.gather import Report
from emo.eval.report.page import document
from tests.helpers.corpus import texts
from tests.helpers.evaluating import command, tiny_model, write_lines
from tests.helpers.families import family
from tests.helpers.refusals import refused

LONGEST = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("lengths") / "tiny", max_position_embeddings=LONGEST)


@pytest.fixture(scope="module")
def file(model: Path) -> Path:
    """Write four long texts, one that ends within the last bin, and short ones."""
    long = [" ".join(texts(60, seed)) for seed in range(4)]
    rows = ({"text": text} for text in [*long, long[0][: len(long[0]) // 3], "short", ""])
    return write_lines(model.parent / "long.jsonl", rows)


def evaluate(model: Path, out: Path, task: Any, **settings: Any) -> tuple[Any, Any]:
    job = Job(EvaluatedModel(str(model), "tiny"), Settings("", **settings), out)
    return job.run(task), job


def test_loss_by_position_equals_a_loop_over_the_model_s_forward(
    model: Path, file: Path, tmp_path: Path
) -> None:
    result, job = evaluate(model, tmp_path, PositionTask(file))
    network, tokenizer = job.model.model, job.model.tokenizer
    bins: dict[str, list[list[float]]] = {"1 to 63": [], "64 to 127": [], "128 to 255": [], "256 to 299": []}
    for row in file.read_text(encoding="utf-8").splitlines():
        ids = torch.tensor(tokenizer(json.loads(row)["text"]).input_ids[:LONGEST])
        if len(ids) <= 256:
            continue
        with torch.no_grad():
            log_p = network(input_ids=ids[None]).logits[0].double().log_softmax(-1)
        for label, parts in bins.items():
            low, high = map(int, label.split(" to "))
            parts.append([-float(log_p[i - 1, ids[i]]) for i in range(low, min(high + 1, len(ids)))])
    assert result["n"] == len(bins["1 to 63"]) >= 4
    bins["all"] = [[value for part in parts for value in part] for parts in zip(*bins.values(), strict=True)]
    assert [part["label"] for part in result["lengths"]] == [*bins]
    for part, values in zip(result["lengths"], bins.values(), strict=True):
        mean = sum(map(sum, values)) / sum(map(len, values))
        assert part["value"] == pytest.approx(mean, abs=1e-5)
        assert part["interval"]["low"] < mean < part["interval"]["high"]
    assert result["measure"]["value"] == result["lengths"][-1]["value"]


def test_passkeys_equal_greedy_generation(model: Path, file: Path, tmp_path: Path) -> None:
    result, job = evaluate(model, tmp_path, PasskeyTask(file), limit=3)
    network, tokenizer = job.model.model, job.model.tokenizer
    rows = PasskeyTask(file).prepare(tokenizer, LONGEST, 3)
    assert result["n"] == len(rows) == 3 * len(DEPTHS) and result["lengths"][0]["label"] == "256 tokens"
    numbers = {i for i in range(len(tokenizer)) if tokenizer.decode([i])[:1].isdigit()}
    greedy = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    places = []
    for row in rows:
        text = tokenizer.decode(row["ids"])
        assert len(row["ids"]) == 256
        assert text.count(row["gold"]) == 3 and text.endswith(f"The pass key is {row['gold']}")
        places.append(text.index(row["gold"]))
        prompt, answer = np.split(row["ids"], [-row["answer"]])
        assert tokenizer.decode(answer).strip() == row["gold"]
        whole = network.generate(torch.from_numpy(prompt)[None], max_new_tokens=row["answer"] + 1, **greedy)
        written = whole[0, len(prompt) :].tolist()  # used as the answer, it is found
        expected = float(written[-1] not in numbers)
        found = row | {"ids": np.concatenate([prompt, written[:-1]])}
        assert PasskeyTask(file).score_row(job.model, found)["value"] == expected
        expected *= written[:-1] == answer.tolist()
        assert PasskeyTask(file).score_row(job.model, row)["value"] == expected
    assert all((np.diff(places[i : i + 5]) > 0).all() for i in (0, 5, 10))


@pytest.mark.parametrize(("last", "value"), [("<0x37>", 0.0), ("<0x0A>", 1.0), ("</s>", 1.0)])
def test_a_longer_number_is_not_the_passkey(last: str, value: float, model: Path, file: Path) -> None:
    """Also if the tokenizer writes its last digit as a byte."""
    tokenizer = EvaluatedModel(str(model), "tiny").tokenizer
    row = PasskeyTask(file).prepare(tokenizer, LONGEST, 1)[0]
    best = [*row["ids"][1:].tolist(), tokenizer.convert_tokens_to_ids(last)]
    assert best[-1] not in (None, tokenizer.unk_token_id)
    oracle: Any = SimpleNamespace(
        scorer=SimpleNamespace(read_text=lambda _: (None, best)), tokenizer=tokenizer
    )
    assert PasskeyTask(file).score_row(oracle, row)["value"] == value


@pytest.mark.parametrize("name", ("llama", "gpt2", "llama-dynamic"))
def test_both_ways_to_score_agree(name: str) -> None:
    scorer = PrefixScorer(family(name))
    ids = np.arange(40) * 7 % 61
    nll, best = scorer.read_text(ids)
    scorer.method = FORWARD
    again, same = scorer.read_text(ids)
    assert again == pytest.approx(nll, abs=1e-4) and same == best
    assert len(nll) == 39 and len(best) == 40


def test_a_killed_measure_resumes_and_is_compared_and_reported(
    model: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score, seen = PasskeyTask.score_row, list[int]()

    def killed(self: PasskeyTask, *arguments: Any) -> Any:
        seen.append(1)
        if len(seen) == 12:
            raise KeyboardInterrupt
        return score(self, *arguments)

    monkeypatch.setattr(PasskeyTask, "score_row", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, tmp_path, PasskeyTask(file), limit=3)
    evaluate(model, tmp_path, PasskeyTask(file), limit=3)
    evaluate(model, tmp_path, PasskeyTask(file), limit=3)
    assert len(seen) == 12 + 15 - 8  # the first chunk of 8 rows was stored
    monkeypatch.undo()
    tasks = f"positions:{file},passkey:{file}"
    other = tiny_model(tmp_path / "other", seed=1, max_position_embeddings=LONGEST)
    options = ("--tasks", tasks, "--limit", 3, "--output_path", tmp_path)
    for name, path in (("tiny", model), ("other", other)):
        code, out, err = command("eval", "--model", path, "--name", name, *options)
        assert not code and "256 to 299" in out and "256 tokens" in out, err
    assert "report of 2 models on passkey:long and positions:long: " in command("report", tmp_path)[1]
    page = document(Report([tmp_path], chosen=["tiny"]))
    assert {entry["task"] for entry in page.data["lengths"]} == {"positions:long", "passkey:long"}
    assert len(page.data["measure_comparisons"]) == 2
    report = page.markdown()
    assert "| 64 to 127 |" in report and "by depth" in report and "Metrics of lm-eval" not in report


def test_what_cannot_be_measured_is_refused(model: Path, file: Path, tmp_path: Path) -> None:
    with refused("no-text"):
        select_all(f"positions:{tmp_path / 'none.jsonl'}")
    with refused("task"):
        select_all(f"passkey:{file},passkey:{file.parent / '..' / file.parent.name / file.name}")
    short = write_lines(tmp_path / "short.jsonl", [{"text": "short"}])
    with refused("no-text"):
        evaluate(model, tmp_path, PositionTask(short))
    with refused("context"):
        evaluate(model, tmp_path, PasskeyTask(short), max_tokens=200)
    result, _ = evaluate(model, tmp_path, PasskeyTask(short), max_tokens=600, limit=1)  # exceeds the context
    assert [part["label"] for part in result["lengths"]] == ["256 tokens", "512 tokens", "all"]
