"""The prefix scorer: OpenICL's decisions and scores, whatever the layout, architecture, budget or task."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict

from emo.eval.icl import layout
from emo.eval.icl.inferencer import PrefixPPLInferencer, score_samples
from emo.eval.icl.layout import Item, common_prefix
from emo.eval.icl.openicl_compat import AccEvaluator, DatasetReader, PPLInferencer, PromptTemplate, quiet
from emo.eval.icl.prefix_scorer import OWN, TREE, WHOLE, PrefixScorer
from emo.eval.icl.prompts import PromptBuilder
from emo.eval.icl.records import calibrated, channel
from emo.eval.icl.retrieve import GroupRetriever, StoredRetriever
from emo.eval.icl.task_data import load_data
from emo.eval.icl.tasks import Task, load_task
from tests.eval.test_tasks import EIGHT
from tests.helpers.evaluating import load, naive_nll, tiny_model, write_tasks

UNLIMITED = 10**6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return load(tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


# --- equality with OpenICL --------------------------------------------------------------------------------


def demonstrations(task: Task, data: DatasetDict, count: int) -> StoredRetriever:
    """Fixed pseudo-random demonstrations (MMLU: its own), as a retriever for either inferencer."""
    reader = DatasetReader(data, input_columns=task.inputs, output_column="label")
    if task.spec.shots.by == "group":
        indices = GroupRetriever(reader, ice_num=count).retrieve()
    else:
        rng = np.random.default_rng(5)
        size = len(data["train"])
        indices = [rng.choice(size, count, replace=False).tolist() for _ in range(len(data["test"]))]
    return StoredRetriever(reader, indices, count)


def both(
    task: Task,
    retriever: StoredRetriever,
    model: Any,
    tokenizer: Any,
    out: Path,
    limit: int | None = None,
    **ours: Any,
) -> tuple[tuple[list, dict], tuple[list, dict], PrefixPPLInferencer]:
    """(predictions, saved records) of ours and of OpenICL's inferencer."""
    ours_first = PrefixPPLInferencer(
        model,
        tokenizer,
        max_model_token_num=limit or UNLIMITED,
        output_json_filepath=str(out),
        output_json_filename="ours",
        batch_size=4,
        **ours,
    )
    openicl = PPLInferencer(
        model,
        copy.deepcopy(tokenizer),
        max_model_token_num=limit,
        batch_size=4,
        output_json_filepath=str(out),
        output_json_filename="theirs",
    )
    actual = []
    with quiet():
        for inferencer in (ours_first, openicl):
            predictions = inferencer.inference(retriever, task.demonstration_template, task.template)
            saved = json.loads((out / f"{inferencer.output_json_filename}.json").read_text())
            actual.append((predictions, saved))
    return actual[0], actual[1], ours_first


def worst_difference(ours: dict, openicl: dict) -> float:
    """Largest difference of PPL between two saved records."""
    assert list(ours) == list(openicl)
    return max(
        abs(ours[row][key]["PPL"] - openicl[row][key]["PPL"])
        for row in openicl
        for key in openicl[row]
        if key.startswith("label: ")
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", EIGHT)
def test_equals_openicl_on_real_rows_with_a_real_model(name: str, shared_data: Path, tmp_path: Path) -> None:
    """Same predictions on every row, scores within 1e-5, the same prompts and demonstrations saved."""
    task = load_task(name)
    data = load_data(task, str(shared_data / "nlu"), limit=12 if name != "mmlu" else 5).rows
    model, tokenizer = load(shared_data / "models" / "stories260K")
    # Pieces of this vocabulary are short, so the prompts of two tasks would be of thousands of tokens.
    count = {"ag_news": 4, "mmlu": 1}.get(name, task.spec.shots.count)
    retriever = demonstrations(task, data, count)
    (ours_first, ours), (other, openicl), inferencer = both(task, retriever, model, tokenizer, tmp_path)
    assert inferencer.scorer.way == TREE
    assert ours_first == other
    assert worst_difference(ours, openicl) < 1e-5
    for row in openicl:
        assert ours[row]["in-context examples"] == openicl[row]["in-context examples"]
        for label in task.labels:
            assert ours[row][f"label: {label}"]["prompt"] == openicl[row][f"label: {label}"]["prompt"]
    references = retriever.dataset_reader.references
    assert AccEvaluator().score(ours_first, references) == AccEvaluator().score(other, references)


def toy(texts: list[str], test: list[str]) -> tuple[Any, DatasetDict]:
    """Return a two-label task without files, and its rows."""
    labels = ["bad", "wonderfully good"]
    rows = {
        "train": [{"text": t, "label": labels[i % 2]} for i, t in enumerate(texts)],
        "test": [{"text": t, "label": labels[i % 2]} for i, t in enumerate(test)],
    }

    by_label = {label: f"</E>Text: </X> It is {label}." for label in labels}
    template = PromptTemplate(by_label, {"text": "</X>"}, ice_token="</E>")
    task = SimpleNamespace(
        inputs=["text"], labels=labels, spec=load_task("sst2").spec, template=template,
        demonstration_template=template,
    )  # fmt: skip
    return task, DatasetDict({split: Dataset.from_list(part) for split, part in rows.items()})


LONG = [f"a long story number {i} of a cat and a dog in the garden of the king" for i in range(12)]


@pytest.mark.parametrize("fault", ["drop", "truncate", "end token in the text", "overwritten demonstration"])
def test_faithful_mode_has_openicls_faults_bit_for_bit(
    fault: str, tiny: tuple[Any, Any], tmp_path: Path
) -> None:
    """The switch: records equal OpenICL's field by field where ours would differ."""
    model, tokenizer = tiny[0], copy.deepcopy(tiny[1])
    train, test, limit = LONG, [*LONG[3:8], "short one"], None
    if fault == "drop":
        lengths = [len(tokenizer(f"Text: {t} It is wonderfully good.").input_ids) for t in LONG]
        limit = 3 * max(lengths)
    elif fault == "truncate":
        tokenizer.model_max_length = 60
    elif fault == "end token in the text":
        test = [f"{t}{tokenizer.eos_token} and on" for t in test]
    else:
        train = ["it says </X> here", *LONG[1:]]
    task, data = toy(train, test)
    retriever = StoredRetriever(
        DatasetReader(data, input_columns=["text"], output_column="label"),
        [[0, i + 1, i + 2, i + 3] for i in range(len(test))],
        4,
    )
    (ours_first, ours), (other, openicl), _ = both(
        task, retriever, model, tokenizer, tmp_path, limit, faithful=True
    )
    assert ours_first == other
    assert worst_difference(ours, openicl) < 1e-5
    for row in openicl:
        assert ours[row]["in-context examples"] == openicl[row]["in-context examples"]
        for key in openicl[row]:
            if key.startswith("label: "):
                for field in ("testing input", "prompt"):
                    assert ours[row][key][field] == openicl[row][key][field], (row, key, field)
    # Without the switch the fault is gone, so the two must differ somewhere: the test can fail.
    _, repaired = both(task, retriever, model, tokenizer, tmp_path, limit)[0]
    assert repaired != ours and worst_difference(repaired, openicl) > 1e-4


# --- what ours repairs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [40, 70, 150, 400])
def test_labels_see_the_same_demonstrations_and_are_never_cut(
    limit: int, tiny: tuple[Any, Any], tmp_path: Path
) -> None:
    model, tokenizer = tiny
    task, data = toy(LONG, LONG[:6])
    indices = [[(i + j) % 12 for j in range(4)] for i in range(6)]
    retriever = StoredRetriever(
        DatasetReader(data, input_columns=["text"], output_column="label"), indices, 4
    )
    inferencer = PrefixPPLInferencer(
        model, tokenizer, max_model_token_num=limit, output_json_filepath=str(tmp_path)
    )
    with quiet():
        inferencer.inference(retriever, task.demonstration_template, task.template)
    for sample, target in zip(inferencer.samples, indices, strict=True):
        lengths = [len(ids) for ids in sample.ids]
        assert max(lengths) <= limit
        assert sample.demonstrations == target[: len(sample.demonstrations)]  # the farthest went first
        assert len(set(sample.ice)) == 1
        for label, ids in zip(task.labels, sample.ids, strict=True):
            assert tokenizer.decode(ids).endswith(f"It is {label}.")
        if sample.cut:
            assert not sample.demonstrations
            full = [tokenizer(p).input_ids for p in sample.prompts]
            for ids, whole in zip(sample.ids, full, strict=True):
                assert ids.tolist() == whole[:1] + whole[1 + sample.cut :]
        elif sample.dropped:  # one more demonstration would not have fitted
            options = target[: len(sample.demonstrations) + 1]
            ice = retriever.generate_ice(options, task.demonstration_template)
            longer = [
                retriever.generate_label_prompt(sample.row, ice, label, prompt_template=task.template)
                for label in task.labels
            ]
            assert max(len(tokenizer(prompt).input_ids) for prompt in longer) > limit
    assert any(s.dropped or s.cut for s in inferencer.samples) == (limit < 400)


def test_ties_go_to_the_first_label(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = tiny
    template = PromptTemplate(
        {"z": "</E></X> same", "a": "</E></X> same"}, {"text": "</X>"}, ice_token="</E>"
    )
    data = DatasetDict({s: Dataset.from_list([{"text": "t", "label": "a"}] * 3) for s in ("train", "test")})
    reader = DatasetReader(data, input_columns=["text"], output_column="label")
    before = (tokenizer.pad_token, tokenizer.padding_side)
    inferencer = PrefixPPLInferencer(model, tokenizer, output_json_filepath=str(tmp_path))
    assert inferencer.inference(StoredRetriever(reader, [[0]] * 3, 1), template, template) == ["z"] * 3
    assert (tokenizer.pad_token, tokenizer.padding_side) == before  # the caller's tokenizer is left alone


# --- the numbers, against the plainest computation ---------------------------------------------------------


def random_items(vocab: int, count: int, seed: int = 0, shared: int = 0) -> list[Item]:
    """Items of many shapes: one label or seven, empty and long tails; `shared` tokens in common."""
    rng = np.random.default_rng(seed)
    draw = lambda n: rng.integers(3, vocab, n)  # noqa: E731
    start = draw(shared)
    items = []
    for _ in range(count):
        prefix = np.concatenate([start, draw(rng.integers(1, 30))])
        tails = [draw(rng.integers(0, 5)) for _ in range(rng.integers(1, 8))]
        items.append(Item(prefix, tails, "group" if shared else None))
    return items


def expected(model: Any, item: Item) -> np.ndarray:
    """[S, s_1 .. s_k] from whole prompts, one at a time."""
    p = len(item.prefix)
    tails = [naive_nll(model, [*item.prefix, *t])[p - 1 :].sum() for t in item.tails]
    return np.array([naive_nll(model, list(item.prefix)).sum() if p > 1 else 0.0, *tails])


def check(scorer: PrefixScorer, items: list[Item], tolerance: float = 1e-5) -> None:
    for item, score in zip(items, scorer.score(items), strict=True):
        target = expected(scorer.model, item)
        actual = np.array([score.prefix, *score.tails])
        assert np.abs(actual - target).max() <= tolerance * max(1.0, np.abs(target).max())


@pytest.mark.parametrize("budget", [1, 64, 8192])
def test_scores_do_not_depend_on_the_budget(budget: int, tiny: tuple[Any, Any]) -> None:
    scorer = PrefixScorer(tiny[0], budget)
    assert scorer.way == TREE
    check(scorer, random_items(384, 25))


@pytest.mark.parametrize("shared", [0, 10, 31, 33, 200])
def test_a_shared_beginning_is_computed_once(shared: int, tiny: tuple[Any, Any]) -> None:
    scorer = PrefixScorer(tiny[0])
    items = random_items(384, 20, shared=shared)
    check(scorer, items)
    fed = sum(item.fed for item in items)
    saved = fed - scorer.work.distinct_tokens
    assert saved >= 0.9 * 19 * (shared - 2) if shared > layout.MIN_CONTEXT else saved == 0


def test_tails_may_begin_with_tokens_that_are_not_scored(tiny: tuple[Any, Any]) -> None:
    items = random_items(384, 12)
    skipping = [Item(i.prefix, i.tails, None, [len(t) // 2 for t in i.tails]) for i in items]
    scorer = PrefixScorer(tiny[0])
    for way in (TREE, WHOLE, OWN):
        scorer.way = way
        for item, score in zip(skipping, scorer.score(skipping), strict=True):
            for k, tail in enumerate(item.tails):
                nll = naive_nll(tiny[0], [*item.prefix, *tail])[len(item.prefix) - 1 :]
                assert score.tails[k] == pytest.approx(nll[len(tail) // 2 :].sum(), abs=1e-4)


def test_progress_comes_with_every_batch(tiny: tuple[Any, Any]) -> None:
    items = random_items(384, 40)
    scorer = PrefixScorer(tiny[0], budget=200, say=lambda text: None)
    for way in (TREE, WHOLE, OWN):
        scorer.way, steps = way, []
        scorer.score(items, advance=steps.append)
        assert sum(steps) == 40 and len(steps) > 4


def test_bfloat16_sums_are_not_quantised(tmp_path: Path) -> None:
    """Sums over hundreds of tokens keep more than bfloat16's three digits."""
    model, _ = load(tiny_model(tmp_path / "model"))
    items = random_items(384, 8, seed=3)
    long = [Item(np.tile(item.prefix, 12), item.tails) for item in items]
    half = copy.deepcopy(model).to(torch.bfloat16)
    exact = [s.prefix for s in PrefixScorer(model).score(long)]
    actual = [s.prefix for s in PrefixScorer(half).score(long)]
    assert actual == pytest.approx(exact, rel=0.02)
    assert any(float(torch.tensor(x).bfloat16()) != x for x in actual)


@pytest.mark.parametrize("shared", [0, 300])
def test_no_batch_exceeds_the_budget(
    shared: int, tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding and cached context count, so memory is bounded by the budget; one item may exceed it alone."""
    scorer, batches = PrefixScorer(tiny[0], budget=1500), []
    run = scorer._forward

    def watch(batch: layout.TreeBatch, context: Any) -> torch.Tensor:
        batches.append((len(batch.ids), len(batch.ids) * batch.allowed.shape[2]))
        return run(batch, context)

    monkeypatch.setattr(scorer, "_forward", watch)
    scorer.score(random_items(384, 60, shared=shared))
    assert all(tokens <= 1500 or rows == 1 for rows, tokens in batches)
    assert max(tokens for _, tokens in batches) > 700  # and it is used
    scorer = PrefixScorer(tiny[0], budget=512)
    scorer.score(random_items(384, 200))
    assert scorer.work.distinct_tokens / scorer.work.padded_tokens > 0.9  # batches are of like length


# --- further scores ---------------------------------------------------------------------------------------


@pytest.fixture
def few(tiny: tuple[Any, Any], tmp_path: Path) -> tuple[Task, Any, list[list[int]]]:
    write_tasks(tmp_path, ["sst2"], train=12, test=5)
    task = load_task("sst2")
    return task, load_data(task, str(tmp_path)).rows, [[i, i + 2, i + 4] for i in range(5)]


def test_channel_is_the_likelihood_of_the_text_after_the_label(tiny: tuple[Any, Any], few: Any) -> None:
    model, tokenizer = tiny
    task, rows, indices = few
    actual = channel(task, rows, indices, PrefixScorer(model), tokenizer, None)
    words = {label: f"It is {label}." for label in task.labels}
    for row, view in enumerate(indices):
        examples = [rows["train"][i] for i in view]
        ice = "".join(f'{words[e["label"]]} Review: "{e["text"]}"\n' for e in examples)
        for k, label in enumerate(task.labels):
            before = ice + f"It is {label}"
            whole = before + f'. Review: "{rows["test"][row]["text"]}"'
            ids = tokenizer(whole).input_ids
            prefix = len(tokenizer(before).input_ids)
            assert ids[:prefix] == tokenizer(before).input_ids  # the label ends where a token does
            assert actual[row, k] == pytest.approx(naive_nll(model, ids)[prefix - 1 :].sum(), rel=1e-5)


def test_calibration_subtracts_what_a_label_is_worth_without_content(tiny: tuple[Any, Any], few: Any) -> None:
    model, tokenizer = tiny
    task, rows, indices = few
    retriever = StoredRetriever(
        DatasetReader(rows, input_columns=task.inputs, output_column="label"), indices, 3
    )
    builder = PromptBuilder(
        retriever, tokenizer, task.labels, task.demonstration_template, task.template, 1024
    )
    samples, scorer = builder.build(range(5), indices), PrefixScorer(model)
    plain = score_samples(scorer, samples)["suffix_sum"]
    actual = calibrated(task, rows, samples, plain, scorer, tokenizer, 1024)
    for row, sample in enumerate(samples):
        blank = [f'{sample.ice[0]}Review: "N/A" It is {label}.' for label in task.labels]
        ids = [np.array(tokenizer(text).input_ids) for text in blank]
        shared = common_prefix(ids)
        for k, whole in enumerate(ids):
            worth = naive_nll(model, whole.tolist())[shared - 1 :].sum()
            assert actual[row, k] == pytest.approx(plain[row, k] - worth, abs=1e-3)


def test_a_query_after_its_label_is_cut_at_its_end(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = tiny
    task = load_task("sst2")
    rows = DatasetDict(
        {s: Dataset.from_list([{"text": " ".join(LONG), "label": "positive"}] * 9) for s in ("train", "test")}
    )
    actual = channel(task, rows, [[0, 1]] * 9, PrefixScorer(model), tokenizer, 60)
    for k, label in enumerate(task.labels):
        other = max(len(tokenizer(f'It is {x}. Review: "{" ".join(LONG)}"').input_ids) for x in task.labels)
        ids = tokenizer(f'It is {label}. Review: "{" ".join(LONG)}"').input_ids[: 60 - other]
        before = len(tokenizer(f"It is {label}").input_ids)
        assert actual[0, k] == pytest.approx(naive_nll(model, ids)[before - 1 :].sum(), rel=1e-5)
