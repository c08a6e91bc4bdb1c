"""What is fuzzed: every parser of files that others may have written, each with sound files of its kind.

A further one is a function of a directory: `@target("judge replies", make_replies, "replies.jsonl")`.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from common.lease import Lease
from data_prep import scores
from data_prep.config import DataConfig
from data_prep.inspect import inspect
from data_prep.rows import Rejected, RowSpec, parse
from data_prep.shards import MANIFEST, Manifest, TokenDataset, manifest_text, open_prepared, parse_manifest
from data_prep.sources import open_inputs
from data_prep.templates import Conversation, render
from data_prep.tokenizer import save_tokenizer
from data_prep.verify import verify
from eval import store
from tests.conftest import REPO
from tests.helpers.corpus import alpaca_rows, data_config, run, texts, tiny_tokenizer, write_jsonl
from tests.helpers.fuzzing import target
from tests.helpers.results import write_model, write_result


def files(**content: bytes | str) -> Callable[[Path], None]:
    """A maker of files; `__` in a name stands for a dot."""

    def make(here: Path) -> None:
        for name, value in content.items():
            path = here / name.replace("__", ".")
            path.write_bytes(value if isinstance(value, bytes) else value.encode())

    return make


def rows(values: list[Any]) -> str:
    """JSON lines."""
    return "".join(json.dumps(value) + "\n" for value in values)


# --- recipes and files written like them ------------------------------------------------------------------

RECIPE = (REPO / "launch/recipes/llama-7b-wikitext103.yaml").read_text()


@target("recipe", files(a__yaml=RECIPE, b__yaml="extends: a.yaml\ntrain: {lr: 1.0e-3}\n"), "a.yaml", "b.yaml")
def recipe(here: Path) -> None:
    from pipeline.config import dump_config, load_config

    dump_config(load_config(here / "b.yaml", ["train.batch=32", "objective.params.ratio_cap=2"]))


def make_experiment(here: Path) -> None:
    shutil.copy(REPO / "experiments/oracle.yaml", here / "a.yaml")


@target("experiment", make_experiment, "a.yaml")
def experiment(here: Path) -> None:
    from experiments.design import chosen, expand, read_experiment, trials

    found = read_experiment(here / "a.yaml", [])
    several = expand(found)
    chosen(found, several, dict.fromkeys((one.name for one in trials(found, several)), 0.0))
    _ = found.variables


def make_task(here: Path) -> None:
    shutil.copy(REPO / "eval/icl/tasks/sst2.yaml", here / "own.yaml")


@target("task file", make_task, "own.yaml")
def task_file(here: Path) -> None:
    from eval.icl.tasks import select_tasks

    for task in select_tasks(str(here / "own.yaml")):
        _ = task.template, task.demonstration_template, task.identity(), store.digest(task.identity())


DS_CONFIG = json.loads((REPO / "ds_configs/zero3_offload.json").read_text())


@target("DeepSpeed file", files(ds__json=json.dumps(DS_CONFIG)), "ds.json")
def deepspeed_file(here: Path) -> None:
    from pipeline.config import Batch, load_config
    from pipeline.planning.ds_file import deepspeed_config

    config = load_config(REPO / "launch/recipes/llama-7b-wikitext103.yaml", [f"deepspeed={here / 'ds.json'}"])
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed_config(config, Batch(16, 4, 1, 4))


# --- text and instructions --------------------------------------------------------------------------------

TALK = [{"role": role, "content": f"{role} says"} for role in ("system", "user", "assistant")]
TEXTS = [{"text": text, "id": i} for i, text in enumerate(texts(4))]
CHATS: list[Any] = [
    *(
        {"messages": TALK},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ),
    *alpaca_rows(2),
    {"instruction": "a", "output": "b", "history": [["c", "d"]], "system": "e"},
]
IDS = [{"ids": [1, 2, 3]}, {"input_ids": [4, 5]}]


def _read_all(here: Path, kind: str, **source: Any) -> None:
    """All rows of a source as a worker reads them, and as text."""
    config = data_config(here, kind=kind, sources=[source], strict=False, max_chars=10_000)
    for one in open_inputs(config):
        one.probe()
        places = []
        for piece in one.pieces():
            places += [] if piece.payload is None else [piece.place]
            for row in () if piece.payload is None else parse(piece.payload, one.spec):
                if isinstance(row, Conversation):
                    _ = [render(row, template) for template in ("alpaca", "chat")]
                elif isinstance(row, Rejected):
                    _ = f"{row.reason} {row.detail}"
        for _ in one.read(places):
            pass


@target("rows of text", files(a__jsonl=rows(TEXTS)), "a.jsonl")
def text_rows(here: Path) -> None:
    _read_all(here, "text", files="a.jsonl")


@target("rows of instructions", files(a__jsonl=rows(CHATS)), "a.jsonl")
def instruction_rows(here: Path) -> None:
    for form in ("auto", "alpaca", "messages"):
        _read_all(here, "instruct", files="a.jsonl", format=form)


@target("rows of tokens", files(a__jsonl=rows(IDS)), "a.jsonl")
def token_rows(here: Path) -> None:
    _read_all(here, "text", files="a.jsonl", format="tokens")


PLAIN = "\n = A title = \n\nSome text .\n\n = = Part = = \n\nMore .\n\n = Another = \n\nThe end .\n"


@target(
    "text files",
    files(
        a__txt=PLAIN,
        b__txt__gz=gzip.compress(PLAIN.encode(), mtime=0),
        c__txt__zst=zstandard.compress(PLAIN.encode()),
    ),
    "a.txt", "b.txt.gz", "c.txt.zst",
)  # fmt: skip
def text_files(here: Path) -> None:
    for form in ("auto", "document", "lines", "paragraphs", "wikitext"):
        _read_all(here, "text", files="*.txt*", format=form)


def make_tables(here: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (here / "a.json").write_text(json.dumps({"version": 1, "data": TEXTS}))
    (here / "b.json").write_text(json.dumps(TEXTS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TEXTS), here / "c.parquet")


@target("tables", make_tables, "a.json", "b.json", "c.parquet")
def tables(here: Path) -> None:
    for name in ("a.json", "b.json", "c.parquet"):
        _read_all(here, "text", files=name)


@target("payloads", files(a__txt=PLAIN), "a.txt")
def payloads(here: Path) -> None:
    """Any bytes as any kind of payload."""
    for kind, form, lines in (
        ("text", "auto", True),
        ("instruct", "auto", True),
        ("text", "wikitext", False),
    ):
        spec = RowSpec(kind, form, lines, None, "ag_news", 10_000)
        list(parse((here / "a.txt").read_bytes(), spec))


# --- prepared data ----------------------------------------------------------------------------------------


def _config(here: Path) -> DataConfig:
    return data_config(here, kind="instruct", sources=[{"files": "a.jsonl"}], shards=1, block=512)


def make_prepared(here: Path) -> None:
    write_jsonl(here / "a.jsonl", alpaca_rows(12))
    run(_config(here))


PREPARED = ("prepared/train/manifest.json", "prepared/train/shard-00000-of-00001.arrow")


@target("manifest and shards", make_prepared, *PREPARED)
def manifest_and_shards(here: Path) -> None:
    """The digests of a manifest and the size of a shard are made right: whoever changes one can do that."""
    place = here / "prepared/train"
    kept = (place / MANIFEST).read_bytes()
    try:
        found = parse_manifest(place)
        sized = [one.model_copy(update={"bytes": _size(place / one.file)}) for one in found.shards]
        changed = Manifest.model_validate(found.model_copy(update={"shards": sized}).model_dump())
        (place / MANIFEST).write_text(manifest_text(changed))
        data, _ = open_prepared(_config(here))
        every = np.arange(min(len(data), 50))
        if data.damage(every, data.manifest.vocab_size) is None:
            data.batch(every)
        _ = data.segment_lengths(), [data.token_offsets(i) for i in range(len(data.manifest.shards))]
        inspect_quietly(place)
    finally:
        (place / MANIFEST).write_bytes(kept)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def inspect_quietly(place: Path) -> None:
    """`inspect`, printed nowhere."""
    from rich.console import Console

    out = io.StringIO()
    inspect(place, 2, 0, Console(file=out, width=200))
    assert "\x1b" not in out.getvalue()


def make_verified(here: Path) -> None:
    make_prepared(here)
    overlap = {"ngram": 8, "documents": 1, "tasks": {"sst2": {"rows": 3, "overlapping": 1, "contained": 0}}}
    (here / "prepared/train/contamination.json").write_text(json.dumps(overlap))


@target(
    "verify and inspect",
    make_verified,
    *PREPARED,
    "prepared/settings.json",
    "prepared/plan.parquet",
    "prepared/train/contamination.json",
    "prepared/tokenizer/tokenizer_config.json",
)
def verified(here: Path) -> None:
    verify(here / "prepared")
    inspect_quietly(here / "prepared/train")


def make_scores(here: Path) -> None:
    make_prepared(here)
    data = TokenDataset(here / "prepared/train")
    scores.begin(data, "own", {"path": "m"})
    for shard, info in enumerate(data.manifest.shards):
        scores.write_shard(scores.shard_file(data, "own", shard), -np.ones(info.tokens))
    assert scores.seal(data, "own", {"path": "m"})


OWN = "prepared/train/scores/own"


@target("scores", make_scores, f"{OWN}/scores.json", f"{OWN}/begun.json", f"{OWN}/shard-00000-of-00001.npy")
def stored_scores(here: Path) -> None:
    data = TokenDataset(here / "prepared/train")
    scores.begin(data, "own", {"path": "m"})
    scores.Scores(data, "own").batch(np.arange(len(data)))


def make_tokenizer(here: Path) -> None:
    shutil.copytree(tiny_tokenizer(), here / "whole")
    (here / "model").mkdir()
    shutil.copy(tiny_tokenizer() / "model/tokenizer.model", here / "model")
    (here / "bytes").mkdir()
    (here / "bytes/vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (here / "bytes/merges.txt").write_text("#version: 0.2\na b\n")


@target(
    "tokenizer",
    make_tokenizer,
    "whole/tokenizer.json",
    "whole/tokenizer_config.json",
    "model/tokenizer.model",
    "bytes/vocab.json",
    "bytes/merges.txt",
)
def tokenizer(here: Path) -> None:
    out = here.with_name(here.name + "-out")
    try:
        for name in ("whole", "model", "bytes"):
            save_tokenizer(here / name, None, out / name)
    finally:
        shutil.rmtree(out, ignore_errors=True)


# --- runs and checkpoints ---------------------------------------------------------------------------------

STATE = {
    "step": 3, "tokens": 10, "ranks": 1, "groups": [2], "frozen": 0, "identity": {"data": "f"},
    "progress": {"metrics": {"steps": 1, "loss": 0.5}, "guard": {}},
}  # fmt: skip
RECORDS = [{"step": 1, "tokens": 5, "nll": 2.0, "lr": 1e-3}, {"step": 2, "tokens": 9, "validation_nll": None}]


def make_run(here: Path) -> None:
    from pipeline import checkpoint, identity
    from pipeline.run_dir import describe, list_files, partial_directory

    partial = partial_directory(here, 3)
    (partial / "state").mkdir(parents=True)
    (partial / "state/a.pt").write_bytes(b"abc")
    (partial / "hf").mkdir()
    (partial / "hf/config.json").write_text("{}")
    (partial / "state.json").write_text(json.dumps(STATE))
    checkpoint.write_complete(partial, describe(partial, list_files(partial)))
    checkpoint.publish(here, 3)
    identity.claim(_run_config(here), {"data": "f"})
    (here / "metrics.jsonl").write_text(rows(RECORDS))
    (here / "export").mkdir()
    (here / "export/export.json").write_text(json.dumps({"step": 3, "tokens": 10, "objective": "emo"}))


def _run_config(here: Path) -> Any:
    from pipeline.config import load_config

    return load_config(REPO / "launch/recipes/quickstart-pretrain.yaml", [f"run_dir={here}"])


@target(
    "run directory",
    make_run,
    "step-000003/COMPLETE",
    "step-000003/state.json",
    "config.yaml",
    "metrics.jsonl",
    "export/export.json",
)
def run_directory(here: Path) -> None:
    from eval.targets import DamagedError, NotWholeError, targets
    from pipeline import checkpoint, identity
    from pipeline.run_dir import problem, read_export_info, read_metrics

    identity.compare(_run_config(here), {"data": "f"})
    problem(here / "step-000003")
    saved = checkpoint.read_saved(here / "step-000003")
    assert saved.step + saved.tokens >= saved.step or saved.tokens < 0
    assert all(isinstance(record["step"], int) for record in read_metrics(here))
    with contextlib.suppress(ValueError):  # whoever reads it says more
        read_export_info(here / "export")
    for one in targets(here):
        with contextlib.suppress(DamagedError, NotWholeError):
            one.require_whole(one.path, settled=True)


@target("lease", files(lock__000001=json.dumps({"machine": "x:1", "pid": 1, "started": 1.0, "time": 2.0})),
        "lock.000001")  # fmt: skip
def lease(here: Path) -> None:
    held = Lease(here, "lock", 60.0)
    held.holder()
    if held.acquire():  # then the file was of a dead process
        held.release()
        for path in here.glob("lock.*"):
            path.unlink()
        (here / "lock.000001").touch()


HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 8,
    "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 16, "max_position_embeddings": 32,
    "torch_dtype": "float32", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


def make_model(here: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**HF_CONFIG)).save_pretrained(here, max_shard_size="1KB")
    (here / "config.json").write_text(json.dumps(HF_CONFIG))
    (here / "trainer_state.json").write_text("{}")


@target(
    "model directory",
    make_model,
    "config.json",
    "model.safetensors.index.json",
    "generation_config.json",
    "model-00001-of-00004.safetensors",
)
def model_directory(here: Path) -> None:
    from eval.model import EvaluatedModel
    from eval.targets import DamagedError, NotWholeError, Target
    from pipeline.loss.cost_files import load_cost

    with contextlib.suppress(DamagedError, NotWholeError):
        Target("own", here, foreign=True).require_whole(here, settled=True)
    EvaluatedModel(str(here), "own")
    load_cost(str(here), 16)


def make_cost(here: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"head": torch.randn(8, 4)}, here / "a.safetensors")
    torch.save(torch.randn(8, 4), here / "b.pt")


@target("cost file", make_cost, "a.safetensors", "b.pt")
def cost_file(here: Path) -> None:
    from pipeline.loss.cost_files import load_cost

    for name in ("a.safetensors", "b.pt"):
        load_cost(str(here / name), 8)


# --- evaluation -------------------------------------------------------------------------------------------


def make_results(here: Path) -> None:
    for name, right in (("base", [True, False, True, True]), ("emo", [True, True, False, True])):
        write_model(here, name, step=3, tokens=10, objective="emo", origin="x", run="runs/x")
        write_result(here, name, "sst2", right, groups=["a", "b", "a", "b"])
        found = [{"prefix": "a", "text": "b", "ended": True, "tokens": 1}]
        view = {"weights": store.digest(name), "seed": 0, "max_tokens": 1, "samples": found}
        (here / "models" / name / "samples.json").write_text(json.dumps(view))
    (here / "models/metrics.jsonl").write_text(rows(RECORDS))


@target(
    "results",
    make_results,
    *(f"models/{name}" for name in ("emo/model.json", "emo/sst2.json", "emo/samples.json", "metrics.jsonl")),
)
def results(here: Path) -> None:
    from eval.compare import regression, table
    from eval.report.gather import gather
    from eval.report.page import document
    from eval.results import pick, read_models

    page = document(gather([here], {"base": here / "models"}))
    text = page.html() + page.markdown()
    assert "<script" not in text and "\x1b" not in text + page.json()
    models = read_models([here], lambda line: None)
    if len(models) > 1:
        text = table(pick(models, "base"), pick(models, "emo"))
        text += regression(pick(models, "base"), pick(models, "emo")).summary
        assert "\x1b" not in text


def make_records(here: Path) -> None:
    write_model(here, "emo")
    write_result(here, "emo", "sst2", [True, False], groups=["a", "b"])
    (chunk,) = (here / "store").glob("*/chunks/*.json")
    (here / "chunk.json").write_text(json.dumps(store.unsealed(chunk)))


@target("records", make_records, "chunk.json")
def records(here: Path) -> None:
    """Sealed, as whoever changes them can do."""
    from eval.results import read_models

    (chunk,) = (here / "store").glob("*/chunks/*.json")
    try:
        chunk.write_text(store.seal(json.loads((here / "chunk.json").read_text())))
    except (ValueError, RecursionError):
        chunk.write_bytes((here / "chunk.json").read_bytes())
    (model,) = read_models([here])
    model.outcomes("sst2")


ABOUT = {
    "model": "emo", "path": "m", "weights": "w", "tokenizer": "t", "corpus": "c", "prefix_words": 2,
    "tokens": 5, "samples": 1, "seeds": [0], "decoding": {"name": "d"}, "records": 2,
}  # fmt: skip
WRITTEN = [
    {"row": i, "seed": 0, "prefix_number": i, "sample": 0, "prefix": "a b", "text": " c", "ids": [1, 2],
     "ended": True, "tokens": 2, "reference": " d e", "human": " d"}
    for i in range(2)
]  # fmt: skip


@target("generated texts", files(about__json=json.dumps(ABOUT), records__jsonl=rows(WRITTEN)),
        "about.json", "records.jsonl")  # fmt: skip
def generated_texts(here: Path) -> None:
    from eval.generation.quality import Sampled, pair

    sampled = Sampled.read(here)
    _ = sampled.draws(), sampled.humans
    if sampled.has_humans:
        _ = [pair(r, p, sampled.about["prefix_words"], 5) for r in sampled.records for p in ("paper", "old")]


@target(
    "prefixes",
    files(
        a__jsonl=rows(TEXTS), b__txt="one two three four\nfive six seven\n",
        c__jsonl__zst=zstandard.compress(rows(TEXTS).encode()),
    ),
    "a.jsonl", "b.txt", "c.jsonl.zst",
)  # fmt: skip
def prefixes(here: Path) -> None:
    from eval.generation.prefixes import from_file

    for name in ("a.jsonl", "b.txt", "c.jsonl.zst"):
        _ = from_file(here / name).digest, from_file(here / name, 2, 3)


def make_task_rows(here: Path) -> None:
    (here / "mmlu").mkdir()
    (here / "sst2").mkdir()
    found = [{"text": f"text {i}", "label_text": ("negative", "positive")[i % 2]} for i in range(12)]
    for split in ("train", "test"):
        (here / f"sst2/{split}.jsonl").write_text(rows(found))
    asked = [
        {"question": "q", "choices": ["a", "b", "c", "d"], "answer": "ABCD"[i % 4], "subject": "s"}
        for i in range(6)
    ]
    for split in ("dev", "test"):
        (here / f"mmlu/{split}.jsonl").write_text(rows(asked))


@target("rows of tasks", make_task_rows, "sst2/train.jsonl", "sst2/test.jsonl", "mmlu/test.jsonl")
def task_rows(here: Path) -> None:
    from eval.icl.task_data import load_data
    from eval.icl.tasks import load_task

    for name in ("sst2", "mmlu"):
        load_data(load_task(name), str(here))


def make_watch(here: Path) -> None:
    make_run(here)
    for kind in ("done", "seen"):
        (here / "eval/watch" / kind).mkdir(parents=True)
        mark = {"name": "x", "state": "evaluated", "files": "f", "asked": {"a": "evaluated"}, "since": 1.0}
        (here / "eval/watch" / kind / "x.json").write_text(json.dumps(mark | {"passes": 2}))


@target("watch", make_watch, "eval/watch/done/x.json", "eval/watch/seen/x.json")
def watch(here: Path) -> None:
    from eval.icl.settings import Settings
    from eval.targets import Target
    from eval.watch import Watch

    one = Watch(here, [], Settings(data="x"), here / "eval", "auto", lambda line: None)
    found = Target("x", here / "export")
    one._settled(found, "a")
    one._seen(found, "f")


def make_notes(here: Path) -> None:
    (here / "note.json").write_text(json.dumps({"made_with": {}, "after": "", "seconds": 1.5}))
    (here / "value.json").write_text(json.dumps({"result": {"accuracy": 0.5, "list": [1, 2]}}))


@target("notes and measures", make_notes, "note.json", "value.json")
def notes(here: Path) -> None:
    from experiments.stages import Stage
    from experiments.sweep import read_number

    _ = Stage("a", ["a"], here / "note.json").done
    read_number(f"{here / 'value.json'}:result.accuracy")
