"""Write a random Llama of any size in bf16, sharded, with a tokenizer; the default has 14.8 GB.

    make_model.py DIRECTORY [--layers 32 --hidden 4096 --intermediate 14336 --heads 32 --kv-heads 8
                             --vocab 49152 --shards 4 --device cuda]

Shards are written side by side, each tensor made on the device and streamed into its file, so the
default takes about 20 s on a machine with a GPU and never holds more than a tensor a shard.
"""

from __future__ import annotations

import argparse
import json
import math
import threading
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Shapes = dict[str, tuple[int, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    for name, default in (
        ("layers", 32), ("hidden", 4096), ("intermediate", 14336), ("heads", 32), ("kv-heads", 8),
        ("vocab", 49152), ("shards", 4),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": args.vocab,
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "tie_word_embeddings": False,
    }
    write_json(args.directory / "config.json", config)
    write_tokenizer(args.directory, args.vocab)
    write_weights(args.directory, shapes(config), args.shards, args.device)


def shapes(config: dict[str, object]) -> Shapes:
    """Every tensor by name, in the order of the layers."""
    hidden, inner, vocab, layers, heads, kv_heads = (
        int(str(config[key]))
        for key in (
            "hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers",
            "num_attention_heads", "num_key_value_heads",
        )
    )  # fmt: skip
    kv = hidden // heads * kv_heads
    found: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        block = f"model.layers.{layer}."
        found |= {
            block + "input_layernorm.weight": (hidden,),
            block + "mlp.down_proj.weight": (hidden, inner),
            block + "mlp.gate_proj.weight": (inner, hidden),
            block + "mlp.up_proj.weight": (inner, hidden),
            block + "post_attention_layernorm.weight": (hidden,),
            block + "self_attn.k_proj.weight": (kv, hidden),
            block + "self_attn.o_proj.weight": (hidden, hidden),
            block + "self_attn.q_proj.weight": (hidden, hidden),
            block + "self_attn.v_proj.weight": (kv, hidden),
        }
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def write_weights(directory: Path, tensors: Shapes, shards: int, device: str) -> None:
    """Shards of about equal size, each written by its own thread."""
    total = sum(2 * math.prod(shape) for shape in tensors.values())
    parts: list[Shapes] = [{} for _ in range(shards)]
    done = 0
    for name, shape in tensors.items():
        parts[min(done * shards // total, shards - 1)][name] = shape
        done += 2 * math.prod(shape)
    files = [f"model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
    threads = [
        threading.Thread(target=write_shard, args=(directory / file, part, device, seed))
        for seed, (file, part) in enumerate(zip(files, parts, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def write_shard(path: Path, tensors: Shapes, device: str, seed: int) -> None:
    """Weights of 0.02 sqrt(4096 / columns): as small as trained ones, so that logits stay finite."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    generator = torch.Generator(device).manual_seed(seed)
    with path.open("wb", buffering=0) as file:
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for shape in tensors.values():
            tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
            if len(shape) == 1:
                tensor.fill_(1.0)
            else:
                tensor.normal_(0, 0.02 * (4096 / shape[1]) ** 0.5, generator=generator)
            view = memoryview(tensor.cpu().view(torch.uint8).flatten().numpy())
            while view:
                view = view[file.write(view) :]


def write_tokenizer(directory: Path, vocab: int) -> None:
    """Byte-level BPE without merges: a token for each byte, then words up to the vocabulary's size."""
    names = ["</s>", "<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"\u0120t{n}" for n in range(vocab - len(names))]
    tokenizer = Tokenizer(models.BPE(vocab={name: n for n, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<s>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
        },
    )


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    main()
