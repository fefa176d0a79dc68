"""The file of ``--save-result``: named as vLLM names it, with the keys that were asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from hotstart.bench.serving.report import DETAILED
from hotstart.config.output_file import write_output
from hotstart.errors import StorageError


def result_path(values: Mapping[str, Any], origin: str, date: str) -> str | None:
    """Where it is to be; None: it is not wanted. Raises ``StorageError``."""
    if not (values["save_result"] or values["append_result"]):
        return None
    cap, label = values.get("max_concurrency"), values.get("label") or values["backend"]
    concurrency = f"-concurrency{cap}" if cap is not None else ""
    rate = f"{values['request_rate']}qps"
    if values.get("ramp_up_strategy"):
        ends = f"{values['ramp_up_start_rps']}qps-{values['ramp_up_end_rps']}qps"
        rate = f"ramp-up-{values['ramp_up_strategy']}-{ends}"
    model = origin.rstrip("/").split("/")[-1]
    name = values.get("result_filename") or f"{label}-{rate}{concurrency}-{model}-{date}.json"
    folder = values.get("result_dir")
    if not folder:
        return str(name)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise StorageError(f"--result-dir {folder} cannot be made: {error.strerror}") from None
    return os.path.join(folder, name)


def save(result: Mapping[str, Any], path: str, *, detailed: bool, append: bool) -> None:
    """Write it, or a line more of it. Raises ``StorageError``."""
    kept = dict(result)
    if not detailed:
        kept = {key: value for key, value in kept.items() if key not in DETAILED}
        kept["hotstart"] = {key: value for key, value in kept["hotstart"].items() if key != "first_chunks"}
    content = msgspec.json.encode(kept)
    if append and os.path.exists(path):
        with open(path, "rb") as file:
            before = file.read()
        content = before + (b"\n" if before else b"") + content
    write_output("--result-filename", path, content)
