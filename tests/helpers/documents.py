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
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from emo.__main__ import COMMANDS, EVALUATION, TRAINING
from emo.common.errors import UserError
from emo.common.recipe import Section, parse_section
from emo.data_prep.config import DataConfig
from emo.pipeline.config import RunConfig
from tests.conftest import REPO

# In the order in which a newcomer meets them: what one page makes, the next ones use.
PAGES = ("README", "docs/first-run", "docs/tasks", "docs/objectives", "docs/operations")
NEEDS = {"GPUs", "hub", "hosts", "Slurm", "Kubernetes", "Docker", "real data", "service", "time"}
LANGUAGES = {"bash", "python", "yaml", "text"}
FOLDERS = [
    "common",
    "data_prep",
    "pipeline",
    "eval",
    "experiments",
    "launch",
    "ds_configs",
    "examples",
    "tests",
    "docs",
]
SECTIONS = ("data", "model", "objective", "train")
FOREIGN = {  # options of commands that are not here to be asked
    "sbatch": {"--array", "--dependency", "--nodes", "--parsable"},
    "docker": {
        *("--build-arg", "--entrypoint", "--gpus", "--read-only"),
        *("--secret", "--shm-size", "--tmpfs", "--user", "--device", "--network", "--ulimit"),
        "--index-url",  # pip's, in a build argument
    },
    "kubectl": {"--from-file"},
    "pip": {"--no-build-isolation", "--no-deps", "--require-hashes"},
    "make": {"--index-url", "--parts"},  # pip's and a campaign's, in variables
}
LAUNCH = "launch"
LAUNCHERS = {  # whose options stand beside ours
    LAUNCH: ("deepspeed", "launcher/runner.py"),
    "deepspeed": ("deepspeed", "launcher/runner.py"),
    "torchrun": ("torch", "distributed/run.py"),
}
_MARKDOWN = MarkdownIt("commonmark").enable("table")
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_KEY = re.compile(
    rf"(?<![\w./-])(?:{'|'.join(SECTIONS)})\.[a-z_]+(?:\.[a-z_]+)*(?!\.?\w|/)(?<!\.sbatch)(?<!\.yaml)(?<!\.py)"
)
_PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./*-]*\w")
_FILE_NAME = re.compile(r"# ([\w.-]+\.(?:yaml|py))\n")


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    place: str  # docs/tasks.md:12
    language: str
    text: str

    @property
    def needs(self) -> list[str]:
        """What its first line says that it needs."""
        first = self.text.partition("\n")[0]
        return first.removeprefix("# needs: ").split(", ") if first.startswith("# needs: ") else []

    @property
    def file(self) -> str | None:
        """The name of the file that it is."""
        found = _FILE_NAME.match(self.text) if self.language in ("yaml", "python") else None
        return found[1] if found else None

    @property
    def commands(self) -> list[str]:
        """Of a bash block, remarks left out."""
        whole = self.text.replace("\\\n", " ").splitlines()
        lines = (re.sub(r"(?:^|\s+)#\s.*$", "", line).strip() for line in whole)
        return [line for line in lines if line]


def documents() -> list[Path]:
    """README.md and docs/*.md in reading order."""
    first = [REPO / f"{name}.md" for name in PAGES]
    return first + sorted(set((REPO / "docs").glob("*.md")) - set(first))


def tokens(path: Path) -> Iterator[tuple[Token, int]]:
    """The tokens of a Markdown file, those inside lines included, with their line."""
    for token in _MARKDOWN.parse(path.read_text(encoding="utf-8")):
        line = token.map[0] + 1 if token.map else 0
        yield token, line
        for child in token.children or ():
            yield child, line


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a document."""
    name = path.relative_to(REPO) if path.is_relative_to(REPO) else path.name
    return [
        Block(f"{name}:{line}", token.info, token.content)
        for token, line in tokens(path)
        if token.type == "fence"
    ]


def faults(path: Path) -> list[str]:
    """What is wrong with a document, a line each."""
    found = [f"{path.name}:{line}: {what}" for token, line in tokens(path) for what in _of_token(token, path)]
    for block in blocks(path):
        found += [f"{block.place}: {what}" for what in _of_block(block)]
    return found


def _of_token(token: Token, path: Path) -> Iterator[str]:
    if token.type == "link_open":
        yield from _broken(str(token.attrs["href"]), path)
    elif token.type == "image":
        yield from _broken(str(token.attrs["src"]), path)
    elif token.type == "code_block":
        yield "an indented block; fence it and name its language"
    elif token.type == "code_inline":
        yield from _names(token.content)
        yield from _flags(token.content, _owner(token.content.split()))


def _broken(target: str, path: Path) -> Iterator[str]:
    """Relative links only: the network is not asked."""
    if re.match(r"[a-z]+:", target):
        return
    name, _, anchor = target.partition("#")
    file = path.parent / name if name else path
    if not file.exists():
        yield f"a link to {target}, which is not there"
    elif anchor and anchor not in anchors(file):
        yield f"a link to {target}, which has no such heading"


def anchors(path: Path) -> set[str]:
    """Names by which a page's headings are linked, as GitHub makes them."""
    parsed = _MARKDOWN.parse(path.read_text(encoding="utf-8"))
    heads = (after for token, after in pairwise(parsed) if token.type == "heading_open")
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
            yield from _flags(command, _owner(command.split()))
    elif block.language == "python":
        compile(block.text, block.place, "exec")
    elif block.language == "yaml":
        yield from _bad_recipe(block)


def _names(text: str) -> Iterator[str]:
    """Files and recipe keys that are named and not there."""
    for name in _PATH.findall(text):
        if not any(REPO.glob(name)) and not re.search(r"\b[A-Z]{2,}\b", name):
            yield f"{name} is not there"
    for key in _KEY.findall(text):
        if not is_key(key):
            yield f"no recipe has the key {key}"


def is_key(key: str) -> bool:
    """Whether recipes have a key such as `train.seed`; below free dictionaries (objective.params) all are."""
    section: Any = RunConfig
    for part in key.split("."):
        parts = set(_parts(section))
        if dict in parts:
            return True
        inner = [one for one in parts if isinstance(one, type) and issubclass(one, Section)]
        fields = [one.model_fields[part].annotation for one in inner if part in one.model_fields]
        if not fields:
            return False
        section = fields[0]
    return True


def _parts(annotation: Any) -> Iterator[Any]:
    """A type, and those that it is made of."""
    yield getattr(annotation, "__origin__", annotation)
    for part in get_args(annotation):
        yield from _parts(part)


def _bad_recipe(block: Block) -> Iterator[str]:
    """A recipe with a name is valid as it stands; of a fragment the keys are looked at."""
    tree = yaml.safe_load(block.text)
    if block.file is None:
        yield from (f"no recipe has the key {key}" for key in _keys(tree, "") if not is_key(key))
        return
    try:
        parse_section(*((RunConfig, tree, "") if "train" in tree else (DataConfig, tree.get("data"), "data")))
    except UserError as error:
        yield str(error)


def _keys(tree: Any, above: str) -> Iterator[str]:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield f"{above}{key}"
        for inner in value if isinstance(value, list) else [value]:
            yield from _keys(inner, f"{above}{key}.")


def _owner(words: list[str]) -> str | None:
    """Who reads a command's options: a module, a program, or nobody that is known."""
    words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
    if words and (kept := re.match(r"[a-z]+=\$\((.*)", words[0])):
        words = [kept[1], *words[1:]]
    words = words[2:] if words[:3] == ["python", "-m", "emo"] else words
    if words[:1] == ["emo"] and len(words) > 1:
        return f"emo {words[1]}" if words[1] in COMMANDS else None
    if words[:2] == ["python", "-m"] and len(words) > 2:
        return words[2]
    if words and (words[0] in FOREIGN or words[0] in LAUNCHERS):
        return words[0]
    return "launch" if words and "launch/" in words[0] and words[0].endswith(".sh") else None


def _flags(text: str, owner: str | None) -> Iterator[str]:
    """Options that are named and not declared; after a job's file or an image they are of what it runs."""
    text = re.sub(r"\$\([a-z][^)]*\)", "", text)  # commands of the system
    cut = {"sbatch": ".sbatch", "docker": " emo "}.get(owner or "")
    own, _, passed = text.partition(cut) if cut else (text, "", "")
    for known, part in ((options(owner) if owner else every_option(), own), (every_option(), passed)):
        for flag in _FLAG.findall(part):
            if flag not in known:
                yield f"{owner} has no option {flag}" if owner else f"no command has the option {flag}"


@cache
def options(owner: str) -> frozenset[str]:
    """The options of a command, read from the code that declares them, without running it."""
    if owner in FOREIGN:
        return frozenset(FOREIGN[owner])
    if owner.startswith("emo "):
        command = COMMANDS[owner.removeprefix("emo ")]
        functions = [command.function] if command.function else [TRAINING, EVALUATION]
        rooms = [function.split(".")[1] for function in functions]
        return frozenset().union(*(options(LAUNCH if room == "launch" else f"emo.{room}") for room in rooms))
    if owner in LAUNCHERS:
        package, file = LAUNCHERS[owner]
        return _declared(REPO / "pipeline" / "cli.py") | _declared(_package(package) / file)
    path = REPO / owner.replace(".", "/")
    files = [*path.rglob("*.py")] if path.is_dir() else [path.with_suffix(".py")]
    files += [path.parent / "common.py"] if owner.startswith("tests.bench.") else []
    return frozenset().union(*map(_declared, files))


@cache
def every_option() -> frozenset[str]:
    """For options that are named without their command."""
    rooms = [
        *(f"emo.{room}" for room in ("data_prep", "pipeline", "eval", "experiments")),
        *LAUNCHERS,
        *FOREIGN,
    ]
    return frozenset({"--help"}).union(*map(options, rooms), *map(_declared, (REPO / "tests").rglob("*.py")))


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@cache
def _declared(path: Path) -> frozenset[str]:
    """Strings that begin with two hyphens among the arguments of `add_argument` or `add`."""
    if not path.is_file():
        return frozenset()
    calls = (
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
    )
    adding = (
        c for c in calls if getattr(c.func, "attr", getattr(c.func, "id", "")) in ("add_argument", "add")
    )
    values = (a.value for call in adding for a in call.args if isinstance(a, ast.Constant))
    return frozenset(v for v in values if isinstance(v, str) and v.startswith("--"))


def functions(path: Path) -> set[str]:
    """Names of the functions, classes and methods of a module; methods as `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)
            }
    return found
