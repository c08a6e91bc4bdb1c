"""Compare data preparation with its peers: tokenising, scaling, reading, packing.

    python -m tests.bench.data [--rounds 5] [--parts tokenise scale read pack] [--quick]

All contestants get the same text and tokenizer (LLaMA's if the real data are available). Tokenising is
compared by CPU seconds on one thread, in which `prepare` also reads, checks, removes duplicates, packs,
hashes and writes. Scaling is compared by wall time, so it needs an idle machine.
"""

from __future__ import annotations

import functools
import json
import logging
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import psutil
import torch
import yaml

from emo.common.config.recipe import parse_section
from emo.data_prep.config import DataConfig
from emo.data_prep.encoding.pack import first_fit_decreasing
from emo.data_prep.encoding.templates import Conversation, Exchange
from emo.data_prep.encoding.tokenizer import save_tokenizer, tokenizer_facts
from emo.data_prep.encoding.words import encoder
from emo.data_prep.prepare import prepare
from emo.data_prep.shards.encode import EncodeSettings, RowEncoder
from emo.data_prep.sources.files import open_text
from emo.pipeline.batches.config import MixtureConfig
from emo.pipeline.batches.order import MixedOrder, MixtureStart
from tests.bench import common
from tests.helpers.corpus import alpaca_rows, random_dataset, tiny_tokenizer, write_jsonl
from tests.helpers.corpus import texts as made_up

DATA = common.SHARED
BLOCK = 256
# Peers, which `common.import_peer` installs only for benches.
DATATROVE, TRL, LLAMA_FACTORY = "datatrove==0.10.1", "trl==1.16.0", "llamafactory==0.9.5"
AXOLOTL, NUMBA, LLVMLITE = "axolotl==0.19.0", "numba", "llvmlite"


class Bench:
    """The text, the tokenizer and a working directory."""

    def __init__(self, work: Path, rounds: int, quick: bool) -> None:
        self.work, self.rounds, self.quick = work, rounds, quick
        self.report = common.Report("data", judged=not quick)
        self.tokenizer = work / "tokenizer"
        self.real = (DATA / "tokenizers/llama").is_dir()
        if not self.real:
            self.report.note(f"no real data at {DATA} (set SHARED_DATA): made-up text, small tokenizer")
        save_tokenizer(DATA / "tokenizers/llama" if self.real else tiny_tokenizer(), None, self.tokenizer)
        texts = real_texts() if self.real else made_up(20_000, sentences=40)
        self.texts = texts[:60] if quick else texts

    def fresh(self) -> Path:
        """Delete the output directory and return its path."""
        shutil.rmtree(self.work / "out", ignore_errors=True)
        return self.work / "out"

    def write(self, copies: int = 1) -> Path:
        """Write `copies` copies of the text as JSON lines, with different rows in each copy."""
        rows = (f"{t} {i}" if i else t for i in range(copies) for t in self.texts)
        return write_jsonl(self.work / f"{copies}" / "text.jsonl", rows)

    def config(self, file: Path, **data: Any) -> DataConfig:
        keys = {"dir": str(self.fresh()), "tokenizer": str(self.tokenizer), "sequence_len": BLOCK}
        keys |= {"shards": 2, "sources": [{"files": str(file)}]}
        return parse_section(DataConfig, keys | data, "data")


def json_lines(name: str) -> list[dict[str, Any]]:
    with open_text(DATA / name) as stream:
        return [json.loads(line) for line in stream.read().splitlines()]


def real_texts() -> list[str]:
    """Return 20 MB of web pages and WikiText, whose paragraphs are joined to pages."""
    names = ("openwebtext-sample", "c4-demo")
    pages = [row["text"] for name in names for row in json_lines(f"lm/{name}/train.jsonl.zst")]
    for name in ("wikitext-2-v1/train", "wikitext-103-v1/train_head", "wikipedia-demo/train"):
        with open_text(DATA / "lm" / f"{name}.txt.zst") as stream:
            lines = [line for line in stream.read().decode().split("\n") if line.strip()]
        pages += ["\n".join(lines[i : i + 8]) for i in range(0, len(lines), 8)]
    return pages


def tokenise(bench: Bench) -> None:
    """Compare a complete preparation in CPU time with the tokenizer, run_clm's recipe and datatrove."""
    report, file, tokenizer = bench.report, bench.write(), bench.tokenizer
    tokens = bare_encode_batch(bench.texts, tokenizer)

    def ours(**data: Any) -> Callable[[int], None]:
        return lambda _: prepare(bench.config(file, **data), (0, 1), 1, False, False, str)

    contestants: common.Contestants = {
        "bare encode_batch": lambda _: bare_encode_batch(bench.texts, tokenizer),
        "prepare": ours(),
        "prepare, near-duplicates": ours(dedup="near"),
        "run_clm recipe": lambda _: run_clm(file, tokenizer, bench.fresh()),
        "datatrove": lambda _: datatrove(file.parent, tokenizer, bench.fresh()),
    }
    if bench.real:
        contestants["prepare, contamination check"] = ours(contamination=str(DATA / "nlu"))
    try:
        contestants["datatrove"](0)
    except ImportError as error:
        report.note(f"skipped: datatrove ({error})")
        del contestants["datatrove"]
    times = common.race(contestants, bench.rounds)
    targets = {"bare encode_batch": 1.6, "run_clm recipe": 2.2, "datatrove": 1.55}
    for name, took in times.items():
        report.row(part="tokenise", what=name, tokens_per_cpu_s=round(tokens / statistics.median(took)))
        if name != "prepare" and name not in targets:
            report.ratio(f"{name} / prepare, CPU time", common.ratio(times, name, "prepare"))
    for name, target in targets.items():
        value = common.ratio(times, name, "prepare") if name in times else None
        report.ratio(f"prepare / {name}, tokens/s", value, at_least=target)


def scale(bench: Bench) -> None:
    """Compare the wall time of the user's command with one and with two workers, in turn."""
    report, recipe = bench.report, bench.work / "scale.yaml"
    config = bench.config(bench.write(copies=1 if bench.quick else 20))
    recipe.write_text(yaml.safe_dump({"data": config.model_dump(mode="json")}))
    times: common.Times[int] = {1: [], 2: []}
    for _, workers in common.turns((1, 2), bench.rounds):
        bench.fresh()
        command = [sys.executable, "-m", "emo", "prepare", str(recipe), "--workers", str(workers)]
        begin = time.perf_counter()
        subprocess.run(command, cwd=common.REPO, check=True, capture_output=True)
        times[workers].append(time.perf_counter() - begin)
    for workers, took in times.items():
        report.row(part="scale", what=f"{workers} workers", wall_s=round(statistics.median(took), 2))
    gain = common.ratio(times, 1, 2)
    control = statistics.median(bare_scaling(bench) for _ in range(bench.rounds))
    report.row(part="scale", what="the bare tokenizer in 1 -> 2 processes gains", wall_s=round(control, 3))
    report.ratio("1 -> 2 workers, wall time", gain, at_least=1.75)
    report.ratio("1 -> 2 workers / what the machine gives the bare tokenizer", gain / control)


def bare_scaling(bench: Bench) -> float:
    """Return the speed-up of the bare tokenizer by a second process, which is the machine's limit."""
    walls = []
    for count in (1, 2):
        with multiprocessing.get_context("spawn").Pool(count) as pool:
            for texts in (bench.texts[:5], bench.texts[: len(bench.texts) // 2]):  # imports and loads first
                begin = time.perf_counter()
                pool.starmap(bare_encode_batch, [(texts, bench.tokenizer)] * count, chunksize=1)
            walls.append(time.perf_counter() - begin)
    return 2 * walls[0] / walls[1]


def read(bench: Bench) -> None:
    """Compare the training reader with the quickstart's training step, and measure its memory."""
    report, large = bench.report, bench.work / "large"
    rows = 20_000 if bench.quick else 400_000
    data = random_dataset(large, rows, BLOCK)
    batch, steps = 16, 20 if bench.quick else 400
    order = np.random.default_rng(0).permutation(rows)
    shares = MixtureConfig(shares={"a": 0.4, "b": 0.3, "c": 0.2, "d": 0.1})
    history = [MixtureStart(0, shares)]
    mixed = MixedOrder(np.arange(rows) % 4, data.valid, ("a", "b", "c", "d"), batch, 0, history)

    def reading(rows_of: Callable[[int], np.ndarray]) -> Callable[[int], None]:
        def run(i: int) -> None:
            for step in range((i + 1) * steps, (i + 2) * steps):
                data.batch(rows_of(step))

        return run

    random = reading(lambda step: order[step * batch % (rows - batch) :][:batch])
    train, train_wall = (took * steps for took in training_step_seconds(batch))
    warm = common.race({"random": random, "mixed": reading(mixed.step_rows)}, bench.rounds)
    cold = []
    for i in range(bench.rounds):
        for path in large.glob("*.arrow"):  # drops the files' pages from the page cache
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        random(i + bench.rounds)
        cold.append(time.perf_counter() - begin)
    for case, name, times, base, target in (
        ("quickstart step, one thread", "", [train], train, None),
        ("reader, random rows", "reader", warm["random"], train, 50),
        ("reader, a mixture of 4 domains", "reader of 4 domains", warm["mixed"], train, 500),
        ("reader, random rows, cold files, wall time", "cold reader", cold, train_wall, 50),
    ):
        took = statistics.median(times)
        report.row(part="read", what=case, tokens_per_s=round(batch * BLOCK * steps / took))
        if target is not None:
            report.ratio(f"{name} / training step, tokens/s", base / took, at_least=target)
    process = psutil.Process()  # its resident memory includes mapped files
    before = peak = process.memory_info().rss
    for start in range(0, rows, 64):
        data.batch(order[start : start + 64])
        if start % 6400 == 0:
            peak = max(peak, process.memory_info().rss)
    size, grown = sum(info.bytes for info in data.manifest.shards), peak - before
    case = f"an epoch over {size >> 20} MiB of shards"
    report.row(part="read", what=case, grows_mb=round(grown / 2**20, 1))
    report.ratio("resident memory over an epoch / size of the shards", grown / size, at_most=0.25)


def training_step_seconds(batch: int) -> tuple[float, float]:
    """Return CPU and wall seconds of forward, backward and AdamW of the quickstart's model, on one thread."""
    from transformers import AutoConfig, AutoModelForCausalLM

    recipe = yaml.safe_load((common.REPO / "launch/recipes/quickstart-pretrain.yaml").read_text())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**recipe["model"]["architecture"]))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 1000, (batch, BLOCK))
    walls: list[float] = []

    def step(_: int) -> None:
        begin = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        walls.append(time.perf_counter() - begin)

    seconds = common.race({"step": step}, 3)["step"]
    return statistics.median(seconds), statistics.median(walls[1:])


def pack(bench: Bench) -> None:
    """Compare the empty slots of packed instruction rows with peers, on the same lengths."""
    report, ours = bench.report, "first-fit-decreasing (ours)"
    contestants: dict[str, Callable[[np.ndarray, int], int]] = {
        ours: lambda lengths, capacity: len(first_fit_decreasing(lengths, capacity)),
        "TRL bfd": trl_bins,
        "TRL bfd, default portions": functools.partial(trl_bins, portions=True),
        "LLaMA-Factory greedy knapsack": llama_factory_bins,
        "axolotl multipack": axolotl_bins,
    }
    uncut = instruction_lengths(bench)
    for capacity, limit in ((512, 0.02), (2048, 0.01)):
        lengths = np.minimum(uncut, capacity)
        waste = {}
        for name, contestant in contestants.items():
            try:
                contestant(lengths[:50], capacity)  # imports and compiles
                begin = time.process_time()
                bins = contestant(lengths, capacity)
                took = round(time.process_time() - begin, 3)
            except Exception as error:  # a peer that cannot run here
                report.note(f"skipped: {name} ({type(error).__name__}: {str(error)[:120]})")
                continue
            waste[name] = float(1 - lengths.sum() / (bins * capacity))
            part = f"pack {len(lengths):,} rows at {capacity}"
            report.row(part=part, what=name, bins=bins, waste=round(waste[name], 5), cpu_s=took)
        best = min((share for name, share in waste.items() if name != ours), default=None)
        report.ratio(f"waste at {capacity}", waste[ours], at_most=limit)
        value = None if best is None else waste[ours] / best
        report.ratio(f"waste at {capacity} / best peer's", value, at_most=1.05)


def instruction_lengths(bench: Bench) -> np.ndarray:
    """Return the token counts of Alpaca-GPT4 rows in the Alpaca format."""
    rows = json_lines("instruct/alpaca_gpt4/train.jsonl.zst") if bench.real else alpaca_rows(3000)
    facts = tokenizer_facts(bench.tokenizer)
    encoder = RowEncoder(EncodeSettings(bench.tokenizer, facts, "alpaca", 1 << 20, "drop", None))
    dialogues = [Conversation((Exchange(r["instruction"], r["output"], r["input"]),)) for r in rows]
    return encoder.conversations(dialogues).lengths


# --- peers that tokenise and pack, which raise ImportError if they cannot be installed ---------------------


def bare_encode_batch(texts: list[str], tokenizer: Path, portion: int = 256) -> int:
    """Run only the tokenizer on text in memory, and return the number of tokens."""
    encode = encoder(tokenizer).encode_batch
    portions = (texts[start : start + portion] for start in range(0, len(texts), portion))
    return sum(len(row.ids) for part in portions for row in encode(part, add_special_tokens=False))


def run_clm(file: Path, tokenizer_dir: Path, cache: Path) -> None:
    """Load, tokenise and group texts as the language-modelling example of Transformers does."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    rows = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(cache))

    def tokenize(batch: dict) -> dict:
        return tokenizer(batch["text"])

    def group(batch: dict) -> dict:
        joined = {key: list(chain(*batch[key])) for key in batch}
        total = len(joined["input_ids"]) // BLOCK * BLOCK
        cut = {k: [v[i : i + BLOCK] for i in range(0, total, BLOCK)] for k, v in joined.items()}
        return cut | {"labels": cut["input_ids"].copy()}

    rows.map(tokenize, batched=True, remove_columns=rows.column_names).map(group, batched=True)


def datatrove(folder: Path, tokenizer_dir: Path, out: Path) -> None:
    """Run datatrove's reader and tokenizer as one task in this process, without shuffling."""
    for package in ("loguru==0.7.3", "humanize==4.17.0", "orjson"):
        common.import_peer(package, package.partition("=")[0])
    executor, readers, tokens = (
        common.import_peer(DATATROVE, f"datatrove.{module}")
        for module in ("executor", "pipeline.readers", "pipeline.tokens")
    )
    common.import_peer("loguru==0.7.3", "loguru").logger.remove()
    reader = readers.JsonlReader(str(folder), glob_pattern="*.jsonl", text_key="text")
    options = {"shuffle_documents": False, "eos_token": "</s>", "batch_size": 1000}
    writer = tokens.DocumentTokenizer(str(out / "tokens"), str(tokenizer_dir / "tokenizer.json"), **options)
    settings = {"tasks": 1, "workers": 1, "logging_dir": str(out / "logs"), "skip_completed": False}
    executor.LocalPipelineExecutor(pipeline=[reader, writer], **settings).run()


def trl_bins(lengths: np.ndarray, capacity: int, portions: bool = False) -> int:
    """Pack by TRL's best-fit-decreasing, over all rows or in its default portions of 1,000 rows."""
    import datasets

    datasets.disable_progress_bars()
    pack_dataset = common.import_peer(TRL, "trl.data_utils").pack_dataset
    rows = datasets.Dataset.from_dict({"input_ids": [[1] * int(n) for n in lengths]})
    options = {} if portions else {"map_kwargs": {"batch_size": len(rows)}}
    return len(pack_dataset(rows, capacity, "bfd", **options))


def llama_factory_bins(lengths: np.ndarray, capacity: int) -> int:
    """Pack by LLaMA-Factory's greedy knapsack, from its source. The package would import its trainer."""
    package = Path(common.import_peer(LLAMA_FACTORY, "llamafactory").__path__[0])
    source = (package / "data/processor/processor_utils.py").read_text(encoding="utf-8")
    functions = source[source.index("def search_for_fit") : source.index("def infer_seqlen")]
    names: dict = {}
    exec("import bisect\n" + functions, names)
    return len(names["greedy_knapsack"](lengths.tolist(), capacity))


def axolotl_bins(lengths: np.ndarray, capacity: int) -> int:
    """Pack by axolotl's multipack sampler, which is first-fit-decreasing in groups, compiled by numba."""
    common.import_peer(LLVMLITE, "llvmlite")
    common.import_peer(NUMBA, "numba")
    logging.disable(logging.WARNING)
    module = common.import_peer(AXOLOTL, "axolotl.utils.samplers.multipack")
    options = {"group_size": 100_000, "bin_size": 200, "num_processes": 1, "safe_mode": True}
    return len(module.pack_parallel(lengths, capacity, **options))


PARTS = {"tokenise": tokenise, "scale": scale, "read": read, "pack": pack}


def main() -> int:
    args = common.parser(__doc__, parts=PARTS).parse_args()
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(Path(work), args.rounds, args.quick)
        for part in args.parts:
            PARTS[part](bench)
        return bench.report.finish(**vars(args))


if __name__ == "__main__":
    sys.exit(main())
