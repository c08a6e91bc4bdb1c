"""Hugging Face's Trainer with the fused loss: python examples/trainer.py MODEL TEXT [OBJECTIVE]"""

import argparse
from pathlib import Path


def main(path: str, text: str, objective: str = "emo", out: str = "runs/example") -> list[float]:
    """Train on a text's lines and return the logged losses."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    from emo.hf import FusedLossMixin

    class FusedTrainer(FusedLossMixin, Trainer):
        """A Trainer whose model ends in the fused loss."""

    settings = {"max_steps": 5, "per_device_train_batch_size": 1, "logging_steps": 1, "report_to": []}
    tokenizer = AutoTokenizer.from_pretrained(path)
    lines = [line for line in Path(text).read_text(encoding="utf-8").splitlines() if line]
    rows = [tokenizer(line, truncation=True, max_length=128).input_ids for line in lines]
    trainer = FusedTrainer(
        model=AutoModelForCausalLM.from_pretrained(path),
        args=TrainingArguments(out, **settings),
        train_dataset=[{"input_ids": ids, "labels": ids} for ids in rows],
        objective=objective,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a causal LM's directory or hub id")
    parser.add_argument("text", help="a text file, each line a document")
    parser.add_argument("objective", nargs="?", default="emo")
    arguments = parser.parse_args()  # before the imports, which take seconds
    main(arguments.model, arguments.text, arguments.objective)
