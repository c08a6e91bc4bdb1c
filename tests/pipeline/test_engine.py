"""What the engine requires of a host before it builds a model there."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import UserError
from pipeline import engine
from pipeline.engine import check_host


def test_weights_on_nvme_need_a_place_and_libaio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def config(place: Path) -> dict:
        offload = {"device": "nvme", "nvme_path": str(place)}
        return {"zero_optimization": {"stage": 3, "offload_param": offload}}

    for present, place, message in (
        (False, tmp_path, "install libaio-dev"),
        (True, tmp_path / "none", "none is not a writable directory"),
    ):
        monkeypatch.setattr(engine.AsyncIOBuilder, "is_compatible", lambda _, present=present: present)
        with pytest.raises(UserError, match=message):
            check_host(config(place))
    check_host(config(tmp_path))


def test_weights_on_nvme_without_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.AsyncIOBuilder, "is_compatible", lambda _: True)
    with pytest.raises(UserError, match=r"nvme_path \(not given\) is not a writable directory"):
        check_host({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})
