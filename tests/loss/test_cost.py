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
from tests.helpers.loss_reference import cost_matrix, reference, relative_error, unit_rows
from tests.helpers.waits import waits
from tests.loss.test_objectives import make

V, H = 4500, 24  # above 4096 a CPU takes the row loop


def batch(seed: int, n: int = 300, vocab: int = V) -> Tensor:
    """Labels with natural frequencies: a few common targets, many rare ones."""
    generator = torch.Generator().manual_seed(seed)
    rank = torch.rand(n, generator=generator).pow(3) * vocab
    labels = rank.long().clamp(max=vocab - 1)
    labels[::7] = -100
    return labels


def run(h: Tensor, w: Tensor, labels: Tensor, cost: CostEmbedding) -> tuple[Tensor, Tensor, Tensor]:
    h.grad = w.grad = None
    sums = fused_linear_loss(h, w, labels, make("emo"), cost, memory_mb=2)
    sums.loss.backward()
    return sums.demd, h.grad, w.grad


@pytest.mark.parametrize("rows", [0, 40, 5000])
@pytest.mark.parametrize("vocab", [V, 600])
def test_cached_rows_are_close_and_independent_of_history(rows: int, vocab: int) -> None:
    """Gradients within 2e-3 of the exact path, and the same whatever the cache holds."""
    torch.manual_seed(0)
    h, w = torch.randn(300, H).requires_grad_(), torch.randn(vocab, H).requires_grad_()
    E = torch.randn(vocab, 2 * H)
    megabytes = (rows + min(vocab, CACHE_WINDOW_CPU)) * vocab * 2 / 2**20 + 1e-4
    fresh, used = CostEmbedding.from_weight(E, cache_mb=megabytes), CostEmbedding.from_weight(E)
    used = used.cached(megabytes)
    for seed in range(6):
        run(h, w, batch(seed, vocab=vocab), used)
    assert used.cache is not None
    assert used.cache.capacity == min(rows, vocab)
    assert used.cache.used <= used.cache.capacity
    labels = batch(99, vocab=vocab)
    exact = run(h, w, labels, CostEmbedding.from_weight(E))
    got, again = run(h, w, labels, used), run(h, w, labels, fresh)
    for value, other, truth in zip(got, again, exact, strict=True):
        assert relative_error(value, truth) <= 2e-3
        # the cost product may round differently in another composition of rows, by a float16 digit
        assert relative_error(value, other) <= 5e-5


def test_cache_prefers_frequent_targets() -> None:
    """A full table replaces its least frequent target by one that has overtaken it."""
    cost = CostEmbedding.from_weight(
        torch.randn(V, H), cache_mb=(CACHE_WINDOW_CPU + 10) * V * 2 / 2**20 + 1e-4
    )
    h, w = torch.randn(40, H), torch.randn(V, H)

    def see(first: int, times: int) -> None:
        for _ in range(times):
            fused_linear_loss(h, w, torch.arange(40) % 10 + first, make("emo"), cost)

    see(0, 2)
    table = cost.cache
    assert table is not None
    assert table.capacity == 10
    assert (table.slot[:10] >= 0).all()
    see(100, 1)
    assert (table.slot[:10] >= 0).all()
    see(100, 3)
    assert (table.slot[100:110] >= 0).all()
    assert (table.slot[:10] == -1).all()
    want = CostEmbedding(cost.rows).costs(torch.arange(100, 110))
    torch.testing.assert_close(table.rows[table.slot[100:110]].float(), want, rtol=5e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["emo", "demd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_rows_are_computed_once(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
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
    sums = fused_linear_loss(h, w, labels, make(name), cost, memory_mb=2)
    assert sorted(computed) == sorted(set(labels.tolist()) - {-100})
    want = fused_linear_loss(h, w, labels, make(name), CostEmbedding(cost.rows), memory_mb=64)
    assert relative_error(sums.demd, want.demd) <= 1e-5


def test_live_head() -> None:
    """The adaptive variant: costs from the head as it is now, without a gradient through them."""
    torch.manual_seed(0)
    h, w = torch.randn(30, H).requires_grad_(), torch.randn(90, H).requires_grad_()
    labels = torch.randint(90, (30,))
    for _ in range(2):
        h.grad = w.grad = None
        sums = fused_linear_loss(h, w, labels, make("emo"), LIVE)
        sums.loss.backward()
        want = reference(h, w, labels, w.detach(), "emo")
        for got, key in ((sums.demd, "demd"), (h.grad, "d_hidden"), (w.grad, "d_weight")):
            assert relative_error(got, want[key]) <= 1e-5
        with torch.no_grad():
            w += 0.3 * torch.randn_like(w)


def tiny_model(kind: str, tied: bool) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig, OPTConfig

    size = {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {
        "llama": lambda: LlamaConfig(**size, intermediate_size=8, tie_word_embeddings=tied),
        "gpt_neox": lambda: GPTNeoXConfig(**size, intermediate_size=8, tie_word_embeddings=tied),
        "opt": lambda: OPTConfig(**size, ffn_dim=8, word_embed_proj_dim=16, tie_word_embeddings=tied),
        "gpt2": lambda: GPT2Config(vocab_size=96, n_embd=16, n_layer=1, n_head=2),
    }[kind]()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("shard", ["1GB", "8KB"])
@pytest.mark.parametrize(
    ("kind", "tied"),
    [("llama", False), ("llama", True), ("gpt_neox", False), ("opt", True), ("gpt2", True)],
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


def test_reads_old_style_checkpoints(tmp_path: Path) -> None:
    """pytorch_model.bin, and a bare base model without the prefix."""
    model = tiny_model("gpt2", True)
    model.config.save_pretrained(tmp_path)
    state = {k.removeprefix("transformer."): v for k, v in model.state_dict().items()}
    state.pop("lm_head.weight")
    torch.save(state, tmp_path / "pytorch_model.bin")
    want = unit_rows(model.get_output_embeddings().weight.detach())
    torch.testing.assert_close(load_cost(str(tmp_path), 96).rows, want)


def test_reads_plain_files(tmp_path: Path) -> None:
    E = torch.randn(12, 5)
    save_file({"cost": E, "scale": torch.ones(3)}, tmp_path / "cost.safetensors")
    torch.save(E, tmp_path / "cost.pt")
    torch.save({"cost": E, "step": 3}, tmp_path / "named.pt")
    for name in ("cost.safetensors", "cost.pt", "named.pt"):
        cost = load_cost(str(tmp_path / name), 12, dtype=torch.float64)
        assert cost.rows.dtype == torch.float64
        want = cost_matrix(E)
        torch.testing.assert_close(cost.costs(torch.arange(12)), want, rtol=0, atol=1e-6)


def test_unusable_sources_are_refused(tmp_path: Path) -> None:
    E = torch.randn(12, 5)
    save_file({"a": E, "b": E.clone()}, tmp_path / "two.safetensors")
    torch.save({"a": E, "b": E}, tmp_path / "two.pt")
    torch.save(E, tmp_path / "one.pt")
    tiny_model("gpt2", True).config.save_pretrained(tmp_path / "empty")
    for source, code in (
        ("absent.pt", "cost-missing"),
        ("two.safetensors", "cost-shape"),
        ("two.pt", "cost-shape"),
        ("one.pt", "cost-vocabulary"),
        ("nowhere", "cost-missing"),
        ("empty", "cost-missing"),
    ):
        with pytest.raises(UserError) as error:
            load_cost(str(tmp_path / source), 13)
        assert error.value.code == code, source


def test_fingerprints_tell_cost_embeddings_apart(tmp_path: Path) -> None:
    """Fingerprints are of the stored tensor: normalised rows differ in last bits between processors."""
    E = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    changed = E.clone()
    changed[11, 4] += 1e-3
    fingerprints = []
    for i, weight in enumerate((E, E.clone(), changed, E.flip(0), E.to(torch.bfloat16))):
        path = tmp_path / f"{i}.safetensors"
        save_file({"weight": weight.contiguous()}, path)
        fingerprints.append(load_cost(str(path), 12, cache_mb=i).fingerprint)
    assert fingerprints[0] is not None and fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 4
    assert CostEmbedding.from_weight(E).fingerprint is None  # not read from anywhere


def test_damaged_files_are_named(tmp_path: Path) -> None:
    tiny_model("llama", False).save_pretrained(tmp_path / "torn")
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"12345")
    (tmp_path / "short.safetensors").write_bytes(b"1")
    (tmp_path / "junk.pt").write_bytes(b"not a pickle")
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save(torch.arange(26).view(13, 2), tmp_path / "ids.pt")
    nan = torch.randn(13, 2)
    nan[3, 1] = torch.nan
    torch.save(nan, tmp_path / "nan.pt")
    tiny_model("llama", False).save_pretrained(tmp_path / "index", max_shard_size="8KB")
    (tmp_path / "index" / "model.safetensors.index.json").write_text("{")
    tiny_model("llama", False).save_pretrained(tmp_path / "shard", max_shard_size="8KB")
    for file in (tmp_path / "shard").glob("model-*.safetensors"):
        file.unlink()
    tiny_model("llama", False).save_pretrained(tmp_path / "narrow")
    save_file({"lm_head.weight": torch.ones(96, 3)}, tmp_path / "narrow" / "model.safetensors")
    tiny_model("llama", False).model.save_pretrained(tmp_path / "body")
    (tmp_path / "t5").mkdir()
    (tmp_path / "t5" / "config.json").write_text('{"model_type": "t5"}')
    for source, code in (
        ("torn", "cost-unreadable"),
        ("short.safetensors", "cost-unreadable"),
        ("junk.pt", "cost-unreadable"),
        ("empty.pt", "cost-unreadable"),
        ("list.pt", "cost-unreadable"),
        ("ids.pt", "dtypes"),
        ("nan.pt", "not-finite"),
        ("index", "model-settings"),
        ("shard", "cost-missing"),
        ("narrow", "cost-shape"),
        ("body", "cost-missing"),
        ("t5", "cost-model"),
    ):
        with pytest.raises(UserError) as error:
            load_cost(str(tmp_path / source), 13 if source.endswith(".pt") else 96)
        assert error.value.code == code, source
        assert source.split(".")[0] in str(error.value)


def test_permuted_costs_are_those_of_other_tokens() -> None:
    torch.manual_seed(0)
    cost = CostEmbedding.from_weight(torch.randn(30, 6))
    tokens = torch.arange(30)
    true, permuted = cost.costs(tokens), cost.permuted(1).costs(tokens)
    assert not torch.allclose(true, permuted)
    assert torch.allclose(true.flatten().sort().values, permuted.flatten().sort().values, atol=1e-6)
    assert torch.equal(permuted, cost.permuted(1).costs(tokens))
    assert cost.permuted(1).fingerprint != cost.permuted(2).fingerprint


def test_costs_of_numbers() -> None:
    """Distances of values between tokens that are numbers, whatever marks the space before them; else 0."""
    pieces = ["<s>", "1", "\u2581" + "12", "\u01207", "x1", "\u00b2", "-3", "0"]
    cost = number_cost(pieces, 10)
    rows = cost.costs(torch.tensor([1, 2, 0, 9]))
    eleven, twelve = (9 * (1 + math.log(d / 9)) for d in (11, 12))
    assert rows[0].tolist() == pytest.approx([0, 0, eleven, 6, 0, 0, 0, 1, 0, 0])
    assert rows[1].tolist() == pytest.approx([0, eleven, 0, 5, 0, 0, 0, twelve, 0, 0])
    assert not rows[2:].any()
    assert cost.placed(torch.device("cpu"), torch.bfloat16) is cost
    assert cost.fingerprint != number_cost(["1", "2"], 10).fingerprint
    with pytest.raises(UserError) as error:
        number_cost(["a", "7"], 10)
    assert error.value.code == "no-numbers"


@pytest.mark.parametrize("instructions", [False, True])
@pytest.mark.parametrize("model_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_small_costs_keep_their_digits_in_half_precision(
    weight_dtype: torch.dtype,
    model_dtype: torch.dtype,
    instructions: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Costs of 5e-4 and more between near twins, whose cosine half precision cannot tell from 1."""
    monkeypatch.setattr("emo.pipeline.loss.cost._lacks_instructions", lambda: not instructions)
    generator = torch.Generator().manual_seed(0)
    base, noise = (torch.randn(600, 256, generator=generator) for _ in range(2))
    E = torch.cat((base, base + noise * torch.linspace(0.03, 0.3, 600)[:, None])).to(weight_dtype)
    want = cost_matrix(E)[torch.arange(600), torch.arange(600) + 600]
    assert float(want.min()) < 6e-4
    cost = CostEmbedding.from_weight(E).placed(torch.device("cpu"), model_dtype)
    rows = {"exact": cost.costs(torch.arange(600))}
    rows["cached"] = rows["exact"].half()
    if cost.rows.dtype == torch.float16:  # as kernels of a GPU read them
        rows["from cosines"] = (1 - cost.cosines(torch.arange(600))).clamp(min=0)
    for name, costs in rows.items():
        near = costs[torch.arange(600), torch.arange(600) + 600].double()
        assert float(((near - want) / want).abs().max()) <= 0.05, name


def test_costs_never_overflow() -> None:
    """Tokens of eight and of four hundred digits, raw embeddings of any size; in the cache's float16 too."""
    numbers = [*map(str, range(12)), "100", "66666666", "9" * 400]
    cost = number_cost(["a", *numbers], len(numbers) + 1)
    rows = cost.costs(torch.arange(len(numbers) + 1)).half()
    assert rows.isfinite().all()
    assert not rows[0].any()
    values = torch.tensor([min(float(n), torch.finfo(torch.float32).max) for n in numbers]).double()
    distance = (values - values[:, None]).abs()
    want = torch.where(distance <= 9, distance, 9 * (1 + (distance.clamp(min=9) / 9).log()))
    torch.testing.assert_close(rows[1:, 1:].double(), want, rtol=1e-3, atol=1e-3)
    assert (rows[1, 1:].diff() > 0).all()  # further off costs more
    for size in (1e-30, 1.0, 1e30):
        E = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)) * size
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            costs = CostEmbedding.from_weight(E, dtype).costs(torch.arange(40))
            assert 0 <= float(costs.min()) <= float(costs.max()) <= 2.01


def test_twins() -> None:
    torch.manual_seed(0)
    E = torch.randn(300, 8)
    assert twins(CostEmbedding.from_weight(E)) == (0, 300)
    E[7] = 2.5 * E[100]  # the same direction
    assert twins(CostEmbedding.from_weight(E)) == (2, 300)
    assert twins(CostEmbedding.constant(300)) == (0, 300)


COLUMNS, WIDTH = 150, 12
DTYPES = [torch.bfloat16, torch.float16]
META = torch.device("meta")


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


@pytest.mark.parametrize("V", [64, 150, 32000, 50257, 152064])
def test_rows_are_aligned_on_an_accelerator(V: int) -> None:
    rows = padded_rows(3, V, torch.bfloat16, META)
    assert rows.shape == (3, V)
    assert rows.stride(0) % ALIGNMENT == 0 and rows.stride(0) - V < ALIGNMENT
    assert touchable(rows) == rows.stride(0)
    assert padded_rows(3, V, torch.bfloat16, torch.device("cpu")).is_contiguous()


def test_kernels_touch_columns_that_all_rows_have() -> None:
    padded = padded_rows(3, 150, torch.float32, META)
    whole = torch.empty(3, 150, device=META)
    assert touchable(whole) == touchable(padded, whole) == 150
    assert touchable(padded[1:2], padded[:0]) == 192


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("cache_mb", [0.0, 0.05])
@pytest.mark.parametrize(
    ("name", "options"), [("mle", {}), ("emo", {}), ("gem", {}), ("mile", {"softcap": 5.0})]
)
def test_padded_rows_change_nothing(
    name: str, options: dict[str, float], cache_mb: float, dtype: torch.dtype
) -> None:
    """Losses and gradients over several chunks are those of contiguous rows."""
    torch.manual_seed(0)
    E, labels = torch.randn(COLUMNS, WIDTH), torch.randint(COLUMNS, (40,))
    results = []
    for padded in (False, True):
        with padded_everywhere() if padded else contextlib.nullcontext():
            torch.manual_seed(1)
            h = torch.randn(40, WIDTH).to(dtype).requires_grad_()
            w = torch.randn(COLUMNS, WIDTH).to(dtype).requires_grad_()
            costs = CostEmbedding.from_weight(E, cache_mb=cache_mb)
            got = fused_linear_loss(h, w, labels, make(name), costs, memory_mb=0.005, **options)
            got.loss.backward()
        results.append((got.loss.detach(), got.nll, got.demd, h.grad, w.grad))
    bound = 1e-2 if dtype == torch.bfloat16 else 1e-6
    for plain, other in zip(*results, strict=True):
        assert relative_error(other, plain) <= bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 1024, 2500])
def test_products_are_rounded_once(dtype: torch.dtype, rows: int) -> None:
    """At most half a unit in the last place from the product of the same factors in float64."""
    torch.manual_seed(0)
    x, matrix, less = torch.randn(5, 33).to(dtype), torch.randn(rows, 33).to(dtype), torch.randn(5).to(dtype)
    exact = x.double() @ matrix.double().T - less.double()[:, None]
    out = torch.empty(5, rows, dtype=dtype)
    tensors.against_rows(x, matrix, out, less)
    digits = torch.finfo(dtype).eps
    assert ((out.double() - exact).abs() <= digits / 2 * exact.abs() * 1.01 + 1e-6).all()
    y = torch.randn(5, rows).to(dtype)
    product = tensors.with_rows(y, matrix)
    assert product.dtype == torch.float32
    torch.testing.assert_close(product.double(), y.double() @ matrix.double(), rtol=1e-5, atol=1e-4)


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@given(st.lists(st.lists(st.sampled_from([IGNORE, 0, 1, 5, 6, 900]), min_size=3, max_size=3), max_size=9))
def test_the_plan_is_the_valid_tokens_sorted(rows: list[list[int]]) -> None:
    """Ascending by label, equal ones in order of position; every array as its name says."""
    plan = plan_tokens(torch.tensor(rows, dtype=torch.int64).view(-1, 3))
    flat = [label for row in rows for label in row]
    want = sorted((label, position) for position, label in enumerate(flat) if label != IGNORE)
    assert plan.size == len(flat)
    assert len(plan) == len(want)
    assert list(zip(plan.labels, plan.positions, strict=True)) == want
    assert plan.targets.tolist() == sorted({label for label, _ in want})
    assert [plan.targets[i] for i in plan.which] == [label for label, _ in want]
    assert plan.counts.tolist() == [flat.count(target) for target in plan.targets]
    for tensor, name in zip(plan.on(DEVICE), ("positions", "labels", "which", "targets"), strict=True):
        assert tensor.tolist() == getattr(plan, name).tolist()


def test_labels_that_cannot_be_planned() -> None:
    with pytest.raises(UserError) as error:
        plan_tokens(torch.ones(3))
    assert error.value.code == "dtypes"
    for label in (-7, 9):
        with pytest.raises(UserError) as error:
            plan_tokens(torch.tensor([1, label, 2])).check(9)
        assert error.value.code == "label-range"
    plan_tokens(torch.tensor([IGNORE])).check(9)
    with pytest.raises(UserError) as error:
        fused_linear_loss(
            torch.zeros(4, 2), torch.zeros(9, 2), plan_tokens(torch.ones(3).long()), make("mle")
        )
    assert error.value.code == "shapes"


@pytest.mark.parametrize("cache_mb", [0.0, 0.02], ids=["exact", "cached"])
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "demd_dense"])
def test_the_loss_never_waits_for_the_device(name: str, cache_mb: float) -> None:
    """Forward and backward with planned labels; and once, to fetch them, with labels on the device."""
    torch.manual_seed(0)
    objective = make(name)
    hidden = torch.randn(90, 8, device=DEVICE, requires_grad=True)
    weight = torch.randn(200, 8, device=DEVICE, requires_grad=True)
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
