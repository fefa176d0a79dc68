"""Frames reach the engine whole and in order, whoever owns the socket meanwhile."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from hotstart.frontend.engine_writer import EngineWriter
from hotstart.messages import Frames, framed

from .fake_engine import PATIENCE

LARGE = bytes(range(256)) * (1 << 14)
"""4 MiB: many times what a socket holds."""


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE)
    with ours, theirs:
        yield ours, theirs


def received(theirs: socket.socket, count: int) -> list[bytes]:
    frames, bodies = Frames(), []
    while len(bodies) < count:
        data = theirs.recv(1 << 16)
        assert data, "the end came before the last frame"
        bodies += frames.feed(data)
    return bodies


@asynccontextmanager
async def handed_over(writer: EngineWriter) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    transports: list[asyncio.Transport] = []

    async def adopt(engine: socket.socket) -> Callable[[bytes], object]:
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=engine)
        transports.append(transport)
        return lambda data: loop.call_soon_threadsafe(transport.write, data)

    await writer.hand_over(adopt)
    yield
    transports[0].close()


def test_a_frame_under_way_is_whole_before_the_loop_takes_the_socket(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    writer = EngineWriter(ours)
    bodies: list[bytes] = []
    sending = threading.Thread(target=writer.send, args=(framed(LARGE),))
    reading = threading.Thread(target=lambda: bodies.extend(received(theirs, 2)))
    sending.start()
    assert select.select([theirs], [], [], PATIENCE)[0]  # the frame is under way, and cannot end unread

    async def take_over() -> None:
        reading.start()
        async with handed_over(writer):
            await asyncio.to_thread(writer.send, framed(b"later"))
            await asyncio.to_thread(reading.join, PATIENCE)

    asyncio.run(take_over())
    sending.join(PATIENCE)
    assert bodies == [LARGE, b"later"]


def test_frames_of_threads_are_whole_when_the_loop_writes(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    writer = EngineWriter(ours)
    parts = [LARGE, b"small", LARGE[::-1]]

    async def write() -> list[bytes]:
        async with handed_over(writer):
            for part in parts:
                await asyncio.to_thread(writer.send, framed(part))
            return await asyncio.to_thread(received, theirs, 3)

    assert asyncio.run(write()) == parts


def test_what_a_dead_engine_cannot_take_is_dropped(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.close()
    EngineWriter(ours).send(framed(b"too late"))
