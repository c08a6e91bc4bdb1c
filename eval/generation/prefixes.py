"""Prefixes to continue: from a named corpus, a file, given texts, or none.

The lengths of a named corpus are those of Table 4 in the paper: prefixes in words of the text, continuations
in tokens of the model. The text after a prefix is the human continuation, which begins with its space.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from emo.common.errors import UserError, nearest

from ..results.rows import evenly_spaced, find_file, load_from_hub, read_texts

HEADING = re.compile(r"=.*=")  # a WikiText title


class Corpus(NamedTuple):
    """folders: directory names, of which the first that exists is used. hub: id and configuration."""

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
    """texts: the prefixes ("" begins a text). references: the human continuations, if there are any."""

    name: str
    texts: list[str]
    references: list[str] | None = None
    tokens: int | None = None  # the corpus's length of continuations
    words: int = 0  # words of every prefix. 0: full texts.
    short: int = 0  # texts left out because nothing follows their prefix


def from_texts(texts: list[str] | None) -> Prefixes:
    """Return prefixes from the command line, or a single empty one."""
    return Prefixes("given" if texts else "begin", texts or [""])


def from_file(path: Path, words: int = 0, limit: int | None = None) -> Prefixes:
    """Return prefixes from JSON lines with `text` or from plain lines, each maybe .zst.

    words: the first words of each text form the prefix, and the rest is the reference. 0: the full text.
    """
    return _cut(path.name.split(".")[0], read_texts(path), path, limit, words)


def from_corpus(name: str, data: str, split: str = "test", limit: int | None = None) -> Prefixes:
    """Return prefixes of a corpus of the paper, without its empty texts and titles.

    Args:
        name: A key of CORPORA.
        data: A directory with [*/]FOLDER/SPLIT.{jsonl,txt}[.zst], or `hub`.
        split: Train, validation or test.
        limit: Number of evenly spaced prefixes, or None for all.
    """
    if name not in CORPORA:
        raise UserError(f"--corpus {name!r} is not known. {nearest(name, CORPORA)}", code="option-value")
    corpus = CORPORA[name]
    if data == "hub":
        from datasets import load_dataset

        if corpus.hub is None:
            path = f"{corpus.folders[0]}/{split}.jsonl"
            raise UserError(
                f"corpus {name} is not on the hub. Set --data to a directory with {path}.", code="hub"
            )
        hub = corpus.hub
        where = f"{corpus.hub[0]} {split}"
        rows = load_from_hub(where, lambda: load_dataset(*hub, split=split)["text"])
        texts = [text.strip() for text in rows]
    else:
        stems = [f"{folder}/{split}" for folder in corpus.folders]
        file = find_file(f"corpus {name}", data, stems, (".jsonl", ".txt", ".jsonl.zst", ".txt.zst"))
        texts = read_texts(file)
        where = str(file)
    texts = [text for text in texts if not HEADING.fullmatch(text)]
    return _cut(name, texts, where, limit, corpus.words, corpus.tokens)


def _cut(
    name: str, texts: list[str], where: object, limit: int | None, words: int, tokens: int | None = None
) -> Prefixes:
    """Return at most `limit` of the texts, evenly spaced, cut after `words` words (0: not cut)."""
    from emo.data_prep.selection.similarity.grams import (
        end_of_words,  # loads NumPy, which --help does not need
    )

    texts = [text for text in texts if text]
    pairs = []
    for text in texts:
        end = end_of_words(text, words) if words else len(text)
        if not words or text[end:].strip():
            pairs.append((text[:end], text[end:]))
    if not pairs:
        raise UserError(
            f"{where} has no texts" + (f" of more than {words} words" if words else ""), code="no-text"
        )
    chosen = evenly_spaced(pairs, limit)
    references = [reference for _, reference in chosen] if words else None
    return Prefixes(name, [p for p, _ in chosen], references, tokens, words, len(texts) - len(pairs))
