"""What a store's refusal means: its code and words, and the likely cause."""

from __future__ import annotations

import re
import time
from email.utils import parsedate_to_datetime
from html import unescape
from typing import TYPE_CHECKING

from msgspec import Struct

from hotstart.errors import ModelError, StorageError
from hotstart.storage.http_connection import Head
from hotstart.storage.retry import TRANSIENT

if TYPE_CHECKING:
    from hotstart.errors import HotstartError
    from hotstart.storage.cloud_settings import CloudSettings

_CODE = re.compile(rb"<Code>([^<]{1,80})</Code>")
_MESSAGE = re.compile(rb"<Message>([^<]{1,500})</Message>")
_REGION = re.compile(rb"<Region>([a-z0-9-]{1,40})</Region>|expecting '([a-z0-9-]{1,40})'")
_SKEW = 300.0
"""Seconds that a clock may be off before signatures are refused, roughly."""

_EXPIRED = "The session token has expired: get new credentials and start again"
_MAY_NOT_READ = (
    "It may not be read by these credentials (s3:GetObject), "
    "or it does not exist and they may not list (s3:ListBucket)"
)
_AZURE_ROLE = "The credentials lack the role Storage Blob Data Reader on the account or container"
_CAUSES = {
    "InvalidAccessKeyId": "The access key is unknown to this endpoint: is it the right endpoint for it?",
    "SignatureDoesNotMatch": "The secret key is wrong, or a proxy changes the request",
    "RequestTimeTooSkewed": "This machine's clock is wrong: set it (chronyc, ntpdate)",
    "ExpiredToken": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidToken": "AWS_SESSION_TOKEN does not belong to the access key",
    "AccessDenied": _MAY_NOT_READ,
    "AccountProblem": "The cloud's account is blocked: ask its owner",
    "InvalidObjectState": "The object is archived (Glacier): restore it first",
    "UserProjectMissing": "The bucket wants the requester to pay, which is not supported for gs://",
    "InvalidBucketName": "Check the bucket's name",
    # Azure
    "AuthenticationFailed": "The account's key or the signature is wrong or has expired",
    "AuthorizationPermissionMismatch": _AZURE_ROLE,
    "AuthorizationFailure": "The account's firewall does not admit this machine, or a role is lacking",
    "InvalidAuthenticationInfo": "The token is not for storage, or has expired",
    "NoAuthenticationInformation": "The container is not public: set credentials (docs/storage.md)",
    "PublicAccessNotPermitted": "The account allows no anonymous access: set credentials (docs/storage.md)",
    "AccountIsDisabled": "The storage account is disabled",
    "InvalidQueryParameterValue": "The shared access signature is damaged: quote it on the command line",
}  # fmt: skip
_OTHER_REGION = frozenset(
    {
        "PermanentRedirect",
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
        "TemporaryRedirect",
    }
)
_NO_CONTAINER = frozenset({"NoSuchBucket", "ContainerNotFound"})


class Refusal(Struct, frozen=True):
    """An answer that is no object."""

    status: int
    """0: there was no answer."""
    code: str
    """``AccessDenied``; empty where the store says none."""
    message: str
    region: str = ""
    """Where the bucket lies, if the store says so."""
    skew: float = 0.0
    """Seconds by which this machine's clock is ahead of the server's."""

    def __str__(self) -> str:
        text = " ".join(part for part in (str(self.status) if self.status else "", self.code) if part)
        return ": ".join(part for part in (text, self.message) if part)


def code_of(body: bytes) -> str:
    """``AccessDenied`` of an XML error body; empty when there is none."""
    return _found(_CODE, body)


def wording(head: Head, body: bytes) -> str:
    """``503 SlowDown: Please reduce your request rate``."""
    refusal = _refusal(head, body)
    return str(refusal) if refusal.code else f"{head.status} {head.reason}".strip()


def explain(name: str, settings: CloudSettings, head: Head, body: bytes) -> HotstartError:
    """The error for an answer that will be the same next time."""
    refusal = _refusal(head, body)
    if head.status == 404 and refusal.code not in _NO_CONTAINER:
        return ModelError(f"{name} does not exist ({settings.described})", advice="Check the location")
    return StorageError(
        f"{name}: {wording(head, body)} ({settings.described})", advice=cause_of(refusal, settings)
    )


def explain_client(name: str, settings: CloudSettings, doing: str, error: Exception) -> HotstartError:
    """The error for what ``obstore`` raised while ``doing`` (``list``, ``read``, ``sign a request for``)."""
    refusal = refusal_of_client(error)
    said = str(refusal) or _plain(str(error))
    # Signing asks nobody but the service that gives credentials.
    cause = settings.advice if doing.startswith("sign") else cause_of(refusal, settings)
    if doing == "list" and refusal.status in (401, 403) and refusal.code in ("", "AccessDenied"):
        cause = (
            "The credentials may not list (s3:ListBucket). Without a listing the weights must be one "
            "model.safetensors, or named by a model.safetensors.index.json"
        )
        if settings.base_url and not settings.query:
            cause = settings.advice or cause
    return StorageError(f"Cannot {doing} {name}: {said} ({settings.described})", advice=cause)


def refusal_of_client(error: Exception) -> Refusal:
    """What the store answered, or why there was no answer, from the text of ``obstore``'s errors."""
    text, _, debug = str(error).partition("\n\nDebug source:")
    status = re.search(r"status code: (\d{3})", text)
    if status:
        body = text[status.end() :].encode()
        return Refusal(int(status[1]), code_of(body), _found(_MESSAGE, body), _region(body))
    if "incorrectly configured region" in text:
        return Refusal(301, "PermanentRedirect", "")
    if "error sending request" in text or "HTTP error" in text:
        words = re.findall(
            r'message: "([^"]+)"|(failed to lookup address information[^"\\]*)'
            r"|(invalid peer certificate: \w+)|(operation timed out)",
            debug,
        )
        return Refusal(0, "", next(("".join(word) for word in reversed(words)), "no connection"))
    return Refusal(0, "", "")


def cause_of(refusal: Refusal, settings: CloudSettings) -> str:
    """The likely cause, and what to do about it; the settings' own advice where nothing is likelier."""
    if refusal.code in _OTHER_REGION or (refusal.status in (301, 307, 308) and refusal.region):
        where = f"the region {refusal.region}" if refusal.region else "another region"
        return f"The bucket lies in {where}: set AWS_REGION to it"
    if refusal.code in _NO_CONTAINER:
        other = "virtual" if "path style" in settings.described else "path"
        style = (
            f", and the addressing style (AWS_S3_ADDRESSING_STYLE={other})"
            if "style" in settings.described
            else ""
        )
        return f"Check the bucket's name and the endpoint{style}"
    if refusal.status in (400, 401, 403) and abs(refusal.skew) > _SKEW:
        way = "ahead of" if refusal.skew > 0 else "behind"
        return f"This machine's clock is {abs(refusal.skew) / 60:.0f} minutes {way} the store's: set it"
    if refusal.status in (401, 403) and settings.base_url and not settings.query and settings.advice:
        return settings.advice  # nothing was signed, for want of credentials
    if refusal.code == "AccessDenied" and "expired" in refusal.message.lower():
        return _EXPIRED
    if refusal.code in _CAUSES:
        return _CAUSES[refusal.code]
    if refusal.status in (401, 403):
        return settings.advice or _MAY_NOT_READ
    if failing := advice_on_failing(refusal.status):
        return failing
    if (
        re.search("lookup address|[Nn]ame or service", refusal.message)
        and "virtual-hosted" in settings.described
    ):
        return "Check the endpoint; with buckets in the path: AWS_S3_ADDRESSING_STYLE=path"
    if "certificate" in refusal.message:
        return "Name the file of the certificate's authority by AWS_CA_BUNDLE or SSL_CERT_FILE"
    if refusal.status == 0 and refusal.message:
        return "Check the endpoint and the network"
    return "" if refusal.status else settings.advice


def advice_on_failing(status: int) -> str:
    """What to do about a status that lasts though it may pass; empty: it is not of that kind."""
    if status in (429, 503, 509):
        return (
            "The store is overloaded, or limits requests: start fewer servers at once, lower the number of "
            "reads in flight (concurrency in --model-loader-extra-config), or ask for a higher limit; "
            "--storage-timeout waits longer"
        )
    if status in TRANSIENT:
        return "The store, or a proxy before it, fails: look at its log; --storage-timeout waits longer"
    return ""


def _refusal(head: Head, body: bytes) -> Refusal:
    region = head.headers.get("x-amz-bucket-region", "") or _region(body)
    code = code_of(body) or head.headers.get("x-ms-error-code", "")
    return Refusal(head.status, code, _found(_MESSAGE, body), region, _skew(head))


def _skew(head: Head) -> float:
    try:
        return time.time() - parsedate_to_datetime(head.headers.get("date", "")).timestamp()
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _region(body: bytes) -> str:
    found = _REGION.search(body)
    return (found[1] or found[2]).decode() if found else ""


def _found(pattern: re.Pattern[bytes], body: bytes) -> str:
    found = pattern.search(body)
    return " ".join(unescape(found[1].decode("utf-8", "replace")).split()) if found else ""


def _plain(text: str) -> str:
    """One line, without queries of addresses: signatures are in them."""
    text = text.partition("\n\nDebug source:")[0]
    return re.sub(r"\s+", " ", re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", text))[:400].strip()


def no_ranges(name: str) -> StorageError:
    """For a server whose answers begin at the first byte, whatever was asked for."""
    return StorageError(
        f"The server of {name} ignores Range and sends whole files",
        expected="a server that answers ranges (status 206)",
        advice="Serve the files by nginx, Apache or an object store, or copy them to a disk",
    )
