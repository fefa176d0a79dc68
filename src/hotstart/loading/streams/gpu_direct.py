"""Whether GPUDirect Storage can bring a file into a GPU, by what kernel and mounts tell. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterable

from hotstart.errors import HotstartError
from hotstart.storage.mounts import Mounts

DRIVER = "/proc/driver/nvidia-fs"
NODE = "/dev/nvidia-fs0"
_LAYERED = ("overlay", "aufs")


def obstacle(paths: Iterable[str], driver: str = DRIVER, node: str = NODE) -> str:
    """What stands in its way; empty: nothing that can be seen. ``driver`` and ``node`` are nvidia-fs's."""
    if not os.path.exists(driver):
        return "the driver nvidia-fs is not loaded, without which libcufile reads through memory"
    if not os.path.exists(node):
        return f"{node} is not here (a container must be given it), without which nvidia-fs is not reached"
    mounts = Mounts()
    for path in paths:
        try:
            mount = mounts.of(path)
        except HotstartError:
            continue  # whoever opens it says what is wrong
        if mount is not None and (mount.memory or mount.fuse or mount.fs_type in _LAYERED):
            return f"{path} lies on {mount.fs_type}, a file system without GPUDirect Storage"
    return ""
