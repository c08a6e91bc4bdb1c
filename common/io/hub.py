"""Names and downloads of repositories on the Hub."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import UserError
from .weights import explain_hub_error

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # OWNER/NAME


def base_of_card(path: str) -> str:
    """Return the line of a model card that names the base model, or "" for a local or a new model."""
    return f"base_model: {path}\n" if HUB_ID.fullmatch(path) and not Path(path).exists() else ""


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
