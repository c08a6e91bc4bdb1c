"""Where continuations begin: a corpus by name, a file, given texts, or nothing at all.

Lengths of a named corpus are those of the paper's Table 4: the prefix in words of the text, the continuation
in tokens of the model. A prefix is cut out of the text as it is, and what follows it is the human
continuation, which begins with its space.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from emo.common.errors import UserError, nearest, one_line
from emo.common.untrusted import parse_json
from emo.data_prep.inputs import read_text
from emo.eval import store

HEADING = re.compile(r"=.*=")  # a WikiText line that is a title


class Corpus(NamedTuple):
    """folders: names of its directory, the first that exists; hub: id, configuration, or None."""

    words: int
    tokens: int
    folders: tuple[str, ...]
    hub: tuple[str, str | None] | None = None


WIKITEXT = "Salesforce/wikitext"
CORPORA = {
    "wikitext2": Corpus(20, 80, ("wikitext-2-raw-v1", "wikitext-2-v1"), (WIKITEXT, "wikitext-2-raw-v1")),
    "wikitext103": Corpus(
        20, 80, ("wikitext-103-raw-v1", "wikitext-103-v1"), (WIKITEXT, "wikitext-103-raw-v1")
    ),
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

    @property
    def digest(self) -> str:
        return store.digest([self.texts, self.references])


def given(texts: list[str] | None) -> Prefixes:
    """Texts from the command line, or one empty one."""
    return Prefixes("given" if texts else "begin", texts or [""], None)


def from_file(path: Path, words: int = 0, limit: int | None = None) -> Prefixes:
    """Prefixes from JSON lines with `text` or from plain lines, either maybe .zst.

    words: so many of every text are its prefix, the rest is the reference; 0: the whole text is the prefix.
    """
    name = path.name.split(".")[0]
    texts = [t for t in read_texts(path) if t]
    if not words:
        return _limited(Prefixes(name, texts, None), limit, str(path))
    return _cut(name, texts, words, None, limit, str(path))


def from_corpus(name: str, data: str, split: str = "test", limit: int | None = None) -> Prefixes:
    """Prefixes of a corpus of the paper, from DATA/[*/]FOLDER/SPLIT.{jsonl,txt}[.zst] or `hub`."""
    texts, where = corpus_texts(name, data, split)
    corpus = CORPORA[name]
    return _cut(name, texts, corpus.words, corpus.tokens, limit, where)


def corpus_texts(name: str, data: str, split: str) -> tuple[list[str], str]:
    """The texts of a corpus of the paper, without empty ones and titles, and where they are from."""
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
    elif not Path(data).is_dir():
        raise UserError(f"--data {data} is not a directory")
    else:
        candidates = (
            directory / f"{split}{ending}"
            for folder in corpus.folders
            for directory in (Path(data) / folder, *sorted(Path(data).glob(f"*/{folder}")))
            for ending in (".jsonl", ".txt", ".jsonl.zst", ".txt.zst")
        )
        path = next(filter(Path.is_file, candidates), None)
        if path is None:
            folders = " or ".join(corpus.folders)
            raise UserError(f"corpus {name}: no {folders} with {split}.jsonl or .txt (or .zst) under {data}")
        texts, where = list(read_texts(path)), str(path)
    return [t for t in texts if t and not HEADING.fullmatch(t)], where


def read_texts(path: Path, field: str = "text") -> Iterator[str]:
    """Yield the stripped texts of a file (maybe .zst): `field` of JSON lines (.jsonl, .json), or lines."""
    for number, line in enumerate(content(path).split("\n"), start=1):
        if not path.name.removesuffix(".zst").endswith((".jsonl", ".json")):
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


def content(path: Path) -> str:
    """The text of a file, maybe .zst; UserError when it cannot be had."""
    if not path.is_file():
        raise UserError(f"{path} is not a file")
    return read_text(path)


def split_words(text: str, words: int) -> tuple[str, str]:
    """A text after its first `words` words: (prefix, rest); the rest keeps its leading space."""
    ends = [match.end() for _, match in zip(range(words), re.finditer(r"\S+", text), strict=False)]
    end = ends[-1] if len(ends) == words else len(text)
    return text[:end], text[end:]


def _cut(
    name: str, texts: list[str], words: int, tokens: int | None, limit: int | None, where: str
) -> Prefixes:
    pairs = [split_words(text, words) for text in texts]
    long = [pair for pair in pairs if pair[1].strip()]
    if texts and not long:
        raise UserError(f"{where}: none of {len(texts)} texts has more than {words} words")
    prefixes, references = [p for p, _ in long], [r for _, r in long]
    result = Prefixes(name, prefixes, references, tokens, words, len(pairs) - len(long))
    return _limited(result, limit, where)


def _limited(prefixes: Prefixes, limit: int | None, where: str) -> Prefixes:
    """At most `limit` of the prefixes, evenly spaced."""
    if not prefixes.texts:
        raise UserError(f"{where} has no texts")
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit} must be at least 1")
    n = len(prefixes.texts)
    if limit is None or limit >= n:
        return prefixes
    chosen = [i * n // limit for i in range(limit)]
    references = None if prefixes.references is None else [prefixes.references[i] for i in chosen]
    return replace(prefixes, texts=[prefixes.texts[i] for i in chosen], references=references)
