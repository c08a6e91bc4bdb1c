"""emo answer | judge: answer instructions with a model, and compare two models' answers with a judge."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from emo.common.errors import ExitCode, UserError, nearest
from emo.common.text import counted

from ..generation.commands import OUT, add_dtype, add_model
from ..generation.decoding import Decoding
from ..generation.engines import ENGINES, make_engine
from ..results.directory import Say
from ..results.rows import evenly_spaced
from .answers import SETS, add_template, read_questions, require_unique
from .judges import JUDGES, Judge
from .judging import FORMATS, Judging, describe_failures, judge_pairs, read_replies, write_prompts
from .pairs import Judged, Pairs, pair_answers, read_labelled, read_verdicts

TOKENS = 1024  # of an answer


def add_arguments(subparsers: Any) -> None:
    """Add the commands `answer` and `judge` with their arguments."""
    for command in (_add_answer(subparsers), _add_judge(subparsers)):
        text = f"generates the text: {', '.join(ENGINES)} (transformers)"
        command.add_argument("--engine", default="transformers", help=text)
        text = "texts per batch (64); vLLM ignores it"
        command.add_argument("--batch_size", type=int, default=64, help=text)
        add_dtype(command.add_argument)


def _add_answer(subparsers: Any) -> argparse.ArgumentParser:
    answer: argparse.ArgumentParser = subparsers.add_parser(
        "answer",
        description="Answer instructions with a model, and write the answers in AlpacaEval's format to "
        "OUTPUT_PATH/models/NAME/answers/.",
        examples=["emo answer --model runs/mine/export --name mine --questions alpaca_eval"],
    )
    add = answer.add_argument
    add_model(add)
    add("--questions", required=True, help=f"{', '.join(SETS)}, or a file with a JSON array or JSON lines")
    add("--data", default="hub", metavar="DIR", help="directory with the named questions, or hub (hub)")
    add("--limit", type=int, metavar="N", help="use only N evenly spaced questions (all)")
    add_template(add)
    add("--max_new_tokens", type=int, default=TOKENS, help=f"longest answer in tokens ({TOKENS})")
    add("--temperature", type=float, help="sample with this temperature (always the most likely token)")
    add("--top_p", type=float, default=1.0, help="sample from the most likely tokens that reach p (1)")
    add("--seed", type=int, default=0, help="seed of sampled answers (0)")
    return answer


def _add_judge(subparsers: Any) -> argparse.ArgumentParser:
    judge: argparse.ArgumentParser = subparsers.add_parser(
        "judge",
        description="Compare two models' answers with a judge model. The win rate is how often B wins "
        "against the baseline A. `emo report OUTPUT_PATH` shows it. To use a judge behind an API, write the "
        "prompts with --write_prompts, send them, and read the replies with --replies.",
        examples=[
            "emo judge --judge auto-j --a mle/model_outputs.json --b emo/model_outputs.json",
            "emo judge --judge alpaca_eval --a a.json --b b.json --write_prompts ask.jsonl --format openai",
            "emo judge --judge alpaca_eval --a a.json --b b.json --replies batch_output.jsonl",
            "emo judge --judge alpaca_eval --from annotations.json",
            "emo judge --judge pandalm --labelled testset-v1.json --from pandalm-7b-testset-v1.json",
        ],
    )
    add = judge.add_argument
    add("--judge", required=True, help=f"prompts and format of the replies: {', '.join(JUDGES)}")
    text = "the baseline's answers: a file, or a directory that answer wrote"
    add("--a", type=Path, metavar="ANSWERS", help=text)
    add("--b", type=Path, metavar="ANSWERS", help="the other model's answers to the same questions")
    text = "judge PandaLM's or Auto-J's human-labelled pairs instead of --a and --b"
    add("--labelled", type=Path, metavar="FILE", help=text)
    add("--limit", type=int, metavar="N", help="use only N evenly spaced pairs (all)")
    source = judge.add_mutually_exclusive_group()
    source.add_argument("--model", help="the judge's weights: a directory or hub id (the judge's own)")
    file: dict[str, Any] = {"type": Path, "metavar": "FILE"}
    source.add_argument("--write_prompts", help="write the prompts of both orders and exit", **file)
    source.add_argument("--replies", nargs="+", help="read the replies to written prompts", **file)
    text = "read existing verdicts: AlpacaEval's annotations.json, PandaLM's, or Auto-J's two files"
    source.add_argument("--from", dest="existing", nargs="+", help=text, **file)
    add("--format", default="jsonl", help=f"format of --write_prompts: {', '.join(FORMATS)} (jsonl)")
    text = "model that --format openai requests and that must have written --replies (the judge's own)"
    add("--ask_for", metavar="MODEL", help=text)
    text = "also judge pairs with an answer that was cut off at the token limit"
    add("--include_cut_off", action="store_true", help=text)
    add("--max_new_tokens", type=int, help="longest reply in tokens (the judge's own)")
    add("--name", help="name of the judgement (B-vs-A-QUESTIONS-JUDGE)")
    add("--output_path", type=Path, default=OUT, metavar="DIR", help=f"results directory ({OUT})")
    return judge


def run(args: argparse.Namespace, say: Say) -> int:
    """Run `answer` or `judge`, and return the exit code."""
    if args.command == "answer" or not (args.existing or args.write_prompts or args.replies):  # runs a model
        say(f"{args.command}: loading libraries")
    return (_answer if args.command == "answer" else _judge)(args, say)


def _answer(args: argparse.Namespace, say: Say) -> int:
    from ..models.model import EvaluatedModel
    from ..results.directory import claim_name
    from .answers import Answering, choose_template

    greedy = args.temperature is None
    if greedy and args.top_p != 1:
        raise UserError(
            "--top_p needs --temperature. Without it the most likely token is chosen.", code="option-needs"
        )
    decoding = Decoding(greedy=True) if greedy else Decoding(args.temperature, 0, args.top_p)
    name, questions = read_questions(args.questions, args.data, args.limit)
    model = EvaluatedModel(args.model, args.name, args.dtype)
    template = choose_template(model, args.template, say)
    engine = make_engine(args.engine, model, decoding, args.batch_size)
    settings = (name, template, args.max_new_tokens, args.seed, args.output_path)
    answering = Answering(engine, questions, *settings)
    claim_name(model.describe(), args.output_path, say)
    answering.run(say)
    return ExitCode.DONE


def _judge(args: argparse.Namespace, say: Say) -> int:
    if args.judge not in JUDGES:
        raise UserError(
            f"--judge {args.judge!r} is not known. {nearest(args.judge, JUDGES)}", code="option-value"
        )
    judge = JUDGES[args.judge]
    if args.ask_for and not (args.write_prompts or args.replies):
        raise UserError("--ask_for needs --write_prompts or --replies", code="option-needs")
    if args.format != FORMATS[0] and not args.write_prompts:
        raise UserError("--format needs --write_prompts", code="option-needs")
    if args.max_new_tokens is not None and args.max_new_tokens < 1:
        raise UserError("--max_new_tokens must be at least 1", code="option-value")
    if args.existing:
        if args.a or args.b or args.limit is not None or args.include_cut_off:
            problem = "--from includes the answers. Remove --a, --b, --limit and --include_cut_off."
            raise UserError(problem, code="options-clash")
        return _report(read_verdicts(args.existing, args.labelled, judge.name), args, say)
    pairs, left_out = _read_pairs(args, say)
    if args.write_prompts:
        prompts = write_prompts(
            judge, pairs, args.write_prompts, args.format, args.ask_for, args.max_new_tokens
        )
        say(f"{counted(prompts, 'prompt')} on {counted(len(pairs.rows), 'pair')} in {args.write_prompts}")
        return ExitCode.DONE
    judged = (_judge_replies if args.replies else _judge_with_model)(args, judge, pairs, left_out, say)
    return _report([judged], args, say)


def _read_pairs(args: argparse.Namespace, say: Say) -> tuple[Pairs, int]:
    """Return the pairs to judge, and the number of pairs left out because an answer was cut off."""
    if args.labelled and (args.a or args.b):
        raise UserError("--labelled includes the answers. Remove --a and --b.", code="options-clash")
    if not args.labelled and not (args.a and args.b):
        raise UserError("set --a and --b, --labelled FILE, or --from FILE", code="option-needs")
    pairs = read_labelled(args.labelled) if args.labelled else pair_answers(args.a, args.b, say)
    rows = pairs.rows if args.include_cut_off else [pair for pair in pairs.rows if not pair.cut_off]
    left_out = len(pairs.rows) - len(rows)
    if left_out:
        say(
            f"{left_out} of {counted(len(pairs.rows), 'pair')} left out, because an answer was cut off at "
            "the token limit. Set --include_cut_off to judge them."
        )
        if not rows:
            raise UserError(
                "every pair has an answer that was cut off. Answer again with a larger --max_new_tokens, or "
                "set --include_cut_off.",
                code="cut-off",
            )
    return pairs._replace(rows=evenly_spaced(rows, args.limit)), left_out


def _judge_replies(args: argparse.Namespace, judge: Judge, pairs: Pairs, left_out: int, say: Say) -> Judged:
    replies, by = read_replies(judge, pairs, args.replies, args.ask_for)
    if failed := sum("failed" in reply for row in replies for reply in row["replies"]):
        reason = describe_failures(reply for row in replies for reply in row["replies"])
        say(f"{failed} requests failed ({reason}). Their replies count as unreadable.")
    if args.ask_for is None and by != judge.default_model:
        say(f"the replies are by {by}, but {judge.name} is meant for {judge.default_model}")
    facts = {"from": [file.name for file in args.replies], "model": by, "left_out": left_out}
    return judge_pairs(judge, by, pairs, replies, facts)


def _judge_with_model(
    args: argparse.Namespace, judge: Judge, pairs: Pairs, left_out: int, say: Say
) -> Judged:
    from ..models.model import EvaluatedModel

    path = args.model or judge.model
    if path is None:
        raise UserError(
            f"--judge {judge.name}: the weights of its model are not public. Set --model to another model, "
            "or write the prompts with --write_prompts and read the --replies.",
            code="judge-weights",
        )
    model = EvaluatedModel(path, dtype=args.dtype)
    engine = make_engine(args.engine, model, judge.decoding, args.batch_size)
    judging = Judging(judge, pairs, engine, args.output_path, args.max_new_tokens)
    replies = judging.run()
    templated = judging.template is not None
    facts = {"path": path, "tokens": judging.tokens, "chat_template": templated, "left_out": left_out}
    if any(row["replies"] for row in replies):
        facts |= engine.identity
    return judge_pairs(judge, model.name, pairs, replies, facts)


def _report(judgements: list[Judged], args: argparse.Namespace, say: Say) -> int:
    from ..models.model import clean_name
    from ..results.store import describe_replacement, read_json_or_none
    from .results import JUDGEMENTS, default_title, describe_judgement, undecided, write_judgement

    titles = [default_title(judgement) for judgement in judgements]
    if args.name:
        several = len(judgements) > 1
        titles = [clean_name(f"{args.name}-{i}" if several else args.name) for i in range(len(judgements))]
    require_unique(titles, "pass the files separately, with --name: judgements occur")
    without_verdict = []
    for judged, title in zip(judgements, titles, strict=True):
        path = args.output_path / JUDGEMENTS / f"{title}.json"
        before = read_json_or_none(path)
        numbers = write_judgement(judged, title, args.output_path)
        facts = before.get("facts") if isinstance(before, dict) else None
        if change := describe_replacement(facts, numbers["facts"]):
            say(f"{title} {change}")
        for line in describe_judgement(numbers):
            say(line)
        if (reason := undecided(numbers)) and not numbers["decided"]:
            without_verdict.append(f"{title}: {reason}")
    say(f"{args.output_path / JUDGEMENTS}. For the report run: emo report {args.output_path}")
    if without_verdict:
        reasons = "; ".join(without_verdict)
        raise UserError(f"no verdict: {reasons}. Check --judge and the replies.", code="no-verdict")
    return ExitCode.DONE
