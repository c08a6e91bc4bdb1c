"""Files: atomic writes, leases, and readers of untrusted files."""
