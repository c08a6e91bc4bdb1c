"""The fused loss in a plain training loop: python examples/plain_loop.py MODEL TEXT [OBJECTIVE]

MODEL is a causal LM's directory or hub id, TEXT a text file. Prints the loss of every step.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.hf import fuse_causal_lm


def main(path: str, text: str, objective: str = "emo", steps: int = 5) -> list[float]:
    """Train on the beginning of a text; the losses."""
    rows, length = 4, 64
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    fuse_causal_lm(model, objective)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = tokenizer(Path(text).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    losses = []
    for step in range(steps):
        batch = ids[step * rows * length : (step + 1) * rows * length].view(rows, length)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step + 1}: {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
