"""Faults inside the processes of a real server: Python that runs there before anything else does."""

from __future__ import annotations

import os
from pathlib import Path

_CUSTOMIZE = """
import os
with open("/proc/self/cmdline", "rb") as line:
    inside = "ENGINE_FAULT" if b"hotstart.engine.main" in line.read() else "FRONTEND_FAULT"
    exec(os.environ.get(inside, ""))
"""

SLOW_READS = """
import os, time
_preadv, _passed = os.preadv, [0]
def preadv(fd, buffers, offset, *flags):
    wanted = sum(len(buffer) for buffer in buffers)
    time.sleep(wanted / float(os.environ["BYTES_PER_SECOND"]))
    while _passed[0] + wanted > float(os.environ.get("STOP_AFTER", "inf")):
        if os.path.exists(os.environ["GO_ON"]):
            break
        time.sleep(0.02)
    _passed[0] += wanted
    return _preadv(fd, buffers, offset, *flags)
os.preadv = preadv
"""
"""Each reader gets ``BYTES_PER_SECOND``; after ``STOP_AFTER`` bytes nothing until ``GO_ON`` exists."""


SLOW_CHECKS = """
import sys, time
def hook(event, arguments):
    if event == "open" and str(arguments[0]).endswith("tokenizer.json"):
        time.sleep(1.0)
sys.addaudithook(hook)
"""
"""The frontend's checks take longer than the engine does to look at headers and tensors."""


def frontend_fault(folder: Path, code: str) -> dict[str, str]:
    """The same as :func:`engine_fault` for the frontend's process."""
    return {**engine_fault(folder, ""), "FRONTEND_FAULT": code}


TORCH_AFTER_READS = """
import os, sys, threading
from importlib.machinery import PathFinder
_preadv, _reading = os.preadv, threading.Event()
def preadv(*arguments):
    _reading.set()
    return _preadv(*arguments)
os.preadv = preadv
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            if not _reading.wait(float(os.environ["PATIENCE"])):
                raise ImportError("no weights were read")
            run(module)
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder())
"""
"""The import of torch goes no further than its beginning until weights are read; it fails after
``PATIENCE`` seconds without."""


def engine_fault(folder: Path, code: str, **variables: str) -> dict[str, str]:
    """Environment of a server whose engine runs ``code`` when its interpreter is up."""
    place = folder / "fault"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(_CUSTOMIZE)
    path = os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, "ENGINE_FAULT": code, **variables}
