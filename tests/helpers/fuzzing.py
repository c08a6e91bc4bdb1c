"""Fuzz the parsers of untrusted files. Hypothesis damages valid files.

Reading a damaged file must take little time, succeed or raise a one-line UserError, and leave no other files.
"""

from __future__ import annotations

import contextlib
import json
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis import strategies as st

from emo.common.errors import UserError
from emo.common.text import printable

SECONDS = 10.0  # CPU time for a file of some kilobytes
Read = Callable[[Path], object]


class Target(NamedTuple):
    """A parser and the files that it reads."""

    make: Read  # writes valid files into an empty directory
    read: Read
    damaged: tuple[str, ...]  # files to damage, relative to the directory. Empty means all
    crashes: tuple[tuple[str, Any], ...]  # (file, content) of past crashes. Values except bytes become JSON


TARGETS: dict[str, Target] = {}


def target(
    name: str, make: Read, *damaged: str, crashes: tuple[tuple[str, Any], ...] = ()
) -> Callable[[Read], Read]:
    """Register the decorated function as a target. It reads the files that `make` wrote."""

    def register(read: Read) -> Read:
        TARGETS[name] = Target(make, read, damaged, crashes)
        return read

    return register


# Text that replaces a value of JSON or YAML without quotes.
RAW = {"@digits@": "9" * 5000, "@deep@": "[" * 5000, "@deep and closed@": "[" * 900 + "]" * 900}
RAW |= {"@large@": "1e999", "@nan@": "NaN"}
VALUES = [
    *(None, True, 0, -1, 2**31, 2**53 + 1, 2**64, 10**400, 0.5, 1e308, "", "0", "\n", [], {}, [[]], [None]),
    *({"": {}}, {"a": {"b": [1, {"c": "d"}]}}, ["a", 1, None, {}], "../../../etc/hostname", "/etc/hostname"),
    *("..", "a\0b", "-rf", "x" * 300, "\x1b[2J", "a\r\nb", "\u202ereversed", "\ud800", "{0.__class__}"),
    *("{x:>99999999999}", "%s", "$(id)", "<script>", "https://user:secret@host/x", "hub", "null", "*a", *RAW),
]
DELETE = object()
_known = st.sampled_from(VALUES)
_junk = st.one_of(*[_known] * 3, st.integers(), st.text(max_size=20), st.just(DELETE))
_edits = st.lists(st.tuples(st.integers(0, 5000), _junk), min_size=1, max_size=4)


def _slots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key of every value in a tree."""
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, inner in list(items):
        yield value, key
        yield from _slots(inner)


def _edited(values: list[Any], edits: list[tuple[int, Any]]) -> bytes:
    values = json.loads(json.dumps(values, default=str))
    for number, value in edits:
        slots = list(_slots(values))
        if not slots:
            break
        container, key = slots[number % len(slots)]
        if value is DELETE:
            del container[key]
        else:
            container[key] = json.loads(json.dumps(value))
    text = "\n".join(json.dumps(value) for value in values)
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name), raw)
    return text.encode()


def _values(content: bytes) -> list[Any]:
    """Return the JSON or YAML values of a file, or an empty list for other content."""
    with contextlib.suppress(ValueError, yaml.YAMLError):
        text = content.decode()
        for parsed in (lambda: [json.loads(text)], lambda: [json.loads(line) for line in text.splitlines()]):
            with contextlib.suppress(ValueError):
                return parsed()
        tree = yaml.safe_load(text)
        return [tree] if isinstance(tree, dict | list) else []
    return []


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    bytes_ = st.builds(  # some bytes are replaced or cut off
        lambda start, length, inserted: content[:start] + inserted + content[start + length :],
        st.integers(0, len(content)),
        st.sampled_from((0, 0, 1, 2, 4, 8, 1 << 20)),
        st.binary(max_size=16),
    )
    values = _values(content)
    trees = st.builds(_edited, st.just(values), _edits)
    return st.one_of(trees, trees, trees, bytes_) if values else bytes_


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside the block if it takes more than `seconds` of CPU time."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def attempt(parser: Target, directory: Path, file: str, content: bytes) -> None:
    """Read a damaged file in place of the valid one. Raises if the parser crashes, stalls or leaves files."""
    path = directory / file
    sound, files, late = path.read_bytes(), set(directory.rglob("*")), False
    path.write_bytes(content)
    try:
        with _at_most(SECONDS):
            parser.read(directory)
    except TimeoutError:
        late = True  # raised below, because hypothesis distinguishes errors by their line
    except UserError as error:
        text = str(error)
        assert text and printable(text) == text and "\n" not in text and len(text) <= 2000, ascii(text)[:300]
    finally:
        path.write_bytes(sound)
    left = set(directory.rglob("*")) - files
    for new in left:
        new.unlink()
    assert not late, f"more than {SECONDS:g} s"
    assert not left, f"left behind: {sorted(left)[:3]}"


def fuzz(name: str, examples: int, seeded: int | None = None) -> None:
    """Try damaged files on a target, always the same ones without `seeded`. Raises a minimal crash."""
    parser = TARGETS[name]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
        directory = Path(temporary)
        parser.make(directory)
        parser.read(directory)
        names = sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())
        contents = {name: damaged((directory / name).read_bytes()) for name in parser.damaged or names}
        files = st.one_of(*(st.tuples(st.just(name), content) for name, content in contents.items()))

        def trial(case: tuple[str, bytes]) -> None:
            attempt(parser, directory, *case)

        test = given(files)(trial)
        for file, crash in parser.crashes:
            test = example((file, crash if isinstance(crash, bytes) else json.dumps(crash).encode()))(test)
        if seeded is not None:
            test = seed(seeded)(test)
        settings(
            max_examples=examples, deadline=None, database=None, derandomize=seeded is None,
            report_multiple_bugs=False, phases=(Phase.explicit, Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )(test)()  # fmt: skip
