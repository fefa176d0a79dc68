"""What can go wrong, and the exit code each kind ends a command with.

    HotstartError            1
    ├── ConfigError          2   flags, configuration files, the port
    ├── ModelError           3   absent, damaged or contradictory content
    ├── StorageError         4   rights, mounts, I/O, object stores
    ├── DeviceError          5   memory, driver, visibility
    ├── EngineError          6   the engine failed or died while running
    └── ProblemsFound        the lowest code of the errors it carries

Every error says what was found, what was expected and what to do about it. Commands print
errors without a traceback; a traceback means a defect of ours.
"""

from __future__ import annotations

TYPE_CHECKING = False  # collections costs 2 ms before the engine is started; checkers know the name

if TYPE_CHECKING:
    from collections.abc import Sequence


class HotstartError(Exception):
    """Base of all errors meant for users. ``str()`` is one paragraph, ready to print."""

    exit_code = 1
    kind = "error"

    def __init__(self, found: str, *, expected: str = "", advice: str = "") -> None:
        self.found = found
        self.expected = expected
        self.advice = advice
        super().__init__(str(self))

    def __str__(self) -> str:
        return f"{self.what} {self.remedy}".rstrip()

    @property
    def what(self) -> str:
        """What was found and what was expected, as a sentence."""
        expected = f"; expected {self.expected.rstrip('.')}" if self.expected else ""
        return self.found.rstrip(".") + expected + "."

    @property
    def remedy(self) -> str:
        """The advice as a sentence; empty when there is none."""
        if not self.advice:
            return ""
        # A file's name, a path or a flag keeps its spelling.
        plain = self.advice.split(" ", 1)[0].rstrip(",:").isalpha()
        start = self.advice[0].upper() if plain else self.advice[0]
        return start + self.advice[1:] + ("" if self.advice[-1] in ".?" else ".")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.found, self.expected, self.advice)


def _rebuild(cls: type[HotstartError], found: str, expected: str, advice: str) -> HotstartError:
    return cls(found, expected=expected, advice=advice)


class ConfigError(HotstartError, ValueError):
    """A flag, a configuration file or the port is wrong."""

    exit_code = 2
    kind = "configuration error"


class ModelError(HotstartError, ValueError):
    """The checkpoint is absent, damaged, contradictory or of a kind that is not supported."""

    exit_code = 3
    kind = "model error"


class StorageError(HotstartError, OSError):
    """The bytes exist but cannot be reached: rights, mounts, I/O errors."""

    exit_code = 4
    kind = "storage error"


class DeviceError(HotstartError, RuntimeError):
    """The device is absent, hidden, too old, or has too little memory."""

    exit_code = 5
    kind = "device error"


class EngineError(HotstartError, RuntimeError):
    """The engine process failed while starting or running."""

    exit_code = 6
    kind = "engine error"


class ProblemsFound(HotstartError):  # noqa: N818 - several errors, not one
    """Several problems at once; the exit code is the lowest of theirs."""

    kind = "problems found"

    def __init__(self, problems: Sequence[HotstartError]) -> None:
        self.problems = tuple(problems)
        self.exit_code = min((p.exit_code for p in self.problems), default=1)
        super().__init__("; ".join(str(p).rstrip(".") for p in self.problems))

    def __reduce__(self) -> tuple[object, ...]:
        return ProblemsFound, (self.problems,)


def raise_all(problems: Sequence[HotstartError]) -> None:
    """Raise the one problem, or all of them together; return when there is none."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ProblemsFound(problems)
