"""Every loader that ``bench load`` knows."""

from __future__ import annotations

from hotstart.bench.load_local import LOCAL, PLAIN
from hotstart.bench.load_remote import REMOTE

NAMED = {**LOCAL, **REMOTE}
"""By the name that ``--loader`` takes."""
LOADERS = {**NAMED, **PLAIN}
