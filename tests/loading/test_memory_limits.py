"""Loads in little memory: a bounded peak, by the container's limit, and no more than the model needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint_files import file_of, write_model
from hotstart.storage.residency import evict
from small_container import SmallContainer, small_container

MIB = 1 << 20
LIMIT = 96 * MIB
INTERPRETER = 50 * MIB
"""What a process has in memory before it loads anything, and a margin."""

GPU_LOAD = """
import json, os, sys, zlib
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.device.cpu import CpuDevice, view_of
from hotstart.loading.arena import Arena, Layout
from hotstart.loading.explain import lines, plan_of
from hotstart.loading.options import LoaderOptions
from hotstart.loading.rates import Rate
from hotstart.loading.ring import Loading
from hotstart.loading.staging import staging_for
from hotstart.models.spec import WeightSpec


class Gpu(CpuDevice):
    '''Its memory is not the machine's: what is copied there is remembered by its checksum.'''

    def __init__(self):
        super().__init__()
        self.copied = {}

    def copy(self, dst, src, nbytes, stream):
        self.copied[dst] = nbytes, zlib.crc32(view_of(src, nbytes))


checkpoint = open_checkpoint(sys.argv[1])
staging = staging_for(checkpoint, LoaderOptions.parse(json.loads(sys.argv[2])))
plan = plan_of(checkpoint, ring=staging.ring)
memory = [text for topic, text in lines(plan, [Rate(1e9, 0.0)] * len(plan.groups)) if topic == "memory"]
items = [
    (WeightSpec(slot=name, stored=(name,), shape=ref.shape), ref)
    for name, ref in checkpoint.tensors.items()
]
device = Gpu()
arena = Arena(Layout.of(items), device)
ring = staging.ring
sizes = {"threads": ring.threads, "buffers": ring.buffers, "buffer_bytes": ring.buffer_bytes}
loading = Loading(checkpoint, arena, **sizes)
loading.wait()
loading.close()
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
peak = int(status["VmHWM"].split()[0]) * 1024
places = {arena.address(part): part.ref for part in arena.layout.parts}
right = 0
for address, ref in places.items():
    with open(checkpoint.files[ref.file].path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        at = address
        while at < address + ref.nbytes:
            nbytes, crc = device.copied[at]
            file.seek(ref.offset + at - address)
            if zlib.crc32(file.read(nbytes)) == crc:
                right += nbytes
            at += nbytes
print(json.dumps({"right": right, "peak": peak, "ring": ring.nbytes, "memory": memory[0]}))
"""


def written(directory: Path, shards: int, size: int) -> Path:
    """Weights of random bytes, none of which is in the page cache."""
    for number in range(shards):
        header = {f"w{number}": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
        path = directory / f"{number}.safetensors"
        path.write_bytes(file_of(header, os.urandom(size)))
        evict(str(path))
    return directory


def loaded(ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.fixture
def container() -> Iterator[SmallContainer]:
    with small_container(LIMIT) as made:
        if made is None:
            pytest.skip("this user may not make control groups")
        yield made


def test_weights_larger_than_the_containers_memory_go_to_a_gpu(disk: Path, container: SmallContainer) -> None:
    directory = written(disk, shards=3, size=64 * MIB)
    found = loaded(container.run([sys.executable, "-c", GPU_LOAD, str(directory), "{}"]))
    assert found["right"] == 3 * 64 * MIB
    assert found["ring"] <= LIMIT // 4
    assert found["peak"] <= found["ring"] + INTERPRETER
    assert container.limit_file in found["memory"]
    assert "of pinned staging memory" in found["memory"]


def test_a_limit_is_not_taken_in_full(disk: Path) -> None:
    directory = written(disk, shards=1, size=25 * MIB)
    options = json.dumps({"memory_limit": 2 << 30})
    command = [sys.executable, "-c", GPU_LOAD, str(directory), options]
    found = loaded(subprocess.run(command, capture_output=True, text=True, timeout=120, check=False))
    assert found["right"] == 25 * MIB
    assert found["ring"] <= 32 * MIB
    assert found["peak"] <= 32 * MIB + INTERPRETER
    assert "of at most 2.15 GB on this machine" in found["memory"]


def test_a_cpu_that_cannot_hold_the_weights_is_refused_by_the_containers_limit(
    tmp_path: Path, container: SmallContainer
) -> None:
    model = write_model(tmp_path / "model")
    command = [sys.executable, "-m", "hotstart", "check", str(model), "--device", "cpu", "--port", "0"]
    ended = container.run(command, HOTSTART_CACHE_ROOT=str(tmp_path / "cache"))
    assert ended.returncode > 0
    assert f"101 MB ({container.limit_file})" in ended.stdout
