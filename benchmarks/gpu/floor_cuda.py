"""The least that a start on a GPU does, as a program: run in a fresh process.

    floor_cuda.py DIRECTORY TOKENS [--no-torch] [--threads 8 --buffers 2 --buffer-mib 8] [--device cuda]

A plain ``import torch`` while threads copy every weight to the device, then one eager forward step
over those weights: a linear for each matrix, one attention a layer. No server, no tokenizer, no
model class. ``--no-torch`` only copies. Prints one JSON line; moments are ``time.monotonic()``.
"""

from __future__ import annotations

import argparse
import json
import os
import time

from hotstart.checkpoint.layout import open_checkpoint
from hotstart.device.choose import choose, open_device
from hotstart.loading.arena import Arena, Layout
from hotstart.loading.ring import Loading
from hotstart.models.spec import WeightSpec


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("tokens", type=int)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--buffers", type=int, default=2)
    parser.add_argument("--buffer-mib", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    begin = time.monotonic()
    checkpoint = open_checkpoint(args.directory)
    layout = Layout.of(
        (WeightSpec(slot=name, stored=(name,), shape=ref.shape), ref)
        for name, ref in checkpoint.tensors.items()
    )
    device = open_device(choose(args.device))
    device.attach()
    attached = time.monotonic()
    arena = Arena(layout, device)
    loading = Loading(
        checkpoint,
        arena,
        threads=args.threads,
        buffers=args.buffers,
        buffer_bytes=args.buffer_mib << 20,
    )
    found = {"begin": begin, "attached": attached}
    if not args.no_torch:
        import torch

        found["imported"] = time.monotonic()
    report = loading.wait()
    found["arrived"] = time.monotonic()
    if not args.no_torch:
        with open(os.path.join(args.directory, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        with torch.inference_mode():
            forward(arena, layout, config, args.tokens, "cpu" if device.host_memory else "cuda")
        found["end"] = time.monotonic()
    found |= {"fetch_seconds": report.seconds, "bytes": report.bytes, "stall": report.longest_stall}
    print(json.dumps(found), flush=True)
    # Neither the driver nor torch has anything to tidy up.
    os._exit(0)


def forward(arena: Arena, layout: Layout, config: dict[str, int], tokens: int, device: str) -> None:
    import torch
    from torch.nn.functional import linear, scaled_dot_product_attention

    heads = config["num_attention_heads"]
    inputs: dict[int, torch.Tensor] = {}
    for name in layout.slots:
        weight = arena.tensor(name)
        if weight.dim() == 2 and "embed" not in name and "lm_head" not in name:
            width = weight.shape[1]
            if width not in inputs:
                inputs[width] = torch.randn(tokens, width, device=device, dtype=weight.dtype)
            linear(inputs[width], weight)
        if "o_proj" in name:
            q = torch.randn(1, heads, tokens, weight.shape[1] // heads, device=device, dtype=weight.dtype)
            scaled_dot_product_attention(q, q, q, is_causal=True)
    head = arena.tensor("lm_head.weight")
    linear(torch.randn(1, head.shape[1], device=device, dtype=head.dtype), head).argmax(-1).item()


if __name__ == "__main__":
    main()
