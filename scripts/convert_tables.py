"""The table of flags in docs/convert.md and its translation, from those of ``hotstart convert``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from hotstart.cli.convert import COMMANDS  # noqa: E402
from hotstart.config.help import default_text  # noqa: E402

PAGES = {
    ROOT / "docs" / "convert.md": ("flag", "of", "default", "meaning", "all"),
    ROOT / "docs" / "convert.zh-CN.md": ("参数", "用于", "默认", "含义", "全部"),
}
"""Headings of each page. What the program itself says stays as it says it."""


def rendered(page: Path) -> str:
    """The page with its table renewed."""
    *headings, everywhere = PAGES[page]
    rows = [headings, ["---"] * len(headings)]
    flags = {row.name: row for command in COMMANDS.values() for row in command.rows()}
    for name, row in flags.items():
        kinds = [kind for kind, command in COMMANDS.items() if name in command.index]
        kind = everywhere if len(kinds) == len(COMMANDS) else ", ".join(f"`{kind}`" for kind in kinds)
        names = ", ".join(f"`{each}`" for each in row.names)[:-1] + f" {row.kind.metavar}`"
        default = default_text(row)
        rows.append([names, kind, f"`{default}`" if default else "", row.help])
    table = "".join("| " + " | ".join(cells) + " |\n" for cells in rows)
    text = page.read_text(encoding="utf-8")
    begin, end = r"<!-- begin flags:[^>]*-->\n", "<!-- end flags -->"
    text, found = re.subn(rf"({begin}).*?({end})", lambda m: m[1] + table + m[2], text, flags=re.DOTALL)
    assert found == 1, page
    return text
