"""Connections that are kept and used again: through a proxy where there is one, and after redirects.

A redirect is followed within the same cloud only, a few times, and never from https to http: the
address carries a signature, and the bytes become a model.
"""

from __future__ import annotations

import ipaddress
import ssl
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from hotstart.errors import ConfigError, StorageError
from hotstart.storage.http_connection import Head, HttpConnection, Proxy, StalledError, Until, never
from hotstart.storage.source import Cancel

_REDIRECTS = 5
_REDIRECT = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}
_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG"})
"""What OpenSSL calls an answer that is not TLS."""
_IDLE = 64
"""Connections to one place that are kept while nobody uses them."""
_SHARED_ENDINGS = frozenset({"ac", "co", "com", "edu", "go", "gov", "ne", "net", "or", "org"})
"""Below a country's domain, names that many owners share: ``co`` of ``co.uk``."""

Place = tuple[str, str, int]
"""Scheme, host and port."""


class Connections:
    """Thread-safe. ``patience``: seconds without a byte after which a connection is given up."""

    def __init__(self, *, patience: float, tls: Callable[[], ssl.SSLContext | None] = lambda: None) -> None:
        """``tls`` makes the context of https connections, once; None: the system's default."""
        self._patience = patience
        self._tls = tls
        self._context: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._idle: dict[Place, list[HttpConnection]] = defaultdict(list)
        self._moved: dict[str, str] = {}

    def get(
        self,
        url: str,
        headers: Mapping[str, str],
        cancel: Cancel,
        *,
        until: Until = never,
        method: str = "GET",
    ) -> tuple[HttpConnection, Head]:
        """Ask for a URL; the caller gives the connection back, or closes it.

        ``until``: see :meth:`HttpConnection.ask`. Raises StorageError for a redirect that is not
        followed and for a certificate that is not trusted, other OSErrors for what may pass.
        """
        here = self._moved.get(url, url)
        for_good = True
        for _ in range(_REDIRECTS + 1):
            parts = urlsplit(here)
            connection, head = self._ask(parts, headers, cancel, until, method)
            if head.status not in _REDIRECT or not (new := head.headers.get("location", "")):
                return connection, head
            connection.close()
            here = follow(here, new)
            if urlsplit(here).netloc != parts.netloc:
                headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
            for_good = for_good and head.status in (301, 308)
            if for_good:
                self._moved[url] = here
        self._moved.pop(url, None)
        raise StorageError(
            f"{shown(url)} leads through more than {_REDIRECTS} redirects", advice="Pass the final address"
        )

    def give_back(self, connection: HttpConnection) -> None:
        """Keep it for the next request if the answer was read to its end, else close it."""
        with self._lock:
            idle = self._idle[connection.place]
            if connection.reusable and len(idle) < _IDLE:
                idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close what is idle; what is in use is closed by its users."""
        with self._lock:
            connections = [each for idle in self._idle.values() for each in idle]
            self._idle.clear()
        for connection in connections:
            connection.close()

    def __del__(self) -> None:
        # Who only looks at a model (check, a start that fails) has no moment at which to close.
        self.close()

    def _ask(
        self, parts: SplitResult, headers: Mapping[str, str], cancel: Cancel, until: Until, method: str
    ) -> tuple[HttpConnection, Head]:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        place = parts.scheme, parts.hostname or "", parts.port or _PORTS[parts.scheme]
        connection = self._take(place)
        if connection is not None:
            try:
                return connection, connection.ask(target, headers, cancel, until=until, method=method)
            except StalledError:
                connection.close()
                raise
            except OSError:
                connection.close()  # closed by the server while it was idle: nothing has failed yet
            except BaseException:
                connection.close()
                raise
        connection = self._connect(place, cancel)
        try:
            return connection, connection.ask(target, headers, cancel, until=until, method=method)
        except BaseException:
            connection.close()
            raise

    def _take(self, place: Place) -> HttpConnection | None:
        while True:
            with self._lock:
                if not self._idle[place]:
                    return None
                connection = self._idle[place].pop()
            if not connection.stale:
                return connection
            connection.close()

    def _connect(self, place: Place, cancel: Cancel) -> HttpConnection:
        scheme, host, port = place
        try:
            return HttpConnection(
                place,
                cancel,
                patience=self._patience,
                tls=self._secure() if scheme == "https" else None,
                proxy=proxy_for(scheme, host),
            )
        except ssl.SSLCertVerificationError as error:
            raise StorageError(
                f"The certificate of {host}:{port} is not trusted: {error.verify_message}",
                expected="a certificate that this machine's authorities vouch for",
                advice="Name the authority's file by AWS_CA_BUNDLE or SSL_CERT_FILE",
            ) from None
        except ssl.SSLError as error:
            if error.reason not in _NOT_TLS:
                raise
            raise StorageError(
                f"{host}:{port} answers https:// in plain HTTP",
                expected="a port that speaks TLS, or an address with http://",
                advice="Write http:// if the store has no TLS: an endpoint without a scheme means https://",
            ) from None

    def _secure(self) -> ssl.SSLContext:
        with self._lock:
            if self._context is None:
                self._context = self._tls() or ssl.create_default_context()
            return self._context


def proxy_for(scheme: str, host: str) -> Proxy | None:
    """By HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY. Raises ConfigError for other kinds of proxies."""
    from urllib.request import getproxies, proxy_bypass

    proxies = getproxies()
    text = proxies.get(scheme) or proxies.get("all")
    if not text or proxy_bypass(host) or (":" in host and proxy_bypass(f"[{host}]")):
        return None
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(
            f"The proxy {parts.scheme}://{parts.hostname or ''} of {scheme.upper()}_PROXY cannot be used",
            expected="http://HOST:PORT",
            advice=f"Pass an HTTP proxy, or list {host} in NO_PROXY",
        )
    credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else ""
    return Proxy(parts.hostname, parts.port or 80, credentials)


def follow(url: str, location: str) -> str:
    """Where a redirect leads. Raises StorageError when it leaves the cloud or its encryption."""
    try:
        target = urljoin(url, location)
        old, new = urlsplit(url), urlsplit(target)
        _ = new.port  # raises ValueError for one that is no number
    except ValueError:
        raise StorageError(
            f"{shown(url)} is redirected to {_open_part(location)!a}: that is no web address",
            expected="a redirect within the same cloud",
            advice="Look at the server's configuration, and at proxies in between",
        ) from None
    if new.scheme not in _PORTS or not new.hostname:
        reason = "that is no web address"
    elif old.scheme == "https" and new.scheme == "http":
        reason = "that leaves encryption"
    elif not _same_cloud(old.hostname or "", new.hostname):
        reason = "that is somebody else's"
    else:
        return target
    raise StorageError(
        f"{shown(url)} is redirected to {shown(target)}: {reason}",
        expected="a redirect within the same cloud",
        advice="If that is where the model lies, pass that address",
    )


def shown(url: str) -> str:
    """A URL without what may be secret in it."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


def _open_part(location: str) -> str:
    """Of what is no URL: without a query, a user and a password."""
    return location.partition("?")[0].rpartition("@")[2][:100]


def _same_cloud(old: str, new: str) -> bool:
    if old == new:
        return True
    if _is_address(old) or _is_address(new) or "." not in old:
        return False
    return _owner(old) == _owner(new)


def _owner(host: str) -> list[str]:
    """The labels of the domain somebody registered: ``amazonaws.com`` of all its hosts."""
    labels = host.lower().rstrip(".").split(".")
    shared = len(labels) > 2 and len(labels[-1]) == 2 and labels[-2] in _SHARED_ENDINGS
    return labels[-3:] if shared else labels[-2:]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
