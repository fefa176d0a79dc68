"""Who wants to know what arrives in memory, and may still need it when the model does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Follower(Protocol):
    """Follows the files of an image by their number. Called from the readers' threads: returns at once."""

    def arrived(self, file: int, begin: int, end: int) -> None:
        """These bytes are in memory, and stay as they are until they are released."""
        ...

    def keeps(self, file: int, begin: int, end: int, give_back: Callable[[], None]) -> bool:
        """The model is done with these bytes. True: ``give_back`` will be called later, on another thread."""
        ...


class Nobody:
    """Follows nothing."""

    def arrived(self, file: int, begin: int, end: int) -> None:
        """See :class:`Follower`."""

    def keeps(self, file: int, begin: int, end: int, give_back: Callable[[], None]) -> bool:
        """See :class:`Follower`."""
        return False
