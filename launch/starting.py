"""Shows on standard error that rank 0 is starting.

Import this before everything that takes seconds, but after `SignalWatch()`: it starts a thread.
"""

from __future__ import annotations

import contextlib
import os
import sys

from emo.common.cli.progress import show_activity

STARTING = contextlib.ExitStack()  # open until the first step
if os.environ.get("RANK") == "0" and "--quiet" not in sys.argv:
    STARTING.enter_context(show_activity("starting"))
