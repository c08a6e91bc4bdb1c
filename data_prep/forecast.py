"""`plan --data`: predict the duration and the memory of preparation from a sample of the sources."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from emo.common.errors import UserError, one_line
from emo.common.io.files import claim_directory, sha256, write_text
from emo.common.io.mirror import refresh
from emo.common.text import counted

from .checks import planned_inputs
from .config import MARKER, SETTINGS, TRAIN, DataConfig
from .encoding.tokenizer import read_tokenizer, tokenizer_facts
from .prepare import NOTE, Preparation, Say
from .selection.arrow import numbers_of
from .selection.plan import ShardPart
from .selection.row_units import UNIT_ROWS
from .selection.scan import divide_into_units, scanner
from .shards.cost_table import Record
from .shards.costs import FILES, FORECAST, MIB, Costs, peak_memory, read_costs
from .shards.encode import Encoded, encoding
from .shards.format import token_dtype
from .shards.reencode import PlainEncoder, ShardCheck
from .shards.write import TOKENIZER, write_shard
from .sources.reader import Piece, SourceReader

PLACES = 16  # from which the sample comes, besides the beginnings of files
PIECES = 2  # at each place
# Of the selection, by data.dedup: CPU seconds per row, and bytes of memory per row of a unit.
SELECTION = {"none": (0.3e-6, 150), "exact": (0.5e-6, 220), "near": (3.5e-6, 480)}

T = TypeVar("T")
U = TypeVar("U")


class Sample(NamedTuple):
    """The costs of a part of the sources."""

    stored: float  # bytes
    rows: int
    tokens: int
    scanning: float  # CPU seconds of workers
    encoding: float
    writing: float  # CPU seconds of the main process


def print_forecast(config: DataConfig, machines: int, workers: int, say: Say) -> None:
    """Print the predicted costs of preparation, next to the measured ones if the data are prepared.

    The prediction is stored in the data directory, for reports. Raises UserError if they cannot be predicted.

    Args:
        config: The data section of the recipe.
        machines: Number of jobs, each on its own machine.
        workers: Number of processes of each job.
        say: Prints a line for the user.
    """
    if config.tokenizer is None:
        raise UserError(
            "plan --data cannot train a tokenizer. Set data.train_tokenizer=null and data.tokenizer to a "
            "tokenizer with about as many pieces",
            code="forecast",
        )
    inputs = planned_inputs(config)
    total = sum(reader.size for reader in inputs)
    if not total:
        problem = "no source of the recipe has a known size, so its costs are unknown"
        raise UserError(f"{problem}. Download the data and name the files", code="forecast")
    with tempfile.TemporaryDirectory() as directory:
        job = Preparation(config.model_copy(update={"dir": Path(directory)}), 1, lambda line: None)
        job.set_up()
        settings = sha256(job.new / SETTINGS)
        sample = _measure(job, inputs, _take_pieces(inputs, total))
    rows = sample.rows * total / sample.stored
    read = f"{sample.stored / MIB:,.1f} of {total / MIB:,.1f} MiB"
    say(f"sample: {read}; the sources have about {rows:,.0f} rows")
    if unknown := sum(not reader.size for reader in inputs):
        say(f"note: {counted(unknown, 'input')} of unknown size are left out")
    if config.limit_rows or config.limit_tokens or any(reader.source.limit for reader in inputs):
        say("note: the recipe limits the data, so preparation takes less")
    processes = f"{workers} processes each, without the seconds that they take to start"
    say(f"on {counted(machines, 'machine')} with {processes}:")
    refresh(config.dir, [FILES, SETTINGS])
    prepared = config.dir / SETTINGS
    differs = prepared.is_file() and sha256(prepared) != settings
    measured = None if differs else read_costs(config.dir)
    costs = _predict(config, inputs, sample, machines, workers)
    for name, text in costs.shown().items():
        say(f"  {name}: {text}" + ("" if measured is None else f", measured {measured.shown()[name]}"))
    if differs:
        say(f"note: {config.dir} is prepared with other settings, so this forecast is not stored")
        return
    record = Record(costs, machines, round(rows), round(sample.tokens * total / sample.stored))
    try:
        claim_directory(config.dir, MARKER, NOTE, "data.dir")
        write_text(config.dir / FORECAST, record.as_json(settings))
    except (OSError, UserError) as error:
        say(f"note: reports will not show this forecast, because {one_line(error)}")


def _take_pieces(inputs: list[SourceReader], total: int) -> list[tuple[int, Piece, float]]:
    """Return pieces from all over the sources, with the number of the input, and their stored bytes.

    total: stored bytes of all sources.
    """
    ends = np.cumsum([reader.size for reader in inputs])
    places: set[tuple[int, int]] = set()
    for place in (np.arange(PLACES) + 0.5) * total / PLACES:
        number = int(np.searchsorted(ends, place, side="right"))
        begin = int(place - ends[number]) + inputs[number].size if inputs[number].cuttable else 0
        places |= {(number, 0), (number, begin)}
    pieces = []
    read = [0] * len(inputs)  # end of the sample of each input so far
    for number, begin in sorted(places):
        if begin < read[number]:
            continue
        reader = inputs[number]
        following = reader.pieces(begin)  # keeps the file open: the position of a closed file is its end
        found = list(islice(following, PIECES if reader.cuttable else PIECES * PLACES // 2))
        if not found:
            continue
        # Compressed files are read ahead, so the stored bytes are divided by the lengths of the pieces.
        read[number] = reader.position() or reader.size
        stored = read[number] - begin
        length = sum(piece.extent.length for piece in found)
        pieces += [(number, piece, stored * piece.extent.length / length) for piece in found]
    if not pieces:
        raise UserError("no source of the recipe has rows, so its costs are unknown", code="forecast")
    return pieces if len(pieces) > PLACES else pieces * 2  # `_measure` counts the second half


def _measure(job: Preparation, inputs: list[SourceReader], pieces: list[tuple[int, Piece, float]]) -> Sample:
    """Return the costs of the second half of pieces. The first half fills caches."""
    config = job.config
    encode = job.encode_settings({"tokenizer": tokenizer_facts(job.new / TOKENIZER)._asdict()}, job.new)
    items = []
    for number, piece, _ in pieces:
        reader = inputs[number]
        items.append((number, piece, reader.spec, reader.source.weight, reader.split))
    scanned, scanning = _time(scanner(config, encode.chat), items)
    parts = []
    for (number, piece, *_), found in zip(items, scanned, strict=True):
        usable = numbers_of(found.rows["reason"]) == 0
        copies = np.where(usable, numbers_of(found.rows["copies"]), np.uint16(0))
        reader = inputs[number]
        domain = reader.source.domain_name
        if piece.payload is not None:
            parts.append(ShardPart(reader.name, piece.payload, reader.spec, found.check, copies, domain))
    encoded, encoding_seconds = _time(encoding(encode), parts)
    plain = PlainEncoder(read_tokenizer(job.new / TOKENIZER)[0], encode.tokenizer)
    directory = config.dir / TRAIN
    directory.mkdir()

    def write(later: list[Encoded]) -> None:
        dtype = token_dtype(encode.tokenizer.vocab_size)
        write_shard(directory, 0, config, dtype, later, ShardCheck(plain, config, encode.chat))

    _, writing = _time(write, [encoded[len(encoded) // 2 :]])
    half = len(pieces) // 2
    stored = sum(size for _, _, size in pieces[half:])
    rows = sum(found.rows.num_rows for found in scanned[half:])
    tokens = sum(int(part.lengths.sum()) for part in encoded[len(encoded) // 2 :])
    return Sample(stored, rows, tokens, scanning, encoding_seconds, writing)


def _time(function: Callable[[T], U], items: Sequence[T]) -> tuple[list[U], float]:
    """Return the results for all items, and the CPU seconds of the second half."""
    clock = 0.0
    results = []
    for number, item in enumerate(items):
        if number == len(items) // 2:
            clock = time.process_time()
        results.append(function(item))
    return results, time.process_time() - clock


def _predict(
    config: DataConfig, inputs: list[SourceReader], sample: Sample, machines: int, workers: int
) -> Costs:
    """Return the costs of the machine with the most work, from those of a sample."""
    total = sum(reader.size for reader in inputs)
    share = total / sample.stored
    rows = sample.rows * share
    seconds, unit = SELECTION[config.dedup]
    encoding_seconds, writing = sample.encoding * share, sample.writing * share
    # The main process writes what the workers encode. Without workers it does both.
    making = max(encoding_seconds / workers, writing) if workers > 1 else encoding_seconds + writing
    process = peak_memory(1)
    mine = -(-config.shards // machines) / config.shards  # part of the shards of the job that makes the most
    largest = max(unit.size for unit in divide_into_units(inputs)) / total  # no two jobs share a unit
    scanning = sample.scanning * share * max(largest, 1 / machines)
    selection = rows * seconds / min(machines, -(-rows // UNIT_ROWS))
    return Costs(
        reading=scanning / workers,
        selection=selection,
        shards=making * mine,
        cpu=scanning + selection + (encoding_seconds + writing) * mine,
        memory=process * (1 + workers * (workers > 1)) + min(rows, UNIT_ROWS) * unit,
        workers=workers,
    )
