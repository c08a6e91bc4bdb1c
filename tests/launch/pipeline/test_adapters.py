"""LoRA runs that start from an adapter, and exports with adapters."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from emo.common.errors import UserError
from emo.eval.models.base import Item
from emo.eval.models.model import EvaluatedModel
from emo.pipeline.checkpoint.export import export_checkpoint
from emo.pipeline.control.run_dir import read_best, read_metrics
from emo.pipeline.model.adapters import add_lora, check_adapter, load_adapter
from emo.pipeline.model.config import ModelConfig
from emo.pipeline.model.nf4 import nf4_options, prepare_nf4
from tests.helpers.launching import kill_ranks, losses, run_alone, run_ranks, tiny_recipe
from tests.helpers.refusals import refused

LORA = ("model.architecture=null", "model.lora.r=4", "model.lora.use_rslora=true", "model.lora.dropout=0")
MEASURED = ("train.learning_rate=0.01", "train.eval_steps=2", "train.eval_rows=7")  # two ranks get 4 and 3
BOTH = ("model.lora.export=both", "deepspeed=ds_configs/zero3.json", *MEASURED)
KL = "validation_kl_from_base"
PROBE = torch.arange(16)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a recipe and a trained model to adapt."""
    folder = tmp_path_factory.mktemp("base")
    recipe = tiny_recipe(folder, save_steps=4, max_steps=6)
    done = run_alone(str(recipe), "train.max_steps=2")
    assert not done.returncode, done.stdout
    shutil.move(folder / "run/export", folder / "base")
    return recipe, folder / "base"


def train(base: tuple[Path, Path], run_dir: Path, *settings: str, ranks: int = 2) -> tuple[str, ...]:
    options = (str(base[0]), f"output_dir={run_dir}", f"model.path={base[1]}", *LORA, *settings)
    done = run_ranks("launch/continual.sh", *options, ranks=ranks)
    assert not done.returncode, done.stdout
    return options


@contextlib.contextmanager
def changed(weights: Path, name: str) -> Iterator[None]:
    """Change a tensor of a file within the block."""
    content, tensors = weights.read_bytes(), load_file(weights)
    save_file(tensors | {name: tensors[name] + 1e-4}, weights, {"format": "pt"})
    try:
        yield
    finally:
        weights.write_bytes(content)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=PROBE).logits  # type: ignore[no-any-return]


def read_kl(run_dir: Path) -> list[float]:
    return [record[KL] for record in read_metrics(run_dir) if KL in record]


@pytest.fixture(scope="module")
def adapted(base: tuple[Path, Path]) -> Path:
    """Return the export of a run that writes the adapter and the merged model."""
    run_dir = base[1].parent / "both"
    train(base, run_dir, *BOTH)
    return run_dir / "export"


def test_base_and_exported_adapter_equal_the_merged_model(
    base: tuple[Path, Path], adapted: Path, tmp_path: Path
) -> None:
    """One rank under ZeRO-1 and two under ZeRO-3 measure the same KL from the base."""
    run_dir = tmp_path / "adapter"
    settings = ("model.lora.export=adapter", "deepspeed=ds_configs/zero1.json", *MEASURED)
    train(base, run_dir, *settings, ranks=1)
    assert len(read_kl(run_dir)) == 4 and read_kl(adapted.parent) == pytest.approx(read_kl(run_dir), rel=1e-4)
    export_checkpoint(run_dir, tmp_path / "exported")
    merged = logits(AutoModelForCausalLM.from_pretrained(adapted))
    for adapter in (adapted / "adapter", run_dir / "export", tmp_path / "exported"):
        assert not (adapter / "config.json").exists() and not list(adapter.glob("model*.safetensors"))
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base[1]), adapter)
        assert torch.allclose(logits(model), merged, atol=1e-5)
        assert torch.allclose(logits(EvaluatedModel(str(adapter)).model), merged, atol=1e-5)
        assert AutoTokenizer.from_pretrained(adapter).encode("a fish")
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(base[1])), merged, atol=1e-3)


def read_files(directory: Path) -> dict[Path, bytes]:
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*.*")}


def test_a_checkpoint_is_exported_and_resumed_only_with_its_base(
    base: tuple[Path, Path], adapted: Path, tmp_path: Path
) -> None:
    """Checkpoints hold a digest of the frozen weights instead of the weights, on any number of ranks."""
    run_dir = shutil.copytree(adapted.parent, tmp_path / "run")
    export_checkpoint(run_dir, tmp_path / "exported")
    assert read_files(tmp_path / "exported") == read_files(adapted)
    for directory in ("step-000006", "export"):
        shutil.rmtree(run_dir / directory)
    with changed(base[1] / "model.safetensors", "model.layers.0.mlp.up_proj.weight"), refused("changed-base"):
        export_checkpoint(run_dir, tmp_path / "other")
    done = run_alone(str(base[0]), f"output_dir={run_dir}", f"model.path={base[1]}", *LORA, *BOTH)
    assert not done.returncode and "resumed from" in done.stdout, done.stdout
    assert np.array(losses(run_dir)) == pytest.approx(np.array(losses(adapted.parent)), rel=1e-4)


def test_a_run_continues_an_adapter_and_resumes(
    base: tuple[Path, Path], adapted: Path, tmp_path: Path
) -> None:
    settings = (f"model.lora.path={adapted / 'adapter'}", "deepspeed=ds_configs/zero3.json")
    options = train(base, tmp_path / "undisturbed", *settings)
    killed = (options[0], f"output_dir={tmp_path / 'killed'}", *options[2:])
    kill_ranks(tmp_path / "killed", 5, "launch/continual.sh", *killed)
    train(base, tmp_path / "killed", *settings)
    assert losses(tmp_path / "killed") == losses(tmp_path / "undisturbed")
    expected, weights = (
        load_file(tmp_path / name / "export/model.safetensors") for name in ("undisturbed", "killed")
    )
    assert all(weights[name].equal(tensor) for name, tensor in expected.items())
    # The first loss equals the first loss of a run that starts from the merged weights.
    merged = [str(base[0]), f"output_dir={tmp_path / 'merged'}", f"model.path={adapted}", "train.max_steps=1"]
    done = run_alone(*merged, *LORA)
    assert not done.returncode, done.stdout
    (_, continued, _), (_, restarted, _) = losses(tmp_path / "undisturbed")[0], losses(tmp_path / "merged")[0]
    assert continued == pytest.approx(restarted, abs=1e-5)


def test_the_best_adapter_is_exported(base: tuple[Path, Path], tmp_path: Path) -> None:
    """Only the first rank loads the base to export it. As the loss rises, the first checkpoint is best."""
    settings = ["train.eval_steps=2", "train.save_steps=2", "train.keep_best=nll"]
    settings += ["train.load_best_at_end=true", "objective.sum=[{name: mle, weight: -1}]"]
    train(base, tmp_path, *settings, "deepspeed=ds_configs/zero3.json")
    best = read_best(tmp_path)
    assert best is not None and best.step == 2
    assert json.loads((tmp_path / "export/export.json").read_text())["step"] == 2


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_train_next_to_adapters(base: tuple[Path, Path], tmp_path: Path, tied: bool) -> None:
    start = shutil.copytree(base[1], tmp_path / "base")
    before = AutoModelForCausalLM.from_pretrained(start)
    before.config.tie_word_embeddings = tied
    before.tie_weights()
    before.save_pretrained(start)
    settings = (f"model.path={start}", "model.lora.train_embeddings=true", "model.lora.export=both")
    settings += ("train.only=embeddings", "train.only_steps=2", "deepspeed=ds_configs/zero3.json")
    options = train(base, tmp_path / "undisturbed", *settings)
    done = run_alone(options[0], f"output_dir={tmp_path / 'alone'}", *options[2:])
    assert not done.returncode, done.stdout
    np.testing.assert_allclose(losses(tmp_path / "alone"), losses(tmp_path / "undisturbed"), rtol=1e-4)
    export = tmp_path / "undisturbed/export"
    expected = load_file(export / "model.safetensors")
    assert ("lm_head.weight" in expected) is not tied
    if not tied:
        killed = (options[0], f"output_dir={tmp_path / 'killed'}", *options[2:])
        kill_ranks(tmp_path / "killed", 5, "launch/continual.sh", *killed)
        train(base, tmp_path / "killed", *settings)
        assert losses(tmp_path / "killed") == losses(tmp_path / "undisturbed")
        weights = load_file(tmp_path / "killed/export/model.safetensors")
        assert all(weights[name].equal(tensor) for name, tensor in expected.items())
    export_checkpoint(tmp_path / "undisturbed/step-000006", tmp_path / "exported")
    merged = AutoModelForCausalLM.from_pretrained(export)
    for name in ("get_input_embeddings", "get_output_embeddings"):
        assert not getattr(merged, name)().weight.equal(getattr(before, name)().weight)
    item = Item(PROBE[0].numpy(), [np.arange(5)])
    (score,) = EvaluatedModel(str(export)).score([item])
    for adapter in (export / "adapter", tmp_path / "exported/adapter"):
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(start), adapter)
        assert torch.allclose(logits(model), logits(merged), atol=1e-5)
        (other,) = EvaluatedModel(str(adapter)).score([item])
        assert other.tails == pytest.approx(score.tails, abs=1e-4)
    lora = {"r": 4, "use_rslora": True, "train_embeddings": True, "path": str(export / "adapter")}
    config = ModelConfig.model_validate({"path": str(start), "lora": lora})
    continued = add_lora(AutoModelForCausalLM.from_pretrained(start), config, 0)
    check_adapter(continued, config.lora)
    load_adapter(continued, lora["path"])
    assert torch.allclose(logits(continued), logits(merged), atol=1e-5)
    without = config.lora.model_copy(update={"train_embeddings": False})
    with pytest.raises(UserError, match="train_embeddings"):
        check_adapter(add_lora(before, config.model_copy(update={"lora": without}), 0), without)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_adapters_on_4bit_weights_resume_and_export(base: tuple[Path, Path], tmp_path: Path) -> None:
    settings = ("model.lora.base_dtype=nf4", "model.lora.use_dora=true", "model.lora.export=both")
    settings += ("train.optimizer=adamw_8bit", "deepspeed=ds_configs/zero2.json")
    options = train(base, tmp_path / "undisturbed", *settings)
    killed = (options[0], f"output_dir={tmp_path / 'killed'}", *options[2:])
    kill_ranks(tmp_path / "killed", 5, "launch/continual.sh", *killed)
    train(base, tmp_path / "killed", *settings)
    assert losses(tmp_path / "killed") == losses(tmp_path / "undisturbed")
    export = tmp_path / "undisturbed/export"
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        expected, weights = load_file(export / name), load_file(tmp_path / "killed/export" / name)
        assert all(weights[key].equal(tensor) for key, tensor in expected.items())
    first, *_, last = read_kl(tmp_path / "undisturbed")
    assert first == 0 < last
    # The merged model equals the 4-bit model with its adapter in full precision.
    quantized = AutoModelForCausalLM.from_pretrained(base[1], **nf4_options("nf4", torch.float32))
    prepare_nf4(quantized)
    without = logits(quantized)
    merged = logits(AutoModelForCausalLM.from_pretrained(export))
    assert torch.allclose(logits(PeftModel.from_pretrained(quantized, export / "adapter")), merged, atol=1e-5)
    assert not torch.allclose(without, merged, atol=1e-4)
    export_checkpoint(tmp_path / "undisturbed/step-000004", tmp_path / "exported")
    assert logits(AutoModelForCausalLM.from_pretrained(tmp_path / "exported")).shape == merged.shape
    stored = "model.layers.0.mlp.down_proj.weight"  # in 4 bits
    with changed(base[1] / "model.safetensors", stored), refused("changed-base"):
        export_checkpoint(tmp_path / "undisturbed/step-000004", tmp_path / "again")


def test_an_adapter_with_other_settings_is_rejected(
    base: tuple[Path, Path], adapted: Path, tmp_path: Path
) -> None:
    start = f"model.lora.path={adapted / 'adapter'}"
    other = shutil.copytree(adapted / "adapter", tmp_path / "other")
    settings = json.loads((other / "adapter_config.json").read_text()) | {"alpha_pattern": {"q_proj": 1}}
    (other / "adapter_config.json").write_text(json.dumps(settings))
    common = (str(base[0]), f"output_dir={tmp_path / 'new'}", *LORA)
    model = f"model.path={base[1]}"
    for settings, problem in (
        ((start, model, "model.lora.r=8"), "has r=4"),
        ((start, model, "model.lora.alpha=3"), "has alpha=8"),
        ((start, model, "model.lora.use_dora=true"), "has use_dora=False"),
        ((start, model, "model.lora.targets=[q_proj]"), "model.lora.targets"),
        ((f"model.lora.path={tmp_path}", model), "adapter_config.json"),
        ((f"model.lora.path={other}", model), "alpha_pattern"),
        ((start, model, "objective={name: kl, teacher: base}"), "without the adapter"),
        ((f"model.path={adapted / 'adapter'}",), f"model.path={base[1]} and model.lora.path="),
    ):
        done = run_alone(*common, *settings)
        assert done.returncode == 2 and problem in done.stdout, done.stdout
