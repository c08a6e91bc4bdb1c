"""emo chat: a conversation with a tuned model in the terminal, or over a pipe with a message on each line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

from emo.common.cli.commands import announce
from emo.common.errors import ExitCode, UserError
from emo.common.text import counted, printable
from emo.data_prep.encoding.tokenizer import chat_template

from .generation.commands import add_decoding, decoding_of
from .generation.decoding import Request, text_after
from .generation.engines import Transformers
from .judging import answers
from .model import DTYPES, EvaluatedModel

TOKENS = 1024  # of a reply
RESET = "/reset"


def add_arguments(subparsers: Any) -> None:
    """Add the command `chat` with its arguments."""
    add = subparsers.add_parser("chat", help="talk to a tuned model in the terminal").add_argument
    add("model", help="model directory (an export) or hub id")
    add("--system", default="", metavar="TEXT", help="system message before the conversation")
    text = f"{', '.join(answers.TEMPLATE_CHOICES)} (auto: what the model was tuned with)"
    add("--template", default=answers.AUTO, help=text)
    add("--max_new_tokens", type=int, default=TOKENS, help=f"longest reply in tokens ({TOKENS})")
    add("--seed", type=int, default=0, help="of sampled replies (0)")
    add("--dtype", default="auto", help=f"auto (the checkpoint's), {', '.join(DTYPES[1:])}")
    add_decoding(add)


def run(args: argparse.Namespace, _: Callable[[str], None]) -> int:
    """Run `chat`; return the exit code. Replies go to stdout, all else to stderr."""
    announce("chat")
    if args.max_new_tokens < 1:
        raise UserError(f"--max_new_tokens {args.max_new_tokens} must be at least 1")
    model = EvaluatedModel(args.model, dtype=args.dtype)
    if not (args.template != answers.AUTO or model.facts.get("template") or chat_template(model.path)):
        raise UserError(
            f"{args.model} has no chat template, so it continues text instead of answering; use emo generate "
            f"--model {args.model}, or name the template that it was tuned with: --template alpaca",
            code="no-chat-template",
        )
    template = answers.choose_template(model, args.template, _note)
    chat = Chat(Transformers(model, decoding_of(args), 1), template, args)
    _note(f"{model.name}: template {template}; {RESET} forgets the conversation, Ctrl-D ends it")
    for message in _messages():
        if message == RESET:
            chat.history.clear()
            _note("the conversation is forgotten")
        elif message:
            chat.answer(message)
    return ExitCode.DONE


class Chat:
    """A conversation. history: what the model still sees of it, oldest first."""

    def __init__(self, engine: Transformers, template: str, args: argparse.Namespace) -> None:
        self.model, self.template, self.args = engine.model, template, args
        self.sampler = engine.sampler  # loads the weights before the first message
        self.history: list[answers.Exchanged] = []
        self.turns = 0

    def answer(self, message: str) -> None:
        """Print the reply to a message while it is written, and remember both."""
        question, new, shown = answers.Question("", message), [], ""
        prompt, room = self._prompt(question)
        if room < 1:
            _note(f"the message has {counted(len(prompt), 'token')}, too many for the model's context")
            return

        def show(tokens: list[int], last: bool = False) -> None:
            nonlocal shown
            new.extend(tokens)
            text = text_after(self.model.tokenizer, prompt, [i for i in new if i not in self.model.ends])
            if last or not text.endswith("\ufffd"):  # half a character
                text = text.lstrip()  # templates leave the space before a reply to the model
                print(printable(text[len(shown) :]), end="\n" if last else "", flush=True)
                shown = text

        self.turns += 1
        self.sampler.wrote = show
        try:
            self.sampler.run([Request(prompt, [self.args.seed, self.turns])], room)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            _note("\nthe reply is forgotten")
            return
        show([], last=True)
        self.history.append(answers.Exchanged(question, new, shown))

    def _prompt(self, question: answers.Question) -> tuple[list[int], int]:
        """Return the ids that the model gets, and how many tokens its reply may have.

        Drops the oldest exchanges when the context has no room for them and a reply of a fair length.
        """
        tokens, system, context = self.args.max_new_tokens, self.args.system, self.model.context
        while True:
            ids = answers.conversation_ids(self.model, self.template, self.history, question, system)
            room = tokens if context is None else min(tokens, context - len(ids))
            if not self.history or context is None or room >= min(tokens, context // 4):
                return ids, room
            del self.history[0]
            _note(f"the oldest exchange is dropped: the context has {context} tokens")


def _messages() -> Iterator[str]:
    """Yield what the user types, or each line of a pipe, until it ends."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - input() edits lines with it

    try:
        while line := input("> ") + "\n" if sys.stdin.isatty() else sys.stdin.readline():
            yield line.strip().encode("utf-8", "replace").decode()
    except EOFError:
        print()


def _note(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
