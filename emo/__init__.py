"""Fine-tune language models with EMO and other objectives, and measure whether they helped.

`emo.loss` and `emo.hf` are the public API. The other names are links to the packages of the repository:
common, data_prep, pipeline, eval, experiments (not in wheels), launch and ds_configs.
"""

__version__ = "0.1.0"  # pyproject.toml and CITATION.cff have it from here
