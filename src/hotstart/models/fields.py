"""Reading ``config.json`` with every value checked, and all problems reported together."""

from __future__ import annotations

from typing import Any

from hotstart.errors import HotstartError, ModelError, raise_all

ACTIVATIONS = ("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish")
"""Names of ``hidden_act`` that ``layers.activation`` computes."""

# Larger than any published model by a wide margin; beyond them a file is damaged, and sizes derived
# from it would overflow or exhaust memory before anyone saw why.
MAX_LAYERS = 2048
MAX_HEADS = 4096
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 23
MAX_CONTEXT = 1 << 28


class Fields:
    """Typed access to a model's configuration.

    Readers return the value, or a harmless stand-in after noting the problem; :meth:`check` raises
    what was noted. ``null`` counts as absent, as in transformers. ``where`` is how messages name the
    object that is read.
    """

    def __init__(self, values: dict[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where
        self.problems: list[HotstartError] = []

    def check(self) -> None:
        """Raise ``ModelError`` (or all of several together) if anything was noted."""
        problems, self.problems = self.problems, []
        raise_all(problems)

    def problem(self, found: str, *, expected: str = "", advice: str = "") -> None:
        """Note a problem."""
        self.problems.append(ModelError(f"{self.where}: {found}", expected=expected, advice=advice))

    def integer(self, name: str, *, high: int, low: int = 1, default: int | None = None) -> int:
        """A whole number in ``low … high``; absent without a default is a problem."""
        value = self._present(name, default)
        if value is None:
            return low
        if not isinstance(value, int) or isinstance(value, bool):
            self.problem(f"{name} is {_shown(value)}", expected="a whole number")
            return low
        if not low <= value <= high:
            self.problem(f"{name} is {_shown(value)}", expected=f"a whole number from {low} to {high}")
            return low
        return value

    def optional_integer(self, name: str, *, high: int, low: int = 1) -> int | None:
        """As :meth:`integer`; None where the key is absent."""
        if self.values.get(name) is None:
            return None
        return self.integer(name, low=low, high=high)

    def number(self, name: str, *, low: float, high: float, default: float | None = None) -> float:
        """A number in ``low … high``."""
        value = self._present(name, default)
        if value is None:
            return low
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value:
            self.problem(f"{name} is {_shown(value)}", expected="a number")
            return low
        if not low <= value <= high:
            self.problem(f"{name} is {_shown(value)}", expected=f"a number from {low:g} to {high:g}")
            return low
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._present(name, default)
        if not isinstance(value, bool):
            self.problem(f"{name} is {_shown(value)}", expected="true or false")
            return default
        return value

    def activation(self, name: str, default: str) -> str:
        """One of :data:`ACTIVATIONS`."""
        value = self._present(name, default)
        if value not in ACTIVATIONS:
            self.problem(
                f"{name} is {_shown(value)}, which is not supported",
                expected=f"one of {', '.join(ACTIVATIONS)}",
                advice=nearest(value, ACTIVATIONS),
            )
            return default
        return str(value)

    def _present(self, name: str, default: object) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            state = "null" if name in self.values else "missing"
            self.problem(f"{name} is {state}", expected="the value the model was trained with")
        return value


def nearest(name: object, known: tuple[str, ...] | list[str]) -> str:
    """``Did you mean 'X'?`` or nothing."""
    from difflib import get_close_matches  # only for errors; a start does without it

    match = get_close_matches(str(name), known, n=1, cutoff=0.6)
    return f"Did you mean {match[0]!r}?" if match else ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
