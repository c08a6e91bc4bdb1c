import emo.common  # noqa: F401 - before any other: it says in a line that packages are missing
