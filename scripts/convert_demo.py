"""Turn the demo's GGUF file into an ordinary checkpoint: ``convert_demo.py FILE.gguf DIRECTORY``.

Runs in an environment of its own (see demo.py): the server never needs transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main(source: Path, target: str) -> None:
    directory, name = str(source.parent), source.name
    # Packed weights, which from_pretrained would keep, cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        directory, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(directory, gguf_file=name).save_pretrained(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
