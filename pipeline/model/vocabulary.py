"""Give a model an extended vocabulary, so that it needs fewer tokens for a domain or a language.

The new pieces come from the prepared data of a recipe (data_prep/encoding/vocabulary.py). The embedding and
the head row of a new piece start as the mean of those of its old pieces. Nothing else changes, so the result
is an ordinary model for training, evaluation and other programs.
"""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from emo.common.errors import UserError
from emo.data_prep.encoding.tokenizer import load_tokenizer, save_tokenizer, text_ids
from emo.data_prep.encoding.vocabulary import Extension, extend_vocabulary
from emo.data_prep.shards.format import TokenDataset, open_prepared

from ..config import RunConfig
from ..engine.device.devices import usable_attention
from .build import check_fits, load_pretrained, model_config
from .export import complete_export
from .readers import copy_processor, write_config

SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
MEASURED_DOCUMENTS = 16
MEASURED_TOKENS = 256  # of each of these documents, in the old vocabulary


class Measured(NamedTuple):
    """Tokens and loss per character of some documents."""

    tokens: float
    nll: float  # nats


class Extended(NamedTuple):
    """The changes of an extension."""

    pieces: int
    before: Measured
    after: Measured


def extend_model(
    config: RunConfig, pieces: int, special: Sequence[str], multiple: int, target: Path
) -> Extended:
    """Write the model of a recipe with an extended vocabulary to a new directory.

    Args:
        config: The recipe. Its data are prepared with the tokenizer of its model.
        pieces: Largest number of new pieces.
        special: Special tokens to add, for example those of a chat template.
        multiple: The number of embeddings becomes a multiple of this.
        target: Directory to create.

    Raises:
        UserError: The tokenizer is not BPE, the data are not prepared, or the model lacks embeddings.
    """
    if target.exists():
        raise UserError(f"{target} exists. Give a new directory", code="export-target")
    if config.model.path is None:
        raise UserError("set model.path, because only a pre-trained model can be extended", code="extension")
    data, validation = open_prepared(config.data)
    hf_config = model_config(config.model)
    check_fits(hf_config, config.model, data.manifest)
    old = load_tokenizer(config.data.dir / "tokenizer")
    extension = extend_vocabulary(old.backend_tokenizer, iterate_texts(data, old), pieces, special)
    attention = usable_attention(config.model, hf_config)
    model: Any = load_pretrained(config.model.path, config.model.revision, config.model.dtype, attention)
    held_out = next(iter(validation.values()), data)
    documents = [
        old.decode(text_ids(old, text)[:MEASURED_TOKENS], skip_special_tokens=True)
        for text in itertools.islice(iterate_texts(held_out, old), MEASURED_DOCUMENTS)
    ]
    before = measure_texts(model, old, documents)
    resize(model, extension, multiple)

    def write(directory: Path) -> None:
        model.save_pretrained(directory)
        write_config(directory, {})
        copy_processor(model, config.model.path, config.model.revision, directory)
        write_extended_tokenizer(config.data.dir / "tokenizer", extension, directory)

    complete_export(target, write, load_tokenizer)
    after = measure_texts(model, load_tokenizer(target), documents)
    return Extended(len(extension.parts), before, after)


def iterate_texts(data: TokenDataset, tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    """Yield the text of each document or example in prepared rows, or of its part in a row."""
    for row in range(len(data)):
        for ids in data.documents_of(row):
            yield tokenizer.decode(ids.tolist(), skip_special_tokens=True)


def resize(model: Any, extension: Extension, multiple: int) -> None:
    """Add the rows of new pieces to embeddings and head.

    A row is the mean of the rows of its old pieces, in float32 (FVT, Gee et al. 2022). Special tokens get the
    mean of all old rows. Raises UserError if old tokens have no embedding.
    """
    weight = model.get_input_embeddings().weight
    first = min(extension.parts, default=len(weight))  # new ids follow the old ones
    added = extension.tokenizer.get_added_tokens_decoder()
    special = {number for number, token in added.items() if token.special}
    if not special.issuperset(range(len(weight), first)):  # Gemma 3 has a special token without embedding
        problem = f"the model has {len(weight)} embeddings and its tokenizer {first} pieces"
        raise UserError(f"{problem}, so the tokenizer belongs to another model", code="extension")
    known = min(first, len(weight))
    rows = max(len(weight), max(extension.parts, default=0) + 1)
    model.resize_token_embeddings(math.ceil(rows / multiple) * multiple, mean_resizing=False)
    layers: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    tensors = [tensor for layer in layers for tensor in (layer.weight, getattr(layer, "bias", None))]
    different = {id(tensor): tensor for tensor in tensors if tensor is not None}  # a tied head once
    with torch.no_grad():
        for tensor in different.values():
            mean = tensor[:known].float().mean(0)
            for new in range(known, len(tensor)):
                old = extension.parts.get(new)
                tensor[new] = tensor[old].float().mean(0) if old else mean


def write_extended_tokenizer(source: Path, extension: Extension, target: Path) -> None:
    """Write the extended tokenizer with the settings and the chat template of the old one."""
    for name in SETTINGS:  # but no file with the old vocabulary
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    extension.tokenizer.save(str(target / "tokenizer.json"))
    save_tokenizer(target, None, target)


def measure_texts(model: nn.Module, tokenizer: PreTrainedTokenizerFast, documents: Sequence[str]) -> Measured:
    """Return tokens and loss per character of the documents, without their first token."""
    tokens = characters = 0
    nll = 0.0
    model.eval()
    for text in documents:
        ids: Tensor = torch.tensor([text_ids(tokenizer, text)])
        if ids.shape[1] < 2:
            continue
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        nll += float(nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        tokens += ids.shape[1]
        characters += len(text)
    return Measured(tokens / max(1, characters), nll / max(1, characters))
