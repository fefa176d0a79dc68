"""The frontend starts beside the engine's import of torch: it imports neither that nor what is slow."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAVY = ["torch", "transformers", "numpy", "pydantic", "huggingface_hub", "jinja2", "tokenizers", "yaml"]
MODULES = ["hotstart.frontend.server", "hotstart.frontend.openapi", "hotstart.frontend.start"]


@pytest.mark.parametrize("module", MODULES)
def test_the_frontend_imports_without_what_is_slow(module: str) -> None:
    code = (
        "import sys\n"
        f"for name in {HEAVY}: sys.modules[name] = None\n"
        f"import {module}, uvicorn.protocols.http.httptools_impl\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
