"""What ``hotstart check`` says of a loader of another library, once the weight files are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotstart.device import host
from hotstart.device.choose import choose
from hotstart.loading.streams.base import adapter_of, check_limit, request_for

if TYPE_CHECKING:
    from hotstart.checkpoint.base import Checkpoint
    from hotstart.config.settings import Config
    from hotstart.loading.match import Matched


def handed_over(config: Config, checkpoint: Checkpoint, matched: Matched) -> str:
    """What the library will be told: one line.

    Raises ConfigError for a limit or for credentials that it cannot take, DeviceError for the device.
    """
    choice = choose(config.device.device)
    device = choice.torch_name if choice.kind == "cuda" else "cpu"
    request = request_for(checkpoint, matched, config.load, device, host.memory().available)
    check_limit(request)
    return f"would be told: {adapter_of(config.load.load_format).plan(request)}"
