"""Every Python example of the documentation runs as it stands, on a model of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", ["docs/python.md", "README.md", "README.zh-CN.md"])
def test_examples_run_one_after_the_other(page: str, tiny_model: Callable[..., Path]) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.+?)^```$", text, re.M | re.S)
    assert examples
    import torch

    threads = torch.get_num_threads()
    names: dict[str, Any] = {}
    try:
        for example in examples:
            exec(example.replace("/models/llama", str(tiny_model("llama"))), names)
    finally:
        torch.set_num_threads(threads)
