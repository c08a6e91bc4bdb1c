"""README.md and docs/*.md as tests read them: blocks of code, links, and the names that they use.

Code stands in fenced blocks. A `bash` block runs as it stands where the repository is installed, unless its
first line says what it needs (`# needs: GPUs, hub`); a `yaml` or `python` block whose first line is a file
name is that file. Words in capitals (RECIPE, DIR) are the reader's to fill in.
"""

from __future__ import annotations

import ast
import importlib.util
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

from emo.__main__ import COMMANDS, EVALUATION, TRAINING
from emo.common.config.recipe import Section, parse_section
from emo.common.errors import UserError
from emo.data_prep.config import DataConfig
from emo.eval.icl.tasks import TaskSpec
from emo.experiments.sweeps.design import Experiment
from emo.pipeline.config import RunConfig
from tests.conftest import REPO

# In the order in which a newcomer meets them: what one page makes, the next ones use.
PAGES = ("README", "docs/first-run", "docs/tasks", "docs/objectives", "docs/operations")
NEEDS = {"GPUs", "hub", "hosts", "Slurm", "Kubernetes", "Docker", "Apptainer", "real data", "service", "time"}
NEEDS |= {"vLLM", "llama.cpp"}
LANGUAGES = {"bash", "python", "yaml", "text"}
ROOMS = "common|data_prep|pipeline|eval|experiments|launch"
FOREIGN = {
    "sbatch",
    "docker",
    "apptainer",
    "kubectl",
    "pip",
    "make",
    "vllm",
    "llama.cpp/convert_hf_to_gguf.py",
    "llama-server",
}  # whose own options nobody here can be asked about
DOCKERS = {"--help", "--build-arg", "--read-only", "--secret", "--tmpfs"}  # named without their command
LAUNCHERS = ("deepspeed.launcher.runner", "torch.distributed.run")
_MARKDOWN = MarkdownIt("commonmark").enable("table")
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_KEY = re.compile(
    r"(?<![\w./-])(?:data|model|objective|train)(?:\.[a-z_]+)+(?!\.?\w|/)(?<!\.sbatch)(?<!\.yaml)(?<!\.py)"
)
_PATH = re.compile(rf"(?<![\w./-])(?:{ROOMS}|ds_configs|examples|tests|docs)/[\w./*-]*\w")


@dataclass(frozen=True)
class Block:
    where: str  # docs/tasks.md:12
    language: str
    text: str

    @property
    def needs(self) -> list[str]:
        """The needs that its first line lists."""
        first = self.text.partition("\n")[0]
        return first.removeprefix("# needs: ").split(", ") if first.startswith("# needs: ") else []

    @property
    def file(self) -> str | None:
        """The name of the file that it is."""
        match = re.match(r"# ([\w.-]+\.(?:yaml|py))\n", self.text)
        return match[1] if match and self.language in ("yaml", "python") else None

    @property
    def commands(self) -> list[str]:
        """Its lines of bash without remarks."""
        whole = self.text.replace("\\\n", " ").splitlines()
        lines = (re.sub(r"(?:^|\s+)#\s.*$", "", line).strip() for line in whole)
        return [line for line in lines if line]


def documents() -> list[Path]:
    """Return README.md and docs/*.md in reading order."""
    first = [REPO / f"{name}.md" for name in PAGES]
    return first + sorted(set((REPO / "docs").glob("*.md")) - set(first))


def blocks(path: Path) -> list[Block]:
    name = path.relative_to(REPO) if path.is_relative_to(REPO) else path.name
    fences = [token for token in _parsed(path) if token.type == "fence"]
    return [Block(f"{name}:{t.map[0] + 1}", t.info, t.content) for t in fences if t.map]


def faults(path: Path) -> list[str]:
    """Return what is wrong with a document, a line each."""
    wrong = [
        f"{path.name}:{token.map[0] + 1 if token.map else 0}: {fault}"
        for token in _parsed(path)
        for part in (token, *(token.children or ()))
        for fault in _of_token(part, path)
    ]
    return wrong + [f"{block.where}: {fault}" for block in blocks(path) for fault in _of_block(block)]


def _parsed(path: Path) -> list[Token]:
    return _MARKDOWN.parse(path.read_text(encoding="utf-8"))


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
            return  # the network is not asked
        if not file.exists():
            yield f"a link to {target}, which is not there"
        elif anchor and anchor not in _anchors(file):
            yield f"a link to {target}, which has no such heading"


def _anchors(path: Path) -> set[str]:
    """Return the names by which a page's headings are linked, as GitHub makes them."""
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
    elif block.language == "yaml":
        tree = yaml.safe_load(block.text)
        if block.file is None:  # a fragment
            yield from (f"no recipe has the key {key}" for key in unknown_keys(tree))
            return
        try:
            parse_section(*_section(tree))
        except UserError as error:
            yield str(error)


def _section(tree: Any) -> tuple[type[Section], Any, str]:
    """Return the model of a YAML file, the part of the file that it describes, and its key."""
    if "axes" in tree:
        return Experiment, tree, ""
    if "prompts" in tree:
        return TaskSpec, tree, ""
    return (RunConfig, tree, "") if "train" in tree else (DataConfig, tree.get("data"), "data")


def _names(text: str) -> Iterator[str]:
    """Files, recipe keys and options that are named and not there."""
    for name in _PATH.findall(text):
        if not any(REPO.glob(name)) and not re.search(r"\b[A-Z]{2,}\b", name):
            yield f"{name} is not there"
    for key in _KEY.findall(text):
        if unknown_keys(reduce(lambda tree, part: {part: tree}, reversed(key.split(".")), None)):
            yield f"no recipe has the key {key}"
    owner = _owner(text.split())
    if owner in FOREIGN:
        return
    for flag in _FLAG.findall(re.sub(r"\$\([a-z][^)]*\)", "", text)):  # without commands of the system
        if flag not in options(owner):
            yield f"emo {owner} has no option {flag}" if owner else f"no command has the option {flag}"


def unknown_keys(tree: Any) -> list[str]:
    """Return the keys of a recipe, or of a part of it, that no recipe has."""
    try:
        RunConfig.model_validate(tree)
    except ValidationError as error:
        faults = error.errors()
        return [".".join(map(str, fault["loc"])) for fault in faults if fault["type"] == "extra_forbidden"]
    return []


def _owner(words: list[str]) -> str:
    """Return who reads a command's options: a command of `emo`, another program, or "" for anybody."""
    words = [re.sub(r"^[a-z]+=\$\(", "", word) for word in words if not re.match(r"[A-Z_]+=", word)]
    match words:
        case ["python", "-m", "emo", verb, *_] | ["emo", verb, *_] if verb in COMMANDS:
            return verb
        case ["python", program, *_] | [program, *_] if program in FOREIGN:
            return program
    return ""


@cache
def options(owner: str) -> frozenset[str]:
    """Return the options of a command, or of all, from the code that declares them, without running it."""
    rooms = ["data_prep", "pipeline", "eval", "experiments", "tests"]
    specs = [importlib.util.find_spec(name) for name in LAUNCHERS]
    files = [Path(spec.origin) for spec in specs if spec is not None and spec.origin is not None]
    function = COMMANDS[owner].function if owner else ""
    if owner and ".launch." not in function:
        rooms = [name.split(".")[1] for name in ([function] if function else [TRAINING, EVALUATION])]
        files = []
    files += [path for room in rooms for path in (REPO / room).rglob("*.py")]
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
