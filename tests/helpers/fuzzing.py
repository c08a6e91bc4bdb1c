"""Fuzzing: files like those that a parser reads, damaged in every way, and what may come of reading them.

A target (see `fuzz_targets.py`) makes a directory of sound files once, names those that others could have
written, and reads them. Whatever such a file holds, reading it must end soon, without much memory, in success
or in a UserError of one line, and leave no other files behind.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import random
import signal
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.text import printable
from tests.conftest import REPO

CORPUS = REPO / "tests" / "helpers" / "fuzz_corpus.json"
# That reading a file of some kilobytes may take: of the processor, and where it waits for something, which it
# should not, of anybody's time.
SECONDS, WAITING = 10.0, 300.0

Make = Callable[[Path], None]
Read = Callable[[Path], object]


class Crash(AssertionError):  # noqa: N818 - what was found, not what went wrong here
    """Something other than success or a UserError. kind: tells it from others; detail: what it said."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


@dataclass(frozen=True)
class Target:
    """A parser with the files that it reads."""

    name: str
    make: Make  # writes sound files into an empty directory
    read: Read  # what is tried
    damaged: tuple[str, ...]  # the files that are damaged, relative to the directory


class Input(NamedTuple):
    """One damaged file."""

    file: str
    content: bytes


TARGETS: dict[str, Target] = {}


def target(name: str, make: Make, *damaged: str) -> Callable[[Read], Read]:
    """Register the decorated function, which reads the files that `make` wrote, as a target."""

    def register(read: Read) -> Read:
        TARGETS[name] = Target(name, make, read, damaged)
        return read

    return register


class Bench:
    """A target's directory: each input in turn takes the place of a sound file, and is taken out again."""

    def __init__(self, of: Target, directory: Path) -> None:
        self.target, self.directory = of, directory
        of.make(directory)
        self.sound = {name: (directory / name).read_bytes() for name in of.damaged}
        self.trees = {name: _tree(content) for name, content in self.sound.items()}
        of.read(directory)  # as it is, it is sound
        self._files = self._there()

    def __call__(self, given: Input) -> None:
        """Raises Crash when reading the input ends otherwise than it may."""
        path = self.directory / given.file
        path.write_bytes(given.content)
        try:
            with at_most(SECONDS, WAITING):
                self.target.read(self.directory)
        except UserError as error:
            text = str(error)
            if printable(text) != text or "\n" in text or len(text) > 2000 or not text:
                raise Crash("no line for a terminal", f"{text!a:.300}") from None
        except Exception as error:
            raise Crash(f"{type(error).__name__} in {_where(error)}", f"{error!s:.200}") from error
        finally:
            path.write_bytes(self.sound[given.file])
        more = self._there() - self._files
        if more:
            raise Crash("left behind", str(sorted(more)[:3]))

    def _there(self) -> set[str]:
        return {str(path) for path in self.directory.rglob("*")}


@contextlib.contextmanager
def bench(name: str) -> Iterator[Bench]:
    """The bench of a target, in a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        yield Bench(TARGETS[name], Path(directory))


@contextlib.contextmanager
def at_most(working: float, waiting: float) -> Iterator[None]:
    """Raises TimeoutError inside the block when it takes more seconds of processor time, or of time."""

    def ring(number: int, _: object) -> None:
        raise TimeoutError(f"more than {working if number == signal.SIGPROF else waiting:g} s")

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, working), signal.SIGALRM: (signal.ITIMER_REAL, waiting)}
    before = {number: signal.signal(number, ring) for number in timers}
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def _where(error: BaseException) -> str:
    """The last places of this program that an error came through; they tell crashes apart."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if str(REPO) in f.filename and "/tests/" not in f.filename]
    own = [f for f in own if ".venv" not in f.filename] or frames
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(own[-2:]))


# --- inputs -----------------------------------------------------------------------------------------------

# Written as they are into JSON or YAML, in the place of a value.
RAW = {
    "@digits@": "9" * 5000,
    "@deep@": "[" * 5_000,
    "@deep and whole@": "[" * 900 + "]" * 900,
    "@large@": "1e999",
    "@hexadecimal@": "0x" + "f" * 6000,
    "@nan@": "NaN",
}
VALUES = [
    *(None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**64, 10**400, 0.5, -0.0, 1e308, "", " ", "0", "\n"),
    *([], {}, [[]], [None], {"": {}}, {"a": {"b": [1, {"c": "d"}]}}, ["a", 1, None, {}]),
    *("../../../etc/hostname", "/etc/hostname", "a/b", "..", ".", "~", "a\0b", "-rf", "x" * 300),
    *("\x1b]0;title\a\x1b[2J", "a\r\nb", "\u202ereversed", "\ud800", "caf\u00e9", "\U0001f642", "\ufeff"),
    *("{x}", "{0.__class__}", "{x:>99999999999}", "%s%n", "${HOME}", "$(id)", "<script>", "]]>", "`", "[b]"),
    *("https://user:secret@host/x", "s3://bucket/x", "file:///etc/passwd", "hub", "all", "null", "*a", "&a"),
    *RAW,
]


def given(of: Bench, draw: random.Random) -> Input:
    """A damaged file of a target."""
    file = draw.choice(of.target.damaged)
    tree = of.trees[file]
    if tree is not None and draw.random() < 0.8:
        edits = [_edit(draw) for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 6)))]
        return Input(file, _written(tree, edits))
    return Input(file, _cut(of.sound[file], draw))


def _tree(content: bytes) -> Any:
    """A file as JSON values: of a JSON or YAML file one, of JSON lines a list in a list; else None."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    with contextlib.suppress(ValueError):
        return json.loads(text)
    with contextlib.suppress(ValueError):
        return Lines(json.loads(line) for line in text.splitlines())
    import yaml

    with contextlib.suppress(yaml.YAMLError):
        found = yaml.safe_load(text)
        return found if isinstance(found, dict | list) else None
    return None


class Lines(list[Any]):
    """The values of JSON lines."""


Edit = tuple[int, str, Any]  # which place in a tree, what is done there (see `_change`), with which value


def _edit(draw: random.Random) -> Edit:
    return draw.randrange(10_000), draw.choice("rrrrrrdcwkm"), _value(draw)


def _value(draw: random.Random) -> Any:
    """Something that belongs nowhere, or a small tree of such things."""
    kind = draw.random()
    if kind < 0.7:
        return copy.deepcopy(draw.choice(VALUES))
    if kind < 0.8:
        return draw.choice((1, -1)) * draw.getrandbits(draw.choice((3, 31, 63, 200)))
    if kind < 0.85:
        return draw.uniform(-1, 2)
    if kind < 0.92:
        return "".join(chr(draw.choice((draw.randrange(32, 127), draw.randrange(0x3000)))) for _ in range(8))
    inner = [_value(draw) for _ in range(draw.randrange(4))]
    return inner if draw.random() < 0.5 else {str(one)[:20]: one for one in inner}


def _written(tree: Any, edits: list[Edit]) -> bytes:
    holder = [json.loads(json.dumps(tree, default=str))]
    for place, what, value in edits:
        slots = list(_slots(holder))
        _change(*slots[place % len(slots)], what, copy.deepcopy(value))
    values = holder[0] if isinstance(tree, Lines) and isinstance(holder[0], list) else holder
    text = "\n".join(json.dumps(value) for value in values)
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name), raw)
    return text.encode()


def _slots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a tree: what holds it, and its key there."""
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, inner in list(items):
        yield value, key
        yield from _slots(inner)


def _change(holder: Any, key: Any, what: str, value: Any) -> None:
    """r: replace, d: leave out, c: twice, w: in a list, k: under another key, m: as a number among others."""
    if what == "d" and len(holder) > 1:
        del holder[key]
    elif what == "c" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif what == "w":
        holder[key] = [holder[key]]
    elif what == "k" and isinstance(holder, dict) and isinstance(value, str):
        holder[value] = holder.pop(key)
    elif what == "m" and isinstance(holder[key], int | float) and isinstance(value, int | float):
        holder[key] = holder[key] + value if max(abs(holder[key]), abs(value)) < 2**70 else value
    else:
        holder[key] = value


def _cut(sound: bytes, draw: random.Random) -> bytes:
    """The bytes cut short, with some of them changed, doubled or put in; or any bytes at all."""
    low, high = sorted(draw.randrange(len(sound) + 1) for _ in range(2))
    kind = draw.randrange(6)
    if kind == 0:
        return sound[:high]
    if kind == 1:
        content = bytearray(sound or b"\0")
        for _ in range(draw.randint(1, 8)):
            content[draw.randrange(len(content))] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
        return bytes(content)
    if kind == 2:
        return sound[:high] + draw.randbytes(draw.randrange(64)) + sound[high:]
    if kind == 3:
        return sound[:high] + sound[low:high] * draw.choice((1, 1, 50)) + sound[high:]
    if kind == 4:
        width = draw.choice((1, 2, 4, 8))
        number = draw.choice((0, 1, 2 ** (8 * width) - 1, 2 ** (8 * width - 1), draw.getrandbits(8 * width)))
        return sound[:low] + number.to_bytes(width, "little") + sound[low + width :]
    return draw.randbytes(draw.randrange(200))


# --- the corpus -------------------------------------------------------------------------------------------


def corpus() -> dict[str, list[Input]]:
    """Inputs that once crashed their target."""
    listed = json.loads(CORPUS.read_text()) if CORPUS.is_file() else {}
    return {
        name: [Input(one["file"], zlib.decompress(base64.b64decode(one["content"]))) for one in found]
        for name, found in listed.items()
    }


def remember(name: str, given: Input) -> None:
    """Add an input to the corpus."""
    known = corpus()
    if given not in known.setdefault(name, []):
        known[name].append(given)
    listed = {
        name: [
            {"file": one.file, "content": base64.b64encode(zlib.compress(one.content, 9)).decode()}
            for one in found
        ]
        for name, found in sorted(known.items())
    }
    CORPUS.write_text(json.dumps(listed, indent=1) + "\n")
