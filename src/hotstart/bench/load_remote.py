"""Loaders of object stores: plain HTTP readers, and other people's clients, all with ranges of 16 MiB.

Each fills one new buffer a file, several ranges at once. The addresses are signed before the clock
starts, and the names and sizes of the files are known: these are readers, ours plans too.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from http.client import HTTPConnection, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from hotstart.bench.load_loader import Load, Loaded, Loader, Task, of_images
from hotstart.bench.load_readers import MIB, Read, read_parallel
from hotstart.storage.location import parse_location, quoted
from hotstart.storage.object_store import ObjectStore

CHUNK = 16 * MIB
THREADS = 4
CEILING = "http.client"
"""What a plain reader gets from the same server is the ceiling of an object store."""


def _buffers(task: Task, read: Read) -> Load:
    def load() -> Loaded:
        images = read_parallel([size for _, size in task.files], THREADS, CHUNK, read)
        return Loaded(of_images(task.files, images), images)

    return load


def _store(task: Task) -> tuple[ObjectStore, list[str]]:
    """The store, and the keys of the files."""
    location = parse_location(task.location)
    store = ObjectStore(location, environ=os.environ)
    return store, [location.key(path[len(str(location)) + 1 :]) for path, _ in task.files]


def _http_client(task: Task) -> Load:
    store, keys = _store(task)
    settings = store.settings
    if settings.base_url:
        query = f"?{settings.query}" if settings.query else ""
        urls = [f"{settings.base_url}/{quoted(key)}{query}" for key in keys]
    else:
        obstore = importlib.import_module("obstore")
        client = settings.open(store.location)
        urls = [obstore.sign(client, "GET", key, timedelta(hours=1)) for key in keys]
    mine = threading.local()

    def read(file: int, offset: int, view: memoryview) -> None:
        parts = urlsplit(urls[file])
        if getattr(mine, "place", None) != parts.netloc:
            mine.place = parts.netloc
            kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
            mine.connection = kind(parts.netloc, timeout=60)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        headers = {**settings.headers, "Range": f"bytes={offset}-{offset + len(view) - 1}"}
        mine.connection.request("GET", target, headers=headers)
        answer = mine.connection.getresponse()
        if answer.status != 206:
            raise OSError(f"the server answers a range with {answer.status} {answer.reason}")
        _fill(answer.readinto, view)
        answer.read()

    return _buffers(task, read)


def _fill(readinto: Callable[[memoryview], int], view: memoryview) -> None:
    while len(view):
        got = readinto(view)
        if not got:
            raise OSError("the answer is shorter than its range")
        view = view[got:]


def _obstore(task: Task) -> Load:
    obstore = importlib.import_module("obstore")
    store, keys = _store(task)
    client: Any
    if store.location.is_web:
        parts = urlsplit(store.settings.base_url)
        client = importlib.import_module("obstore.store").HTTPStore.from_url(
            store.settings.base_url, client_options={"allow_http": parts.scheme == "http"}
        )
    else:
        client = store.settings.open(store.location)

    def read(file: int, offset: int, view: memoryview) -> None:
        view[:] = memoryview(obstore.get_range(client, keys[file], start=offset, length=len(view)))

    return _buffers(task, read)


def _boto3(task: Task) -> Load:
    boto3 = importlib.import_module("boto3")
    config = importlib.import_module("botocore.config").Config(
        max_pool_connections=THREADS,
        s3={"addressing_style": "path"} if os.environ.get("AWS_ENDPOINT_URL") else {},
    )
    client = boto3.session.Session().client("s3", config=config)
    store, keys = _store(task)

    def read(file: int, offset: int, view: memoryview) -> None:
        asked = f"bytes={offset}-{offset + len(view) - 1}"
        answer = client.get_object(Bucket=store.location.container, Key=keys[file], Range=asked)
        _fill(answer["Body"].readinto, view)

    return _buffers(task, read)


_CLOUDS = ("s3", "gs", "az", "http", "https")

REMOTE = {
    CEILING: Loader(_http_client, schemes=("s3", "http", "https")),
    "obstore": Loader(_obstore, "obstore", ("obstore",), schemes=_CLOUDS),
    "boto3": Loader(_boto3, "boto3", ("boto3",), schemes=("s3",)),
}
