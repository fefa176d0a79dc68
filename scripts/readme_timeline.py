"""Measure the start of the demo model and put its median timeline into both READMEs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from statistics import median

import msgspec
from demo import NAME, prepared, serve_command

from hotstart.bench.client import Target
from hotstart.bench.floor import import_torch, measure_floor
from hotstart.bench.launch import Server, Start, free_port, observe
from hotstart.bench.report import median_start
from hotstart.cli.progress import startup_table
from hotstart.timeline import Phase, Timeline

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "README.zh-CN.md")
BLOCK = re.compile(r"(<!-- timeline: .*? -->\n).*?(<!-- /timeline -->)", re.DOTALL)
ROUNDS = 5


def main() -> int:
    model = prepared()
    imports, floors, starts = [], [], []
    for _ in range(ROUNDS):
        imports.append(import_torch())
        floors.append(measure_floor(str(model), "map").total)
        port = free_port()
        argv = tuple(serve_command(model, "--host", "127.0.0.1", "--port", str(port)))
        starts.append(observe(Server("hotstart", argv, Target("127.0.0.1", port, model=NAME))))
    start = median_start(starts)
    block = f"```text\n{table(start)}\n\n{summary(start, median(imports), median(floors))}\n```\n"
    for name in PAGES:
        page = ROOT / name
        text, count = BLOCK.subn(
            lambda found: f"{found[1]}{block}{found[2]}", page.read_text(encoding="utf-8")
        )
        if count != 1:
            raise SystemExit(f"{name} has {count} timeline blocks; expected one")
        page.write_text(text, encoding="utf-8")
    print(block)
    return 0


def table(start: Start) -> str:
    timeline = Timeline("start", origin=0.0)
    for phase in start.phases:
        timeline.merge(msgspec.convert({**phase, "detail": ""}, Phase))
    lines = startup_table(timeline).splitlines()
    return "\n".join(line.rstrip() for line in lines)


def summary(start: Start, imports: float, floor: float) -> str:
    return (
        f"first token over HTTP  {start.first_token:.2f} s, from before the process existed\n"
        f'python -c "import torch"  {imports:.2f} s; floor (import, bytes, one forward step)  {floor:.2f} s'
    )


if __name__ == "__main__":
    sys.exit(main())
