"""Where continuations begin: a corpus by name, a file, given texts, or nothing at all; and files of rows.

Lengths of a named corpus are those of the paper's Table 4: the prefix in words of the text, the continuation
in tokens of the model. A prefix is cut out of the text as it is, and what follows it is the human
continuation, which begins with its space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from emo.common.errors import UserError, nearest, one_line
from emo.data_prep.sources.files import read_text

T = TypeVar("T")
HEADING = re.compile(r"=.*=")  # a WikiText line that is a title
HALF, ESCAPED_HALF = re.compile("[\ud800-\udfff]"), re.compile(r"\\u[dD][89a-fA-F]")


class Corpus(NamedTuple):
    """folders: names of its directory, the first that exists; hub: id, configuration, or None."""

    words: int
    tokens: int
    folders: tuple[str, ...]
    hub: tuple[str, str | None] | None = None


CORPORA = {
    f"wikitext{n}": Corpus(
        20, 80, (f"wikitext-{n}-raw-v1", f"wikitext-{n}-v1"), ("Salesforce/wikitext", f"wikitext-{n}-raw-v1")
    )
    for n in (2, 103)
} | {
    "webtext": Corpus(20, 80, ("webtext", "webtext-short")),
    "ptb": Corpus(5, 25, ("ptb",)),
    "writingprompts": Corpus(35, 80, ("writingprompts",)),
    "ag_news": Corpus(10, 30, ("ag_news",), ("fancyzhx/ag_news", None)),
}


class Prefixes(NamedTuple):
    """texts: what is continued ("" begins a text); references: how a human went on, or None without one."""

    name: str
    texts: list[str]
    references: list[str] | None = None
    tokens: int | None = None  # the corpus's own length of continuations
    words: int = 0  # words of every prefix; 0: whole texts
    short: int = 0  # texts left out because nothing follows their prefix


def from_texts(texts: list[str] | None) -> Prefixes:
    """Return texts from the command line, or one empty one."""
    return Prefixes("given" if texts else "begin", texts or [""])


def from_file(path: Path, words: int = 0, limit: int | None = None) -> Prefixes:
    """Return prefixes from JSON lines with `text` or from plain lines, either maybe .zst.

    words: so many of every text are its prefix, the rest is the reference; 0: the whole text is the prefix.
    """
    return _prefixes(path.name.split(".")[0], read_texts(path), path, limit, words)


def from_corpus(name: str, data: str, split: str = "test", limit: int | None = None) -> Prefixes:
    """Return prefixes of a corpus of the paper, from DATA/[*/]FOLDER/SPLIT.{jsonl,txt}[.zst] or `hub`.

    Empty texts and titles are left out.
    """
    if name not in CORPORA:
        raise UserError(f"--corpus {name!r} is not known; {nearest(name, CORPORA)}")
    corpus = CORPORA[name]
    if data == "hub":
        from datasets import load_dataset

        if corpus.hub is None:
            raise UserError(
                f"corpus {name} is not on the hub; give --data DIR with {corpus.folders[0]}/{split}.jsonl"
            )
        hub, where = corpus.hub, f"{corpus.hub[0]} {split}"
        texts = [text.strip() for text in from_hub(where, lambda: load_dataset(*hub, split=split)["text"])]
    else:
        stems = [f"{folder}/{split}" for folder in corpus.folders]
        path = find_file(f"corpus {name}", data, stems, (".jsonl", ".txt", ".jsonl.zst", ".txt.zst"))
        texts, where = read_texts(path), str(path)
    texts = [text for text in texts if not HEADING.fullmatch(text)]
    return _prefixes(name, texts, where, limit, corpus.words, corpus.tokens)


def _prefixes(
    name: str, texts: list[str], where: object, limit: int | None, words: int, tokens: int | None = None
) -> Prefixes:
    """Return at most `limit` of the texts, evenly spaced, cut after `words` words (0: not at all)."""
    from emo.data_prep.selection.grams import (
        end_of_words,  # loads NumPy, which commands need not do to answer --help
    )

    texts, pairs = [text for text in texts if text], []
    for text in texts:
        end = end_of_words(text, words) if words else len(text)
        if not words or text[end:].strip():
            pairs.append((text[:end], text[end:]))
    if not pairs:
        raise UserError(f"{where} has no texts" + (f" of more than {words} words" if words else ""))
    chosen = evenly(pairs, limit)
    references = [reference for _, reference in chosen] if words else None
    return Prefixes(name, [p for p, _ in chosen], references, tokens, words, len(texts) - len(pairs))


def evenly(rows: Sequence[T], limit: int | None) -> list[T]:
    """Return at most `limit` of the rows, evenly spaced."""
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit} must be at least 1")
    count = len(rows) if limit is None else min(limit, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def from_hub(name: str, load: Callable[[], T]) -> T:
    """Return what `load` gets from the hub; UserError where that fails."""
    try:
        return load()
    except Exception as error:  # errors come in many kinds: no network, no such id, no such split
        raise UserError(
            f"cannot load {name} from the hub ({one_line(error, 200)}); give --data DIR"
        ) from None


def find_file(title: str, data: str, stems: Iterable[str], endings: Iterable[str]) -> Path:
    """Return the first of the files DATA/[*/]STEM.ENDING that exists; title: what a UserError calls it."""
    folders = (Path(data), *sorted(Path(data).glob("*")))
    paths = (folder / f"{stem}{ending}" for stem in stems for folder in folders for ending in endings)
    if path := next(filter(Path.is_file, paths), None):
        return path
    raise UserError(f"{title}: no {' or '.join(stems)} ({', '.join(endings)}) under --data {data}")


class Row(dict[str, Any]):
    """The fields of a row of a file; source: its file and number, for errors."""

    source = ""

    def text(self, *names: str) -> str:
        """Return the text of the first field in `names` that the row has; UserError where it has none."""
        for name in names:
            if isinstance(self.get(name), str):
                return self[name]
        raise UserError(f"{self.source}: no text in {' or '.join(names)}; its fields: {', '.join(self)}")


def read_rows(path: Path) -> list[Row]:
    """Return the objects of a JSON array or JSON lines (maybe .zst), at least one.

    UserError when the file is cut off, or holds others. Halves of characters, which no file can hold, are
    replaced one for one: lengths count.
    """
    text = read_text(path).removeprefix("\ufeff")  # the mark that some programs begin a file with
    is_array = text.lstrip().startswith("[")
    values: list[Any] = []
    for number, part in enumerate([text] if is_array else text.split("\n"), start=1):
        if not part.strip():
            continue
        try:
            value = json.loads(part)
            if ESCAPED_HALF.search(part):
                value = json.loads(HALF.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
        except (ValueError, RecursionError) as error:
            source = path if is_array else f"{path} line {number}"
            reason = getattr(error, "msg", type(error).__name__)
            raise UserError(
                f"{source} is cut off or not JSON ({reason}); is the file half-written?", code="not-json"
            ) from None
        values += value if is_array else [value]
    if not values or not all(isinstance(value, dict) for value in values):
        raise UserError(f"{path} must hold rows, each an object with fields", code="not-an-object")
    rows = [Row(value) for value in values]
    for number, row in enumerate(rows, start=1):
        row.source = f"{path} row {number}"
    return rows


def read_texts(path: Path, field: str = "text") -> list[str]:
    """Return the stripped texts of a file (maybe .zst): `field` of JSON rows (.jsonl, .json), or lines."""
    if path.name.removesuffix(".zst").endswith((".jsonl", ".json")):
        return [row.text(field).strip() for row in read_rows(path)]
    return [line.strip() for line in read_text(path).split("\n")]
