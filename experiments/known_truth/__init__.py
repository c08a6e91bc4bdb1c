"""Studies on languages whose true distribution is known."""
