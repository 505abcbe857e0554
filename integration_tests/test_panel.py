"""The panel in the system's Chromium, before the running product: one ``headrace up`` whose agents come
and go as each test wants them. Pictures of it are kept in ``test-output/``.
"""

import contextlib
import json
import re
import signal
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from behind_path import BehindPath
from browsing import Scheme, Window, open_window, start_browser
from file_server import FileServer, stall_after
from playwright.sync_api import Browser, Locator, Page, Route, expect
from product import Command, Up, free_port, start_up

from balancer.keys import Role, first_key
from deploy.access import fresh_keys, keep_secret
from deploy.agents import ECHO_PACE
from deploy.model import default_model

PAGES = ("Dashboard", "Model", "Fleets", "Prompt", "Requests")

LONG = "A long story. " * 200
"""An agent that says it back, and that slowly, does so until it is stopped."""


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    with start_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def up(browser: Browser) -> Generator[Up]:
    with start_up("--agents", "0") as up:
        yield up


@pytest.fixture
def window(browser: Browser, up: Up) -> Generator[Window]:
    """At the dashboard."""
    with open_window(browser) as window:
        window.page.goto(f"{up.address}/panel")
        yield window


@contextlib.contextmanager
def agent(
    up: Up, name: str, *, engine: str = "echo", pace: float = 0, slots: int = 2
) -> Generator[Command]:
    """An agent that serves; ``pace``: seconds that echo takes for each token."""
    command = Command(
        *("agent", "--balancer", up.balancer, "--engine", engine),
        *("--name", name, "--slots", str(slots)),
        environment={ECHO_PACE: str(pace)},
    )
    try:
        up.until(lambda agents: any(a["name"] == name and a["slots_total"] for a in agents))
        yield command
    finally:
        if command.process.poll() is None:
            command.stop(signal.SIGINT)
        command.kill_the_rest()
        up.until(lambda agents: all(a["name"] != name for a in agents))


@contextlib.contextmanager
def asked(up: Up, text: str = LONG) -> Generator[Iterator[dict[str, Any]]]:
    """The messages of an answer that has begun."""
    body = {"raw_prompt": text, "max_tokens": len(text)}
    with up.client.stream("POST", "/api/v1/continue_from_raw_prompt", json=body) as response:
        messages = (json.loads(line) for line in response.iter_lines())
        next(messages)
        yield messages


def go(page: Page, name: str) -> None:
    page.get_by_role("link", name=name, exact=True).click()
    expect(page.get_by_role("heading", name=name, level=1)).to_be_visible()


def card(page: Page, name: str) -> Locator:
    return page.get_by_role("article", name=f"Agent {name}")


def is_too_wide(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth > innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 320])
def test_every_page_fits_and_is_as_dark_as_is_wished(
    browser: Browser, up: Up, width: int, scheme: Scheme
) -> None:
    with (
        agent(up, "fits", pace=0.05),
        asked(up),
        open_window(browser, width=width, scheme=scheme) as window,
    ):
        page = window.page
        page.goto(f"{up.address}/panel")
        expect(card(page, "fits")).to_contain_text("1/2")
        for name in PAGES:
            go(page, name)
            expect(page.get_by_role("link", name=name, exact=True)).to_have_attribute(
                "aria-current", "page"
            )
            expect(page).to_have_title(f"{name} · headrace")
            if name == "Model":
                expect(page.get_by_label("temperature", exact=True)).to_be_visible()
            assert not is_too_wide(page), name
            window.picture(f"{name.lower()}-{scheme}-{width}")
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", back)[:3])) < 200) == (scheme == "dark")


def test_an_agent_joins_and_leaves(window: Window, up: Up) -> None:
    expect(window.page.get_by_text("No agent is connected.")).to_be_visible()

    with agent(up, "comes"):
        expect(card(window.page, "comes")).to_contain_text("ready")
        expect(card(window.page, "comes")).to_contain_text("0/2")

    expect(card(window.page, "comes")).to_have_count(0)


def test_an_agent_that_is_killed_disappears(window: Window, up: Up) -> None:
    with agent(up, "doomed") as command:
        expect(card(window.page, "doomed")).to_be_visible()

        command.kill_the_rest()

        expect(card(window.page, "doomed")).to_have_count(0)


def test_an_agent_is_drained_and_undrained(window: Window, up: Up) -> None:
    page = window.page
    with agent(up, "held"):
        page.get_by_role("button", name="Drain held").click()
        expect(card(page, "held")).to_contain_text("drained by an operator")
        expect(page.get_by_text("held finishes what runs and takes nothing new.")).to_be_visible()
        window.picture("drained")

        page.get_by_role("button", name="Undrain held").click()

        expect(card(page, "held")).to_contain_text("ready")
        with asked(up, "hello"):
            pass


def test_busy_slots_are_seen(window: Window, up: Up) -> None:
    with agent(up, "busy", pace=0.05, slots=3), asked(up), asked(up):
        slots = card(window.page, "busy").get_by_role("img", name="2 of 3 slots in use")
        expect(slots).to_be_visible()
        expect(window.page.get_by_text("2 running")).to_be_visible()
        window.picture("busy")

    expect(window.page.get_by_text("0 running")).to_be_visible()


def test_a_swap_is_seen_as_it_goes(window: Window, up: Up) -> None:
    page = window.page
    let_go = threading.Event()
    content = default_model().read_bytes()
    with FileServer() as server, agent(up, "swaps", engine="llama"):
        server.publish("/other.gguf", content)
        server.plan(
            "/other.gguf", stall_after(len(content) // 2, until=let_go, begun=threading.Event())
        )
        go(page, "Model")
        field = page.get_by_label("Model", exact=True)
        before = field.input_value()

        field.fill(server.url("/other.gguf"))
        page.get_by_role("button", name="Apply").click()

        bar = page.get_by_role("progressbar", name="Download of other.gguf")
        expect(bar).to_have_attribute("max", str(len(content)))
        row = page.get_by_role("listitem").filter(has_text="swaps")
        expect(row).to_contain_text(re.compile(r"\d MB of \d"))
        window.picture("swap")
        let_go.set()
        expect(row).to_contain_text("other")
        expect(row).to_contain_text("ready")
        field.fill(before)
        page.get_by_role("button", name="Apply").click()
        expect(row).not_to_contain_text("other")
        expect(row).to_contain_text("ready")


def test_a_model_that_cannot_be_found_is_said_where_it_was_asked_for(
    window: Window, up: Up
) -> None:
    page = window.page
    with FileServer() as server, agent(up, "lost", engine="llama"):
        go(page, "Model")
        field = page.get_by_label("Model", exact=True)
        before = field.input_value()
        field.fill(server.url("/nowhere.gguf"))
        page.get_by_role("button", name="Apply").click()

        expect(page.get_by_text("Model does not exist at url")).to_be_visible()
        window.picture("issue")
        field.fill(before)
        page.get_by_role("button", name="Apply").click()
        expect(page.get_by_text("Model does not exist at url")).to_have_count(0)


def test_a_parameter_is_checked_changed_and_reset(window: Window, up: Up) -> None:
    page = window.page
    go(page, "Model")
    field = page.get_by_label("temperature", exact=True)
    default = field.input_value()

    field.fill("warm")
    expect(page.get_by_text("A number is expected")).to_be_visible()
    page.get_by_role("button", name="Apply").click()
    expect(field).to_be_focused()
    field.fill("0.25")
    page.get_by_role("button", name="Apply").click()

    expect(page.get_by_text("The desired state is stored; the agents are told.")).to_be_visible()
    state = up.client.get("/api/v1/balancer_desired_state").json()
    assert state["inference_parameters"]["temperature"] == 0.25
    page.reload()
    expect(field).to_have_value("0.25")
    page.get_by_role("button", name="Reset temperature").click()
    expect(field).to_have_value(default)
    page.get_by_role("button", name="Apply").click()
    expect(page.get_by_text("The desired state is stored; the agents are told.")).to_be_visible()
    assert up.client.get("/api/v1/balancer_desired_state").json() == {
        **state,
        "inference_parameters": {**state["inference_parameters"], "temperature": float(default)},
    }


def test_a_change_by_somebody_else_is_not_overwritten_unseen(window: Window, up: Up) -> None:
    page = window.page
    go(page, "Model")
    page.get_by_label("top_k", exact=True).fill("7")
    state = up.client.get("/api/v1/balancer_desired_state").json()
    others = {**state, "inference_parameters": {**state["inference_parameters"], "top_k": 9}}

    up.client.put("/api/v1/balancer_desired_state", json=others).raise_for_status()

    expect(page.get_by_text("Somebody else has changed the desired state")).to_be_visible()
    page.get_by_role("button", name="Drop my changes and load it").click()
    expect(page.get_by_label("top_k", exact=True)).to_have_value("9")
    up.client.put("/api/v1/balancer_desired_state", json=state).raise_for_status()


def test_a_template_is_shown_before_it_is_used(window: Window, up: Up) -> None:
    page = window.page
    with agent(up, "shows"):
        go(page, "Model")
        page.get_by_text("Preview", exact=True).click()
        show = page.get_by_role("button", name="Show the prompt")
        show.click()
        expect(page.get_by_label("The prompt")).to_contain_text("Why is the sky blue?")

        page.get_by_label("Use the template below").check()
        page.get_by_label("Template (Jinja)").fill("<b>{{ messages[0].role }}</b>")
        show.click()
        expect(page.get_by_label("The prompt")).to_have_text("<b>system</b>")
        window.picture("template")

        page.get_by_label("Template (Jinja)").fill("{% for %}")
        show.click()
        expect(page.locator(".preview .problem")).not_to_be_empty()
        window.forgive("400")


def test_an_answer_comes_word_by_word_with_its_figures(window: Window, up: Up) -> None:
    page = window.page
    with agent(up, "talks"):
        go(page, "Prompt")
        page.get_by_label("Message").fill("<i>Hello</i>, you")
        page.keyboard.press("Enter")

        answer = page.get_by_role("article", name="Answer")
        expect(answer).to_contain_text("<i>Hello</i>, you")
        expect(answer).to_contain_text("first token after")
        expect(answer).to_contain_text("talks")
        expect(answer).to_contain_text("17 tokens")
        page.get_by_label("Message").fill("again")
        page.get_by_role("button", name="Send").click()
        expect(answer.nth(1)).to_contain_text("tok/s")
        window.picture("answer")


def test_an_answer_is_stopped(window: Window, up: Up) -> None:
    page = window.page
    with agent(up, "slow", pace=0.05):
        go(page, "Prompt")
        page.get_by_text("Options", exact=True).click()
        page.get_by_label("Max tokens").fill("5000")
        page.get_by_label("Message").fill(LONG)
        page.get_by_role("button", name="Send").click()
        answer = page.get_by_role("article", name="Answer")
        expect(answer).to_contain_text("A long")

        page.get_by_role("button", name="Stop").click()

        expect(answer).to_contain_text("stopped")
        up.until(lambda agents: agents[0]["slots_processing"] == 0)
        expect(page.get_by_role("button", name="Stop")).to_be_disabled()


def test_what_is_stopped_before_it_is_sent_is_never_sent(window: Window, up: Up) -> None:
    page = window.page
    held: list[Route] = []
    sent: list[str | bytes] = []
    page.on("websocket", lambda socket: socket.on("framesent", lambda frame: sent.append(frame)))
    page.route("**/v1/models", lambda route: held.append(route))
    with agent(up, "slow", pace=0.05):
        go(page, "Prompt")
        page.get_by_label("Message").fill("first")
        with page.expect_request("**/v1/models"):
            page.get_by_role("button", name="Send").click()
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("article", name="Answer")).to_contain_text("stopped")
        held.pop().continue_()
        page.unroute("**/v1/models")

        page.get_by_label("Message").fill("second")
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("article", name="Answer").last).to_contain_text("first token after")

    assert [frame for frame in sent if "first" in str(frame) and "second" not in str(frame)] == []


def test_an_image_that_no_model_can_see_is_said_so(window: Window, up: Up, tmp_path: Path) -> None:
    page = window.page
    picture = tmp_path / "dot.png"
    page.screenshot(path=picture)
    with agent(up, "blind"):
        go(page, "Prompt")
        page.get_by_label("Add images").set_input_files(picture)
        expect(page.get_by_role("img", name="Image 1")).to_be_visible()
        page.get_by_label("Message").fill("What is it?")
        page.get_by_role("button", name="Send").click()

        expect(page.get_by_role("article", name="Answer")).to_contain_text("failed")
        window.picture("image")


def test_a_running_request_is_cancelled_and_explained(window: Window, up: Up) -> None:
    page = window.page
    with agent(up, "works", pace=0.05), asked(up) as answer:
        go(page, "Requests")
        row = page.get_by_role("row").filter(has_text="running").filter(has_text="works")
        request_id = row.get_attribute("data-request")
        assert request_id is not None

        row.get_by_role("button", name="Cancel").click()

        *_, last = answer
        assert last["Error"]["error"]["code"] == 410
        row = page.locator(f"[data-request='{request_id}']")
        expect(row).to_contain_text("cancelled")
        row.get_by_role("link").click()
        explained = page.get_by_role("region", name=f"Request {request_id}")
        expect(explained).to_contain_text("arrived")
        expect(explained).to_contain_text("dispatched")
        window.picture("explained")
        explained.get_by_role("link", name="Close").click()
        page.get_by_label("Request id").fill("nobody")
        page.keyboard.press("Enter")
        expect(page.get_by_text("There is no request nobody")).to_be_visible()
        window.forgive("404")


def test_a_fleet_is_made_scaled_and_deleted(window: Window, up: Up) -> None:
    page = window.page
    go(page, "Fleets")
    page.get_by_role("link", name="New fleet").click()
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_label("Name")).to_be_focused()
    page.get_by_label("Name").fill("small")
    page.get_by_label("max", exact=True).fill("0")
    page.get_by_label("idle_time").fill("1")
    page.get_by_role("button", name="Create").click()
    fleet = page.get_by_role("article", name="Fleet small")
    expect(fleet).to_contain_text("as wanted")

    page.get_by_label("min of the fleet small").fill("1")
    page.get_by_label("max of the fleet small").fill("1")
    page.get_by_role("button", name="Scale the fleet small").click()

    expect(fleet.get_by_role("listitem").filter(has_text="small-1")).to_contain_text("ready")
    assert up.client.get("/api/v1/fleets/small").json()["fleet"]["idle_time"] == 1
    window.picture("fleet")
    page.get_by_label("max of the fleet small").fill("")
    page.get_by_role("button", name="Scale the fleet small").click()
    expect(page.get_by_label("max of the fleet small")).to_be_focused()
    assert up.client.get("/api/v1/fleets/small").json()["fleet"]["max"] == 1
    page.get_by_role("link", name="Edit the fleet small").click()
    expect(page.get_by_label("idle_time")).to_have_value("1")
    page.get_by_role("link", name="Close").click()
    page.get_by_role("button", name="Delete the fleet small").click()
    page.get_by_role("button", name="Leave it").click()
    page.get_by_role("button", name="Delete the fleet small").click()
    page.get_by_role("button", name="Delete it").click()
    expect(fleet).to_have_count(0)
    up.until(lambda agents: agents == [])


def test_all_of_it_can_be_reached_by_the_keyboard(window: Window, up: Up) -> None:
    page = window.page
    with agent(up, "keyed"):
        expect(card(page, "keyed")).to_be_visible()
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_role("main")).to_be_focused()
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Drain keyed")).to_be_focused()
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(outline) != "none"
        page.keyboard.press("Enter")
        undrain = page.get_by_role("button", name="Undrain keyed")
        expect(undrain).to_be_focused()
        page.keyboard.press("Space")
        expect(page.get_by_role("button", name="Drain keyed")).to_be_focused()

        page.get_by_role("link", name="Fleets", exact=True).focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Fleets", level=1)).to_be_focused()
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="New fleet")).to_be_focused()


def test_it_works_under_a_path_and_says_when_the_balancer_is_away(browser: Browser, up: Up) -> None:
    with (
        BehindPath("/some/prefix", up.port, own_port=free_port()) as proxy,
        agent(up, "behind"),
        open_window(browser) as window,
    ):
        page = window.page
        page.goto(f"{proxy.address}/panel")
        expect(card(page, "behind")).to_be_visible()
        go(page, "Prompt")
        page.get_by_label("Message").fill("Hello there")
        page.keyboard.press("Enter")
        expect(page.get_by_role("article", name="Answer")).to_contain_text("Hello there")

        proxy.cut()

        banner = page.get_by_text("No connection to the balancer since")
        expect(banner).to_be_visible()
        window.picture("away")
        proxy.start()
        page.get_by_role("button", name="Try now").click()
        expect(banner).to_have_count(0)
        go(page, "Dashboard")
        expect(card(page, "behind")).to_be_visible()
        window.forgive("net::ERR")


def test_keys_are_asked_for_and_kept_for_the_tab(browser: Browser, tmp_path: Path) -> None:
    text = fresh_keys()
    keep_secret(tmp_path / "keys", text)
    keys = {role: first_key(text, role) for role in Role}
    options = ("--engine", "echo", "--keys", str(tmp_path / "keys"))
    with (
        start_up(*options, key=keys[Role.MANAGEMENT]) as up,
        open_window(browser) as window,
    ):
        page = window.page
        page.goto(f"{up.address}/panel")
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("A key for management")
        window.picture("key")
        page.get_by_label("Key", exact=True).fill("a-key-that-is-nobodys")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("this key is not known")
        page.get_by_label("Key", exact=True).fill(keys[Role.MANAGEMENT])
        page.keyboard.press("Enter")
        expect(card(page, "agent-1")).to_be_visible()

        go(page, "Prompt")
        page.get_by_label("Message").fill("Hello there")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("A key for inference")
        page.get_by_label("Key", exact=True).fill(keys[Role.INFERENCE])
        page.keyboard.press("Enter")
        expect(page.get_by_role("article", name="Answer")).to_contain_text("Hello there")

        page.reload()
        go(page, "Dashboard")
        expect(card(page, "agent-1")).to_be_visible()
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        window.forgive("401")


def test_the_panel_lets_nothing_foreign_in(up: Up) -> None:
    answer = httpx.get(f"{up.address}/panel/", trust_env=False)

    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
