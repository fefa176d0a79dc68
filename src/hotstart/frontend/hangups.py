"""How connections end while nothing is read from them, for any number at the cost of one descriptor."""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable


class Hangups:
    """One epoll set beside the event loop's, which reports no end to who has paused reading."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._watches: dict[int, Watch] = {}
        loop.add_reader(self._epoll.fileno(), self._report)

    def watch(self, number: int, react: Callable[[], None], *, half: bool) -> Watch:
        """Have ``react`` called once when descriptor ``number`` is reset, or with ``half`` half-closed.

        Raises OSError when the kernel allows no more, and ValueError once closed.
        """
        events = select.EPOLLET | (select.EPOLLRDHUP if half else 0)
        try:
            self._epoll.register(number, events)
        except FileExistsError:
            self._epoll.modify(number, events)
        watch = self._watches[number] = Watch(number, react, self._forget)
        return watch

    def close(self) -> None:
        """Report nothing more."""
        self._watches.clear()
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _report(self) -> None:
        for number, _ in self._epoll.poll(0):
            if (watch := self._watches.get(number)) is not None:
                watch.react()

    def _forget(self, watch: Watch) -> None:
        # A descriptor that was closed has left the set, and its number may be another connection's.
        if self._watches.get(watch.number) is watch:
            del self._watches[watch.number]
            with contextlib.suppress(OSError):
                self._epoll.unregister(watch.number)


class Watch:
    """One watched descriptor."""

    def __init__(self, number: int, react: Callable[[], None], forget: Callable[[Watch], None]) -> None:
        self.number = number
        self.react = react
        self._forget = forget

    def stop(self) -> None:
        """Watch it no longer; harmless when repeated."""
        self._forget(self)
