"""The set-up before anything is installed. That it works whole is shown by ``deploy/test`` itself."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy import environment
from deploy.environment import Progress, SetupError, check_compilers, fingerprint, is_fresh

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "deploy").mkdir()
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / environment.CONSTRAINTS).write_text("six==1.0\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (environment.CONSTRAINTS, "six==2.0\n"),
        ("pyproject.toml", '[project]\ndependencies = ["six"]\n'),
    ],
)
def test_a_changed_pin_makes_the_environment_stale(tree: Path, name: str, content: str) -> None:
    before = fingerprint(tree)
    assert fingerprint(tree) == before

    (tree / name).write_text(content)

    assert fingerprint(tree) != before


def test_a_changed_setting_of_a_tool_does_not(tree: Path) -> None:
    before = fingerprint(tree)

    (tree / "pyproject.toml").write_text("[project]\n[tool.ruff]\nline-length = 100\n")

    assert fingerprint(tree) == before


def test_an_environment_is_fresh_only_with_its_stamp_and_its_command(tmp_path: Path) -> None:
    stamp = tmp_path / "stamp"
    command = tmp_path / "bin" / "headrace"
    command.parent.mkdir()
    assert not is_fresh(tmp_path, stamp, "x")

    stamp.write_text("x")
    assert not is_fresh(tmp_path, stamp, "x")
    command.touch()
    assert is_fresh(tmp_path, stamp, "x")
    assert not is_fresh(tmp_path, stamp, "y")


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    compiler = tmp_path / "gcc"
    compiler.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(SetupError, match=r"a C\+\+ compiler is needed.*apt install"):
        check_compilers()


def test_too_small_a_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "NEEDED_BYTES", 10**18)

    with pytest.raises(SetupError, match="disk space"):
        environment.check_disk(tmp_path / ".venv")


def test_a_failed_installation_shows_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ROOT", ROOT)
    python = ROOT / ".venv" / "bin" / "python"

    with pytest.raises(SetupError, match=r"could not install(.|\n)*no_such_file"):
        environment.pip(python, tmp_path / "log", str(tmp_path / "no_such_file.whl"))


def test_a_build_shows_how_far_it_has_come(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    for n in range(1, 201):
        progress.see(f"  [{n}/200] cc -c file{n}.c\n")
    progress.see("no step\n")
    progress.end()

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[-1].startswith("  building llama.cpp: 200 of 200 (100 %)")


def test_constraints_pin_everything_and_name_no_address() -> None:
    lines = (ROOT / environment.CONSTRAINTS).read_text().splitlines()

    pins = [line for line in lines if not line.startswith("#")]
    assert all("==" in pin and "/" not in pin for pin in pins)
    assert environment.pinned("llama-cpp-python")
    assert environment.MODEL_PACKAGE in pins


def run(script: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [f"{ROOT}/deploy/{script}", *arguments],
        cwd="/",
        env={**os.environ, "PYTHON": "", **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_up_works_from_any_folder() -> None:
    done = run("up", "--help")

    assert done.returncode == 0
    assert "--model" in done.stdout


def test_no_python_is_said_plainly(tmp_path: Path) -> None:
    for tool in ("bash", "dirname", "readlink", "env"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))

    done = run("up", PATH=str(tmp_path))

    assert done.returncode == 1
    assert done.stderr.startswith("headrace: Python 3.11 or newer is needed")


def test_an_unknown_stage_is_named() -> None:
    done = run("test", "nope")

    assert done.returncode == 2
    assert "no stage 'nope'" in done.stderr
