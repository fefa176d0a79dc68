"""What an installed hotstart must do, run by the interpreter that has it: see smoke_wheel.py."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys

import hotstart

# Everything but these works without torch.
NEEDS_TORCH = (
    "hotstart.layers",
    "hotstart.attention",
    "hotstart.models",
    "hotstart.engine",
    "hotstart.loading",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", action="store_true", help="torch is installed: serve as well")
    parser.parse_args()
    assert "site-packages" in str(hotstart.__file__), f"not the installed package: {hotstart.__file__}"
    for name in module_names():
        importlib.import_module(name)
        assert "torch" not in sys.modules, f"importing {name} imports torch"
    return 0


def module_names() -> list[str]:
    found = pkgutil.walk_packages(hotstart.__path__, "hotstart.")
    return [m.name for m in found if not m.name.startswith(NEEDS_TORCH) and not m.name.endswith("__main__")]


if __name__ == "__main__":
    sys.exit(main())
