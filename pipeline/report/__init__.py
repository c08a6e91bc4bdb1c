"""What is shown of runs from their files: `emo report` and `emo top`."""
