"""A real browser, where there is one on the machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --disable-dev-shm-usage"
)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium, driven by Selenium."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install -e '.[test]'")
    from selenium.common import exceptions

    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no browser on this machine: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    try:
        made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    except exceptions.WebDriverException as error:  # a browser that cannot start here
        pytest.skip(f"{browser} does not start: {str(error).splitlines()[0]}")
    yield made
    made.quit()


class Page:
    """A page in the browser, and what is asked of it again and again."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, file: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> Page:
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})
        self.driver.get(file.as_uri())
        return self

    def run(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def choose(self, name: str, text: str) -> None:
        from selenium.webdriver.support.ui import Select

        Select(self.find(f"[name={name}]")).select_by_visible_text(text)

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.keys import Keys

        self.driver.switch_to.active_element.send_keys(*(getattr(Keys, key) for key in keys))

    @property
    def complaints(self) -> list[Any]:
        return [entry for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture
def page(chromium: Any) -> Page:
    return Page(chromium)
