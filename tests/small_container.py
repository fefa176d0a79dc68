"""A container's limit of memory: a real control group around a command, where this user may make one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_PLACES = [
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.swap.max"),
]
"""Of version 1 and of version 2: where, the limit, the limit of swapping."""


class SmallContainer:
    """``limit_file``: what a program in it sees as its limit."""

    def __init__(self, folder: Path, limit_file: str) -> None:
        self.limit_file = str(folder / limit_file)
        self._procs = folder / "cgroup.procs"

    def run(self, command: Sequence[str], **environ: str) -> subprocess.CompletedProcess[str]:
        """The command to its end; a negative code: it was killed."""
        inside = ["sh", "-c", f'echo $$ > {self._procs} && exec "$@"', "sh", *command]
        return subprocess.run(
            inside, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environ}
        )


@contextmanager
def small_container(limit: int) -> Iterator[SmallContainer | None]:
    """Without swap. None: this user may not make one here."""
    for place, limit_file, swap_file in _PLACES:
        folder = place / f"hotstart-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if not (folder / "cgroup.procs").exists():
                continue
            (folder / limit_file).write_text(str(limit))
            with suppress(OSError):  # a kernel without swap accounting
                (folder / swap_file).write_text("0" if limit_file == "memory.max" else str(limit))
            yield SmallContainer(folder, limit_file)
            return
        except OSError:
            continue
        finally:
            folder.rmdir()
    yield None
