"""emo generate | quality: sample text, and measure its quality."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from emo.common.errors import ExitCode, UserError, nearest
from emo.common.text import printable

from ..models.base import Say
from ..models.model import DTYPES
from ..results.rows import read_texts
from .decoding import Beams, Decoding
from .prefixes import CORPORA, Prefixes, from_corpus, from_file, from_texts

TOKENS = 80
SAMPLES = 8
PRINTED = 16  # largest number of texts that are printed
PROTOCOLS = ("paper", "released")
OUT = Path("runs/eval")

Add = Callable[..., Any]  # argparse's add_argument


def add_arguments(subparsers: Any) -> None:
    """Add the commands `generate` and `quality` with their arguments."""
    _add_generate(subparsers)
    _add_quality(subparsers)


def _add_generate(subparsers: Any) -> None:
    command = subparsers.add_parser(
        "generate",
        description="Sample text from a model and store it. By default every token is sampled from the full "
        "distribution, without temperature, top-k or top-p.",
        examples=[
            'emo generate --model openai-community/gpt2 --prefix "The town" --max_new_tokens 40',
            "emo generate --model runs/quickstart/emo/export --samples 4 --seeds 0,1",
        ],
    )
    add = command.add_argument
    add_model(add)
    add_dtype(add)
    where = command.add_mutually_exclusive_group()
    text = "text to continue; repeatable (none)"
    where.add_argument("--prefix", action="append", metavar="TEXT", help=text)
    where.add_argument("--prefixes", type=Path, metavar="FILE", help="JSON lines with `text`, or plain lines")
    text = f"continue texts of a corpus, as in the paper: {', '.join(CORPORA)}"
    where.add_argument("--corpus", metavar="NAME", help=text)
    text = "with --prefixes: number of words of each text that form the prefix (all)"
    add("--prefix_words", type=int, default=0, help=text)
    text = "with --corpus: directory with FOLDER/SPLIT.jsonl or .txt[.zst] files, or hub (hub)"
    add("--data", default="hub", help=text)
    add("--split", default="test", help="with --corpus: train, validation or test (test)")
    add("--limit", type=int, help="use only N evenly spaced prefixes (all)", metavar="N")
    add("--samples", type=int, metavar="N", help=f"texts per prefix ({SAMPLES}; greedy and beams: 1)")
    text = f"longest continuation in tokens (the corpus's default, else {TOKENS})"
    add("--max_new_tokens", type=int, help=text)
    add("--seeds", default="0", metavar="SEED[,SEED]", help="seeds of the samples (0)")
    text = "texts per batch (64). In float32 it does not change the texts"
    add("--batch_size", type=int, default=64, metavar="N", help=text)
    add_decoding(add)
    add("--beams", type=int, metavar="N", help="beam search with this many beams")


def _add_quality(subparsers: Any) -> None:
    command = subparsers.add_parser(
        "quality",
        description="Measure sampled text: MAUVE, ROUGE and perplexities. Texts of prefixes with a known "
        "continuation are compared with it.",
        examples=[
            "emo quality runs/eval/models/mine/generated/* --mauve minilm --reference openai-community/gpt2"
        ],
    )
    add = command.add_argument
    text = "directories that generate wrote, OUTPUT_PATH/models/NAME/generated/*"
    add("texts", nargs="+", type=Path, metavar="DIR", help=text)
    text = f"results directory for the texts of --oracle ({OUT})"
    add("--output_path", type=Path, default=OUT, help=text)
    text = "model that measures the perplexity of the texts, and whose samples are the comparison"
    add("--oracle", metavar="MODEL", help=text)
    text = "model for forward and reverse cross-entropy. It must have the same tokenizer"
    add("--reference", metavar="MODEL", help=text)
    text = "featurizer of MAUVE: minilm, a sentence model or a language model (openai-community/gpt2-large)"
    add("--mauve", metavar="FEATURIZER", help=text)
    text = "texts for the test perplexity and the cross-entropy (the corpus's test split)"
    add("--test", type=Path, metavar="FILE", help=text)
    text = "paper (default), or released to compare texts as the authors' scripts do"
    add("--protocol", default="paper", help=text)
    add("--batch_size", type=int, default=64, metavar="N", help="samples of --oracle per batch (64)")
    add_dtype(add)


def add_model(add: Add) -> None:
    """Add the options --model, --name and --output_path."""
    add("--model", required=True, help="model directory (an export) or hub id")
    add("--name", help="name of the model in the results (that of its directory)")
    add("--output_path", type=Path, default=OUT, metavar="DIR", help=f"results directory ({OUT})")


def add_dtype(add: Add) -> None:
    """Add the option --dtype."""
    text = f"dtype of the weights: auto (default, as stored), {', '.join(DTYPES[1:])}"
    add("--dtype", default="auto", help=text)


def add_decoding(add: Add) -> None:
    """Add the options that set how tokens are chosen."""
    text = "divide the logits by this number, also with --decode (1)"
    add("--temperature", type=float, default=1.0, help=text)
    add("--top_k", type=int, default=0, metavar="K", help="sample from the K most likely tokens (0: all)")
    text = "sample from the most likely tokens that together have probability P (1)"
    add("--top_p", type=float, default=1.0, metavar="P", help=text)
    add("--greedy", action="store_true", help="always take the most likely token")
    text = "sample from the distributions that training with OBJECTIVE would turn the model's into"
    add("--decode", default="", metavar="OBJECTIVE", help=text)
    text = "with --decode: token costs from a model's head or a file, or constant (the model's own head)"
    add("--cost", default="", metavar="SOURCE", help=text)


def decoding_of(args: argparse.Namespace) -> Decoding:
    """Return the decoding that the options of `add_decoding` set."""
    return Decoding(args.temperature, args.top_k, args.top_p, args.greedy, args.decode, args.cost)


def run(args: argparse.Namespace, say: Say) -> int:
    """Run `generate` or `quality`, and return the exit code."""
    say(f"{args.command}: loading libraries")
    return (_generate if args.command == "generate" else _quality)(args, say)


def _generate(args: argparse.Namespace, say: Say) -> int:
    decoding = _decoding_or_beams(args)
    try:
        seeds = tuple(int(part) for part in args.seeds.split(","))
    except ValueError:
        raise UserError(
            f"--seeds {args.seeds!r} must be integers separated by commas", code="option-value"
        ) from None
    prefixes = _prefixes(args)
    tokens = (prefixes.tokens or TOKENS) if args.max_new_tokens is None else args.max_new_tokens
    samples = (1 if decoding.deterministic else SAMPLES) if args.samples is None else args.samples
    from ..models.model import EvaluatedModel
    from ..results.directory import claim_name
    from .engines import Transformers
    from .records import Generation

    model = EvaluatedModel(args.model, args.name, args.dtype)
    engine = Transformers(model, decoding, args.batch_size)
    generation = Generation(engine, prefixes, tokens, samples, seeds, args.output_path)
    if tuned := model.facts.get("template"):
        note = f"note: {model.name} was tuned with the template {tuned}, but generate continues plain text."
        print(printable(f"{note} Run emo chat or emo answer for replies."), file=sys.stderr, flush=True)
    _ = engine.fixed_point  # raises for wrong options before anything is written
    claim_name(model.describe(), args.output_path, say)
    if not model.ends:
        say(f"{model.name} has no end token, so every text is {tokens} tokens long")
    if prefixes.short:
        say(f"{prefixes.name}: {prefixes.short} texts with at most {prefixes.words} words are left out")
    records = generation.run()
    for record in records if len(records) <= PRINTED else []:
        say(f"{model.name}: {record['prefix']}{record['text']}".replace("\n", " ⏎ "))
    generation.publish(records, say)
    return ExitCode.DONE


def _decoding_or_beams(args: argparse.Namespace) -> Decoding | Beams:
    decoding = decoding_of(args)
    if args.beams is None:
        return decoding
    if decoding != Decoding():
        raise UserError(
            "--beams cannot be combined with --greedy, --temperature, --top_k, --top_p or --decode",
            code="options-clash",
        )
    return Beams(args.beams)


def _prefixes(args: argparse.Namespace) -> Prefixes:
    if args.prefix_words < 0 or (args.prefix_words and not args.prefixes):
        raise UserError("--prefix_words must not be negative and needs --prefixes FILE", code="option-needs")
    if args.prefixes:
        return from_file(args.prefixes, args.prefix_words, args.limit)
    if args.corpus:
        return from_corpus(args.corpus, args.data, args.split, args.limit)
    return from_texts(args.prefix)


def _quality(args: argparse.Namespace, say: Say) -> int:
    if args.protocol not in PROTOCOLS:
        raise UserError(
            f"--protocol {args.protocol!r} is not known. {nearest(args.protocol, PROTOCOLS)}",
            code="option-value",
        )
    if args.mauve and find_spec("mauve") is None:
        raise UserError(
            "--mauve needs the package mauve-text (GPL-3.0), which is not installed: "
            "pip install 'emo-pipeline[mauve]'",
            code="missing-extra",
        )
    from .quality import QualityOptions, Sampled, compare_all

    test = [text for text in read_texts(args.test) if text] if args.test else None
    if test == []:
        raise UserError(f"{args.test} has no texts", code="no-text")
    options = QualityOptions(
        args.output_path, args.oracle, args.reference, args.mauve, test, args.protocol, args.dtype,
        args.batch_size,
    )  # fmt: skip
    sampled = [Sampled(directory) for directory in args.texts]
    for texts in sampled:
        texts.require_humans(options)
    for texts in sampled:
        texts.measure(options, say)
        texts.write(say)
    say("\n".join(compare_all(sampled)))
    return ExitCode.DONE
