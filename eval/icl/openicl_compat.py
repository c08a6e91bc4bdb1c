"""OpenICL 0.1.8 on current libraries: every shim is here, and the rest of `eval` imports OpenICL from here.

What is patched, and why:
- `openai` (needed for API models only), evaluate, nltk and sentence_transformers are imported when used.
- `encode_plus` left transformers: DatasetEncoder calls the tokenizer instead.
- BatchEncoding.to passes keyword arguments now: ListWrapper.to takes them.
- retrievers load tokenizers and sentence models by name: they also take loaded objects.
- nltk's word_tokenize downloads sentence data: BM25 tokenises each text as one sentence.
- evaluate.load("accuracy") downloads the metric: AccEvaluator gets a local one of the same form.
- the DPP retriever indexes a list with an array: its search returns an array.
- ChannelInferencer calls a private method that its name hides from it.

`Template` also repairs what PromptTemplate gets wrong (see there); stock templates keep OpenICL's behaviour.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import re
import sys
import types
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from emo.common.errors import UserError


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


@contextlib.contextmanager
def _imported_later(*names: str) -> Iterator[None]:
    """Modules that OpenICL imports at its top but needs for few of its classes."""
    placeholders = {name: _Later(name) for name in names if name not in sys.modules}
    for name, module in placeholders.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []  # as a package has
    sys.modules.update(placeholders)
    try:
        yield
    finally:
        for name in placeholders:
            del sys.modules[name]


if importlib.util.find_spec("openicl") is None:
    raise UserError(
        "OpenICL is not installed: its pins contradict this project's, so it comes by a command of its own: "
        "pip install --no-deps openicl"
    )
with _imported_later("openai", "evaluate", "sentence_transformers", "nltk", "nltk.tokenize"):
    import openicl  # noqa: F401

from openicl import (  # noqa: E402
    AccEvaluator,
    BaseRetriever,
    BM25Retriever,
    DatasetReader,
    DPPRetriever,
    MDLRetriever,
    PPLInferencer,
    PromptTemplate,
    RandomRetriever,
    TopkRetriever,
    VotekRetriever,
    ZeroRetriever,
)
from openicl.icl_dataset_reader import DatasetEncoder  # noqa: E402
from openicl.icl_evaluator import icl_acc_evaluator  # noqa: E402
from openicl.icl_inferencer import ChannelInferencer  # noqa: E402
from openicl.icl_inferencer.icl_base_inferencer import PPLInferencerOutputHandler  # noqa: E402
from openicl.icl_retriever import (  # noqa: E402
    icl_bm25_retriever,
    icl_dpp_retriever,
    icl_mdl_retriever,
    icl_topk_retriever,
)
from openicl.utils import collators  # noqa: E402

__all__ = [
    "AccEvaluator",
    "BM25Retriever",
    "BaseRetriever",
    "ChannelInferencer",
    "DPPRetriever",
    "DatasetReader",
    "MDLRetriever",
    "PPLInferencer",
    "PPLInferencerOutputHandler",
    "PromptTemplate",
    "RandomRetriever",
    "Template",
    "TopkRetriever",
    "VotekRetriever",
    "ZeroRetriever",
    "quiet",
]


class Template(PromptTemplate):
    """A PromptTemplate that fills all places in one pass.

    OpenICL inserts the demonstrations first and then replaces column tokens in them too, so that a
    demonstration that happens to contain such a token is overwritten with the query; and it forgets to
    remove the separator token.
    """

    @classmethod
    def of(cls, template: PromptTemplate) -> Template:
        """The same template with the repaired filling."""
        if isinstance(template, cls):
            return template
        return cls(
            template.template,
            template.column_token_map,
            template.selected_column_name,
            template.selected_column_map,
            template.ice_token,
            template.sep_token,
        )

    def generate_ice_item(self, entry: dict[str, Any], label: Hashable) -> str:
        """One demonstration: the template of its label, filled with its columns."""
        return self._fill(entry, "", label, "")

    def generate_label_prompt_item(
        self, entry: dict[str, Any], ice: str, label: Hashable, remain_sep: bool | None = False
    ) -> str:
        """The prompt of one label: demonstrations `ice`, then the query."""
        if self.ice_token is None:
            raise ValueError("PromptTemplate.ice_token should be not None when generates prompt")
        return self._fill(entry, ice, label, self.sep_token or "" if remain_sep else "")

    def _fill(self, entry: dict[str, Any], ice: str, label: Hashable, separator: str) -> str:
        text = self.template[label] if isinstance(self.template, dict) else self.template
        values = {}
        for column, token in self.column_token_map.items():
            mapped = self.selected_column_map is not None and column == self.selected_column_name
            values[token] = str(self.selected_column_map[label] if mapped else entry[column])
        if self.ice_token is not None:
            values[self.ice_token] = ice
        if self.sep_token is not None:
            values[self.sep_token] = separator
        # Longest first, so that one token may be the beginning of another.
        pattern = "|".join(re.escape(token) for token in sorted(values, key=len, reverse=True))
        return re.sub(pattern, lambda match: values[match.group()], text)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """OpenICL draws a bar for every step and logs each; here the job reports progress instead."""
    import logging

    import tqdm

    previous = logging.root.manager.disable
    bars = (tqdm.tqdm.__init__, tqdm.std.tqdm.__init__)
    original = tqdm.std.tqdm.__init__

    def silent(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **(kwargs | {"disable": True}))

    logging.disable(logging.INFO)
    tqdm.std.tqdm.__init__ = silent
    try:
        yield
    finally:
        tqdm.std.tqdm.__init__ = bars[1]
        logging.disable(previous)


# --- patches ----------------------------------------------------------------------------------------------


def _encode_all(self: DatasetEncoder) -> None:
    for index, text in enumerate(self.datalist):
        encoded = self.tokenizer(text, truncation=True, return_tensors="pt", verbose=False)
        ids = encoded["input_ids"][0]
        metadata = {"id": index, "len": len(ids), "text": text}
        entry = {"input_ids": ids, "attention_mask": encoded["attention_mask"][0], "metadata": metadata}
        self.encode_dataset.append(entry)


class _LoadedOr:
    """`from_pretrained` of `loader`, except that an object which is not a name is returned as it is."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def from_pretrained(self, name: Any, *args: Any, **kwargs: Any) -> Any:
        return self._loader.from_pretrained(name, *args, **kwargs) if isinstance(name, str) else name


class _LocalAccuracy:
    """The `accuracy` metric of the evaluate package, without its download."""

    def compute(self, references: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
        equal = sum(r == p for r, p in zip(references, predictions, strict=True))
        return {"accuracy": equal / len(references)}


def _word_tokenize(text: str) -> list[str]:
    from nltk.tokenize import word_tokenize

    return word_tokenize(text, preserve_line=True)


_dpp_search = icl_dpp_retriever.fast_map_dpp
icl_dpp_retriever.fast_map_dpp = lambda kernel, count: np.array(_dpp_search(kernel, count))
DatasetEncoder.init_dataset = _encode_all
collators.ListWrapper.to = lambda self, *args, **kwargs: self.data
icl_topk_retriever.AutoTokenizer = _LoadedOr(icl_topk_retriever.AutoTokenizer)
icl_mdl_retriever.AutoModelForCausalLM = _LoadedOr(icl_mdl_retriever.AutoModelForCausalLM)
icl_bm25_retriever.word_tokenize = _word_tokenize
icl_acc_evaluator.evaluate = types.SimpleNamespace(load=lambda name: _LocalAccuracy())
ChannelInferencer._ChannelInferencer__get_ppl = PPLInferencer._PPLInferencer__get_ppl
