"""Settings reach another process as they are."""

import pytest

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
from deploy.settings import AgentSettings, EngineKind, from_line, to_line

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
    )

    line = to_line(settings)

    assert b"\n" not in line
    assert from_line(line) == settings
