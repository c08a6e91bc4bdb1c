"""OpenICL 0.1.8 on current libraries. The rest of `eval` imports `openicl` from this module.

The patches:
- OpenICL imports openai (for API models only), evaluate, nltk and sentence_transformers. They are deferred
  until use.
- transformers removed `encode_plus`. DatasetEncoder calls the tokenizer instead.
- BatchEncoding.to passes keyword arguments. ListWrapper.to accepts them.
- Retrievers load tokenizers and sentence models by name. They also accept loaded objects.
- nltk's word_tokenize downloads sentence data. BM25 tokenises each text as one sentence.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import datasets
import tqdm

from emo.common.errors import UserError

from .tasks import LABEL, LABEL_SLOT, Row, Task, fill


class _DeferredModule(types.ModuleType):
    """A placeholder for a module while OpenICL is imported.

    Its attributes are functions that import the module when called. These modules take longer to import than
    torch.
    """

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        name = self.__name__

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module(name), attribute)(*args, **kwargs)

        return call


if importlib.util.find_spec("openicl") is None:
    raise UserError(
        "OpenICL is not installed. Its version pins conflict with this project's, so install it separately: "
        "pip install --no-deps openicl",
        code="openicl",
    )
deferred = {
    name: _DeferredModule(name)
    for name in ("openai", "evaluate", "sentence_transformers", "nltk", "nltk.tokenize")
    if name not in sys.modules
}
for name, module in deferred.items():
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []  # marks it as a package
sys.modules.update(deferred)
try:
    import openicl
finally:
    for name in deferred:
        del sys.modules[name]

from openicl.icl_retriever import (  # noqa: E402
    icl_bm25_retriever,
    icl_topk_retriever,
)
from openicl.utils import collators  # noqa: E402


class Template(openicl.PromptTemplate):
    """The prompts of a task. All slots are filled in one pass.

    OpenICL inserts the demonstrations first and then also replaces column tokens in them. A demonstration
    that contains such a token would receive text of the query.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(dict.fromkeys(task.labels, ""), {}, ice_token="")
        self.task = task
        self.prompt = task.prompt

    def generate_ice_item(self, entry: Row, label: str) -> str:
        """Return a row with its label as a demonstration."""
        text = self.prompt.demonstration or self.prompt.text
        return fill(text, entry | {LABEL: self.task.words(label)})

    def generate_label_prompt_item(
        self, entry: Row, ice: str, label: str, remain_sep: bool | None = False
    ) -> str:
        """Return the prompt of a label: the demonstrations `ice`, then the query."""
        values = entry | {LABEL: self.task.words(label)}
        return fill(self.prompt.before, values) + ice + fill(self.prompt.text, values)

    def shared_prompt(self, entry: Row, ice: str) -> str:
        """Return the part of a row's prompt that precedes the label."""
        shared, _, _ = self.prompt.text.partition(LABEL_SLOT)
        return fill(self.prompt.before, entry) + ice + fill(shared, entry)


def reader(task: Task, rows: dict[str, list[Row]]) -> openicl.DatasetReader:
    """Return OpenICL's reader of a task's canonical rows by split."""
    dataset = datasets.DatasetDict({split: datasets.Dataset.from_list(part) for split, part in rows.items()})
    return openicl.DatasetReader(dataset, input_columns=task.inputs, output_column=LABEL)


class StoredRetriever(openicl.BaseRetriever):
    """Returns demonstrations that were chosen before. indices: numbers of pool rows for each test row."""

    def __init__(self, task: Task, rows: dict[str, list[Row]], indices: list[list[int]]) -> None:
        super().__init__(reader(task, rows), ice_num=max(map(len, indices)))
        self.indices = indices

    def retrieve(self) -> list[list[int]]:
        return [list(row) for row in self.indices]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence OpenICL's progress bars and log lines. The job reports progress instead."""
    original = tqdm.std.tqdm.__init__

    def silent(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **(kwargs | {"disable": True}))

    previous = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with mock.patch.object(tqdm.std.tqdm, "__init__", silent):
            yield
    finally:
        logging.disable(previous)


def _encode_all(self: openicl.icl_dataset_reader.DatasetEncoder) -> None:
    for index, text in enumerate(self.datalist):
        encoded = self.tokenizer(text, truncation=True, return_tensors="pt", verbose=False)
        ids = encoded["input_ids"][0]
        metadata = {"id": index, "len": len(ids), "text": text}
        entry = {"input_ids": ids, "attention_mask": encoded["attention_mask"][0], "metadata": metadata}
        self.encode_dataset.append(entry)


def _loaded_or(loader: Any) -> Any:
    """Return a loader whose `from_pretrained` returns a loaded object unchanged."""

    def from_pretrained(name: Any, *args: Any, **kwargs: Any) -> Any:
        return loader.from_pretrained(name, *args, **kwargs) if isinstance(name, str) else name

    return types.SimpleNamespace(from_pretrained=from_pretrained)


def _word_tokenize(text: str) -> list[str]:
    from nltk.tokenize import word_tokenize

    return word_tokenize(text, preserve_line=True)


openicl.icl_dataset_reader.DatasetEncoder.init_dataset = _encode_all
collators.ListWrapper.to = lambda self, *args, **kwargs: self.data
icl_topk_retriever.AutoTokenizer = _loaded_or(icl_topk_retriever.AutoTokenizer)
icl_bm25_retriever.word_tokenize = _word_tokenize
