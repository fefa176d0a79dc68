"""From the bytes of a request to a validated struct, with errors that name the field."""

from __future__ import annotations

import functools
import logging
import re
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope

from hotstart.frontend.errors import ApiError
from hotstart.frontend.protocol.fields import HARMLESS, refusal

log = logging.getLogger("hotstart.frontend")

T = TypeVar("T", bound=msgspec.Struct)

_WHERE = re.compile(r"^(?P<what>.*?) - at (?:`key` in )?`\$\.?(?P<path>.*?)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]+)`$")
_LOGGED_AT_MOST = 256
_logged: set[str] = set()
_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ClientGoneError(Exception):
    """The client closed the connection; nobody is left to answer."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The body of a JSON request. Raises :class:`ApiError` 413 and 415, or :class:`ClientGoneError`."""
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json" and not kind.endswith(b"+json"):
        raise ApiError(415, "The Content-Type must be application/json.")
    coding = headers.get(b"content-encoding", b"").strip().lower()
    if coding not in (b"", b"identity"):
        name = coding[:100].decode("latin-1")
        raise ApiError(415, f"The Content-Encoding {name} is not supported; send the body uncompressed.")
    too_large = ApiError(413, f"The body is larger than {limit} bytes, the limit of this server.")
    length = headers.get(b"content-length", b"0").lstrip(b"0")
    # Python refuses to read numbers of thousands of digits; one of twenty is too large anyway.
    if len(length) > 19 or int(length or b"0") > limit:
        raise too_large
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
        if size > limit:
            raise too_large
    return b"".join(parts)


def parse(body: bytes, kind: type[T]) -> T:
    """Decode ``body``. Raises :class:`ApiError` 400 naming the field; unknown fields are logged once."""
    try:
        raw = _raw_fields.decode(body)
    except msgspec.ValidationError:
        raise ApiError(400, "The body must be a JSON object.") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None
    decoder, known = _decoder(kind)
    for name in sorted(raw.keys() - known):
        try:
            reason = refusal(name, raw[name])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ApiError(400, f"{name}: not valid JSON: {error}.", param=name) from None
        if reason is not None:
            raise ApiError(400, reason + ".", param=name)
        _log_unknown(name)
    try:
        request: T = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"The body cannot be read: {error}.") from None
    return request


@functools.cache
def _decoder(kind: type[T]) -> tuple[msgspec.json.Decoder[T], frozenset[str]]:
    return msgspec.json.Decoder(kind), frozenset(kind.__struct_fields__)


def _named(text: str) -> ApiError:
    """msgspec's error in our words: ``temperature: expected `float` >= 0.0``."""
    where = _WHERE.match(text)
    what, path = (where["what"], where["path"]) if where else (text, "")
    missing = _MISSING.match(what)
    if missing:
        path = f"{path}.{missing['name']}" if path else missing["name"]
        return ApiError(400, f"{path}: this field is required.", param=path)
    return ApiError(400, f"{path or 'body'}: {what[:1].lower()}{what[1:]}.", param=path or None)


def _log_unknown(name: str) -> None:
    if name in HARMLESS or name in _logged or len(_logged) >= _LOGGED_AT_MOST:
        return
    _logged.add(name)
    log.warning("the request field %r is unknown and ignored (logged once)", name[:100])
