"""How long a start thinks before it reads: open, match and plan a checkpoint of many shards and tensors.

    python benchmarks/plan.py [--shards 200] [--tensors 50000] [--rounds 5] [--profile]

The files hold headers and one element a tensor; planning reads no further. Prints the median of each
stage in milliseconds. The target is 300 ms in all for the default size.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from hotstart.checkpoint.base import Checkpoint
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.loading.image import Image
from hotstart.loading.match import Matched, match
from hotstart.models.spec import WeightSpec

EXPERT = "model.layers.{}.mlp.experts.{}.{}_proj.weight"
SHAPE = (1, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--tensors", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hotstart-plan-") as folder:
        names = write(Path(folder), args.shards, args.tensors)
        specs = [WeightSpec(slot=name, stored=(name,), shape=SHAPE) for name in names]
        stages: dict[str, list[float]] = {}
        for _ in range(args.rounds):
            for stage, seconds in plan(folder, specs).items():
                stages.setdefault(stage, []).append(seconds)
        for stage, seconds in stages.items():
            spread = f"[{min(seconds) * 1e3:.0f} - {max(seconds) * 1e3:.0f}]"
            print(f"{stage:<24}{median(seconds) * 1e3:>7.0f} ms  {spread}")
        if args.profile:
            profiler = cProfile.Profile()
            profiler.runcall(plan, folder, specs)
            pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    return 0


def write(folder: Path, shards: int, tensors: int) -> list[str]:
    """A checkpoint like those of large mixtures of experts: many small names, an index, many files."""
    per_layer = 3 * 256
    names = [
        EXPERT.format(i // per_layer, i % per_layer // 3, ("gate", "up", "down")[i % 3])
        for i in range(tensors)
    ]
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = names[shard * tensors // shards : (shard + 1) * tensors // shards]
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for at, name in enumerate(mine):
            entries[name] = {"dtype": "BF16", "shape": SHAPE, "data_offsets": [2 * at, 2 * at + 2]}
            weight_map[name] = file
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        (folder / file).write_bytes(len(header).to_bytes(8, "little") + header + bytes(2 * len(mine)))
    index = {"metadata": {"total_size": 2 * tensors}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
    return names


def plan(folder: str, specs: list[WeightSpec]) -> dict[str, float]:
    """Seconds of each stage, and of all."""
    gc.collect()
    gc.disable()  # as a start has it while it imports
    stages: dict[str, float] = {}
    began = time.perf_counter()
    checkpoint: Checkpoint = _timed(stages, "open_checkpoint", lambda: open_checkpoint(folder))
    matched: Matched = _timed(stages, "match", lambda: match(specs, checkpoint))
    image: Image = _timed(stages, "plan of files (CPU)", lambda: Image(checkpoint))
    stages["in all, CPU"] = time.perf_counter() - began
    _timed(stages, "plan of ranges (GPU)", lambda: _arena(matched))
    stages["in all, GPU"] = (
        stages["in all, CPU"] - stages["plan of files (CPU)"] + stages["plan of ranges (GPU)"]
    )
    image.close()
    gc.enable()
    return stages


def _arena(matched: Matched) -> object:
    from hotstart.loading.arena import Layout
    from hotstart.loading.ring import plan_chunks

    layout = Layout.of(matched.loads, dtype=matched.dtype)
    return plan_chunks([(part.ref, part.offset) for part in layout.parts])


def _timed(stages: dict[str, float], stage: str, work: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = work()
    stages[stage] = time.perf_counter() - began
    return result


if __name__ == "__main__":
    print(f"cores: {os.cpu_count()}, load: {os.getloadavg()[0]:.1f}")
    sys.exit(main())
