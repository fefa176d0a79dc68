"""What an installed hotstart must do, run by the interpreter that has it: see smoke_wheel.py."""

from __future__ import annotations

import argparse
import array
import importlib
import json
import pkgutil
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import hotstart

# Everything but these works without torch.
NEEDS_TORCH = ("attention", "engine", "layers", "llm", "loading", "models")
VOCABULARY = 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 0,
}
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (64, 32),
    LAYER + "self_attn.q_proj.weight": (32, 32),
    LAYER + "self_attn.k_proj.weight": (16, 32),
    LAYER + "self_attn.v_proj.weight": (16, 32),
    LAYER + "self_attn.o_proj.weight": (32, 32),
    LAYER + "mlp.gate_proj.weight": (64, 32),
    LAYER + "mlp.up_proj.weight": (64, 32),
    LAYER + "mlp.down_proj.weight": (32, 64),
    LAYER + "input_layernorm.weight": (32,),
    LAYER + "post_attention_layernorm.weight": (32,),
    "model.norm.weight": (32,),
    "lm_head.weight": (64, 32),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", action="store_true", help="torch is installed: serve and generate as well")
    args = parser.parse_args()
    assert "site-packages" in str(hotstart.__file__), f"not the installed package: {hotstart.__file__}"
    import_torch_free_modules()
    assert hotstart.__version__ in command("--version")
    assert "serve MODEL" in command("--help")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        assert "ready to be served" in command("check", folder, "--port", "0")
        if args.torch:
            serve(folder)
            generate(folder)
    return 0


def import_torch_free_modules() -> None:
    prefixes = tuple(f"hotstart.{room}" for room in NEEDS_TORCH)
    for found in pkgutil.walk_packages(hotstart.__path__, "hotstart."):
        if not found.name.startswith(prefixes) and not found.name.endswith("__main__"):
            importlib.import_module(found.name)
            assert "torch" not in sys.modules, f"importing {found.name} imports torch"


def command(*arguments: str) -> str:
    program = Path(sys.executable).with_name("hotstart")
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"hotstart {arguments[0]} ended with {done.returncode}\n{done.stderr}"
    return done.stdout


def serve(directory: str) -> None:
    from hotstart.bench.client import Target
    from hotstart.bench.launch import Server, free_port, observe

    port = free_port()
    program = str(Path(sys.executable).with_name("hotstart"))
    argv = (program, "serve", directory, "--port", str(port), "--host", "127.0.0.1", "--max-num-seqs", "4")
    start = observe(Server("hotstart", argv, Target("127.0.0.1", port, model=directory)))
    assert start.held, "a request sent while starting was not held"


def generate(directory: str) -> None:
    """The Python API, in an interpreter that has imported no torch yet, as a program of a user's has not."""
    code = (
        "import sys; from hotstart import LLM, SamplingParams;"
        "llm = LLM(sys.argv[1], max_num_seqs=4);"
        "params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True);"
        "(done,) = llm.generate('w3 w4', params);"
        "assert len(done.outputs[0].token_ids) == 8, done;"
        "(again,) = llm.generate(['w3 w4'], SamplingParams(seed=1, max_tokens=3));"
        "assert again.finished, again"
    )
    done = subprocess.run([sys.executable, "-c", code, directory], capture_output=True, text=True)
    assert done.returncode == 0, f"LLM.generate failed\n{done.stderr}"


def write_model(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    (directory / "config.json").write_text(json.dumps(CONFIG))
    words = {"</s>": 0, "<s>": 1, "<unk>": 2} | {f"w{n}": n for n in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    header: dict[str, object] = {}
    data = b""
    numbers = random.Random(0)
    for name, shape in SHAPES.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        values = array.array("f", (numbers.gauss(0, 0.3) for _ in range(count))).tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (len(data), len(data) + len(values))}
        data += values
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


if __name__ == "__main__":
    sys.exit(main())
