r"""Write the sharded states in tests/convert/recorded with vLLM's own saver. Recipe: the README there.

    PYTHONPATH=benchmarks VLLM_CPU_OMP_THREADS_BIND="0|1" \
    python benchmarks/record_vllm_states.py SRC DST TP PP

The CPU build packs the weights of linear layers after it has loaded them and forgets what it packed, so
its state lacks them, and it could not load what it saves. The workers import ``WholeState``, which has
the weights kept; everything else is vLLM's.
"""

from __future__ import annotations

import os
import sys


def main(source: str, destination: str, tensor_parallel: int, pipeline_parallel: int) -> None:
    from vllm import LLM

    os.makedirs(destination, exist_ok=True)
    llm = LLM(
        model=source,
        tensor_parallel_size=tensor_parallel,
        pipeline_parallel_size=pipeline_parallel,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=2,
        dtype="bfloat16",
        kv_cache_memory_bytes=64 << 20,
        worker_extension_cls="record_vllm_states.WholeState",
    )
    llm.llm_engine.engine_core.save_sharded_state(path=destination, pattern=None, max_size=None)


class WholeState:
    """Nothing; importing this module in a worker is what counts."""


if __name__ == "__main__":
    source, destination, *sizes = sys.argv[1:]
    main(source, destination, *map(int, sizes))
else:
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding

    def _keep(layer: object, remove_weight: bool, _pack=utils.dispatch_cpu_unquantized_gemm) -> None:
        _pack(layer, remove_weight=False)

    for module in (linear, utils, vocab_parallel_embedding):
        if hasattr(module, "dispatch_cpu_unquantized_gemm"):
            module.dispatch_cpu_unquantized_gemm = _keep
