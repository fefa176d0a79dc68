"""What faults of a store cost a load: one range of a hundred is cut, one of a hundred is slow.

    python benchmarks/faulty_ranges.py MODEL --rounds 7 --rate 400MB

Loads alternate between a server without faults and one with; each is a process of its own. ``--rate`` is
the bandwidth of the network in between; without it loopback is, which shares the cores with the load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from range_server import served

LOAD = """
import json, os, sys, time
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.checkpoint.remote import ObjectFolder, open_store
from hotstart.loading.image import Image
began = time.monotonic()
store = open_store(sys.argv[1], environ=os.environ, patience=60.0)
checkpoint = open_checkpoint(ObjectFolder(store, sys.argv[2]))
image = Image(checkpoint)
image.start()
image.wait()
speed = store.speed
print(json.dumps([time.monotonic() - began, speed.retried, speed.replaced]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rate", type=float, default=0.0, help="MB/s of the network; 0: loopback")
    args = parser.parse_args()
    folder, rate = args.model.resolve(), args.rate * 1e6
    found: dict[str, list[list[float]]] = {"clean": [], "faulty": []}
    with served(folder, rate=rate) as clean, served(folder, rate=rate, cut=0.01, slow=0.01) as faulty:
        for number in range(args.rounds):
            order = [("clean", clean), ("faulty", faulty)]
            for name, address in order if number % 2 else reversed(order):
                command = [sys.executable, "-c", LOAD, address, str(folder)]
                found[name].append(json.loads(subprocess.check_output(command)))
    for name, runs in found.items():
        seconds, retried, replaced = zip(*runs, strict=True)
        print(
            f"{name:8} {statistics.median(seconds):.2f} s [{min(seconds):.2f}-{max(seconds):.2f}], "
            f"{sum(retried):.0f} ranges asked for again after a cut, {sum(replaced):.0f} replaced"
        )
    medians = {name: statistics.median(run[0] for run in runs) for name, runs in found.items()}
    print(f"faulty / clean: {medians['faulty'] / medians['clean']:.2f}")


if __name__ == "__main__":
    main()
