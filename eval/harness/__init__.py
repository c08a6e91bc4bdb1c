"""Tasks of lm-evaluation-harness, scored by the harness itself."""
