"""What can be evaluated, what the key of a result covers, and results that survive damage and kills.

EVAL_KILLS sets the number of kills (default: 3).
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import emo.eval.models.model
from emo.common.errors import UserError
from emo.data_prep.encoding.tokenizer import load_tokenizer, save_tokenizer
from emo.eval.icl import job
from emo.eval.icl.job import Job, run_all
from emo.eval.icl.settings import Settings
from emo.eval.icl.tasks import Task, TaskSpec, load_task, select_tasks
from emo.eval.models.model import EvaluatedModel
from emo.eval.results import store
from emo.eval.results.directory import read_models
from emo.eval.results.store import Entry
from tests.helpers.evaluating import command, is_mistake, log_chunks, tiny_model, tiny_tokenizer
from tests.helpers.refusals import refused

WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
IDS = torch.arange(1, 9)[None]
KILLS = int(os.environ.get("EVAL_KILLS", "3"))
FORK = multiprocessing.get_context("fork")  # children start fast, because everything is imported
TASKS = "sst2,trec,mmlu"
ROWS, CHUNK = 12, 2
CHUNKS = 3 * ROWS // CHUNK
LEAKED = [3, 7, 10]


@pytest.fixture
def copy(world: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(world / "model", tmp_path / "model"))


@pytest.fixture
def adapted(copy: Path) -> Path:
    """Return a complete model with an adapter in the same directory."""
    targets = ["q_proj", "v_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(0)
    base: Any = AutoModelForCausalLM.from_pretrained(copy)
    peft.get_peft_model(base, config).save_pretrained(str(copy))
    return copy


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")


def edit_weights(path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(path)
    edit(weights)
    save_file(weights, path, metadata={"format": "pt"})


def logits(directory: Path) -> torch.Tensor:
    with torch.inference_mode():
        return EvaluatedModel(str(directory)).model(input_ids=IDS).logits


SPOILT: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "missing": lambda w: w.pop("model.layers.1.mlp.up_proj.weight"),
    "one too many": lambda w: w.update(extra=torch.ones(3)),
    "shape": lambda w: w.update({"model.norm.weight": torch.ones(7)}),
    "integers": lambda w: w.update({"model.norm.weight": torch.ones(32, dtype=torch.int32)}),
    "nan": lambda w: w["model.layers.0.mlp.up_proj.weight"][1].fill_(float("nan")),
    "overflow": lambda w: w["model.norm.weight"].fill_(3e38),  # weights are finite, scores are not
}


@pytest.mark.parametrize("kind", SPOILT)
def test_damaged_weights_publish_nothing(kind: str, copy: Path, world: Path, tmp_path: Path) -> None:
    edit_weights(copy / WEIGHTS, SPOILT[kind])
    common = ["--model", copy, "--output_path", tmp_path / "out"]
    assert is_mistake("eval", *common, "--data", world / "data", "--tasks", "sst2", "--retriever", "random")
    assert is_mistake("generate", *common, "--samples", 1)
    names = ("result.json", "chunks", "sst2.json", "samples.json")
    assert not [path for name in names for path in tmp_path.rglob(f"out/**/{name}")]


def test_a_tied_head_that_is_stored_must_be_the_embeddings(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    weights = load_file(path / WEIGHTS)
    assert "lm_head.weight" not in weights and EvaluatedModel(str(path)).model
    head = weights["model.embed_tokens.weight"]
    edit_weights(path / WEIGHTS, lambda w: w.update({"lm_head.weight": head.clone()}))
    assert EvaluatedModel(str(path)).model
    edit_weights(path / WEIGHTS, lambda w: w["lm_head.weight"].add_(1))
    with refused("model"):
        _ = EvaluatedModel(str(path)).model


def test_models_that_are_not_causal_or_smaller_than_their_tokenizer_are_refused(tmp_path: Path) -> None:
    """An added padding token needs no embedding."""
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=len(tokenizer), **sizes)  # type: ignore[arg-type]
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    tiny_model(tmp_path / "small", vocab_size=200)
    for name in ("bert", "small"):
        with refused("model"):
            _ = EvaluatedModel(str(tmp_path / name)).model
    path = tiny_model(tmp_path / "model")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(path)
    assert EvaluatedModel(str(path)).model.config.vocab_size == 384


def test_wrong_names_and_numbers_are_rejected(world: Path, tmp_path: Path) -> None:
    for name in (".hidden", "a/b", "a,b", "a=b", "", "x\n", "x" * 300):
        with pytest.raises(UserError):
            EvaluatedModel(str(world / "model"), name)
    assert EvaluatedModel(str(world / "model"), "emo 7B_v1.2+x").name == "emo 7B_v1.2+x"
    common = ["--data", world / "data", "--tasks", "sst2", "--retriever", "random", "--output_path", tmp_path]
    for options in (["--max_tokens", 2000], ["--num_fewshot", 99], ["--max_drop", "nan"]):
        assert is_mistake("eval", "--model", world / "model", *common, *options)


def test_an_adapter_is_loaded_as_its_files_say_and_is_part_of_the_key(adapted: Path, world: Path) -> None:
    plain, digests = logits(world / "model"), {EvaluatedModel(str(world / "model")).digest}
    for alpha in (8, 64):
        edit_json(adapted / "adapter_config.json", lora_alpha=alpha)
        digests.add(EvaluatedModel(str(adapted)).digest)
        base: Any = AutoModelForCausalLM.from_pretrained(world / "model")
        with torch.inference_mode():
            expected = peft.PeftModel.from_pretrained(base, adapted)(input_ids=IDS).logits
        assert torch.allclose(logits(adapted), expected, atol=1e-5)
        assert not torch.allclose(logits(adapted), plain, atol=0.1)
    edit_weights(adapted / ADAPTER, lambda w: next(iter(w.values())).add_(1))
    digests.add(EvaluatedModel(str(adapted)).digest)
    assert len(digests) == 4


def test_a_missing_tensor_of_an_adapter_is_rejected(adapted: Path) -> None:
    def rename(weights: dict[str, torch.Tensor]) -> None:
        weights["extra.weight"] = weights.pop(next(name for name in sorted(weights) if "v_proj" in name))

    edit_weights(adapted / ADAPTER, rename)
    with refused("model"):
        _ = EvaluatedModel(str(adapted)).model
    (adapted / ADAPTER).unlink()
    with refused("no-weights"):
        EvaluatedModel(str(adapted))


@pytest.mark.parametrize("file", [WEIGHTS, "config.json"])
def test_nothing_is_stored_if_a_file_changes_before_loading(
    file: str, copy: Path, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key was derived from the old content, but the model is loaded later, from the new content."""
    other = tiny_model(tmp_path / "other", seed=1, rms_norm_eps=1e-3)
    load = emo.eval.models.model.load_causal_lm

    def swapped(path: Path, **options: Any) -> Any:
        shutil.copy(other / file, path / "new")
        (path / "new").rename(path / file)
        return load(path, **options)

    monkeypatch.setattr(emo.eval.models.model, "load_causal_lm", swapped)
    out = tmp_path / "out"
    with refused("changed"):
        Job(EvaluatedModel(str(copy)), Settings(data=str(world / "data")), out).run(load_task("sst2"))
    assert not list(out.rglob("result.json")) and not list(out.rglob("chunks/*"))


def test_digests_follow_content_not_names_or_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVAL_CACHE", str(tmp_path / "cache"))
    first, second = tmp_path / "a.bin", tmp_path / "sub" / "a.bin"
    second.parent.mkdir()
    for path in (first, second):
        path.write_bytes(b"x" * 1000)
    before, stamp = store.digest_files(tmp_path, [first]), first.stat()
    (tmp_path / "cache" / "hashes.json").write_text("{")  # damaged, so it is written again
    assert before == store.digest_files(second.parent, [second])
    first.write_bytes(b"y" * 1000)  # the same size, and below the same time
    os.utime(first, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert store.digest_files(tmp_path, [first]) != before


def test_a_read_only_cache_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store, "_writable", functools.cache(store._writable.__wrapped__))
    (tmp_path / "file").write_bytes(b"x")
    for name in ("EVAL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    cache = store.cache_directory()
    assert store.digest_files(tmp_path, [tmp_path / "file"])
    assert store.cached_digest("kind", "k", lambda: "a" * 64) == "a" * 64
    assert store.cached_digest("kind", "k", lambda: "b" * 64) == "a" * 64  # kept while this process runs
    assert store.cache_directory() == cache and (cache / "hashes.json").is_file()
    assert len(caplog.records) == 1 and "EVAL_CACHE" in caplog.text  # one warning, with the variable to set


def test_every_setting_but_the_batch_size_is_part_of_the_key(world: Path, tmp_path: Path) -> None:
    model, task = EvaluatedModel(str(world / "model")), select_tasks("sst2")[0]

    def results(**settings: Any) -> int:
        Job(model, Settings(data=str(world / "data"), **settings), tmp_path).run(task)
        return len(list(tmp_path.glob("store/*/result.json")))

    changes = [{"shots": 2}, {"limit": 10}, {"max_tokens": 100}, {"faithful": True}, {"score": "channel"}]
    assert results() == 1
    assert [results(**change) for change in changes] == [2, 3, 4, 5, 6]  # type: ignore[arg-type]
    assert results(batch_size=2) == 6


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_digest_of_a_tokenizer_ignores_its_file_format(name: str, copy: Path, shared_data: Path) -> None:
    digests = set()
    for form in ("original", "tokenizer.json"):
        for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            (copy / file).unlink(missing_ok=True)
        original = shared_data / "tokenizers" / name
        if form == "original":
            shutil.copytree(original, copy, dirs_exist_ok=True)
        else:
            for source in original.iterdir():
                (copy / source.name).unlink()
            save_tokenizer(original, None, copy)
        digests.add(EvaluatedModel(str(copy)).tokenizer_digest)
    assert len(digests) == 1
    if name == "gpt2":  # other merges make another tokenizer
        model = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))["model"]
        model["merges"].insert(40_000, model["merges"].pop(0))  # move `Ġ t` behind the merges that use it
        edit_json(copy / "tokenizer.json", model=model)
        assert EvaluatedModel(str(copy)).tokenizer_digest not in digests


def test_a_tokenizer_adds_the_configured_tokens(copy: Path) -> None:
    written, plain = copy / "tokenizer_config.json", EvaluatedModel(str(copy)).tokenizer_digest
    config = json.loads(written.read_text(encoding="utf-8"))
    ids = load_tokenizer(copy)("a text", add_special_tokens=False).input_ids
    for bos, eos in itertools.product((True, False, None), repeat=2):
        flags = {"add_bos_token": bos, "add_eos_token": eos}
        flags = {name: flag for name, flag in flags.items() if flag is not None}
        written.write_text(json.dumps(config | flags), encoding="utf-8")
        model = EvaluatedModel(str(copy))
        expected = [model.tokenizer.bos_token_id] * (bos is not False) + ids
        expected += [model.tokenizer.eos_token_id] * (eos is True)
        assert model.tokenizer("a text").input_ids == expected
        assert (model.tokenizer_digest != plain) is (bos is False or eos is True)


def test_the_order_of_inputs_labels_and_replacements_is_part_of_the_key() -> None:
    def turned(table: dict[str, Any]) -> dict[str, Any]:
        return dict(reversed(table.items()))

    def key(inputs: dict[str, Any], names: dict[str, Any]) -> str:
        tree = {"title": "pair", "input": inputs, "label": {"columns": ["label"], "names": names}}
        tree["prompts"] = {"paper": {"text": "{one} {two} {label}"}}
        return store.digest_json(Task("pair", TaskSpec.model_validate(tree), "paper").identity())

    replace = {"a": "b", "b": "c"}
    inputs, names = {"one": {"column": "one", "replace": replace}, "two": "two"}, {"0": ["0"], "1": ["1"]}
    other = inputs | {"one": {"column": "one", "replace": turned(replace)}}
    keys = {key(inputs, names), key(turned(inputs), names), key(inputs, turned(names)), key(other, names)}
    assert len(keys) == 4


def test_a_name_stands_for_one_dtype_and_dtypes_are_not_compared(world: Path, tmp_path: Path) -> None:
    tasks, settings = select_tasks("sst2"), Settings(data=str(world / "data"))
    for name, dtype in (("a", "auto"), ("b", "float32"), ("c", "bfloat16")):
        model = EvaluatedModel(str(world / "model"), name, dtype)
        run_all(model, tasks, settings, tmp_path, lambda text: None)
    assert len(list(tmp_path.glob("store/*/result.json"))) == 2  # a's `auto` is float32
    assert command("compare", "a", "b", "--results", tmp_path)[0] == 0
    assert is_mistake("compare", "a", "c", "--results", tmp_path, "--fail_on_regression")


def test_a_name_stands_for_one_tokenizer(copy: Path, world: Path, tmp_path: Path) -> None:
    settings, said = Settings(data=str(world / "data")), list[str]()
    run_all(EvaluatedModel(str(copy), "a"), select_tasks("sst2,trec"), settings, tmp_path, said.append)
    path = copy / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": True, "add_eos_token": True}))
    run_all(EvaluatedModel(str(copy), "a"), select_tasks("sst2"), settings, tmp_path, said.append)
    assert any("another tokenizer" in line for line in said)
    assert read_models([tmp_path])[0].results.keys() == {"sst2"}


def test_a_known_result_imports_no_library_that_computes(world: Path, tmp_path: Path) -> None:
    arguments = ["eval", "--model", str(world / "model"), "--data", str(world / "data"), "--tasks", "sst2"]
    arguments += ["--limit", f"{CHUNK}"]  # so that this process too has one chunk
    assert command(*arguments, "--output_path", tmp_path)[0] == 0
    heavy = "torch", "transformers", "datasets", "openicl", "sklearn", "scipy", "sentence_transformers"
    program = (
        "import sys; from emo.eval.cli import main; code = main(); "
        f"print([name for name in {heavy} if name in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    arguments = [sys.executable, "-c", program, *arguments, "--output_path", str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0 and "already known" in done.stdout, done.stderr
    assert done.stderr.strip().endswith("[]"), done.stderr


def test_the_first_copy_of_a_chunk_counts(tmp_path: Path) -> None:
    """Later copies of a stored chunk change nothing. A damaged chunk is replaced."""
    rows, (first, second) = range(1), ([{"row": 0, "prediction": prediction}] for prediction in "ab")
    for records in (first, second):
        Entry(tmp_path, {"k": 1}).finish_chunk(0, rows, records)
        assert Entry(tmp_path, {"k": 1}).chunk(0, rows) == first
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())  # no temporary files remain
    path.write_text("{", encoding="utf-8")
    Entry(tmp_path, {"k": 1}).finish_chunk(0, rows, second)
    assert Entry(tmp_path, {"k": 1}).chunk(0, rows) == second


@pytest.fixture(scope="module", autouse=True)
def _small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "CHUNK", CHUNK)
        yield


@pytest.fixture(scope="module")
def undisturbed(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the files of an uninterrupted evaluation, which also fills the cache of embeddings."""
    out = tmp_path_factory.mktemp("store")
    evaluate(world, out)
    return everything(out)


def evaluate(world: Path, out: Path, log: Path | None = None) -> None:
    """Evaluate all tasks as a job does. With `log`, record every chunk that is started."""
    if log is not None:
        log_chunks(log)
    settings = Settings(data=str(world / "data"))
    run_all(EvaluatedModel(str(world / "model"), "m"), select_tasks(TASKS), settings, out, lambda text: None)


def start(*arguments: Any) -> Any:
    process = FORK.Process(target=evaluate, args=arguments)
    process.start()
    return process


def everything(out: Path) -> dict[str, str]:
    """Return the content of all result files except leases."""
    files = [p for p in sorted(out.rglob("*.json")) if "leases" not in p.parts]
    return {p.relative_to(out).as_posix(): p.read_text() for p in files}


@pytest.mark.slow
def test_a_killed_job_can_run_again(world: Path, undisturbed: dict[str, str], tmp_path: Path) -> None:
    """Three processes share all evaluations and are killed at random. The final files are the same."""
    rng, kills = random.Random(0), 0
    while kills < KILLS:
        out, log, killed = tmp_path / f"out{kills}", tmp_path / f"log{kills}", 0
        workers = [start(world, out, log) for _ in range(3)]
        while any(worker.is_alive() for worker in workers):
            number = rng.randrange(3)
            workers[number].join(rng.uniform(0.0, 0.5))
            if workers[number].is_alive() and kills < KILLS:
                workers[number].kill()
                workers[number].join()
                workers[number] = start(world, out, log)
                kills, killed = kills + 1, killed + 1
        assert all(worker.exitcode == 0 for worker in workers)
        assert everything(out) == undisturbed
        begun = Counter(log.read_text().splitlines())
        assert len(begun) == CHUNKS
        assert sum(begun.values()) <= CHUNKS + killed  # only interrupted chunks are started again
        kills += not killed


@pytest.mark.parametrize("file", ["*/result.json", "*/chunks/00001.json", "retrieval/*.json"])
def test_damaged_files_are_computed_again(file: str, world: Path, tmp_path: Path) -> None:
    """A message names the damaged file, and the same files are written again."""
    model, task = EvaluatedModel(str(world / "model"), "m"), select_tasks("sst2")[0]
    settings, messages = Settings(data=str(world / "data"), retriever="random"), list[str]()
    Job(model, settings, tmp_path).run(task)
    whole = everything(tmp_path)
    [path] = (tmp_path / "store").glob(file)
    text = path.read_bytes()
    for damaged in (text[: len(text) // 2], bytes(range(256)), b"[]", text.replace(b"1", b"2")):
        path.write_bytes(damaged)
        if "chunks" in file:
            with pytest.raises(UserError):
                store.read_row_records(tmp_path, path.parts[-3], ROWS)
        Job(model, settings, tmp_path, messages.append).run(task)
        assert everything(tmp_path) == whole
        assert any(str(path) in message for message in messages)
        messages.clear()


def test_leaked_rows_are_flagged_with_a_clean_score(world: Path, tmp_path: Path) -> None:
    """Three test rows are also in the pool. A second score leaves them out."""
    shutil.copytree(world / "data" / "sst2", tmp_path / "data" / "sst2")
    test = (tmp_path / "data" / "sst2" / "test.jsonl").read_text().splitlines()
    with (tmp_path / "data" / "sst2" / "train.jsonl").open("a") as file:
        file.write("\n".join(test[row] for row in LEAKED) + "\n")
    model, task = EvaluatedModel(str(world / "model"), "m"), select_tasks("sst2")[0]
    result = Job(model, Settings(data=str(tmp_path / "data")), tmp_path).run(task)
    [key] = [path.parent.name for path in tmp_path.glob("store/*/result.json")]
    records = store.read_row_records(tmp_path, key, ROWS)
    assert [r["row"] for r in records if r["leaked"]] == LEAKED
    clean = [r["prediction"] == r["gold"] for r in records if not r["leaked"]]
    assert result["leaked"] == 3 and result["clean"]["n"] == ROWS - 3
    assert result["clean"]["accuracy"] == pytest.approx(np.mean(clean))
    for row in LEAKED:  # retrieval found the copy of the row
        assert records[row]["demonstrations"][0] in (20, 21, 22)
