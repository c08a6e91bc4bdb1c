"""TRL's SFTTrainer with the fused loss against a naive computation, examples, and the README's snippet.

`make trl-test` also runs these tests with the oldest TRL that pyproject.toml allows.
"""

from __future__ import annotations

import copy
import json
import re
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from emo.data_prep.encoding.tokenizer import load_tokenizer
from emo.pipeline.loss import Ramp, get_objective, weighted_sum
from emo.pipeline.loss.models.hf import FusedLossMixin
from tests.conftest import REPO
from tests.helpers.corpus import texts, tiny_tokenizer
from tests.helpers.families import VOCAB, family, tiny_llama
from tests.helpers.loss_reference import relative_error
from tests.helpers.refusals import refused
from tests.unit.pipeline.test_hf import Documents, arguments, assert_close, naive, stepped

EOS = VOCAB - 1
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }} <eos> {% endgeneration %}"
    "{% else %}{{ m.content }} {% endif %}{% endfor %}"
)


@cache
def fused_trainer() -> Any:
    """Return TRL's trainer with the fused loss. TRL reads it late, because it imports much."""

    class FusedSFTTrainer(FusedLossMixin, trl.SFTTrainer):
        pass

    return FusedSFTTrainer


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words, in which w1 has the id 1, and so on."""
    words = ["<pad>", *(f"w{i}" for i in range(1, VOCAB - 3)), "user", "assistant", "<eos>"]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
    whole = Tokenizer(model)
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    return fast


def words(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def parts() -> list[tuple[list[int], list[int]]]:
    """Return six pairs of a prompt and a completion, of different lengths."""
    generator = torch.Generator().manual_seed(2)
    lengths = [(2, 3), (4, 1), (3, 6), (1, 2), (5, 5), (2, 8)]
    drawn = [torch.randint(1, VOCAB - 3, (p + c,), generator=generator).tolist() for p, c in lengths]
    return [(ids[:p], ids[p:]) for ids, (p, _) in zip(drawn, lengths, strict=True)]


def documents(learn_prompts: bool) -> Documents:
    """Return the tokens and labels of each prompt with its completion."""
    return [(p + c + [EOS], (p if learn_prompts else [-100] * len(p)) + c + [EOS]) for p, c in parts()]


def prompted() -> list[dict[str, Any]]:
    return [{"prompt": words(p), "completion": " " + words(c)} for p, c in parts()]


def conversations() -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [
        {"messages": [{"role": r, "content": words(ids)} for r, ids in zip(roles, pair, strict=True)]}
        for pair in parts()
    ]


def answers() -> Documents:
    """Return the tokens of each conversation, with labels for those of the assistant only."""
    questions = [[VOCAB - 3, *p, VOCAB - 2] for p, _ in parts()]
    replies = [[*c, EOS] for _, c in parts()]
    return [(q + r, [-100] * len(q) + r) for q, r in zip(questions, replies, strict=True)]


def plain_rows() -> list[dict[str, Any]]:
    return [{"text": words(p + c) + " "} for p, c in parts()]


def settings(directory: Path, **changes: Any) -> trl.SFTConfig:
    return arguments(directory, trl.SFTConfig, **{"bf16": False} | changes)


def trainer_of(model: Any, args: trl.SFTConfig, rows: list[dict[str, Any]], **options: Any) -> Any:
    data = Dataset.from_list(rows)
    return fused_trainer()(model, args, train_dataset=data, processing_class=tokenizer(), **options)


ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
CASES: dict[str, tuple[list[dict[str, Any]], Documents, dict[str, Any]]] = {
    "smoothed text": (plain_rows(), documents(True), {"label_smoothing_factor": 0.2}),
    "accumulated completions": (prompted(), documents(False), ACCUMULATED),
    "packed completions": (prompted(), documents(False), {"packing": True, "max_length": 16}),
    "without padding": (prompted(), documents(False), {"padding_free": True, "max_length": None}),
    "answers": (conversations(), answers(), {"assistant_only_loss": True}),
    "in bfloat16 and chunks": (plain_rows(), documents(True), {"bf16": True, "loss_type": "chunked_nll"}),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_autograd(case: str, tmp_path: Path) -> None:
    """Predictions and divisor agree, and packed documents do not see each other."""
    rows, tokens, changes = CASES[case]
    model = tiny_llama(VOCAB)
    smoothing = changes.get("label_smoothing_factor", 0.0)
    head = model.lm_head.weight.detach()
    want, gradients = naive(copy.deepcopy(model), tokens, "emo", head, label_smoothing=smoothing)
    trainer = trainer_of(model, settings(tmp_path, **changes), rows, objective="emo")
    loss, got = stepped(trainer, model)
    bound = 2e-2 if "bf16" in changes else 1e-4
    assert loss == pytest.approx(want, rel=bound / 5)
    for name, gradient in gradients.items():
        assert relative_error(got[name], gradient) <= 2 * bound, name
    assert trainer.state.log_history[0]["num_tokens"] == sum(len(ids) for ids, _ in tokens)


ADAPTERS = {
    "lora": peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
    "prompt": peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters(kind: str, tmp_path: Path) -> None:
    """The adapter has the gradients of the wrapped model's logits, and no other weight changes.

    TRL wraps one of the models, and PEFT the other.
    """
    base = tiny_llama(VOCAB)
    head = base.lm_head.weight.detach().clone()
    torch.manual_seed(0)
    if kind == "lora":
        trainer = trainer_of(base, settings(tmp_path), prompted(), peft_config=ADAPTERS[kind])
    else:
        trainer = trainer_of(peft.get_peft_model(base, ADAPTERS[kind]), settings(tmp_path), prompted())
    model, virtual = trainer.model, 3 if kind == "prompt" else 0
    want, gradients = naive(copy.deepcopy(model), documents(False), "emo", head, virtual)
    loss, got = stepped(trainer, model)
    assert loss == pytest.approx(want, rel=1e-5)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == set(gradients)
    assert_close(got, gradients, 1e-4)
    assert not any(float(got[name].abs().max()) for name in set(got) - trained)
    if kind == "prompt":
        packed = trainer_of(model, settings(tmp_path, packing=True, max_length=16), prompted())
        with refused("prompt-packed"):
            packed.train()


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two-losses": ({"loss_type": "dft"}, {}),
    "two-smoothings": ({"label_smoothing_factor": 0.1}, {"loss_options": {"label_smoothing": 0.2}}),
    "needs-logits": ({}, {"compute_metrics": lambda _: {}}),
    "needs-teacher": ({}, {"objective": "demd_dense"}),
    "router-loss": ({}, {}),
}


@pytest.mark.parametrize("code", REFUSED)
def test_unsupported_settings_raise_at_the_start(code: str, tmp_path: Path) -> None:
    changes, options = REFUSED[code]
    model = family("mixtral", output_router_logits=True) if code == "router-loss" else tiny_llama(VOCAB)
    with refused(code):
        trainer_of(model, settings(tmp_path, **changes), plain_rows(), **options)


@pytest.mark.filterwarnings("ignore")
def test_a_schedule_follows_the_steps(tmp_path: Path) -> None:
    parts = [(get_objective("emo2"), Ramp(1.0, 0.0, 2)), (get_objective("mle"), Ramp(0.0, 1.0, 2))]
    logged = {}
    for name, objective in {"sum": weighted_sum(parts), "mle": "mle", "emo2": "emo2"}.items():
        args = settings(tmp_path, learning_rate=0.0, max_steps=3)
        trainer = trainer_of(tiny_llama(VOCAB), args, plain_rows(), objective=objective)
        trainer.train()
        logged[name] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    for step, share in enumerate((0.0, 0.5, 1.0)):
        want = (1 - share) * logged["emo2"][step] + share * logged["mle"][step]
        assert logged["sum"][step] == pytest.approx(want, rel=1e-5)


OWN = "examples/my_objective.py:unsure"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a model with its tokenizer and data, and make the repository the working directory."""
    tiny_llama(400).save_pretrained(tmp_path / "model")
    load_tokenizer(str(tiny_tokenizer())).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join(texts(400)), encoding="utf-8")
    rows = ({"prompt": f"Say {i}.", "completion": text} for i, text in enumerate(texts(20)))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    monkeypatch.chdir(REPO)
    return tmp_path


def test_the_example_with_a_teacher(folder: Path) -> None:
    example = runpy.run_path(str(REPO / "examples/distil.py"))["main"]
    models = [str(folder / "model")] * 2
    losses = example(*models, str(folder / "text.txt"), "jsd", str(folder / "out"))
    assert len(losses) == 5 and losses[0] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("name", ["plain_loop", "trainer", "sft_trainer"])
def test_examples(folder: Path, name: str) -> None:
    texts = "rows.jsonl" if name == "sft_trainer" else "text.txt"
    out = [] if name == "plain_loop" else [str(folder / "out")]
    example = runpy.run_path(str(REPO / "examples" / f"{name}.py"))["main"]
    losses = example(str(folder / "model"), str(folder / texts), OWN, *out)
    assert len(losses) == 5 and all(0 < loss < 20 for loss in losses)


def test_the_snippet_of_the_readme(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippet runs as printed, also without a GPU. Only its model is replaced."""
    text = (REPO / "README.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    hub = "openai-community/gpt2"
    assert hub in snippet
    family("gpt2", vocab_size=400, n_positions=256).save_pretrained(folder / "model")
    (folder / "text.txt").rename(folder / "notes.txt")
    monkeypatch.chdir(folder)
    exec(snippet.replace(hub, str(folder / "model")), {"__name__": "snippet"})
