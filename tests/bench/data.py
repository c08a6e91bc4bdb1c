"""Data preparation beside its peers: tokenising, scaling, reading, packing.

    python -m tests.bench.data [--rounds 5] [--parts tokenise scale read pack real] [--quick]

Everybody gets the same text and the same tokenizer (LLaMA's where the real data are at hand). Tokenising is
compared by CPU seconds on one thread; `prepare` there does all of its work: reading, checking, removing
duplicates, packing, hashing, writing. Scaling is wall time, so it needs a machine with nothing else to do.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import torch
import yaml

from emo.common.recipe import parse_section
from emo.data_prep.config import DataConfig
from emo.data_prep.inputs import open_text
from emo.data_prep.pack import first_fit_decreasing
from emo.data_prep.prepare import prepare
from emo.data_prep.templates import Conversation, Exchange
from emo.data_prep.tokenizer import save_tokenizer
from emo.data_prep.words import encoder
from emo.pipeline.config import MixtureConfig
from emo.pipeline.order import Holding, MixedOrder
from tests.bench import _data_peers as peers
from tests.bench import _data_real, common
from tests.helpers.corpus import alpaca_rows, random_dataset, tiny_tokenizer, write_jsonl
from tests.helpers.corpus import texts as made_up

DATA = Path(os.environ.get("SHARED_DATA", common.REPO.parent / "shared" / "data"))
BLOCK = 256
PARTS = ("tokenise", "scale", "read", "pack", "real")


class Bench:
    """The text, the tokenizer and a place to work in."""

    def __init__(self, work: Path, rounds: int, quick: bool) -> None:
        self.work, self.rounds, self.quick = work, rounds, quick
        self.report = common.Report("data")
        self.tokenizer = work / "tokenizer"
        real = (DATA / "tokenizers/llama").is_dir()
        if not real:
            self.report.note(f"no real data at {DATA} (set SHARED_DATA): made-up text, small tokenizer")
        save_tokenizer(DATA / "tokenizers/llama" if real else tiny_tokenizer(), None, self.tokenizer)
        self.texts = real_texts() if real else made_up(20_000, sentences=40)
        if quick:
            self.texts = self.texts[:60]
        self.real = real

    def folder(self, name: str, copies: int = 1) -> Path:
        """A directory with the text as JSON lines, `copies` times, each copy's rows made different."""
        place = self.work / name
        rows = ({"text": f"{t} {i}" if i else t} for i in range(copies) for t in self.texts)
        write_jsonl(place / "text.jsonl", rows)
        return place

    def config(self, folder: Path, out: Path, **data: Any) -> DataConfig:
        common_keys = {
            "dir": str(out),
            "root": str(folder),
            "tokenizer": str(self.tokenizer),
            "sequence_len": BLOCK,
        }
        return parse_section(
            DataConfig, common_keys | {"shards": 2, "sources": [{"files": "text.jsonl"}]} | data, "data"
        )


def real_texts() -> list[str]:
    """20 MB of web pages and WikiText, whose paragraphs are joined to pages."""
    pages = []
    for name in ("openwebtext-sample", "c4-demo"):
        with open_text(DATA / "lm" / name / "train.jsonl.zst") as stream:
            pages += [json.loads(line)["text"] for line in stream.read().splitlines()]
    for name in ("wikitext-2-v1/train", "wikitext-103-v1/train_head", "wikipedia-demo/train"):
        with open_text(DATA / "lm" / f"{name}.txt.zst") as stream:
            lines = [line for line in stream.read().decode().split("\n") if line.strip()]
        pages += ["\n".join(lines[i : i + 8]) for i in range(0, len(lines), 8)]
    return pages


def quiet(_: str) -> None:
    """prepare's words are not wanted here."""


def tokenise(bench: Bench) -> None:
    """CPU seconds of the whole preparation against the bare tokenizer, run_clm's recipe and datatrove."""
    report = bench.report
    folder = bench.folder("text")
    bare = encoder(bench.tokenizer)
    tokens = peers.bare_encode_batch(bench.texts, bare)

    def fresh(name: str) -> Path:
        place = bench.work / name
        shutil.rmtree(place, ignore_errors=True)
        return place

    def ours(**data: Any) -> Callable[[int], None]:
        def run(_: int) -> None:
            out = fresh("ours")
            prepare(bench.config(folder, out, **data), (0, 1), 1, False, False, quiet)

        return run

    contestants: dict[str, Callable[[int], object]] = {
        "bare encode_batch": lambda _: peers.bare_encode_batch(bench.texts, bare),
        "prepare": ours(),
        "prepare, near-duplicates": ours(dedup="near"),
        "run_clm recipe": lambda _: peers.run_clm(
            folder / "text.jsonl", bench.tokenizer, BLOCK, fresh("run_clm")
        ),
        "datatrove": lambda _: peers.datatrove(folder, bench.tokenizer, "</s>", fresh("datatrove")),
    }
    if bench.real:
        nlu = str(DATA / "nlu")
        contestants["prepare, contamination check"] = ours(contamination=nlu)
    try:
        peers.datatrove(folder, bench.tokenizer, "</s>", fresh("datatrove"))
    except ImportError as error:
        report.note(f"skipped: datatrove ({error})")
        del contestants["datatrove"]
    times = common.race(contestants, bench.rounds)
    for name, own in times.items():
        report.row(part="tokenise", what=name, tokens_per_cpu_s=round(tokens / statistics.median(own)))
    report.ratio(
        "prepare / bare encode_batch, tokens/s",
        common.ratio(times, "bare encode_batch", "prepare"),
        at_least=1.6,
    )
    report.ratio(
        "prepare / run_clm recipe, tokens/s", common.ratio(times, "run_clm recipe", "prepare"), at_least=2.2
    )
    if "datatrove" in times:
        report.ratio(
            "prepare / datatrove, tokens/s", common.ratio(times, "datatrove", "prepare"), at_least=1.55
        )
    for name in set(times) - {"bare encode_batch", "run_clm recipe", "datatrove", "prepare"}:
        report.ratio(f"{name} / prepare, CPU time", common.ratio(times, name, "prepare"))


def scale(bench: Bench) -> None:
    """Wall seconds with one and with two workers, in turn; the command is the user's."""
    import subprocess

    report = bench.report
    folder = bench.folder("much", copies=1 if bench.quick else 20)
    times: dict[int, list[float]] = {1: [], 2: []}
    for i in range(bench.rounds):
        for workers in ((1, 2), (2, 1))[i % 2]:
            out = bench.work / "scaled"
            shutil.rmtree(out, ignore_errors=True)
            recipe = bench.work / "scale.yaml"
            config = bench.config(folder, out).model_dump(mode="json")
            recipe.write_text(yaml.safe_dump({"data": config}))
            command = [sys.executable, "-m", "emo", "prepare", str(recipe), "--workers", str(workers)]
            begin = time.perf_counter()
            subprocess.run(command, cwd=common.REPO, check=True, capture_output=True)
            times[workers].append(time.perf_counter() - begin)
    for workers, own in times.items():
        report.row(part="scale", what=f"{workers} workers", wall_s=round(statistics.median(own), 2))
    gain = statistics.median(a / b for a, b in zip(times[1], times[2], strict=True))
    control = statistics.median(bare_scaling(bench) for _ in range(bench.rounds))
    report.row(part="scale", what="the bare tokenizer in 1 -> 2 processes gains", wall_s=round(control, 3))
    report.ratio("1 -> 2 workers, wall time", gain, at_least=1.75)
    report.ratio("1 -> 2 workers / what the machine gives the bare tokenizer", gain / control)


def bare_scaling(bench: Bench) -> float:
    """How much more two processes that only tokenise get done than one: what the machine itself allows."""
    context = multiprocessing.get_context("spawn")
    texts = bench.texts[: len(bench.texts) // 2]
    walls = []
    for count in (1, 2):
        with context.Pool(count) as pool:
            pool.starmap(_bare, [(bench.tokenizer, texts[:5])] * count, chunksize=1)  # imports and loads
            begin = time.perf_counter()
            pool.starmap(_bare, [(bench.tokenizer, texts)] * count, chunksize=1)
            walls.append(time.perf_counter() - begin)
    return 2 * walls[0] / walls[1]


_LOADED: dict[Path, Any] = {}


def _bare(tokenizer: Path, texts: list[str]) -> int:
    if tokenizer not in _LOADED:
        _LOADED[tokenizer] = encoder(tokenizer)
    return peers.bare_encode_batch(texts, _LOADED[tokenizer])


def read(bench: Bench) -> None:
    """The training reader against the quickstart's training step, from cold files, and its memory."""
    report = bench.report
    rows = 20_000 if bench.quick else 400_000
    data = random_dataset(bench.work / "large", rows, BLOCK)
    batch, steps = 16, 20 if bench.quick else 400
    order = np.random.default_rng(0).permutation(rows)

    def pick(start: int) -> None:
        for step in range(steps):
            at = (start + step * batch) % (rows - batch)
            data.batch(order[at : at + batch])

    shares = MixtureConfig(shares={"a": 0.4, "b": 0.3, "c": 0.2, "d": 0.1})
    mixed = MixedOrder(np.arange(rows) % 4, data.valid, ("a", "b", "c", "d"), batch, 0, [Holding(0, shares)])

    def pick_mixed(start: int) -> None:
        for step in range(steps):
            data.batch(mixed.step_rows(start + step))

    train_s = training_step_seconds(batch)
    warm = common.race({"read": lambda i: pick(i * steps * batch)}, bench.rounds)["read"]
    cold = []
    for i in range(bench.rounds):
        drop_from_cache(bench.work / "large")
        begin = time.perf_counter()
        pick((i + bench.rounds) * steps * batch)
        cold.append(time.perf_counter() - begin)
    of_domains = common.race({"read": lambda i: pick_mixed((i + 1) * steps)}, bench.rounds)["read"]
    tokens = batch * BLOCK * steps
    mixed_rate = tokens / statistics.median(of_domains)
    warm_rate, cold_rate = tokens / statistics.median(warm), tokens / statistics.median(cold)
    train_rate = batch * BLOCK / train_s
    report.row(part="read", what="quickstart step, one thread", tokens_per_s=round(train_rate))
    report.row(part="read", what="reader, random rows", tokens_per_s=round(warm_rate))
    report.row(part="read", what="reader, a mixture of 4 domains", tokens_per_s=round(mixed_rate))
    report.row(part="read", what="reader, random rows, cold files", tokens_per_s=round(cold_rate))
    report.ratio("reader / training step, tokens/s", warm_rate / train_rate, at_least=50)
    report.ratio("reader of 4 domains / training step, tokens/s", mixed_rate / train_rate, at_least=500)
    report.ratio("cold reader / training step, tokens/s", cold_rate / train_rate, at_least=50)

    before = resident_mb()
    peak = before
    for start in range(0, rows, 64):
        data.batch(order[start : start + 64])
        if start % 6400 == 0:
            peak = max(peak, resident_mb())
    size = sum(info.bytes for info in data.manifest.shards) / 2**20
    report.row(part="read", what=f"an epoch over {size:.0f} MiB of shards", grows_mb=round(peak - before, 1))
    report.ratio("resident memory over an epoch / size of the shards", (peak - before) / size, at_most=0.25)


def training_step_seconds(batch: int) -> float:
    """CPU seconds of forward, backward and AdamW of the quickstart's model, on one thread."""
    from transformers import AutoConfig, AutoModelForCausalLM

    recipe = yaml.safe_load((common.REPO / "launch/recipes/quickstart-pretrain.yaml").read_text())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**recipe["model"]["architecture"]))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 1000, (batch, BLOCK))

    def step(_: int) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return statistics.median(common.race({"step": step}, 3)["step"])


def drop_from_cache(place: Path) -> None:
    """Ask the kernel to forget the files' pages."""
    for path in place.glob("*.arrow"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_mb() -> float:
    """Resident memory of this process, mapped files included."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def pack(bench: Bench) -> None:
    """Waste of the bins on instruction rows, ours and the peers', on the same lengths."""
    report = bench.report
    for capacity, limit in ((512, 0.02), (2048, 0.01)):
        lengths = np.minimum(instruction_lengths(bench), capacity)
        begin = time.process_time()
        bins = {"first-fit-decreasing (ours)": len(first_fit_decreasing(lengths, capacity))}
        seconds = {"first-fit-decreasing (ours)": time.process_time() - begin}
        contestants = {
            "TRL bfd": peers.trl_bins,
            "TRL bfd, default portions": peers.trl_default_bins,
            "LLaMA-Factory greedy knapsack": peers.llama_factory_bins,
            "axolotl multipack": peers.axolotl_bins,
        }
        for name, contestant in contestants.items():
            try:
                contestant(lengths[:50], capacity)  # imports and compiles
                begin = time.process_time()
                bins[name] = contestant(lengths, capacity)
                seconds[name] = time.process_time() - begin
            except Exception as error:  # a peer that cannot run here
                report.note(f"skipped: {name} ({type(error).__name__}: {str(error)[:120]})")
        waste = {name: 1 - lengths.sum() / (count * capacity) for name, count in bins.items()}
        for name, count in bins.items():
            report.row(
                part=f"pack {len(lengths):,} rows at {capacity}",
                what=name,
                bins=count,
                waste=round(float(waste[name]), 5),
                cpu_s=round(seconds[name], 3),
            )
        own = "first-fit-decreasing (ours)"
        best = min(share for name, share in waste.items() if name != own) if len(waste) > 1 else waste[own]
        report.ratio(f"waste at {capacity}", float(waste[own]), at_most=limit)
        report.ratio(f"waste at {capacity} / best peer's", float(waste[own] / best), at_most=1.05)


def instruction_lengths(bench: Bench) -> np.ndarray:
    """Tokens of Alpaca-GPT4 rows in the Alpaca format."""
    from emo.data_prep.encode import EncodeSettings, RowEncoder
    from emo.data_prep.tokenizer import tokenizer_facts

    rows = alpaca_rows(3000)
    if bench.real:
        with open_text(DATA / "instruct/alpaca_gpt4/train.jsonl.zst") as stream:
            rows = [json.loads(line) for line in stream.read().splitlines()]
    facts = tokenizer_facts(bench.tokenizer)
    made = RowEncoder(EncodeSettings(bench.tokenizer, facts, "alpaca", 1 << 20, "drop", None))
    dialogues = [Conversation((Exchange(r["instruction"], r["output"], r["input"]),)) for r in rows]
    return made.conversations(dialogues).lengths


def real(bench: Bench) -> None:
    """All real sets, prepared with near-duplicate removal and the overlap check."""
    if not bench.real:
        bench.report.note("skipped: real sets, there are none here")
        return
    _data_real.prepare_all(DATA, bench.work, 1, bench.report)


def main() -> int:
    """Run the chosen parts; exit code 1 when a target is missed."""
    parser = common.parser(__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:-1])
    args = parser.parse_args()
    common.settle()
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(Path(work), args.rounds, args.quick)
        for part in args.parts:
            runs = {"tokenise": tokenise, "scale": scale, "read": read, "pack": pack, "real": real}
            runs[part](bench)
        return bench.report.finish(rounds=args.rounds, parts=list(args.parts), quick=args.quick)


if __name__ == "__main__":
    sys.exit(main())
