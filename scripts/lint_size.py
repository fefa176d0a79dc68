"""Size is a budget: print lines per room, fail on a file or a function that has outgrown one reading."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES = 500
FUNCTION_LINES = 60
TREES = ("src/hotstart", "tests", "scripts", "benchmarks")


def main() -> int:
    rooms: dict[str, tuple[int, int]] = {}
    too_long: list[str] = []
    for tree in TREES:
        for path in sorted((ROOT / tree).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            lines = source.count("\n")
            room = room_of(path)
            files, total = rooms.get(room, (0, 0))
            rooms[room] = files + 1, total + lines
            name = path.relative_to(ROOT)
            if lines > FILE_LINES:
                too_long.append(f"{name}: {lines} lines; a file holds at most {FILE_LINES}")
            too_long += [f"{name}:{problem}" for problem in long_functions(source)]
    print_table(rooms)
    for problem in too_long:
        print(problem, file=sys.stderr)
    return 1 if too_long else 0


def room_of(path: Path) -> str:
    """``src/hotstart/engine/scheduler.py`` is in ``engine``; a tree outside the package is one room."""
    parts = path.relative_to(ROOT).parts
    if parts[0] != "src":
        return f"{parts[0]}/"
    return parts[2] if len(parts) > 3 else "hotstart"


def long_functions(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"{node.lineno}: {node.name}: {lines} lines; a function holds at most {FUNCTION_LINES}"


def print_table(rooms: dict[str, tuple[int, int]]) -> None:
    package = [(name, *size) for name, size in rooms.items() if not name.endswith("/")]
    around = [(name, *size) for name, size in rooms.items() if name.endswith("/")]
    print(f"{'room':<12} {'files':>5} {'lines':>6}")
    for name, files, lines in [*sorted(package), ("package", *totals(package)), *sorted(around)]:
        print(f"{name:<12} {files:>5} {lines:>6}")


def totals(rows: list[tuple[str, int, int]]) -> tuple[int, int]:
    return sum(files for _, files, _ in rows), sum(lines for _, _, lines in rows)


if __name__ == "__main__":
    sys.exit(main())
