"""Addresses of S3 signed for a request whose headers and query ``obstore`` does not sign.

It signs the host alone, and a store refuses every ``x-amz-`` header that the signature does not cover.
https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import datetime, timezone
from urllib.parse import quote, urlsplit

from hotstart.storage.aws_credentials import Keys


def sign(
    method: str,
    url: str,
    keys: Keys,
    region: str,
    *,
    headers: Mapping[str, str],
    query: Mapping[str, str],
    now: datetime | None = None,
    seconds: int = 900,
) -> str:
    """The address, good for ``seconds`` and for requests with just these ``headers``.

    ``url``: of the object, its path quoted; a query that it has is left out.
    """
    parts = urlsplit(url)
    moment = (now or datetime.now(timezone.utc)).strftime("%Y%m%dT%H%M%SZ")
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    signed = {name.lower(): value.strip() for name, value in headers.items()} | {"host": parts.netloc}
    names = ";".join(sorted(signed))
    fields = {
        **query,
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Credential": f"{keys.access_key_id}/{scope}",
        "X-Amz-Date": moment,
        "X-Amz-Expires": str(seconds),
        "X-Amz-SignedHeaders": names,
    }
    if keys.token:
        fields["X-Amz-Security-Token"] = keys.token
    text = "&".join(f"{quote(name, safe='')}={quote(fields[name], safe='')}" for name in sorted(fields))
    lines = "".join(f"{name}:{signed[name]}\n" for name in sorted(signed))
    request = f"{method}\n{parts.path}\n{text}\n{lines}\n{names}\nUNSIGNED-PAYLOAD"
    digest = hashlib.sha256(request.encode()).hexdigest()
    key = f"AWS4{keys.secret_access_key}".encode()
    for step in (*scope.split("/"), f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{digest}"):
        key = hmac.digest(key, step.encode(), "sha256")
    return f"{parts.scheme}://{parts.netloc}{parts.path}?{text}&X-Amz-Signature={key.hex()}"
