"""hotstart: from process start to the first token over HTTP in the least time the hardware permits."""

from __future__ import annotations

TYPE_CHECKING = False  # typing costs 8 ms, and nothing else here needs it; checkers know the name

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from hotstart.llm import LLM
    from hotstart.messages import SamplingParams


def __getattr__(name: str) -> object:
    """Import on first use: ``import hotstart`` itself costs nothing."""
    if name == "LLM":
        from hotstart.llm import LLM

        return LLM
    if name == "SamplingParams":
        from hotstart.messages import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'hotstart' has no attribute {name!r}")
