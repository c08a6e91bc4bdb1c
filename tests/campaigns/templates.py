"""Check the token ids of chats of many kinds with every chat template that TRL ships.

    python -m tests.campaigns.templates [--only NAME]

Each chat has 1, 2 or 10 turns. It is plain, or has a system message, reasoning as a key or in the content,
or tool calls with empty content, null or reasoning. A template is accepted or rejected for a chat. The ids of
every answer and its prompt must equal a reference that renders every prompt with `apply_chat_template` (see
tests/helpers/stock_templates.py). Writes runs/templates.json, and exits with code 1 if ids differ or a
template is rejected for a plain chat.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from tests.campaigns.campaign import Campaign, conduct
from tests.helpers.stock_templates import KINDS, compare, messages_of, stock_templates

TURNS = (1, 2, 10)


def run(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    answers: Counter[str] = Counter()
    for name in (name for name in stock_templates() if args.only in name):
        for kind in KINDS:
            outcomes = [compare(name, messages_of(turns, kind)) for turns in TURNS]
            answers.update(outcome for outcome, _ in outcomes)
            reasons = dict.fromkeys(why for outcome, why in outcomes if outcome != "equal")
            equal = sum(outcome == "equal" for outcome, _ in outcomes)
            found = f"ids equal in {equal} of {len(TURNS)}" + (f"; {'; '.join(reasons)}" if reasons else "")
            good = all(outcome != "different" for outcome, _ in outcomes)
            show(name, kind, found[:300], good and (kind != "plain" or equal == len(TURNS)))
    show("all", "chats", ", ".join(f"{count} {outcome}" for outcome, count in answers.items()), bool(answers))


if __name__ == "__main__":
    sys.exit(conduct("templates", run, __doc__, only=""))
