"""The map of known truths as a figure with a panel for each question, or as tables.

python -m emo.experiments.known_truth.picture FIGURE.svg RESULTS.json [RESULTS.json ...]
python -m emo.experiments.known_truth.picture experiments/results/map.md experiments/known_truth/map.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from emo.common.errors import ExitCode, exit_code_of
from emo.common.io.files import write_text
from emo.common.report.figure import svg_file

from ..sweeps.report import build_map
from ..sweeps.statistics import MapRow

TITLES = {
    "geometry": "True costs against constant and permuted ones",
    "beyond-sharpening": "EMO against MLE of the same entropy",
    "begins": "EMO against MLE of the same entropy, both heads initialised with the costs' embedding",
    "informed": "EMO against MLE with a head that starts as, or is, the costs' embedding",
    "smoothing": "EMO against label smoothing, which uses no costs",
    "proper": "EMO against a proper score of the same costs",
    "training": "EMO against the map of MLE's distributions to EMO's fixed point",
}
CONTROL = {"exchange": "EMO against EMO with permuted costs"}


ABOUT = """# The map of known truths

Written by `python -m emo.experiments.known_truth.picture experiments/results/map.md
experiments/known_truth/map.json`. The JSON file names the commit of the run.

Each cell gives the answer, the improvement in Jensen-Shannon divergence (nats, above zero is better) and its
interval. The intervals of a question's 60 cells hold together at 95 %. The unit is a random truth, 20 in each
cell. Share: how much of the truth the costs carry. Draws: training tokens per context.
"""


def draw_map(rows: list[MapRow]) -> str:
    """Return an SVG of a study's rows."""
    panels = {title: build_map(rows, name) for name, title in TITLES.items() if name in rows[0]["verdicts"]}
    heights = [panel.inches for panel in panels.values()]

    def draw(canvas: Any) -> None:
        grid = canvas.subplots(len(panels), height_ratios=heights)
        for axes, (title, panel) in zip(grid, panels.items(), strict=True):
            panel.draw(axes)
            axes.set_title(title)

    return svg_file("map", (9, sum(heights) + 0.35 * len(heights)), draw)


def tabulate_map(rows: list[MapRow]) -> str:
    """Return a Markdown table for each question: answers, effects and intervals."""
    draws = sorted({row["draws"] for row in rows})
    cells = {(row["V"], row["share"], row["draws"]): row["verdicts"] for row in rows}
    lines = [ABOUT]
    for name, title in (TITLES | CONTROL).items():
        lines += [f"## {title} (`{name}`)", ""]
        lines += ["| tokens, share | " + " | ".join(f"{n:,} draws" for n in draws) + " |"]
        lines += ["|---" * (len(draws) + 1) + "|"]
        for V, share in sorted({cell[:2] for cell in cells}):
            verdicts = (cells[V, share, n][name] for n in draws)
            answers = ("{answer} {effect:+.4f} ({low:.4f} to {high:.4f})".format(**v) for v in verdicts)
            lines += [f"| {V}, {share:g} | " + " | ".join(answers) + " |"]
        lines += [""]
    return "\n".join(lines)


def main() -> int:
    """Write the figure or the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m emo.experiments.known_truth.picture", description=__doc__
    )
    parser.add_argument("figure", type=Path, help="an .svg file, or an .md file for tables")
    parser.add_argument("results", type=Path, nargs="+", help="results.json or map.json of studies")
    args = parser.parse_args()
    studies = [json.loads(path.read_text(encoding="utf-8"))["rows"] for path in args.results]
    draw = tabulate_map if args.figure.suffix == ".md" else draw_map
    write_text(args.figure, draw([row for rows in studies for row in rows]))
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
