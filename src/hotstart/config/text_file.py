"""A small text file that a flag names: read whole, whatever it turns out to be.

A pipe of the shell (``<(…)``) is as good as a file. A device without an end, a disk image or a pipe
that nobody writes to must end in an error, and not in a full memory or a start that hangs.
"""

from __future__ import annotations

import os
import select
import stat
import time

LARGEST = 16 << 20
"""Bytes."""
PATIENCE = 10.0
"""Seconds without a byte from a pipe."""


def read_text(path: str, *, patience: float = PATIENCE) -> str:
    """The content as text in UTF-8.

    Raises OSError when the file cannot be read or has no end, and ValueError when it holds no text.
    """
    # Opening a pipe would wait for its writer otherwise.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        content = _read(fd, patience)
    finally:
        os.close(fd)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise ValueError(f"it is no text in UTF-8 (byte 0x{byte:02x} in line {line})") from None


def _read(fd: int, patience: float) -> bytes:
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_size > LARGEST:
        raise OSError(f"it has {status.st_size} bytes, and {LARGEST} are the most that is read")
    content = bytearray()
    deadline = time.monotonic() + patience
    ready = select.poll()
    ready.register(fd, select.POLLIN)
    while True:
        if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise OSError(f"nobody has written to it for {patience:g} s")
        try:
            part = os.read(fd, 1 << 16)
        except BlockingIOError:
            continue
        if not part:
            return bytes(content)
        content += part
        if len(content) > LARGEST:
            raise OSError(f"it does not end within {LARGEST} bytes, the most that is read")
        deadline = time.monotonic() + patience
