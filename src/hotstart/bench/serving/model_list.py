"""The name by which requests call the model: the server's list is asked before anything is measured."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import msgspec
from msgspec import Struct

from hotstart.bench.serving.client import Client, Response, Server
from hotstart.checkpoint.wording import few
from hotstart.errors import ConfigError, StorageError

PATH = "/v1/models"
_PAUSE = 0.5
"""Seconds between two looks at a server that is not ready."""


class Named(Struct, frozen=True):
    """A model, as it is called and as it is."""

    name: str
    """What requests say."""
    origin: str
    """What the server was started with, or what ``--model`` says: where a tokenizer may lie."""


async def find_model(
    server: Server, model: str | None, served_name: str | None, *, patience: float = 0.0
) -> Named:
    """The name to use, looked up in the server's list, which is waited for for ``patience`` seconds.

    Raises ``StorageError`` where nobody answers, ``ConfigError`` where the name is not on the list.
    """
    async with Client(server) as client:
        response = await _models(client, patience)
    wanted = served_name or model
    url = server.url + PATH
    if response.status != 200:
        if response.status in (401, 403):
            raise ConfigError(
                f"{url} answers {response.status}: {_shown(response)}",
                advice='Give the key: OPENAI_API_KEY=…, or --header "Authorization=Bearer …"',
            )
        if wanted is None or response.status == 503:
            raise StorageError(
                f"{url} answers {response.status}: {_shown(response)}",
                expected="the list of models",
                advice="Wait for a server that is starting: --ready-check-timeout-sec 600"
                if response.status == 503
                else "Name the model: --model NAME",
            )
        print(f"hotstart: {url} answers {response.status}: {wanted} is not looked up", file=sys.stderr)
        return Named(wanted, model or wanted)
    return _chosen(_entries(response, url), model, wanted, url)


def _chosen(entries: list[dict[str, Any]], model: str | None, wanted: str | None, url: str) -> Named:
    names = [str(entry["id"]) for entry in entries]
    if wanted is None:
        if len(names) > 1:
            print(f"hotstart: {names[0]} is the first of {few(names, 8)} at {url}", file=sys.stderr)
        return Named(names[0], str(entries[0].get("root") or names[0]))
    if wanted in names:
        return Named(wanted, model or wanted)
    nearest = next(
        (name for name, entry in zip(names, entries, strict=True) if entry.get("root") == wanted), ""
    )
    raise ConfigError(
        f"{wanted} is not served at {url}",
        expected=few(names, 8),
        advice=f"Call it by its name: --served-model-name {nearest or names[0]}",
    )


async def _models(client: Client, patience: float) -> Response:
    deadline = time.monotonic() + patience
    while True:
        try:
            response, problem = await client.get(PATH), ""
            if response.status != 503 or time.monotonic() >= deadline:
                return response
        except (OSError, ValueError) as error:
            problem = str(error) or type(error).__name__
        if time.monotonic() >= deadline:
            raise StorageError(
                f"no server answers at {client.server.url}: {problem}",
                advice="Start one, or wait for one that is starting: --ready-check-timeout-sec 600",
            )
        await asyncio.sleep(_PAUSE)


def _entries(response: Response, url: str) -> list[dict[str, Any]]:
    try:
        found = msgspec.json.decode(response.body)["data"]
        entries = [entry for entry in found if entry["id"]]
    except (msgspec.DecodeError, KeyError, TypeError):
        entries = []
    if not entries:
        raise ConfigError(f"{url} lists no model: {_shown(response)}", expected='{"data": [{"id": "NAME"}]}')
    return entries


def _shown(response: Response) -> str:
    return " ".join(response.body[:300].decode("utf-8", "replace").split())
