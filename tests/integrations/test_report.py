"""The report in a real headless browser: what it shows, hover, colours, comparison."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

if find_spec("selenium") is None:
    pytest.skip("run: make test-integrations ONLY=report", allow_module_level=True)
if not (shutil.which("chromium") and shutil.which("chromedriver")):
    pytest.skip("no browser: apt-get install chromium chromium-driver", allow_module_level=True)

from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from asyncmoe.telemetry.records import JsonLines, Tail
from asyncmoe.telemetry.report import command
from asyncmoe.telemetry.rollout_schema import Rollout
from asyncmoe.telemetry.schema import ROLLOUT
from asyncmoe.telemetry.versions import VERSIONS
from tests.unit.report_pages import NASTY, write_samples
from tests.unit.telemetry_runs import write_run

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--window-size=1280,1400"),
)
WAIT_S = 60


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    made = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield made
    made.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of a run, and of two runs."""
    folder = tmp_path_factory.mktemp("runs")
    for number, name in enumerate(("first", "second")):
        write_run(folder / name, warmup=20, rl=60 - 20 * number, wait=0.4 + number)
        write_samples(folder / name, 6)
        with JsonLines(folder / name / ROLLOUT) as rollout:
            rollout.write(msgspec.structs.replace(Tail(rollout.path).poll_as(Rollout)[-1], rejected={"scorer_<b>": 1, "a&amp;b": 2}))
        config = {"run": {"seed": number, "dir": name}, "rollout": {"group_size": 8}}
        (folder / name / "config.yaml").write_text(yaml.safe_dump(config))
        with JsonLines(folder / name / VERSIONS) as lines:
            lines.write({"time": 1.0, "versions": {"python": "3.11.7", "torch": f"2.{8 + number}.0"}})
    comparison = command.report(folder / "first", folder / "second", out=folder / "comparison.html")
    return {"run": command.report(folder / "first"), "comparison": comparison}


def _open(browser: Chrome, address: str) -> None:
    browser.get("about:blank")
    browser.get(address)
    _until(browser, lambda _: browser.find_elements(By.CSS_SELECTOR, "body[data-ready]") or _problem(browser))
    assert not _problem(browser)


def _until(browser: Chrome, condition: Callable[[Any], Any]) -> None:
    WebDriverWait(browser, WAIT_S, poll_frequency=0.05).until(condition)


def _problem(browser: Chrome) -> str:
    return browser.find_element(By.ID, "problem").text


def _draw_all(browser: Chrome) -> list[Any]:
    """Scroll through the page, so that every figure is drawn, and return the cards."""
    cards = browser.find_elements(By.CSS_SELECTOR, "#report > .plots .card")
    for card in cards[::3]:
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", card)
        _until(browser, lambda _, card=card: browser.execute_script("return !!arguments[0].querySelector('.main-svg')", card))
    drawn = "return arguments[0].every((card) => card.querySelector('.main-svg'))"
    _until(browser, lambda _: browser.execute_script(drawn, cards))
    return cards


def _silent(browser: Chrome) -> None:
    """No script failed, and the security policy refused nothing."""
    assert [one for one in browser.get_log("browser") if one["level"] != "INFO" and "favicon" not in one["message"]] == []


def _card(browser: Chrome, title: str) -> Any:
    find = "return [...document.querySelectorAll('.card')].filter((card) => card.querySelector('h3 span').textContent === arguments[0])"
    (found,) = browser.execute_script(find, title)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
    _until(browser, lambda _: browser.execute_script("return !!arguments[0].querySelector('.main-svg')", found))
    return found


def _hover(browser: Chrome, card: Any, at: str = ".nsewdrag") -> str:
    """Point into the middle of a plot, or at the last element of a selector, and return what the plot says there."""
    ActionChains(browser).move_to_element(card.find_elements(By.CSS_SELECTOR, at)[-1]).perform()
    _until(browser, lambda _: card.find_element(By.CSS_SELECTOR, ".hoverlayer").text)
    return str(card.find_element(By.CSS_SELECTOR, ".hoverlayer").text)


def test_the_report_shows_every_figure_and_says_what_is_under_the_pointer(browser: Chrome, pages: dict[str, Path]) -> None:
    _open(browser, pages["run"].as_uri())
    text = browser.find_element(By.TAG_NAME, "body").text
    for words in ("first", "60 RL steps in", "Summary", "Throughput", "Timeline", "Staleness", "Everything else that is recorded"):
        assert words in text
    cards = _draw_all(browser)
    assert len(cards) > 20
    assert "oldest token" in _hover(browser, _card(browser, "Age in each batch"))
    assert re.search(r"0\.\d+ ± 0\.05", _hover(browser, _card(browser, "Evaluation"), ".points path"))
    assert re.search(r"\d ± 6", _hover(browser, _card(browser, "Evaluation, pass@k by k"), ".points path"))
    rewards = _card(browser, "Distribution of rewards")
    assert {"0", "0.5", "1"} <= {one.text for one in rewards.find_elements(By.CSS_SELECTOR, ".ytick")}
    assert re.search(r"RL step \d+\s*reward 0\.5: [\d.]+ %", _hover(browser, rewards))
    assert re.search(r"age [01]: [\d.]+ %", _hover(browser, _card(browser, "Age of the trained tokens")))
    timeline = browser.find_elements(By.CSS_SELECTOR, ".card.wide")[0]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", timeline)
    assert re.search(r"trainer\.0|engine\.\d", _hover(browser, timeline))
    browser.find_element(By.CSS_SELECTOR, "details > summary").click()
    assert "rollout: started" in browser.find_element(By.CSS_SELECTOR, "details").text
    assert {"scorer_<b>", "a&amp;b"} <= set(_card(browser, "rollout: rejected").text.splitlines())
    _silent(browser)


def test_samples_are_text_with_switchable_colours(browser: Chrome, pages: dict[str, Path]) -> None:
    _open(browser, pages["run"].as_uri())
    browser.find_element(By.LINK_TEXT, "Samples").click()
    Select(browser.find_element(By.CSS_SELECTOR, "[aria-label=outcome]")).select_by_value("trained")
    _until(browser, lambda _: "in step 25" in browser.find_element(By.CSS_SELECTOR, ".group").text)
    body = browser.find_element(By.CSS_SELECTOR, ".group")
    for words in (
        "What is 6*7?</script>",
        "<img src=x onerror=alert(1)>",
        "␛[31m",
        "🦀",
        "⚙ add</script>(1␇) → <b>42</b> (0.25 s)",
        "why the answer is <i>right</i>",
        "scorer_error: 1/0 </script>",
    ):
        assert words in body.text
    assert len(body.find_elements(By.CSS_SELECTOR, ".text .token")) == len(NASTY) + 1
    seen = {}
    for name in ("version", "logprob", "ratio", "mask", "mismatch"):
        Select(browser.find_element(By.CSS_SELECTOR, "[aria-label='colour of tokens']")).select_by_value(name)
        tokens = body.find_elements(By.CSS_SELECTOR, ".text .token")
        seen[name] = [token.value_of_css_property("background-color") for token in tokens]
    assert [len(set(seen[name][:-1])) for name in ("version", "logprob", "ratio", "mask", "mismatch")] == [2, 1, len(NASTY) - 1, 4, 3], (
        "ratios above 2 share a colour"
    )
    assert {colours[-1] for colours in seen.values()} == {"rgba(0, 0, 0, 0)"}, "an observation has no colour"
    ActionChains(browser).move_to_element(tokens[0]).perform()
    tip = browser.find_element(By.ID, "tip").text
    for words in ("</script>", "version 19", "log-probability in the engine -0.5", "ratio 1", "rejected by token_band", "in 0 of 2 layers"):
        assert words in tip
    _silent(browser)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 768, 390])
def test_pages_fit_every_window_in_its_colours(browser: Chrome, pages: dict[str, Path], width: int, scheme: str) -> None:
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": 1400, "deviceScaleFactor": 1, "mobile": False})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    try:
        for page in pages.values():
            _open(browser, page.as_uri())
            paper = _card(browser, "Policy loss").find_element(By.CSS_SELECTOR, ".main-svg").value_of_css_property("background-color")
            assert re.findall(r"\d+", paper)[:3] == (["255"] * 3 if scheme == "light" else ["13", "17", "23"])
            for tab in ("Report", "Samples", "Configuration"):
                browser.find_element(By.LINK_TEXT, tab).click()
                assert browser.execute_script("return document.documentElement.scrollWidth") == width, tab
            browser.find_element(By.LINK_TEXT, "Report").click()
            assert max(row.size["height"] for row in browser.find_elements(By.CSS_SELECTOR, "#summary tr")) < 200
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_samples_are_searched_and_filtered_by_reward(browser: Chrome, pages: dict[str, Path]) -> None:
    _open(browser, pages["run"].as_uri())
    browser.find_element(By.LINK_TEXT, "Samples").click()
    typed = (("reward from", "1"), ("search text", "6*7?</SCRIPT>"), ("to", "0"), ("to", f"{Keys.BACKSPACE}2"), ("search text", " nowhere"))
    counts = []
    for name, keys in typed:
        browser.find_element(By.CSS_SELECTOR, f"[aria-label='{name}']").send_keys(keys)
        counts.append(len(browser.find_elements(By.CSS_SELECTOR, ".list button")))
    assert counts == [6, 6, 0, 6, 0]
    _silent(browser)


def test_runs_are_compared(browser: Chrome, pages: dict[str, Path]) -> None:
    _open(browser, pages["comparison"].as_uri())
    _draw_all(browser)
    assert [one.text for one in browser.find_elements(By.CSS_SELECTOR, "#summary th")][1:] == ["first", "second", "difference"]
    card = _card(browser, "Policy loss")
    assert {"first", "second"} <= set(card.text.splitlines())
    told = _hover(browser, card)
    assert "first" in told
    assert "second" in told
    _card(browser, "Age of the trained tokens · second")
    browser.find_element(By.LINK_TEXT, "Configuration").click()
    text = browser.find_element(By.ID, "settings").text
    assert browser.find_element(By.ID, "versions-differ").text.splitlines()[1:] == ["torch 2.8.0 2.9.0"]
    assert "run.seed 0 1" in text
    assert text.index("run.seed 0 1") < text.index("The runs agree on", text.index("Configuration")) < text.index("rollout.group_size 8")
    browser.find_element(By.LINK_TEXT, "Samples").click()
    Select(browser.find_element(By.CSS_SELECTOR, "[aria-label=run]")).select_by_visible_text("second")
    _until(browser, lambda _: "What is" in browser.find_element(By.CSS_SELECTOR, ".group").text)
    _silent(browser)
