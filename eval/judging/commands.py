"""emo answer | judge: a model's answers to instructions, and a judge's verdicts on two models'."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from emo.common.errors import ExitCode, UserError, nearest
from emo.common.text import counted

from ..generation.decoding import Decoding
from ..generation.engines import ENGINES, engine
from ..generation.prefixes import evenly
from .answers import SETS, TEMPLATE_CHOICES, read_questions, require_once
from .judging import FORMATS, JUDGES, Judging, of_replies, read_replies, write_prompts
from .pairs import Judged, labelled, of_answers, read_existing

TOKENS = 1024  # of an answer
OUT = Path("runs/eval")
ANSWER_EXAMPLE = """example:
  emo answer --model runs/emo/export --questions alpaca_eval --data DIR
  -> runs/eval/models/emo/answers/alpaca_eval-greedy/model_outputs.json"""
JUDGE_EXAMPLE = """examples:
  emo judge --judge auto-j --a MLE/model_outputs.json --b EMO/model_outputs.json
  emo judge --judge alpaca_eval --a DAVINCI.json --b EMO.json --export ask.jsonl --format openai
  emo judge --judge alpaca_eval --a DAVINCI.json --b EMO.json --replies batch_output.jsonl
  emo judge --judge alpaca_eval --from annotations.json
  emo judge --judge pandalm --labelled testset-v1.json --from pandalm-7b-testset-v1.json
A is the baseline; the win rate is B's. The report: emo report OUTPUT_PATH"""

Say = Callable[[str], None]


def add_arguments(subparsers: Any) -> None:
    """Add the commands `answer` and `judge` with their arguments."""
    raw = argparse.RawDescriptionHelpFormatter
    text = "answer instructions, in AlpacaEval's format"
    answer = subparsers.add_parser("answer", help=text, epilog=ANSWER_EXAMPLE, formatter_class=raw)
    add = answer.add_argument
    add("--model", required=True, help="model directory (an export) or hub id")
    add("--name", help="how results call it (its directory)")
    add("--questions", required=True, help=f"{', '.join(SETS)}, or a file: a JSON array or JSON lines")
    add("--data", default="hub", help="where named questions are: a directory, or hub (hub)")
    add("--limit", type=int, help="evenly spaced questions (all)")
    text = f"{', '.join(TEMPLATE_CHOICES)} (auto: what the model was tuned with)"
    add("--template", default="auto", help=text)
    add("--max_new_tokens", type=int, default=TOKENS, help=f"longest answer in tokens ({TOKENS})")
    add("--temperature", type=float, help="sample, dividing the logits; default: always the likeliest token")
    add("--top_p", type=float, default=1.0, help="sample of the likeliest tokens that together reach p (1)")
    add("--seed", type=int, default=0, help="of sampled answers (0)")

    text = "win rates of two models' answers by a judge"
    judge = subparsers.add_parser("judge", help=text, epilog=JUDGE_EXAMPLE, formatter_class=raw)
    add = judge.add_argument
    add("--judge", required=True, help=f"{', '.join(JUDGES)}: prompts and how replies are read")
    add("--a", type=Path, metavar="ANSWERS", help="the baseline's answers: a file, or what answer wrote")
    add("--b", type=Path, metavar="ANSWERS", help="the other model's answers to the same questions")
    add("--labelled", type=Path, metavar="FILE", help="instead: PandaLM's or Auto-J's human-labelled pairs")
    add("--limit", type=int, help="evenly spaced pairs (all)")
    source = judge.add_mutually_exclusive_group()
    source.add_argument("--model", help="the judge's weights: a directory or hub id (the judge's own)")
    file: dict[str, Any] = {"type": Path, "metavar": "FILE"}
    source.add_argument("--export", help="write the prompts of both orders and end", **file)
    source.add_argument("--replies", help="read replies to exported prompts", **file)
    text = "verdicts that exist: AlpacaEval's annotations.json, PandaLM's, or Auto-J's (and exchanged)"
    source.add_argument("--from", dest="existing", nargs="+", help=text, **file)
    add("--format", default="jsonl", help=f"of --export: {', '.join(FORMATS)} (jsonl)")
    text = "the model that --format openai asks for (the judge's own), and that --replies must be of"
    add("--ask_for", metavar="MODEL", help=text)
    text = "also judge answers that were cut off at the token limit (such pairs are left out)"
    add("--include_cut_off", action="store_true", help=text)
    add("--max_new_tokens", type=int, help="longest reply in tokens (the judge's own)")
    add("--name", help="what the judgement is called (B-vs-A-QUESTIONS-JUDGE)")

    for command in (answer, judge):
        command.add_argument("--output_path", type=Path, default=OUT, help=f"results directory ({OUT})")
        command.add_argument("--engine", default="transformers", help=f"{', '.join(ENGINES)} (transformers)")
        text = "texts at a time (64); vLLM chooses for itself"
        command.add_argument("--batch_size", type=int, default=64, help=text)
        text = "auto (the checkpoint's), float32, bfloat16, float16"
        command.add_argument("--dtype", default="auto", help=text)


def run(args: argparse.Namespace, say: Say) -> int:
    """Run `answer` or `judge`; return the exit code."""
    if args.command == "answer" or not (args.existing or args.export or args.replies):  # a model is asked
        say(f"{args.command}: loading libraries")
    return (_answer if args.command == "answer" else _judge)(args, say)


def _answer(args: argparse.Namespace, say: Say) -> int:
    from ..model import EvaluatedModel
    from ..results.directory import claim_name
    from .answers import Answering, choose_template

    if args.temperature is None and args.top_p != 1:
        raise UserError("--top_p goes with --temperature; without it the likeliest token is taken")
    greedy = args.temperature is None
    decoding = Decoding(greedy=True) if greedy else Decoding(args.temperature, 0, args.top_p)
    name, questions = read_questions(args.questions, args.data, args.limit)
    model = EvaluatedModel(args.model, args.name, args.dtype)
    template = choose_template(model, args.template, say)
    chosen = engine(args.engine, model, decoding, args.batch_size)
    settings = (name, template, args.max_new_tokens, args.seed, args.output_path)
    answering = Answering(chosen, questions, *settings)
    claim_name(model, args.output_path, say)
    answering.run(say)
    return ExitCode.DONE


def _judge(args: argparse.Namespace, say: Say) -> int:
    if args.judge not in JUDGES:
        raise UserError(f"--judge {args.judge!r} is not known; {nearest(args.judge, JUDGES)}")
    judge = JUDGES[args.judge]
    if args.existing:
        if args.a or args.b or args.limit is not None:
            raise UserError("--from brings its own answers; leave out --a, --b and --limit")
        return _report(read_existing(args.existing, args.labelled, judge.name), args, say)
    if args.labelled and (args.a or args.b):
        raise UserError("--labelled brings its own answers; leave out --a and --b")
    if not args.labelled and not (args.a and args.b):
        raise UserError("give --a and --b, --labelled FILE, or --from FILE")
    pairs = labelled(args.labelled) if args.labelled else of_answers(args.a, args.b, say)
    left_out = sum(bool(pair.cut_off) for pair in pairs.rows) if not args.include_cut_off else 0
    if left_out:
        whole = [pair for pair in pairs.rows if not pair.cut_off]
        say(
            f"{left_out} of {counted(len(pairs.rows), 'pair')} left out: an answer was cut off at the token "
            "limit; --include_cut_off judges them"
        )
        if not whole:
            raise UserError(
                "every pair has an answer that was cut off; answer again with a larger --max_new_tokens, or "
                "set --include_cut_off",
                code="cut-off",
            )
        pairs = pairs._replace(rows=whole)
    pairs = pairs._replace(rows=evenly(pairs.rows, args.limit))
    if args.export:
        prompts = write_prompts(judge, pairs, args.export, args.format, args.ask_for, args.max_new_tokens)
        say(f"{counted(prompts, 'prompt')} on {counted(len(pairs.rows), 'pair')} in {args.export}")
        return ExitCode.DONE
    if args.replies:
        replies, by = read_replies(judge, pairs, args.replies, args.ask_for)
        if failed := sum("failed" in reply for row in replies for reply in row["replies"]):
            say(f"{args.replies}: {failed} requests failed; their replies count as unreadable")
        own = judge.remote or judge.model or judge.name
        if args.ask_for is None and by != own:
            say(f"{args.replies}: replies by {by}; {judge.name}'s own judge is {own}")
        facts = {"from": [args.replies.name], "model": by, "left_out": left_out}
        return _report([of_replies(judge, by, pairs, replies, facts)], args, say)
    from ..model import EvaluatedModel

    path = args.model or judge.model
    if path is None:
        raise UserError(
            f"--judge {judge.name}: its model is behind a service; give --model of another one, or --export "
            "the prompts and read the --replies"
        )
    model = EvaluatedModel(path, dtype=args.dtype)
    chosen = engine(args.engine, model, judge.decoding, args.batch_size)
    judging = Judging(judge, pairs, chosen, args.output_path, args.max_new_tokens)
    replies = judging.run()
    templated = judging.template is not None
    facts = {"path": path, "tokens": judging.tokens, "chat_template": templated, "left_out": left_out}
    if any(row["replies"] for row in replies):
        facts |= chosen.identity
    return _report([of_replies(judge, model.name, pairs, replies, facts)], args, say)


def _report(judgements: list[Judged], args: argparse.Namespace, say: Say) -> int:
    from ..model import clean_name
    from ..results.store import read_json, said_of
    from .results import JUDGEMENTS, default_title, lines, undecided, write

    titles = [default_title(judgement) for judgement in judgements]
    if args.name:
        several = len(judgements) > 1
        titles = [clean_name(f"{args.name}-{i}" if several else args.name) for i in range(len(judgements))]
    require_once(titles, "give files one by one, with --name; judgements come")
    empty = []
    for judged, title in zip(judgements, titles, strict=True):
        path = args.output_path / JUDGEMENTS / f"{title}.json"
        before, numbers = read_json(path), write(judged, title, args.output_path)
        if isinstance(before, dict) and (other := said_of(before.get("facts"), numbers["facts"])):
            say(f"{title} {other}")
        for line in lines(numbers):
            say(line)
        empty += [f"{title}: {why}"] if (why := undecided(numbers)) and not numbers["decided"] else []
    say(f"{args.output_path / JUDGEMENTS}; the report: emo report {args.output_path}")
    if empty:
        raise UserError(f"no verdict: {'; '.join(empty)}; check --judge and the replies", code="no-verdict")
    return ExitCode.DONE
