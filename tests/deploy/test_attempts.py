import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ModelError
from deploy.attempts import MOST_DEATHS, Attempts

DEADLY = """
import os, sys
from pathlib import Path
from deploy.attempts import Attempts

with Attempts(Path(sys.argv[1]), "agent-1").noted("deadly"):
    os.abort()
"""


def die(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", DEADLY, str(folder)], stderr=subprocess.PIPE, check=False)


def test_a_model_that_kills_its_process_again_and_again_is_refused_once(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path, "agent-1")
    for _ in range(MOST_DEATHS):
        attempts.check("deadly")
        die(tmp_path)

    attempts.check("another")
    Attempts(tmp_path, "agent-2").check("deadly")
    with pytest.raises(ModelError, match="ended 2 times while it was loaded"):
        attempts.check("deadly")
    attempts.check("deadly")  # the operator wants it all the same


def test_a_load_that_ends_leaves_no_note(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path, "agent-1")

    for _ in range(MOST_DEATHS):
        with attempts.noted("good"):
            pass
        with pytest.raises(ModelError, match="broken"), attempts.noted("broken"):
            raise ModelError("broken")

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with Attempts(tmp_path / "file", "agent-1").noted("good"):
        pass


def test_a_note_that_is_none_counts_for_nothing(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path, "agent-1")
    die(tmp_path)
    (note,) = tmp_path.iterdir()
    note.write_text("nonsense")

    attempts.check("deadly")
