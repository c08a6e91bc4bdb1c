"""Libraries speak only when something is wrong; the commands report progress themselves."""

from __future__ import annotations

import logging
import warnings


def quiet_libraries() -> None:
    """No bars and no notices from transformers, datasets and sentence-transformers; warnings of ours stay."""
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
