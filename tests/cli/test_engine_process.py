"""The engine as a child: its end is news to every thread that waits for it."""

from __future__ import annotations

import threading

import pytest

from hotstart.cli import engine_process
from hotstart.cli.engine_process import EngineProcess


@pytest.mark.parametrize("turn", range(5))
def test_all_who_wait_for_the_same_child_learn_how_it_ended(
    turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "_CODE", "import os; os._exit(7)  # {fd} {parent}")
    engine = EngineProcess()
    ends: list[int | None] = []
    waiting = [threading.Thread(target=lambda: ends.append(engine.reap(60))) for _ in range(8)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    engine.socket.close()
    assert ends == [7] * 8
