"""Weights from a web server (the tests' own, in Python) into a GPU: right, and how fast?

PYTHONPATH=src:tests python benchmarks/gpu/from_web.py [GIGABYTES]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from fault_proxy import FaultServer
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.checkpoint.remote import ObjectFolder
from hotstart.device.choose import choose, open_device
from hotstart.loading import ring
from hotstart.loading.arena import Arena, Layout
from hotstart.loading.ring import Loading
from hotstart.models.spec import WeightSpec
from hotstart.storage.location import parse_location
from hotstart.storage.object_store import ObjectStore
from hotstart.units import format_rate, format_seconds, format_size

SHARDS = 4


def shard(name: str, nbytes: int, seed: int) -> tuple[bytes, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 1 << 62, (nbytes // 8,), generator=generator).view(torch.uint8)
    header = json.dumps({name: {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + values.numpy().tobytes(), values


def main() -> None:
    total = int(float(sys.argv[1] if len(sys.argv) > 1 else "1") * 1e9) // (8 * SHARDS) * 8 * SHARDS
    names = [f"model-{n:05}-of-{SHARDS:05}.safetensors" for n in range(1, SHARDS + 1)]
    made = [shard(f"t{n}", total // SHARDS, n) for n in range(SHARDS)]
    weight_map = {f"t{n}": name for n, name in enumerate(names)}
    small = Path(tempfile.mkdtemp())
    (small / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    files = {f"m/{name}": data for name, (data, _) in zip(names, made, strict=True)}
    with FaultServer(files) as web:
        store = ObjectStore(parse_location(f"{web.url}/m"), environ={}, patience=30.0)
        checkpoint = open_checkpoint(ObjectFolder(store, str(small)))
        specs = [WeightSpec(slot=f"t{n}", stored=(f"t{n}",), shape=(total // SHARDS,)) for n in range(SHARDS)]
        layout = Layout.of([(spec, checkpoint.tensors[spec.slot]) for spec in specs])
        arena = Arena(layout, open_device(choose("cuda")))
        began = time.monotonic()
        loading = Loading(
            checkpoint,
            arena,
            threads=ring.DISTANT_THREADS,
            first=ring.DISTANT_FIRST,
            buffers=ring.DISTANT_BUFFERS,
        )
        report = loading.wait()
        seconds = time.monotonic() - began
        right = all(torch.equal(arena.tensor(f"t{n}").cpu(), values) for n, (_, values) in enumerate(made))
        loading.close()
    rate = format_rate(report.bytes, seconds)
    verdict = "bytes right" if right else "bytes WRONG"
    print(f"{format_size(report.bytes)} in {format_seconds(seconds)}, {rate}, {verdict}")
    sys.exit(not right)


if __name__ == "__main__":
    main()
