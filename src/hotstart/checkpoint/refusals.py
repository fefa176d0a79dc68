"""Why a path holds no model that can be served, and what to do about it."""

from __future__ import annotations

import os

from hotstart.checkpoint.sharded_names import find_shards, sizes_of
from hotstart.checkpoint.wording import count
from hotstart.errors import HotstartError, ModelError
from hotstart.storage.access import read_error

_EXPECTED = "model.safetensors, or shards and model.safetensors.index.json"


def no_directory(path: str) -> HotstartError:
    """The error for a model path that is no directory."""
    try:
        os.stat(path)
    except OSError as error:
        return read_error(path, error, doing="open")
    parent = os.path.dirname(os.path.abspath(path))
    if path.endswith(".safetensors"):
        return ModelError(
            f"{path} is a weight file", expected="the directory that holds it", advice=f"Pass {parent}"
        )
    if path.endswith(".gguf"):
        return _gguf(path)
    return ModelError(f"{path} is a file", expected="a model's directory", advice=f"Pass {parent}")


def no_weights(path: str, names: list[str], weights: list[str]) -> ModelError:
    """The error for a directory with ``names``, of which ``weights`` are weights of unusable kinds."""
    if not names:
        return ModelError(
            f"{path} is empty",
            expected="a model's directory",
            advice="If a volume should be mounted there, it is not: mount it; otherwise copy the model again",
        )
    pickles = sorted(name for name in weights if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl")))
    if any(name.startswith("consolidated") and name.endswith(".safetensors") for name in weights):
        return ModelError(
            f"{path} holds its weights in the publisher's own layout only (consolidated*.safetensors)",
            expected=_EXPECTED,
            advice="Download the files of the transformers layout as well",
        )
    if any(name.startswith("adapter_") for name in weights):
        return ModelError(
            f"{path} holds an adapter and no model",
            expected=_EXPECTED,
            advice="Merge it into its base model (merge_and_unload of peft), or pass the base model",
        )
    if pickles:
        return ModelError(
            f"{path} holds pickled weights only ({pickles[0]})",
            expected=f"safetensors weights ({_EXPECTED})",
            advice="A pickle can run any code, so none is loaded. Convert it where you trust it: python -c "
            '"from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{path}', dtype='auto').save_pretrained('{path}-safetensors')\", "
            "and copy the configuration and tokenizer files beside the result",
        )
    if gguf := sorted(name for name in weights if name.endswith(".gguf")):
        return _gguf(os.path.join(path, gguf[0]))
    if tensors := sorted(name for name in weights if name.endswith(".tensors")):
        return ModelError(
            f"{path} holds a Tensorizer file ({tensors[0]})",
            expected=_EXPECTED,
            advice="Pass --load-format tensorizer",
        )
    return ModelError(
        f"{path} holds no weight files",
        expected=_EXPECTED,
        advice="Copy or download the weights; a clone without large-file support leaves them out",
    )


def pre_sharded(path: str, names: list[str]) -> ModelError | None:
    """The error for a pre-sharded directory that was to be read as a plain one; None: it is none."""
    found = find_shards(names)
    if not found:
        return None
    shards = found[0]
    return ModelError(
        f"{path} holds a pre-sharded checkpoint for {sizes_of(shards.tp_size, shards.pp_size)} "
        f"({count(len(shards.files), 'file')}, {shards.files[0].name} among them)",
        expected=_EXPECTED,
        advice="Pass --load-format sharded_state (or runai_streamer_sharded)",
    )


def _gguf(path: str) -> ModelError:
    return ModelError(
        f"{path} is a GGUF file, which hotstart does not read",
        expected=f"safetensors weights ({_EXPECTED})",
        advice="Use the model that the GGUF file was made from, or convert it with transformers: "
        "from_pretrained(directory, gguf_file=name), then save_pretrained",
    )
