import common  # noqa: F401 - before any other: it says in a line that packages are missing

# What only one kind of file in this folder has: the command that reads that kind.
READERS = {
    "axes": "python -m experiments run",
    "parts": "python -m experiments.evidence",
    "contestants": "python -m experiments.known_truth.study",
}
