"""What a user gets from the wheel, and what the project promises about itself."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def test_wheel_holds_the_whole_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    package = {name for name in wheel.namelist() if not name.startswith("hotstart-")}
    source = ROOT / "src/hotstart"
    tracked = {
        f"hotstart/{p.relative_to(source)}"
        for p in source.rglob("*")
        if p.suffix in (".py", ".typed", ".html")
    }
    assert tracked <= package
    assert all(name.startswith("hotstart/") for name in package)
    assert not [name for name in package if name.endswith((".pyc", ".so"))]


def test_wheel_is_typed_and_licensed(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert "hotstart/py.typed" in wheel.namelist()
    assert metadata["License-Expression"] == "Apache-2.0"
    (licence,) = [name for name in wheel.namelist() if name.endswith("/LICENSE")]
    assert b"Apache License" in wheel.read(licence)


def test_supported_interpreters_are_stated(metadata: Message) -> None:
    assert metadata["Requires-Python"] == "<3.14,>=3.10"


def test_no_dependency_beyond_the_start_path_is_required(metadata: Message) -> None:
    required = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    names = {r.replace(">", " ").replace(";", " ").split()[0].lower() for r in required}
    assert not names & {"transformers", "accelerate", "pandas", "ray", "fastapi", "pydantic", "pillow"}
    assert "torch" in names


def test_optional_parts_are_extras(metadata: Message) -> None:
    assert "plot" in metadata.get_all("Provides-Extra", [])
