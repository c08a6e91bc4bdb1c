"""TRL's SFTTrainer with the fused loss: python examples/sft_trainer.py MODEL ROWS.jsonl [OBJECTIVE]"""

import argparse


def main(path: str, rows: str, objective: str = "emo", out: str = "runs/example") -> list[float]:
    """Tune on a file of rows and return the logged losses."""
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from emo.hf import FusedLossMixin

    class FusedSFTTrainer(FusedLossMixin, SFTTrainer):
        """An SFTTrainer whose model ends in the fused loss."""

    settings = {"max_steps": 5, "per_device_train_batch_size": 1, "logging_steps": 1, "report_to": []}
    trainer = FusedSFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(path),
        args=SFTConfig(out, bf16=torch.cuda.is_available(), **settings),  # TRL's bf16 wants a GPU
        train_dataset=load_dataset("json", data_files=rows, split="train"),
        processing_class=AutoTokenizer.from_pretrained(path),
        objective=objective,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a causal LM's directory or hub id")
    parser.add_argument("rows", help='lines of {"prompt": ..., "completion": ...}, or of conversations')
    parser.add_argument("objective", nargs="?", default="emo")
    arguments = parser.parse_args()  # before the imports, which take seconds
    main(arguments.model, arguments.rows, arguments.objective)
