"""The clients' address: all HTTP routes and the websocket, as one ASGI application.

A plain Starlette factory that knows nothing of Ray: tests run it under uvicorn. Each route is a
thin translation between a protocol and the balancer's methods.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial, wraps
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute

from balancer import panel_files as panel
from balancer.balancer import Balancer
from balancer.fleet_routes import FleetRoutes
from balancer.gate import Gate
from balancer.http import KeyHolders, OwnOrigin, Refused, error_answer
from balancer.inference import Inference
from balancer.interrupted import ERROR_CODE
from balancer.keys import OPEN, Keys
from balancer.management import Management
from balancer.openai import KEEP_ALIVE, OpenAI, openai_errors
from balancer.openai_errors import parameters_of
from balancer.openai_responses import RESPONSES_PARAMETERS
from balancer.operating import Operating
from balancer.overview import Overview
from balancer.state_store import StateError
from balancer.status_stream import StatusStream
from balancer.wishes import Wishes
from common.errors import ErrorCode, RequestError
from common.faults import fault

log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(
    balancer: Balancer,
    wishes: Wishes | None = None,
    *,
    origins: Sequence[str] = (),
    keys: Keys = OPEN,
    keep_alive: float = KEEP_ALIVE,
) -> Starlette:
    """``wishes``: where the desired state is put; None: what keeps none. ``origins``: of other web
    pages that may use these routes, such as ``https://chat.example``. ``keys``: of those who may
    use them. ``keep_alive``: in seconds, for OpenAI's streams.
    """
    inference = Inference(balancer)
    openai = OpenAI(balancer, keep_alive=keep_alive)
    wishes = wishes or Wishes(balancer)
    management = Management(balancer, wishes)
    fleets = FleetRoutes(balancer, wishes, management.stream)
    overview = Overview(balancer, fleets.told, version=version("headrace"))
    status = StatusStream(balancer, overview.state)
    operating = Operating(balancer, overview)
    refused = balancer.records.refused
    plain = partial(_plain_errors, refused=refused)
    return Starlette(
        middleware=[
            Middleware(OwnOrigin, origins=origins, refused=refused),
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["DELETE", "GET", "PATCH", "POST", "PUT", "OPTIONS"],
                # Clients add headers of their own, and the pages are named one by one.
                allow_headers=["*"],
                expose_headers=["etag", "x-request-id", "retry-after", ERROR_CODE],
                max_age=3600,
            ),
            Middleware(Gate, limits=balancer.limits, tally=balancer.tally, refused=refused),
            Middleware(KeyHolders, keys=keys, refused=refused),
        ],
        routes=[
            Route("/health", management.health),
            Route(
                "/api/v1/continue_from_conversation_history",
                plain(inference.conversation),
                methods=["POST"],
            ),
            Route(
                "/api/v1/continue_from_raw_prompt",
                plain(inference.raw_prompt),
                methods=["POST"],
            ),
            Route(
                "/api/v1/generate_embedding_batch",
                plain(inference.embeddings),
                methods=["POST"],
            ),
            WebSocketRoute("/api/v1/inference_socket", inference.socket),
            Route("/api/v1/agents", management.agents),
            Route("/api/v1/agents/stream", management.agents_stream),
            Route("/api/v1/buffered_requests", management.buffered),
            Route("/api/v1/buffered_requests/stream", management.buffered_stream),
            Route("/api/v1/balancer_desired_state", management.desired_state),
            Route(
                "/api/v1/balancer_desired_state",
                plain(management.put_desired_state),
                methods=["PUT"],
            ),
            Route("/api/v1/balancer_desired_state/schema", management.desired_state_schema),
            Route("/api/v1/balancer_applicable_state", management.applicable_state),
            Route("/api/v1/agent_overrides", management.agent_overrides),
            Route(
                "/api/v1/agent_overrides",
                plain(management.put_agent_overrides),
                methods=["PUT"],
            ),
            Route(
                "/api/v1/agent/{agent_id}/chat_template_override",
                plain(management.chat_template_override),
            ),
            Route(
                "/api/v1/agent/{agent_id}/model_metadata",
                plain(management.model_metadata),
            ),
            Route("/api/v1/agent/{agent_id}/status", plain(management.status)),
            Route("/api/v1/agent/{agent_id}/drain", plain(operating.drain), methods=["POST"]),
            Route("/api/v1/agent/{agent_id}/undrain", plain(operating.undrain), methods=["POST"]),
            Route("/api/v1/overview", plain(status.overview)),
            Route("/api/v1/events", plain(status.events)),
            Route("/api/v1/requests", plain(operating.requests)),
            Route("/api/v1/requests/{request_id}", plain(operating.request)),
            Route(
                "/api/v1/requests/{request_id}", plain(operating.end_request), methods=["DELETE"]
            ),
            Route("/api/v1/chat_template_preview", plain(operating.preview), methods=["POST"]),
            Route("/api/v1/fleets", plain(fleets.all)),
            Route("/api/v1/fleets/stream", fleets.all_stream),
            Route("/api/v1/fleets/{name}", plain(fleets.one)),
            Route("/api/v1/fleets/{name}", plain(fleets.put), methods=["PUT"]),
            Route("/api/v1/fleets/{name}", plain(fleets.patch), methods=["PATCH"]),
            Route("/api/v1/fleets/{name}", plain(fleets.delete), methods=["DELETE"]),
            Route("/metrics", management.metrics),
            *panel.routes(),
            *_openai_routes(openai, refused),
        ],
        exception_handlers={404: _unknown, 405: _unknown},
    )


def _openai_routes(openai: OpenAI, refused: Refused) -> list[Route]:
    told = partial(openai_errors, refused=refused)
    endpoints = {
        "chat/completions": (openai.chat, parameters_of("messages")),
        "responses": (openai.responses, RESPONSES_PARAMETERS),
        "completions": (
            openai.completions,
            {**parameters_of("prompt"), ErrorCode.INVALID_SCHEMA: "json_schema"},
        ),
        "embeddings": (openai.embeddings, parameters_of("input")),
        "tokenize": (openai.tokenize, parameters_of("messages")),
        "detokenize": (openai.detokenize, parameters_of("tokens")),
    }
    return [
        Route("/v1/models", told(openai.models)),
        Route("/v1/models/{model:path}", told(openai.model)),
        *(
            Route(f"/v1/{path}", told(endpoint, parameters), methods=["POST"])
            for path, (endpoint, parameters) in endpoints.items()
        ),
    ]


async def _unknown(request: Request, error: Exception) -> Response:
    """No such route, or not with this method."""
    assert isinstance(error, HTTPException)
    if request.url.path.startswith("/v1/"):
        message = f"{error.detail}: {request.method} {request.url.path}"
        body = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": body}, error.status_code, error.headers)
    return PlainTextResponse(error.detail, error.status_code, error.headers)


def _plain_errors(endpoint: Endpoint, refused: Refused) -> Endpoint:
    """Errors before a stream begins are plain text with the fitting status."""

    @wraps(endpoint)
    async def wrapped(request: Request) -> Response:
        try:
            return await endpoint(request)
        except RequestError as error:
            refused(error)
            return error_answer(request.url.path, error)
        except StateError as error:
            return PlainTextResponse(f"{error}\n", status_code=500)
        except ClientDisconnect:
            return Response(status_code=400)  # it left while it was sending; nobody reads this
        except Exception as error:  # its text may quote a prompt, and Serve would log it
            log.error("fault=%s in %s", fault(error), request.url.path)  # noqa: TRY400
            return PlainTextResponse("a fault of this server\n", status_code=500)

    return wrapped
