"""Install the built wheel on every supported interpreter of this machine and use it a little.

Each interpreter gets a temporary environment. torch is installed where its CPU build can be had
for that interpreter; elsewhere it would be a CUDA build of several GB, so the wheel's other
dependencies are installed and everything that must work without torch is tried. What was left out
is said. ``--with-torch`` takes whichever build there is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
CPU_TORCH = re.search(r"^CPU_TORCH := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--with-torch", action="store_true")
    args = parser.parse_args()
    (wheel,) = args.dist.resolve().glob("*.whl")
    (sdist,) = args.dist.glob("*.tar.gz")
    print(f"{sdist.name}: {sdist.stat().st_size} bytes\n{wheel.name}: {wheel.stat().st_size} bytes")
    failed = 0
    for version in SUPPORTED:
        python = find_interpreter(version)
        if python is None:
            print(f"python {version}: not on this machine")
            continue
        outcome = smoke(python, wheel, with_torch=args.with_torch)
        failed += outcome.startswith("FAILED")
        print(f"python {version}: {outcome}", flush=True)
    return 1 if failed else 0


def find_interpreter(version: str) -> str | None:
    """From PATH, or from pyenv's folder; a pyenv shim of a version that is not selected does not count."""
    candidates = [shutil.which(f"python{version}")]
    candidates += sorted(str(p) for p in (Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))
    for candidate in candidates:
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return candidate
    return None


def smoke(python: str, wheel: Path, *, with_torch: bool) -> str:
    with tempfile.TemporaryDirectory(prefix="hotstart-smoke-") as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        run = Environment(Path(folder))
        try:
            torch = torch_of_choice(run, with_torch=with_torch)
            run.pip("install", *requirements(wheel, torch))
            run.pip("install", "--no-deps", str(wheel))
            run.python(str(ROOT / "scripts/smoke_installed.py"), *(["--torch"] if torch else []))
        except subprocess.CalledProcessError as error:
            return f"FAILED: {' '.join(map(str, error.cmd))}\n{error.stdout or ''}{error.stderr or ''}"
    return "passed" if torch else "passed without torch (its CPU build is not offered for this interpreter)"


class Environment:
    """A virtual environment whose commands run outside the checkout, so that the wheel is what they see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # torch itself warns where numpy, which hotstart does not need, is not installed.
        warnings = "error,ignore:Failed to initialize NumPy"
        self.env = {**os.environ, "PYTHONWARNINGS": warnings, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        self.env.pop("PYTHONPATH", None)

    def python(self, *arguments: str) -> str:
        return self._run({}, *arguments)

    def pip(self, *arguments: str) -> str:
        return self._run({"PYTHONWARNINGS": ""}, "-m", "pip", "-qq", *arguments)

    def _run(self, env: dict[str, str], *arguments: str) -> str:
        command = [str(self.folder / "bin/python"), *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=self.env | env, check=True, capture_output=True, text=True
        )
        return done.stdout


def torch_of_choice(run: Environment, *, with_torch: bool) -> str | None:
    """The requirement to install; None when only a CUDA build is offered."""
    assert CPU_TORCH is not None
    requirement = CPU_TORCH.group(1)
    if with_torch:
        return requirement
    report = run.pip("install", "--dry-run", "--no-deps", "--report", "-", requirement)
    version: str = json.loads(report)["install"][0]["metadata"]["version"]
    return requirement if version.endswith("+cpu") else None


def requirements(wheel: Path, torch: str | None) -> list[str]:
    """The wheel's own dependencies, extras left out, torch as chosen."""
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    wanted = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    others = [r for r in wanted if not r.startswith("torch")]
    return [torch, *others] if torch else others


if __name__ == "__main__":
    sys.exit(main())
