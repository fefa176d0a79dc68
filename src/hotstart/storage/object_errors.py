"""What a store's refusal means: its code and words, and the likely cause."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hotstart.errors import ModelError, StorageError
from hotstart.storage.http_connection import Head

if TYPE_CHECKING:
    from hotstart.errors import HotstartError
    from hotstart.storage.cloud_settings import CloudSettings

_CODE = re.compile(rb"<Code>([^<]{1,80})</Code>")
_MESSAGE = re.compile(rb"<Message>([^<]{1,300})</Message>")
_CAUSES = {
    "InvalidAccessKeyId": "The access key is unknown to this endpoint: is it the right endpoint for it?",
    "SignatureDoesNotMatch": "The secret key is wrong, or a proxy changes the request",
    "RequestTimeTooSkewed": "This machine's clock is wrong: set it (chronyc, ntpdate)",
    "ExpiredToken": "The session token has expired: get new credentials and start again",
    "TokenRefreshRequired": "The session token has expired: get new credentials and start again",
    "InvalidToken": "AWS_SESSION_TOKEN does not belong to the access key",
    "AccessDenied": "The credentials may not read this object (s3:GetObject)",
    "PermanentRedirect": "The bucket lies in another region: set AWS_REGION to it",
    "AuthorizationHeaderMalformed": "The bucket lies in another region: set AWS_REGION to it",
    "IllegalLocationConstraintException": "The bucket lies in another region: set AWS_REGION to it",
    "NoSuchBucket": "Check the bucket's name and the endpoint",
}


def code_of(body: bytes) -> str:
    """``AccessDenied`` of an XML error body; empty when there is none."""
    found = _CODE.search(body)
    return found[1].decode("utf-8", "replace") if found else ""


def wording(head: Head, body: bytes) -> str:
    """``503 SlowDown: Please reduce your request rate``."""
    message = _MESSAGE.search(body)
    parts = [str(head.status), code_of(body) or head.reason]
    text = " ".join(part for part in parts if part)
    return text + (f": {message[1].decode('utf-8', 'replace').strip()}" if message else "")


def explain(name: str, settings: CloudSettings, head: Head, body: bytes) -> HotstartError:
    """The error for an answer that will be the same next time."""
    code = code_of(body)
    cause = _CAUSES.get(code, "")
    if head.status in (301, 307, 308) and not cause:
        region = head.headers.get("x-amz-bucket-region", "")
        cause = f"The bucket lies in the region {region}: set AWS_REGION to it" if region else ""
    if head.status == 404 and code != "NoSuchBucket":
        return ModelError(
            f"{name} does not exist ({settings.described})", advice=cause or "Check the location"
        )
    if head.status in (401, 403) and not cause:
        cause = "The credentials may not read this object"
    return StorageError(
        f"{name}: {wording(head, body)} ({settings.described})", advice=cause or settings.advice
    )
