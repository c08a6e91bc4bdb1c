"""Transport costs: exact and cached rows, files, permuted tokens, padded rows, products, and no waiting."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from emo.common.causal_lm import IGNORE
from emo.pipeline.loss import cost as tensors
from emo.pipeline.loss.cost import (
    CACHE_WINDOW_CPU,
    LIVE,
    CostEmbedding,
    find_twins,
    padded_width,
    plan_tokens,
)
from emo.pipeline.loss.cost_files import load_cost, number_cost
from emo.pipeline.loss.fused import fused_linear_loss
from tests.helpers.families import VOCAB, family
from tests.helpers.loss_reference import assert_agree, cost_matrix, fused_step, reference, unit_rows
from tests.helpers.refusals import refused
from tests.helpers.waits import waits
from tests.unit.loss.test_objectives import ONE_TARGET, make

V, H = 4500, 24  # a CPU loops over rows above 4096
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def batch(seed: int, n: int = 300, vocab: int = V) -> Tensor:
    """Return labels with natural frequencies, which are a few common targets and many rare ones."""
    generator = torch.Generator().manual_seed(seed)
    rank = torch.rand(n, generator=generator).pow(3) * vocab
    labels = rank.long().clamp(max=vocab - 1)
    labels[::7] = -100
    return labels


@pytest.mark.parametrize(("rows", "vocab"), [(0, V), (40, V), (5000, V), (40, 600)])
def test_cached_rows_are_close_and_independent_of_history(
    rows: int, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact rows in windows equal the reference. Gradients of cached rows are within 2e-3 of them."""
    monkeypatch.setattr("emo.pipeline.loss.cost.WINDOW_MB", 0.2)
    torch.manual_seed(0)
    h, w = torch.randn(300, H).requires_grad_(), torch.randn(vocab, H).requires_grad_()
    E = torch.randn(vocab, 2 * H)
    megabytes = (rows + min(vocab, CACHE_WINDOW_CPU)) * vocab * 2 / 2**20 + 1e-4
    exact, fresh, used = (CostEmbedding.from_weight(E, cache_mb=mb) for mb in (0, megabytes, megabytes))
    for seed in range(6):
        fused_step(h, w, batch(seed, vocab=vocab), make("emo"), used, memory_mb=2)
    assert used.cache is not None and used.cache.capacity == min(rows, vocab)
    want, again, got = (
        fused_step(h, w, batch(99, vocab=vocab), make("emo"), cost, memory_mb=2)
        for cost in (exact, fresh, used)
    )
    assert_agree(want, reference(h, w, batch(99, vocab=vocab), E, "emo"), 1e-5)
    assert_agree(got, want, 2e-3)
    assert_agree(got, again, 5e-5)  # products in other groups may differ in the last digit of float16


def test_cache_prefers_frequent_targets() -> None:
    """A full table replaces its least frequent target when another one becomes more frequent."""
    megabytes = (CACHE_WINDOW_CPU + 10) * V * 2 / 2**20 + 1e-4
    cost = CostEmbedding.from_weight(torch.randn(V, H), cache_mb=megabytes)
    h, w = torch.randn(40, H), torch.randn(V, H)
    table = cost.cache
    assert table is not None and table.capacity == 10
    for first, times, frequent in ((0, 2, 0), (100, 1, 0), (100, 3, 100)):
        for _ in range(times):
            fused_linear_loss(h, w, torch.arange(40) % 10 + first, make("emo"), cost)
        assert (table.slot[frequent : frequent + 10] >= 0).all()
    assert (table.slot[:10] == -1).all()


def test_live_costs_follow_the_head() -> None:
    """Costs always come from the current head, without a gradient through them."""
    torch.manual_seed(0)
    h, w = torch.randn(30, H).requires_grad_(), torch.randn(90, H).requires_grad_()
    labels = torch.randint(90, (30,))
    for _ in range(2):
        got = fused_step(h, w, labels, make("emo"), LIVE)
        assert_agree(got, reference(h, w, labels, w.detach(), "emo"), 1e-5)
        with torch.no_grad():
            w += 0.3 * torch.randn_like(w)


@pytest.mark.filterwarnings("ignore:cost embedding")  # the padding row of OPT is zero
@pytest.mark.parametrize(
    ("name", "tied", "shard"),
    [
        *(("llama", False, "4KB"), ("llama", True, "1GB"), ("gpt_neox", False, "1GB")),
        *(("opt", True, "4KB"), ("gpt2", True, "4KB")),
    ],
)
def test_reads_the_head_of_a_checkpoint(name: str, tied: bool, shard: str, tmp_path: Path) -> None:
    """The head may be tied, and in one file or many. Each architecture has other names on disk."""
    model = family(name, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    want = unit_rows(model.get_output_embeddings().weight.detach().double())
    torch.testing.assert_close(load_cost(str(tmp_path), VOCAB).rows.double(), want, rtol=1e-5, atol=1e-6)


def test_reads_other_files(tmp_path: Path) -> None:
    """Base models without a prefix in pytorch_model.bin and plain matrices can be read."""
    model = family("gpt2")
    model.config.save_pretrained(tmp_path)
    torch.save(model.transformer.state_dict(), tmp_path / "pytorch_model.bin")
    want = unit_rows(model.get_output_embeddings().weight.detach())
    torch.testing.assert_close(load_cost(str(tmp_path), VOCAB).rows, want)
    E = torch.randn(12, 5)
    save_file({"cost": E, "scale": torch.ones(3)}, tmp_path / "cost.safetensors")
    torch.save(E, tmp_path / "cost.pt")
    torch.save({"cost": E, "step": 3}, tmp_path / "named.pt")
    costs = [load_cost(str(tmp_path / f"{name}"), 12) for name in ("cost.pt", "named.pt", "cost.safetensors")]
    assert len({cost.fingerprint for cost in costs}) == 1 and costs[0].fingerprint
    for cost in costs:
        torch.testing.assert_close(cost.rows, unit_rows(E), rtol=0, atol=1e-6)


def test_invalid_sources_raise(tmp_path: Path) -> None:
    E = torch.randn(12, 5)
    save_file({"a": E, "b": E.clone()}, tmp_path / "two.safetensors")
    torch.save(E, tmp_path / "twelve.pt")
    torch.save(torch.full((13, 2), torch.nan), tmp_path / "nan.pt")
    torch.save(torch.arange(26).view(13, 2), tmp_path / "ids.pt")
    (tmp_path / "junk.pt").write_bytes(b"not a pickle")
    llama = family("llama")
    for name in ("torn", "shard"):
        llama.save_pretrained(tmp_path / name, max_shard_size="4KB" if name == "shard" else "1GB")
    llama.model.save_pretrained(tmp_path / "body")
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"12345")
    for file in (tmp_path / "shard").glob("model-*.safetensors"):
        file.unlink()
    for source, code in {
        "absent.pt": "cost-missing",
        "nowhere": "cost-missing",
        "two.safetensors": "cost-shape",
        "twelve.pt": "cost-vocabulary",
        "junk.pt": "cost-unreadable",
        "ids.pt": "dtypes",
        "nan.pt": "not-finite",
        "torn": "cost-unreadable",
        "shard": "cost-missing",
        "body": "cost-missing",
    }.items():
        with refused(code):
            load_cost(str(tmp_path / source), 13 if "." in source else VOCAB)


def test_permuted_costs_are_those_of_other_tokens() -> None:
    torch.manual_seed(0)
    cost, tokens = CostEmbedding.from_weight(torch.randn(30, 6)), torch.arange(30)
    true, permuted = cost.costs(tokens), cost.permuted(1).costs(tokens)
    assert not torch.allclose(true, permuted)
    assert torch.allclose(true.flatten().sort().values, permuted.flatten().sort().values, atol=1e-6)
    assert cost.permuted(1).fingerprint != cost.permuted(2).fingerprint


def test_costs_of_numbers() -> None:
    """Costs are distances between numbers, whatever marks the space before them. Other costs are 0."""
    cost = number_cost(["<s>", "1", "\u2581" + "12", "\u01207", "x1", "\u00b2", "-3", "0"], 10)
    rows = cost.costs(torch.tensor([1, 2, 0, 9]))
    eleven, twelve = (9 * (1 + math.log(d / 9)) for d in (11, 12))
    assert rows[0].tolist() == pytest.approx([0, 0, eleven, 6, 0, 0, 0, 1, 0, 0])
    assert rows[1].tolist() == pytest.approx([0, eleven, 0, 5, 0, 0, 0, twelve, 0, 0])
    assert not rows[2:].any()
    assert cost.prepared_for(torch.device("cpu"), torch.bfloat16) is cost
    copies = {cost.prepared_for(torch.device("meta"), torch.bfloat16) for _ in range(2)}
    assert len(copies) == 1, "the copy on a device is kept"
    assert cost.fingerprint != number_cost(["1", "2"], 10).fingerprint
    with refused("no-numbers"):
        number_cost(["a", "7"], 10)


@pytest.mark.parametrize("instructions", [False, True])
@pytest.mark.parametrize("model_dtype", [torch.bfloat16, torch.float16])
def test_small_costs_are_accurate_in_half_precision(
    model_dtype: torch.dtype, instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs from 5e-4 on are within 5 %, even if half precision rounds the cosine to 1."""
    monkeypatch.setattr("emo.pipeline.loss.cost.lacks_bfloat16", lambda: not instructions)
    generator = torch.Generator().manual_seed(0)
    base, noise = (torch.randn(600, 256, generator=generator) for _ in range(2))
    E = torch.cat((base, base + noise * torch.linspace(0.03, 0.3, 600)[:, None])).to(torch.bfloat16)
    want = cost_matrix(E)[torch.arange(600), torch.arange(600) + 600]
    cost = CostEmbedding.from_weight(E).prepared_for(torch.device("cpu"), model_dtype)
    rows = {"exact": cost.costs(torch.arange(600))}
    rows["cached"] = rows["exact"].half()
    if cost.rows.dtype == torch.float16:  # as GPU kernels read them
        rows["from cosines"] = (1 - cost.cosines(torch.arange(600))).clamp(min=0)
    for name, costs in rows.items():
        near = costs[torch.arange(600), torch.arange(600) + 600].double()
        assert float(((near - want) / want).abs().max()) <= 0.05, name


def test_find_twins() -> None:
    torch.manual_seed(0)
    E = torch.randn(300, 8)
    tokens = torch.randperm(300)[:200]
    E[tokens[150]] = 2.5 * E[tokens[3]]  # the same direction
    E[list({*range(300)} - {*tokens.tolist()})] = E[tokens[5]].clone()  # tokens outside the set do not count
    assert find_twins(CostEmbedding.from_weight(E), tokens).nonzero().flatten().tolist() == [3, 150]


@contextlib.contextmanager
def padded_everywhere() -> Iterator[None]:
    """Pad rows as on an accelerator, and fill uninitialised memory with NaN."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "row_stride", lambda V, device: padded_width(V))
        torch.use_deterministic_algorithms(True)  # fills uninitialised memory
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "cache_mb", "options"), [("emo", 0.0, {}), ("emo", 0.05, {}), ("mile", 0.0, {"softcap": 5.0})]
)
def test_padding_rows_does_not_change_results(
    name: str, cache_mb: float, options: dict[str, float], dtype: torch.dtype
) -> None:
    """Losses and gradients over several chunks equal those of contiguous rows."""
    torch.manual_seed(0)
    E, labels = torch.randn(150, 12), torch.randint(150, (40,))
    h, w = (torch.randn(n, 12).to(dtype).requires_grad_() for n in (40, 150))
    results = []
    for rows in (contextlib.nullcontext(), padded_everywhere()):
        with rows:
            costs = CostEmbedding.from_weight(E, cache_mb=cache_mb)
            results.append(fused_step(h, w, labels, make(name), costs, memory_mb=0.005, **options))
    assert_agree(results[1], results[0], 1e-2 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2500])
def test_products_are_rounded_once(dtype: torch.dtype, rows: int) -> None:
    """The error is at most half a unit in the last place of the product in float64."""
    torch.manual_seed(0)
    x, matrix, less = (torch.randn(*shape).to(dtype) for shape in ((5, 33), (rows, 33), (5,)))
    exact = x.double() @ matrix.double().T - less.double()[:, None]
    out = torch.empty(5, rows, dtype=dtype)
    tensors.write_widened_product(x, matrix, out, less)
    assert ((out.double() - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() * 1.01 + 1e-6).all()
    product, want = tensors.mm_widened(out, matrix).double(), out.double() @ matrix.double()
    torch.testing.assert_close(product, want, rtol=1e-5, atol=1e-4)


@given(st.lists(st.lists(st.sampled_from([IGNORE, 0, 1, 5, 6, 900]), min_size=3, max_size=3), max_size=9))
def test_the_plan_is_the_valid_tokens_sorted(rows: list[list[int]]) -> None:
    """Tokens are sorted by label, then by position. Every array contains what its name promises."""
    plan = plan_tokens(torch.tensor(rows, dtype=torch.int64).view(-1, 3))
    flat = [label for row in rows for label in row]
    want = sorted((label, position) for position, label in enumerate(flat) if label != IGNORE)
    assert (plan.size, len(plan)) == (len(flat), len(want))
    assert list(zip(plan.labels, plan.positions, strict=True)) == want
    assert plan.targets.tolist() == sorted({label for label, _ in want})
    assert [plan.targets[i] for i in plan.target_index] == [label for label, _ in want]
    assert plan.counts.tolist() == [flat.count(target) for target in plan.targets]


@pytest.mark.parametrize("cache_mb", [0.0, 0.02], ids=["exact", "cached"])
@pytest.mark.parametrize("name", ONE_TARGET)
def test_the_loss_never_waits_for_the_device(name: str, cache_mb: float) -> None:
    """Planned labels never wait, forward or backward. Labels on the device wait once, to be fetched."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 8, device=DEVICE, requires_grad=True) for n in (90, 200))
    labels = batch(0, 90, 200)
    cost = CostEmbedding.from_weight(weight.detach(), cache_mb=cache_mb)
    beside: dict[str, Any] = {"stored": torch.full((90,), -2.0, device=DEVICE), "memory_mb": 0.02}
    plan, on_device = plan_tokens(labels, pin=DEVICE.type == "cuda"), labels.to(DEVICE)
    for _ in range(2):  # the second time the cache is not empty
        with waits() as waited:
            sums = fused_linear_loss(hidden, weight, plan, make(name), cost, **beside)
            (sums.loss / sums.tokens).backward()
        assert waited == []
    with waits() as waited:
        again = fused_linear_loss(hidden, weight, on_device, make(name), cost, **beside)
    assert len(waited) == 1
    assert torch.equal(again.loss, sums.loss)
