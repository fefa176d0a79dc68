"""What a start says of the page cache: how much of the model was there already, and how it was read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hotstart.storage.residency import evict, resident_fraction
from running_server import RunningServer


def started(model: Path, log: Path) -> str:
    with RunningServer(model, "--threads", "1", "--device", "cpu", log=log) as server:
        return server.until_ready().output


def test_a_cold_start_and_a_warm_one_are_told_apart(large_model: Path, tmp_path: Path) -> None:
    shards = list(large_model.glob("*.safetensors"))
    for shard in shards:
        evict(str(shard))
        if resident_fraction(str(shard)) != 0:
            pytest.skip("this file system keeps its pages")
    cold = started(large_model, tmp_path / "cold.log")
    assert re.search(r"map \(0% resident in the page cache; ", cold)
    for shard in shards:
        shard.read_bytes()
    warm = started(large_model, tmp_path / "warm.log")
    assert re.search(r"map \(100% resident in the page cache", warm)
