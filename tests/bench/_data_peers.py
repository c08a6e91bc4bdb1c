"""Other people's ways to tokenise and to pack, each as a function of the same input.

Peers are installed for the bench alone, see `common.import_peer`; one that cannot be had raises ImportError.
"""

from __future__ import annotations

import logging
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tests.bench import common

DATATROVE, TRL, LLAMA_FACTORY = "datatrove==0.10.1", "trl==1.16.0", "llamafactory==0.9.5"
AXOLOTL, NUMBA, LLVMLITE = "axolotl==0.19.0", "numba", "llvmlite"


def bare_encode_batch(texts: list[str], tokenizer: Tokenizer, portion: int = 256) -> int:
    """Only the tokenizer, on text that is in memory already."""
    portions = (texts[start : start + portion] for start in range(0, len(texts), portion))
    batches = (tokenizer.encode_batch(texts, add_special_tokens=False) for texts in portions)
    return sum(len(row.ids) for batch in batches for row in batch)


def run_clm(file: Path, tokenizer_dir: Path, block: int, cache: Path) -> int:
    """Load, map the tokenizer, map group_texts: as Transformers' language-modelling example does it."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    rows = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(cache))

    def tokenize(batch: dict) -> dict:
        return tokenizer(batch["text"])

    def group(batch: dict) -> dict:
        joined = {key: list(chain(*batch[key])) for key in batch}
        total = len(joined["input_ids"]) // block * block
        cut = {k: [v[i : i + block] for i in range(0, total, block)] for k, v in joined.items()}
        return cut | {"labels": cut["input_ids"].copy()}

    tokens = rows.map(tokenize, batched=True, remove_columns=rows.column_names)
    return len(tokens.map(group, batched=True)) * block


def datatrove(folder: Path, tokenizer_dir: Path, eos: str, out: Path, batch: int = 1000) -> None:
    """datatrove's reader and tokenizer, one task in this process, no shuffling."""
    for package in ("loguru==0.7.3", "humanize==4.17.0", "orjson"):
        common.import_peer(package, package.partition("=")[0])
    executor = common.import_peer(DATATROVE, "datatrove.executor")
    readers = common.import_peer(DATATROVE, "datatrove.pipeline.readers")
    tokens = common.import_peer(DATATROVE, "datatrove.pipeline.tokens")
    common.import_peer("loguru==0.7.3", "loguru").logger.remove()
    reader = readers.JsonlReader(str(folder), glob_pattern="*.jsonl", text_key="text")
    paths, options = (
        (out / "tokens", tokenizer_dir / "tokenizer.json"),
        {"eos_token": eos, "batch_size": batch},
    )
    writer = tokens.DocumentTokenizer(*map(str, paths), shuffle_documents=False, **options)
    settings = {"tasks": 1, "workers": 1, "logging_dir": str(out / "logs"), "skip_completed": False}
    executor.LocalPipelineExecutor(pipeline=[reader, writer], **settings).run()


def trl_bins(lengths: np.ndarray, capacity: int, portions: bool = False) -> int:
    """TRL's best-fit-decreasing, over all rows at once, or in its default portions of 1,000 rows."""
    import datasets

    datasets.disable_progress_bars()
    pack_dataset = common.import_peer(TRL, "trl.data_utils").pack_dataset
    rows = datasets.Dataset.from_dict({"input_ids": [[1] * int(n) for n in lengths]})
    return len(
        pack_dataset(rows, capacity, "bfd", **({} if portions else {"map_kwargs": {"batch_size": len(rows)}}))
    )


def llama_factory_bins(lengths: np.ndarray, capacity: int) -> int:
    """LLaMA-Factory's greedy knapsack; its module is read alone, the package would import its trainer."""
    package = Path(common.import_peer(LLAMA_FACTORY, "llamafactory").__path__[0])
    source = (package / "data/processor/processor_utils.py").read_text(encoding="utf-8")
    names: dict = {}
    exec(
        "import bisect\n" + source[source.index("def search_for_fit") : source.index("def infer_seqlen")],
        names,
    )
    return len(names["greedy_knapsack"](lengths.tolist(), capacity))


def axolotl_bins(lengths: np.ndarray, capacity: int) -> int:
    """axolotl's multipack sampler: first-fit-decreasing in groups, compiled by numba."""
    common.import_peer(LLVMLITE, "llvmlite")
    common.import_peer(NUMBA, "numba")
    logging.disable(logging.WARNING)
    module = common.import_peer(AXOLOTL, "axolotl.utils.samplers.multipack")
    options = {"group_size": 100_000, "bin_size": 200, "num_processes": 1, "safe_mode": True}
    return len(module.pack_parallel(lengths, capacity, **options))
