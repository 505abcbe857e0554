import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from balancer.desired_state import AgentOverrides, BalancerDesiredState
from balancer.state_store import FileStore, MemoryStore, StateError, open_store
from balancer.stored_state import StoredState


def stored(**changes: Any) -> StoredState:
    state = BalancerDesiredState.defaults().model_dump(by_alias=True)
    overrides = AgentOverrides.model_validate({"overrides": [{"name": "a", "slots": 2}]})
    return StoredState(
        balancer_desired_state=BalancerDesiredState.model_validate({**state, **changes}),
        agent_overrides=overrides,
        declared=1,
    )


NEW = stored(model={"LocalToAgent": "/models/new.gguf"})


def test_nothing_is_kept_at_first(tmp_path: Path) -> None:
    assert open_store("memory://").load() is None
    assert open_store(f"file://{tmp_path}/state.json").load() is None


def test_what_is_kept_in_a_file_is_there_again(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/a%20folder/state.json"
    open_store(url).save(stored())
    open_store(url).save(NEW)

    assert open_store(url).load() == NEW
    assert [path.name for path in (tmp_path / "a folder").iterdir()] == ["state.json"]


def test_only_its_owner_may_read_the_file(tmp_path: Path) -> None:
    FileStore(tmp_path / "state.json").save(NEW)

    assert (tmp_path / "state.json").stat().st_mode & 0o777 == 0o600


def test_memory_forgets() -> None:
    store = MemoryStore()
    store.save(NEW)

    assert store.load() is None


def test_a_file_of_the_published_form_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    state = json.loads(BalancerDesiredState.defaults().model_dump_json(by_alias=True))
    path.write_text(json.dumps({"balancer_desired_state": state, "version": "1"}))

    kept = FileStore(path).load()

    assert kept is not None
    assert kept.balancer_desired_state == BalancerDesiredState.defaults()
    later = StoredState(balancer_desired_state=NEW.balancer_desired_state, declared=9)
    assert kept.merged(later).balancer_desired_state == kept.balancer_desired_state


def test_an_empty_file_is_as_none(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("\n")

    assert FileStore(path).load() is None


@pytest.mark.parametrize("text", ["{", "[]", '{"version": "2"}'])
def test_a_file_that_cannot_be_understood_is_named_and_left_alone(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)

    with pytest.raises(StateError, match=r"state\.json is not a desired state.*mend it or move it"):
        FileStore(path).load()
    assert path.read_text() == text


def test_what_a_killed_writer_left_half_written_is_gone_with_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    FileStore(path).save(NEW)
    (tmp_path / ".state.json.new").write_text('{"balancer_des')

    assert FileStore(path).load() == NEW
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_a_file_that_cannot_be_written_keeps_what_it_had(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")

    with pytest.raises(StateError, match=r"cannot be written: (File exists|Not a directory)"):
        FileStore(tmp_path / "file" / "state.json").save(NEW)
    assert (tmp_path / "file").read_text() == "not a folder"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "state.json",
        "file://",
        "file:x",
        "file:///x?y",
        "file:///x#y",
        "file://host/x",
        "redis://x",
    ],
)
def test_another_kind_of_store_is_refused(url: str) -> None:
    with pytest.raises(StateError, match="neither memory:// nor file:///PATH"):
        open_store(url)


WRITER = """
import sys
from pathlib import Path
from balancer.desired_state import BalancerDesiredState
from balancer.state_store import FileStore
from balancer.stored_state import StoredState

store = FileStore(Path(sys.argv[1]))
state = BalancerDesiredState.defaults()
n = 0
while True:
    n += 1
    model = {"LocalToAgent": "/models/" + "x" * (n % 5000)}
    new = BalancerDesiredState.model_validate({**state.model_dump(by_alias=True), "model": model})
    store.save(StoredState(balancer_desired_state=new))
    print(n, flush=True)
"""


@pytest.mark.parametrize("writes", [1, 7, 30])
def test_a_writer_that_is_killed_leaves_a_whole_state(tmp_path: Path, writes: int) -> None:
    path = tmp_path / "state.json"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        for _ in range(writes):
            assert writer.stdout.readline()
        writer.kill()  # somewhere in the next write

    assert FileStore(path).load() is not None
    FileStore(path).save(NEW)
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
