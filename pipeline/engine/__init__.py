"""The DeepSpeed engine, its configuration and the devices it uses."""
