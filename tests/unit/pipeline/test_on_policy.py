"""Batches that the model writes itself: prompts, random numbers, texts and their rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from emo.common.causal_lm import IGNORE
from emo.pipeline.batches.on_policy import (
    NO_PROMPT,
    DocumentPrompt,
    OnPolicy,
    draw_uniforms,
    find_end_tokens,
    find_prompts,
    generate_texts,
    group_prompts,
    repack_rows,
    sample_tokens,
)
from emo.pipeline.engine.device.hardware import ACCELERATORS
from emo.pipeline.loss import fuse_model, get_objective, plan_tokens
from emo.pipeline.loss.models.frozen import SelfTeacher
from emo.pipeline.loss.models.head import BOUNDS, DEMONSTRATION, TEACHER_POSITIONS, segments
from emo.pipeline.model.objective.config import ObjectiveConfig
from emo.pipeline.planning import footprint
from emo.pipeline.planning.footprint import Setup
from tests.helpers.families import family
from tests.helpers.published import LLAMA_7B


def test_tokens_are_sampled_with_their_probabilities() -> None:
    logits = torch.tensor([2.0, -40.0, 0.5, 1.0, -torch.inf])
    count = 100_000
    numbers = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    for temperature in (1.0, 0.5):
        tokens = sample_tokens(logits.expand(count, -1), numbers, temperature)
        shares = torch.bincount(tokens, minlength=5) / count
        assert torch.allclose(shares, torch.softmax(logits / temperature, 0), atol=2e-5)
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert sample_tokens(logits.expand(2, -1), ends, 1.0).tolist() == [0, 3]


def test_random_numbers_depend_on_seed_step_and_slot() -> None:
    first, second = draw_uniforms(1, 7, [(3, 0), (3, 1)], 5), draw_uniforms(1, 7, [(3, 1)], 9)
    assert torch.equal(first[1:], second[:, :5]) and not torch.equal(first[0], first[1])
    for seed, step, row in ((2, 7, 3), (1, 8, 3), (1, 7, 4)):
        assert not torch.equal(draw_uniforms(seed, step, [(row, 1)], 5), first[1:])


def sample_naively(model: Any, prompt: np.ndarray, numbers: Tensor, end: int, block: int) -> list[int]:
    """Sample one text without a cache."""
    ids = prompt.tolist()
    for number in numbers.tolist()[: block - len(prompt)]:
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double() / 0.8
        token, probability = -1, 0.0
        while probability <= number:
            token += 1
            probability += float(torch.softmax(logits, 0)[token])
        ids.append(token)
        if token == end:
            break
    return ids[len(prompt) :]


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_texts_equal_those_of_a_naive_sampler(name: str) -> None:
    """Prompts have several lengths. One text ends at the model's context."""
    torch.manual_seed(0)
    model = family(name).double().eval()
    block = model.config.max_position_embeddings
    prompts = [np.arange(n) % model.config.vocab_size for n in (3, 1, 9, block - 4)]
    numbers = draw_uniforms(0, 0, [(row, 0) for row in range(4)], 24)
    endless = generate_texts(model, prompts, numbers, torch.full((4, 2), -1), 0.8, block)
    assert list(map(len, endless)) == [24, 24, 24, 4]
    stops = (-1, endless[1][6], endless[2][9], -1)
    ends = torch.tensor([[-1, stops[0]], [stops[1], -1], [-1, stops[2]], [-1, stops[3]]])
    texts = generate_texts(model, prompts, numbers, ends, 0.8, block)
    columns = zip(prompts, numbers, stops, strict=True)
    assert texts == [sample_naively(model, *column, block) for column in columns]
    assert len(texts[1]) <= 7 and texts[1][-1] == endless[1][6]


def test_texts_do_not_depend_on_groups() -> None:
    """Prompts are grouped by length. Each keeps its random numbers and its end tokens."""
    lengths = [9, 2, 30, 3, 1]
    assert group_prompts(lengths, 4, 32, 24) == [[4, 1, 3], [0], [2]]
    torch.manual_seed(0)
    model = family("llama").double().eval()
    student: Any = OnPolicy.__new__(OnPolicy)
    world = SimpleNamespace(device=torch.device("cpu"))
    student.trainer = SimpleNamespace(ds=model, world=world)
    student.settings = SimpleNamespace(tokens=12, temperature=1.0)
    student.seed, student.block, student.together, student.options = 0, 64, False, {}
    student.ends, student.special = [5], set(range(20, 40))
    none = np.zeros(0, np.int64)
    prompts = [DocumentPrompt(i // 2, np.arange(n), none, 20 + i) for i, n in enumerate(lengths)]
    results = [student._continue_prompts(prompts, 0, 1, room) for room in (1, 60, 10**6)]
    assert results[0] == results[1] == results[2] and all(results[0])
    assert student._continue_prompts([], 0, 1, 60) == []


@pytest.mark.parametrize(
    "objective",
    [
        {"name": "emo", "on_policy": {"share": 0.5}},
        {"name": "kl", "teacher": {"scores": "stored"}, "on_policy": {"share": 0.5}},
        {"name": "kl", "teacher": "base", "on_policy": {"share": 1.5}},
        {"name": "kl", "teacher": "base", "on_policy": {"share": 0.5, "tokens": 0}},
        {"name": "kl", "teacher": {"model": "x"}, "on_policy": {"share": 1, "context": "demonstration"}},
    ],
)
def test_settings_without_a_live_teacher_or_tokens_are_rejected(objective: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="on_policy"):
        ObjectiveConfig(**objective)


def test_the_plan_includes_the_time_of_writing() -> None:
    for stage in (2, 3):
        seconds = [
            footprint.step_time(LLAMA_7B, Setup(8, stage, 1, 2048, written=tokens), ACCELERATORS["A100-80G"])
            for tokens in (0, 64, 128)
        ]
        assert seconds[0].writing == 0 and seconds[2].writing == 2 * seconds[1].writing
        # a pass over 13.5 GB takes 7 ms at 2 TB/s, or 45 ms if gathered at 300 GB/s
        assert 128 * (0.007 if stage == 2 else 0.045) < seconds[2].total - seconds[0].total < 128 * 0.1


def test_the_plan_includes_the_cache_of_writing() -> None:
    """Keys and values of 32 layers take twice the memory of the layers' inputs, which checkpointing keeps."""
    pair = [Setup(8, 2, 4, 2048, checkpointing=True, written=tokens) for tokens in (0, 64)]
    without, activations = (footprint.memory(LLAMA_7B, setup).activations for setup in pair)
    cache = 2 * 4096 * 32 * 2 * pair[1].tokens
    assert max(cache, without) < activations < 1.3 * cache


def micro_batch() -> dict[str, Any]:
    """Return a row of an instruction, a text and padding, and one of a text and an unsupervised document."""
    ids = torch.arange(24).view(2, 12)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]])
    labels = torch.full((2, 12), IGNORE)
    labels[0, 2:4] = ids[0, 3:5]  # the first three tokens are the instruction
    labels[0, 5:8] = ids[0, 6:9]
    labels[1, 0:7] = ids[1, 1:8]
    bounds, _ = segments(positions)
    return {"input_ids": ids, "position_ids": positions, BOUNDS: bounds, "labels": plan_tokens(labels)}


def test_prompts_end_where_supervision_begins() -> None:
    prompts = find_prompts(micro_batch())
    assert [(p.row, p.ids.tolist()) for p in prompts] == [(0, [0, 1, 2]), (0, [5, 6]), (1, [12, 13, 14, 15])]
    assert [p.last for p in prompts] == [4, 8, 19]


def test_a_special_token_at_the_end_of_an_answer_ends_texts() -> None:
    """A truncated answer ends with an ordinary token, which does not end texts."""
    ids, labels = torch.arange(24).view(2, 12), torch.full((2, 12), IGNORE)
    labels[0, 1:4] = ids[0, 2:5]  # two answers, with the tokens 2 to 4 and 8 to 10
    labels[0, 7:10] = ids[0, 8:11]
    labels[1, 3:6] = ids[1, 4:7]
    bounds, _ = segments(torch.arange(12).repeat(2, 1))
    prompts = find_prompts({"input_ids": ids, BOUNDS: bounds, "labels": plan_tokens(labels)})
    assert [p.last for p in prompts] == [4, 18]
    assert find_end_tokens(prompts, [0], {4, 10}).tolist() == [[0, 4], [0, -1]]
    assert find_end_tokens(prompts, [], ()).tolist() == [[-1], [-1]]
    assert find_end_tokens([NO_PROMPT], [7, 9], ()).tolist() == [[7, 9, -1]]


def test_repacked_rows_leave_out_documents_that_do_not_fit() -> None:
    micro = micro_batch()
    result = repack_rows(micro, find_prompts(micro), [[90, 91, 92, 93, 94, 95], [96, 97], [98]])
    ids, positions = result["input_ids"].tolist(), result["position_ids"].tolist()
    assert ids == [[0, 1, 2, 90, 91, 92, 93, 94, 95, 0, 0, 0], [12, 13, 14, 15, 98, *[0] * 7]]
    assert positions == [[*range(9), 0, 1, 2], [*range(5), *range(7)]]
    assert result[BOUNDS].tolist() == [0, 9, 12, 17, 24]
    plan = result["labels"]
    assert dict(zip(plan.positions.tolist(), plan.labels.tolist(), strict=True)) == {
        **dict(zip(range(2, 8), range(90, 96), strict=True)),  # the second text did not fit
        15: 98,
    }


TEXTS = [[50, 51, 52], [53, 54], [55]]


def test_teachers_read_the_answer_before_the_text() -> None:
    """A document is prompt, answer, prompt and text. Tokens of the student and the teacher correspond."""
    micro = micro_batch()
    result = repack_rows(micro, find_prompts(micro), TEXTS, context=12)
    seen = result[DEMONSTRATION + "input_ids"]
    first = [0, 1, 2, 3, 4, 0, 1, 2, 50, 51, 52]
    assert seen.shape == (2, 24) and seen[0].tolist() == [*first, 5, 6, 7, 8, 5, 6, 53, 54, *[0] * 5]
    # an answer of four tokens is cut to the context
    assert seen[1, :12].tolist() == [12, 13, 14, 15, 16, 17, 18, 12, 13, 14, 15, 55]
    assert result[DEMONSTRATION + "position_ids"][0].tolist() == [*range(11), *range(8), *range(5)]
    assert result[DEMONSTRATION + BOUNDS].tolist() == [0, 11, 19, 24, 36, 48]
    plan = result["labels"]
    taught = result[TEACHER_POSITIONS].flatten()[plan.positions]
    assert seen.flatten()[taught + 1].tolist() == plan.labels.tolist()
    assert torch.equal(seen.flatten()[taught], result["input_ids"].flatten()[plan.positions])
    # in a context of nine tokens, an answer fits only into the second document
    assert repack_rows(micro, find_prompts(micro), TEXTS, context=9)["labels"].labels.tolist() == [53, 54]


def test_the_loss_with_demonstrations_equals_dense_autograd() -> None:
    torch.manual_seed(0)
    model = family("llama").double().eval()
    micro = micro_batch()
    prompts = find_prompts(micro)
    want = torch.zeros((), dtype=torch.float64)
    for prompt, text in zip(prompts, TEXTS, strict=True):
        document = [*prompt.ids.tolist(), *text]
        longer = torch.tensor([[*prompt.ids.tolist(), *prompt.answer.tolist(), *document]])
        tail = slice(-len(text) - 1, -1)
        p = model(longer).logits[0, tail].detach().log_softmax(-1)
        q = model(torch.tensor([document])).logits[0, tail].log_softmax(-1)
        want = want + torch.nn.functional.kl_div(p, q, log_target=True, reduction="sum")
    want.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    fuse_model(model, get_objective("reverse_kl"))
    model.teacher = SelfTeacher(model)
    loss = model(**repack_rows(micro, prompts, TEXTS, context=64)).loss
    loss.backward()
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-6, atol=1e-9)


def test_the_plan_includes_what_teachers_read() -> None:
    """Rows of twice the length double the teacher's forward pass, in this share of the steps."""
    teacher = {"teacher": LLAMA_7B, "copied": False}
    pair = [Setup(8, 2, 1, 2048, demonstrated=share, **teacher) for share in (0.0, 0.5)]
    less, more = (footprint.step_time(LLAMA_7B, setup, ACCELERATORS["A100-80G"]).teacher for setup in pair)
    assert more == pytest.approx(1.5 * less, rel=0.05)
    assert footprint.memory(LLAMA_7B, pair[1]).teacher == 2 * footprint.memory(LLAMA_7B, pair[0]).teacher
