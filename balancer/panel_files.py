"""The operators' panel: the files of ``panel/``, as they are. What they show comes from other routes,
which want a key; these want none, since there is nothing in them but the program.
"""

from os import PathLike, stat_result
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parent / "panel"

HEADERS = {
    # Nothing but what comes from here, and no page of others around it.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Asked anew each time, so that all files are of one version.
    "cache-control": "no-cache",
}


class _PanelFiles(StaticFiles):
    def get_path(self, scope: Scope) -> str:
        return super().get_path({**scope, "path": f"/{scope['path_params']['path']}"})

    def file_response(
        self,
        full_path: PathLike[str] | str,
        stat_result: stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(HEADERS)
        return response


async def _add_slash(_request: Request) -> Response:
    """Said relative to the path that the browser knows, which a proxy may have made longer."""
    return RedirectResponse("panel/")


def routes() -> list[Route]:
    return [
        Route("/panel", _add_slash),
        Route("/panel/{path:path}", _PanelFiles(directory=FOLDER, html=True)),
    ]
