"""What a run logs, measures and watches for while it trains."""
