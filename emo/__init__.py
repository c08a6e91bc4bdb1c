"""Adapt a language model with EMO and its peers, and know whether it helped.

`emo.loss` and `emo.hf` are the public API. The other names here are links to the rooms of the repository:
common, data_prep, pipeline, eval, experiments, launch and ds_configs.
"""

__version__ = "0.1.0"  # pyproject.toml and CITATION.cff have it from here
