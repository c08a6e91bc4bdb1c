"""What a results directory shows: models by name, and for each the results of its tasks.

OUT/models/NAME/model.json      path, digest of the weights, what the trainer said about it
OUT/models/NAME/TASK.json       key into the store, and a copy of the result
OUT/models/NAME/samples.json    sampled text
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from eval import store

if TYPE_CHECKING:
    from eval.model import EvaluatedModel

MODEL, SAMPLES = "model.json", "samples.json"


def claim_name(model: EvaluatedModel, out: Path, say: Callable[[str], None]) -> None:
    """Describe the model under its name. Views of other weights under the same name are removed."""
    directory = out / "models" / model.name
    described = directory / MODEL
    if described.is_file() and json.loads(described.read_text())["weights"] != model.digest:
        say(f"{model.name}: other weights than in the last run; its earlier results are not shown any more")
        for path in directory.glob("*.json"):
            path.unlink(missing_ok=True)
    facts = {
        "name": model.name,
        "path": model.given,
        "weights": model.digest,
        "tokenizer": model.tokenizer_digest,
        "dtype": model.dtype,
        "facts": model.facts,
    }
    store.replace(described, store.dump(facts))


def views(out: Path) -> Iterator[tuple[dict[str, Any], dict[str, dict[str, Any]]]]:
    """(model description, task -> view) of every model evaluated under `out`."""
    for described in sorted(out.glob(f"models/*/{MODEL}")):
        model = json.loads(described.read_text())
        found = {}
        for path in sorted(described.parent.glob("*.json")):
            view = json.loads(path.read_text())
            if path.name not in (MODEL, SAMPLES) and view["weights"] == model["weights"]:
                found[path.stem] = view
        yield model, found


def require_views(out: Path) -> list[tuple[dict[str, Any], dict[str, dict[str, Any]]]]:
    """`views`, or UserError when there are none."""
    found = list(views(out))
    if not found:
        raise UserError(
            f"no results in {out}; make them with: python -m eval run --model DIR --data DIR --out {out}"
        )
    return found
