"""Components that log, measure and check a run while it trains."""
