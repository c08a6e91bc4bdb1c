"""A teacher in the fused loss of a model, and in the plan."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from emo.pipeline.engine.device import hardware
from emo.pipeline.loss.models.hf import fuse_causal_lm
from emo.pipeline.planning import footprint
from tests.helpers.families import family
from tests.helpers.refusals import refused


def test_fuse_causal_lm_equals_dense_logits_with_a_teacher() -> None:
    """The fused loss and gradient equal dense KL, and the teacher's weights get no gradients."""
    torch.manual_seed(0)
    student, teacher = family("llama"), family("gpt2")
    entries = min(m.config.vocab_size for m in (student, teacher))
    student.resize_token_embeddings(entries)
    ids = torch.randint(entries, (2, 12))
    with refused("teacher-training"):
        fuse_causal_lm(student, "kl", teacher=teacher.train())
    with refused("teacher-gradients"):
        fuse_causal_lm(student, "kl", teacher=teacher.eval())
    with refused("needs-teacher"):
        fuse_causal_lm(student, "kl")
    with refused("no-adapters"):
        fuse_causal_lm(student, "kl", teacher="base")
    teacher.requires_grad_(False)
    p = teacher(ids).logits[:, :-1, :entries].log_softmax(-1)
    q = student(ids).logits[:, :-1].log_softmax(-1)
    want = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean()
    want.backward()
    head = student.get_output_embeddings().weight
    gradient, head.grad = head.grad.clone(), None
    student.zero_grad()
    fuse_causal_lm(student, "kl", teacher=teacher)
    loss = student(ids, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
    torch.testing.assert_close(head.grad, gradient, rtol=1e-3, atol=1e-7)
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert not any("teacher" in name for name in student.state_dict())


def test_the_plan_includes_a_teacher() -> None:
    """The plan adds the teacher's weights, copied or partitioned, and a third of the time for its forward."""
    sizes = footprint.Sizes(
        6_738_415_616, 6_738_415_616, 6_476_267_520, 32, 4096, 11008, 4096, True, 32000, 291
    )
    gpu, plain = hardware.ACCELERATORS["A100-80G"], footprint.Setup(8, 2, 2, 2048)
    with_teacher = dataclasses.replace(plain, teacher=sizes)
    memory = {
        (stage, copied): footprint.memory(
            sizes, dataclasses.replace(with_teacher, stage=stage, copied=copied)
        ).teacher
        for stage in (2, 3)
        for copied in (True, False)
    }
    assert footprint.memory(sizes, plain).teacher == 0
    assert memory[2, True] - memory[2, False] == 2 * sizes.parameters
    assert memory[3, True] - memory[3, False] < 2 * sizes.parameters / 2
    times = [footprint.step_time(sizes, setup, gpu) for setup in (plain, with_teacher)]
    trained = times[0].matrices + times[0].attention + times[0].elementwise + times[0].head
    assert times[0].teacher == 0 and times[1].teacher == pytest.approx(trained / 3, rel=0.05)
    for stage, share in ((2, 1), (3, 2)):  # the average is float32, and adapters also need a copy
        averaged = dataclasses.replace(with_teacher, stage=stage, ranks=2, averaged=True)
        for copied, width in ((True, 4), (False, 6)):
            pair = [dataclasses.replace(averaged, copied=copied, averaged=on) for on in (True, False)]
            more, less = (footprint.memory(sizes, setup).teacher for setup in pair)
            assert more - less == pytest.approx(width * sizes.trainable / share)
    slow = dataclasses.replace(with_teacher, stage=3, ranks=64)
    assert footprint.step_time(sizes, slow, gpu, network_gb=1.0).teacher > 2 * times[1].teacher
