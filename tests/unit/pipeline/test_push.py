"""emo push: what a server with the Hub's endpoints receives, and what is not sent."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from emo.pipeline.cli import main
from tests.conftest import REPO
from tests.helpers.evaluating import tiny_model
from tests.helpers.launching import ENVIRONMENT

TOKEN = "hf_" + "x" * 34


class Hub(ThreadingHTTPServer):
    """A Hub with one user and one repository."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.private = True
        self.blobs: dict[str, bytes] = {}
        self.files: dict[str, bytes] = {}
        self.branch = ""


class Handler(BaseHTTPRequestHandler):
    """The endpoints that huggingface_hub calls for an upload."""

    server: Hub
    timeout = 20

    def answer(self, content: object, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = b""
        while size := int(self.rfile.readline(), 16):
            parts += self.rfile.read(size)
            self.rfile.readline()
        return parts

    def do_GET(self) -> None:
        if "/tree/" in self.path:
            files = ({"type": "file", "path": name, "oid": "1", "size": 1} for name in self.server.files)
            self.answer(list(files))
            return
        known = self.path.startswith("/api/models/me/mine") and "resolve" not in self.path
        self.answer({"id": "me/mine", "private": self.server.private}, 200 if known else 404)

    def do_PUT(self) -> None:
        self.server.blobs[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_POST(self) -> None:
        hub = self.server
        body = self.body()
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer({"error": "forbidden"}, 403)
        elif self.path.endswith("/create"):
            self.answer({"url": f"{hub.address}/me/mine", "name": "me/mine"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [(f["path"], "lfs" if f["path"].endswith(".safetensors") else "regular") for f in files]
            self.answer(
                {"files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes]}
            )
        elif self.path.endswith("/lfs/objects/batch"):
            actions = [
                o | {"actions": {"upload": {"href": f"{hub.address}/blob/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": actions})
        elif "/commit/" in self.path:
            hub.branch = self.path.partition("/commit/")[2]
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                if line["key"] == "deletedFile":
                    del hub.files[value["path"]]
                if line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.blobs[value["oid"]]
            self.answer({"commitUrl": f"{hub.address}/me/mine/commit/1", "commitOid": "1"})
        else:  # validate the front matter of a card, or create a branch
            self.answer({"errors": [], "warnings": []})


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join(20)
    server.server_close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Write a finished run whose export has no card."""
    run_dir = tmp_path / "run"
    tiny_model(run_dir / "export")
    info = {"origin": "owner/base", "objective": "emo", "step": 8, "run": str(run_dir)}
    (run_dir / "export/export.json").write_text(json.dumps(info))
    records = [
        {"step": step, "set": "held_out", "validation_nll": 9.0 - step, "validation_change": -float(step),
         "validation_change_low": -step - 1.0, "validation_change_high": 1.0 - step}
        for step in (4, 8, 12)
    ]  # fmt: skip
    # of too few documents for an interval
    few = dict.fromkeys(("validation_change_low", "validation_change_high"))
    records.append({"step": 8, "set": "few", "validation_nll": 2.0, "validation_change": -1.0} | few)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run_dir


def push(hub: Hub | None, *arguments: object, token: str = TOKEN) -> tuple[int, str]:
    """Run `emo push` in this process, which then knows only this Hub, and return exit code and output."""
    address = "http://127.0.0.1:9" if hub is None else hub.address
    settings = {"ENDPOINT": address, "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False}
    output = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        patch.setenv("HF_TOKEN", token)
        for name, value in (settings | {"HF_TOKEN_PATH": "/nowhere"}).items():
            patch.setattr(constants, name, value)
        code = main(["push", *map(str, arguments)])
    return code, output.getvalue()


def test_an_export_arrives_with_a_card(hub: Hub, run_dir: Path) -> None:
    """The first push is that of a process, which reads its settings from the environment."""
    home = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN}
    home |= {"HF_ENDPOINT": hub.address, "HF_HOME": "/nowhere"}
    command = [sys.executable, "-m", "emo", "push", str(run_dir), "me/mine", "--private", "--revision", "v1"]
    options = {"cwd": REPO, "capture_output": True, "text": True, "timeout": 100}
    done = subprocess.run(command, env=ENVIRONMENT | home, **options)  # type: ignore[call-overload]
    assert done.returncode == 0 and f"{hub.address}/me/mine/tree/v1" in done.stdout, done.stderr
    assert hub.branch == "v1"
    written = {p.relative_to(run_dir / "export").as_posix(): p for p in (run_dir / "export").rglob("*")}
    assert hub.files.keys() == written.keys() | {"README.md"}
    for name in written.keys() - {"export.json"}:
        assert hub.files[name] == written[name].read_bytes(), name
    assert {hashlib.sha256(blob).hexdigest() for blob in hub.blobs.values()} == hub.blobs.keys()
    assert str(run_dir.parent) not in b"".join(hub.files.values()).decode(errors="replace")
    assert json.loads(hub.files["export.json"])["step"] == 8
    card = hub.files["README.md"].decode()
    assert yaml.safe_load(card.split("---")[1])["base_model"] == "owner/base"
    assert "emo" in card and "| held_out | 8 | 1.0000 | -8.0000 [-9.0000, -7.0000] |" in card
    (run_dir / "export/README.md").write_text("my card\n")  # sent unchanged
    (run_dir / "export/.cache").mkdir()
    (run_dir / "export/.cache/token").write_text("secret")
    hub.files |= {"model-00001-of-00002.safetensors": b"", "notes.txt": b""}  # from an earlier upload
    hub.files |= {"chat_template.jinja": b"", "added_tokens.json": b""}
    assert push(hub, run_dir / "export", "me/mine")[0] == 0
    assert hub.files["README.md"] == b"my card\n" and hub.branch == "main"
    assert hub.files.keys() == written.keys() | {"README.md", "notes.txt"}


def test_an_adapter_needs_a_base_model_that_others_have(hub: Hub, tmp_path: Path) -> None:
    tiny_model(tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    settings = {"base_model_name_or_path": str(tmp_path / "base")}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(settings))
    shutil.copytree(tmp_path / "base", tmp_path / "both")
    shutil.copytree(tmp_path / "adapter", tmp_path / "both/adapter")
    for name in ("adapter", "both"):
        code, text = push(hub, tmp_path / name, "me/mine")
        assert code == 2 and "[adapter]" in text and not hub.files


def test_nothing_is_sent_unless_all_is_right(hub: Hub, run_dir: Path) -> None:
    hub.private = False
    refusals = [
        push(hub, run_dir, "me/mine", "--private"),
        push(hub, run_dir, "me/mine", token="hf_other"),
        push(hub, run_dir, "me/mine", token=""),
    ]
    assert [(code, text.rpartition("[")[2]) for code, text in refusals] == [(2, "hub-access]\n")] * 3
    code, text = push(None, run_dir, "me/mine")
    assert code == 1 and "[hub-offline]" in text
    shutil.copytree(run_dir / "export", run_dir / "step-000008.partial/hf")
    assert "[no-export]" in push(hub, run_dir / "step-000008.partial", "me/mine")[1]
    weights = run_dir / "export/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    code, text = push(hub, run_dir, "me/mine")
    assert code == 2 and "[no-weights]" in text
    assert not hub.files and not hub.blobs
