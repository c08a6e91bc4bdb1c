"""Events of a run: a line for people, and fields for programs (`--json`)."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


def log_event(line: str, event: str, **fields: object) -> None:
    """Log a line with an event and its fields. The console shows one of the two."""
    log.info("%s", line, extra={"event_fields": {"event": event, **fields}})
