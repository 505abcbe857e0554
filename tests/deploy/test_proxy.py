import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from deploy.proxy import middlewares


async def names(request: Request) -> JSONResponse:
    return JSONResponse(sorted(request.headers.keys()))


@pytest.mark.parametrize("header", ["x-request-timeout-seconds", "X-Request-Disconnect-Disabled"])
async def test_clients_cannot_steer_serve_by_headers(header: str) -> None:
    app = Starlette(routes=[Route("/", names)], middleware=middlewares())
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        seen = (await client.get("/", headers={header: "1", "x-other": "1"})).json()

    assert "x-other" in seen
    assert header.lower() not in seen


@pytest.mark.parametrize(("given", "seen"), [({"x-request-id": "ours"}, "ours"), ({}, "serve's")])
async def test_an_answer_has_one_id_and_the_balancers_own_goes_first(
    given: dict[str, str], seen: str
) -> None:
    async def answer(_request: Request) -> JSONResponse:
        answer = JSONResponse(None, headers=given)
        answer.headers.append("x-request-id", "serve's")  # as its own middleware does it
        return answer

    app = Starlette(routes=[Route("/", answer)], middleware=middlewares())
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        response = await client.get("/")

    assert response.headers.get_list("x-request-id") == [seen]
