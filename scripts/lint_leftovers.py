"""Find what must not land: unfinished work, merge markers, paths of build machines."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Spelled in halves so that this file passes its own check.
UNFINISHED = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|X" r"XX|HA" r"CK)\b")
MERGE = re.compile(r"^(?:<{7}|>{7}|\|{7}) ")
HOMES = re.compile(r"/(?:home|Users)/[A-Za-z]\w*/|/ro" r"ot/")


def main() -> int:
    here = machine_paths()
    found = 0
    for path in tracked_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        for number, line in enumerate(lines, 1):
            for problem in problems(line, here):
                print(f"{path.relative_to(ROOT)}:{number}: {problem}: {line.strip()[:100]}", file=sys.stderr)
                found += 1
    print(f"leftovers: {found or 'none'}")
    return 1 if found else 0


def problems(line: str, here: list[str]) -> list[str]:
    checks = [
        (UNFINISHED.search(line), "mark of unfinished work"),
        (MERGE.match(line), "merge marker"),
        (HOMES.search(line) or any(path in line for path in here), "absolute path of a build machine"),
    ]
    return [text for hit, text in checks if hit]


def machine_paths() -> list[str]:
    """Where this checkout and this user live; too short to be telling (``/``, ``/tmp``) is left out."""
    paths = {ROOT, ROOT.parent, Path.home()} - {Path("/"), Path(tempfile.gettempdir())}
    return sorted(f"{path}/" for path in paths)


def tracked_files() -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    return [ROOT / name for name in names.split("\0") if name]


if __name__ == "__main__":
    sys.exit(main())
