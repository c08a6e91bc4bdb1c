"""Write docs/report.png, a browser's picture of the top of an evaluation report on invented results."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np

from emo.eval.report.gather import Report
from emo.eval.report.page import document
from tests.conftest import REPO
from tests.helpers.results import finish, write_model, write_result

PICTURE = REPO / "docs" / "report.png"
SIZE = (1200, 1036)  # pixels
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
NOTICE = "All numbers on this page are invented. It shows what a report looks like, not how well EMO works."
TASKS = {"sst2": "SST-2", "trec": "TREC", "ag_news": "AG News", "mmlu": "MMLU"}
ACCURACY = {  # in the order of TASKS
    "base": (0.74, 0.52, 0.71, 0.41),
    "mle": (0.84, 0.66, 0.86, 0.37),
    "emo": (0.82, 0.62, 0.86, 0.42),
}


def write_page(directory: Path) -> str:
    """Write invented results, and return the HTML of the first sections of their report."""
    rng = np.random.default_rng(0)
    difficulty = {task: rng.uniform(size=400) for task in TASKS}
    for name, shares in ACCURACY.items():
        facts = {"objective": name, "origin": "models/base", "run": f"runs/{name}"} if name != "base" else {}
        write_model(directory, name, **facts)
        for (task, title), share in zip(TASKS.items(), shares, strict=True):
            noisy = difficulty[task] + rng.normal(0, 0.1, size=400)
            write_result(directory, name, task, (noisy < share).tolist(), title=title)
    finish(directory)
    page = document(Report([directory], title="Example", notice=NOTICE))
    page.sections = page.sections[:2]  # the last sections name library versions
    return page.html()


def source(html: str) -> bytes:
    """Return the PNG chunk that identifies the page in a picture."""
    data = b"tEXtSource\0" + hashlib.sha256(html.encode()).hexdigest().encode()
    return struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))


def main() -> int:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"error: no browser found. Install one of {', '.join(BROWSERS)}.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        page, image = Path(name) / "report.html", Path(name) / "report.png"
        html = write_page(Path(name))
        page.write_text(html, encoding="utf-8")
        options = ["--headless=new", "--disable-gpu", "--hide-scrollbars", f"--screenshot={image}"]
        options += ["--window-size={},{}".format(*SIZE), "--blink-settings=preferredColorScheme=1"]
        options += ["--no-sandbox"] if os.geteuid() == 0 else []
        subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True)
        data = image.read_bytes()
    header = 8 + 25  # signature and IHDR
    PICTURE.write_bytes(data[:header] + source(html) + data[header:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
