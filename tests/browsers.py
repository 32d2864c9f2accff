"""Chromium without a screen, for tests of pages."""

import json
import shutil
import tempfile
from contextlib import contextmanager

import pytest

needs_chromium = pytest.mark.skipif(not all(map(shutil.which, ("chromium", "chromedriver"))), reason="needs Chromium")


@contextmanager
def chromium(size="1400,1000", *flags):
    """A driver of Chromium, whose console and network are logged."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory() as profile:
        for flag in (
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
            *("--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}"),
            *(f"--window-size={size}", *flags),
        ):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


def ready(driver):
    """Forgets what happened before: the page that Chromium begins with."""
    driver.execute_cdp_cmd("Network.enable", {})
    driver.get("about:blank")
    driver.get_log("browser")
    driver.get_log("performance")


def assert_silent(driver, *origins):
    """Since the last call, the console had no complaint, and nothing was requested but from these origins."""
    complaints = [entry for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert not complaints, complaints
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    requested = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert all(address.startswith((*origins, "data:")) for address in requested), requested
