"""Data preparation: from files and data sets to token shards."""
