"""The commands `emo plan`, `preflight`, `score`, `export-model`, `push`, `extend-vocabulary`, `merge`, `top`
and `report` (of runs).

Heavy modules are imported after the arguments were checked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

from emo.common.cli.commands import (
    ALWAYS,
    Parser,
    add_recipe,
    announce,
    parse_arguments,
    parse_directory,
    parse_shard,
)
from emo.common.cli.progress import show_activity
from emo.common.errors import ExitCode, UserError, exit_code_of
from emo.common.text import printable

from .config import RunConfig, load_config
from .engine.device.hardware import ACCELERATORS, parse_cluster
from .monitor.console import Console

log = logging.getLogger(__name__)


def leave(code: int) -> NoReturn:
    """Exit this process with `code` without finalizing the interpreter.

    Threads of libraries may still run. If one does while its C++ object is destroyed, it calls `terminate`,
    and exit code 75 becomes a SIGABRT.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_and_exit(argv: list[str]) -> NoReturn:
    """Run a command and exit."""
    leave(main(argv))


def main(argv: list[str]) -> int:
    """Run one of these commands and return the exit code."""
    args = parse_arguments(make_parser(), argv)
    silence_libraries()
    return exit_code_of(lambda: args.work(args), alone=is_first_of_host())


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands in this module."""
    parser = Parser(prog="emo")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_plan(commands)
    preflight = commands.add_parser(
        "preflight",
        description="Check that every host is ready to train a recipe. Start it as you start the training, "
        "with one process per rank. It then also checks the network between the hosts.",
        examples=["emo preflight launch/recipes/quickstart-pretrain.yaml"],
        notes={ExitCode.FAILURE: "a check failed"},
    )
    add_recipe(preflight, RunConfig)
    preflight.set_defaults(work=_preflight)
    _add_score(commands)
    top = commands.add_parser(
        "top",
        description="Show what the ranks of a run are doing, or did last, or how much of a recipe's data is "
        "prepared. The files in the directory are read, so it works on any host that shares them.",
        examples=["emo top runs/quickstart/pretrain", "emo top runs/quickstart/data/pretrain"],
    )
    top.set_defaults(work=_top)
    about = "output_dir of the run's recipe, or its data.dir"
    top.add_argument("run", type=parse_directory, metavar="RUN_DIR", help=about)
    export = commands.add_parser(
        "export-model",
        description="Export a checkpoint as a Hugging Face model, on the CPU. It may have been saved without "
        "an export, and on another machine.",
        examples=["emo export-model runs/mine model", "emo export-model runs/mine/step-000200 model"],
    )
    export.set_defaults(work=_export_model)
    about = "a run directory, whose newest checkpoint is exported, or a checkpoint in it"
    export.add_argument("checkpoint", type=Path, metavar="RUN_DIR[/step-N]", help=about)
    export.add_argument("target", type=Path, metavar="OUT", help="directory to create")
    _add_push(commands)
    _add_extension(commands)
    _add_merge(commands)
    _add_report(commands)
    return parser


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        description="Predict the memory, the time per step and the duration of a recipe on given GPUs. You "
        "need no GPU for it.",
        examples=[
            "emo plan launch/recipes/llama3.1-8b-sft.yaml --gpus 8xA100-80G",
            "emo plan launch/recipes/llama3.1-8b-sft.yaml --gpus 8xH100-80G --best --write fast.yaml",
        ],
        notes={ExitCode.FAILURE: "the recipe does not fit on the GPUs"},
    )
    parser.set_defaults(work=_plan)
    add = add_recipe(parser, RunConfig)
    add("--data", action="store_true", help="predict the preparation of the data, see emo plan --data --help")
    about = f"number and kind of the GPUs, for example 8xA100-80G. Kinds: {', '.join(ACCELERATORS)}"
    add("--gpus", required=True, metavar="NxKIND", help=about)
    about = "bandwidth between nodes in Gbit/s per node (%(default)s)"
    add("--network", type=float, default=1600, metavar="GBIT", help=about)
    about = "mean length of the documents in tokens (that of the prepared data)"
    add("--document_tokens", type=int, metavar="N", help=about)
    add("--best", action="store_true", help="search for the fastest settings that are certain to fit")
    add("--write", type=Path, metavar="FILE", help="with --best: write a recipe with these settings")


def _add_score(commands: Any) -> None:
    parser = commands.add_parser(
        "score",
        description="Store a model's log-probability of each token next to the prepared data of a recipe, "
        "for objectives that compare with a reference or a teacher. Run the same command again to resume.",
        examples=["emo score launch/recipes/quickstart-continue.yaml --model runs/quickstart/mle/export"],
    )
    parser.set_defaults(work=_score)
    add = add_recipe(parser, RunConfig)
    add("--model", required=True, help="directory or hub id of the model that reads the data")
    add("--revision", help="commit of the hub model")
    about = "name of the scores, which objective.scores refers to (%(default)s)"
    add("--name", default="reference", help=about)
    about = "store the K most likely tokens per position, for distillation"
    add("--top_k", type=int, metavar="K", help=about)
    about = "score only the data shards of job I of N, counted from 0"
    add("--shard", type=parse_shard, default=(0, 1), metavar="I/N", help=about)
    add("--force", action="store_true", help="replace existing scores")


def _add_push(commands: Any) -> None:
    parser = commands.add_parser(
        "push",
        description="Upload an export to the Hugging Face Hub. The repository is created if it does not "
        "exist. An export without a model card gets one. Needs a token with write access.",
        examples=[
            "emo push runs/mine OWNER/NAME --private",
            "emo push runs/mine/step-000200 OWNER/NAME --revision step-200",
        ],
    )
    parser.set_defaults(work=_push)
    add = parser.add_argument
    about = "an export, a finished run, or a checkpoint with train.export_checkpoints"
    add("source", type=Path, metavar="EXPORT_OR_RUN", help=about)
    add("repository", metavar="REPO", help="OWNER/NAME on the Hub")
    add("--private", action="store_true", help="create a private repository, and upload to no public one")
    add("--revision", metavar="BRANCH", help="branch to upload to, created if it does not exist (main)")


def _add_extension(commands: Any) -> None:
    parser = commands.add_parser(
        "extend-vocabulary",
        description="Add tokens to a BPE tokenizer and its model, so that text of a domain or a language "
        "needs fewer tokens. They are learned from the prepared data of the recipe. Their embeddings start "
        "as the mean of those of their old tokens (FVT). Old ids stay.",
        examples=["emo extend-vocabulary mine.yaml --pieces 2000 --output_path models/extended"],
    )
    parser.set_defaults(work=_extend_vocabulary)
    add = add_recipe(parser, RunConfig)
    add("--pieces", type=int, default=0, metavar="N", help="largest number of new tokens (%(default)s)")
    about = "special tokens to add, for example those of a chat template"
    add("--special", nargs="+", default=[], metavar="TOKEN", help=about)
    about = "make the number of embeddings a multiple of this, which is faster on GPUs (%(default)s)"
    add("--pad_to_multiple_of", type=int, default=1, metavar="N", help=about)
    add("--output_path", type=Path, required=True, metavar="DIR", help="directory to create")


def _add_merge(commands: Any) -> None:
    parser = commands.add_parser(
        "merge",
        description="Merge models of one architecture into one, on the CPU. The mean of a base model and a "
        "tuned one often keeps most of what both can do. The tokenizer and settings are those of the last.",
        examples=[
            "emo merge BASE_DIR runs/mine/export --weights 0.3 0.7 --output_path merged",
            "emo merge runs/a/export runs/b/export --method ties --base BASE_DIR --output_path merged",
            "emo merge BASE_DIR runs/mine/export --choose runs/data/mine/validation --output_path merged",
        ],
    )
    parser.set_defaults(work=_merge)
    add = parser.add_argument
    add("models", nargs="+", type=Path, metavar="MODEL", help="directory of a model")
    add("--output_path", type=Path, required=True, metavar="DIR", help="directory to create")
    about = "linear: weighted sum; slerp: rotation from the first to the second model; task_arithmetic and "
    about += "ties: the base plus weighted changes (%(default)s)"
    methods = ("linear", "slerp", "task_arithmetic", "ties")
    add("--method", choices=methods, default="linear", help=about)
    about = "weight of each model (linear: equal ones; task_arithmetic, ties: 1; slerp: one weight, 0.5)"
    add("--weights", nargs="+", type=float, metavar="W", help=about)
    about = (
        "try a few weights, and take the one with the lowest loss on this prepared set. linear, slerp: of "
    )
    about += "the second of two models; task_arithmetic, ties: of every model"
    add("--choose", type=Path, metavar="DIR", help=about)
    add("--base", type=Path, metavar="DIR", help="the model that the others were trained from")
    about = "ties: share of the largest changes to keep in each tensor (%(default)s)"
    add("--density", type=float, default=0.5, metavar="SHARE", help=about)


def _add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        description="Write a page on training runs: curves, launches, planned and measured speed, and "
        "sampled text. The runs may still be training.",
        examples=[
            "emo report runs/quickstart/mle runs/quickstart/emo --output_path runs/quickstart/curves.html",
            "emo report runs/quickstart/emo --json - --fail_on_regression validation",
        ],
        codes=(*ALWAYS, ExitCode.REGRESSION),
        notes={ExitCode.REGRESSION: "--fail_on_regression: a validation loss is worse than before training"},
    )
    report.set_defaults(work=_report)
    add = report.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN_DIR", help="output_dir of a run's recipe")
    forms = "directory, or file.html, .md or .json (the first RUN_DIR); - prints Markdown on stdout"
    add("--output_path", metavar="PATH", help=forms)
    over = "horizontal axis of the curves: steps or supervised tokens (%(default)s)"
    add("--over", choices=("step", "tokens"), default="step", help=over)
    about = "also write the changes of the losses as numbers; - prints them on stdout"
    add("--json", metavar="FILE", help=about)
    risen = (
        "exit with code 3 if the loss on one of these validation sets is certain to have risen since step 0"
    )
    add("--fail_on_regression", metavar="SET[,SET]", help=risen)
    drift = "with --fail_on_regression: largest allowed KL from the base model, in nats per token"
    add("--max_kl", type=float, metavar="NATS", help=drift)


def is_first_of_host() -> bool:
    """Return whether this process is the first rank of its host."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def silence_libraries() -> None:
    """Hide warnings of libraries that are imported from now on."""
    quieten()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    warnings.filterwarnings(
        "ignore", module=r"(transformers|torch|deepspeed|peft|accelerate|huggingface_hub)\b"
    )


def quieten() -> None:
    """Hide information that libraries log."""
    for noisy in ("httpx", "DeepSpeed", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _plan(args: argparse.Namespace) -> int:
    if args.write and not args.best:
        raise UserError("--write needs --best", code="option-needs")
    if args.document_tokens is not None and args.document_tokens < 1:
        raise UserError("--document_tokens must be a whole number from 1", code="document-tokens")
    cluster = parse_cluster(args.gpus, args.network)
    config = load_config(args.recipe, args.overrides)
    if args.write and (args.write.exists() or not args.write.parent.is_dir()):
        problem = f"--write {args.write}: give a new name in an existing directory"
        raise UserError(problem, code="write-target")
    announce("plan")
    with show_activity("planning"):
        from .planning.best import print_best, write_recipe
        from .planning.plan import print_plan

        if not args.best:
            fits = print_plan(config, cluster.gpus, cluster, document_tokens=args.document_tokens)
            return ExitCode.DONE if fits else ExitCode.FAILURE
        best = print_best(config, cluster, args.document_tokens)
        if args.write:
            write_recipe(args.write, args.recipe, args.overrides, best, cluster)
            print(f"written: {args.write}")
    return ExitCode.DONE


def _preflight(args: argparse.Namespace) -> int:
    config = load_config(args.recipe, args.overrides)
    if is_first_of_host():
        announce("preflight")
    with show_activity("preflight") if is_first_of_host() else contextlib.nullcontext():
        from .planning.preflight import preflight

        return preflight(config)


def _score(args: argparse.Namespace) -> int:
    # Values are written as JSON, because a name may look like a number.
    model = [f"model.path={json.dumps(args.model)}", f"model.revision={json.dumps(args.revision or None)}"]
    model += ["model.architecture=null", "model.lora=null"]
    # A choice of checkpoints may need the teacher whose scores are computed here.
    selection = ["train.keep_best=null", "train.load_best_at_end=false", "train.early_stopping=null"]
    others = ["objective={}", *selection]
    logging.basicConfig(level=logging.INFO, handlers=[Console()])
    config = load_config(args.recipe, [*args.overrides, *model, *others])
    if config.model.rope is not None:  # another model keeps its own, also as a live teacher
        trained = load_config(args.recipe, [*args.overrides, *others]).model
        same = Path(args.model).resolve() == Path(str(trained.path)).resolve()
        if not same or args.revision not in (None, trained.revision):
            print(f"{args.model} is not model.path: it is read without model.rope")
            config = load_config(args.recipe, [*args.overrides, *model, "model.rope=null", *others])
    announce("score")
    with show_activity("loading the model"):
        from .planning.score import score

        complete = score(config, args.name, args.shard, args.force, args.top_k)
    state = "shard {}/{} is complete, others are missing".format(*args.shard)
    if complete:
        key = "objective.scores=" if args.top_k is None else "objective.teacher.scores="
        state = f"complete; use them with {key}{args.name}"
    print(f"scores {args.name}: {state}")
    return ExitCode.DONE


def _export_model(args: argparse.Namespace) -> int:
    with show_activity("exporting"):
        from transformers.utils.logging import disable_progress_bar

        from .checkpoint.export import export_checkpoint

        disable_progress_bar()
        checkpoint = export_checkpoint(args.checkpoint, args.target)
    print(f"exported {checkpoint.name}: {args.target}")
    return ExitCode.DONE


def _push(args: argparse.Namespace) -> int:
    announce("push")
    with show_activity("uploading"):
        from .checkpoint.push import push_export

        url = push_export(args.source, args.repository, args.private, args.revision)
    print(f"pushed: {url}")
    return ExitCode.DONE


def _extend_vocabulary(args: argparse.Namespace) -> int:
    if args.pieces < 0 or args.pad_to_multiple_of < 1 or not (args.pieces or args.special):
        problem = "give --pieces from 1 or --special, and --pad_to_multiple_of from 1"
        raise UserError(problem, code="extension")
    config = load_config(args.recipe, args.overrides)
    announce("extend-vocabulary")
    with show_activity("learning new tokens"):
        from .model.vocabulary import extend_model

        size = (args.pieces, args.special, args.pad_to_multiple_of)
        changed = extend_model(config, *size, args.output_path)
    print(f"{args.output_path}: {changed.pieces:,} new tokens")
    for name, measured in (("before", changed.before), ("after", changed.after)):
        print(f"  {name:7} {measured.tokens:.3f} tokens and {measured.nll:.3f} nats per character")
    print(f"prepare the data again: model.path={args.output_path} data.tokenizer={args.output_path}")
    return ExitCode.DONE


def _merge(args: argparse.Namespace) -> int:
    slerp = args.method == "slerp"
    needs_base = args.method in ("task_arithmetic", "ties")
    count = len(args.models)
    if count < (1 if needs_base else 2) or (slerp and count != 2):
        amount = "exactly" if slerp else "at least"
        raise UserError(f"--method {args.method} needs {amount} two models", code="merge")
    if needs_base != (args.base is not None):
        which = "needs --base, the model that the others were trained from" if needs_base else "has no --base"
        raise UserError(f"--method {args.method} {which}", code="merge")
    default = [0.5] if slerp else [1.0] * count if needs_base else [1 / count] * count
    weights = args.weights or default
    if len(weights) != len(default):
        raise UserError(f"--weights: give {len(default)} for --method {args.method}", code="merge")
    if args.method == "linear" and abs(sum(weights) - 1) > 1e-3:
        total = sum(weights)
        scaled = f": {' '.join(f'{weight / total:.3g}' for weight in weights)}" if total else ""
        raise UserError(f"--weights must sum to 1 for --method linear{scaled}", code="merge")
    if not 0 < args.density <= 1:
        raise UserError("--density must be above 0 and at most 1", code="merge")
    if args.choose is not None:
        _choose_merge(args)
    else:
        with show_activity("merging"):
            from .model.merging import Merge, merge_models

            merge = Merge(args.method, tuple(weights), args.density)
            merge_models(args.models, args.base, merge, args.output_path)
    print(f"merged: {args.output_path}")
    return ExitCode.DONE


def _choose_merge(args: argparse.Namespace) -> None:
    """Merge with the best of a few coefficients, and print the loss of each."""
    if args.weights is not None or (args.method == "linear" and len(args.models) != 2):
        problem = "--choose replaces --weights, and --method linear then needs two models"
        raise UserError(problem, code="merge")
    announce("merge")
    from .model.merging import Merge
    from .monitor.validation.merge_choice import choose_merge

    def make(coefficient: float) -> Merge:
        weights = [coefficient] * (1 if args.method == "slerp" else len(args.models))
        if args.method == "linear":
            weights[0] = 1 - coefficient
        return Merge(args.method, tuple(weights), args.density)

    print("weight  loss    difference from the best, nats per token")
    for trial in choose_merge(args.models, args.base, make, args.choose, args.output_path):
        print(f"{trial.coefficient:6.2f}  {trial.nll:.4f}  {trial.change or 'best'}")


def _top(args: argparse.Namespace) -> int:
    from .report.top import show_ranks

    with contextlib.suppress(KeyboardInterrupt):  # the way to leave it
        show_ranks(args.run)
    return ExitCode.DONE


def _report(args: argparse.Namespace) -> int:
    if args.max_kl is not None and not (args.max_kl >= 0 and args.fail_on_regression):
        raise UserError(
            "--max_kl must be 0 or more nats, and needs --fail_on_regression", code="option-needs"
        )
    announce("report")
    from emo.common.io.files import write_text
    from emo.common.report.document import STDOUT, folder_of

    from .report.page import build_run_report
    from .report.runs import read_runs, regressions

    runs = read_runs(args.runs)
    names = args.fail_on_regression
    verdicts = regressions(runs, [] if names is None else names.split(","), args.max_kl)
    out = args.output_path or str(runs[0].path)
    page = build_run_report(runs, args.over, folder_of(out).absolute())
    lines = [line for _, line in verdicts]
    if args.json == STDOUT:
        print(page.json(), end="")
    elif args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        write_text(Path(args.json), page.json())
        lines.insert(0, f"written: {args.json}")
    if (written := page.write(out)) is not None:
        lines = [f"written: {written}", page.answer[0], *lines]
    for line in lines:
        print(printable(line), file=sys.stderr if STDOUT in (out, args.json) else sys.stdout)
    return ExitCode.REGRESSION if any(lost for lost, _ in verdicts) else ExitCode.DONE
