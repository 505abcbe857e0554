"""The tree keeps its promises."""

import importlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("common", "balancer", "agent", "deploy")

# Declarations only.
WITHOUT_TESTS = {
    "common/ids.py",
    "common/errors.py",
    "agent/engine.py",
    "balancer/terms.py",
}

# Tested through the module that uses them.
COVERED_BY = {
    "agent/request.py": "agent/scheduler.py",
    "agent/kv.py": "agent/scheduler.py",
    "agent/echo.py": "agent/scheduler.py",
    "agent/lark.py": "agent/gbnf.py",
    "common/frame.py": "common/messages.py",
    "common/models.py": "common/messages.py",
    "agent/cached_files.py": "agent/download.py",
    "agent/host.py": "agent/service.py",
    "agent/format_families.py": "agent/formats.py",
    "agent/json_schema.py": "agent/constraint.py",
    "agent/literals.py": "agent/tool_calls.py",
    "agent/notations.py": "agent/call_rules.py",
    "agent/offered_tools.py": "agent/answer_grammar.py",
    "agent/output_parser.py": "agent/output.py",
    "agent/patterns.py": "agent/tools.py",
    "agent/tool_schema.py": "agent/tools.py",
    "balancer/consultation.py": "balancer/openai.py",
    "balancer/consultations.py": "balancer/balancer.py",
    "balancer/linked_agents.py": "balancer/balancer.py",
    "balancer/observed.py": "balancer/metrics.py",
    "balancer/records.py": "balancer/overview.py",
    "balancer/buffer.py": "balancer/dispatcher.py",
    "balancer/fleet_beats.py": "balancer/fleet_registry.py",
    "balancer/fleet_memory.py": "balancer/fleet_plan.py",
    "deploy/bench_command.py": "deploy/bench.py",
    "deploy/options.py": "deploy/cli.py",
    "balancer/progress.py": "balancer/balancer.py",
    "balancer/pool.py": "balancer/dispatcher.py",
    "balancer/policy.py": "balancer/dispatcher.py",
    "balancer/server_events.py": "balancer/openai.py",
}

# Shells over Ray, llama.cpp or processes, driven by integration_tests/.
DRIVEN = {
    "agent/llama.py": "test_llama.py",
    "agent/llama_embedder.py": "test_llama_embedder.py",
    "agent/llama_library.py": "test_llama_sampler.py",
    "agent/llama_progress.py": "test_llama.py",
    "agent/llama_vision.py": "test_multimodal.py",
    "agent/llama_candidates.py": "test_llama_sampler.py",
    "agent/llama_chain.py": "test_llama_sampler.py",
    "agent/llama_sampler.py": "test_llama_sampler.py",
    "deploy/actor.py": "test_up.py",
    "deploy/agent_process.py": "test_keeper.py",
    "deploy/agents.py": "test_agent_process.py",
    "deploy/version.py": "test_fleets.py",
    "deploy/keeper.py": "test_keeper.py",
    "deploy/session.py": "test_up.py",
    "deploy/show_nodes.py": "test_deployment.py",
}


def test_all_packages_come_from_this_folder() -> None:
    """Their names are common words: another distribution could install over them."""
    folders = {Path(str(importlib.import_module(name).__file__)).parents[1] for name in PACKAGES}

    assert folders == {ROOT}


def test_each_module_says_where_it_is_tested() -> None:
    modules = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).glob("*.py")
        if path.name != "__init__.py"
    }
    tested = {
        module
        for module in modules
        if (ROOT / "tests" / Path(module).parent / f"test_{Path(module).name}").exists()
    }

    assert modules == tested | WITHOUT_TESTS | COVERED_BY.keys() | DRIVEN.keys()
    assert set(COVERED_BY.values()) <= tested
    assert all((ROOT / "integration_tests" / test).exists() for test in DRIVEN.values())


def test_nothing_else_stands_at_the_top() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()

    top = {name.split("/")[0] for name in listed}

    allowed = {*PACKAGES, "tests", "integration_tests", "pyproject.toml", "README.md", "LICENSE"}
    assert {name for name in top if not name.startswith(".")} == allowed
