"""Which rows each step trains on, and the tensors made from them."""
