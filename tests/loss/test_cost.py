"""Transport costs: rows exact and cached, files, the order of tokens, padded rows, products, and no waits."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from emo.common.errors import UserError
from emo.common.labels import IGNORE
from emo.pipeline.loss import cost as tensors
from emo.pipeline.loss.cost import (
    ALIGNMENT,
    CACHE_WINDOW_CPU,
    LIVE,
    CostEmbedding,
    padded_rows,
    padded_width,
    plan_tokens,
    touchable,
    twins,
)
from emo.pipeline.loss.cost_files import load_cost, number_cost
from emo.pipeline.loss.fused import fused_linear_loss
from emo.pipeline.loss.objectives import OBJECTIVES
from tests.helpers.loss_reference import agree, cost_matrix, fused_step, reference, relative_error, unit_rows
from tests.helpers.refusals import refused
from tests.helpers.waits import waits
from tests.loss.test_objectives import make

V, H = 4500, 24  # above 4096 a CPU takes the row loop
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def batch(seed: int, n: int = 300, vocab: int = V) -> Tensor:
    """Labels with natural frequencies: a few common targets, many rare ones."""
    generator = torch.Generator().manual_seed(seed)
    rank = torch.rand(n, generator=generator).pow(3) * vocab
    labels = rank.long().clamp(max=vocab - 1)
    labels[::7] = -100
    return labels


@pytest.mark.parametrize("rows", [0, 40, 5000])
@pytest.mark.parametrize("vocab", [V, 600])
def test_cached_rows_are_close_and_independent_of_history(rows: int, vocab: int) -> None:
    """Gradients within 2e-3 of the exact path, and the same whatever the cache holds."""
    torch.manual_seed(0)
    h, w = torch.randn(300, H).requires_grad_(), torch.randn(vocab, H).requires_grad_()
    E = torch.randn(vocab, 2 * H)
    megabytes = (rows + min(vocab, CACHE_WINDOW_CPU)) * vocab * 2 / 2**20 + 1e-4
    fresh, used = (CostEmbedding.from_weight(E).cached(megabytes) for _ in range(2))
    for seed in range(6):
        fused_step(h, w, batch(seed, vocab=vocab), make("emo"), used, memory_mb=2)
    assert used.cache is not None and used.cache.capacity == min(rows, vocab)
    labels = batch(99, vocab=vocab)
    costs = (CostEmbedding.from_weight(E), used, fresh)
    exact, got, again = (fused_step(h, w, labels, make("emo"), cost, memory_mb=2) for cost in costs)
    agree(got, exact, 2e-3)
    agree(got, again, 5e-5)  # the product may round differently in another composition, by a float16 digit


def test_cache_prefers_frequent_targets() -> None:
    """A full table replaces its least frequent target by one that has overtaken it."""
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
    want = CostEmbedding(cost.rows).costs(torch.arange(100, 110))
    torch.testing.assert_close(table.rows[table.slot[100:110]].float(), want, rtol=5e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_rows_are_computed_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows overlap where a group of tokens reaches beyond one; what is there is not computed again."""
    monkeypatch.setattr("emo.pipeline.loss.cost.WINDOW_MB", 0.2)
    torch.manual_seed(0)
    h, w = torch.randn(300, H).to(dtype).requires_grad_(), torch.randn(V, H).to(dtype)
    labels, cost = batch(3), CostEmbedding.from_weight(torch.randn(V, H).to(dtype))
    computed: list[int] = []
    costs = CostEmbedding.costs

    def counting(self: CostEmbedding, targets: Tensor, out: Tensor | None = None) -> Tensor:
        computed.extend(targets.tolist())
        return costs(self, targets, out)

    monkeypatch.setattr(CostEmbedding, "costs", counting)
    sums = fused_linear_loss(h, w, labels, make("emo"), cost, memory_mb=2)
    assert sorted(computed) == sorted(set(labels.tolist()) - {-100})
    want = fused_linear_loss(h, w, labels, make("emo"), CostEmbedding(cost.rows), memory_mb=64)
    assert relative_error(sums.demd, want.demd) <= 1e-5


def test_live_head() -> None:
    """The adaptive variant: costs from the head as it is now, without a gradient through them."""
    torch.manual_seed(0)
    h, w = torch.randn(30, H).requires_grad_(), torch.randn(90, H).requires_grad_()
    labels = torch.randint(90, (30,))
    for _ in range(2):
        got = fused_step(h, w, labels, make("emo"), LIVE)
        agree(got, reference(h, w, labels, w.detach(), "emo"), 1e-5)
        with torch.no_grad():
            w += 0.3 * torch.randn_like(w)


def tiny_model(kind: str, tied: bool = False) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig, OPTConfig

    size = {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    size["tie_word_embeddings"] = tied
    config = {
        "llama": lambda: LlamaConfig(**size, intermediate_size=8),
        "gpt_neox": lambda: GPTNeoXConfig(**size, intermediate_size=8),
        "opt": lambda: OPTConfig(**size, ffn_dim=8, word_embed_proj_dim=16),
        "gpt2": lambda: GPT2Config(vocab_size=96, n_embd=16, n_layer=1, n_head=2),
    }[kind]()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("kind", "tied", "shard"),
    [
        ("llama", False, "8KB"),
        ("llama", True, "1GB"),
        ("gpt_neox", False, "1GB"),
        ("opt", True, "8KB"),
        ("gpt2", True, "8KB"),
    ],
)
def test_reads_the_head_of_a_checkpoint(kind: str, tied: bool, shard: str, tmp_path: Path) -> None:
    """One file or many, own head or tied, under the names that each architecture uses on disk."""
    model = tiny_model(kind, tied)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # OPT has a padding row of length zero
        cost = load_cost(str(tmp_path), 96)
    want = unit_rows(model.get_output_embeddings().weight.detach().double())
    torch.testing.assert_close(cost.rows.double(), want, rtol=1e-5, atol=1e-6)


def test_reads_other_files(tmp_path: Path) -> None:
    """pytorch_model.bin of a bare base model without the prefix, and plain matrices."""
    model = tiny_model("gpt2")
    model.config.save_pretrained(tmp_path)
    state = {k.removeprefix("transformer."): v for k, v in model.state_dict().items()}
    state.pop("lm_head.weight")
    torch.save(state, tmp_path / "pytorch_model.bin")
    want = unit_rows(model.get_output_embeddings().weight.detach())
    torch.testing.assert_close(load_cost(str(tmp_path), 96).rows, want)
    E = torch.randn(12, 5)
    save_file({"cost": E, "scale": torch.ones(3)}, tmp_path / "cost.safetensors")
    torch.save(E, tmp_path / "cost.pt")
    torch.save({"cost": E, "step": 3}, tmp_path / "named.pt")
    for name in ("cost.safetensors", "cost.pt", "named.pt"):
        cost = load_cost(str(tmp_path / name), 12, dtype=torch.float64)
        assert cost.fingerprint == load_cost(str(tmp_path / "cost.pt"), 12).fingerprint != None  # noqa: E711
        torch.testing.assert_close(cost.costs(torch.arange(12)), cost_matrix(E), rtol=0, atol=1e-6)


def test_unusable_sources_are_refused(tmp_path: Path) -> None:
    E, nan = torch.randn(12, 5), torch.full((13, 2), torch.nan)
    save_file({"a": E, "b": E.clone()}, tmp_path / "two.safetensors")
    for name, content in (("two", {"a": E, "b": E}), ("one", E), ("list", [1, 2]), ("nan", nan)):
        torch.save(content, tmp_path / f"{name}.pt")
    torch.save(torch.arange(26).view(13, 2), tmp_path / "ids.pt")
    (tmp_path / "junk.pt").write_bytes(b"not a pickle")
    llama = tiny_model("llama")
    for name, size in (("torn", "1GB"), ("index", "8KB"), ("shard", "8KB"), ("narrow", "1GB")):
        llama.save_pretrained(tmp_path / name, max_shard_size=size)
    llama.model.save_pretrained(tmp_path / "body")
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"12345")
    (tmp_path / "index" / "model.safetensors.index.json").write_text("{")
    for file in (tmp_path / "shard").glob("model-*.safetensors"):
        file.unlink()
    save_file({"lm_head.weight": torch.ones(96, 3)}, tmp_path / "narrow" / "model.safetensors")
    (tmp_path / "t5").mkdir()
    (tmp_path / "t5" / "config.json").write_text('{"model_type": "t5"}')
    for source, code in (
        ("absent.pt", "cost-missing"),
        ("nowhere", "cost-missing"),
        ("two.safetensors", "cost-shape"),
        ("two.pt", "cost-shape"),
        ("one.pt", "cost-vocabulary"),
        ("list.pt", "cost-unreadable"),
        ("junk.pt", "cost-unreadable"),
        ("ids.pt", "dtypes"),
        ("nan.pt", "not-finite"),
        ("torn", "cost-unreadable"),
        ("index", "model-index"),
        ("shard", "cost-missing"),
        ("narrow", "cost-shape"),
        ("body", "cost-missing"),
        ("t5", "cost-missing"),
    ):
        with pytest.raises(UserError) as error:
            load_cost(str(tmp_path / source), 13 if "." in source else 96)
        assert error.value.code == code and source in str(error.value), source


def test_permuted_costs_are_those_of_other_tokens() -> None:
    torch.manual_seed(0)
    cost, tokens = CostEmbedding.from_weight(torch.randn(30, 6)), torch.arange(30)
    true, permuted = cost.costs(tokens), cost.permuted(1).costs(tokens)
    assert not torch.allclose(true, permuted)
    assert torch.allclose(true.flatten().sort().values, permuted.flatten().sort().values, atol=1e-6)
    assert cost.permuted(1).fingerprint != cost.permuted(2).fingerprint


def test_costs_of_numbers() -> None:
    """Distances of values between tokens that are numbers, whatever marks the space before them; else 0."""
    cost = number_cost(["<s>", "1", "\u2581" + "12", "\u01207", "x1", "\u00b2", "-3", "0"], 10)
    rows = cost.costs(torch.tensor([1, 2, 0, 9]))
    eleven, twelve = (9 * (1 + math.log(d / 9)) for d in (11, 12))
    assert rows[0].tolist() == pytest.approx([0, 0, eleven, 6, 0, 0, 0, 1, 0, 0])
    assert rows[1].tolist() == pytest.approx([0, eleven, 0, 5, 0, 0, 0, twelve, 0, 0])
    assert not rows[2:].any()
    assert cost.placed(torch.device("cpu"), torch.bfloat16) is cost
    assert cost.fingerprint != number_cost(["1", "2"], 10).fingerprint
    with refused("no-numbers"):
        number_cost(["a", "7"], 10)


@pytest.mark.parametrize("instructions", [False, True])
@pytest.mark.parametrize("model_dtype", [torch.bfloat16, torch.float16])
def test_small_costs_keep_their_digits_in_half_precision(
    model_dtype: torch.dtype, instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs of 5e-4 and more between near twins, whose cosine half precision cannot tell from 1."""
    monkeypatch.setattr("emo.pipeline.loss.cost._lacks_instructions", lambda: not instructions)
    generator = torch.Generator().manual_seed(0)
    base, noise = (torch.randn(600, 256, generator=generator) for _ in range(2))
    E = torch.cat((base, base + noise * torch.linspace(0.03, 0.3, 600)[:, None])).to(torch.bfloat16)
    want = cost_matrix(E)[torch.arange(600), torch.arange(600) + 600]
    cost = CostEmbedding.from_weight(E).placed(torch.device("cpu"), model_dtype)
    rows = {"exact": cost.costs(torch.arange(600))}
    rows["cached"] = rows["exact"].half()
    if cost.rows.dtype == torch.float16:  # as kernels of a GPU read them
        rows["from cosines"] = (1 - cost.cosines(torch.arange(600))).clamp(min=0)
    for name, costs in rows.items():
        near = costs[torch.arange(600), torch.arange(600) + 600].double()
        assert float(((near - want) / want).abs().max()) <= 0.05, name


def test_twins() -> None:
    torch.manual_seed(0)
    E = torch.randn(300, 8)
    assert twins(CostEmbedding.from_weight(E)) == (0, 300)
    E[7] = 2.5 * E[100]  # the same direction
    assert twins(CostEmbedding.from_weight(E)) == (2, 300)
    assert twins(CostEmbedding.constant(300)) == (0, 300)


@contextlib.contextmanager
def padded_everywhere() -> Iterator[None]:
    """Pad rows as on an accelerator within the block, with NaN in uninitialised memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "row_stride", lambda V, device: padded_width(V))
        torch.use_deterministic_algorithms(True)  # fills memory that is not initialised
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("V", [64, 150, 50257])
def test_rows_are_aligned_on_an_accelerator(V: int) -> None:
    """And kernels touch the columns that all rows have."""
    rows, whole = padded_rows(3, V, torch.bfloat16, torch.device("meta")), torch.empty(3, V, device="meta")
    assert rows.shape == (3, V)
    assert rows.stride(0) % ALIGNMENT == 0 and rows.stride(0) - V < ALIGNMENT
    assert touchable(rows) == rows.stride(0) and touchable(rows, whole) == V
    assert padded_rows(3, V, torch.bfloat16, torch.device("cpu")).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_mb", [0.0, 0.05])
@pytest.mark.parametrize(("name", "options"), [("emo", {}), ("mile", {"softcap": 5.0})])
def test_padded_rows_change_nothing(
    name: str, options: dict[str, float], cache_mb: float, dtype: torch.dtype
) -> None:
    """Losses and gradients over several chunks are those of contiguous rows."""
    torch.manual_seed(0)
    E, labels = torch.randn(150, 12), torch.randint(150, (40,))
    results = []
    for padded in (False, True):
        with padded_everywhere() if padded else contextlib.nullcontext():
            torch.manual_seed(1)
            h, w = (torch.randn(n, 12).to(dtype).requires_grad_() for n in (40, 150))
            costs = CostEmbedding.from_weight(E, cache_mb=cache_mb)
            results.append(fused_step(h, w, labels, make(name), costs, memory_mb=0.005, **options))
    agree(results[1], results[0], 1e-2 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2500])
def test_products_are_rounded_once(dtype: torch.dtype, rows: int) -> None:
    """At most half a unit in the last place from the product of the same factors in float64."""
    torch.manual_seed(0)
    x, matrix, less = torch.randn(5, 33).to(dtype), torch.randn(rows, 33).to(dtype), torch.randn(5).to(dtype)
    exact = x.double() @ matrix.double().T - less.double()[:, None]
    out = torch.empty(5, rows, dtype=dtype)
    tensors.against_rows(x, matrix, out, less)
    assert ((out.double() - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() * 1.01 + 1e-6).all()
    y = torch.randn(5, rows).to(dtype)
    product = tensors.with_rows(y, matrix).double()
    torch.testing.assert_close(product, y.double() @ matrix.double(), rtol=1e-5, atol=1e-4)


@given(st.lists(st.lists(st.sampled_from([IGNORE, 0, 1, 5, 6, 900]), min_size=3, max_size=3), max_size=9))
def test_the_plan_is_the_valid_tokens_sorted(rows: list[list[int]]) -> None:
    """Ascending by label, equal ones in order of position; every array as its name says."""
    plan = plan_tokens(torch.tensor(rows, dtype=torch.int64).view(-1, 3))
    flat = [label for row in rows for label in row]
    want = sorted((label, position) for position, label in enumerate(flat) if label != IGNORE)
    assert (plan.size, len(plan)) == (len(flat), len(want))
    assert list(zip(plan.labels, plan.positions, strict=True)) == want
    assert plan.targets.tolist() == sorted({label for label, _ in want})
    assert [plan.targets[i] for i in plan.which] == [label for label, _ in want]
    assert plan.counts.tolist() == [flat.count(target) for target in plan.targets]
    for tensor, name in zip(plan.on(DEVICE), ("positions", "labels", "which", "targets"), strict=True):
        assert tensor.tolist() == getattr(plan, name).tolist()


def test_labels_that_cannot_be_planned() -> None:
    with refused("dtypes"):
        plan_tokens(torch.ones(3))
    plan_tokens(torch.tensor([IGNORE])).check(9)
    with refused("shapes"):
        plan = plan_tokens(torch.ones(3).long())
        fused_linear_loss(torch.zeros(4, 2), torch.zeros(9, 2), plan, make("mle"))


@pytest.mark.parametrize("cache_mb", [0.0, 0.02], ids=["exact", "cached"])
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "demd_dense"])
def test_the_loss_never_waits_for_the_device(name: str, cache_mb: float) -> None:
    """Forward and backward with planned labels; and once, to fetch them, with labels on the device."""
    torch.manual_seed(0)
    objective = make(name)
    hidden, weight = (torch.randn(n, 8, device=DEVICE, requires_grad=True) for n in (90, 200))
    labels = torch.randint(200, (90,))
    labels[::5] = IGNORE
    cost = CostEmbedding.from_weight(weight.detach(), cache_mb=cache_mb) if objective.needs_cost else None
    stored = torch.full((90,), -2.0, device=DEVICE)
    plan, on_device = plan_tokens(labels, pin=DEVICE.type == "cuda"), labels.to(DEVICE)
    for _ in range(2):  # the second time the cache is not empty
        with waits() as waited:
            sums = fused_linear_loss(hidden, weight, plan, objective, cost, stored=stored, memory_mb=0.02)
            (sums.loss / sums.tokens).backward()
        assert waited == []
    with waits() as waited:
        again = fused_linear_loss(hidden, weight, on_device, objective, cost, stored=stored, memory_mb=0.02)
    assert len(waited) == 1
    assert torch.equal(again.loss, sums.loss)
