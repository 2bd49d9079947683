"""The page of megalite report in a browser: readable in two widths and both schemes, its curves those of the run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megalite.cli import main
from tests.support.browser import NARROW, WIDE, Browser
from tests.support.parity import about

pytestmark = pytest.mark.extended

LEAST_CONTRAST = 4.5
"""That of normal text in WCAG 2, level AA."""
HOSTILE = "<script>document.title = 'planted'</script><img src=x onerror=alert(1)>"
LEGEND = (
    "return Object.fromEntries([...document.querySelectorAll('figure')].map(figure => ["
    "figure.querySelector('strong').textContent, Object.fromEntries([...figure.querySelectorAll('li')]"
    ".map(item => [item.children[1].textContent, item.children[2].textContent]))]))"
)
PRESS = (
    "document.querySelector('.plot').dispatchEvent("
    "new KeyboardEvent('keydown', {key: arguments[0], bubbles: true, cancelable: true}))"
)


def report(*runs: Path, to: Path) -> Path:
    assert main(["report", *map(str, runs), "--output", str(to)]) == 0
    return to


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def shown(value: float) -> float:
    """Return a number with the digits that the page keeps, and then shows."""
    return float(f"{float(f'{value:.6g}'):.5g}")


@pytest.fixture(scope="module")
def pages(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of one run, and that of three: one of them hostile, one damaged."""
    folder = tmp_path_factory.mktemp("pages")
    hostile, damaged = folder / HOSTILE.replace("/", "\N{FRACTION SLASH}"), folder / "damaged"
    for copy in (hostile, damaged):
        shutil.copytree(trained, copy)
    text = (hostile / "run.toml").read_text()
    source = text[text.index("source = ") :].partition("\n")[0]
    (hostile / "run.toml").write_text(text.replace(source, f'source = "{HOSTILE}"'))
    (damaged / "run.toml").write_text("[run\n")
    with (damaged / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss": "</script>"}\n{"step": 10, "lo')
    return {
        "one run": report(trained, to=folder / "one.html"),
        "three runs": report(trained, hostile, damaged, to=folder / "three.html"),
    }


@pytest.mark.parametrize("name", ["one run", "three runs"])
def test_the_page_is_readable_in_any_width_and_scheme(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    browser.open(pages[name])
    for width in (WIDE, NARROW):
        for dark in (False, True):
            browser.view(width=width, dark=dark)
            browser.run("document.querySelectorAll('details').forEach(part => { part.open = true })")
            browser.until("document.querySelectorAll('#charts svg .cursor').length > 5")
            assert browser.too_wide() <= 0, f"{width} pixels"
            assert browser.smallest_letters() >= 12
            worst = browser.least_contrasts()[0]
            assert worst[0] >= LEAST_CONTRAST, worst
    assert browser.complaints() == []
    assert browser.run("return document.title").startswith("Report: ")
    assert not browser.run("return document.querySelectorAll('main img, main script').length")


def test_two_schemes_have_two_papers(browser: Browser, pages: dict[str, Path]) -> None:
    papers = []
    for dark in (False, True):
        browser.open(pages["one run"], dark=dark)
        papers.append(browser.run("return getComputedStyle(document.body).backgroundColor"))
    assert papers[0] == "rgb(255, 255, 255)" and papers[1] != papers[0]


def test_the_curves_have_the_numbers_of_the_run(
    browser: Browser, trained: Path, pages: dict[str, Path]
) -> None:
    browser.open(pages["one run"])
    steps = records(trained)
    legends = browser.run(LEGEND)
    assert float(legends["loss"]["loss"]) == shown(steps[-1]["loss"])
    assert float(legends["loss"]["validation loss"]) == shown(steps[-1]["validation_loss"])
    # The cursor stands on the first step, and then on the third.
    for key, row in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2)):
        browser.run(PRESS, key)
        browser.until(f"document.querySelector('figcaption .pale').textContent === 'at step {row + 1}'")
        legends = browser.run(LEGEND)
        assert float(legends["loss"]["loss"]) == shown(steps[row]["loss"])
        assert float(legends["gradient norm"]["grad norm"]) == shown(steps[row]["grad_norm"])
    said = browser.run("return document.querySelector('.plot').getAttribute('aria-valuetext')")
    assert said.startswith("at step 3, loss ")
    assert "highest: " in " ".join(legends["update ratio of each layer"])


def test_the_axis_the_scale_and_the_runs_can_be_chosen(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["three runs"])
    browser.until("document.querySelectorAll('#charts path').length > 10")
    path = "return document.querySelector('#charts .plot path').getAttribute('d')"
    labels = "return [...document.querySelectorAll('#charts .plot')][0].textContent"
    linear, by_step = browser.run(path), browser.run(labels)
    browser.run("document.querySelector('[name=log]').click()")
    assert browser.run(path) != linear
    browser.run("document.querySelector('[value=tokens]').click()")
    assert browser.run(labels) != by_step
    lines = "return document.querySelectorAll('#charts figure')[0].querySelectorAll('li').length"
    before = browser.run(lines)
    browser.run("document.querySelector('[name=run]').click()")
    assert browser.run(lines) == before - 2, "its loss and its validation loss"
    browser.run("document.querySelectorAll('[name=run]').forEach(box => box.checked && box.click())")
    assert browser.run(lines) == 0 and browser.complaints() == []


def test_a_pointer_reads_the_curve_below_it(browser: Browser, trained: Path, pages: dict[str, Path]) -> None:
    browser.open(pages["one run"])
    browser.until("document.querySelectorAll('#charts path').length > 10")
    browser.run(
        "const box = document.querySelector('.plot'), frame = box.getBoundingClientRect();"
        "box.dispatchEvent(new PointerEvent('pointermove', {clientX: frame.right - 12, clientY: frame.top + 40}))"
    )
    browser.until("document.querySelector('figcaption .pale').textContent === 'at step 8'")
    last = records(trained)[-1]
    assert float(browser.run(LEGEND)["loss"]["loss"]) == shown(last["loss"])
    browser.run("document.querySelector('.plot').dispatchEvent(new PointerEvent('pointerleave'))")
    browser.until("document.querySelector('figcaption .pale').textContent === 'last values'")


def test_the_page_prints_with_its_settings(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one run"])
    browser.driver.execute_cdp_cmd("Page.printToPDF", {})
    assert browser.run("return [...document.querySelectorAll('details')].every(part => part.open)")


def test_the_measure_of_contrast_finds_pale_text(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "pale.html"
    page.write_text("<body style='background: #fff'><p style='color: #777'>pale<p style='color: #000'>dark")
    browser.open(page)
    [[pale, _], [dark, _]] = browser.least_contrasts()
    # The published ratios of these colours.
    assert round(pale, 2) == 4.48 and dark == about(21.0)
