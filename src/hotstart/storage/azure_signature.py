"""Addresses of Azure's blobs signed with the account's key.

What is signed is the blob's name; ``obstore`` 0.11 signs the name as it is quoted in the address, so
Azure refuses its addresses of names with a space, ``+`` or ``ü``.
https://learn.microsoft.com/en-us/rest/api/storageservices/create-service-sas
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from datetime import datetime, timedelta, timezone
from urllib.parse import urlencode

from hotstart.errors import ConfigError

_VERSION = "2020-12-06"
_CLOCK = timedelta(minutes=15)
"""By which this machine's clock may be ahead."""


def sign(
    account: str, key: str, container: str, blob: str, *, seconds: float, now: datetime | None = None
) -> str:
    """The query that lets a blob be read for ``seconds``. ``blob``: its name, not quoted.

    Raises ConfigError for a key that is none.
    """
    moment = now or datetime.now(timezone.utc)
    start, end = _time(moment - _CLOCK), _time(moment + timedelta(seconds=seconds))
    resource = f"/blob/{account}/{container}/{blob}"
    # Permissions, times, resource, policy, addresses, protocols, version, kind; a snapshot, an
    # encryption scope, and five headers of the answer.
    text = "\n".join(["r", start, end, resource, "", "", "", _VERSION, "b", *[""] * 7])
    try:
        secret = base64.b64decode(key, validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError(
            f"The key of the account {account} is no key", expected="a long word in base64"
        ) from None
    mac = hmac.new(secret, text.encode(), hashlib.sha256).digest()
    fields = {"sp": "r", "st": start, "se": end, "sv": _VERSION, "sr": "b"}
    return urlencode({**fields, "sig": base64.b64encode(mac).decode()})


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
