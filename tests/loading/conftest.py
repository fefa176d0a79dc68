from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotstart.storage.mounts import mount_of


@pytest.fixture
def disk() -> Iterator[Path]:
    """A directory on the disk of the checkout: memory file systems have no direct reads to evict for."""
    mount = mount_of(os.getcwd())
    if mount is None or mount.memory or mount.network:
        pytest.skip("needs a local disk")
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".images-") as directory:
        yield Path(directory)
