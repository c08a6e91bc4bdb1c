"""The order of rows with and without mixtures, and how rows are read as batches."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emo.common.causal_lm import IGNORE
from emo.common.errors import UserError
from emo.data_prep.config import DataConfig
from emo.data_prep.shards.format import open_prepared
from emo.pipeline.batches.config import MixtureConfig, count_steps
from emo.pipeline.batches.loader import Batches, Loader, check_content, rank_rows
from emo.pipeline.batches.order import (
    BatchOrder,
    Domain,
    MixedOrder,
    MixtureStart,
    mixture_flow,
    normalized_shares,
)
from emo.pipeline.config import TrainConfig
from emo.pipeline.control.run_dir import DATA_HASHES
from emo.pipeline.control.world import World
from emo.pipeline.loss import LIVE, fuse_model, get_objective
from emo.pipeline.model.objective.config import RampConfig
from tests.helpers.corpus import alpaca_rows, prepared, texts, write_jsonl
from tests.helpers.families import tiny_llama
from tests.helpers.loss_reference import relative_error
from tests.helpers.refusals import refused

NAMES = ("home", "abroad", "sea", "law")
BATCH = 8
Rows = tuple[np.ndarray, np.ndarray]  # domain and supervised tokens of each row


def mixture(**settings: object) -> MixtureConfig:
    return MixtureConfig.model_validate(settings)


def test_the_order_without_a_mixture_never_changes() -> None:
    order = BatchOrder(1000, 16, 42)
    rows = np.concatenate([order.step_rows(step) for step in range(40)])
    digest = hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()
    assert digest == "4bb4a54ed78bbb58836f96463b399eeb9e4cc45d7fe8b3b2206d589e2bb99912"


@st.composite
def data(draw: st.DrawFn) -> Rows:
    """Draw rows of one to four domains, in any order, of equal or different lengths."""
    counts = draw(st.lists(st.integers(1, 60), min_size=1, max_size=len(NAMES)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    domain = rng.permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.uint16)
    uneven = draw(st.booleans())
    return domain, rng.integers(0, 200, len(domain)) if uneven else np.full(len(domain), 31)


@st.composite
def mixtures(draw: st.DrawFn, names: tuple[str, ...], epochs: bool = False) -> MixtureConfig:
    """Draw a mixture of `names`, with limits on epochs if `epochs`."""
    by = draw(st.sampled_from(["tokens", "rows"]))
    most = draw(st.dictionaries(st.sampled_from(names), st.integers(1, 3))) if epochs else {}
    if draw(st.booleans()):
        return mixture(temperature=draw(st.floats(0.5, 100)), by=by, max_epochs=most)
    number = st.integers(1, 100).map(float)  # rows with a tiny share would come late
    ramps = st.fixed_dictionaries({"from": number, "to": number, "steps": st.integers(1, 60)})
    shares = {name: draw(number | ramps.map(RampConfig.model_validate)) for name in names}
    return MixtureConfig(shares=shares, by=by, max_epochs=most)


def mixed(rows: Rows, *history: tuple[int, MixtureConfig | None], seed: int = 3) -> MixedOrder:
    return MixedOrder(*rows, names_of(rows), BATCH, seed, [MixtureStart(*holding) for holding in history])


def names_of(rows: Rows) -> tuple[str, ...]:
    return NAMES[: int(rows[0].max()) + 1]


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_ranks_resumes_and_changed_mixtures_do_not_change_the_sequence(draws: st.DataObject) -> None:
    rows = draws.draw(data())
    first = draws.draw(st.none() | mixtures(names_of(rows)))
    changes = sorted(draws.draw(st.sets(st.integers(1, 30), min_size=first is None, max_size=3)))
    history = [(0, first), *((step, draws.draw(mixtures(names_of(rows)))) for step in changes)]
    order = mixed(rows, *history)
    steps = [order.step_rows(step) for step in range(40)]
    assert {len(step) for step in steps} == {BATCH}
    sequence = np.concatenate(steps)
    for domain in np.unique(rows[0]):  # each row of a domain is used once before any is used again
        stream, size = sequence[rows[0][sequence] == domain], int((rows[0] == domain).sum())
        for start in range(0, len(stream), size):
            epoch = stream[start : start + size]
            assert len(set(epoch.tolist())) == len(epoch)
    until = changes[0] if changes else 40
    before = BatchOrder(len(rows[0]), BATCH, 3) if first is None else mixed(rows, history[0])
    assert all(np.array_equal(before.step_rows(s), steps[s]) for s in range(until))
    for resumed in (0, until - 1, min(until, 39), 39):
        again = mixed(rows, *history).step_rows(resumed)
        assert np.array_equal(again, steps[resumed])
        for ranks in (1, 2, 4, 8):
            parts = [rank_rows(again, rank, ranks)[0] for rank in range(ranks)]
            assert np.array_equal(np.concatenate(parts), again)


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("by", ["tokens", "rows"])
def test_shares_are_within_one_percent_over_1000_steps(uneven: bool, by: str) -> None:
    """This includes ramps and rows of 1 to 2,000 tokens."""
    rng = np.random.default_rng(0)
    domain = rng.permutation(np.repeat(np.arange(4), [5000, 300, 70, 900]))
    tokens = np.exp(rng.uniform(0, math.log(2000), len(domain))).astype(int) if uneven else 255
    tokens = np.broadcast_to(tokens, len(domain)) * (1 + domain)  # lengths differ between domains
    shares = {"home": {"from": 0.3, "to": 0.1, "steps": 600}, "abroad": 0.5, "sea": 0.15, "law": 0.05}
    order = mixed((domain, tokens), (0, mixture(shares=shares, by=by)))
    rows = np.concatenate([order.step_rows(step) for step in range(1000)])
    sizes = tokens[rows] if by == "tokens" else np.ones(len(rows))
    moved = np.minimum((np.arange(1000) + 0.5) / 600, 1)  # part of the ramp at the middle of each step
    due = np.array([0.3 - 0.2 * moved, *np.outer([0.5, 0.15, 0.05], np.ones(1000))])
    due /= due.sum(0)

    def received(part: slice) -> np.ndarray:
        return np.bincount(domain[rows[part]], weights=sizes[part]) / sizes[part].sum()

    if by == "rows":
        np.testing.assert_allclose(received(slice(None)), due.mean(1), rtol=0.01)
    for start in range(0, 1000, 100):  # a row may be missing at both ends of a window
        part = slice(start * BATCH, (start + 100) * BATCH)
        tolerance = 2 * sizes[part].max() / sizes[part].sum() + 0.002
        assert np.all(np.abs(received(part) - due[:, start : start + 100].mean(1)) < tolerance)


def test_temperature_flattens_shares() -> None:
    domains = [Domain("home", 10, 16_000), Domain("abroad", 10, 1000)]
    for temperature, expected in ((1e-3, 1), (1, 16 / 17), (2, 4 / 5), (1e9, 1 / 2)):
        (home, _), (abroad, _) = normalized_shares(mixture(temperature=temperature), domains)
        assert home == pytest.approx(expected, rel=1e-6) and home + abroad == pytest.approx(1)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_epochs_are_limited_and_due_amounts_never_fall(draws: st.DataObject) -> None:
    rows, steps = draws.draw(data()), 30
    bounded = draws.draw(mixtures(names_of(rows), epochs=True))
    order = mixed(rows, (0, bounded))
    counts = np.bincount(rows[0])
    domains = [Domain(name, int(n), 10 * int(n)) for name, n in zip(order.names, counts, strict=True)]
    flow = mixture_flow(bounded, domains, BATCH, 5, [0.0] * len(domains))
    for time in flow.times[1:]:
        assert (flow.at(math.nextafter(time, 0)) <= flow.at(time)).all()
    assert (np.diff(flow.due, axis=0) >= 0).all() and (flow.rates >= 0).all()
    try:
        portions = order.portions(steps)
    except UserError as error:
        assert set(bounded.max_epochs) == set(order.names)
        limit = sum(bounded.max_epochs[name] * n for name, n in zip(order.names, counts, strict=True))
        assert limit < steps * BATCH and f"for {limit // BATCH:,} steps" in str(error)
        return
    assert sum(p.rows for p in portions) == steps * BATCH
    assert all(p.epochs <= bounded.max_epochs.get(p.name, math.inf) for p in portions)


def test_other_domains_get_the_share_of_an_exhausted_one_in_proportion() -> None:
    domain = np.repeat([0, 1, 2], [50, 5000, 5000])
    shares = {"home": 0.5, "abroad": 0.4, "sea": 0.1}
    order = mixed((domain, np.full(len(domain), 9)), (0, mixture(shares=shares, max_epochs={"home": 2})))
    before, after, late = (order.count_rows(step) for step in (24, 26, 326))
    assert before.tolist() == pytest.approx([96, 77, 19], abs=1) and after[0] == 100
    assert (late - after).tolist() == pytest.approx([0, 1920, 480], abs=1)


def test_domains_alternate_so_that_ranks_get_equal_shares() -> None:
    domain = np.repeat([0, 1], 600)
    order = mixed((domain, np.full(1200, 9)), (0, mixture(shares={"home": 0.75, "abroad": 0.25})))
    for step in range(20):
        first, second = domain[order.step_rows(step)].reshape(2, BATCH // 2).sum(1)
        assert abs(int(first) - int(second)) <= 1


@pytest.mark.parametrize("names", [["home"], ["home", "abroad", "empty"]])
def test_missing_and_empty_domains_are_rejected(names: list[str]) -> None:
    rows = (np.repeat([0, 1], 20), np.full(40, 5))
    with refused("mixture-domains"):
        history = [MixtureStart(0, mixture(shares=dict.fromkeys(names, 1)))]
        MixedOrder(*rows, ("home", "abroad", "empty"), BATCH, 0, history)


CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    write_jsonl(tmp_path / "a.jsonl", texts(80))
    return prepared(tmp_path)


def test_micro_batches_cover_the_rows_in_order(config: DataConfig) -> None:
    """Rows that are not real have no labels."""
    data, _ = open_prepared(config)
    rows = np.arange(len(data))[:7]
    real = np.arange(len(rows)) != 4
    micro = list(Batches(data, None, 3, CPU).read(rows, real))
    expected = data.batch(rows)
    expected["labels"][4] = IGNORE
    assert [len(part["input_ids"]) for part in micro] == [3, 3, 1]
    for name in ("input_ids", "position_ids"):
        assert np.array_equal(np.concatenate([part[name] for part in micro]), expected[name])
    labels = np.full(expected["labels"].shape, IGNORE)
    for start, part in zip((0, 3, 6), micro, strict=True):
        labels[start : start + 3].flat[part["labels"].positions] = part["labels"].labels
    assert np.array_equal(labels, expected["labels"])


def test_a_row_of_weight_2_trains_like_two_rows(tmp_path: Path) -> None:
    """Loss and gradient agree to 1e-6 if order and packing differ. The divisor is the sum of the weights."""
    results = []
    for folder, weight, copies in (("weighted", 2, 1), ("twice", 1, 2)):
        root = tmp_path / folder
        root.mkdir()
        rows = [row | {"weight": weight if i % 2 else 1} for i, row in enumerate(alpaca_rows(24))]
        write_jsonl(
            root / "a.jsonl", [row for i, row in enumerate(rows) for _ in range(copies if i % 2 else 1)]
        )
        data, _ = open_prepared(prepared(root, kind="instruct", dedup="none", sequence_len=256))
        torch.manual_seed(0)
        model = tiny_llama(data.manifest.vocab_size, max_position_embeddings=256).double()
        fuse_model(model, get_objective("emo"), LIVE)
        loader = Loader(BatchOrder(len(data), len(data), 0), Batches(data, None, 4, CPU), World(0, 1, CPU))
        batch = loader.step(0, last=True)
        loader.close()
        loss = sum(model(**micro).loss for micro in batch.micro) / batch.valid
        loss.backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        results.append((batch.valid, float(loss), gradient, data.valid.sum()))
    (weight, loss, gradient, tokens), (twice, want, expected, all_tokens) = results
    assert weight == twice == all_tokens > tokens and loss == pytest.approx(want, rel=1e-6)
    assert relative_error(gradient, expected) <= 1e-6


def test_the_loader_reads_one_step_ahead(config: DataConfig) -> None:
    """The loader reads nothing after the last step. Steps may be skipped."""
    data, _ = open_prepared(config)
    steps_read: list[int] = []

    class RecordingOrder(BatchOrder):
        def step_rows(self, step: int) -> np.ndarray:
            steps_read.append(step)
            return super().step_rows(step)

    order = BatchOrder(len(data), 4, 0)
    loader = Loader(RecordingOrder(len(data), 4, 0), Batches(data, None, 2, CPU), World(1, 2, CPU))
    for step in (5, 6, 9):
        result = loader.step(step, last=step == 9)
        rows = order.step_rows(step)
        assert np.array_equal(result.rows, rows)
        assert result.valid == data.valid[rows].sum()
        chosen = data.batch(rows[2:])["input_ids"]
        assert np.array_equal(np.concatenate([part["input_ids"] for part in result.micro]), chosen)
    loader.close()
    assert steps_read == [5, 6, 7, 9]


def test_a_changed_shard_stops_first_and_later_launches(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emo.pipeline.batches.loader.gather_objects", lambda value: [value])
    world, run_dir = World(0, 1, CPU), tmp_path / "run"
    run_dir.mkdir()
    data, _ = open_prepared(config)
    check_content(run_dir, [data], world)
    assert (run_dir / DATA_HASHES).is_file()
    check_content(run_dir, [data], world)
    shard = config.dir / "train" / data.manifest.shards[1].file
    changed = bytearray(shard.read_bytes())
    changed[len(changed) // 2] ^= 1
    shard.write_bytes(changed)
    for folder in (run_dir, tmp_path):
        with pytest.raises(UserError, match=rf"{shard.name} was changed after it was prepared; run: "):
            check_content(folder, [data], world)


@pytest.mark.parametrize(
    ("rows", "batch", "epochs", "steps"),
    [(35, 12, 1, 3), (36, 12, 1, 3), (37, 12, 1, 4), (18, 12, 1, 2), (35, 12, 2, 6), (100, 3, 0.3, 10)],
)
def test_an_epoch_includes_every_row(rows: int, batch: int, epochs: float, steps: int) -> None:
    """The last step is filled with rows of the next epoch. With a mixture, this step is left out."""
    keys: dict[str, Any] = {"num_train_epochs": epochs, "global_batch_size": batch}
    assert count_steps(TrainConfig(**keys), rows) == steps
    order = BatchOrder(rows, batch, 0)
    seen = np.concatenate([order.step_rows(step) for step in range(steps)])
    assert epochs < 1 or np.bincount(seen, minlength=rows).min() == epochs
    mixture = MixtureConfig(temperature=1)
    assert count_steps(TrainConfig(**keys, mixture=mixture), rows) == int(epochs * rows / batch)
    with pytest.raises(UserError):
        count_steps(TrainConfig(**keys), 1)
    rounded = {"num_train_epochs": 4.35, "global_batch_size": 5, "mixture": mixture}
    assert count_steps(TrainConfig(**rounded), 100) == 87
    assert count_steps(TrainConfig(num_train_epochs=0.29, global_batch_size=29), 100) == 1
