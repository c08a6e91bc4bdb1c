"""Cost embeddings: where they come from, the cache of cost rows, and the live head."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from common.errors import UserError
from pipeline.loss.cost import LIVE, CostEmbedding
from pipeline.loss.cost_cache import WINDOW_CPU
from pipeline.loss.cost_source import load_cost
from pipeline.loss.fused import fused_linear_loss
from tests.helpers.loss_reference import cost_matrix, reference, relative_error, unit_rows
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
    """Gradients within 2e-3 of the exact path, and the same whatever was seen before."""
    torch.manual_seed(0)
    h, w = torch.randn(300, H).requires_grad_(), torch.randn(vocab, H).requires_grad_()
    E = torch.randn(vocab, 2 * H)
    megabytes = (rows + min(vocab, WINDOW_CPU)) * vocab * 2 / 2**20 + 1e-4
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
    """A full table gives its least frequent place to a target that has overtaken it."""
    cost = CostEmbedding.from_weight(torch.randn(V, H), cache_mb=(WINDOW_CPU + 10) * V * 2 / 2**20 + 1e-4)
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


def test_negative_cache() -> None:
    with pytest.raises(UserError, match="must not be negative"):
        CostEmbedding(torch.ones(2, 2), cache_mb=-1)


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


def test_half_precision_models_use_half_precision_costs() -> None:
    cost = CostEmbedding.from_weight(torch.randn(50, 8))
    placed = cost.placed(torch.device("cpu"), torch.bfloat16)
    assert placed.rows.dtype == torch.bfloat16
    assert cost.placed(torch.device("cpu"), torch.bfloat16) is placed
    assert cost.placed(torch.device("cpu"), torch.float32) is cost


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


def test_refuses_what_is_no_cost_embedding(tmp_path: Path) -> None:
    E = torch.randn(12, 5)
    save_file({"a": E, "b": E.clone()}, tmp_path / "two.safetensors")
    torch.save({"a": E, "b": E}, tmp_path / "two.pt")
    torch.save(E, tmp_path / "one.pt")
    tiny_model("gpt2", True).config.save_pretrained(tmp_path / "empty")
    for source, message in (
        ("absent.pt", "does not exist"),
        ("two.safetensors", r"exactly one matrix \[V, H\] \(it holds 2\)"),
        ("two.pt", "exactly one matrix"),
        ("one.pt", "12 rows but the model's vocabulary has 13"),
        ("nowhere", "not a causal LM.s directory or hub id"),
        ("empty", "holds none of the head's tensors"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            load_cost(str(tmp_path / source), 13)
        assert "\n" not in str(caught.value)
