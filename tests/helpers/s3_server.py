"""A small S3 server that injects failures. Its objects are on disk, so that it can be killed and restarted.

    python -m tests.helpers.s3_server DIRECTORY PORT [FAIL] [DROP] [SLOW]

FAIL is the share of requests that get a 500, before or after they took effect. DROP is the share whose
connection is closed instead. SLOW is the duration of a listing in seconds. Buckets are directories.
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit
from urllib.request import urlopen
from xml.sax.saxutils import escape

from tests.conftest import REPO


class Handler(BaseHTTPRequestHandler):
    """Serve objects of buckets. Each object is a file whose name is the quoted key."""

    protocol_version = "HTTP/1.1"
    root = Path()
    fail = drop = slow = 0.0

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in ({"content_length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def error(self, code: int, name: str) -> None:
        self.answer(code, f"<Error><Code>{name}</Code><Message>{name}</Message></Error>".encode())

    def handle_request(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        content = self.rfile.read(length)
        chance = random.random()
        after = random.random() < 0.5
        if chance < self.fail + self.drop:
            if after:  # the request takes effect, and the response is lost
                real, self.wfile = self.wfile, open(os.devnull, "wb")  # noqa: PTH123, SIM115
                self.act(content)
                self.wfile = real
            self.close_connection = chance >= self.fail
            if not self.close_connection:
                self.error(500, "InternalError")
            return
        self.act(content)

    do_GET = do_HEAD = do_PUT = do_DELETE = handle_request  # noqa: N815

    def act(self, content: bytes) -> None:
        url = urlsplit(self.path)
        _, bucket, *key = unquote(url.path).split("/", 2)
        if not (self.root / bucket).is_dir():
            return self.error(404, "NoSuchBucket")
        if not key or not key[0]:
            return self.list(bucket, parse_qs(url.query))
        path = self.root / bucket / quote(key[0], safe="")
        if self.command == "PUT":
            return self.put(path, content)
        if self.command == "DELETE":
            path.unlink(missing_ok=True)
            return self.answer(204)
        try:
            data, status = path.read_bytes(), path.stat()
        except FileNotFoundError:
            return self.error(404, "NoSuchKey")
        headers = {"ETag": etag(data), "Last_Modified": email.utils.formatdate(status.st_mtime, usegmt=True)}
        asked = self.headers.get("range")
        if not asked:
            return self.answer(200, data, **headers)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last or len(data)) + 1] if first else data[-int(last) :]
        begin = int(first) if first else len(data) - len(part)
        headers["Content_Range"] = f"bytes {begin}-{begin + len(part) - 1}/{len(data)}"
        return self.answer(206, part, **headers)

    def put(self, path: Path, content: bytes) -> None:
        part = self.root / f".{uuid.uuid4().hex}"
        part.write_bytes(content)
        try:
            if self.headers.get("if-none-match") == "*":
                os.link(part, path)
            else:
                part.replace(path)
        except FileExistsError:
            return self.error(412, "PreconditionFailed")
        finally:
            part.unlink(missing_ok=True)
        return self.answer(200, ETag=etag(content))

    def list(self, bucket: str, query: dict[str, list[str]]) -> None:
        time.sleep(self.slow)
        prefix, delimiter = (query.get(name, [""])[0] for name in ("prefix", "delimiter"))
        entries, folders = [], set()
        for path in sorted((self.root / bucket).iterdir(), key=lambda path: unquote(path.name)):
            key = unquote(path.name)
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in key[len(prefix) :]:
                folders.add(prefix + key[len(prefix) :].partition(delimiter)[0] + delimiter)
                continue
            with contextlib.suppress(FileNotFoundError):
                data, modified = path.read_bytes(), time.gmtime(path.stat().st_mtime)
                entries.append(
                    f"<Contents><Key>{escape(quote(key))}</Key><ETag>{escape(etag(data))}</ETag>"
                    f"<LastModified>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', modified)}</LastModified>"
                    f"<Size>{len(data)}</Size><StorageClass>STANDARD</StorageClass></Contents>"
                )
        common = (f"<CommonPrefixes><Prefix>{quote(f)}</Prefix></CommonPrefixes>" for f in sorted(folders))
        text = f"<EncodingType>url</EncodingType><IsTruncated>false</IsTruncated><Name>{bucket}</Name>"
        text = f"<ListBucketResult>{text}{''.join(entries)}{''.join(common)}</ListBucketResult>"
        self.answer(200, text.encode(), Content_Type="application/xml")


def etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


class S3Server:
    """The server as a process with one bucket `data`, and the environment that clients need."""

    def __init__(self, root: Path, port: int, *faults: float) -> None:
        (root / "data").mkdir(parents=True, exist_ok=True)
        self._command = [sys.executable, "-m", "tests.helpers.s3_server", str(root), str(port)]
        self._command += map(str, faults)
        self.url = f"http://127.0.0.1:{port}"
        self.environment = {"AWS_ENDPOINT_URL": self.url, "AWS_DEFAULT_REGION": "us-east-1"}
        self.environment |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, cwd=REPO)
        deadline = time.monotonic() + 300
        while True:
            with contextlib.suppress(OSError), urlopen(f"{self.url}/data", timeout=5):
                return
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.05)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def s3_server(root: Path, port: int, *faults: float) -> Iterator[S3Server]:
    """Run a server for a block."""
    server = S3Server(root, port, *faults)
    try:
        server.start()
        yield server
    finally:
        server.kill()


if __name__ == "__main__":
    Handler.root = Path(sys.argv[1])
    Handler.fail, Handler.drop, Handler.slow = [*map(float, sys.argv[3:]), 0.0, 0.0, 0.0][:3]
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
