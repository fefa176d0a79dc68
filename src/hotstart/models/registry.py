"""Which family serves which architecture. Torch-free; a family's module loads when it is chosen."""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from hotstart.errors import ModelError
from hotstart.models.base import Family

# architecture → where its family is defined
ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "hotstart.models.llama:LLAMA",
    "MistralForCausalLM": "hotstart.models.llama:MISTRAL",
    "OPTForCausalLM": "hotstart.models.opt:OPT",
    "Qwen2ForCausalLM": "hotstart.models.llama:QWEN2",
    "Qwen3ForCausalLM": "hotstart.models.llama:QWEN3",
}


def family_for(config: dict[str, Any]) -> Family:
    """The family of a parsed ``config.json``.

    Raises ``ModelError`` when no architecture is named, none of those named is supported, or the
    weights are quantised.
    """
    named = config.get("architectures")
    ours = ", ".join(ARCHITECTURES)
    if not isinstance(named, list) or not named or not all(isinstance(name, str) for name in named):
        raise ModelError(
            "config.json names no architecture",
            expected=f'"architectures": [...] with one of {ours}',
            advice=_from_model_type(config),
        )
    name = next((name for name in named if name in ARCHITECTURES), None)
    if name is None:
        raise ModelError(
            f"architecture {', '.join(named)} is not supported",
            expected=f"one of {ours}",
            advice=_other_spelling(named[0]),
        )
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ModelError(
            f"the checkpoint is quantised ({method or 'unknown method'}), which is not supported",
            expected="weights in float32, float16 or bfloat16",
            advice="Serve the unquantised checkpoint of the same model",
        )
    module, _, attribute = ARCHITECTURES[name].partition(":")
    return cast("Family", getattr(import_module(module), attribute))


def _other_spelling(name: str) -> str:
    """Ours that differs in case only. Names that differ in a letter are other models: Mamba, Llama."""
    match = next((ours for ours in ARCHITECTURES if ours.lower() == name.lower()), None)
    return f"Did you mean {match!r}?" if match else ""


def _from_model_type(config: dict[str, Any]) -> str:
    wanted = f"{config.get('model_type', '')}ForCausalLM".lower()
    match = next((name for name in ARCHITECTURES if name.lower() == wanted), None)
    return f'model_type suggests "architectures": ["{match}"]' if match else ""
