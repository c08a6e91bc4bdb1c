"""The command scrontab, which Debian's Slurm lacks: compiled from the sources of the installed version."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
SOURCES = f"deb-src [signed-by={KEYS}] http://deb.debian.org/debian {{suite}} main\n"


def find_scrontab(directory: Path) -> str | None:
    """The command on PATH, or one built in `directory` (a minute); None when that fails."""
    found = shutil.which("scrontab")
    if found is not None:
        return found
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
    (directory / "sources.list").write_text(SOURCES.format(suite=_suite()))
    lists.mkdir()
    options = [f"-oDir::Etc::SourceList={directory}/sources.list", "-oDir::Etc::SourceParts=/dev/null"]
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


def _suite() -> str:
    """Debian's name of this release."""
    words = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line
    )
    return words.get("VERSION_CODENAME", "stable")
