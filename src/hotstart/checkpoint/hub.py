"""Models by name from the hub, through huggingface_hub; only imported when a hub name is given.

The library honours HF_TOKEN, HF_HOME and the proxies; HF_ENDPOINT and HF_HUB_OFFLINE are read here,
at the time of the call. A complete local copy takes no lock and, offline, no network.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from glob import escape
from typing import Any

from msgspec import Struct

from hotstart.errors import ConfigError, HotstartError, ModelError, StorageError

SMALL = ("*.json", "*.txt", "*.jinja", "*.model")
"""All but the weights: a tokenizer's files among them."""
ALLOW = ("*.safetensors", *SMALL)
IGNORE = ["consolidated*", "original/*", "onnx/*", "openvino/*", "*.bin.index.json", "runs/*"]
"""Copies of the weights in other layouts."""

_SECONDS_BETWEEN_LINES = 5.0


class Files(Struct, frozen=True):
    """Which files are wanted of a model: ``allow`` has patterns."""

    allow: Sequence[str] = ALLOW
    choose: Callable[[Sequence[str]], Sequence[str]] | None = None
    """Given the names of all files, which of them are the weights; raises for what cannot be served.

    It is asked before anything is downloaded, if the hub can be; if not, patterns alone count.
    """


Report = Callable[[int, int], None]
"""Bytes that came, bytes known of. Called from several threads."""


def download(
    name: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | None = None,
    progress: bool = True,
    report: Report | None = None,
    files: Files | None = None,
) -> str:
    """Fetch what serving needs of a hub model, or these files; returns its snapshot directory.

    ``cache_dir`` None: huggingface_hub's own (HF_HUB_CACHE, HF_HOME). ``report`` is called with the
    bytes that came and the bytes known of, in place of any bar or line here. Raises ModelError when the
    model or revision does not exist, StorageError when the hub, or the right to read, is missing.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            f"{name} is a name on the hub, and huggingface_hub is not installed",
            advice=f"Run pip install huggingface_hub; if a directory is meant: ./{name}",
        ) from None
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
    files = files or Files()
    allow = list(files.allow)
    if files.choose is not None and (names := [] if offline else _names(name, revision, token, endpoint)):
        allow = [*SMALL, *map(escape, files.choose(names))]
    try:
        return str(
            snapshot_download(
                name,
                revision=revision,
                token=token or None,
                cache_dir=cache_dir,
                endpoint=endpoint,
                local_files_only=offline,
                allow_patterns=allow,
                ignore_patterns=IGNORE,
                tqdm_class=_reporting_class(report) if report else _progress_class(progress),
            )
        )
    except Exception as error:
        raise _translate(error, name, revision, endpoint or "https://huggingface.co", offline) from error


def _names(name: str, revision: str | None, token: str | None, endpoint: str | None) -> list[str]:
    """Of all files; none where the hub does not tell, which is told by the download if it matters."""
    from huggingface_hub import HfApi

    try:
        found = HfApi(endpoint=endpoint, token=token or None).model_info(name, revision=revision or "main")
    except Exception:
        return []
    return [each.rfilename for each in found.siblings or []]


def _translate(
    error: Exception, name: str, revision: str | None, endpoint: str, offline: bool
) -> HotstartError:
    from huggingface_hub import errors

    at = f" at revision {revision}" if revision else ""
    path_advice = f"if a directory is meant, pass ./{name}"
    if isinstance(error, errors.GatedRepoError):
        return StorageError(
            f"{endpoint} refuses {name} (gated: {_status(error)})",
            expected="a token of an account that was granted access",
            advice=f"Ask for access at {endpoint}/{name}, then set HF_TOKEN",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(f"{endpoint} has {name}, but no revision {revision}", advice="Correct --revision")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelError(
            f"{endpoint} has no model {name} that this token may see ({_status(error)})",
            advice=f"Check the name; for a private model set HF_TOKEN; {path_advice}",
        )
    if isinstance(error, errors.HfHubHTTPError) and _status(error).startswith(("401", "403")):
        return StorageError(
            f"{endpoint} refuses {name} ({_status(error)})", advice="Set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        if offline:
            return StorageError(
                f"{name}{at} is not complete in the local cache, and HF_HUB_OFFLINE forbids downloading it",
                expected="a complete copy",
                advice=f"Download it once with HF_HUB_OFFLINE unset, or pass a directory; {path_advice}",
            )
        return _unreachable(error.__cause__ or error, name, endpoint, path_advice)
    if isinstance(error, errors.HFValidationError):
        return ConfigError(f"{name!a} is no name on the hub", advice=path_advice)
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return StorageError(
            f"Cannot write {error.filename}: {error.strerror}",
            advice="Choose a writable place with enough space: --download-dir, or --cache-root",
        )
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return StorageError(f"Downloading {name} failed: {error.strerror}", advice="See --download-dir")
    return _unreachable(error, name, endpoint, path_advice)


def _unreachable(cause: BaseException, name: str, endpoint: str, path_advice: str) -> StorageError:
    first = str(cause).strip().split("\n")[0][:300]
    return StorageError(
        f"{name} could not be fetched from {endpoint}: {type(cause).__name__}: {first}",
        advice=f"Check network, proxy and HF_ENDPOINT (mirrors); {path_advice}",
    )


def _status(error: Any) -> str:
    """``403 Forbidden`` of the response that the error carries."""
    response = getattr(error, "response", None)
    if response is None:
        return "no answer"
    return f"{response.status_code} {getattr(response, 'reason_phrase', '')}".strip()


def _progress_class(progress: bool) -> type[Any] | None:
    """None: the library's bar; without a terminal, whole lines every few seconds."""
    if progress and sys.stderr.isatty():
        return None
    from huggingface_hub.utils.tqdm import tqdm

    class Lines(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            kwargs.update(file=_LineWriter(), mininterval=_SECONDS_BETWEEN_LINES, disable=not progress)
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

    return Lines


def _reporting_class(report: Report) -> type[Any]:
    """Draws nothing. The library has one bar of bytes that arrive and may have one of bytes written."""
    from huggingface_hub.utils.tqdm import tqdm

    class Reporting(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._done = 0 if kwargs.get("unit") == "B" else None
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            if self._done is not None:
                self._done += int(n or 0)
                report(self._done, int(self.total or 0))

    return Reporting


class _LineWriter:
    """A file for tqdm that turns its redrawing into a line now and then."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def write(self, text: str) -> None:
        line = text.strip("\r\n ")
        if line and time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            sys.stderr.write(line + "\n")

    def flush(self) -> None:
        sys.stderr.flush()
