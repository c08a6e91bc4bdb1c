"""Names and downloads of repositories on the Hub."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import UserError, iterate_causes

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # OWNER/NAME
# Classes of errors that libraries raise if the Hub cannot be reached.
OFFLINE = ("ConnectError", "ConnectionError", "ConnectTimeout", "OfflineModeIsEnabled")


def base_of_card(path: str) -> str:
    """Return the line of a model card that names the base model, or "" for a local or a new model."""
    return f"base_model: {path}\n" if HUB_ID.fullmatch(path) and not Path(path).exists() else ""


def explain_hub_error(name: str, error: BaseException) -> str:
    """Return why a model or tokenizer of the Hub cannot be read, and what to do about it."""
    access = f"accept its licence at https://huggingface.co/{name} and set HF_TOKEN to your token"
    kinds = [type(cause).__name__ for cause in iterate_causes(error)]
    if any("gated" in text.lower() for text in (str(error), *kinds)):
        return f"{name} is gated: {access}"
    if any(kind in OFFLINE for kind in kinds):
        return f"{name} is not a directory, and the Hub cannot be reached. Name a directory, or connect once"
    problem = f"{name} is neither a directory nor an accessible model of the Hub ({type(error).__name__})"
    return f"{problem}. If it is gated, {access}"


def hub_directory(name: str, revision: str | None, subject: str, code: str, **patterns: list[str]) -> Path:
    """Return the files of a Hub repository, from the cache or the network.

    Args:
        name: Hub id.
        revision: Commit, or None for the newest.
        subject: Beginning of the error, for example the key of a recipe.
        code: Code of the error.
        patterns: Patterns of the files, `allow_patterns` or `ignore_patterns`.

    Raises:
        UserError: There is no such repository, or it cannot be reached or opened.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, **patterns))
    except Exception as error:  # the hub raises many kinds of errors
        raise UserError(subject + explain_hub_error(name, error), code=code) from None
