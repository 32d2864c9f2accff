"""Chromium without a screen, for tests of pages."""

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
