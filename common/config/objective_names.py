"""Names and options of objectives, available without loading PyTorch."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import nearest

ENTRY_POINTS = "emo_pipeline.objectives"  # in which other packages register objectives
TABLES = {"objectives.py": "BUILT_IN", "divergences.py": "DIVERGENCES"}  # tables of functions by name
_OTHER_NAMES = {  # objectives in other programs
    **dict.fromkeys(("cross_entropy", "crossentropy", "cross-entropy", "ce", "nll", "clm", "xent"), "mle"),
    **dict.fromkeys(("focal_loss", "focalloss"), "focal"),
    **dict.fromkeys(("entropy", "entropy_minimization"), "neg_entropy"),
}
NO_PREFERENCES = "training from preferences or rewards (DPO, PPO, GRPO) is not supported: use TRL for it"
_PREFERENCES = ("dpo", "ipo", "kto", "orpo", "simpo", "ppo", "grpo", "rloo", "reinforce", "rlhf", "reward")


def registered_objectives() -> dict[str, str]:
    """Return the objectives that installed packages register, as MODULE:FUNCTION by name."""
    return {point.name: point.value for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def objective_hint(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown objective name."""
    if name.lower() in _PREFERENCES:
        return NO_PREFERENCES
    return nearest(name, [*known, *registered_objectives()], _OTHER_NAMES)


@functools.cache
def parse_objectives(folder: Path) -> Mapping[str, frozenset[str]]:
    """Parse the options of each objective from the source of the loss library in `folder`."""
    options: dict[str, frozenset[str]] = {}
    for file, table in TABLES.items():
        body = ast.parse((folder / file).read_text(encoding="utf-8")).body
        functions = {node.name: node.args.kwonlyargs for node in body if isinstance(node, ast.FunctionDef)}
        (listed,) = (n for n in body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == table)
        names = {node.id for node in ast.walk(listed) if isinstance(node, ast.Name)} & functions.keys()
        more = {"temperature"} if file == "divergences.py" else set[str]()
        options |= {name: frozenset({arg.arg for arg in functions[name]} | more) for name in names}
    return options
