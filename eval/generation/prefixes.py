"""Where continuations begin: a corpus by name, a file, given texts, or nothing at all.

Lengths of a named corpus are those of the paper's Table 4: the prefix in words of the text, the continuation
in tokens of the model. A prefix is cut out of the text as it is, and what follows it is the human
continuation, which begins with its space.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from emo.common.errors import UserError, nearest, one_line
from emo.common.untrusted import parse_json
from emo.data_prep.inputs import read_text

HEADING = re.compile(r"=.*=")  # a WikiText line that is a title


class Corpus(NamedTuple):
    """folders: names of its directory, the first that exists; hub: id, configuration, or None."""

    words: int
    tokens: int
    folders: tuple[str, ...]
    hub: tuple[str, str | None] | None = None


def _wikitext(name: str) -> Corpus:
    return Corpus(20, 80, (f"{name}-raw-v1", f"{name}-v1"), ("Salesforce/wikitext", f"{name}-raw-v1"))


CORPORA = {
    "wikitext2": _wikitext("wikitext-2"),
    "wikitext103": _wikitext("wikitext-103"),
    "webtext": Corpus(20, 80, ("webtext", "webtext-short")),
    "ptb": Corpus(5, 25, ("ptb",)),
    "writingprompts": Corpus(35, 80, ("writingprompts",)),
    "ag_news": Corpus(10, 30, ("ag_news",), ("fancyzhx/ag_news", None)),
}


@dataclass(frozen=True)
class Prefixes:
    """texts: what is continued ("" begins a text); references: how a human went on, or None without one."""

    name: str
    texts: list[str]
    references: list[str] | None
    tokens: int | None = None  # the corpus's own length of continuations
    words: int = 0  # words of every prefix; 0: whole texts
    short: int = 0  # texts left out because nothing follows their prefix


def given(texts: list[str] | None) -> Prefixes:
    """Return texts from the command line, or one empty one."""
    return Prefixes("given" if texts else "begin", texts or [""], None)


def from_file(path: Path, words: int = 0, limit: int | None = None) -> Prefixes:
    """Return prefixes from JSON lines with `text` or from plain lines, either maybe .zst.

    words: so many of every text are its prefix, the rest is the reference; 0: the whole text is the prefix.
    """
    texts = [text for text in read_texts(path) if text]
    return _prefixes(path.name.split(".")[0], texts, str(path), limit, words)


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
            needed = f"{corpus.folders[0]}/{split}.jsonl"
            raise UserError(f"corpus {name} is not on the hub; give --data DIRECTORY with {needed}")
        where = f"{corpus.hub[0]} {split}"
        try:
            texts = [text.strip() for text in load_dataset(*corpus.hub, split=split)["text"]]
        except Exception as error:  # datasets raises a dozen kinds: no network, no such id, no such split
            cause = one_line(error, 200)
            raise UserError(f"cannot load {where} from the hub ({cause}); give --data DIRECTORY") from None
    else:
        stems = [f"{folder}/{split}" for folder in corpus.folders]
        path = find_file(data, stems, (".jsonl", ".txt", ".jsonl.zst", ".txt.zst"))
        if path is None:
            folders = " or ".join(corpus.folders)
            raise UserError(f"corpus {name}: no {folders} with {split}.jsonl or .txt (or .zst) under {data}")
        texts, where = list(read_texts(path)), str(path)
    texts = [text for text in texts if text and not HEADING.fullmatch(text)]
    return _prefixes(name, texts, where, limit, corpus.words, corpus.tokens)


def find_file(data: str, stems: Iterable[str], endings: Iterable[str]) -> Path | None:
    """Return the first of the files DATA/[*/]STEM.ENDING that exists."""
    folders = (Path(data), *sorted(Path(data).glob("*")))
    paths = (folder / f"{stem}{ending}" for stem in stems for folder in folders for ending in endings)
    return next(filter(Path.is_file, paths), None)


def read_texts(path: Path, field: str = "text") -> Iterator[str]:
    """Yield the stripped texts of a file (maybe .zst): `field` of JSON lines (.jsonl, .json), or lines."""
    is_json = path.name.removesuffix(".zst").endswith((".jsonl", ".json"))
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not is_json:
            yield line.strip()
        elif line.strip():
            try:
                row: Any = parse_json(line)
            except ValueError as error:
                reason = getattr(error, "msg", one_line(error, 120))
                raise UserError(f"{path} line {number} is not JSON: {reason}") from None
            if not isinstance(row, dict) or not isinstance(row.get(field), str):
                hint = nearest(field, row) if isinstance(row, dict) else "it is not an object"
                raise UserError(f"{path} line {number}: no text in {field!r}; {hint}")
            yield row[field].strip()


def evenly(count: int, limit: int | None) -> list[int]:
    """Return at most `limit` of the numbers below `count`, evenly spaced."""
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit} must be at least 1")
    if limit is None or limit >= count:
        return list(range(count))
    return [i * count // limit for i in range(limit)]


def _prefixes(
    name: str, texts: list[str], where: str, limit: int | None, words: int, tokens: int | None = None
) -> Prefixes:
    """Return at most `limit` of the texts, evenly spaced, cut after `words` words (0: not at all)."""
    if not texts:
        raise UserError(f"{where} has no texts")
    pairs = []
    for text in texts:
        prefix = re.match(rf"(?:\s*+\S++){{{words}}}", text) if words else None
        end = prefix.end() if prefix else len(text)
        if not words or text[end:].strip():
            pairs.append((text[:end], text[end:]))
    if not pairs:
        raise UserError(f"{where}: none of {len(texts)} texts has more than {words} words")
    chosen = [pairs[i] for i in evenly(len(pairs), limit)]
    references = [reference for _, reference in chosen] if words else None
    return Prefixes(name, [p for p, _ in chosen], references, tokens, words, len(texts) - len(pairs))
