"""What Trainer hands a fused model: packed and padded rows, smoothing, shards; all as without fusing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from emo.pipeline.hf import fuse_causal_lm
from tests.helpers.families import family, tiny_llama
from tests.helpers.loss_reference import relative_error
from tests.pipeline.test_hf import LENGTH, VOCAB, EmoTrainer, arguments, parameters

DOCUMENTS = (7, 3, 10, 1, 6)


def packed_rows() -> list[dict[str, list[int]]]:
    """Rows of several documents with restarting positions; no label crosses a border."""
    generator = torch.Generator().manual_seed(5)
    result = []
    for _ in range(6):
        documents = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in DOCUMENTS]
        row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
        for document in documents:
            row["input_ids"] += document
            row["labels"] += [-100, *document[1:]]
            row["position_ids"] += list(range(len(document)))
        result.append(row)
    return result


def padded(rows: list[dict[str, list[int]]], left: bool) -> list[dict[str, list[int]]]:
    """One document per row, with a padding mask."""
    longest, result = max(DOCUMENTS), []
    for row in rows:
        start = 0
        for n in DOCUMENTS:
            part = {k: row[k][start : start + n] for k in ("input_ids", "labels")}
            start += n
            pads = {"input_ids": 0, "labels": -100, "attention_mask": 0}
            part["attention_mask"] = [1] * n
            for key, value in part.items():
                fill = [pads[key]] * (longest - n)
                part[key] = fill + value if left else value + fill
            result.append(part)
    return result


def trained(model: Any, data: list[dict[str, list[int]]], directory: Path, batch: int) -> Tensor:
    """Weights after one large step over all of `data` with the fused MLE."""
    settings = {"max_steps": 1, "per_device_train_batch_size": batch, "optim": "sgd", "learning_rate": 0.1}
    EmoTrainer(model, arguments(directory, **settings), train_dataset=data, objective="mle").train()
    return parameters(model)


@pytest.mark.parametrize("name", ["llama", "opt", "gpt2"])
def test_trainer_passes_masks_and_positions(name: str, tmp_path: Path) -> None:
    """Packed and padded rows take the step that the same documents take alone, without our loss.

    The Trainer drops columns that it does not find in the signature of the model's forward.
    """
    start = parameters(family(name))
    plain = family(name)
    losses = []
    for row in packed_rows():
        parts = torch.tensor(row["input_ids"]).split(DOCUMENTS)
        for part in (part for part in parts if len(part) > 1):
            logits = plain(input_ids=part[None]).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum"))
    tokens = 6 * sum(n - 1 for n in DOCUMENTS)
    (torch.stack(losses).sum() / tokens).backward()
    steps = [torch.zeros_like(p) if p.grad is None else -0.1 * p.grad for p in plain.parameters()]
    want = torch.cat([step.detach().flatten() for step in steps])
    gpt2 = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    dropless = gpt2 if name == "gpt2" else {"attention_dropout": 0.0}
    dropless |= {"dropout": 0.0} if name == "opt" else {}
    packed = trained(family(name, **dropless), packed_rows(), tmp_path, 6) - start
    assert relative_error(packed, want) <= 1e-3
    for left in (False, True):
        if left and name == "gpt2":
            continue  # its positions count padding on the left, with or without our loss
        alone = padded(packed_rows(), left)
        got = trained(family(name, **dropless), alone, tmp_path, len(alone)) - start
        assert relative_error(got, want) <= 1e-3, left


@pytest.fixture
def lone_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("fused_first", [False, True])
def test_after_and_before_fully_shard(fused_first: bool, lone_rank: None) -> None:
    """FSDP2 makes DTensors of the weights; the loss is the same, whichever comes first."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    model, plain = tiny_llama(VOCAB), tiny_llama(VOCAB)
    if fused_first:
        fuse_causal_lm(model, "emo")
    fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not fused_first:
        fuse_causal_lm(model, "emo")
    fuse_causal_lm(plain, "emo")
    ids = torch.randint(VOCAB, (2, LENGTH))
    losses = [m(input_ids=ids, labels=ids).loss for m in (model, plain)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1])
    got, want = model.lm_head.weight.grad.full_tensor(), plain.lm_head.weight.grad
    torch.testing.assert_close(got, want)
