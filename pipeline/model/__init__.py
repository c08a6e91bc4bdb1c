"""The model that trains: how it is built, checked and exported."""
