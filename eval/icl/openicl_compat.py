"""OpenICL 0.1.8 on current libraries: every shim is here, and the rest of `eval` imports `openicl` from here.

What is patched, and why:
- `openai` (needed for API models only), evaluate, nltk and sentence_transformers are imported when used.
- `encode_plus` left transformers: DatasetEncoder calls the tokenizer instead.
- BatchEncoding.to passes keyword arguments now: ListWrapper.to takes them.
- retrievers load tokenizers and sentence models by name: they also take loaded objects.
- nltk's word_tokenize downloads sentence data: BM25 tokenises each text as one sentence.
- the DPP retriever indexes a list with an array: its search returns an array.
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
import numpy as np
import tqdm

from emo.common.errors import UserError

from .tasks import LABEL, LABEL_SLOT, Row, Task, fill


class _Later(types.ModuleType):
    """Stands in for a module while OpenICL is imported: what it takes from it is a function that imports the
    module when it is called. Together these modules take longer to import than torch.
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
        "OpenICL is not installed: its pins contradict this project's, so it comes by a command of its own: "
        "pip install --no-deps openicl",
        code="openicl",
    )
later = {
    name: _Later(name)
    for name in ("openai", "evaluate", "sentence_transformers", "nltk", "nltk.tokenize")
    if name not in sys.modules
}
for name, module in later.items():
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []  # as a package has
sys.modules.update(later)
try:
    import openicl
finally:
    for name in later:
        del sys.modules[name]

from openicl.icl_retriever import (  # noqa: E402
    icl_bm25_retriever,
    icl_dpp_retriever,
    icl_mdl_retriever,
    icl_topk_retriever,
)
from openicl.utils import collators  # noqa: E402


class Template(openicl.PromptTemplate):
    """A task's prompts, of demonstrations and queries, every text filled in one pass.

    OpenICL inserts the demonstrations first and then replaces column tokens in them too, so that a
    demonstration that happens to contain such a token is overwritten with the query.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(dict.fromkeys(task.labels, ""), {}, ice_token="")
        self.task, self.prompt = task, task.prompt

    def generate_ice_item(self, entry: Row, label: str) -> str:
        """Return a row with its label as a demonstration."""
        text = self.prompt.demonstration or self.prompt.text
        return fill(text, entry | {LABEL: self.task.words(label)})

    def generate_label_prompt_item(
        self, entry: Row, ice: str, label: str, remain_sep: bool | None = False
    ) -> str:
        """Return the prompt of a label: demonstrations `ice`, then the query."""
        values = entry | {LABEL: self.task.words(label)}
        return fill(self.prompt.before, values) + ice + fill(self.prompt.text, values)

    def shared_prompt(self, entry: Row, ice: str) -> str:
        """Return the prompt of a row as far as all labels share it."""
        shared, _, _ = self.prompt.text.partition(LABEL_SLOT)
        return fill(self.prompt.before, entry) + ice + fill(shared, entry)


def reader(task: Task, rows: dict[str, list[Row]]) -> openicl.DatasetReader:
    """Return OpenICL's reader over canonical rows, by split, of a task."""
    dataset = datasets.DatasetDict({split: datasets.Dataset.from_list(part) for split, part in rows.items()})
    return openicl.DatasetReader(dataset, input_columns=task.inputs, output_column=LABEL)


class StoredRetriever(openicl.BaseRetriever):
    """Demonstrations that were chosen before, `indices` by test row."""

    def __init__(self, task: Task, rows: dict[str, list[Row]], indices: list[list[int]]) -> None:
        super().__init__(reader(task, rows), ice_num=max(map(len, indices)))
        self.indices = indices

    def retrieve(self) -> list[list[int]]:
        return [list(row) for row in self.indices]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """OpenICL draws a bar for every step and logs each; here the job reports progress instead."""
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


# --- patches ----------------------------------------------------------------------------------------------


def _encode_all(self: openicl.icl_dataset_reader.DatasetEncoder) -> None:
    for index, text in enumerate(self.datalist):
        encoded = self.tokenizer(text, truncation=True, return_tensors="pt", verbose=False)
        ids = encoded["input_ids"][0]
        metadata = {"id": index, "len": len(ids), "text": text}
        entry = {"input_ids": ids, "attention_mask": encoded["attention_mask"][0], "metadata": metadata}
        self.encode_dataset.append(entry)


def _loaded_or(loader: Any) -> Any:
    """Return `loader`, whose `from_pretrained` gives back an object that is not a name as it is."""

    def from_pretrained(name: Any, *args: Any, **kwargs: Any) -> Any:
        return loader.from_pretrained(name, *args, **kwargs) if isinstance(name, str) else name

    return types.SimpleNamespace(from_pretrained=from_pretrained)


def _word_tokenize(text: str) -> list[str]:
    from nltk.tokenize import word_tokenize

    return word_tokenize(text, preserve_line=True)


_dpp_search = icl_dpp_retriever.fast_map_dpp
icl_dpp_retriever.fast_map_dpp = lambda kernel, count: np.array(_dpp_search(kernel, count))
openicl.icl_dataset_reader.DatasetEncoder.init_dataset = _encode_all
collators.ListWrapper.to = lambda self, *args, **kwargs: self.data
icl_topk_retriever.AutoTokenizer = _loaded_or(icl_topk_retriever.AutoTokenizer)
icl_mdl_retriever.AutoModelForCausalLM = _loaded_or(icl_mdl_retriever.AutoModelForCausalLM)
icl_bm25_retriever.word_tokenize = _word_tokenize
