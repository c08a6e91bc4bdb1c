"""Components that log and check a run while it trains, and what they record."""
