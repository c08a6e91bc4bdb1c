"""Write tiny models as a run exports them, and read them with another release of transformers.

python tests/helpers/exporting.py DIRECTORY ...     (with that release; prints a line of JSON per directory)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

TEXTS = "texts.json"  # file in an export with the texts to encode
TOKENS = 24  # length of the rows whose loss is compared


def loss(model: Any) -> tuple[float, list[float]]:
    """Return the model's mean loss on fixed token ids, and its last logits."""
    size = model.config.get_text_config().vocab_size
    ids = torch.randint(3, size, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, use_cache=False).logits.float()
    value = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()
    return value, logits[0, -1].tolist()


def write(model: Any, directory: Path, data: Any = None) -> Path:
    """Write a model as a run exports it. `data` is the configuration of prepared data."""
    from emo.pipeline.config import RunConfig
    from emo.pipeline.model.export import check_export, view_model, write_export

    data = data or {"dir": directory.parent / "data", "tokenizer": "x", "sources": [{"files": "x"}]}
    tree = {"output_dir": directory.parent, "data": data, "model": {"path": "x", "dtype": "float32"}}
    config = RunConfig(**tree, train={"max_steps": 1})  # type: ignore[arg-type]
    write_export(view_model(model, config), config, directory, {}, check_export)
    return directory


def read(directory: Path) -> dict[str, Any]:
    """Load an export with this release of transformers, and return its loss and its mismatched keys."""
    import transformers

    transformers.logging.set_verbosity_error()
    model_type = json.loads((directory / "config.json").read_text(encoding="utf-8"))["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        return {"unknown": "not a family of this release"}
    try:
        load = transformers.AutoModelForCausalLM.from_pretrained
        model, report = load(directory, output_loading_info=True, torch_dtype=torch.float32)
        return {
            "loss": loss(model),
            "keys": sorted(map(str, report["missing_keys"] + report["unexpected_keys"])),
        }
    except Exception as error:
        try:
            loss(
                transformers.AutoModelForCausalLM.from_config(
                    transformers.AutoConfig.from_pretrained(directory)
                )
            )
        except Exception:
            return {"unknown": "this release fails with a model of its own too"}
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def read_tokenizer(directory: Path) -> dict[str, Any]:
    """Return the ids of texts.json with this release, and the vocabulary data that the `gguf` package reads.

    Raises ValueError if `generate` does not accept the output of the tokenizer.
    """
    import gguf
    import transformers

    texts = json.loads((directory / TEXTS).read_text(encoding="utf-8"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    model.generate(**tokenizer(texts[-1], return_tensors="pt"), max_new_tokens=2, pad_token_id=0)
    special = gguf.SpecialVocab(directory, load_merges=True)
    pieces = (
        gguf.vocab.SentencePieceVocab if (directory / "tokenizer.model").is_file() else gguf.vocab.BpeVocab
    )
    scores = [score for _, score, _ in pieces(directory).all_tokens()]
    return {
        "ids": tokenizer(texts)["input_ids"],
        "special": special.special_token_ids,
        "template": special.chat_template,
        "scores": scores,
    }


if __name__ == "__main__":
    for name in sys.argv[1:]:
        tokenizer = (Path(name) / TEXTS).is_file()
        print(json.dumps({"name": name} | (read_tokenizer if tokenizer else read)(Path(name))), flush=True)
