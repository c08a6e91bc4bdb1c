"""`emo plan`: recipes, predictions against published runs, and the search for the best settings."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, T5Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from emo.common.errors import ExitCode, FailureError, UserError
from emo.data_prep.config import load_data_config
from emo.pipeline.batches.config import Batch
from emo.pipeline.batches.order import MixedOrder
from emo.pipeline.cli import main
from emo.pipeline.config import RunConfig, load_config
from emo.pipeline.engine.device.hardware import ACCELERATORS, GIB, USABLE, Cluster, accelerator, parse_cluster
from emo.pipeline.model.adapters import add_lora
from emo.pipeline.model.build import load_pretrained
from emo.pipeline.model.config import LoraConfig, ModelConfig
from emo.pipeline.model.objective.build import training_objective
from emo.pipeline.planning import describe, footprint
from emo.pipeline.planning.alternatives import Alternatives, describe_fit
from emo.pipeline.planning.best import Choice, choices, print_best
from emo.pipeline.planning.checks import check_plan
from emo.pipeline.planning.describe import collect_warnings, domain_rows
from emo.pipeline.planning.footprint import Setup
from emo.pipeline.planning.plan import print_plan
from emo.pipeline.planning.setup import disk_bytes, setup_of, sizes_of
from tests.conftest import REPO
from tests.helpers import corpus, published
from tests.helpers.families import family
from tests.helpers.refusals import refused
from tests.unit.common.test_shipped_recipes import ALONE
from tests.unit.common.test_shipped_recipes import RECIPES as SHIPPED

RECIPES = REPO / "launch/recipes"
PAPER = RECIPES / "paper"
LLAMA, QUICKSTART = PAPER / "llama-7b-wikitext103.yaml", RECIPES / "quickstart-pretrain.yaml"
EIGHT = ["--gpus", "8xA100-80G"]
LLAMA_7B, A100 = published.LLAMA_7B, ACCELERATORS["A100-80G"]
RUNS = published.runs()
# test_shipped_recipes.py plans recipes that have their own commands. stories260k needs weights.
OTHERS = [p for p in SHIPPED if p not in ALONE and "stories260k" not in p.stem]


@pytest.fixture(autouse=True)
def wide_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def prepared_recipe(directory: Path, *overrides: str) -> list[str]:
    """Prepare data for the quickstart recipe, and return the overrides that use them."""
    settings = [f"output_dir={directory}/run", f"data.dir={directory}/data", "data.train_tokenizer=384"]
    settings += ["data.validation_fraction=0", "train.num_train_epochs=null", *overrides]
    corpus.run(load_data_config(QUICKSTART, settings))
    return settings


def every_choice(config: RunConfig, gpus: str) -> list[Choice]:
    cluster = parse_cluster(gpus)
    ready = check_plan(config, cluster.gpus)
    return list(choices(config, sizes_of(ready.model, ready.hf_config), ready.objective, cluster))


def alternatives(overrides: list[str], gpus: str) -> Alternatives:
    config, cluster = load_config(LLAMA, ["output_dir=runs/unstarted", *overrides]), parse_cluster(gpus)
    ready = check_plan(config, cluster.gpus, gpus=True)
    sizes = sizes_of(ready.model, ready.hf_config, config.model.linear_dtype)
    setup = setup_of(config, ready.batch, ready.ds_config, ready.objective, attention=ready.attention)
    return Alternatives(config, ready, sizes, setup, cluster)


def cells(printed: str) -> dict[str, list[str]]:
    """Return the cells of the printed table by the name of their row."""
    lines = [line.strip("│").split("│") for line in printed.splitlines() if line.startswith("│")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in lines}


@pytest.mark.parametrize("path", OTHERS, ids=lambda p: p.stem)
def test_every_recipe_plans(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(path, [f"output_dir={tmp_path / 'run'}"])  # the recipe's directory may contain a run
    if config.model.architecture is None:  # it continues an export of `make quickstart`
        config = config.model_copy(update={"model": load_config(QUICKSTART, []).model})
    print_plan(config, ranks=4)
    printed = capsys.readouterr().out
    assert "rows per step" in printed and "states per rank" in printed


def test_published_parameter_counts() -> None:
    # LoRA: r (in + out) for q, k, v, o of 4096 x 4096 and gate, up, down of 4096 x 11008, in 32 layers
    lora = 32 * 32 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    for name, parameters, trainable in (
        ("llama-13b-wikitext103", 13_015_864_320, 13_015_864_320),
        ("gpt2-wikitext2", 124_439_808, 124_439_808),
        ("llama-7b-wikitext103-lora", 6_738_415_616 + lora, lora),
    ):
        ready = check_plan(load_config(PAPER / f"{name}.yaml", []), 1)
        sizes = sizes_of(ready.model, ready.hf_config)
        assert (sizes.parameters, sizes.trainable) == (parameters, trainable)


@pytest.mark.parametrize("lacks", [True, False])
def test_bfloat16_is_called_slow_only_where_the_cpu_lacks_it(
    lacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(describe, "lacks_bfloat16", lambda: lacks)
    config = load_config(QUICKSTART, ["model.dtype=bfloat16"])
    warnings = collect_warnings(config, check_plan(config, 1), on_cpu=True)
    assert any("bfloat16" in warning for warning in warnings) == lacks


@pytest.mark.parametrize(
    ("template", "lora", "warned"),
    [
        ("llama3", "{}", True),
        ("llama3", "{train_embeddings: true}", False),
        ("llama3", "null", False),
        ("chat_template", "{}", False),
    ],
)
def test_lora_on_special_tokens_that_a_base_model_may_not_know_is_reported(
    template: str, lora: str, warned: bool
) -> None:
    settings = ["data.kind=instruct", f"data.template={template}", f"model.lora={lora}"]
    config = load_config(QUICKSTART, [*settings, "data.train_tokenizer=null", "data.tokenizer=any"])
    warnings = collect_warnings(config, check_plan(config, 1), on_cpu=False)
    assert any("model.lora.train_embeddings=true" in warning for warning in warnings) == warned


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_planned_bytes_are_those_of_bitsandbytes(tmp_path: Path) -> None:
    from bitsandbytes.optim import AdamW8bit

    shape = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4, vocab_size=512
    )
    LlamaForCausalLM(shape).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), lora=LoraConfig(r=8, base_dtype="nf4"))
    loaded = load_pretrained(str(tmp_path), None, "bfloat16", "eager", linear_dtype="nf4")
    model = add_lora(loaded, config, 0)
    with torch.device("meta"):
        sizes = sizes_of(add_lora(LlamaForCausalLM(shape), config, 0), shape, config.linear_dtype)
    states = [p.quant_state.as_dict() for p in model.parameters() if hasattr(p, "quant_state")]
    statistics = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
    tensors = [*model.parameters(), *statistics]
    counted = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
    memory = footprint.memory(sizes, Setup(1, 2, 1, 8, moments=footprint.MOMENTS_8BIT))
    assert len(states) == 14 and memory.parameters == pytest.approx(counted, rel=0.05)
    flat = torch.nn.Parameter(torch.zeros(sizes.trainable))
    flat.grad = torch.ones(sizes.trainable)
    optimizer = AdamW8bit([flat])
    optimizer.step()
    kept = [flat, *(value for value in optimizer.state[flat].values() if isinstance(value, torch.Tensor))]
    assert memory.optimizer == pytest.approx(sum(tensor.nbytes for tensor in kept), rel=0.05)


def test_a_plan_lists_the_share_of_each_domain(tmp_path: Path) -> None:
    limits = {"home": 30, "abroad": 60}
    sources = [{"embedded": f"world-{name}", "limit": n, "domain": name} for name, n in limits.items()]
    settings = f"data.sources={json.dumps(sources)}", "data.sequence_len=32", "train.max_steps=200"
    overrides = prepared_recipe(tmp_path, *settings)
    shares = "{home: 0.25, abroad: {from: 0.75, to: 0.25, steps: 20}}"
    mixture = f"train.mixture={{shares: {shares}, max_epochs: {{abroad: 2}}}}"
    config = load_config(QUICKSTART, [*overrides, mixture])
    ready = check_plan(config, 1)
    assert ready.data is not None and isinstance(ready.order, MixedOrder) and ready.steps is not None
    rows = dict(domain_rows(config, ready))
    assert rows["domain home"].startswith("25.0% to 50.0% of tokens; ")
    trained = np.concatenate([ready.order.step_rows(step) for step in range(ready.steps)])
    for domain, portion in enumerate(ready.order.portions(ready.steps)):
        of_domain = trained[ready.data.domain[trained] == domain]
        assert portion.rows == len(of_domain)
        assert portion.tokens == pytest.approx(ready.data.valid[of_domain].sum(), rel=0.1)
        assert portion.name == "home" or portion.epochs <= 2
    too_short = "train.mixture={temperature: 1, max_epochs: {home: 1, abroad: 1}}"
    with pytest.raises(UserError, match="mixture"):
        check_plan(load_config(QUICKSTART, [*overrides, too_short]), 1)
    plain = load_config(QUICKSTART, overrides)
    percents = [float(text.split("%")[0]) for _, text in domain_rows(plain, check_plan(plain, 1))]
    assert len(percents) == 2 and sum(percents) == pytest.approx(100, abs=0.2)


def test_the_best_settings_are_the_fastest_of_those_that_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = load_config(LLAMA, ["output_dir=runs/unstarted"])
    alone = print_best(config, parse_cluster("1xA100-80G"))
    assert alone.file.name == "zero3_offload.json"
    capsys.readouterr()
    best = print_best(config, parse_cluster("8xA100-40G"))
    every = every_choice(config, "8xA100-40G")
    room = 39.4 * USABLE * GIB
    fitting = [choice for choice in every if choice.memory.upper_bound <= room]
    assert best.memory.upper_bound <= room and len(fitting) < len(every)
    assert best.speed >= 0.99 * max(choice.speed for choice in fitting)
    files = {choice.file.name for choice in every}
    assert files == {"zero1.json", "zero2.json", "zero3.json", "zero3_offload.json"}
    assert {choice.setup.micro for choice in every} == {1, 2}  # 16 rows on 8 GPUs
    assert {c.setup.stage for c in every if c.setup.compiled} == {1, 2}
    rows = cells(capsys.readouterr().out)
    with_kernels = every_choice(load_config(LLAMA, ["model.kernels=liger"]), "8xA100-40G")
    assert not any(choice.setup.compiled for choice in with_kernels)  # a recipe uses kernels or compilation
    without = {(choice.file, choice.setup): choice for choice in every}
    for kernels in with_kernels:
        plain = without[kernels.file, dataclasses.replace(kernels.setup, kernels=False)]
        assert kernels.time.elementwise < plain.time.elementwise
        assert kernels.memory.activations < plain.memory.activations
        assert kernels.memory._replace(activations=0) == plain.memory._replace(activations=0)
    assert list(rows) == ["1", "2", "3", "recipe"]
    speeds = [int(rows[name][5].replace(",", "")) for name in "123"]
    assert speeds[0] >= speeds[1] >= speeds[2] and speeds[0] == pytest.approx(best.speed, abs=1)


def test_exit_codes_of_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs that do not fit are failures. Too many or unknown GPUs and a wrong --write are mistakes."""
    existing = tmp_path / "mine.yaml"
    existing.write_text("mine")
    long = ["data.sequence_len=65536", "model.architecture.max_position_embeddings=65536"]
    for code, argv in (
        (ExitCode.FAILURE, ["--gpus", "1xRTX3090-24G", "--best", *long]),
        (ExitCode.FAILURE, ["--gpus", "1xA100-80G"]),
        (ExitCode.MISTAKE, ["--gpus", "32xA100-80G", "--best"]),
        (ExitCode.MISTAKE, ["--gpus", "8xB300"]),
        (ExitCode.MISTAKE, [*EIGHT, "--write", "x.yaml"]),
        (ExitCode.MISTAKE, [*EIGHT, "--best", "--write", str(existing)]),
    ):
        assert main(["plan", str(LLAMA), *argv]) == code
        assert ("NO; " in capsys.readouterr().out) == (argv == ["--gpus", "1xA100-80G"])
    assert existing.read_text() == "mine"


def test_a_plan_prints_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(LLAMA), *EIGHT, "output_dir='runs/[bold]/[/a]'"]) == ExitCode.DONE
    assert "runs/[bold]/[/a]" in capsys.readouterr().out


def test_gpus_are_parsed_before_any_library_is_imported() -> None:
    """The memory is optional for a kind of GPU that has only one size."""
    assert parse_cluster("8xH100") == parse_cluster("8xh100-80g") == Cluster(8, "H100-80G")
    assert accelerator("NVIDIA A100-SXM4-40GB") == ACCELERATORS["A100-40G"]
    for name, kind in (
        ("NVIDIA A10", "A10-24G"),
        ("NVIDIA A10G", "A10G-24G"),
        ("NVIDIA A100 80GB PCIe", "A100-80G"),
        ("NVIDIA H100 80GB HBM3", "H100-80G"),
        ("NVIDIA H200", "H200-141G"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L40S", "L40S-48G"),
        ("NVIDIA GeForce RTX 4090", "RTX4090-24G"),
    ):
        assert accelerator(name) == (kind and ACCELERATORS[kind]), name
    assert accelerator("NVIDIA A100 PCIe") == ACCELERATORS["A100-80G"] and accelerator("NVIDIA T4") is None
    for text in ("8xA100", "8xB300", "H100", "0xH100", "²xH100"):
        with refused("gpus"):
            parse_cluster(text)
    script = "import sys; from emo.pipeline.cli import main; code = main(sys.argv[1:]); "
    script += "sys.exit(code if 'torch' not in sys.modules else 99)"
    argv = [sys.executable, "-c", script, "plan", str(LLAMA), "--gpus", "8xA100"]
    assert subprocess.run(argv, capture_output=True).returncode == ExitCode.MISTAKE


@pytest.mark.parametrize(
    ("override", "planned"),
    [
        ("data.sequence_len=1024", False),
        ("model.attn_implementation=flash_attention_2", True),
        ("model.kernels=liger", True),
    ],
)
def test_a_dry_run_rejects_what_training_rejects(override: str, planned: bool) -> None:
    """The data need not be prepared. A plan for other hosts does not depend on this host."""
    config = load_config(QUICKSTART, ["output_dir=runs/unstarted", "data.dir=runs/unprepared", override])
    with pytest.raises(UserError) as error:
        check_plan(config, 1, here=True)
    if planned:
        assert check_plan(config, 1).data is None
    else:
        assert error.value.code == "context"
        with refused("context"):
            check_plan(config, 1)


@pytest.mark.parametrize(
    ("code", "name", "changes", "ranks"),
    [
        ("teacher-context", "llama", {"max_position_embeddings": 128}, 1),
        ("sequence-parallel", "llama", {"max_position_embeddings": 512}, 4),
        ("sequence-parallel", "gemma2", {"max_position_embeddings": 512}, 2),
        ("architecture", "mamba", {}, 1),
        ("architecture", "t5", None, 1),
        ("model", None, {}, 1),
    ],
)
def test_a_plan_rejects_a_teacher_as_training_does(
    code: str, name: str | None, changes: dict[str, Any] | None, ranks: int, tmp_path: Path
) -> None:
    """Even if the data are not prepared. A teacher that is not on this machine is not checked."""
    if changes is None:
        T5Config(vocab_size=1600, d_model=16, d_kv=8, d_ff=16, num_layers=1).save_pretrained(tmp_path)
    elif name is not None:
        family(name, vocab_size=1600, **changes).config.save_pretrained(tmp_path)
    settings = f"train.sequence_parallel={ranks}", "data.dir=runs/unprepared", "output_dir=runs/unstarted"
    teacher = f"objective={{name: kl, teacher: {{model: {tmp_path}}}}}"
    with refused(code):
        print_plan(load_config(QUICKSTART, [*settings, teacher]), ranks)


def test_attention_is_planned_for_the_documents_in_the_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mean context agrees with the number of pairs of tokens that attend to each other."""
    settings = "data.sources=[{embedded: world, limit: 60}]", "data.sequence_len=256", "train.max_steps=9"
    overrides = prepared_recipe(tmp_path, *settings)
    config = load_config(QUICKSTART, overrides)
    data = check_plan(config, 1).data
    assert data is not None
    positions = data.batch(np.arange(len(data)))["position_ids"]
    pairs = positions.sum() + positions.size / 2  # a token attends to all before it, and half to itself
    assert data.mean_context() == pytest.approx(pairs / positions.size)
    assert data.mean_context(7) == pytest.approx(data.mean_context(), rel=0.5)
    assert data.mean_context() < 0.75 * 128, "documents are shorter than rows"
    documents = []
    for more in ([], ["--document_tokens", "64"], ["--document_tokens", "8"]):
        argv = ["plan", str(QUICKSTART), *EIGHT, *overrides, *more, "model.dtype=bfloat16"]
        assert main([*argv, "train.global_batch_size=8"]) == ExitCode.DONE
        documents.append(cells(capsys.readouterr().out)["documents"][0])
    expected = f"{data.mean_context():,.0f} of 256", "to 32 ", "to 4 "
    assert all(part in text for part, text in zip(expected, documents, strict=True))


def test_attention_time_depends_on_documents() -> None:
    """17 documents in a row take a 17th of the time, except with a mask. MFU always counts a 17th."""
    full, packed = Setup(8, 2, 1, 8192), Setup(8, 2, 1, 8192, attended=8192 / 2 / 17)
    long, short = (footprint.step_time(LLAMA_7B, setup, A100) for setup in (full, packed))
    assert short.attention == pytest.approx(long.attention / 17) and short.matrices == long.matrices
    masked = dataclasses.replace(packed, masked=True)
    assert footprint.step_time(LLAMA_7B, masked, A100).attention == pytest.approx(2 * long.attention)
    shares = [footprint.utilisation(LLAMA_7B, setup, 1.0, A100) for setup in (full, packed)]
    needed = 12 * (8192 / 2) * LLAMA_7B.hidden * LLAMA_7B.layers * 8192 / (A100.tflops * 1e12)
    assert shares[0] - shares[1] == pytest.approx(needed * 16 / 17)


def test_size_and_rate_of_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    """States take 14 bytes per parameter, and an export takes 2. Half as many saves halve the rate."""
    numbers = []
    for steps in (500, 1000):
        argv = ["plan", str(LLAMA), *EIGHT, f"train.save_steps={steps}", "output_dir=runs/unstarted"]
        assert main(argv) == ExitCode.DONE
        row = cells(capsys.readouterr().out)["saves"][0]
        numbers.append([float(number) for number in re.findall(r"[\d.]+", row)])
    (size, minutes, rate, waiting), (_, _, half, rarer) = numbers
    plan = alternatives(["train.save_total_limit=2"], "8xA100-80G")
    room = disk_bytes(plan.config, plan.sizes, plan.setup)
    assert room == 3 * 16 * LLAMA_7B.parameters + 2 * LLAMA_7B.parameters
    assert size == pytest.approx(16 * LLAMA_7B.parameters / 1e9, abs=0.5)
    assert rate == pytest.approx(size / 60 / minutes, rel=0.05) == pytest.approx(2 * half, rel=0.05)
    assert waiting > rarer > 0


def test_the_written_recipe_has_the_same_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fast.yaml"
    argv = ["plan", str(LLAMA), *EIGHT, "train.global_batch_size=64", "--best", "--write", str(file)]
    assert main([*argv, "objective.name=mle"]) == ExitCode.DONE
    name, checkpointing, compiled, micro, memory, speed, *_ = cells(capsys.readouterr().out)["1"]
    config = load_config(file, [])
    assert (config.train.global_batch_size, config.objective.name) == (64, "mle")
    assert (str(config.deepspeed), config.train.micro_batch_size) == (f"ds_configs/{name}", int(micro))
    assert str(config.model.activation_checkpointing).lower() == checkpointing
    assert str(config.model.compile).lower() == compiled
    assert yaml.safe_load(file.read_text())["extends"].endswith("recipes/paper/llama-7b-wikitext103.yaml")
    assert main(["plan", str(file), *EIGHT]) == ExitCode.DONE
    plan = {name: row[0] for name, row in cells(capsys.readouterr().out).items() if row}
    assert plan["memory per GPU"].startswith(f"{memory} GiB") and plan["fits"].startswith("yes")
    assert f"{speed} per GPU" in plan["speed"]


def test_the_printed_error_is_that_of_held_out_runs() -> None:
    """No constant is fitted to the held-out runs, which outnumber the runs used for calibration."""
    errors = {mark: [abs(run.ratio() - 1) for run in RUNS if run.mark == mark] for mark in published.MARKS}
    calibrates, held_out, outside = (max(errors[mark]) for mark in errors)
    assert footprint.TIME_ERROR - 0.02 < held_out <= footprint.TIME_ERROR
    assert calibrates < held_out < outside and sum(error > 0.1 for error in errors["held_out"]) <= 2
    assert len(errors["held_out"]) > 2 * len(errors["calibrates"])


def test_a_gpu_counts_as_published_if_there_are_runs() -> None:
    published_on = {run.kind for run in RUNS}
    assert {kind for kind, gpu in ACCELERATORS.items() if gpu.published} == published_on


def test_published_memory() -> None:
    """States take 16 bytes per parameter (Rajbhandari et al. 2020), and 18 with our float32 gradients.

    Unlike ZeRO-2, ZeRO-1 keeps bf16 gradients during the whole step, unsharded float32 gradients, and a copy
    while they are reduced in half precision.
    """
    shared = footprint.memory(LLAMA_7B, Setup(8, 3, 1, 256, cost=False))
    assert sum(shared[:3]) == pytest.approx(18 * LLAMA_7B.parameters / 8)
    assert shared.total < shared.upper_bound < shared.total * (1 + footprint.MEMORY_ERROR)
    first, second = (footprint.memory(LLAMA_7B, Setup(8, stage, 8, 2048)) for stage in (1, 2))
    assert first.total - second.total == pytest.approx((4 * 7 / 8 + 2) * LLAMA_7B.parameters, rel=0.01)
    mistral = dataclasses.replace(LLAMA_7B, parameters=7_241_732_096, trainable=7_241_732_096)
    setup = Setup(8, 1, 1, 256, cost=False)  # on 8xA100-80G, DeepSpeed's tensors alone take 77.6 GiB
    assert footprint.memory(mistral, setup).total / GIB == pytest.approx(77.6, abs=0.1)


@pytest.mark.parametrize("case", published.MEMORY)
def test_peaks_published_for_gpus(case: tuple[int, bool, int, int, float]) -> None:
    """The upper bound is sufficient, and less than 1.6 times the published peak."""
    stage, checkpointing, micro, passes, peak = case
    setup = Setup(8, stage, micro, 4096, passes, checkpointing=checkpointing, cost=False, chunk_mb=0)
    memory = footprint.memory(LLAMA_7B, setup)
    logits = 16 * micro * 4096 * LLAMA_7B.vocabulary  # logits in two precisions, with gradients
    memory = memory._replace(loss=memory.loss + logits)
    without_head = 6 * LLAMA_7B.vocabulary * LLAMA_7B.hidden  # the gradient that only our loss keeps
    assert peak < (memory.upper_bound - without_head) / GIB < 1.6 * peak


@pytest.mark.parametrize(("kind", "setup"), published.longest_rows())
def test_the_longest_published_rows_fill_a_gpu(kind: str, setup: Setup) -> None:
    """The predicted memory is that of the GPU, within the printed error."""
    memory = footprint.memory(published.sizes_of("LLaMA3-8B", setup.block), setup)
    assert memory.total / GIB == pytest.approx(ACCELERATORS[kind].memory_gib, rel=footprint.MEMORY_ERROR)


@pytest.mark.parametrize(
    ("overrides", "held", "cache_mb"),
    [
        (["objective.name=emo", "data.validation_fraction=0"], True, 64),
        (["objective.name=mle"], True, 64),  # validation measures DEMD
        (["objective.name=mle", "objective.cost=constant"], False, 64),
        (["objective.name=mle", "data.validation_fraction=0"], False, 0),
    ],
)
def test_a_cost_embedding_is_planned_if_training_or_validation_uses_it(
    overrides: list[str], held: bool, cache_mb: float
) -> None:
    cached = ["objective.cost_cache_mb=64", "model={path: model, architecture: {model_type: llama}}"]
    config = load_config(QUICKSTART, ["output_dir=runs/unstarted", *cached, *overrides])
    objective = training_objective(config)
    setup = setup_of(config, Batch(8, 1, 1, 8), {"zero_optimization": {"stage": 2}}, objective)
    assert (setup.cost, setup.cache_mb) == (held, cache_mb)


def test_a_plan_knows_which_attention_needs_masks_and_scores() -> None:
    """Gemma 2 needs eager attention without flash-attn. It keeps 6 bytes for each score, and a soft cap 2."""
    gemma = "model.architecture={model_type: gemma2, num_attention_heads: 16}"
    recipes = ([], ["model.architecture={model_type: gpt2}", "data.sequence_len=1024"], [gemma])
    plans = [alternatives(settings, "8xA100-80G") for settings in recipes]
    assert [(p.setup.masked, p.setup.eager) for p in plans] == [(False, False), (True, False), (True, True)]
    setup, sizes = plans[2].setup, plans[2].sizes
    others = dataclasses.replace(setup, eager=False)
    scores = footprint.memory(sizes, setup).activations - footprint.memory(sizes, others).activations
    layers = 1.5 if setup.checkpointing else 26.5
    assert scores == pytest.approx(setup.micro * setup.block**2 * 16 * 8 * layers)


@pytest.mark.parametrize(
    ("name", "gated"), [("llama", True), ("gpt_neox", False), ("phi", False), ("starcoder2", False)]
)
def test_families_with_gates_are_known_by_their_parameters(name: str, gated: bool) -> None:
    model = family(name)
    assert sizes_of(model, model.config).gated == gated


def test_a_token_passes_through_few_experts() -> None:
    """Mixtral-8x7B has its published total, and the active parameters that are counted by hand here."""
    shape = {"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000, "num_key_value_heads": 8}
    hf_config = CONFIG_MAPPING["mixtral"](**shape)
    with torch.device("meta"):
        sizes = sizes_of(AutoModelForCausalLM.from_config(hf_config), hf_config)
    # embedding and head, then per layer attention, two of eight experts of 14336, their router, and norms
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 2 * 3 * 4096 * 14336 + 8 * 4096 + 2 * 4096
    assert sizes.parameters == 46_702_792_704
    assert sizes.parameters - sizes.idle == 2 * 32000 * 4096 + 4096 + 32 * layer
    dense, setup = dataclasses.replace(sizes, idle=0), Setup(8, 3, 1, 2048)
    times = [footprint.step_time(size, setup, A100).matrices for size in (sizes, dense)]
    assert times[0] / times[1] == pytest.approx(sizes.active / sizes.body)
    shares = [footprint.utilisation(size, setup, 1.0, A100) for size in (sizes, dense)]
    assert shares[0] < 0.5 * shares[1]


def test_communication_of_the_zero_stages() -> None:
    """ZeRO-3 gathers and ZeRO-2 reduces in every pass. ZeRO-1 reduces once a step, without overlap."""

    def seconds(stage: int, passes: int, network: float = 25.0, **changes: Any) -> float:
        setup = Setup(16, stage, 1, 256, passes, **changes)
        return footprint.step_time(LLAMA_7B, setup, A100, network).communication

    assert seconds(1, 8) == pytest.approx(seconds(1, 1))
    assert seconds(3, 8) - seconds(3, 4) > 1.4 * (seconds(2, 8) - seconds(2, 4)) > 0
    assert seconds(1, 1) > seconds(2, 1, all_reduced=False)
    assert seconds(3, 4, hpz=8) < 0.5 * seconds(3, 4)
    assert seconds(3, 4, network=400.0, hpz=8) > 0.9 * seconds(3, 4, network=400.0)
    parameters = [footprint.memory(LLAMA_7B, Setup(16, 3, 1, 256, hpz=hpz)).parameters for hpz in (1, 8)]
    assert parameters[1] - parameters[0] == 2 * LLAMA_7B.parameters / 8


def test_remedies_of_a_run_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is `tight` if it fits only with an exact prediction."""
    batch = ["data.sequence_len=2048", "train.global_batch_size=64", "train.micro_batch_size=16"]
    plan = alternatives([*batch, "deepspeed=ds_configs/zero3.json"], "4xA100-80G")
    needed = footprint.memory(plan.sizes, plan.setup).total
    for room, answer in ((needed * 1.5, "yes; "), (needed * 1.02, "tight: "), (needed * 0.9, "NO; ")):
        monkeypatch.setattr(Cluster, "memory", room)
        text = describe_fit(plan)
        assert text.startswith(answer) and ("activation_checkpointing" in text) == (answer != "yes; ")
        micro = int(re.search(r"train.micro_batch_size(?:=|.*: )(\d+)", text)[1])  # type: ignore[index]
        assert footprint.memory(plan.sizes, dataclasses.replace(plan.setup, micro=micro)).total <= room
        assert ("global_batch_size" in text) == (answer == "yes; ")
    monkeypatch.setattr(Cluster, "memory", needed * 1.5)
    accumulated = [*batch, "deepspeed=ds_configs/zero3.json", "train.global_batch_size=1024"]
    assert "global_batch_size" not in describe_fit(alternatives(accumulated, "4xA100-80G"))


def test_a_teacher_with_weights_excludes_files() -> None:
    """A plan rejects a file as training does, and the best settings have another."""
    teacher = ["objective={name: kl, teacher: base}", "train.global_batch_size=32"]
    config = load_config(LLAMA, ["output_dir=runs/unstarted", *teacher])
    assert {choice.file.name for choice in every_choice(config, "16xA100-80G")} == {
        *("zero1.json", "zero2.json", "zero3.json", "zero3_offload.json")
    }
    with refused("teacher-hpz"):
        check_plan(config.model_copy(update={"deepspeed": Path("ds_configs/zero3_hpz.json")}), 16)
    # frozen averages of adapters, which hpZ would never gather again
    average = ["objective={name: kl, teacher: {ema: 0.9}}", "model.lora={}", "train.global_batch_size=32"]
    with refused("teacher-hpz"):
        check_plan(load_config(LLAMA, [*average, "deepspeed=ds_configs/zero3_hpz.json"]), 16)
    wide = ["objective={name: kl, teacher: {model: x, dtype: float32}}", "deepspeed=ds_configs/zero3.json"]
    with refused("teacher-dtype"):  # ZeRO-3 would hold it in bfloat16
        check_plan(load_config(LLAMA, ["output_dir=runs/unstarted", *wide]), 16)


def test_weights_that_are_only_on_nvme_are_rejected() -> None:
    """Of 6.74e9 weights, 4 ranks hold more than 1e9 each, and 8 ranks do not."""
    config = load_config(LLAMA, ["output_dir=runs/unstarted", "deepspeed=ds_configs/zero3_nvme.json"])
    with refused("ds-combination") as error:
        check_plan(config, 4)
    assert "max_in_cpu=1684603904" in str(error.value)
    assert check_plan(config, 8).batch.replicas == 8


def test_steps_on_generated_text_need_the_whole_divergence() -> None:
    shared = "objective={sum: [{name: mle}, {name: kl, share: 0.25}], teacher: base, on_policy: {share: 0.5}}"
    with refused("sum-part"):
        check_plan(load_config(LLAMA, ["output_dir=runs/unstarted", shared]), 1)
    both = shared.replace("{name: kl,", "{name: jsd}, {name: kl,")
    assert check_plan(load_config(LLAMA, ["output_dir=runs/unstarted", both]), 1).objective.divergences


@pytest.mark.parametrize("objective", ["{name: mile, z_loss: 0.1}", "{name: gem, label_smoothing: 0.1}"])
def test_a_plan_rejects_terms_that_an_objective_excludes(objective: str) -> None:
    with refused("options-clash"):
        check_plan(load_config(LLAMA, ["output_dir=runs/unstarted", f"objective={objective}"]), 1)


LONG = ["train.global_batch_size=8", "train.micro_batch_size=1", "deepspeed=ds_configs/zero2.json"]
ZERO3 = [*LONG, "deepspeed=ds_configs/zero3.json", "model.activation_checkpointing=true"]
HEADS = [f"model.architecture.{key}" for key in ("num_attention_heads=28", "hidden_size=3584")]
HEADS += ["model.architecture.num_key_value_heads=4"]


@pytest.mark.parametrize(
    ("overrides", "block", "keys"),
    [
        (LONG, 131_072, ["checkpointing=offload"]),
        ([*LONG, "model.activation_checkpointing=offload"], 196_608, ["parallel=2"]),
        (ZERO3, 524_288, ["parallel=8"]),
        ([*ZERO3, *HEADS], 524_288, ["zero3_offload", "parallel=4"]),
        ([*ZERO3, "model.compile=true"], 524_288, ["compile=false", "parallel=8"]),
        ([*ZERO3, "model.attn_implementation=sdpa"], 524_288, []),
        ([*ZERO3, "model.architecture.attention_dropout=0.1"], 524_288, []),
        ([*ZERO3, "model.dtype=float32"], 524_288, []),
        ([*ZERO3, "objective={name: kl, teacher: {model: TEACHER}}"], 524_288, ["parallel=2"]),
        ([*LONG, "model.lora={base_dtype: nf4}"], 131_072, ["checkpointing=offload"]),
    ],
)
def test_training_accepts_the_remedies(
    overrides: list[str], block: int, keys: list[str], tmp_path: Path
) -> None:
    """A recipe fits with each of the changes that its plan names, of which some have the `keys`."""
    shape = family("llama", vocab_size=32_000, max_position_embeddings=block).config
    shape.save_pretrained(tmp_path)
    length = [f"data.sequence_len={block}", f"model.architecture.max_position_embeddings={block}"]
    settings = [*length, *(override.replace("TEACHER", str(tmp_path)) for override in overrides)]
    text = describe_fit(alternatives(settings, "8xH100-80G"))
    remedies = re.findall(r"set ([^;]*)", text)
    assert bool(remedies) == bool(keys) and all(key in text for key in keys), text
    for remedy in remedies:
        assert not describe_fit(alternatives([*settings, *remedy.split()], "8xH100-80G")).startswith("NO")


@pytest.mark.parametrize("compiled", ([], ["model.compile=true"]))
def test_the_best_settings_name_the_others_that_fit(compiled: list[str]) -> None:
    """Those that `print_best` does not choose itself."""
    length = ["data.sequence_len=131072", "model.architecture.max_position_embeddings=131072"]
    with pytest.raises(FailureError, match="sequence_parallel") as error:
        print_best(load_config(LLAMA, [*LONG, *length, *compiled]), parse_cluster("8xH100-80G"))
    assert error.value.code == "nothing-fits"
    settings = re.findall(r"[a-z]+\.[a-z_]+=[a-z0-9]+", str(error.value))
    config = load_config(LLAMA, [*LONG, *length, *compiled, *settings])
    print_best(config, parse_cluster("8xH100-80G"))
