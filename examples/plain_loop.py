"""The fused loss in a plain training loop: python examples/plain_loop.py MODEL TEXT [OBJECTIVE]"""

import argparse
from pathlib import Path


def main(path: str, text: str, objective: str = "emo", steps: int = 5) -> list[float]:
    """Train on the beginning of a text, print the loss of every step, and return the losses."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from emo.hf import fuse_causal_lm

    rows = 4
    length = 64
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    fuse_causal_lm(model, objective)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = tokenizer(Path(text).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    if len(ids) < rows * length:
        raise SystemExit(f"{text}: {len(ids)} tokens, but a step takes {rows * length}; give a longer text")
    losses = []
    for step in range(steps):
        start = step * rows * length % (len(ids) - rows * length + 1)
        batch = ids[start : start + rows * length].view(rows, length)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step + 1}: {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a causal LM's directory or hub id")
    parser.add_argument("text", help="a text file")
    parser.add_argument("objective", nargs="?", default="emo")
    arguments = parser.parse_args()  # before the imports, which take seconds
    main(arguments.model, arguments.text, arguments.objective)
