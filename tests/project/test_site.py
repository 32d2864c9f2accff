"""The documentation as a site: it is built from what is here, and needs nothing from elsewhere to be read."""

import functools
import http.server
import importlib
import logging
import os
import re
import subprocess
import sys
import threading
import urllib.parse
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browsers import assert_silent, chromium, needs_chromium, ready
from helpers import ROOT
from tools import public_api
from tools.public_names import public_names

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("mkdocs")
site_hooks = importlib.import_module("tools.site_hooks")

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
#: nothing answers there
NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorials_are_stored_without_results(path):
    """Building the site runs them, and differences between versions are those of the text."""
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells and not any(cell.outputs or cell.execution_count for cell in cells)
    assert notebook.cells[0].source.startswith("# ") and "## Next" in notebook.cells[-1].source
    assert set(notebook.metadata) == {"kernelspec", "language_info"}, "jupyter nbconvert --clear-output"


def test_references_of_docstrings_become_markdown():
    in_markdown = importlib.import_module("tools.reference_names").in_markdown
    text = "As in [1]_.\n\n    .. [1] Bach et al. 2015, eq. 60, https://doi.org/10.1371/x\n    .. [2] Others"
    assert in_markdown(text) == "As in [1].\n\n    1. Bach et al. 2015, eq. 60, <https://doi.org/10.1371/x>\n    2. Others"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; what would be fetched while it is built is an error."""
    folder = tmp_path_factory.mktemp("site")
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), NOWHERE)
    environment = {**os.environ, **proxies, "no_proxy": "127.0.0.1,localhost", "NO_MKDOCS_2_WARNING": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return folder


class _Loaded(HTMLParser):
    """The addresses that a page loads, and the marks that make its scripts load more."""

    def __init__(self, text):
        super().__init__()
        self.addresses, self.marks = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        found = [attributes.get(name) for name in ("src", "data", "poster")] if tag != "a" else []
        if tag == "link" and attributes.get("rel") not in ("canonical", "prev", "next"):
            found.append(attributes["href"])
        found += [part.split()[0] for part in attributes.get("srcset", "").split(",") if part.strip()]
        found += re.findall(r"url\(['\"]?([^'\")]+)", attributes.get("style") or "")
        self.addresses += filter(None, found)
        classes = (attributes.get("class") or "").split()
        self.marks += [mark for mark in ("mermaid", "arithmatex") if mark in classes]
        self.marks += [attributes["data-md-component"]] if attributes.get("data-md-component") == "source" else []


@pytest.mark.examples
def test_nothing_is_loaded_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    for path in pages:
        loaded = _Loaded(path.read_text())
        elsewhere = [one for one in loaded.addresses if re.match(r"(https?:)?//", one)]
        assert not elsewhere and not loaded.marks, (path, elsewhere, loaded.marks)
    for path in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(['\"]?|@import\s*['\"])(?:https?:)?//[^)'\"]*", path.read_text()), path


@pytest.mark.examples
def test_the_reference_has_every_public_name(site):
    names = {name for name, _ in public_names()}
    assert len(names) > 300 and names <= site_hooks.reference(site)
    page = (site / "reference" / "rules.html").read_text()
    assert 'id="lrpfx.rules.Gamma"' in page and 'id="lrpfx.rules.Hook.propagate"' in page


@pytest.mark.examples
def test_names_in_the_text_lead_to_the_reference(site):
    page = (site / "ledger.html").read_text()
    assert re.search(r'href="reference/attributing\.html#lrpfx\.ledger"[^>]*><code>lrpfx\.ledger', page)
    page = (site / "composites.html").read_text()
    assert re.search(r'href="reference/composites\.html#lrpfx\.composites\.GammaByDepth"', page)


@pytest.mark.examples
def test_a_name_that_is_missing_fails(site, tmp_path, caplog):
    head, body = (site / "objects.inv").read_bytes().split(b"zlib.\n")
    lines = zlib.decompress(body).splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith((b"lrpfx.attribute ", b"lrpfx.rules.Gamma "))]
    assert len(kept) == len(lines) - 2
    (tmp_path / "objects.inv").write_bytes(head + b"zlib.\n" + zlib.compress(b"".join(kept)))
    with caplog.at_level(logging.WARNING):
        site_hooks.warn_of_missing_names(tmp_path)
    assert [record.args[0] for record in caplog.records] == ["lrpfx.attribute", "lrpfx.rules.Gamma"]
    assert all(record.name.startswith("mkdocs.") for record in caplog.records), "strict mode counts no others"


@pytest.mark.examples
@pytest.mark.parametrize("name", [path.stem for path in TUTORIALS])
def test_tutorials_show_pictures(site, name):
    page = (site / "tutorials" / f"{name}.html").read_text()
    assert page.count('<div class="output') >= 4 and 'class="output-' not in page
    assert ("data:image/" in page or 'title="' in page) and "Traceback" not in page


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def address(site):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with chromium("1400,1000", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1") as driver:
        ready(driver)
        yield driver


def _brightness(color):
    return sum(map(float, re.findall(r"[\d.]+", color)[:3]))


@needs_chromium
@pytest.mark.examples
@pytest.mark.parametrize("page", ["", "reference/explaining.html", "tutorials/photograph.html"])
def test_pages_in_a_browser(address, browser, page):
    """In dark and light: no complaint in the console, no request to another host, and all pictures are there."""
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(address + page)
    for _ in range(2):
        scheme = browser.execute_script("return document.body.dataset.mdColorScheme")
        ink, behind = (
            _brightness(browser.execute_script(f"return getComputedStyle(document.body).{name}"))
            for name in ("color", "backgroundColor")
        )
        assert scheme in ("default", "slate") and (ink > behind) == (scheme == "slate")
        for image in browser.find_elements("css selector", ".md-content img"):
            browser.execute_script("arguments[0].scrollIntoView()", image)
            WebDriverWait(browser, 20).until(lambda _, image=image: image.get_property("naturalWidth") > 0)
        browser.find_element("css selector", "[data-md-component=palette] label:not([hidden])").click()
        WebDriverWait(browser, 20).until(
            lambda _, scheme=scheme: browser.execute_script("return document.body.dataset.mdColorScheme") != scheme
        )
    assert_silent(browser, address)


def found_by(browser, words):
    """The search's results in their order: page#section."""
    from selenium.webdriver.support.ui import WebDriverWait

    field = browser.find_element("css selector", ".md-search__input")
    browser.execute_script("arguments[0].focus()", field)
    field.send_keys(words)

    def results(_):
        links = browser.find_elements("css selector", ".md-search-result__link")
        parts = [urllib.parse.urlsplit(link.get_attribute("href")) for link in links]
        return [f"{Path(part.path).name}#{part.fragment}" for part in parts]

    return WebDriverWait(browser, 30).until(results)


#: what is looked for -> a result among the first three pages
SEARCHES = {
    "Explainer": "explaining.html#lrpfx.Explainer",
    "GammaByDepth": "composites.html#lrpfx.composites.GammaByDepth",
    "heatmap": "visualizing.html#",
    "saliency": "glossary.html#heatmap-saliency-map-attribution-map",
    "CUDA": "gpus.html#",
    "grad-cam": "from_pytorch_grad_cam.html#",
    "record": "intermediate_relevance.html#",
    "conservation": "ledger.html#",
    "SHAP": "from_shap.html#",
    "baseline": "glossary.html#reference-baseline",
    "graph network": "graphs.html#",
}


@needs_chromium
@pytest.mark.examples
@pytest.mark.parametrize("words", SEARCHES)
def test_search(site, address, browser, words):
    """On a server and from a file, where browsers start no workers."""
    for place, origins in ((address, (address, "blob:")), (f"{site.as_uri()}/index.html", ("file://", "about:"))):
        browser.get(place)
        found = found_by(browser, words)
        pages = list(dict.fromkeys(one.partition("#")[0] for one in found))
        assert SEARCHES[words] in found and pages.index(SEARCHES[words].partition("#")[0]) < 3, found
        assert_silent(browser, *origins)


@needs_chromium
@pytest.mark.examples
def test_the_routes_of_the_start_page(site, browser):
    """From files and without a network, each route leads to a page with its heading, and to the section that it names."""
    start = f"{site.as_uri()}/index.html"
    browser.get(start)
    routes = [
        one.get_attribute("href") for one in browser.find_elements("css selector", ".md-content .routes a, .md-content td a")
    ]
    assert len(routes) > 20
    for route in dict.fromkeys(routes):
        browser.get(start)
        link = next(one for one in browser.find_elements("css selector", ".md-content a") if one.get_attribute("href") == route)
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", link)
        link.click()
        assert browser.current_url == route and route.startswith("file://")
        assert browser.find_element("css selector", ".md-content h1").text
        section = route.partition("#")[2]
        assert not section or browser.find_element("id", section).is_displayed()
        assert_silent(browser, "file://")


@pytest.mark.examples
def test_links_lead_to_files(site):
    """Every link within the site, as it is: nobody completes "guide/" to "guide/index.html" without a server."""
    for path in site.rglob("*.html"):
        for link in re.findall(r'<a [^>]*href="([^"#?]+)', path.read_text()):
            if not re.match(r"\w+:", link) and path.name != "404.html":
                assert (path.parent / urllib.parse.unquote(link)).is_file(), (path, link)


@pytest.mark.examples
def test_pages_for_agents(site):
    """llms.txt leads to Markdown, and one page has every public name."""
    text = (site / "llms.txt").read_text()
    pages = re.findall(r"\]\((.+?)\)", text)
    assert text.startswith("# lrpfx\n\n> ") and len(pages) > 40
    assert all((site / page).read_text().strip() for page in pages)
    assert re.search(r"^- \[The ledger\]\(ledger\.md\): Relevance is a share of the output", text, re.MULTILINE)
    listed = (site / "reference" / "all.md").read_text()
    assert all(name in listed for name, _ in public_names())


def test_signatures_are_those_of_the_code():
    page = public_api.page()
    assert "- `lrpfx.transform(model: Model | Captured, composite: Composite" in page
    assert "- `lrpfx.node_names(" in page and "- `lrpfx.Explanation.balance`: How much" in page
    entries = [line for line in page.split("\n") if line.startswith("- `lrpfx.")]
    assert len(entries) > 400 and all(re.search(r"`: \S", line) for line in entries if "__version__" not in line)
