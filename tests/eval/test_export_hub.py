"""The hub's evaluation results and model cards, read back by huggingface_hub."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries
from hypothesis import given, settings
from hypothesis import strategies as st

from emo.eval import store
from emo.eval.export import hub
from emo.eval.export.figures import all_figures
from emo.eval.model import EvaluatedModel
from emo.eval.results import pick, read_models
from tests.helpers.evaluating import command, tiny_model
from tests.helpers.results import finish, finished, tree


def _index(directory: Path) -> list[dict[str, Any]]:
    (model,) = yaml.safe_load((directory / "README.md").read_text().split("---\n")[1])["model-index"]
    return model["results"]


CARD = """---
license: apache-2.0   # of the weights
tags: [a, "b"]
model-index:
- name: My Model
  results:
  - task: {type: text-generation}
    dataset: {name: HellaSwag, type: hellaswag}
    metrics: [{type: acc_norm, value: 0.5}]
# the language of the text
language:
- en
---
# My model

---
model-index: of the text
"""


def test_the_hub_reads_its_files(tmp_path: Path) -> None:
    model = finished(tmp_path / "out", step=10, run="/home/somebody/runs/emo")
    hub.write_hub(model, tmp_path / "card", lambda text: None)
    text = (tmp_path / "card" / "README.md").read_text()
    card = ModelCard(text)
    assert card.data.model_name == "emo"
    assert card.data.eval_results is not None and len(card.data.eval_results) == 4
    accuracy = next(r for r in card.data.eval_results if "SST-2" in r.dataset_name)
    assert (accuracy.metric_type, accuracy.metric_value) == ("accuracy", 4 / 6)
    assert accuracy.dataset_type == "SetFit/sst2" and accuracy.dataset_revision is None
    assert accuracy.metric_args["stderr"] == pytest.approx(math.sqrt(4 / 6 * 2 / 6 / 5))
    macro = next(r for r in card.data.eval_results if "MMLU" in r.dataset_name)
    assert macro.metric_name == "accuracy, unweighted mean of 3 groups"
    assert macro.metric_value == pytest.approx((1 + 1 / 3 + 1) / 3) and "stderr" not in macro.metric_args
    written = (tmp_path / "card" / ".eval_results" / "emo-pipeline-sst2.yaml").read_text()
    (entry,) = parse_eval_result_entries(yaml.safe_load(written))
    assert (entry.dataset_id, entry.task_id, entry.value) == ("SetFit/sst2", "default", 4 / 6)
    assert entry.date == "2027-01-15T08:00:00Z" and entry.dataset_revision is None
    assert (
        entry.notes is not None and "8-shot" in entry.notes and "not checked against the hub" in entry.notes
    )
    assert "/home" not in text + written


def test_rows_of_the_hub_name_their_revision(tmp_path: Path) -> None:
    finished(tmp_path / "out")
    finish(tmp_path / "out", from_hub=True)
    model = pick(read_models([tmp_path / "out"]), "emo")
    hub.write_hub(model, tmp_path / "card", lambda text: None)
    path = tmp_path / "card" / ".eval_results" / "emo-pipeline-sst2.yaml"
    (entry,) = parse_eval_result_entries(yaml.safe_load(path.read_text()))
    assert entry.dataset_revision == "00ea8cc" and "rows from the hub" in (entry.notes or "")


@pytest.mark.parametrize("name", [None, "folder/of/mine", "/data/sst2", "sst2"])
def test_a_task_about_no_data_set_of_the_hub_is_in_the_card_alone(name: str | None, tmp_path: Path) -> None:
    finished(tmp_path / "out")
    finish(tmp_path / "out", hub=name)
    messages: list[str] = []
    hub.write_hub(pick(read_models([tmp_path / "out"]), "emo"), tmp_path / "card", messages.append)
    assert not (tmp_path / "card" / ".eval_results").exists() and "no data set of the hub" in messages[0]
    assert {r["dataset"]["type"] for r in _index(tmp_path / "card")} == {"sst2", "mmlu"}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_card_loses_nothing(newline: str, tmp_path: Path) -> None:
    before = CARD.replace("\n", newline)
    results = hub.index_of(finished(tmp_path), all_figures(finished(tmp_path)))
    after = hub.with_index(before, "emo", results)
    assert hub.with_index(after, "emo", results) == after, "exported again, it is another card"
    assert ("\n" in after.replace("\r\n", "")) == (newline == "\n")
    body = before[before.index("# My model") :]
    assert after.endswith(body) and ModelCard(after).text == ModelCard(before).text
    for line in ("license: apache-2.0   # of the weights", 'tags: [a, "b"]', "# the language of the text"):
        assert line in after.split(newline)
    actual = ModelCard(after).data
    assert actual.model_name == "My Model" and actual.language == ["en"] and actual.eval_results is not None
    assert [r.dataset_name for r in actual.eval_results].count("HellaSwag") == 1
    assert len(actual.eval_results) == 1 + 4
    better = hub.with_index(after, "emo", results[:1])  # of another evaluation: these take the place of ours
    assert len(ModelCard(better).data.eval_results or []) == 1 + 2


KEYS = st.dictionaries(
    st.from_regex("[a-z][a-z_]{0,8}", fullmatch=True),
    st.recursive(st.text(max_size=8) | st.integers() | st.booleans(), lambda x: st.lists(x, max_size=3)),
    max_size=4,
)


@settings(max_examples=25, deadline=None)
@given(KEYS, st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=60))
def test_any_card_keeps_its_keys_and_its_text(keys: dict[str, Any], body: str) -> None:
    front = yaml.safe_dump(keys) if keys else ""
    after = hub.with_index(f"---\n{front}---\n{body}", "m", [{"task": {"name": hub.OURS}}])
    assert after.endswith(f"---\n{body}")
    values = yaml.safe_load(after[4 : len(after) - len(f"---\n{body}")])
    assert values.pop("model-index") == [{"name": "m", "results": [{"task": {"name": hub.OURS}}]}]
    assert values == keys


FRONTS = (
    "a: [", "- a", "model-index: 3", "model-index: [{name: x}]", "{model-index: [], a: 1}",
    "model-index: &x\n- {name: m, results: []}\nb: *x",
)  # fmt: skip


@pytest.mark.parametrize("front", FRONTS)
def test_a_card_that_cannot_be_read_is_left_alone(front: str, tmp_path: Path) -> None:
    finished(tmp_path / "out")
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n# x\n")
    before = tree(tmp_path)
    assert command("export", tmp_path / "out", "--format", "hf", "--output_path", tmp_path)[0] == 2
    assert tree(tmp_path) == before


def test_a_directory_with_other_weights_is_refused(tmp_path: Path) -> None:
    directories = [tiny_model(tmp_path / f"{n}", seed=n, num_hidden_layers=1) for n in (0, 1)]
    finished(tmp_path / "out")
    digest = EvaluatedModel(str(directories[0])).digest
    for path in (tmp_path / "out" / "models" / "emo").glob("*.json"):  # as if it had been evaluated
        path.write_text(path.read_text().replace(store.digest("emo"), digest))
    (directories[0] / "README.md").write_text("---\nlicense: mit\n---\n# m\n\nFrom /home/me/base/model.\n")
    before = tree(directories[1])
    arguments = ["export", tmp_path / "out", "--format", "hf", "--output_path"]
    assert command(*arguments, directories[1])[0] == 2
    assert tree(directories[1]) == before
    code, out, _ = command(*arguments, directories[0])
    assert code == 0 and "names an absolute path or a secret" in out
    assert ModelCard.load(directories[0] / "README.md").data.license == "mit"
