"""In-context evaluation on classification tasks."""
