"""Reports as HTML, Markdown or JSON."""
