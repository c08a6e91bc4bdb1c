"""emo generate | quality: sampled text, and how good it is."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from emo.common.errors import ExitCode, UserError, nearest
from emo.common.text import printable

from .decoding import Beams, Decoding
from .prefixes import CORPORA, from_corpus, from_file, from_texts, read_texts

TOKENS, SAMPLES = 80, 8
SHOWN = 16  # so many texts are printed
PROTOCOLS = ("paper", "released")


def add_arguments(subparsers: Any) -> None:
    """Add the commands `generate` and `quality` with their arguments."""
    command = subparsers.add_parser("generate", help="sample text, by default from the whole distribution")
    add = command.add_argument
    add("--model", required=True, help="model directory (an export) or hub id")
    add("--name", help="how results call it (its directory)")
    add("--output_path", type=Path, default=Path("runs/eval"), help="results directory (runs/eval)")
    add("--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16, float16")
    where = command.add_mutually_exclusive_group()
    where.add_argument("--prefix", action="append", help="text to continue; repeatable; default: begin one")
    where.add_argument("--prefixes", type=Path, metavar="FILE", help="JSON lines with `text`, or plain lines")
    where.add_argument("--corpus", help=f"prefixes of the paper's length: {', '.join(CORPORA)}")
    text = "with --prefixes: words of each text that are its prefix (all)"
    add("--prefix_words", type=int, default=0, help=text)
    text = "with --corpus: directory of FOLDER/SPLIT.jsonl or .txt[.zst], or hub (hub)"
    add("--data", default="hub", help=text)
    add("--split", default="test", help="with --corpus: train, validation or test (test)")
    add("--limit", type=int, help="evenly spaced prefixes (all)")
    add("--samples", type=int, help=f"texts per prefix ({SAMPLES}; greedy and beams: 1)")
    text = f"longest continuation in tokens (the corpus's own, else {TOKENS})"
    add("--max_new_tokens", type=int, help=text)
    add("--seeds", default="0", help="comma-separated (0)")
    add("--batch_size", type=int, default=64, help="texts at a time (64); does not change them")
    add_decoding(add)
    add("--beams", type=int, help="beam search: the likeliest of so many texts")

    command = subparsers.add_parser("quality", help="measure sampled text: MAUVE, ROUGE, perplexities")
    add = command.add_argument
    add(
        "texts",
        nargs="+",
        type=Path,
        help="what generate wrote: OUTPUT_PATH/models/NAME/generated/*",
    )
    text = "results directory, for the oracle's texts (runs/eval)"
    add("--output_path", type=Path, default=Path("runs/eval"), help=text)
    add("--oracle", help="model whose perplexity of the samples is measured, and of its own beside it")
    add("--reference", help="model for forward and reverse cross-entropy; the same tokenizer")
    text = (
        "featurizer of MAUVE: minilm, a sentence model, or a language model by directory or id (gpt2-large)"
    )
    add("--mauve", metavar="FEATURIZER", help=text)
    text = "texts for PPL_test and cross-entropy (those of the corpus)"
    add("--test", type=Path, metavar="FILE", help=text)
    add("--protocol", default="paper", help="paper, or released: as the authors' scripts compare texts")
    add("--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16, float16")


def add_decoding(add: Callable[..., Any]) -> None:
    """Add the options that say how tokens are chosen."""
    add("--temperature", type=float, default=1.0, help="divides the logits (1), those that --decode makes")
    add("--top_k", type=int, default=0, help="only the k likeliest tokens (0: all)")
    add("--top_p", type=float, default=1.0, help="only the likeliest tokens that together reach p (1)")
    add("--greedy", action="store_true", help="always the likeliest token")
    text = "the distributions that training with OBJECTIVE would make of the model's own, without training"
    add("--decode", default="", metavar="OBJECTIVE", help=text)
    text = "with --decode: costs of a model's head, of a file, or constant (the model's own head)"
    add("--cost", default="", metavar="SOURCE", help=text)


def decoding_of(args: argparse.Namespace) -> Decoding:
    """Return how tokens are chosen, by the options of `add_decoding`."""
    return Decoding(args.temperature, args.top_k, args.top_p, args.greedy, args.decode, args.cost)


def run(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Run `generate` or `quality`; return the exit code."""
    say(f"{args.command}: loading libraries")
    return (_generate if args.command == "generate" else _quality)(args, say)


def _generate(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    decoding: Decoding | Beams = decoding_of(args)
    if args.beams is not None:
        if decoding != Decoding():
            raise UserError("--beams searches; leave out --greedy, --temperature, --top_k, --top_p, --decode")
        decoding = Beams(args.beams)
    try:
        seeds = tuple(int(part) for part in args.seeds.split(","))
    except ValueError:
        raise UserError(f"--seeds {args.seeds!r} must be whole numbers with commas between them") from None
    if args.prefix_words < 0 or (args.prefix_words and not args.prefixes):
        raise UserError("--prefix_words goes with --prefixes FILE, and must not be negative")
    if args.prefixes:
        prefixes = from_file(args.prefixes, args.prefix_words, args.limit)
    elif args.corpus:
        prefixes = from_corpus(args.corpus, args.data, args.split, args.limit)
    else:
        prefixes = from_texts(args.prefix)
    tokens = (prefixes.tokens or TOKENS) if args.max_new_tokens is None else args.max_new_tokens
    samples = (1 if decoding.deterministic else SAMPLES) if args.samples is None else args.samples
    from ..model import EvaluatedModel
    from ..results.directory import claim_name
    from .engines import Transformers
    from .records import Generation

    model = EvaluatedModel(args.model, args.name, args.dtype)
    engine = Transformers(model, decoding, args.batch_size)
    generation = Generation(engine, prefixes, tokens, samples, seeds, args.output_path)
    if tuned := model.facts.get("template"):
        note = f"note: {model.name} was tuned with the template {tuned}, and generate continues plain text"
        print(printable(f"{note}; use emo chat or emo answer for replies"), file=sys.stderr, flush=True)
    _ = engine.settled  # refused before anything is written
    claim_name(model, args.output_path, say)
    if not model.ends:
        say(f"{model.name} has no end token: every text is {tokens} tokens long")
    if prefixes.short:
        say(f"{prefixes.name}: {prefixes.short} texts left out, they have at most {prefixes.words} words")
    records = generation.run()
    for record in records if len(records) <= SHOWN else []:
        say(f"{model.name}: {record['prefix']}{record['text']}".replace("\n", " ⏎ "))
    generation.publish(records, say)
    return ExitCode.DONE


def _quality(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    if args.protocol not in PROTOCOLS:
        raise UserError(f"--protocol {args.protocol!r} is not known; {nearest(args.protocol, PROTOCOLS)}")
    if args.mauve and find_spec("mauve") is None:
        raise UserError(
            "MAUVE needs the package mauve-text (GPL-3.0, therefore not installed with this project): "
            "pip install 'emo-pipeline[mauve]'"
        )
    from .quality import Sampled, write

    test = [text for text in read_texts(args.test) if text] if args.test else None
    if test == []:
        raise UserError(f"{args.test} has no texts")
    settings = (args.oracle, args.reference, args.mauve, test, args.protocol, args.dtype)
    sampled = [Sampled(directory) for directory in args.texts]
    for texts in sampled:
        texts.measure(args.output_path, say, *settings)
    say("\n".join(write(sampled)))
    return ExitCode.DONE
