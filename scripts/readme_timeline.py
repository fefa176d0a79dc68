"""Measure the start of the demo model by ``hotstart bench startup``, and put its median into both READMEs.

The block names the commit it was measured at; ``scripts/lint_timeline.py`` looks at its age.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from demo import NAME, prepared
from lint_timeline import BLOCK, PAGES, ROOT

from hotstart.bench import startup
from hotstart.bench.launch import Start
from hotstart.bench.report import median_start
from hotstart.cli.progress import startup_table
from hotstart.timeline import Phase, Timeline

ROUNDS = 5


def main() -> int:
    commit = measured_commit()
    document = measured()
    [state] = document["states"]
    start = median_start([msgspec.convert(entry, Start) for entry in state["starts"]["hotstart"]])
    block = f"```text\n{table(start)}\n\n{summary(start, document['summary'][state['state']])}\n```\n"
    for name in PAGES:
        page = ROOT / name
        text, count = BLOCK.subn(
            lambda found: f"{marker(commit)}\n{block}{found[3]}", page.read_text(encoding="utf-8")
        )
        if count != 1:
            raise SystemExit(f"{name} has {count} timeline blocks; expected one")
        page.write_text(text, encoding="utf-8")
    print(block)
    return 0


def marker(commit: str) -> str:
    return f"<!-- timeline: written by scripts/readme_timeline.py at {commit} -->"


def measured_commit() -> str:
    """HEAD, which must be what runs."""
    changed = git("status", "--porcelain", "--", "src", "pyproject.toml")
    if changed:
        raise SystemExit(f"commit first; what would be measured is no commit:\n{changed}")
    return git("rev-parse", "--short=10", "HEAD").strip()


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True, text=True).stdout


def measured() -> dict[str, Any]:
    """What ``bench startup`` writes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "start.json"
        flags = ["--iterations", str(ROUNDS), "--json", str(out), "--", "--served-model-name", NAME]
        if code := startup.main([str(prepared()), *flags]):
            raise SystemExit(code)
        return dict(json.loads(out.read_text(encoding="utf-8")))


def table(start: Start) -> str:
    timeline = Timeline("start", origin=0.0)
    for phase in start.phases:
        timeline.merge(msgspec.convert({**phase, "detail": ""}, Phase))
    lines = startup_table(timeline).splitlines()
    return "\n".join(line.rstrip() for line in lines)


def summary(start: Start, medians: dict[str, Any]) -> str:
    return (
        f"first token over HTTP  {start.first_token:.2f} s, from before the process existed\n"
        f'python -c "import torch"  {medians["import_torch"]:.2f} s; '
        f"floor (import, bytes, one forward step)  {medians['floor']:.2f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
