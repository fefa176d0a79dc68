"""Rooms import downwards only, as docs/architecture.md says; function-level imports count as well."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hotstart

PACKAGE = Path(hotstart.__file__).parent

GROUND = {"errors", "units", "timeline", "messages"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "units": set(),
    "timeline": set(),
    "messages": {"timeline"},
    "config": GROUND,
    "device": {"config"} | GROUND,
    "storage": {"config"} | GROUND,
    "checkpoint": {"storage", "config"} | GROUND,
    "models.spec": GROUND,
    "models.fused_names": {"models.spec"} | GROUND,
    "layers": {"models.spec"} | GROUND,
    "attention": {"models.spec"} | GROUND,
    "models": {"models.spec", "models.fused_names", "layers", "attention"} | GROUND,
    "loading": {"models.spec", "models.fused_names", "checkpoint", "storage", "device", "config"} | GROUND,
    "convert": {"models", "models.spec", "models.fused_names", "loading", "checkpoint", "storage", "config"}
    | GROUND,
    "engine": {"models", "models.spec", "models.fused_names", "layers", "attention", "loading"}
    | {"checkpoint", "storage", "device", "config"}
    | GROUND,
    "frontend": {"checkpoint", "config", "version"} | GROUND,
}
ANYTHING = {"bench", "cli", "llm", "__init__", "__main__"}
"""Commands and the Python API; nobody below may import them."""


def room_of(module: str) -> str:
    """Two modules of ``models`` are rooms of their own: what attention and loading need of a model."""
    _, _, inside = module.partition(".")
    return inside if inside in ("models.spec", "models.fused_names") else inside.split(".")[0]


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, room) of every import of ours in a file, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            module = node.module or ""
            inside = module in ("hotstart", "hotstart.models")
            names = [f"{module}.{name}" for name in names] if inside else [module]
        for name in names:
            if name.split(".")[0] == "hotstart":
                yield node.lineno, "version" if name == "hotstart.__version__" else room_of(name)


FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_module_imports_only_what_its_room_may(path: Path) -> None:
    room = room_of(module_of(path))
    if room in ANYTHING:
        return
    allowed = MAY_IMPORT[room] | {room}
    wrong = [
        f"line {line}: {room} imports {other}" for line, other in imports_of(path) if other not in allowed
    ]
    assert wrong == []


def test_the_table_has_no_circle() -> None:
    below: set[str] = set()
    while ready := [
        room for room in MAY_IMPORT if room not in below and MAY_IMPORT[room] - {"version"} <= below
    ]:
        below.update(ready)
    assert below == set(MAY_IMPORT)


def test_every_room_is_in_the_table_and_on_the_page_that_explains_it() -> None:
    rooms = {room_of(module_of(path)) for path in FILES}
    assert rooms == set(MAY_IMPORT) | ANYTHING
    page = PACKAGE.parents[1] / "docs" / "architecture.md"
    text = page.read_text().partition("## Rooms")[2].partition("\n## ")[0]
    assert [room for room in rooms if f"`{room}" not in text and not room.startswith("__")] == []
