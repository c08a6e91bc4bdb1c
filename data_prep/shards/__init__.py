"""The shards on disk: writing, reading and checking them."""
