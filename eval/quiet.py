"""Libraries that say nothing: commands report progress themselves."""

from __future__ import annotations

import logging
import os
import sys
import warnings


def quiet_libraries() -> None:
    """Turn off bars and notices of libraries, imported already or not; this project's warnings remain."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if not sys.stderr.isatty():  # on a terminal its bar shows how loading proceeds
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if transformers := sys.modules.get("transformers"):
        transformers.logging.set_verbosity_error()
        if not sys.stderr.isatty():
            transformers.logging.disable_progress_bar()
    if datasets := sys.modules.get("datasets"):
        datasets.disable_progress_bars()
    for noisy in ("sentence_transformers", "huggingface_hub", "urllib3", "httpx"):  # retries, above all
        logging.getLogger(noisy).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
