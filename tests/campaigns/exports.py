"""Read exports of every family with transformers 4, and their vocabularies with llama.cpp's reader.

    python -m tests.campaigns.exports [--families mixtral gpt_neox] [--release 4.57.6]

The older release is installed into build/readers, which precedes the environment's packages. A family passes
if that release expects the same tensors and its loss and logits are within 1e-3, or if it is unknown there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import logging

from emo.data_prep.encoding.tokenizer import PROBES, load_tokenizer
from tests.campaigns.campaign import Campaign, conduct
from tests.conftest import REPO
from tests.helpers.chat_templates import CHATML
from tests.helpers.corpus import prepared, tiny_tokenizer, write_jsonl
from tests.helpers.corpus import texts as lines
from tests.helpers.exporting import TEXTS, loss, write
from tests.helpers.families import EXPORTED, FAMILIES, family, tiny_llama

READERS = REPO / "build" / "readers"
OTHERS = ["tokenizers>=0.22,<0.23", "huggingface_hub<1", "gguf"]
REAL = Path(os.environ.get("SHARED_DATA", REPO.parent / "shared" / "data"))
ROLES = ["<|im_start|>", "<|im_end|>"]
NEAR = 1e-3  # absolute for the loss, relative to the largest logit for logits
# transformers 5 also writes experts for LongCat's "zero experts", which are never read.
UNREAD = {"longcat_flash": ".experts.4."}


def install(release: str) -> Path:
    """Install a release of transformers and OTHERS if necessary, and return their directory."""
    target = READERS / release
    if not (target / "ready").is_file():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps"]
        subprocess.run([*pip, "--target", target, f"transformers=={release}", *OTHERS], check=True)
        (target / "ready").touch()
    return target


def run(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    logging.disable_progress_bar()
    tokenizers(directory, args, show)
    families(directory, args, show)


def families(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    here, written = {}, []
    for name in args.families or (FAMILIES | EXPORTED):
        model = family(name)
        written.append(write(model, directory / name))
        here[name] = loss(model)
    for found in read(args.release, written):
        name = Path(found["name"]).name
        expected, logits = here[name]
        part = f"transformers {args.release}"
        if problem := found.get("error") or found.get("unknown"):
            show(part, name, problem, "error" not in found)
            continue
        value, others = found["loss"]
        error = max(abs(a - b) for a, b in zip(logits, others, strict=True)) / max(map(abs, logits))
        keys = [key for key in found["keys"] if UNREAD.get(name, "\0") not in key]
        near = abs(value - expected) < NEAR and error < NEAR and not keys
        show(part, name, f"loss {value:.4f} of {expected:.4f}, logits within {error:.0e}; {keys[:3]}", near)


def read(release: str, exports: list[Path]) -> Iterator[dict[str, Any]]:
    """Yield the results of reading each export with a release of transformers."""
    environment = os.environ | {"PYTHONPATH": str(install(release)), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-P", REPO / "tests/helpers/exporting.py", *exports]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return map(json.loads, done.stdout.splitlines())


def tokenizers(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    """Check exported tokenizers from each kind of file, with a chat template and its role tokens."""
    sources = {"trained": tiny_tokenizer() / "model"}
    sources |= {path.name: path for path in sorted((REAL / "tokenizers").glob("*"))}
    written = {}
    for name, source in sources.items():
        root = directory / f"tokenizer-{name}"
        shutil.copytree(source, root / "base")
        base = load_tokenizer(root / "base")
        base.add_special_tokens({"additional_special_tokens": ROLES})
        base.chat_template = CHATML
        base.save_pretrained(root / "base")
        turns = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It is said."}]
        write_jsonl(root / "a.jsonl", [{"messages": [*turns, *turns][: 2 + i % 2 * 2]} for i in range(9)])
        settings = {"kind": "instruct", "template": "chat_template", "sequence_len": 128}
        data = prepared(root, tokenizer=str(root / "base"), **settings)
        export = write(tiny_llama(len(base)), root / "export", data)
        texts = [*PROBES, *(" ".join(ROLES) + text for text in lines(20))]
        (export / TEXTS).write_text(json.dumps(texts), encoding="utf-8")
        written[name] = (export, load_tokenizer(export), texts)
    found = read(args.release, [export for export, *_ in written.values()])
    for (name, (_, own, texts)), other in zip(written.items(), found, strict=True):
        part = f"tokenizer {name}"
        same = sum(own(text).input_ids == ids for text, ids in zip(texts, other["ids"], strict=True))
        show(part, f"ids by transformers {args.release}", f"{same} of {len(texts)} texts", same == len(texts))
        end, stop = own.convert_tokens_to_ids(ROLES[1]), other["special"].get("eos")
        show(part, "end of a reply by gguf", f"{stop} of {end}", stop == end)
        size, ranked = len(other["scores"]), len(set(other["scores"]))
        show(part, "pieces by gguf", f"{size} of {len(own)}, {ranked} scores", size == len(own))
        show(part, "chat template by gguf", "the same", other["template"] == CHATML, "another")


if __name__ == "__main__":
    sys.exit(conduct("exports", run, __doc__, families=[], release="4.57.6"))
