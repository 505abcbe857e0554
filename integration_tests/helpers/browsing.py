"""The system's Chromium, and what it has to complain about."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")

OPTIONS = (
    # Its sandbox does not start as root, as in containers.
    *("--no-sandbox", "--disable-gpu", "--disable-quic"),
    # Nobody else is asked for anything.
    *("--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)

OUTPUT = Path(__file__).parents[2] / "test-output"
"""Where pictures are kept."""

PATIENCE = 60_000
"""Milliseconds that something may take to be seen."""

Scheme = Literal["light", "dark"]


@contextmanager
def start_browser() -> Generator[Browser]:
    """Without one the tests are skipped, but not where all are to run."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        reason = f"there is no browser: none of {', '.join(NAMES)}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=OPTIONS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Window:
    """A page of the browser, and what was wrong in it."""

    page: Page
    complaints: list[str] = field(default_factory=list[str])
    """Errors, and what was against the page's own policy."""

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENCE)
        self.page.on("console", self._console)
        self.page.on("pageerror", self._error)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(f"{message.text} ({message.location})")

    def _error(self, error: Error) -> None:
        self.complaints.append(str(error))

    def forgive(self, text: str) -> None:
        """Forget the complaints with this text in them: they belong to the test."""
        self.complaints = [each for each in self.complaints if text not in each]

    def picture(self, name: str) -> None:
        OUTPUT.mkdir(exist_ok=True)
        self.page.screenshot(path=OUTPUT / f"{name}.png", full_page=True)


@contextmanager
def open_window(
    browser: Browser, *, width: int = 1280, height: int = 900, scheme: Scheme = "light"
) -> Generator[Window]:
    """It must not have complained of anything at the end."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    try:
        window = Window(context.new_page())
        yield window
        assert not window.complaints, window.complaints
    finally:
        context.close()
