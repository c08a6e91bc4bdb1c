"""A student learns a teacher's distributions: python examples/distil.py STUDENT TEACHER TEXT [DIVERGENCE]"""

import argparse
from pathlib import Path


def main(
    student: str, teacher: str, text: str, objective: str = "kl", out: str = "runs/example"
) -> list[float]:
    """Train on a text's lines and return the logged losses, nats per token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    from emo.hf import FusedLossMixin

    class FusedTrainer(FusedLossMixin, Trainer):
        """A Trainer whose model ends in the fused loss."""

    tokenizer = AutoTokenizer.from_pretrained(student)
    lines = [line for line in Path(text).read_text(encoding="utf-8").splitlines() if line]
    rows = [tokenizer(line, truncation=True, max_length=128).input_ids for line in lines]
    trainer = FusedTrainer(
        model=AutoModelForCausalLM.from_pretrained(student),
        teacher=AutoModelForCausalLM.from_pretrained(teacher).eval().requires_grad_(False),
        args=TrainingArguments(
            out, max_steps=5, per_device_train_batch_size=1, logging_steps=1, report_to=[]
        ),
        train_dataset=[{"input_ids": ids, "labels": ids} for ids in rows],
        objective=objective,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("student", "teacher"):
        parser.add_argument(name, help="a causal LM's directory or hub id, both with the same tokenizer")
    parser.add_argument("text", help="a text file, each line a document")
    parser.add_argument("objective", nargs="?", default="kl")
    arguments = parser.parse_args()  # before the imports, which take seconds
    main(arguments.student, arguments.teacher, arguments.text, arguments.objective)
