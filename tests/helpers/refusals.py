"""Checks of the errors that users see, which are one line with a code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from emo.common.errors import UserError


@contextlib.contextmanager
def refused(code: str) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect a one-line UserError with this code within the block."""
    with pytest.raises(UserError) as error:
        yield error
    assert error.value.code == code and "\n" not in str(error.value), error.value
