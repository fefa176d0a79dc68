"""TLS of the HTTP side."""

from __future__ import annotations

import ssl
from typing import Any

from hotstart.config.settings import HttpConfig
from hotstart.frontend.descriptors import Descriptors

HANDSHAKE_SECONDS = 10.0
"""That a client may take; it holds a descriptor meanwhile, and the protocol knows nothing of it."""


def server_context(http: HttpConfig, descriptors: Descriptors) -> ssl.SSLContext | None:
    """What ``--ssl-*`` say; None without a certificate. Raises OSError, of which ssl.SSLError is one."""
    if http.ssl_certfile is None:
        return None
    context = _Context(ssl.PROTOCOL_TLS_SERVER)
    context.descriptors = descriptors
    # Without a password to call for, OpenSSL asks for one on the terminal.
    context.load_cert_chain(http.ssl_certfile, http.ssl_keyfile, password=str)
    context.verify_mode = ssl.VerifyMode(http.ssl_cert_reqs)
    if http.ssl_ca_certs is not None:
        context.load_verify_locations(http.ssl_ca_certs)
    return context


class _Context(ssl.SSLContext):
    """Turns clients away before the handshake when descriptors are about to run out."""

    descriptors: Descriptors

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """The event loop's first step with a connection that it has accepted."""
        if self.descriptors.refuse():
            raise ssl.SSLError("too many connections are open")
        return super().wrap_bio(*arguments, **options)
