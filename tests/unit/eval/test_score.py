"""The scorer gives OpenICL's decisions and scores for any layout, architecture, budget or task."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from emo.eval.icl.prompts import PromptBuilder
from emo.eval.icl.records import Recorder
from emo.eval.icl.retrieve import GroupRetriever, reader
from emo.eval.icl.settings import Settings, best_label
from emo.eval.icl.task_data import load_data
from emo.eval.icl.tasks import Row, Task, TaskSpec, load_task
from emo.eval.models.base import Item, NotFiniteError
from emo.eval.models.model import EvaluatedModel
from emo.eval.models.prefix_scorer import FORWARD, ROWS, TREE, PrefixScorer, batches, common_prefix, groups
from emo.eval.results.directory import Record
from tests.helpers.evaluating import naive_nll
from tests.helpers.families import family
from tests.helpers.refusals import refused


@pytest.fixture(scope="module")
def tiny(world: Path) -> EvaluatedModel:
    return EvaluatedModel(str(world / "model"))


def recorder(model: Any, **settings: Any) -> Recorder:
    return Recorder(model, Settings(data="", **settings), lambda text: None)


def recorded(
    model: Any, task: Task, rows: dict[str, list[Row]], indices: list[list[int]], **settings: Any
) -> list[Record]:
    maker = recorder(model, **settings)
    return maker.records(task, rows["train"], rows["test"], indices, lambda count: None)


def worst_difference(*sides: list[Record]) -> float:
    """Return the largest difference of OpenICL's perplexities between two evaluations."""
    first, second = (np.array([record["scores"]["openicl_ppl"] for record in side]) for side in sides)
    return float(np.abs(first - second).max())


@pytest.mark.parametrize("name", ["mmlu", "trec"])
def test_predictions_and_scores_equal_those_of_openicl(name: str, world: Path, tiny: EvaluatedModel) -> None:
    """Predictions are the same on every row, and scores differ by less than 1e-5."""
    task, draw = load_task(name), np.random.default_rng(5).choice
    rows = load_data(task, str(world / "data")).rows
    indices = [draw(len(rows["train"]), 2, replace=False).tolist() for _ in rows["test"]]
    if name == "mmlu":
        indices = GroupRetriever(reader(task, rows), ice_num=2).retrieve()
    ours = recorded(tiny, task, rows, indices)
    openicl = recorded(tiny, task, rows, indices, inferencer="ppl")
    assert [r["prediction"] for r in ours] == [r["prediction"] for r in openicl]
    assert worst_difference(ours, openicl) < 1e-5
    assert not any(r["dropped"] for r in ours)


LONG = [f"a long story number {i} of a cat and a dog in the garden of the king" for i in range(12)]
WORDS = {"bad": "bad", "good": "wonderfully good"}


def toy(test: list[str]) -> tuple[Task, dict[str, list[Row]]]:
    """Return a task of two labels, one of them long, and its rows. The pool is LONG."""
    spec = {
        "title": "toy",
        "input": {"text": "text"},
        "label": {"columns": ["label"], "names": {label: [label] for label in WORDS}},
        "prompts": {"paper": {"text": "Text: {text} It is {label}.", "words": WORDS}},
    }
    rows = {
        split: [{"text": text, "label": [*WORDS][i % 2]} for i, text in enumerate(texts)]
        for split, texts in (("train", LONG), ("test", test))
    }
    return Task("toy", TaskSpec.model_validate(spec), "paper"), rows


@pytest.mark.parametrize(
    "words", [("old", "old king", "cat"), ("very good", "very bad", "bad"), ("one", "two", "on")]
)
@pytest.mark.parametrize("limit", [None, 40])
def test_the_mean_of_a_label_is_over_all_of_its_tokens(
    words: tuple[str, ...], limit: int | None, tiny: EvaluatedModel
) -> None:
    """Labels may share a beginning, or one may begin another. No mean is over zero tokens."""
    spec = {
        "title": "toy",
        "input": {"text": "text"},
        "label": {"columns": ["label"], "names": {word: [word] for word in words}},
        "prompts": {"paper": {"text": "Text: {text} It is {label}"}},
    }
    task = Task("toy", TaskSpec.model_validate(spec), "paper")
    pool = [{"text": text, "label": words[i % 2]} for i, text in enumerate(LONG)]
    rows = {"train": pool, "test": pool[:3]}
    settings = {"max_tokens": limit, "score": "suffix_mean"}
    builder = PromptBuilder(task, pool, tiny.encode, limit)
    samples = builder.build(rows["test"], [[4, 5]] * 3)
    for sample, record in zip(samples, recorded(tiny, task, rows, [[4, 5]] * 3, **settings), strict=True):
        context = builder.template.shared_prompt(
            sample.row, builder.render_demonstrations(sample.demonstrations)
        ).rstrip()
        for k, ids in enumerate(sample.ids):
            before = len(tiny.tokenizer(context).input_ids) - sample.cut
            nll = naive_nll(tiny.model, ids.tolist())[before - 1 :]
            assert record["scores"]["suffix_mean"][k] == pytest.approx(float(nll.mean()), rel=1e-4)
            assert record["scores"]["suffix_sum"][k] == pytest.approx(float(nll.sum()), rel=1e-4)


@pytest.mark.parametrize("fault", ["drop", "truncate", "end token in the text"])
def test_faithful_mode_has_openicls_faults(fault: str, tiny: EvaluatedModel) -> None:
    model, limit = copy.copy(tiny), None
    model.tokenizer = copy.deepcopy(tiny.tokenizer)
    test = [*LONG[3:8], "short one"]
    if fault == "drop":
        limit = 3 * max(len(model.tokenizer(f"Text: {t} It is wonderfully good.").input_ids) for t in LONG)
    elif fault == "truncate":
        model.tokenizer.model_max_length = 60
    else:
        test = [f"{t}{model.tokenizer.eos_token} and on" for t in test]
    task, rows = toy(test)
    indices = [[0, i + 1, i + 2, i + 3] for i in range(len(test))]
    openicl = recorded(model, task, rows, indices, max_tokens=limit, inferencer="ppl")
    ours = recorded(model, task, rows, indices, max_tokens=limit, faithful=True)
    assert [r["prediction"] for r in ours] == [r["prediction"] for r in openicl]
    assert worst_difference(ours, openicl) < 1e-5
    # Scores without the fault must differ somewhere, so that this test can fail.
    assert worst_difference(recorded(model, task, rows, indices, max_tokens=limit), openicl) > 1e-4


@pytest.mark.parametrize("limit", [40, 150, 400])
def test_labels_share_demonstrations_and_are_never_cut(limit: int, tiny: EvaluatedModel) -> None:
    tokenizer = tiny.tokenizer
    task, rows = toy(LONG[:6])
    indices = [[(i + j) % 12 for j in range(4)] for i in range(6)]
    builder = PromptBuilder(task, rows["train"], tiny.encode, limit)
    samples = builder.build(rows["test"], indices)
    for sample, target in zip(samples, indices, strict=True):
        assert max(len(ids) for ids in sample.ids) <= limit
        assert sample.demonstrations == target[: len(sample.demonstrations)]  # the farthest go first
        for label, ids in zip(task.labels, sample.ids, strict=True):
            assert tokenizer.decode(ids).endswith(f"It is {WORDS[label]}.")
        if sample.cut:
            assert not sample.demonstrations
            for ids, prompt in zip(sample.ids, sample.prompts, strict=True):
                whole = tokenizer(prompt).input_ids
                assert ids.tolist() == whole[:1] + whole[1 + sample.cut :]
        elif sample.dropped:  # one more demonstration would not fit
            ice = builder.render_demonstrations(target[: len(sample.demonstrations) + 1])
            longer = [tokenizer(builder.prompt(sample.row, ice, label)).input_ids for label in task.labels]
            assert max(map(len, longer)) > limit
    assert any(s.dropped or s.cut for s in samples) == (limit < 400)


def test_the_smallest_score_wins_the_first_at_a_tie_and_never_by_nan() -> None:
    assert best_label([2.0, 1.0, 1.0]) == 1
    for bad in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(NotFiniteError):
            best_label([1.0, bad])


def random_items(vocab: int, count: int, seed: int = 0, shared: int = 0) -> list[Item]:
    """Return items with 1 to 7 labels of 0 to 4 tokens, and `shared` tokens in common."""
    rng = np.random.default_rng(seed)
    start = rng.integers(3, vocab, shared)
    items = []
    for _ in range(count):
        prefix = np.concatenate([start, rng.integers(3, vocab, rng.integers(1, 30))])
        tails = [rng.integers(3, vocab, rng.integers(0, 5)) for _ in range(rng.integers(1, 8))]
        items.append(Item(prefix, tails, "group" if shared else None))
    return items


def check(scorer: PrefixScorer, items: list[Item]) -> None:
    """Compare the scores with those of complete prompts, one at a time."""
    for item, score in zip(items, scorer.score(items), strict=True):
        p = len(item.prefix)
        tails = [
            naive_nll(scorer.model, [*item.prefix, *tail])[p - 1 + item.unscored(k) :].sum()
            for k, tail in enumerate(item.tails)
        ]
        target = np.array([naive_nll(scorer.model, list(item.prefix)).sum() if p > 1 else 0.0, *tails])
        difference = np.abs(np.array([score.prefix, *score.tails]) - target).max()
        assert difference <= 1e-5 * max(1.0, np.abs(target).max())


@pytest.mark.parametrize(("shared", "budget"), [(0, 1), (31, 8192), (33, 8192)])
def test_a_shared_beginning_is_computed_once(shared: int, budget: int, tiny: EvaluatedModel) -> None:
    items = random_items(384, 20, shared=shared)
    check(PrefixScorer(tiny.model, budget), items)
    [(members, context)] = groups(items)
    assert members == list(range(20))
    assert context >= shared - 1 if shared > 32 else context == 0  # only if a separate pass is worthwhile


@pytest.mark.parametrize("way", [TREE, ROWS, FORWARD])
def test_every_method_skips_tokens_reports_progress_and_rejects_nan(way: str, tiny: EvaluatedModel) -> None:
    scorer = PrefixScorer(copy.deepcopy(tiny.model), budget=200)
    items = random_items(384, 20)
    items = [Item(i.prefix, i.tails, None, [len(t) // 2 for t in i.tails]) for i in items]
    scorer.score(items)
    scorer.method, steps = way, []  # type: ignore[var-annotated]
    check(scorer, items)
    scorer.score(items, advance=steps.append)
    assert sum(steps) == 20 and len(steps) > 2
    scorer.model.model.norm.weight.data[3] = float("nan")
    with pytest.raises(NotFiniteError):
        scorer.score(items)


@pytest.mark.parametrize(("shared", "budget"), [(0, 512), (300, 1500)])
def test_no_batch_exceeds_the_budget(shared: int, budget: int, tiny: EvaluatedModel) -> None:
    """Padding and cached context count, so the budget limits memory. Batches have similar lengths."""
    items = random_items(384, 200, shared=shared)
    lengths = {i: item.fed - shared for i, item in enumerate(items)}
    parts = list(batches(lengths, budget, torch.device("cpu"), shared))
    assert sorted(i for part in parts for i in part) == list(lengths)
    longest = [max(lengths[i] for i in part) for part in parts]
    used = [len(part) * (shared + length) for part, length in zip(parts, longest, strict=True)]
    assert budget / 2 < max(used) <= budget
    padded = sum(len(part) * length for part, length in zip(parts, longest, strict=True))
    assert sum(lengths.values()) / padded > 0.9
    steps: list[int] = []
    PrefixScorer(tiny.model, budget).score(items[:60], advance=steps.append)
    assert sum(steps) == 60 and max(steps) * shared <= budget


ARCHITECTURES = (
    "gpt2", "opt", "qwen3", "gemma2", "mistral", "gpt_neo", "bloom", "cohere", "granite", "mixtral",
    "mamba", "jamba", "recurrent_gemma",
)  # fmt: skip
# Windows, distances instead of positions, and recurrences cannot treat a tree as separate prompts.
ROW_BY_ROW = {"gemma2", "mistral", "gpt_neo", "bloom", "mamba", "jamba", "recurrent_gemma"}


def random_model(kind: str, **config: Any) -> Any:
    """Return a random model of a family with 384 tokens and a context of 512."""
    room = {"max_position_embeddings": 512, "n_positions": 512, "max_seq_len": 512}
    layers = {"num_hidden_layers": 3} if kind == "recurrent_gemma" else {}  # the third has attention
    return family(kind, **({"vocab_size": 384} | room | layers | config))


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_scorer_equals_the_forward_of_every_architecture(kind: str) -> None:
    """The method shares prefixes if the model supports it, and uses full rows otherwise."""
    messages: list[str] = []
    scorer = PrefixScorer(random_model(kind), say=messages.append)
    check(scorer, random_items(384, 4))
    check(scorer, random_items(384, 4, shared=50))
    assert scorer.method == (ROWS if kind in ROW_BY_ROW else TREE)
    assert bool(messages) == (scorer.method != TREE)  # slower methods log a message


def test_logits_that_the_configuration_does_not_describe_are_those_of_the_model() -> None:
    model = random_model("llama")
    model.register_forward_hook(lambda module, inputs, out: setattr(out, "logits", out.logits * 0.5))
    scorer = PrefixScorer(model)
    assert scorer.method == FORWARD
    check(scorer, random_items(384, 4))


def test_a_fault_in_long_prompts_is_noticed_when_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that no option names is longer than the probe at the start. Any family may have one."""
    model = random_model("llama")
    body, window = type(model.model), 100
    forward = body.forward

    def windowed(self: Any, input_ids: Any, **kwargs: Any) -> Any:
        out = forward(self, input_ids, **kwargs)
        out.last_hidden_state[:, window:] *= 0.5
        return out

    monkeypatch.setattr(body, "forward", windowed)
    scorer = PrefixScorer(model)
    check(scorer, random_items(384, 4))
    assert scorer.method == TREE
    ids = np.random.default_rng(0).integers(3, 384, (3, 5, 85))
    check(scorer, [Item(item[0], [tail[:13] for tail in item[1:]]) for item in ids])
    assert scorer.method == ROWS


def test_embeddings_that_depend_on_a_batchs_longest_row_are_scored_alone() -> None:
    """Dynamic RoPE changes every prompt of a batch that contains a long one."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    scorer = PrefixScorer(random_model("llama", max_position_embeddings=32, rope_parameters=rope))
    assert scorer.method == FORWARD
    check(scorer, random_items(384, 4, shared=30))


def test_a_token_outside_the_embeddings_is_rejected() -> None:
    with refused("tokenizer"):
        PrefixScorer(random_model("llama")).score([Item(np.array([1, 5, 384]), [np.array([3])])])


def test_channel_is_the_likelihood_of_the_text_after_the_label(tiny: EvaluatedModel) -> None:
    """A long text after the label is cut at its end."""
    task, tokenizer = load_task("sst2"), tiny.tokenizer
    texts = [f"it is film {i}" for i in range(8)] + [" ".join(LONG)]
    rows = [{"text": text, "label": task.labels[i % 2]} for i, text in enumerate(texts)]
    indices, limit = [[i // 2, 5] for i in range(9)], 120
    actual = recorder(tiny, max_tokens=limit).channel(task, rows, rows, indices)
    for row in (0, 8):
        demonstrations = [rows[i] for i in indices[row]] if row == 0 else []
        ice = "".join(f'It is {e["label"]}. Review: "{e["text"]}"\n' for e in demonstrations)
        ids = [tokenizer(f'{ice}It is {x}. Review: "{texts[row]}"').input_ids for x in task.labels]
        excess = max(0, max(map(len, ids)) - limit)
        assert (excess > 0) == (row == 8)
        for k, label in enumerate(task.labels):
            before = tokenizer(f"{ice}It is {label}").input_ids
            assert ids[k][: len(before)] == before  # the label ends at the end of a token
            nll = naive_nll(tiny.model, ids[k][: len(ids[k]) - excess])
            assert actual[row, k] == pytest.approx(nll[len(before) - 1 :].sum(), rel=1e-5)


def test_calibration_subtracts_the_score_without_content(tiny: EvaluatedModel) -> None:
    task, rows = toy(LONG[:4])
    builder = PromptBuilder(task, rows["train"], tiny.encode)
    samples = builder.build(rows["test"], [[i, i + 2] for i in range(4)])
    actual = recorder(tiny).without_content(task, rows["train"], samples)
    for row, sample in enumerate(samples):
        ice = builder.render_demonstrations(sample.demonstrations)
        blank = [f"{ice}Text: N/A It is {WORDS[label]}." for label in task.labels]
        ids = [np.array(tiny.tokenizer(text).input_ids) for text in blank]
        shared = common_prefix(ids)
        for k, whole in enumerate(ids):
            worth = naive_nll(tiny.model, whole.tolist())[shared - 1 :].sum()
            assert actual[row, k] == pytest.approx(worth, abs=1e-3)
