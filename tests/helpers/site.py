"""A MkDocs hook that generates pages when the site is built, and resolves links to files outside docs/.

`PAGES` has the generated reference pages. A notebook becomes a page. A file or directory of the repository
that a page links to becomes a page below `source/`, so that the site is complete without a network.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import REPO
from tests.helpers.parsers import all_parsers

DOCS = REPO / "docs"
ERRORS = REPO / "common" / "errors.yaml"
PUBLIC = {"emo.loss": "pipeline/loss/__init__.py", "emo.hf": "emo/hf.py"}  # module: file with __all__
_FENCE = re.compile(r"(?ms)^(```+|~~~+).*?^\1[ ]*$")
_LINK = re.compile(r"(\]\()([^)\s#]+)")


def cli_page() -> str:
    intro = "`emo COMMAND --help` prints the same text. See [exit codes](exit-codes.md) for their meaning."
    sections = [_command(f"emo {name}", parser) for name, parser in all_parsers().items()]
    return "\n\n".join(["# Command line", intro, *sections]) + "\n"


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    formatter = argparse.HelpFormatter(name, width=100)
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups, prefix="")
    parts = [f"## {name}", parser.description or "", f"```text\n{formatter.format_help().strip()}\n```"]
    rows = [_option(action, parser) for action in parser._actions if is_shown(action)]
    parts.append("\n".join(["| argument | meaning |", "|---|---|", *rows]))
    if examples := getattr(parser, "examples", ()):
        parts.append("\n".join(["```bash", *examples, "```"]))
    if codes := getattr(parser, "exit_codes", {}):
        notes = {code: f" ({text})" if text != code.meaning else "" for code, text in codes.items()}
        parts.append(f"Exit codes: {', '.join(f'{int(code)}{note}' for code, note in notes.items())}.")
    return "\n\n".join(part for part in parts if part)


def is_shown(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)


def _option(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    values = argparse.HelpFormatter(parser.prog)._format_args(action, action.dest.upper())
    if action.option_strings:
        name = f"{', '.join(action.option_strings)} {values}".strip()
    else:
        name = str(action.metavar or action.dest)
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    return f"| `{_cell(name)}` | {_cell(text)} |"


def errors_page() -> str:
    entries = yaml.safe_load(ERRORS.read_text(encoding="utf-8")) if ERRORS.exists() else {}
    intro = "An error message ends in its code. `emo help CODE` prints the same text as this page."
    sections = [
        f"## {code}\n\n{entry['cause']}\n\n**Fix:** {entry['fix']}" for code, entry in entries.items()
    ]
    return "\n\n".join(["# Error codes", intro, *sections]) + "\n"


def metrics_page() -> str:
    from emo.pipeline.report import glossary

    def table(title: str, keys: dict[str, glossary.Key]) -> Iterator[str]:
        yield from (f"## {title}", "", "| key | unit | meaning | present |", "|---|---|---|---|")
        yield from (f"| `{k}` | {v.unit} | {_cell(v.meaning)} | {v.present} |" for k, v in keys.items())
        yield ""

    def words(title: str, meanings: dict[str, str], about: str) -> Iterator[str]:
        yield from (f"## {title}", "", about, "", "| word | meaning |", "|---|---|")
        yield from (f"| `{word}` | {_cell(meaning)} |" for word, meaning in meanings.items())
        yield ""

    return "\n".join(
        [
            "# Metrics",
            "",
            METRICS,
            "",
            *table("Training records", glossary.TRAINING),
            *table("Validation records", glossary.VALIDATION),
            *words("Console", glossary.CONSOLE, "`emo train` shows these values while it trains."),
            *words(
                "Events",
                glossary.EVENTS,
                "`emo train --json` prints these as lines of JSON.",
            ),
        ]
    )


METRICS = """\
`metrics.jsonl` in the run directory has a JSON object per line. A training record covers the steps since
the previous one (`train.logging_steps`). A validation record has a `set`. A value that is not finite is
`null`.

TensorBoard and Weights & Biases receive the numbers as `train/KEY` and `validation/KEY`, or as
`validation-NAME/KEY` for a named set. Dots in a key become slashes there."""


def api_page() -> str:
    text = [
        "# Python API",
        "",
        "Only these two modules are public. Other modules may change in any version.",
        "",
    ]
    for module, file in PUBLIC.items():
        tree = ast.parse((REPO / file).read_text(encoding="utf-8")).body
        names = next(
            ast.literal_eval(node.value)
            for node in tree
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        )
        text += [f"## {module}", ""]
        for name in names:
            text += [f"::: {module}.{name}", ""]
    return "\n".join(text)


PAGES: dict[str, Callable[[], str]] = {
    "reference/cli.md": cli_page,
    "reference/errors.md": errors_page,
    "reference/metrics.md": metrics_page,
    "reference/api.md": api_page,
}


@cache
def generated(name: str) -> str:
    """Return the text of the generated page with this path below docs/."""
    return PAGES[name]()


def notebook_cells(path: Path) -> list[tuple[str, str]]:
    """Return the type (markdown or code) and the text of each cell of a notebook."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [(cell["cell_type"], "".join(cell["source"])) for cell in cells]


def notebook_page(path: Path) -> str:
    """Return a notebook as Markdown, with a link to the file."""
    parts = [text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in notebook_cells(path)]
    return "\n\n".join([*parts, f'<a href="{path.name}" download>Download this notebook</a>']) + "\n"


def site_path(path: Path) -> str:
    """Return the path that a file or directory of the repository has in the sources of the site."""
    if path.is_relative_to(DOCS) and not path.is_dir():
        name = path.relative_to(DOCS)
        return str(name.with_suffix(".md") if name.suffix == ".ipynb" else name)
    name = Path("source", path.relative_to(REPO))
    if path.is_dir():
        return str(name / "index.md")
    return str(name if name.suffix == ".md" else name.with_name(f"{name.name}.md"))


def source_page(path: Path) -> str:
    """Return a file as a page, or a directory as a list of its files."""
    name = path.relative_to(REPO)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file())
        return "\n".join([f"# {name}/", "", *(f"- [{file.name}]({file.name})" for file in files)]) + "\n"
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    language = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".json": "json"}.get(path.suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {name}\n\n``````{language}\n{text}\n``````\n"


def targets(text: str, directory: Path) -> list[tuple[str, Path]]:
    """Return the relative links of a page in `directory` and the files that they lead to."""
    links = [match[2] for match in _LINK.finditer(_FENCE.sub("", text)) if not re.match(r"[a-z]+:", match[2])]
    return [(link, Path(os.path.normpath(directory / link))) for link in links]


def rewrite(text: str, path: Path, page: str) -> str:
    """Return the text of `path` with links rewritten for `page` of the site."""
    known = dict(targets(text, path if path.is_dir() else path.parent))

    def replace(match: re.Match[str]) -> str:
        target = known.get(match[2])
        if target is None or not target.exists() or not target.is_relative_to(REPO):
            return match[0]
        return match[1] + os.path.relpath(site_path(target), Path(page).parent)

    fences = [match.span() for match in _FENCE.finditer(text)]
    inside = lambda match: any(start <= match.start() < end for start, end in fences)  # noqa: E731
    return _LINK.sub(lambda match: match[0] if inside(match) else replace(match), text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def outside(files: list[Path]) -> set[Path]:
    """Return the files and directories outside docs/ that pages link to, directly or indirectly."""
    found: set[Path] = set()
    pending = list(files)
    while pending:
        path = pending.pop()
        directory = path if path.is_dir() else path.parent
        for _, target in targets(_text(path), directory):
            is_page = target.is_dir() or not target.is_relative_to(DOCS)
            if is_page and target.exists() and target.is_relative_to(REPO) and target not in found:
                found.add(target)
                pending.append(target)
    return found


def _text(path: Path) -> str:
    if path.is_dir() or not path.is_relative_to(DOCS):
        return source_page(path) if path.is_dir() or path.suffix == ".md" else ""
    return notebook_page(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    notebooks = sorted(DOCS.rglob("*.ipynb"))
    pages = {name: generated(name) for name in PAGES}
    for path in notebooks:
        pages[site_path(path)] = rewrite(notebook_page(path), path, site_path(path))
    own = [REPO / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
    for path in outside([*DOCS.rglob("*.md"), *notebooks, *own]) | set(own):
        pages[site_path(path)] = rewrite(source_page(path), path, site_path(path))
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    path = DOCS / page.file.src_uri
    return rewrite(markdown, path, page.file.src_uri) if path.is_file() else markdown
