"""What all rooms stand on."""

__version__ = "0.1.0"  # of the whole project; pyproject.toml and CITATION.cff have it from here
