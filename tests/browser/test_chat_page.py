"""The chat page of megalite serve in a browser: a message has an answer, errors are shown, all of it is readable."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.browser import NARROW, WIDE, Browser
from tests.support.serving import REFUSED_TOKENS, Live, served

pytestmark = pytest.mark.extended

LEAST_CONTRAST = 4.5
ANSWER = "# Notes\n<script>document.title = 'planted'</script> and **bold**"
ANSWERS = "document.querySelectorAll('article.assistant').length"


def visited(browser: Browser, folder: Path, visit: Callable[[Live], None]) -> None:
    """Open the page of a server, and run `visit` beside the server's loop."""

    async def scenario(server: Live) -> None:
        def look() -> None:
            browser.complaints()
            browser.open(f"http://127.0.0.1:{server.port}/")
            browser.until("document.getElementById('model').textContent === 'letters' || models.length > 1")
            visit(server)
            # Else the server waits for the connection of the page.
            browser.driver.get("about:blank")

        await asyncio.to_thread(look)

    served(scenario, folder)


def type_message(browser: Browser, text: str) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.driver.find_element(By.ID, "text").send_keys(text, Keys.ENTER)


def test_a_message_has_an_answer_in_any_width_and_scheme(browser: Browser, tmp_path: Path) -> None:
    def visit(server: Live) -> None:
        server.engine.script = ANSWER
        browser.run("document.getElementById('tokens').value = arguments[0]", len(ANSWER))
        type_message(browser, "Hello <b>you</b>")
        browser.until(f"{ANSWERS} === 1 && !document.getElementById('send').disabled")
        shown = "return document.querySelector('article.{} div').textContent"
        assert browser.run(shown.format("user")) == "Hello <b>you</b>"
        assert (
            browser.run(shown.format("assistant"))
            == "Notes<script>document.title = 'planted'</script> and bold"
        )
        assert browser.run("return document.querySelectorAll('article h1, article strong').length") == 2
        assert browser.run("return document.title") == "megalite"
        for width in (WIDE, NARROW):
            for dark in (False, True):
                browser.view(width=width, dark=dark)
                assert browser.too_wide() <= 0 and browser.smallest_letters() >= 12
                worst = browser.least_contrasts()[0]
                assert worst[0] >= LEAST_CONTRAST, worst
        assert browser.complaints() == []

    visited(browser, tmp_path, visit)


def test_an_error_of_the_server_is_shown_and_the_message_returns(browser: Browser, tmp_path: Path) -> None:
    def visit(server: Live) -> None:
        browser.run("document.getElementById('tokens').value = arguments[0]", REFUSED_TOKENS)
        type_message(browser, "Hello")
        browser.until("document.getElementById('note').className === 'error'")
        assert "do not fit the cache" in browser.run("return document.getElementById('note').textContent")
        browser.until("document.getElementById('text').value === 'Hello'")
        assert browser.run(f"return {ANSWERS}") == 0
        for dark in (False, True):
            browser.view(width=NARROW, dark=dark)
            worst = browser.least_contrasts()[0]
            assert worst[0] >= LEAST_CONTRAST, worst
        # The browser itself notes the refused request, and nothing else.
        assert all("400" in complaint for complaint in browser.complaints())

    visited(browser, tmp_path, visit)
