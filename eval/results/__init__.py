"""Results on disk, the input rows behind them, and statistics over them."""
