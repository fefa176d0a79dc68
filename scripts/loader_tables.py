"""The tables of docs/loaders.md and of its translation, from the table of load formats."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from hotstart.config.load_formats import FORMATS, PLACES, LoadFormat  # noqa: E402

PAGES = {
    ROOT / "docs" / "loaders.md": {
        "formats": (
            "`--load-format`",
            "what",
            "directory, hub",
            *(f"`{p}://`" for p in PLACES[1:-1]),
            "into",
        ),
        "keys": ("`--load-format`", "key", "value"),
        "refused": ("`--load-format`", "what", "reason", "instead"),
        "yes": "yes",
        "both": "memory, GPU",
        "cuda": "NVIDIA GPU",
    },
    ROOT / "docs" / "loaders.zh-CN.md": {
        "formats": ("`--load-format`", "内容", "目录、Hub", *(f"`{p}://`" for p in PLACES[1:-1]), "读到"),
        "keys": ("`--load-format`", "键", "值"),
        "refused": ("`--load-format`", "内容", "原因", "替代办法"),
        "yes": "可以",
        "both": "内存、GPU",
        "cuda": "NVIDIA GPU",
    },
}
"""Headings and words of each page. What the program itself says stays as it says it."""


def rendered(page: Path) -> str:
    """The page with its tables renewed."""
    words = PAGES[page]
    text = page.read_text(encoding="utf-8")
    tables = {"formats": _formats(words), "keys": _keys(words), "refused": _refused(words)}
    for name, rows in tables.items():
        begin, end = rf"<!-- begin {name}:[^>]*-->\n", f"<!-- end {name} -->"
        table = "\n".join(_line(row) for row in rows) + "\n"
        text, found = re.subn(rf"({begin}).*?({end})", lambda m, t=table: m[1] + t + m[2], text, flags=re.S)
        assert found == 1, (page, name)
    return text


def _formats(words: dict) -> list[tuple[str, ...]]:
    rows = [words["formats"], ("---",) * len(words["formats"])]
    for name, row in _accepted():
        places = [words["yes"] if place not in row.places else "" for place in PLACES[:-1]]
        extra = f" (`hotstart[{row.extra}]`)" if row.extra else ""
        into = words[row.device or "both"]
        rows.append((f"`{name}`", row.text + extra, *places, into))
    return rows


def _keys(words: dict) -> list[tuple[str, ...]]:
    rows = [words["keys"], ("---",) * 3]
    seen: dict[int, list[str]] = {}
    for name, row in _accepted():
        for each in row.keys.values():
            seen.setdefault(id(each), []).append(name)
    told: set[int] = set()
    for _, row in _accepted():
        for key, each in row.keys.items():
            if id(each) not in told:
                told.add(id(each))
                names = ", ".join(f"`{name}`" for name in seen[id(each)])
                rows.append((names, f"`{key}`", each.text))
    return rows


def _refused(words: dict) -> list[tuple[str, ...]]:
    rows = [words["refused"], ("---",) * 4]
    rows += [(f"`{n}`", row.text, row.because, row.instead) for n, row in FORMATS.items() if row.because]
    return rows


def _accepted() -> list[tuple[str, LoadFormat]]:
    return [(name, row) for name, row in FORMATS.items() if not row.because]


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
