"""Read the code blocks, links and names in README.md and docs/.

Code is in fenced blocks. A `bash` block runs unchanged in an installed checkout, unless a comment before it
lists what it needs (`<!-- needs: GPUs, hub -->`). A `yaml` or `python` block whose first line is a file name
holds that file. The reader replaces words in capitals (RECIPE, DIR). The code cells of a notebook form one
program.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pydantic import ValidationError

from emo.__main__ import COMMANDS, DATA, EVALUATION, TRAINING
from emo.common.config.recipe import Section, parse_section
from emo.common.errors import UserError
from emo.data_prep.config import DataConfig
from emo.eval.icl.tasks import TaskSpec
from emo.experiments.sweeps.design import Experiment
from emo.pipeline.config import RunConfig
from tests.conftest import REPO
from tests.helpers import site

NEEDS = {"GPUs", "hub", "hosts", "Slurm", "Kubernetes", "Docker", "Apptainer", "vLLM", "llama.cpp"}
NEEDS |= {"real data", "service", "time"}
LANGUAGES = {"bash", "python", "yaml", "text"}
ROOMS = "common|data_prep|pipeline|eval|experiments|launch"
# Other programs, whose options are not checked.
FOREIGN = {
    "sbatch",
    "docker",
    "apptainer",
    "kubectl",
    "pip",
    "make",
    "tensorboard",
    "vllm",
    "hf",
    "llama.cpp",
    "lm_eval",
}
# Docker options that the documents mention without a command.
DOCKERS = {"--help", "--build-arg", "--read-only", "--secret", "--shm-size", "--tmpfs"}
LAUNCHERS = ("deepspeed.launcher.runner", "torch.distributed.run")
_MARKDOWN = MarkdownIt("commonmark").enable("table")
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_KEY = re.compile(
    r"(?<![\w./-])(?:data|model|objective|train)(?:\.[a-z_]+)+(?!\.?\w|/)(?<!\.sbatch)(?<!\.yaml)(?<!\.py)"
)
_PATH = re.compile(rf"(?<![\w./-])(?:{ROOMS}|ds_configs|examples|tests|docs)/[\w./*-]*\w")


@dataclass(frozen=True)
class Block:
    where: str  # docs/how-to/lora.md:12
    language: str
    text: str
    needs: tuple[str, ...] = ()  # what the comment before it lists

    @property
    def file(self) -> str | None:
        """The name of the file that the block holds, or None."""
        match = re.match(r"# ([\w.-]+\.(?:yaml|py))\n", self.text)
        return match[1] if match and self.language in ("yaml", "python") else None

    @property
    def commands(self) -> list[str]:
        """The lines of bash without comments."""
        whole = self.text.replace("\\\n", " ").splitlines()
        lines = (re.sub(r"(?:^|\s+)#\s.*$", "", line).strip() for line in whole)
        return [line for line in lines if line]


def documents() -> list[Path]:
    """Return README.md and the pages and notebooks of docs/ in the order of the site.

    Later pages use the files of earlier ones.
    """
    order = [re.sub(r"\.ipynb$", ".md", name) for name in navigation()]
    pages = [path for suffix in ("*.md", "*.ipynb") for path in site.DOCS.rglob(suffix)]
    position = {
        path: order.index(site.site_path(path)) if site.site_path(path) in order else len(order)
        for path in pages
    }
    return [REPO / "README.md", *sorted(pages, key=lambda path: (position[path], path))]


def navigation() -> list[str]:
    """Return the paths of the pages in the navigation of the site."""
    return re.findall(r": ([\w/.-]+\.md)$", (REPO / "mkdocs.yml").read_text(encoding="utf-8"), re.M)


def blocks(path: Path) -> list[Block]:
    name = path.relative_to(REPO) if path.is_relative_to(REPO) else path.name
    if path.suffix == ".ipynb":
        return [Block(str(name), "python", program(path))]
    return [
        Block(f"{name}:{token.map[0] + 1}", token.info, token.content, _needs(before))
        for before, token in pairwise([Token("", "", 0), *_parsed(path)])
        if token.type == "fence" and token.map
    ]


def _needs(token: Token) -> tuple[str, ...]:
    match = re.match(r"<!-- needs: (.*) -->", token.content) if token.type == "html_block" else None
    return tuple(match[1].split(", ")) if match else ()


def program(notebook: Path) -> str:
    """Return the code cells of a notebook as one program, which runs `!` lines and `%%bash` cells in bash."""
    cells = [text for kind, text in site.notebook_cells(notebook) if kind == "code"]
    lines = ["import subprocess", "def bash(script): subprocess.run(['bash', '-ec', script], check=True)"]
    for cell in cells:
        if cell.startswith("%%bash\n"):
            lines.append(f"bash({cell.removeprefix('%%bash')!r})")
        else:
            lines.append(re.sub(r"(?m)^( *)!(.*)$", lambda match: f"{match[1]}bash(f{match[2]!r})", cell))
    return "\n".join(lines) + "\n"


def faults(path: Path) -> list[str]:
    """Return a line for each fault of a document."""
    wrong = [
        f"{path.name}:{token.map[0] + 1 if token.map else 0}: {fault}"
        for token in _parsed(path)
        for part in (token, *(token.children or ()))
        for fault in _of_token(part, path)
    ]
    return wrong + [f"{block.where}: {fault}" for block in blocks(path) for fault in _of_block(block)]


def _parsed(path: Path) -> list[Token]:
    if path.suffix == ".ipynb":
        text = "\n\n".join(text for kind, text in site.notebook_cells(path) if kind == "markdown")
    elif (name := _generated(path)) is not None:
        text = site.generated(name)
    else:
        text = path.read_text(encoding="utf-8")
    return _MARKDOWN.parse(text)


def _generated(path: Path) -> str | None:
    """Return the name of a page that is generated for the site, or None."""
    name = os.path.relpath(path, site.DOCS)
    return name if name in site.PAGES else None


def _of_token(token: Token, path: Path) -> Iterator[str]:
    if token.type == "code_block":
        yield "an indented block; fence it and name its language"
    elif token.type == "code_inline":
        yield from _names(token.content)
    elif token.type in ("link_open", "image"):
        target = str(token.attrs["href" if token.type == "link_open" else "src"])
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        if re.match(r"[a-z]+:", target):
            return  # external links are not checked
        if not file.exists() and not (path.is_relative_to(site.DOCS) and _generated(file)):
            yield f"a link to {target}, which is not there"
        elif _generated(file) == "reference/api.md":
            return  # mkdocstrings creates its anchors
        elif anchor and anchor not in _anchors(file):
            yield f"a link to {target}, which has no such heading"


@cache
def _anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub generates them."""
    heads = (after for token, after in pairwise(_parsed(path)) if token.type == "heading_open")
    plain = ("".join(child.content for child in head.children or ()) for head in heads)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in plain}


def _of_block(block: Block) -> Iterator[str]:
    if block.language not in LANGUAGES:
        yield f"the language of a block is one of {', '.join(sorted(LANGUAGES))}, not {block.language!r}"
    if unknown := set(block.needs) - NEEDS:
        yield f"`needs` knows {', '.join(sorted(NEEDS))}, not {', '.join(unknown)}"
    if block.language == "bash":
        for command in block.commands:
            yield from _names(command)
    elif block.language == "python":
        compile(block.text, block.where, "exec")
        for command in re.findall(r"""(?m)^ *bash\(f?['"](.*)['"]\)$""", block.text):
            yield from _names(command)
    elif block.language == "yaml":
        tree = yaml.safe_load(block.text) or {}
        if "output_type" in tree:  # a task of lm-eval
            return
        model = tree.get("model", {})
        if {"path", "architecture"} & model.keys() and "dtype" not in model:
            yield "a model without a dtype"
        base = tree.pop("extends", None)
        if base is not None and "/" in base and not (REPO / base).exists():
            yield f"{base} is not there"
        if block.file is None or base is not None:  # a part of a recipe
            yield from (f"no recipe has the key {key}" for key in unknown_keys(tree))
            return
        try:
            parse_section(*_section(tree))
        except UserError as error:
            yield str(error)


def _section(tree: Any) -> tuple[type[Section], Any, str]:
    """Return the class that validates a YAML file, the part that it validates, and the key of that part."""
    if "axes" in tree:
        return Experiment, tree, ""
    if "prompts" in tree:
        return TaskSpec, tree, ""
    return (RunConfig, tree, "") if "train" in tree else (DataConfig, tree.get("data"), "data")


def _names(text: str) -> Iterator[str]:
    """Yield a message for each missing file, recipe key or option that a text names."""
    for name in _PATH.findall(text):
        if not any(REPO.glob(name)) and not re.search(r"\b[A-Z]{2,}\b", name):
            yield f"{name} is not there"
    for key in _KEY.findall(text):
        if unknown_keys(reduce(lambda tree, part: {part: tree}, reversed(key.split(".")), None)):
            yield f"no recipe has the key {key}"
    owner = _owner(text.split())
    if owner in FOREIGN:
        return
    for flag in _FLAG.findall(re.sub(r"\$\([a-z][^)]*\)", "", text)):  # without command substitutions
        if flag not in options(owner):
            yield f"emo {owner} has no option {flag}" if owner else f"no command has the option {flag}"


def unknown_keys(tree: Any) -> list[str]:
    """Return the keys of a recipe, or of a part of it, that `RunConfig` does not have."""
    try:
        RunConfig.model_validate(tree)
    except ValidationError as error:
        faults = error.errors()
        return [".".join(map(str, fault["loc"])) for fault in faults if fault["type"] == "extra_forbidden"]
    return []


def _owner(words: list[str]) -> str:
    """Return the reader of a command's options: a subcommand of `emo`, another program, or "" if unknown."""
    words = [re.sub(r"^[a-z]+=\$\(", "", word) for word in words if not re.match(r"[A-Z_]+=", word)]
    match words:
        case ["python", "-m", "emo", verb, *_] | ["emo", verb, *_] if verb in COMMANDS:
            return verb
        case ["python", script, *_] if script.split("/")[0] in FOREIGN:
            return script.split("/")[0]
        case [program, *_] if program in FOREIGN:
            return program
    return ""


@cache
def options(owner: str) -> frozenset[str]:
    """Return the options of a subcommand, or of all for "", as found in the code that declares them."""
    rooms = ["data_prep", "pipeline", "eval", "experiments", "tests"]
    specs = [importlib.util.find_spec(name) for name in LAUNCHERS]
    files = [Path(spec.origin) for spec in specs if spec is not None and spec.origin is not None]
    function = COMMANDS[owner].function if owner else ""
    if owner and ".launch." not in function:
        names = [function] if function else [TRAINING, EVALUATION]
        rooms = [name.split(".")[1] for name in names + [DATA] * (owner == "plan")]
        files = []
    files += [
        REPO / "common/cli/submit.py",
        *(path for room in rooms for path in (REPO / room).rglob("*.py")),
    ]
    declared = re.findall(r"""["'](--[a-z][\w-]*)["']""", "".join(path.read_text("utf-8") for path in files))
    return frozenset(declared) if owner else frozenset(declared) | DOCKERS


def functions(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names
