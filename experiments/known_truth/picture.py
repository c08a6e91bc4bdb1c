"""The map of known truths as a figure with a panel for each question.

python -m emo.experiments.known_truth.picture FIGURE.svg RESULTS.json [RESULTS.json ...]
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path
from typing import Any

from emo.common.errors import ExitCode, exit_code_of
from emo.common.io.files import write_text
from emo.common.report.figure import VARIABLES, colour

from ..sweeps.report import build_map

TITLES = {
    "geometry": "True costs against constant and permuted ones",
    "beyond-sharpening": "EMO against MLE of the same entropy",
    "begins": "EMO against MLE of the same entropy, both heads initialised with the costs' embedding",
    "informed": "EMO against MLE with a head that starts as, or is, the costs' embedding",
    "smoothing": "EMO against label smoothing, which uses no costs",
    "proper": "EMO against a proper score of the same costs",
    "training": "EMO against the map of MLE's distributions to EMO's fixed point",
}
PALETTE = {"muted": "#57534e", "rule": "#e7e5e4", "grey": "#a8a29e", "s2": "#2f6ca8", "s3": "#c0711a"}


def draw_map(rows: list[dict[str, Any]]) -> str:
    """Return an SVG of a study's rows."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = {title: build_map(rows, name) for name, title in TITLES.items() if name in rows[0]["verdicts"]}
    style: Any = {"svg.hashsalt": "map", "svg.fonttype": "none", "font.size": 8, "axes.titlesize": 8.5}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"}
    file = io.StringIO()
    with matplotlib.rc_context(style):
        canvas = Figure((9, sum(panel.inches + 0.35 for panel in panels.values())), layout="constrained")
        grid = canvas.subplots(len(panels), height_ratios=[panel.inches for panel in panels.values()])
        for axes, (title, panel) in zip(grid, panels.items(), strict=True):
            panel.draw(axes)
            axes.set_title(title)
        canvas.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    for variable in VARIABLES:
        text = text.replace(colour(variable), PALETTE.get(variable, "#000000"))
    return text


def main() -> int:
    """Write the figure."""
    parser = argparse.ArgumentParser(
        prog="python -m emo.experiments.known_truth.picture", description=__doc__
    )
    parser.add_argument("figure", type=Path, help="an .svg file")
    parser.add_argument("results", type=Path, nargs="+", help="results.json of studies")
    args = parser.parse_args()
    studies = [json.loads(path.read_text(encoding="utf-8"))["rows"] for path in args.results]
    write_text(args.figure, draw_map([row for rows in studies for row in rows]))
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
