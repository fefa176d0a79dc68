"""Every loader that ``bench load`` knows."""

from __future__ import annotations

from hotstart.bench.load_device import RINGS
from hotstart.bench.load_local import LOCAL, PLAIN
from hotstart.bench.load_remote import REMOTE

NAMED = {**LOCAL, **REMOTE}
"""By the name that ``--loader`` takes."""
READERS = {**PLAIN, **RINGS}
"""With nothing around them: the best of those for a device is its ceiling."""
LOADERS = {**NAMED, **READERS}
