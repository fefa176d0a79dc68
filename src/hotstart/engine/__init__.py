"""Requests, scheduling, KV bookkeeping, the runner and the engine process."""
