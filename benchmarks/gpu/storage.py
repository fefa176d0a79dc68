"""How fast weights come into a GPU's memory from each kind of storage, as a start reads them.

    python benchmarks/gpu/storage.py --rounds 3 [--work /dev/shm/hotstart-storage] [--disk DIR]

A random model is written into memory and onto a disk. Each load is a process of its own: headers, choice of
the way, ring, arena, nothing else; the seconds run from the first header to the last byte on the device.
Media alternate; the table has medians.
``--device cpu`` checks the script on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT / "src"), str(HERE.parent)]

from range_server import served  # noqa: E402

from hotstart.storage.residency import evict  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/hotstart-storage"))
    parser.add_argument("--disk", type=Path, default=Path("/tmp/hotstart-storage"))
    parser.add_argument("--disk-gb", type=float, default=6.0, help="of the model, as much goes onto the disk")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--load", nargs=3, metavar=("LOCATION", "SMALL_FILES", "STRATEGY"), help=argparse.SUPPRESS
    )
    parser.add_argument("shape", nargs="*", help="after --: flags of make_model.py")
    args = parser.parse_args()
    if args.load:
        load(args.load[0], args.load[1], args.load[2], args.device)
        return
    memory = args.work / "big"
    if not memory.exists():
        maker = [sys.executable, str(HERE / "make_model.py"), str(memory), "--device", args.device]
        subprocess.run([*maker, *args.shape], check=True)
    disk = copy_of(memory, args.disk / "big", int(args.disk_gb * 1e9))
    with served(memory, processes=max(2, (os.cpu_count() or 2) // 3)) as address:
        media = {
            "memory": (str(memory), "", "auto", False),
            "disk, page cache": (str(disk), "", "auto", False),
            "disk, cold": (str(disk), "", "auto", True),
            "disk, cold, direct": (str(disk), "", "direct", True),
            "disk, cold, buffered": (str(disk), "", "buffered", True),
            "HTTP on the same machine": (address, str(memory), "auto", False),
        }
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in media}
        for number in range(args.rounds):
            for name, (location, small, strategy, cold) in media.items():
                for file in disk.glob("*.safetensors"):
                    evict(str(file)) if cold else file.read_bytes() if location == str(disk) else None
                command = [
                    sys.executable,
                    __file__,
                    "--device",
                    args.device,
                    "--load",
                    location,
                    small,
                    strategy,
                ]
                run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300)
                if run.returncode:
                    print(f"{name}: FAILED with {run.returncode}", flush=True)
                    continue
                found[name].append(json.loads(run.stdout.splitlines()[-1]))
                print(f"round {number + 1}, {name}: {found[name][-1]}", flush=True)
    table(found)
    if out := os.environ.get("OUT"):
        Path(out, "storage.json").write_text(json.dumps(found, indent=1))
    shutil.rmtree(args.disk, ignore_errors=True)


def copy_of(model: Path, target: Path, most: int) -> Path:
    """As many of the shards as fit, with an index of their own."""
    target.mkdir(parents=True, exist_ok=True)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    kept: set[str] = set()
    for shard in sorted(model.glob("*.safetensors")):
        if sum((target / name).stat().st_size for name in kept) + shard.stat().st_size <= most or not kept:
            shutil.copyfile(shard, target / shard.name)
            kept.add(shard.name)
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file in kept}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copyfile(model / "config.json", target / "config.json")
    os.sync()
    return target


def table(found: dict[str, list[dict[str, Any]]]) -> None:
    print(f"\n{'medium':28} {'seconds':>8} {'GB/s':>6}  how")
    for name, runs in found.items():
        if runs:
            seconds = statistics.median(run["seconds"] for run in runs)
            print(f"{name:28} {seconds:8.2f} {runs[0]['bytes'] / seconds / 1e9:6.1f}  {runs[-1]['how']}")


def load(location: str, small_files: str, strategy: str, device_name: str) -> None:
    """One load into the device's memory, in this process."""
    from hotstart.checkpoint.folder import Folder, LocalFolder
    from hotstart.checkpoint.layout import open_checkpoint
    from hotstart.checkpoint.remote import ObjectFolder, open_store
    from hotstart.device.choose import choose, open_device
    from hotstart.loading.arena import Arena, Layout
    from hotstart.loading.choice import choose_for_gpu
    from hotstart.loading.options import LoaderOptions
    from hotstart.loading.ring import Loading
    from hotstart.loading.staging import staging_for
    from hotstart.models.spec import WeightSpec

    device = open_device(choose(device_name))
    device.attach()
    folder: Folder = LocalFolder(location)
    if small_files:
        folder = ObjectFolder(open_store(location, environ=os.environ, patience=60.0), small_files)
    began = time.monotonic()
    checkpoint = open_checkpoint(folder)
    layout = Layout.of(
        (WeightSpec(slot=name, stored=(name,), shape=ref.shape), ref)
        for name, ref in checkpoint.tensors.items()
    )
    arena = Arena(layout, device)
    staging = staging_for(checkpoint, LoaderOptions.parse({}))
    loading = Loading(
        checkpoint,
        arena,
        choices=choose_for_gpu(checkpoint.files, strategy),
        threads=staging.ring.threads,
        first=staging.first,
        buffers=staging.ring.buffers,
        buffer_bytes=staging.ring.buffer_bytes,
    )
    report = loading.wait()
    found = {
        "seconds": time.monotonic() - began,
        "bytes": report.bytes,
        "how": loading.describe(),
        "readers": min(loading._flow.limit, staging.ring.threads),
    }
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
