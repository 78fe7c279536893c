"""The live page in a real browser: it opens, updates, and a slider changes the curves."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from PIL import Image
from test_server import TOKEN, running

from acclimate import cli
from acclimate.cli import demo as demo_command
from acclimate.data import bundled
from acclimate.errors import InputError
from acclimate.serve.demo import Demo
from acclimate.serve.opening import open_adapter
from acclimate.serve.service import Refused, Service
from acclimate.serve.streams import Streams
from support import child_environment

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --window-size=1100,1400 --force-prefers-reduced-motion"
)


def test_a_shift_harms_the_source_model_and_adaptation_helps():
    adapter, _, _ = open_adapter("bundled", "keel", device="cpu")
    service = Service(Streams(adapter), show=False)
    demo = Demo(service, bundled.model(), batch=64)
    demo.set({"frost": 5})
    for _ in range(4):
        demo.step()
    service.close()
    points = demo.state()["points"]
    source, adapted = (sum(point[name] for point in points) / (4 * 64) for name in ("source", "adapted"))
    assert source < 0.5 and adapted > source + 0.1
    with pytest.raises(InputError, match="no 'rain'"):
        demo.set({"rain": 1})
    with pytest.raises(InputError, match="from 0 to 5"):
        demo.set({"fog": 6})
    assert len(service.recent) == 4 and all(recent.truth is not None for recent in service.recent)
    assert demo.state()["weather"] == {"fog": 0, "frost": 5, "noise": 0}


def test_the_stream_goes_on_after_a_batch_that_was_refused():
    adapter, _, _ = open_adapter("bundled", "source", device="cpu")
    service = Service(Streams(adapter), show=False)
    demo = Demo(service, bundled.model(), batch=1, pause=0)
    step, again, refusals = demo.step, threading.Event(), [Refused(503, "The request waited for more than 30 seconds.")]

    def refused_once() -> None:
        if refusals:
            raise refusals.pop()
        step()
        again.set()

    demo.step = refused_once
    demo.start()
    assert again.wait(30)
    service.close()
    demo._thread.join(30)
    assert not demo._thread.is_alive()


def test_the_demonstration_opens_its_page_where_somebody_sees_it(monkeypatch):
    opened = []
    monkeypatch.setattr(demo_command, "run_server", lambda app, given, *, opens: opened.append(opens))
    for screen, arguments in ((True, []), (False, []), (True, ["--no-open"]), (False, ["--open"])):
        monkeypatch.setattr(demo_command, "_has_screen", lambda screen=screen: screen)
        assert cli.main(["demo", *arguments]) == 0
    assert opened == [True, False, False, True]
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", "linux")
    found = []
    for terminal, display in ((True, ":0"), (True, ""), (False, ":0")):
        monkeypatch.setattr(sys, "stdout", Mock(isatty=lambda terminal=terminal: terminal))
        monkeypatch.setenv("DISPLAY", display), monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
        found.append(demo_command._has_screen())
    assert found == [True, False, False]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    command = [sys.executable, "-m", "acclimate", "demo", "--port", "0"]
    with subprocess.Popen(command, env=child_environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found
        yield found[0]
        process.kill()


@pytest.mark.parametrize(("body", "code"), [(b"[" * 900, 400), (b"[]", 400), (b'{"fog": 9}', 400), (b" " * 2000, 413)])
def test_wrong_severities_are_refused(address, body, code):
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{address}demo", body, timeout=60)
    assert refused.value.code == code and json.loads(refused.value.read())["error"]


@pytest.fixture
def browser(tmp_path) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    if BROWSER is None or DRIVER is None:
        pytest.skip("no Chromium with its driver on this machine (Debian's packages are chromium and chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for option in (*OPTIONS.split(), f"--user-data-dir={tmp_path}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield browser
    browser.quit()


def test_the_page_updates_and_a_slider_changes_the_curves(address, browser, tmp_path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    def find(selector: str) -> Any:
        return browser.find_element(By.CSS_SELECTOR, selector)

    def until(condition: Callable[[Any], Any]) -> Any:
        return WebDriverWait(browser, 60).until(condition)

    def batches() -> int:
        found = re.search(r"Batch (\d+)", find("#demo-note").text)
        return int(found[1]) if found else 0

    browser.get(address)
    until(lambda _: batches() > 0)
    first, clear = batches(), int(find("#source-accuracy").text.split()[0])
    until(lambda _: batches() > first)
    assert "keel" in find("#about").text and find("article h3").text == "demo"
    fog = find("input[name=fog]")
    for _ in range(5):
        fog.send_keys(Keys.ARROW_RIGHT)  # sliders work with the keyboard
    until(lambda _: "fog 5" in find("#curves .grid").text)
    until(lambda _: int(find("#source-accuracy").text.split()[0]) < clear - 20)
    assert re.match(r"[\d.]+,[\d.]+ ", find("#curves .line.adapted").get_attribute("points"))
    assert "right on" in find("#curves-text").get_attribute("textContent")
    until(lambda _: browser.find_elements(By.CSS_SELECTOR, "#recent li img"))
    assert re.search("source: .* [✓✗]\nadapted: .* [✓✗]", find("#recent li").text), "the right one is not marked"
    trends = [each.get_attribute("aria-label") for each in browser.find_elements(By.CSS_SELECTOR, ".trends svg")]
    assert [each.partition(" of the latest ")[0] for each in trends] == [
        "mean entropy",
        "estimated accuracy",
        "estimated harm",
    ]
    assert re.fullmatch(r"mean entropy of the latest \d+ batches: from [\d.]+ to [\d.]+", trends[0])
    find("article [data-action=freeze]").click()
    until(lambda _: "(frozen)" in find("article h3").text)
    Image.fromarray(bundled.images().pixels[0]).save(tmp_path / "boot.png")
    find("#file").send_keys(os.fspath(tmp_path / "boot.png"))
    until(lambda _: re.fullmatch(rf"({'|'.join(bundled.CLASSES)}) \(\d+ %\)", find("#answer").text))
    for name in ("wrong.png", "wrong.txt"):
        (tmp_path / name).write_bytes(b"no image")
        find("#file").send_keys(os.fspath(tmp_path / name))
        until(lambda _: "cannot be read" in find("#answer").text)
        browser.execute_script("document.getElementById('answer').textContent = ''")
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 380, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    until(lambda _: find("#curves").get_dom_attribute("viewBox").split()[2] == str(find("#curves").size["width"]))
    assert browser.execute_script("return document.documentElement.scrollWidth") == 380, "it is wider than a telephone"
    unnamed = browser.execute_script(
        "return [...document.querySelectorAll('input, button')].filter(e => !e.labels?.length && !e.textContent).length"
    )
    assert unnamed == 0
    severe = [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert [entry["message"] for entry in severe if "400" not in entry["message"]] == []  # the wrong image got a 400


def test_a_slow_server_has_one_question_to_answer_at_a_time(address, browser):
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(address)
    browser.execute_script("window.asked = 0; window.fetch = () => { window.asked += 1; return new Promise(() => {}); }")
    WebDriverWait(browser, 60).until(lambda _: browser.execute_script("return window.asked") > 0)
    time.sleep(2.5)  # of which two pauses would be over
    assert browser.execute_script("return window.asked") == 1


def test_a_server_without_a_token_has_no_buttons(address, browser):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    def shown() -> bool:
        return any(each.is_displayed() for each in browser.find_elements(By.CSS_SELECTOR, "article button"))

    browser.get(address)
    WebDriverWait(browser, 60).until(lambda _: shown())  # in the demonstration, they are open to all
    browser.execute_script("""
        const fetched = window.fetch;
        window.fetch = async (path, options) => {
            const told = await (await fetched(path, options)).json();
            return new Response(JSON.stringify(path === "streams" ? {...told, admin: "closed"} : told));
        };
    """)
    WebDriverWait(browser, 60).until(lambda _: not shown())


def test_the_buttons_need_the_token(browser, tmp_path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    pixels = bundled.PREPROCESS.normalised(bundled.images().pixels[:4]).numpy()
    with running(tmp_path) as server:
        server.infer(pixels, "hall/ü 1")
        assert server.steps("hall/ü 1", 1) == 1
        browser.get(f"http://127.0.0.1:{server.port}/")

        def told(text: str) -> None:
            find = "return document.querySelector('article')?.textContent ?? ''"
            WebDriverWait(browser, 60).until(lambda _: text in browser.execute_script(find))

        told("steps1")
        card = browser.find_element(By.CSS_SELECTOR, "article")
        assert card.get_attribute("aria-label") == "Stream hall/ü 1"
        reset, token = card.find_element(By.CSS_SELECTOR, "[data-action=reset]"), browser.find_element(By.ID, "token")
        for given, answer in (("", "The token is missing or wrong."), (TOKEN, "Done: reset.")):
            token.send_keys(given)
            reset.click()
            told(answer)
        told("steps0")
        assert browser.find_elements(By.CSS_SELECTOR, "#recent img"), "a server on this machine alone shows images"
