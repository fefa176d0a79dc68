"""Load what `hotstart convert` writes in vLLM, and compare greedy text with that of the plain checkpoint.

    python benchmarks/convert_in_vllm.py MODEL_DIR --vllm VLLM_PYTHON [--ranks 1 2] [--kind …]

VLLM_PYTHON is the interpreter of an environment with vLLM; for `tensorizer` it needs that library too. Each
load is a process of its own. Prints a line for each, and exits with 1 if any text differs or a load fails.
On CPUs with one NUMA node set VLLM_CPU_OMP_THREADS_BIND, such as "0|1" for two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ASK = """
import json, sys

def main():
    import vllm
    from vllm.platforms import current_platform
    options = json.loads(sys.argv[1])
    if current_platform.is_cpu():
        if options.get("load_format") == "tensorizer":
            options["worker_extension_cls"] = "ask_on_cpu.Extension"
        options["kv_cache_memory_bytes"] = 256 << 20
    llm = vllm.LLM(enforce_eager=True, max_model_len=256, max_num_seqs=4, seed=0, **options)
    prompts = ["The capital of France is", "def fibonacci(n):", "Once upon a time"]
    outputs = llm.generate(prompts, vllm.SamplingParams(temperature=0.0, max_tokens=24))
    texts = [[output.outputs[0].text, list(output.outputs[0].token_ids)] for output in outputs]
    print("RESULT " + json.dumps([vllm.__version__, texts]), flush=True)

if __name__ == "__main__":
    main()
"""

ON_CPU = """
import torch
from vllm.model_executor.model_loader import tensorizer_loader

def deserialize(model, config, original=tensorizer_loader.deserialize_tensorizer_model):
    original(model, config)
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)

torch.accelerator.current_device_index = lambda: 0
tensorizer_loader.deserialize_tensorizer_model = deserialize

class Extension:
    pass
"""
"""What vLLM's Tensorizer loader lacks on a CPU: it asks for an accelerator's number, which raises, and leaves
out the step after loading without which the CPU build's linear layers do not run."""


def ask(python: str, options: dict[str, object]) -> tuple[str, object]:
    """vLLM's version and its texts; raises with the end of its log when it cannot load."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "ask.py")
        script.write_text(ASK)
        Path(folder, "ask_on_cpu.py").write_text(ON_CPU)
        paths = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [python, str(script), json.dumps(options)],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            version, texts = json.loads(line[7:])
            return version, texts
    errors = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line]
    raise RuntimeError("\n".join(errors[-6:]) or done.stderr[-2000:])


def convert(kind: str, source: str, target: Path, ranks: int) -> None:
    command = [sys.executable, "-m", "hotstart", "convert", kind, source, str(target)]
    subprocess.run([*command, "--tensor-parallel-size", str(ranks)], check=True, capture_output=True)


def options_for(kind: str, target: Path, ranks: int) -> dict[str, object]:
    options: dict[str, object] = {"model": str(target), "tensor_parallel_size": ranks}
    if kind == "sharded":
        return options | {"load_format": "sharded_state"}
    name = "model.tensors" if ranks == 1 else "model-rank-%03d.tensors"
    return options | {
        "load_format": "tensorizer",
        "model_loader_extra_config": {"tensorizer_uri": str(target / name)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--kind", nargs="+", default=["sharded", "tensorizer"])
    arguments = parser.parse_args()
    wrong = 0
    for ranks in arguments.ranks:
        plain = {"model": arguments.model, "tensor_parallel_size": ranks}
        version, expected = ask(arguments.vllm, plain)
        print(f"vLLM {version}, {ranks} ranks, plain checkpoint: {expected[0][0]!r}", flush=True)
        for kind in arguments.kind:
            with tempfile.TemporaryDirectory() as folder:
                target = Path(folder, os.path.basename(arguments.model))
                convert(kind, arguments.model, target, ranks)
                try:
                    _, texts = ask(arguments.vllm, options_for(kind, target, ranks))
                    outcome = "the same text" if texts == expected else f"OTHER TEXT: {texts}"
                except RuntimeError as error:
                    outcome = f"FAILED: {error}"
            wrong += outcome != "the same text"
            print(f"vLLM {version}, {ranks} ranks, {kind}: {outcome}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
