"""emo chat: a conversation with a tuned model in the terminal, or over a pipe with one message per line."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

from emo.common.cli.commands import announce
from emo.common.errors import ExitCode, UserError
from emo.common.text import counted, printable
from emo.data_prep.encoding.tokenizer import chat_template

from .generation.commands import add_decoding, add_dtype, decoding_of
from .generation.decoding import THINK, Request, begins_in_thinking, text_after
from .generation.engines import Transformers
from .judging import answers
from .models.model import EvaluatedModel

TOKENS = 1024  # of a reply
RESET = "/reset"


def add_arguments(subparsers: Any) -> None:
    """Add the command `chat` with its arguments."""
    command = subparsers.add_parser(
        "chat",
        description="Talk to a chat model in the terminal. The conversation uses the chat template that the "
        "model was trained with. Ctrl-D ends it.",
        examples=["emo chat --model runs/mine/export --temperature 0.7"],
    )
    add = command.add_argument
    add("--model", required=True, help="model directory (an export) or hub id")
    add("--system", default="", metavar="TEXT", help="system message before the conversation")
    answers.add_template(add)
    add("--max_new_tokens", type=int, default=TOKENS, metavar="N", help=f"longest reply in tokens ({TOKENS})")
    add("--seed", type=int, default=0, help="seed of sampled replies (0)")
    add_dtype(add)
    add_decoding(add)


def run(args: argparse.Namespace, _: Callable[[str], None]) -> int:
    """Run `chat` and return the exit code. Replies go to stdout, everything else to stderr."""
    announce("chat")
    if args.max_new_tokens < 1:
        raise UserError(f"--max_new_tokens {args.max_new_tokens} must be at least 1", code="option-value")
    model = EvaluatedModel(args.model, dtype=args.dtype)
    if not (args.template != answers.AUTO or model.facts.get("template") or chat_template(model.path)):
        raise UserError(
            f"{args.model} has no chat template, so it continues text instead of answering. Run emo generate "
            f"--model {args.model}, or set the template that it was tuned with: --template alpaca",
            code="no-chat-template",
        )
    template = answers.choose_template(model, args.template, _notify)
    chat = ChatSession(Transformers(model, decoding_of(args), 1), template, args)
    _notify(f"{model.name}: template {template}. {RESET} clears the conversation, Ctrl-D exits.")
    for message in _messages():
        if message == RESET:
            chat.history.clear()
            _notify("the conversation is cleared")
        elif message:
            chat.answer(message)
    return ExitCode.DONE


class ChatSession:
    """A conversation. history: the exchanges that the model still sees, oldest first."""

    def __init__(self, engine: Transformers, template: str, args: argparse.Namespace) -> None:
        self.model = engine.model
        self.template = template
        self.args = args
        self.sampler = engine.sampler  # loads the weights before the first message
        self.history: list[answers.Exchanged] = []
        self.turns = 0

    def answer(self, message: str) -> None:
        """Print the reply to a message while it is generated, and add both to the history."""
        question = answers.Question("", message)
        prompt, room = self._prompt(question)
        if room < 1:
            tokens = counted(len(prompt), "token")
            _notify(f"the message has {tokens}, which is too long for the model's context")
            return
        ids: list[int] = []
        printed = ""
        opening = THINK * begins_in_thinking(self.model.tokenizer, prompt)

        def show(new: list[int], last: bool = False) -> None:
            nonlocal printed
            ids.extend(new)
            text = text_after(self.model.tokenizer, prompt, [i for i in ids if i not in self.model.ends])
            text = opening + text
            if last or not text.endswith("\ufffd"):  # an incomplete character
                text = text.lstrip()  # the model generates the space that templates leave out
                print(printable(text[len(printed) :]), end="\n" if last else "", flush=True)
                printed = text

        self.turns += 1
        self.sampler.on_tokens = show
        try:
            self.sampler.run([Request(prompt, [self.args.seed, self.turns])], room)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            _notify("\nthe reply is discarded")
            return
        show([], last=True)
        self.history.append(answers.Exchanged(question, ids, printed))

    def _prompt(self, question: answers.Question) -> tuple[list[int], int]:
        """Return the token ids of the prompt, and the number of tokens that the reply may have.

        Drop the oldest exchanges if the context has no room for them and a reply of reasonable length.
        """
        tokens = self.args.max_new_tokens
        system = self.args.system
        context = self.model.context
        while True:
            ids = answers.conversation_ids(self.model, self.template, self.history, question, system)
            room = tokens if context is None else min(tokens, context - len(ids))
            if not self.history or context is None or room >= min(tokens, context // 4):
                return ids, room
            del self.history[0]
            _notify(f"the oldest exchange is dropped, because the context has only {context} tokens")


def _messages() -> Iterator[str]:
    """Yield each message that the user types, or each line of a pipe."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - enables line editing in input()
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a file may have another encoding

    try:
        while line := input("> ") + "\n" if sys.stdin.isatty() else sys.stdin.readline():
            yield line.strip().encode("utf-8", "replace").decode()
    except EOFError:
        print()


def _notify(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
