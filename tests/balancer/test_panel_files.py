"""The panel's files over real HTTP; what they do is tested in a browser."""

import re
from pathlib import Path

import httpx
import pytest

from balancer.panel_files import FOLDER

SOURCES = sorted(
    path.relative_to(FOLDER).as_posix()
    for path in FOLDER.rglob("*")
    if path.suffix in {".js", ".css", ".html", ".svg"}
)


async def test_the_panel_is_found_with_and_without_a_slash(client: httpx.AsyncClient) -> None:
    short = await client.get("/panel")
    page = await client.get("/panel/")

    assert (short.status_code, short.headers["location"]) == (307, "panel/")
    assert page.headers["content-type"].startswith("text/html")
    assert page.text == (FOLDER / "index.html").read_text()


async def test_nothing_but_what_comes_from_here_may_run_in_it(client: httpx.AsyncClient) -> None:
    policy = (await client.get("/panel/")).headers["content-security-policy"]

    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize(
    "path", ["nothing.js", "../balancer.py", "%2e%2e/balancer.py", "..%2fkeys.py", "vendor"]
)
async def test_nothing_else_is_served(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(f"/panel/{path}")).status_code == 404


@pytest.mark.parametrize("source", SOURCES)
def test_each_file_that_a_file_names_is_there(source: str) -> None:
    text = (FOLDER / source).read_text()
    named = re.findall(r"""(?:from|import|src=|href=|url\()\s*["']?(\.{1,2}/[^"')\s]+)""", text)

    missing = [name for name in named if not ((FOLDER / source).parent / name).is_file()]
    assert missing == []


@pytest.mark.parametrize("source", SOURCES)
def test_no_file_needs_another_server(source: str) -> None:
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", (FOLDER / source).read_text(), flags=re.DOTALL)

    assert not re.search(r"""(?:from|import\(|src=|href=)\s*["']https?:""", text)
    assert Path(source).name == source or source.startswith("vendor/")
