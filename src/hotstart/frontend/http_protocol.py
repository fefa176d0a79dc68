"""uvicorn's HTTP protocol, bounded where a client could make it grow, and deaf to HTTP/2 offers."""

from __future__ import annotations

import re

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10
MAX_PIPELINED = 64
"""Requests of one connection that may wait for the answer to an earlier one."""
_OFFER = re.compile(rb"(?im)^upgrade(?=[ \t]*:[ \t]*h2c)")


class HttpProtocol(HttpToolsProtocol):
    """A connection is closed when its headers grow past a limit, or too many requests queue on it."""

    _in_headers = True
    _header_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self._in_headers:
            # The parser takes the body of a request with an Upgrade header for the other protocol's
            # bytes. Clients that offer HTTP/2 this way expect the offer to be ignored.
            head, end, rest = data.partition(b"\r\n\r\n")
            if end and _OFFER.search(head):
                data = _OFFER.sub(b"x-upgrade", head) + end + rest
        self._header_bytes += len(data)
        super().data_received(data)
        too_long = self._in_headers and self._header_bytes > MAX_HEADER_BYTES
        if too_long or len(self.pipeline) > MAX_PIPELINED:
            self.logger.warning("closed a connection: %s", "headers too long" if too_long else "flooded")
            self.pipeline.clear()
            self.transport.abort()

    def on_headers_complete(self) -> None:
        """The parser's callback."""
        self._in_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The parser's callback."""
        self._in_headers = True
        self._header_bytes = 0
        super().on_message_complete()
