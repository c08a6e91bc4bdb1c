"""The command scrontab, which Debian's Slurm lacks: compiled from the sources of the installed version."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

LISTS = Path("/etc/apt")  # where this machine's package lists come from


def find_scrontab(directory: Path) -> str | None:
    """The command on PATH, or one built in `directory` (a minute); None when that fails."""
    results = shutil.which("scrontab")
    if results is not None:
        return results
    directory.mkdir()
    try:
        return str(_build(directory))
    except (subprocess.CalledProcessError, FileNotFoundError, StopIteration) as error:
        print(error, getattr(error, "stderr", b"").decode()[-600:])
        return None


def _build(directory: Path) -> Path:
    def call(*command: str | Path, where: Path = directory) -> str:
        return subprocess.run(command, cwd=where, check=True, capture_output=True).stdout.decode().strip()

    lists = directory / "lists"
    lists.mkdir()
    (directory / "apt").mkdir()
    _sources(directory / "apt")
    options = ["-oDir::Etc::SourceList=/dev/null", f"-oDir::Etc::SourceParts={directory}/apt"]
    options += [f"-oDir::State::Lists={lists}", "-oAPT::Sandbox::User=root"]
    version = call("dpkg-query", "-W", "-f", "${source:Version}", "slurm-client")
    call("apt-get", *options, "update")
    call("apt-get", *options, "source", "--download-only", f"slurm-wlm={version}")
    call("tar", "-xf", next(directory.glob("*.orig.tar.*")))
    source = next(path.parent for path in directory.glob("*/configure"))
    call("./configure", "--without-munge", "--disable-debug", where=source)
    here = source / "src" / "scrontab"
    for text in ("default_crontab.txt", "usage.txt"):
        call(
            "ld",
            "-r",
            "-o",
            text.replace(".txt", ".o"),
            "-z",
            "noexecstack",
            "--format=binary",
            text,
            where=here,
        )
    library = next(Path("/usr/lib").glob("*/slurm-wlm/libslurmfull.so"))
    linked = [str(library), f"-Wl,-rpath,{library.parent}", "-rdynamic"]
    files = sorted(str(path) for kind in ("*.c", "*.o") for path in here.glob(kind))
    call("gcc", f"-I{source}", "-o", directory / "scrontab", *files, *linked)
    return directory / "scrontab"


def _sources(directory: Path) -> None:
    """Write this machine's own lists of Debian's packages into `directory`, as lists of their sources."""
    for path in (*LISTS.glob("sources.list"), *LISTS.glob("sources.list.d/*")):
        if "/debian" in (text := path.read_text()):
            text = re.sub(r"^Types:.*$", "Types: deb-src", text, flags=re.MULTILINE)
            (directory / path.name).write_text(re.sub(r"^deb ", "deb-src ", text, flags=re.MULTILINE))
