"""Ranks and executors: who runs a step."""
