import json
import shlex
import socket
from pathlib import Path

import pytest

from deploy.up import StartError, curl_line, running_ray


def test_the_curl_line_can_be_pasted() -> None:
    words = shlex.split(curl_line("http://127.0.0.1:8061"))

    assert words[:3] == [
        "curl",
        "-N",
        "http://127.0.0.1:8061/api/v1/continue_from_conversation_history",
    ]
    assert json.loads(words[-1])["conversation_history"][0]["role"] == "user"


def test_the_curl_line_trusts_the_certificate_and_takes_the_key_from_the_environment() -> None:
    line = curl_line("https://127.0.0.1:1", certificate=Path("/a b.pem"), wants_key=True)

    words = shlex.split(line)
    assert words[:4] == ["curl", "-N", "--cacert", "/a b.pem"]
    assert '-H "authorization: Bearer $HEADRACE_INFERENCE_KEY"' in line
    assert json.loads(words[-1])["conversation_history"][0]["role"] == "user"


@pytest.fixture
def ray_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray"


def test_no_ray_runs_where_none_was_started(ray_folder: Path) -> None:
    assert running_ray() is None


def test_a_ray_that_answers_is_used(ray_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (ray_folder / "ray_current_cluster").write_text(address)

        assert running_ray() == address

    assert running_ray() is None  # its file outlives it


def test_the_environment_may_name_another_ray(
    ray_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert running_ray() == address

    with pytest.raises(StartError, match=address):
        running_ray()
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert running_ray() is None
