"""What holds for all routes: which web pages may use them."""

from collections.abc import AsyncGenerator

import httpx
import pytest
from serving import serving
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Origin

from balancer.app import create_app
from balancer.balancer import Balancer

PAGE = "https://chat.example"


@pytest.fixture
async def open_to_a_page(balancer: Balancer) -> AsyncGenerator[str]:
    """The routes under a real server that lets one page in: ``127.0.0.1:PORT``."""
    async with serving(create_app(balancer, origins=[PAGE])) as port:
        yield f"127.0.0.1:{port}"
        balancer.close()


async def test_a_page_that_is_allowed_may_ask_and_read(open_to_a_page: str) -> None:
    async with httpx.AsyncClient(base_url=f"http://{open_to_a_page}", trust_env=False) as client:
        asked = await client.options(
            "/api/v1/balancer_desired_state",
            headers={
                "origin": PAGE,
                "access-control-request-method": "PUT",
                "access-control-request-headers": "authorization, content-type, x-stainless-os",
            },
        )
        read = await client.get("/api/v1/agents", headers={"origin": PAGE})

    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert asked.headers["access-control-max-age"] == "3600"
    methods = asked.headers["access-control-allow-methods"].split(", ")
    assert set(methods) == {"DELETE", "GET", "PATCH", "POST", "PUT", "OPTIONS"}
    allowed = asked.headers["access-control-allow-headers"].split(", ")
    assert {"authorization", "content-type", "x-stainless-os"} <= set(allowed)
    assert "x-request-id" in read.headers["access-control-expose-headers"]
    assert read.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1", "http://[", "http://a:b"]
)
async def test_other_pages_can_do_nothing(
    client: httpx.AsyncClient, address: str, origin: str
) -> None:
    """A body that a page calls text is sent without asking, and so are websockets."""
    response = await client.post(
        "/api/v1/continue_from_raw_prompt",
        content=b'{"raw_prompt": "Hi", "max_tokens": 1}',
        headers={"origin": origin, "content-type": "text/plain"},
    )
    assert response.status_code == 403
    with pytest.raises(InvalidStatus):
        await connect(f"ws://{address}/api/v1/inference_socket", proxy=None, origin=Origin(origin))


async def test_a_page_of_our_own_address_needs_no_leave(
    client: httpx.AsyncClient, address: str
) -> None:
    origin = f"http://{address}"

    assert (await client.get("/health", headers={"origin": origin})).status_code == 200
    socket = await connect(
        f"ws://{address}/api/v1/inference_socket", proxy=None, origin=Origin(origin)
    )
    await socket.close()


async def test_an_allowed_page_may_open_a_websocket(open_to_a_page: str) -> None:
    socket = await connect(
        f"ws://{open_to_a_page}/api/v1/inference_socket", proxy=None, origin=Origin(PAGE)
    )
    await socket.close()


async def test_a_name_that_was_made_to_point_here_is_not_our_own(
    client: httpx.AsyncClient,
) -> None:
    headers = {"origin": "http://evil.example:8061", "host": "evil.example:8061"}

    assert (await client.get("/api/v1/agents", headers=headers)).status_code == 403
