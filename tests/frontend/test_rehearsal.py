"""What a start does so that the first request costs what the second does."""

from __future__ import annotations

from hotstart.frontend import parsing

from .conftest import Launch


def test_a_server_that_is_ready_has_no_decoder_left_to_build(launch: Launch) -> None:
    parsing._decoder.cache_clear()
    server = launch()

    server.make_ready()

    with server.client() as client:  # whatever the loop was to do first, it has done when it answers
        assert client.get("/health").status_code == 200
    assert parsing._decoder.cache_info().currsize == 2
