"""Settings reach another process as they are."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from common.models import (
    CacheType,
    EngineChoices,
    FlashAttention,
    HuggingFaceModel,
    KvLayout,
    LocalModel,
    ModelReference,
    NoModel,
    UrlModel,
)
from deploy.logs import LogFormat
from deploy.settings import AgentSettings, BalancerSettings, EngineKind, from_line, to_line

MODELS: list[ModelReference | None] = [
    None,
    NoModel(),
    LocalModel("/a\nb.gguf"),
    HuggingFaceModel("who/what", "a.gguf", "main"),
    UrlModel("http://host/a.gguf", "00"),
]


@pytest.mark.parametrize("pinned", MODELS)
def test_agents_settings_come_back_from_one_line(pinned: ModelReference | None) -> None:
    settings = AgentSettings(
        balancers=("ws://host:1", "ws://host:2"),
        name="Zoë",
        engine=EngineKind.LLAMA,
        choices=EngineChoices(
            slots=2,
            tensor_split=(3.0, 1.0),
            flash_attention=FlashAttention.ON,
            v_cache_dtype=CacheType.Q8_0,
        ),
        labels=("gpu", "big"),
        fleet="chat",
        pinned=pinned,
        kv_layout=KvLayout.SEPARATE,
        kv_cells=64,
        longest_gap=0.5,
        key_file="/keys",
        tls_ca="/ca.pem",
        tls_pin="/own.pem",
        tls_pin_text="a text\nof lines\n",
        log_format=LogFormat.JSON,
    )

    line = to_line(settings)

    assert b"\n" not in line
    assert from_line(line) == settings


def test_a_certificate_and_its_key_go_together() -> None:
    BalancerSettings(tls_cert=Path("/own.pem"), tls_key=Path("/own.key"))
    for half in ({"tls_cert": "/own.pem"}, {"tls_key": "/own.key"}):
        with pytest.raises(ValidationError, match="go together"):
            BalancerSettings.model_validate(half)
