"""Show runs from their files: `emo report` and `emo top`."""
