"""Tiny random models of every family, whole directories: configuration, weights, tokenizer, template.

Weights are scaled so that greedy text wanders (``models/test_against_transformers.py`` asserts it).
Needs torch, safetensors and tokenizers; transformers is not imported, so tests of other rooms stay quick.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB = 512
EOS = 0

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}
_LLAMA = _SHAPE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 10000.0}
_MISTRAL = _SHAPE | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "rope_theta": 1000.0,
    "sliding_window": 12,
}
_QWEN2 = _SHAPE | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
_QWEN3 = _QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 24}
_OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "word_embed_proj_dim": 64,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 1,
    "tie_word_embeddings": True,
}


def _scaled(**parameters: object) -> dict[str, Any]:
    return _LLAMA | {"max_position_embeddings": 32, "rope_scaling": parameters}


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama-tied": _LLAMA | {"tie_word_embeddings": True},
    "llama-biases": _LLAMA | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    "llama-linear": _scaled(type="linear", factor=4.0),
    "llama-dynamic": _scaled(rope_type="dynamic", factor=4.0),
    "llama-llama3": _LLAMA
    | {
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama-yarn": _scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    "llama-yarn-mscale": _scaled(
        rope_type="yarn",
        factor=8.0,
        original_max_position_embeddings=32,
        beta_fast=16.0,
        beta_slow=2.0,
        mscale=1.4,
        mscale_all_dim=0.6,
        truncate=False,
    ),
    "mistral": _MISTRAL,
    "qwen2": _QWEN2 | {"tie_word_embeddings": True},
    "qwen2-sliding": _QWEN2 | {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    "qwen2-layer-types": _QWEN2
    | {
        "use_sliding_window": True,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3": _QWEN3,
    "opt": _OPT,
    "opt-post-norm": _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
    "opt-plain": _OPT
    | {
        "enable_bias": False,
        "layer_norm_elementwise_affine": False,
        "activation_function": "gelu",
        "tie_word_embeddings": False,
    },
}
"""Every variant, by name."""


def write(
    name: str,
    directory: Path,
    *,
    dtype: str = "float32",
    shards: int = 1,
    seed: int = 1,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write the whole model directory and return it. ``config``: overrides of the variant's values."""
    directory.mkdir(parents=True, exist_ok=True)
    values = CONFIGS[name] | {"torch_dtype": dtype} | (config or {})
    _write_json(directory / "config.json", values)
    write_weights(directory, values, dtype=dtype, shards=shards, seed=seed)
    write_tokenizer(directory, files="split" if values["model_type"] == "opt" else "joint")
    return directory


def write_weights(
    directory: Path, config: dict[str, Any], *, dtype: str = "float32", shards: int = 1, seed: int = 1
) -> None:
    """Random weights for ``config``: one file, or ``shards`` files with an index."""
    import torch
    from safetensors.torch import save_file

    tensors = random_weights(config, dtype=getattr(torch, dtype), seed=seed)
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        save_file({name: tensors[name] for name in part}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    _write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": size}, "weight_map": weight_map},
    )


def random_weights(config: dict[str, Any], *, dtype: Any, seed: int = 1) -> dict[str, Any]:
    """Tensors by checkpoint name."""
    import torch

    from hotstart.models.registry import family_for

    family = family_for(config)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {}
    for spec in family.specs(family.geometry(config)):
        if spec.alias_of:
            continue
        noise = torch.randn(spec.shape, generator=generator)
        part = spec.slot.rpartition(".")[2]
        if part.endswith("norm"):
            # Signs keep a tied head from answering every token with itself.
            noise = noise.sign() + 0.2 * noise
        elif part.endswith("bias"):
            noise = 0.2 * noise
        elif part not in ("embed", "positions"):
            noise = noise * spec.shape[-1] ** -0.5
            if config["model_type"] == "opt" and part in ("o", "fc2"):
                noise = noise / 2  # its positions vary the text; less of the layers, less bfloat16 noise
        tensors[spec.stored[0]] = noise.to(dtype)
    return tensors


def write_tokenizer(directory: Path, *, files: str = "joint") -> None:
    """A byte-level BPE trained on the licence: tokenizer.json, or vocab.json and merges.txt (``split``)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<|endoftext|>", "<s>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    licence = (Path(__file__).parents[1] / "LICENSE").read_text()
    tokenizer.train_from_iterator(licence.splitlines(), trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    if files == "joint":
        tokenizer.save(str(directory / "tokenizer.json"))
    else:
        tokenizer.model.save(str(directory))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast" if files == "joint" else "GPT2Tokenizer",
            "bos_token": "<s>",
            "eos_token": "<|endoftext|>",
            "unk_token": "<|endoftext|>",
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
