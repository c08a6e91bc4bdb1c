"""The processes of a run: ranks, requests to stop, the lock and the heartbeats."""
