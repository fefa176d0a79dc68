"""Benchmarks: each command imports what it needs when it is chosen."""
