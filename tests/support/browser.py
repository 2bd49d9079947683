"""Debian's Chromium without a window, driven by Selenium; pages are measured as the browser lays them out."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WIDE, NARROW = 1400, 400
# For each text that is seen: the contrast ratio of WCAG 2 between its colour and the nearest opaque background.
_LEAST_CONTRASTS = """
const parts = color => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data].map(part => part / 255);
};
const known = new Map(), rgba = color => known.get(color) ?? known.set(color, parts(color)).get(color);
const over = (top, under) => [0, 1, 2].map(at => top[at] * top[3] + under[at] * (1 - top[3]));
const light = color => [0.2126, 0.7152, 0.0722].reduce((sum, share, at) => sum + share *
  (color[at] <= 0.03928 ? color[at] / 12.92 : ((color[at] + 0.055) / 1.055) ** 2.4), 0);
const parent = element => element.parentElement ?? element.getRootNode().host ?? null;
function background(element) {
  if (element === null) return rgba(getComputedStyle(probe).backgroundColor);
  const own = rgba(getComputedStyle(element).backgroundColor);
  return own[3] === 1 ? own : over(own, background(parent(element)));
}
// The colour of an empty page, of the browser's own scheme.
const probe = document.createElement("div");
probe.style.background = "Canvas";
document.body.append(probe);
const ratios = [];
function look(root) {
  for (const element of root.querySelectorAll("*")) {
    if (element.shadowRoot) look(element.shadowRoot);
    const asks = element.placeholder && !element.value;
    const text = asks ? element.placeholder
      : [...element.childNodes].filter(node => node.nodeType === 3).map(node => node.data).join("").trim();
    const style = getComputedStyle(element, asks ? "::placeholder" : undefined);
    if (!text || !element.getClientRects().length || style.visibility !== "visible") continue;
    if (element.disabled || element.closest("script, style, title, desc, noscript, option")) continue;
    const drawn = element instanceof SVGElement, paper = drawn && root.querySelector && root.querySelector(".paper");
    // Boxes of a picture lie below its labels, as siblings: these are measured against the paper of the picture.
    if (drawn && element.matches(".mark")) continue;
    const under = paper ? rgba(getComputedStyle(paper).fill) : background(element);
    let opacity = asks ? Number(style.opacity) : 1;
    for (let at = element; at; at = parent(at)) opacity *= Number(getComputedStyle(at).opacity);
    const color = [...rgba(drawn ? style.fill : style.color)];
    color[3] *= opacity;
    const [a, b] = [light(over(color, under)), light(under)];
    ratios.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), text.slice(0, 60)]);
  }
}
look(document);
probe.remove();
return ratios.sort((a, b) => a[0] - b[0]).slice(0, 5);
"""

_SMALLEST_LETTERS = """
const seen = part => part.getClientRects().length;
const written = part => [...part.childNodes].some(node => node.nodeType === 3 && node.data.trim());
return Math.min(...[...document.querySelectorAll("body *")].filter(part => seen(part) && written(part))
  .map(part => parseFloat(getComputedStyle(part).fontSize)));
"""


class Browser:
    """A page in Chromium. driver: Selenium's own, for all that is not below."""

    def __init__(self, driver: Any):
        self.driver = driver

    def open(self, address: str | Path, *, width: int = WIDE, dark: bool = False) -> None:
        """Load a page, or a file; in a window of this width."""
        self.view(width=width, dark=dark)
        self.driver.get(address.absolute().as_uri() if isinstance(address, Path) else address)

    def view(self, *, width: int = WIDE, dark: bool = False) -> None:
        """Change the window's width, and the colours that the page is asked for."""
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript in the page; `return` gives its result."""
        return self.driver.execute_script(script, *arguments)

    def complaints(self) -> list[str]:
        """Return the errors and warnings of the console since the last call."""
        return [f"{entry['level']}: {entry['message']}" for entry in self.driver.get_log("browser")]

    def too_wide(self) -> int:
        """Return by how many pixels the page is wider than its window."""
        return int(self.run("return document.documentElement.scrollWidth - window.innerWidth"))

    def least_contrasts(self) -> list[tuple[float, str]]:
        """Return the contrast ratio and the text of the texts that are hardest to read."""
        return [(ratio, text) for ratio, text in self.run(_LEAST_CONTRASTS)]

    def smallest_letters(self) -> float:
        """Return the smallest font size of a text that is seen, in pixels."""
        return float(self.run(_SMALLEST_LETTERS))

    def until(self, condition: str) -> Any:
        """Wait until a JavaScript expression is true; return its value."""
        from selenium.webdriver.support.ui import WebDriverWait

        from tests.support.waiting import PATIENCE

        return WebDriverWait(self.driver, PATIENCE, poll_frequency=0.05).until(
            lambda driver: driver.execute_script(f"return {condition}"), condition
        )


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Run Chromium within the `with` block, its files in `profile`; skip the test where it is not installed."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no chromium with chromedriver: bash tests/browser/setup.sh")
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: bash tests/browser/setup.sh")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    # Root, and containers, have no sandbox; a page that loads anything from elsewhere finds no host.
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        "no-first-run",
        "disable-background-networking",
        "host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"user-data-dir={profile}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "WARNING"})
    running = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield Browser(running)
    finally:
        running.quit()
