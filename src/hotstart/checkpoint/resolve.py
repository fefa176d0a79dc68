"""From what stands on the command line to a directory: a path is a path, anything else is on the hub.

A path never touches the network, and a mistyped one is told apart from a hub name by its first
character, so that a missing mount does not end in a message about repository names.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING
from urllib.parse import unquote

from hotstart.config.paths import absolute
from hotstart.errors import ConfigError, HotstartError, ModelError
from hotstart.storage.access import read_error
from hotstart.storage.location import is_hub_page, is_location, scheme_of
from hotstart.storage.mounts import container, mounts

if TYPE_CHECKING:
    from hotstart.checkpoint.hub import Files

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_MAX_NEIGHBOURS = 10_000


def resolve(
    model: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    download_dir: str | None = None,
    hub_cache: str | None = None,
    progress: bool = True,
    report: Callable[[int, int], None] | None = None,
    files: Files | None = None,
) -> str:
    """The absolute directory of a model; downloads it when ``model`` is a hub name.

    ``download_dir`` is where the user wants hub models, ``hub_cache`` where they are kept otherwise
    (None: huggingface_hub's own place). ``report`` follows a download in place of a bar;
    ``files`` are those that are downloaded, None: what serving takes of a plain checkpoint. Raises
    ConfigError for what cannot be a model, ModelError for what does not exist, StorageError for
    what cannot be reached.
    """
    if scheme := scheme_of(model):
        raise _no_scheme(model, scheme)
    if is_path(model):
        return _directory(model)
    if not _HUB_NAME.fullmatch(model) or ".." in model or "--" in model:
        raise ConfigError(
            f"{model!a} is neither a directory here nor a name on the hub",
            expected="a path that starts with /, . or ~, a hub name such as Qwen/Qwen3-0.6B, or an address "
            "such as s3://BUCKET/PREFIX",
            advice=f"If a directory is meant: ./{model}",
        )
    from hotstart.checkpoint.hub import download

    return download(
        model,
        revision=revision,
        token=token,
        cache_dir=download_dir or hub_cache,
        progress=progress,
        report=report,
        files=files,
    )


def is_path(model: str) -> bool:
    """Whether a value names something on this machine: by its first character, or because it exists."""
    return model.startswith(("/", ".", "~")) or os.path.exists(model)


def _directory(model: str) -> str:
    path = absolute(model)
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        if _looks_like_device(path):
            raise _device(path) from None
        raise _absent(path) from None
    except OSError as error:
        raise read_error(path, error, doing="open") from None
    if stat.S_ISBLK(mode) or stat.S_ISCHR(mode):
        raise _device(path)
    return path  # a file is refused, by its kind, where the weights are chosen


def _absent(path: str) -> HotstartError:
    """Names the first component that does not exist, and what its parent holds instead."""
    parent, name = os.sep, ""
    for name in path.strip(os.sep).split(os.sep):
        below = os.path.join(parent, name)
        if not os.path.lexists(below):
            break
        if not os.path.exists(below):
            return ModelError(
                f"{path} does not exist: {below} is a symbolic link to {os.readlink(below)}, which is absent",
                advice=_mount_advice(path) or "Mount or copy the link's target",
            )
        if not os.path.isdir(below):
            return ModelError(f"{path} does not exist: {below} is a file", expected="a directory")
        parent = below
    try:
        siblings = [entry.name for entry, _ in zip(os.scandir(parent), range(_MAX_NEIGHBOURS), strict=False)]
    except OSError as error:
        return read_error(parent, error, doing="list")
    found = f"{path} does not exist: there is no {name!a} in {parent}"
    if not siblings:
        return ModelError(
            f"{found}, which is empty",
            expected="a model's directory",
            advice=_mount_advice(path) or f"If a volume should be mounted at {parent}, mount it",
        )
    return ModelError(found, expected="a model's directory", advice=_suggestion(path, parent, name, siblings))


def _suggestion(path: str, parent: str, name: str, siblings: Sequence[str]) -> str:
    folded = {sibling.lower(): sibling for sibling in siblings}
    near = [folded[match] for match in get_close_matches(name.lower(), folded, n=3, cutoff=0.6)]
    if near:
        return "Did you mean " + " or ".join(os.path.join(parent, sibling) for sibling in near) + "?"
    if advice := _mount_advice(path):
        return advice
    shown = ", ".join(sorted(s for s in siblings if not s.startswith("."))[:5])
    return f"{parent} holds {shown}" if shown else ""


def _mount_advice(path: str) -> str:
    kind = container()
    if not kind:
        return ""
    how = (
        "add a volume and a volumeMount with this mountPath to the pod"
        if kind == "kubernetes"
        else f"docker run -v {path}:{path}:ro"
    )
    return f"This process runs in a container: the host's directory must be mounted at the same path ({how})"


def _looks_like_device(path: str) -> bool:
    return path.startswith("/dev/") and not path.startswith(("/dev/shm/", "/dev/mqueue/"))


def _device(path: str) -> ConfigError:
    mounted = [m for m in mounts() if m.source == path or re.fullmatch(re.escape(path) + r"p?\d+", m.source)]
    how = f"mount {path} /mnt, then hotstart serve /mnt/MODEL"
    if mounted:
        how = f"{mounted[0].source} is mounted at {mounted[0].mount_point}"
    return ConfigError(
        f"{path} is a device, not a directory",
        expected="a model's directory",
        advice=f"Mount it and pass the directory: {how}",
    )


def _no_scheme(model: str, scheme: str) -> ConfigError:
    shown = model.partition("?")[0]
    if is_hub_page(model):
        return _hub_page(shown)
    if scheme == "file":
        path = unquote(re.sub(r"^file://(?:localhost(?=/))?", "", model, flags=re.IGNORECASE))
        return ConfigError(f"{shown} is a URL", expected="a path", advice=f"Pass the path: {path}")
    if scheme == "hf":
        name = shown[len("hf://") :].removeprefix("models/").strip("/")
        return ConfigError(
            f"{shown} is a URL", expected="the name of a model on the hub", advice=f"Pass the name: {name}"
        )
    if is_location(model):
        return ConfigError(
            f"{shown} lies in an object store or on a web server, from where only the model itself is read",
            expected="a directory or a name on the hub",
            advice="Copy these files to a directory and pass that",
        )
    return ConfigError(
        f"{shown} is a URL, and {scheme}:// is no storage that hotstart reads",
        expected="a directory, a name on the hub, or an address that starts with s3://, gs://, az:// or http(s)://",
        advice="Copy the model to a directory, or mount its file system, and pass the directory",
    )


def _hub_page(shown: str) -> ConfigError:
    """The address of a page, from a browser: which name it shows, and of which revision."""
    found = re.fullmatch(
        r"https?://[^/]+/([\w.-]+/[\w.-]+)(?:/(?:tree|blob|resolve|raw)/([^/#]+).*|[/#].*)?", shown
    )
    if found is None or found[1].startswith(("datasets/", "spaces/", "docs/")):
        return ConfigError(
            f"{shown} is a page of the hub, not a model", expected="a name such as Qwen/Qwen3-0.6B"
        )
    revision = f" --revision {found[2]}" if found[2] and found[2] != "main" else ""
    return ConfigError(
        f"{shown} is a page of the hub",
        expected="the name of a model there",
        advice=f"Pass its name on the hub: {found[1]}{revision}",
    )
