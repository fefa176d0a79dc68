"""``make bench``: the start of the demo model against its floor, and its decoding against transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hotstart.bench import startup
from hotstart.config.cache_root import resolve

MODEL = Path(resolve(None, os.environ).path) / "demo" / "SmolLM2-135M-Instruct"


def main() -> int:
    startup.main([str(MODEL), "--cache", "both", "--details"])
    decode = str(Path(__file__).with_name("decode.py"))
    print(flush=True)
    return subprocess.run([sys.executable, decode, str(MODEL)]).returncode


if __name__ == "__main__":
    sys.exit(main())
