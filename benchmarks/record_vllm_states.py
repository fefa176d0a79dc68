r"""Make what lies in tests/recorded again, with vLLM's own savers and server. Recipe: the README there.

    PYTHONPATH=benchmarks VLLM_CPU_OMP_THREADS_BIND="0|1" \
    python benchmarks/record_vllm_states.py sharded SRC DST TP PP [BYTES OF A PART]
    python benchmarks/record_vllm_states.py tensorizer SRC FILE
    python benchmarks/record_vllm_states.py answers URL FILE

The CPU build packs the weights of linear layers after it has loaded them and forgets what it packed, so
its state lacks them, and it could not load what it saves. The workers import ``WholeState``, which has
the weights kept; everything else is vLLM's.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

_SMALL = {
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "max_num_seqs": 2,
    "dtype": "bfloat16",
    "worker_extension_cls": "record_vllm_states.WholeState",
}


def sharded(
    source: str, destination: str, tensor_parallel: str, pipeline_parallel: str, part: str = ""
) -> None:
    """What each rank's worker saves."""
    from vllm import LLM

    os.makedirs(destination, exist_ok=True)
    llm = LLM(
        model=source,
        tensor_parallel_size=int(tensor_parallel),
        pipeline_parallel_size=int(pipeline_parallel),
        kv_cache_memory_bytes=64 << 20,
        **_SMALL,
    )
    llm.llm_engine.engine_core.save_sharded_state(
        path=destination, pattern=None, max_size=int(part) if part else None
    )


def tensorizer(source: str, file: str) -> None:
    """The module of a single worker."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.tensorizer import TensorizerConfig, tensorize_vllm_model

    tensorize_vllm_model(EngineArgs(model=source, **_SMALL), TensorizerConfig(tensorizer_uri=file))


def answers(url: str, file: str) -> None:
    """The recorded requests, asked again of a server; a stream's answer is the list of its lines."""
    recorded = json.loads(Path(file).read_text())
    for pair in recorded["pairs"]:
        pair["status"], pair["answer"] = _ask(url + pair["path"], pair["method"], pair["request"])
    Path(file).write_text(json.dumps(recorded, indent=1) + "\n")


def _ask(url: str, method: str, request: dict[str, Any] | None) -> tuple[int, Any]:
    asked = urllib.request.Request(
        url,
        method=method,
        data=None if request is None else json.dumps(request).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(asked) as response:
            status, text = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    if request is None or not request.get("stream"):
        return status, json.loads(text)
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return status, [line if line == "[DONE]" else json.loads(line) for line in lines]


class WholeState:
    """Nothing; importing this module in a worker is what counts."""


if __name__ == "__main__":
    what, *given = sys.argv[1:]
    {"sharded": sharded, "tensorizer": tensorizer, "answers": answers}[what](*given)
else:
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding

    def _keep(layer: object, remove_weight: bool, _pack=utils.dispatch_cpu_unquantized_gemm) -> None:
        _pack(layer, remove_weight=False)

    for module in (linear, utils, vocab_parallel_embedding):
        if hasattr(module, "dispatch_cpu_unquantized_gemm"):
            module.dispatch_cpu_unquantized_gemm = _keep
