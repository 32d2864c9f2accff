"""A report in Chromium, with the network off: `make test-examples`."""

import json
import math
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from browsers import assert_silent, chromium, needs_chromium, ready
from helpers import ROOT, Layered
from reports.test_drawing import clashing
from reports.test_encoding import mean_over
from reports.test_report import of_equal_names
from tools import report_pictures

import lrpfx
from lrpfx.demo import photographs
from lrpfx.reports.pages.report import document

pytestmark = pytest.mark.examples

LARGEST, LATEST = 5e6, 2000  # bytes and milliseconds for a report on a ResNet-50
SOON = 2000  # milliseconds for a step in a graph of thousands of nodes
WIDE, NARROW = (1280, 900), (390, 844)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_default_dtype(torch.float32)
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="module")
def two_composites(folder):
    found = report_pictures.of_photographs()
    return lrpfx.report(found, folder / "lite0.html"), document(found)


@pytest.fixture(scope="module")
def browser():
    with chromium("1400,1000", "--host-resolver-rules=MAP * ~NOTFOUND") as driver:
        ready(driver)
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
        yield driver


@pytest.fixture(autouse=True)
def _silent(request):
    """Whatever a test does in the browser, the console has no complaint, and nothing is requested but the file."""
    torch.set_default_dtype(torch.float32)
    browser = request.getfixturevalue("browser") if "browser" in request.fixturenames else None
    yield
    if browser is not None:
        assert_silent(browser, "file://")


def opened(browser, path):
    browser.get(f"file://{path}")
    assert browser.execute_script("return document.body.dataset.ready") == "true"


def all_of(browser, selector):
    return browser.find_elements("css selector", selector)


def one(browser, selector):
    (found,) = all_of(browser, selector)
    return found


def button(browser, text):
    (found,) = [each for each in all_of(browser, "button") if each.text == text]
    return found


def boxes(browser):
    """What assistive technology is told of the boxes of the graph."""
    return browser.execute_script(
        "return [...document.querySelectorAll('.graph [data-id]')].map(e => e.getAttribute('aria-label'))"
    )


def type_keys(browser, *keys):
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser).send_keys(*keys).perform()


@needs_chromium
def test_it_opens(browser, two_composites):
    path, data = two_composites
    opened(browser, path)
    assert one(browser, "h1").text == "chelsea.png, china.jpg"
    assert one(browser, ".side h2").text == "tiger cat"
    assert len(boxes(browser)) <= 26 and any(label.startswith("output, output") for label in boxes(browser))
    assert len(all_of(browser, ".graph image")) > 10
    size = browser.execute_script(
        "const i = document.querySelector('.photograph img'); return [i.naturalWidth, i.naturalHeight]"
    )
    assert size == [451, 300]
    assert json.loads(browser.execute_script("return document.getElementById('document').textContent")) == json.loads(
        json.dumps(data)
    )


@needs_chromium
def test_modules_fold_and_unfold(browser, two_composites):
    opened(browser, two_composites[0])
    button(browser, "Fit").click()
    (block,) = all_of(browser, '[data-id="g:_blocks.10"]')
    assert block.get_attribute("aria-expanded") == "false"
    before = len(boxes(browser))
    block.click()
    assert one(browser, '[data-id="g:_blocks.10"]').get_attribute("aria-expanded") == "true"
    assert len(boxes(browser)) > before and one(browser, ".inspector h2").text == "_blocks.10"
    button(browser, "Unfold all").click()
    nodes = len(two_composites[1]["graphs"][0]["nodes"])
    assert sum(", rule " in label for label in boxes(browser)) == nodes
    button(browser, "Fold all").click()
    assert len(boxes(browser)) <= 12
    assert "folded" in one(browser, ".graph-pane [aria-live]").get_attribute("textContent")


@needs_chromium
def test_a_search_finds_a_node_and_its_account(browser, two_composites):
    path, data = two_composites
    opened(browser, path)
    type_keys(browser, "/", "blocks.10._exp")
    assert [each.text.splitlines()[0] for each in all_of(browser, "[role=option]")] == ["_blocks.10._expand_conv"]
    type_keys(browser, "\ue007")
    details = one(browser, ".inspector").text
    names = [node["name"] for node in data["graphs"][0]["nodes"]]
    node = data["graphs"][0]["nodes"][names.index("_blocks.10._expand_conv")]
    for text in (
        node["name"],
        node["rule"],
        node["chosenBy"],
        "_blocks.10._bn0",
        node["source"],
        node["line"],
        " × ".join(map(str, node["shape"])),
    ):
        assert text in details
    (row,) = [row for row in data["views"][0]["ledger"]["rows"] if row[0] == names.index(node["name"])]
    shown = browser.execute_script("return [...document.querySelectorAll('.inspector .bars tr')].map(r => r.innerText)")
    assert f"{row[1]:.3f}".replace("-", "−") in shown[0] and any("bias" in line for line in shown)
    chosen = browser.switch_to.active_element
    assert chosen.get_attribute("data-id") == f"n:{names.index(node['name'])}"


class Norms(Layered):
    """`norm` is a module; others have the word in their names, and more have the rule Norm."""

    def forward(self, x):
        return self.norm(x) + self.first_norm(x) + self.normal(x) * 1.0


@needs_chromium
def test_names_are_found_before_rules_and_modules_are_opened(browser, folder):
    norm = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    model = Norms(norm=norm, first_norm=torch.nn.Linear(4, 4), normal=torch.nn.Linear(4, 4))
    _, path = report_of(model, folder / "norms.html")
    opened(browser, path)
    button(browser, "Fold all").click()
    type_keys(browser, "/", "norm")
    found = [each.text.splitlines() for each in all_of(browser, "[role=option]")]
    names = [name for name, _ in found]
    assert (found[0] == ["norm", "module of 2 nodes"] and names[1] == "first_norm") or names[1].startswith("norm")
    by_name = ["norm" in name for name in names]
    assert by_name == sorted(by_name, reverse=True) and not all(by_name) and {"first_norm", "normal"} <= set(names)
    type_keys(browser, "\ue007")
    (module,) = all_of(browser, '[data-id="g:norm"]')
    assert module.get_attribute("aria-expanded") == "true" and one(browser, ".inspector h2").text == "norm"
    assert browser.switch_to.active_element == module and '"norm.0, ' in json.dumps(boxes(browser))
    type_keys(browser, "/", "linear normal")
    (option,) = all_of(browser, "[role=option]")
    assert option.text.splitlines()[0] == "normal"
    option.click()
    assert one(browser, ".inspector h2").text == "normal" and not one(browser, ".results").is_displayed()


@needs_chromium
def test_the_address_leads_back(browser, two_composites):
    path = two_composites[0]
    opened(browser, path)
    button(browser, "EpsilonPlusFlat").click()
    button(browser, "palace").click()
    type_keys(browser, "/", "blocks.10._exp", "\ue007")
    node = browser.current_url
    button(browser, "Ledger").click()
    ledger = browser.current_url
    for address, panel in ((node, "graph"), (ledger, "ledger")):
        browser.get("about:blank")
        browser.get(address)
        assert one(browser, ".side h2").text == "palace" and "EpsilonPlusFlat(" in one(browser, ".side").text
        assert all_of(browser, "[role=tabpanel]:not([hidden])")[0].get_attribute("id") == panel
        button(browser, "Graph").click()
        assert one(browser, ".inspector h2").text == "_blocks.10._expand_conv"
    browser.execute_script("location.hash = 'module=_blocks.3'")
    wait_for(lambda: one(browser, ".inspector h2").text == "_blocks.3")
    browser.get("about:blank")
    opened(browser, f"{path}#view=99&node=nothing&module=<b>&show=else&place=x")
    assert one(browser, ".inspector h2").text == "How to read this"


@needs_chromium
def test_bands_have_the_shapes_of_values(browser, folder):
    x = torch.rand(2, 3, 8, 8)
    layers = torch.nn.Conv2d(3, 5, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(180, 2)
    module = lrpfx.transform(torch.nn.Sequential(*layers).eval(), lrpfx.composites.EpsilonPlus(), example_inputs=x)
    opened(browser, lrpfx.report((module, x, 0), folder / "shapes.html"))
    assert sorted(each.text for each in all_of(browser, ".graph .shape")) == sorted(["2", "180", "5×6×6", "5×6×6", "3×8×8"])


@needs_chromium
def test_the_minimap_moves_the_window(browser, two_composites):
    opened(browser, two_composites[0])
    button(browser, "Fit").click()
    assert not one(browser, ".minimap").is_displayed()
    button(browser, "Unfold all").click()
    assert one(browser, ".minimap").is_displayed()
    in_sight = (
        "const c = document.querySelector('.graph').getBoundingClientRect();"
        "const e = [...document.querySelectorAll('.graph [data-id]')].filter(e => { const b = e.getBoundingClientRect();"
        "return b.bottom > c.top && b.top < c.bottom }); return e.map(each => each.ariaLabel)"
    )
    assert any(label.startswith("output, ") for label in browser.execute_script(in_sight))
    map_ = one(browser, ".minimap canvas")
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser).move_to_element_with_offset(map_, 0, map_.size["height"] // 2 - 2).click().perform()
    found = browser.execute_script(in_sight)
    assert any(", input, " in label for label in found) and not any(label.startswith("output, ") for label in found)


@needs_chromium
def test_terms_and_colors_are_explained(browser, two_composites):
    opened(browser, two_composites[0])
    told = one(browser, ".meaning").text
    assert told.startswith("red: for tiger cat") and told.endswith("blue: against")
    swatches = [each.value_of_css_property("background-color") for each in all_of(browser, ".meaning .swatch")]
    red, blue = ([int(part) for part in re.findall(r"\d+", color)[:3]] for color in swatches)
    assert red[0] > max(red[1:]) and blue[2] > max(blue[:2])
    terms = {each.text: each.get_attribute("aria-description") for each in all_of(browser, ".side .term")}
    assert {"output", "bias"} <= set(terms) and all(terms.values())
    one(browser, "[aria-label^='_fc, ']").click()
    assert len(all_of(browser, ".inspector .term")) > 2
    assert all(each.size["height"] < 30 for each in all_of(browser, ".term")), "a term is cut"
    button(browser, "Ledger").click()
    for head in all_of(browser, ".accounts thead button")[3:]:
        browser.execute_script("arguments[0].focus()", head)
        assert one(browser, "[role=tooltip]").text == head.get_attribute("aria-description")
        type_keys(browser, "\ue00c")
        assert not one(browser, "[role=tooltip]").is_displayed()


@needs_chromium
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=str)
def test_words_are_whole(browser, folder, size):
    """Also long names of classes, inputs and nodes."""

    class Long(Layered):
        def forward(self, the_only_input_of_this_model_whose_name_is_long):
            return self.a_module_whose_name_is_long(the_only_input_of_this_model_whose_name_is_long)

    model = Long(a_module_whose_name_is_long=torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))).eval()
    x = torch.rand(1, 4)
    module = lrpfx.transform(model, lrpfx.composites.EpsilonPlus(), example_inputs=x)
    name = "a composite whose name, which its user gave, is as long as this"
    with window(browser, size):
        opened(browser, lrpfx.report({name: (module, x, [0, 1]), "other": (module, x, 0)}, folder / "long.html"))
        assert "the_only_input_of_this_model_whose_name_is_long" in one(browser, ".side").text
        assert name in [each.text for each in all_of(browser, "[role=tab]")]
        for panel in ("Graph", "Ledger", "Compilation"):
            button(browser, panel).click()
            assert "…" not in one(browser, "body").text.replace("rules…", "").replace("Filter…", "")
            cut = browser.execute_script(
                "return [...document.querySelectorAll('button, th, td, h1, h2, h3, p, dd, li')].filter(e => e.offsetWidth &&"
                " getComputedStyle(e).overflowX !== 'visible' && e.scrollWidth > e.clientWidth).map(e => e.outerHTML)"
            )
            assert not cut, cut
            assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0]


@contextmanager
def window(browser, size):
    """A window of this size; a narrow one is that of a telephone."""
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": width < 500, "maxTouchPoints": 2})
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def touch(browser, *steps):
    """Fingers at the places of each step; those of the last one are lifted."""
    for kind, fingers in zip(("touchStart", *["touchMove"] * (len(steps) - 1)), steps, strict=True):
        points = [{"x": x, "y": y, "id": finger} for finger, (x, y) in enumerate(fingers)]
        browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


@needs_chromium
def test_fingers_move_zoom_and_choose(browser, two_composites):
    place = (
        'const b = document.querySelector(\'[data-id^="n:"][aria-label^="output, "]\').getBoundingClientRect();'
        "return [b.x + b.width / 2, b.y + b.height / 2, b.width]"
    )
    with window(browser, NARROW):
        opened(browser, two_composites[0])
        assert browser.execute_script("return document.documentElement.scrollWidth") <= NARROW[0]
        browser.execute_script("document.querySelector('.work').scrollIntoView()")
        x, y, width = browser.execute_script(place)
        touch(browser, [(x, y)], [(x + 10, y + 30)], [(x + 20, y + 60)])
        moved = browser.execute_script(place)
        assert moved == pytest.approx([x + 20, y + 60, width], abs=2)
        assert one(browser, ".inspector h2").text == "How to read this", "moving the graph by a box chose it"
        fingers = [[(150 - step, y + 100), (150 + step, y + 100)] for step in (30, 45, 60)]
        touch(browser, *fingers)
        assert browser.execute_script(place)[2] == pytest.approx(2 * width, rel=0.05)
        x, y, _ = browser.execute_script(place)
        touch(browser, [(x, y)])
        wait_for(lambda: one(browser, ".inspector h2").text == "output")


def wait_for(condition, seconds=5):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@needs_chromium
def test_arrow_keys_follow_the_flow(browser, two_composites):
    opened(browser, two_composites[0])
    output = all_of(browser, '[aria-label^="output, output"]')[0]
    browser.execute_script("arguments[0].focus()", output)
    type_keys(browser, "\ue015")
    assert browser.switch_to.active_element.get_attribute("aria-label").startswith("_fc, ")
    type_keys(browser, "\ue007")
    assert one(browser, ".inspector h2").text == "_fc"


@needs_chromium
def test_targets_samples_and_composites(browser, two_composites):
    path, data = two_composites
    opened(browser, path)
    button(browser, "palace").click()
    assert one(browser, ".side h2").text == "palace"
    button(browser, "china.jpg").click()
    button(browser, "EpsilonPlusFlat").click()
    (view,) = [
        view
        for view in data["views"]
        if (view["composite"], view["sample"], view["target"]["name"]) == ("EpsilonPlusFlat", 1, "palace")
    ]
    told = one(browser, ".side").text
    assert "china.jpg" in told and "EpsilonPlusFlat(" in told and f"{view['target']['score']:.4g}" in told
    label = all_of(browser, '[aria-label^="output, output"]')[0].get_attribute("aria-label")
    assert label.endswith(f"relevance {view['ledger']['seed']:.4g}")


class Layers(torch.nn.Module):
    """Activations stand outside of the module with the layers; `between` is one through which values do not come back."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.between = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        for weight in self.parameters():
            torch.nn.init.uniform_(weight, 0.1, 0.5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.between(x)


@needs_chromium
def test_a_module_that_values_enter_again_says_so(browser, folder):
    x = torch.rand(1, 4)
    module = lrpfx.transform(Layers().eval(), lrpfx.composites.EpsilonPlus(), example_inputs=x)
    target = int(module(x).argmax())
    accounts = lrpfx.ledger(module, x, target)
    opened(browser, lrpfx.report((module, x, target), folder / "layers.html"))
    button(browser, "Fold all").click()
    told = {label.partition(",")[0]: label.rpartition("relevance ")[2] for label in boxes(browser)}
    entering = sum(entry.relevance_in for entry in accounts if entry.name in ("layers.0", "layers.1", "layers.2"))
    amount, _, words = told["layers"].partition(" ")
    assert float(amount.replace("−", "-")) == pytest.approx(entering, rel=1e-3)
    assert words == "in all" and " in all" not in told["between"]
    assert float(told["between"].replace("−", "-")) == pytest.approx(accounts.seed, rel=1e-3)
    for name, row in (("layers", "enters in all"), ("between", "enters")):
        button_of = all_of(browser, f'[data-id="g:{name}"]')[0]
        browser.execute_script("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", button_of)
        assert one(browser, ".inspector .bars th").text == row
        assert ("enters it again" in one(browser, ".inspector").text) == (name == "layers")


@needs_chromium
@pytest.mark.parametrize(
    ("weights", "target", "share", "whole"),
    [
        ((1.0, 0.0), 0, 100, "the seed"),
        ((-1.0, 0.0), 0, 100, "the seed"),
        ((1.0, 0.75), {0: 1.0, 1: -1.0}, 100, "the seed"),
        ((1.0, 0.99), {0: 1.0, 1: -1.0}, 0.5, "the magnitude of the seed"),
    ],
)
def test_shares_have_the_sign_of_the_seed(browser, folder, weights, target, share, whole):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 2, bias=False)).eval()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[1].weight.copy_(torch.tensor(weights)[:, None].expand(2, 2))
    x = torch.rand(1, 3)
    module = lrpfx.transform(model, lrpfx.composites.EpsilonPlus(epsilon=1e-9), example_inputs=x)
    accounts = lrpfx.ledger(module, x, target)
    opened(browser, lrpfx.report((module, x, target), folder / "shares.html"))
    hints = browser.execute_script(
        "return [...document.querySelectorAll('.graph .band')].map(band => {"
        "band.dispatchEvent(new PointerEvent('pointermove', {bubbles: true}));"
        "return document.querySelector('.hint').textContent })"
    )
    assert len(hints) == 3
    for hint in hints:
        told = float(re.search(r", (−?[\d.]+) % of ", hint)[1].replace("−", "-"))
        assert told == share and hint.endswith(f" of {whole}")
    assert (abs(accounts.seed) < 0.01 * accounts.seed_magnitude) == (whole != "the seed")
    label = "[aria-label^='1, Linear']"
    browser.execute_script(
        "document.querySelector(arguments[0]).dispatchEvent(new MouseEvent('click', {bubbles: true}))", label
    )
    near = [each.text for each in all_of(browser, ".inspector .neighbours")]
    assert len(near) == 2 and all(f"shares of {whole}" in text and f"({share} %)" in text for text in near)


@needs_chromium
def test_the_whole_of_a_tall_graph_fits(browser, folder):
    x = torch.rand(1, 4)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(300))).eval()
    for layer in model:
        torch.nn.init.eye_(layer.weight)
    module = lrpfx.transform(model, lrpfx.composites.EpsilonPlus(), example_inputs=x)
    opened(browser, lrpfx.report((module, x, 0), folder / "tall.html"))
    button(browser, "Unfold all").click()
    button(browser, "Fit").click()
    inside = (
        "const c = document.querySelector('.graph').getBoundingClientRect();"
        "return [...document.querySelectorAll('.graph [data-id]')].every(e => { const b = e.getBoundingClientRect();"
        "return b.top >= c.top && b.bottom <= c.bottom && b.left >= c.left && b.right <= c.right && b.height > 0 })"
    )
    assert browser.execute_script(inside)
    button(browser, "−").click()
    assert browser.execute_script(inside)


@needs_chromium
def test_printing_keeps_the_order_and_the_filter_of_the_ledger(browser, two_composites):
    opened(browser, two_composites[0])
    button(browser, "Ledger").click()
    all_of(browser, ".accounts thead button")[3].click()
    one(browser, ".ledger input").send_keys("blocks.3.")
    rows = one(browser, ".accounts tbody").text
    for event in ("beforeprint", "afterprint"):
        browser.execute_script("dispatchEvent(new Event(arguments[0]))", event)
        assert (
            one(browser, ".accounts tbody").text == rows and one(browser, ".ledger input").get_property("value") == "blocks.3."
        )
        assert len(all_of(browser, "[aria-sort=descending]")) == 1
    button(browser, "palace").click()
    assert one(browser, ".accounts tbody").text != rows


@needs_chromium
def test_each_tab_shows_what_it_names(browser, folder):
    """Also where samples, composites and targets have equal names."""
    found = of_equal_names()
    data = document(found)
    opened(browser, lrpfx.report(found, folder / "equal.html"))
    for view in data["views"]:
        sample = data["samples"][view["sample"]]["name"]
        for row, text in (("Sample", sample), ("Composite", view["composite"]), ("Explained", view["target"]["name"])):
            (tab,) = [each for each in all_of(browser, f'[aria-label="{row}"] [role=tab]') if each.text == text]
            tab.click()
        assert sorted(each.text for each in all_of(browser, ".choice [aria-selected=true]")) == sorted(
            [sample, view["composite"], view["target"]["name"]]
        )
        assert one(browser, ".side h2").text == view["target"]["name"]
        told = [float(text.replace("−", "-")) for text in re.findall(r"output ([−\d.e]+) ·", one(browser, ".side .note").text)]
        assert told == [pytest.approx(view["target"]["score"], rel=1e-3)] and view["rules"] in one(browser, ".side").text
        drawn = browser.execute_script("return document.querySelector('.graph [aria-label^=\"output, \"]').ariaLabel")
        assert float(drawn.rpartition(" ")[2].replace("−", "-")) == pytest.approx(view["ledger"]["seed"], rel=1e-3)


@needs_chromium
def test_samples_of_different_composites(browser, folder):
    """The tabs that are chosen are those of what is shown."""
    model = torch.nn.Linear(4, 3)
    composites = {"one": lrpfx.composites.EpsilonPlus(), "other": lrpfx.composites.EpsilonPlusFlat()}
    found = {}
    for name, composite in composites.items():
        x = torch.rand(1, 4)
        found[name] = (lrpfx.transform(model, composite, example_inputs=x), x, [0, 1] if name == "one" else [2, 1])
    opened(browser, lrpfx.report(found, folder / "different.html"))
    for sample, composite, target in (
        ("inputs (2)", "other", "class 2"),
        ("inputs", "one", "class 0"),
        ("inputs (2)", "other", "class 2"),
    ):
        (tab,) = [each for each in all_of(browser, '[aria-label="Sample"] [role=tab]') if each.text == sample]
        tab.click()
        assert browser.switch_to.active_element.text == sample
        assert [each.text for each in all_of(browser, ".choice [aria-selected=true]")] == [sample, composite, target]
        assert one(browser, ".side h2").text == target and repr(composites[composite]) in one(browser, ".side").text
        assert [each.text for each in all_of(browser, '[aria-label="Composite"] [role=tab]')] == [composite]


@needs_chromium
def test_a_frame_shows_what_the_model_saw(browser, two_composites):
    path, data = two_composites
    opened(browser, path)
    left, top, right, bottom = data["views"][0]["map"]["box"]
    photograph, seen = one(browser, ".photograph").rect, one(browser, ".seen").rect
    enlarged = photograph["width"] / data["samples"][0]["width"]
    assert left > 1, "the preprocessing cuts off the sides"
    assert seen["x"] - photograph["x"] == pytest.approx(left * enlarged, abs=1)
    assert seen["width"] == pytest.approx((right - left) * enlarged, abs=1)
    assert seen["height"] == pytest.approx((bottom - top) * enlarged, abs=1)
    assert "The frame is what the model saw" in one(browser, ".side").text


@needs_chromium
def test_the_map_is_read_by_pointing_at_it(browser, two_composites):
    from reports.test_encoding import unpacked
    from selenium.webdriver.common.action_chains import ActionChains

    path, data = two_composites
    opened(browser, path)
    exact = unpacked(data["views"][0]["map"]["exact"])
    frame = one(browser, ".over")
    ActionChains(browser).move_to_element(frame).perform()
    text = one(browser, ".readout").text
    row, column = (int(part.split()[1].rstrip(")")) for part in text.partition("(")[2].split(", "))
    assert abs(row - 112) <= 2 and abs(column - 112) <= 2
    value = text.partition(": ")[2].partition(" ")[0].replace("−", "-")
    assert float(value) == pytest.approx(exact[row, column], rel=6e-3, abs=1e-9)
    opacity = one(browser, "input[type=range]")
    browser.execute_script("arguments[0].value = 20; arguments[0].dispatchEvent(new Event('input'))", opacity)
    assert frame.value_of_css_property("opacity") == "0.2"


@needs_chromium
@pytest.mark.parametrize("size", [(900, 300), (300, 900), (600, 1000), (400, 300)])
def test_a_pointer_reads_rows_and_columns_of_the_input(browser, folder, size):
    model = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 2)).eval()
    x = torch.rand(1, 3, *size)
    module = lrpfx.transform(model, lrpfx.composites.EpsilonPlus(), example_inputs=x)
    expected = lrpfx.attribute(module, x, 1).relevance[0].sum(0)
    opened(browser, lrpfx.report((module, x, 1), folder / "large.html"))
    point = """
        const [down, right] = arguments, edge = document.querySelector('.over').getBoundingClientRect();
        const at = {clientX: edge.left + edge.width * right, clientY: edge.top + edge.height * down, bubbles: true};
        document.querySelector('.photograph').dispatchEvent(new PointerEvent('pointermove', at));
        return document.querySelector('.readout').textContent;
    """
    for down, right in ((0.001, 0.001), (0.5004, 0.7503), (0.999, 0.999)):
        text = browser.execute_script(point, down, right)
        assert text.startswith("Mean relevance" if max(size) > 448 else "Relevance of this pixel")
        edges = []
        for name, length, share in (("row", size[0], down), ("column", size[1], right)):
            first, last = re.search(rf"{name}s? (\d+)(?: to (\d+))?", text).groups()
            assert int(first) <= share * length <= int(last or first) + 1
            area = int(share * min(length, 448))
            edges += [area * length / min(length, 448), (area + 1) * length / min(length, 448)]
            assert (int(first), int(last or first)) == (math.floor(edges[-2]), math.ceil(edges[-1]) - 1)
        top, left = math.floor(edges[0]), math.floor(edges[2])
        part = expected[top : math.ceil(edges[1]), left : math.ceil(edges[3])]
        mean = mean_over(part.numpy(), edges[0] - top, edges[1] - top, edges[2] - left, edges[3] - left)
        told = float(text.partition(": ")[2].partition(" ")[0].replace("−", "-"))
        assert told == pytest.approx(mean, rel=6e-3, abs=float(expected.abs().max()) / 30_000)


@needs_chromium
def test_the_ledger_is_sorted_and_filtered(browser, two_composites):
    path, data = two_composites
    opened(browser, path)
    button(browser, "Ledger").click()
    rows = data["views"][0]["ledger"]["rows"]
    names = [node["name"] for node in data["graphs"][0]["nodes"]]

    def column(place):
        cells = f".accounts tbody tr > :nth-child({place})"
        return browser.execute_script("return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)", cells)

    assert column(1) == [names[row[0]] for row in rows]
    all_of(browser, ".accounts thead button")[5].click()
    by_bias = sorted(rows, key=lambda row: -abs(row[3]))
    assert column(1)[:10] == [names[row[0]] for row in by_bias[:10]]
    assert one(browser, "[aria-sort=descending]").text.startswith("bias")
    all_of(browser, ".accounts thead button")[0].click()
    assert one(browser, "[aria-sort=ascending]").text.startswith("name") and column(1)[0] == "_avg_pooling"
    one(browser, ".ledger input").send_keys("blocks.3.")
    assert all("_blocks.3." in name for name in column(1)) and f"of {len(rows)}" in one(browser, ".ledger .toolbar").text
    all_of(browser, ".accounts tbody button")[0].click()
    assert one(browser, ".inspector h2").text == "_blocks.3._depthwise_conv"


@needs_chromium
def test_the_compilation_shows_what_changed(browser, two_composites):
    path, data = two_composites
    opened(browser, path)
    button(browser, "Compilation").click()
    graph = data["graphs"][0]
    stages = all_of(browser, ".stages button")
    assert len(stages) == len(graph["history"])
    place = [stage["name"] for stage in graph["history"]].index("merge_batch_norm")
    stages[place].click()
    lines = {
        kind: [each.get_attribute("textContent") for each in all_of(browser, f".diff .{kind}")] for kind in ("added", "removed")
    }
    before, after = (graph["codes"][graph["history"][number]["code"]].split("\n") for number in (place - 1, place))
    assert lines["removed"] and {line[2:].rstrip("\n") for line in lines["removed"]} <= set(before)
    assert lines["added"] and {line[2:].rstrip("\n") for line in lines["added"]} <= set(after)
    assert len(after) - len(before) == len(lines["added"]) - len(lines["removed"])
    for number, stage in enumerate(stages[1:], start=1):
        stage.click()
        texts = {
            kind: browser.execute_script(
                "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent.slice(2, -1))", f".diff .{kind}"
            )
            for kind in ("added", "removed")
        }
        before, after = (Counter(graph["codes"][graph["history"][one]["code"]].split("\n")) for one in (number - 1, number))
        assert before - Counter(texts["removed"]) + Counter(texts["added"]) == after
    stages[place].click()
    after = graph["codes"][graph["history"][place]["code"]].split("\n")
    all_of(browser, ".places summary")[0].click()
    assert "_bn0" in one(browser, ".places").text
    button(browser, "Whole code").click()
    assert one(browser, ".code").get_attribute("textContent") == "\n".join(after)


@needs_chromium
def test_dark_light_and_print(browser, two_composites):
    opened(browser, two_composites[0])
    for _ in range(2):
        one(browser, ".theme").click()
        theme = browser.execute_script("return document.documentElement.dataset.theme")
        ink, behind = (
            browser.execute_script(f"return getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor")
        )
        bright = sum(map(int, ink[4:-1].split(","))) > sum(map(int, behind[4:-1].split(",")))
        assert bright == (theme == "dark")
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert one(browser, ".graph").get_dom_attribute("viewBox") and one(browser, "#ledger").get_dom_attribute("hidden") is None
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert not one(browser, ".graph").get_dom_attribute("viewBox") and one(browser, "#ledger").get_dom_attribute("hidden")
    assert len(browser.execute_cdp_cmd("Page.printToPDF", {})["data"]) > 10_000


@needs_chromium
def test_everything_that_acts_and_each_table_has_a_name(browser, two_composites):
    opened(browser, two_composites[0])
    all_of(browser, '[aria-label^="output, output"]')[0].click()
    for panel in ("Graph", "Ledger", "Compilation"):
        button(browser, panel).click()
        unnamed = browser.execute_script(
            "return [...document.querySelectorAll("
            "'button, input, img, [role=button], [role=tab], [role=img], svg.graph, table')]"
            ".filter(e => !(e.getAttribute('aria-label') || (e.caption ? e.caption.textContent : e.tagName != 'TABLE' &&"
            " (e.alt || e.innerText || e.textContent || e.closest('label')))))"
            ".map(e => e.outerHTML)"
        )
        assert not unnamed, unnamed
    ids = browser.execute_script("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    controlled = browser.execute_script(
        "return [...document.querySelectorAll('[aria-controls]')].map(e => e.getAttribute('aria-controls'))"
    )
    assert set(controlled) <= set(ids)


@needs_chromium
def test_a_resnet_50_is_small_and_soon_ready(browser, folder):
    import torchvision

    torch.manual_seed(0)
    weights = torchvision.models.ResNet50_Weights.DEFAULT
    model = torchvision.models.resnet50(weights=None).eval()
    explainer = lrpfx.Explainer(model, preprocess=weights.transforms(), categories=weights.meta["categories"])
    path = lrpfx.report(explainer(photographs.path("chelsea")), folder / "resnet50.html")
    assert path.stat().st_size <= LARGEST
    times = []
    for _ in range(3):
        opened(browser, path)
        times.append(browser.execute_script("return performance.getEntriesByName('ready')[0].startTime"))
    assert min(times) <= LATEST, times
    assert len(boxes(browser)) <= 14
    visible = browser.execute_script(
        "const c = document.querySelector('.graph').getBoundingClientRect();"
        "return [...document.querySelectorAll('.graph [data-id]')].every(e => { const b = e.getBoundingClientRect();"
        "return b.top >= c.top && b.bottom <= c.bottom && b.left >= c.left && b.right <= c.right && b.height > 15 })"
    )
    assert visible, "the folded graph does not fit, or cannot be read"


@needs_chromium
def test_the_path_of_a_word(browser, folder):
    from reports.test_encoding import unpacked

    found = report_pictures.of_a_sentence()
    data = document(found)
    opened(browser, lrpfx.report(found, folder / "text.html"))
    words = [each.text for each in all_of(browser, ".word")]
    assert words == [word["text"] for word in data["samples"][0]["words"]]
    place = words.index("rains")
    all_of(browser, ".word")[place].click()
    assert one(browser, '.word[aria-pressed="true"]').text == "rains"
    path = data["views"][0]["path"][::-1]
    flows = [unpacked(step["through"]).reshape(step["through"]["shape"])[:, place] for step in path]
    shown = [each.text.replace("−", "-") for each in all_of(browser, ".grid td.number")]
    assert [float(text) for text in shown] == pytest.approx([each[place] for each in flows], rel=6e-3, abs=1e-6)
    strips = all_of(browser, ".grid .strip")
    assert len(strips) == 2 * len(path)
    for strip, values in zip(strips[::2], flows, strict=True):
        label = strip.get_attribute("aria-label")
        assert label.startswith(f"the most at {words[np.argmax(np.abs(values))]} ")
        assert len(strip.find_elements("css selector", "i")) == len(words)


class Chain(Layered):
    """So many nodes in no module but the model."""

    def __init__(self, nodes):
        super().__init__(layer=torch.nn.Linear(4, 4))
        self.nodes = nodes

    def forward(self, x):
        if self.nodes == 1:
            return x * 2
        for _ in range(self.nodes // 4):
            x = self.layer(x).relu() * 0.9 + x
        return x


class Stages(torch.nn.Sequential):
    """So many nodes in stages of ten blocks with a skip connection and a gate each."""

    def __init__(self, nodes):
        class Block(Layered):
            def forward(self, x):
                y = self.norm(x)
                return x + self.out(self.left(y).relu() * self.right(y).sigmoid())

        def block():
            left, right, out = (torch.nn.Linear(4, 4) for _ in range(3))
            return Block(norm=torch.nn.LayerNorm(4), left=left, right=right, out=out)

        super().__init__(*(torch.nn.Sequential(*(block() for _ in range(10))) for _ in range(nodes // 80)))


def report_of(model, path, targets=(0, 1)):
    x = torch.rand(1, 4)
    module = lrpfx.transform(model.eval(), lrpfx.composites.EpsilonPlus(), example_inputs=x)
    return module, lrpfx.report((module, x, list(targets)), path)


@needs_chromium
@pytest.mark.parametrize("nodes", [1, 300])
def test_graphs_of_any_size(browser, folder, nodes):
    module, path = report_of(Chain(nodes), folder / f"chain{nodes}.html")
    opened(browser, path)
    assert 2 < len(boxes(browser)) <= 45
    button(browser, "Unfold all").click()
    assert sum(", rule " in label for label in boxes(browser)) == len(lrpfx.to_networkx(module))


def milliseconds(browser, script):
    """How long the page takes for this, until it has been drawn."""
    return browser.execute_async_script(
        "const done = arguments[arguments.length - 1], start = performance.now();"
        f"{script}; requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)))"
    )


def clicks(text):
    return f"[...document.querySelectorAll('button')].find(each => each.innerText === '{text}').click()"


@needs_chromium
@pytest.mark.parametrize(("model", "nodes"), [(Chain, 5000), (Stages, 2500)], ids=["chain", "stages"])
def test_large_graphs_are_soon_drawn(browser, folder, model, nodes):
    module, path = report_of(model(nodes), folder / f"{model.__name__}.html")
    count = len(lrpfx.to_networkx(module))
    assert 0.95 * nodes < count < 1.05 * nodes
    steps = {
        "unfold": clicks("Unfold all"),
        "whole": clicks("Fit"),
        "ledger": clicks("Ledger"),
        "compilation": clicks("Compilation"),
        "stages": "for (const each of document.querySelectorAll('.stages button')) each.click()",
        "graph": clicks("Graph"),
        "target": clicks("class 1"),
        "print": "dispatchEvent(new Event('beforeprint'))",
        "printed": "dispatchEvent(new Event('afterprint'))",
        "fold": clicks("Fold all"),
    }
    times = []
    for _ in range(2):
        browser.get("about:blank")
        opened(browser, path)
        times.append({name: milliseconds(browser, script) for name, script in steps.items()})
    least = {name: min(one[name] for one in times) for name in steps}
    assert max(least.values()) < SOON, least
    start = time.perf_counter()
    assert len(browser.execute_cdp_cmd("Page.printToPDF", {})["data"]) > 10_000
    assert time.perf_counter() - start < 20
    # All of it can be reached: by the search, by keys, and in the ledger as it is scrolled.
    last = [label for label in boxes(browser) if label.startswith("output, ")]
    type_keys(browser, "/", "add_1" if model is Chain else "3.7.out", "\ue007")
    found = browser.switch_to.active_element
    assert len(last) == 1 and "rule" in found.get_attribute("aria-label") and len(boxes(browser)) <= 402
    edge = browser.execute_script("return document.querySelector('.graph').getBoundingClientRect().toJSON()")
    place = browser.execute_script("return arguments[0].getBoundingClientRect().toJSON()", found)
    assert edge["left"] < place["left"] < edge["right"] and edge["top"] < place["top"] < edge["bottom"]
    type_keys(browser, *["\ue015"] * 30)
    assert browser.switch_to.active_element.get_attribute("aria-label") != found.get_dom_attribute("aria-label")
    button(browser, "Ledger").click()
    rows = len(lrpfx.ledger(module, torch.rand(1, 4), 0).to_dict()["entries"])
    assert f"{rows} of {rows}" in one(browser, ".ledger .toolbar").text
    before = len(all_of(browser, ".accounts tbody tr"))
    assert before < 500 and f"{rows - before} more rows" in one(browser, ".ledger .rest").get_attribute("textContent")
    browser.execute_script("document.querySelector('.scroll').scrollTop = 1e9")
    wait_for(lambda: len(all_of(browser, ".accounts tbody tr")) > before)


class Dense(Layered):
    """Each layer reads all before it."""

    def forward(self, x):
        values = [x]
        for layer in self.children():
            values.append(layer(torch.cat(values, -1)))
        return torch.cat(values, -1)


@needs_chromium
def test_dense_graphs_are_soon_drawn(browser, folder):
    model = Dense(**{f"layer{number}": torch.nn.Linear(4 * number, 4) for number in range(1, 80)})
    module, path = report_of(model, folder / "dense.html")
    times = []
    for _ in range(2):
        browser.get("about:blank")
        opened(browser, path)
        times.append(milliseconds(browser, clicks("Unfold all")))
    assert min(times) < SOON
    assert sum(", rule " in label for label in boxes(browser)) == len(lrpfx.to_networkx(module))
    # Boxes of one module do not lie on each other.
    edges = browser.execute_script(
        "return [...document.querySelectorAll('.box:not(.head) .hit')].map(e => e.getBoundingClientRect().toJSON())"
    )
    for place, one_box in enumerate(edges):
        for other in edges[:place]:
            apart = one_box["left"] >= other["right"] - 1 or other["left"] >= one_box["right"] - 1
            assert apart or one_box["top"] >= other["bottom"] - 1 or other["top"] >= one_box["bottom"] - 1


@needs_chromium
def test_outlines_are_chosen_like_boxes(browser, folder):
    """Where all of a large graph is seen, a click takes the node at its place."""
    _, path = report_of(Chain(800), folder / "outlines.html")
    opened(browser, path)
    button(browser, "Unfold all").click()
    seen = boxes(browser)
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert 2 < len(boxes(browser)) < 400 and set(boxes(browser)) <= set(seen), "print has the part in the window"
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    button(browser, "Fit").click()
    assert all_of(browser, ".graph path.outline")
    x, y = browser.execute_script(
        "const e = [...document.querySelectorAll('.graph path.outline')].map(each => each.getBoundingClientRect());"
        "return [e[0].x + e[0].width / 2, e[0].y + e[0].height - 1]"
    )
    browser.execute_script(
        "document.elementFromPoint(arguments[0], arguments[1]).dispatchEvent(new MouseEvent('click',"
        " {bubbles: true, clientX: arguments[0], clientY: arguments[1]}))",
        x,
        y,
    )
    assert "How to read" not in one(browser, ".inspector").text


@needs_chromium
def test_names_are_not_run(browser, folder):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("<img src=x onerror=alert(1)>", torch.nn.Linear(4, 4))
            self.add_module("</script><script>alert(1)</script>", torch.nn.Linear(4, 4))

        def forward(self, x):
            for layer in self.children():
                x = layer(x)
            return x

    x = torch.rand(1, 4)
    module = lrpfx.transform(Net().eval(), lrpfx.composites.EpsilonPlus(), example_inputs=x)
    opened(browser, lrpfx.report({"<b>": (module, x, [0, 1])}, folder / "names.html", title="<script>alert(1)</script>"))
    assert one(browser, "h1").text == "<script>alert(1)</script>" and len(all_of(browser, "script")) == 2
    assert any(label.startswith("<img src=x onerror=alert(1)>, Linear") for label in boxes(browser))
    for panel in ("Ledger", "Compilation", "Graph"):
        button(browser, panel).click()
    assert not all_of(browser, "img[src=x]")


@needs_chromium
@pytest.mark.parametrize(("module_name", "argument"), [("output", "x"), ("features", "features"), ("output", "output")])
def test_ends_and_modules_of_one_name_are_several_boxes(browser, folder, module_name, argument):
    explain_model, x = clashing(module_name, argument, lambda: torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2))))
    opened(browser, lrpfx.report((explain_model, x, 0), folder / f"{module_name}{argument}.html"))
    button(browser, "Fold all").click()
    found = [label.split(", relevance ") for label in boxes(browser)]
    assert sorted(label for label, _ in found) == sorted(
        [
            f"{argument}, input, rule input",
            "output, output, rule output",
            f"{module_name}, module of 2 nodes, folded",
            *("relu, Activation, rule Pass", "add, Sum, rule Norm", "head, Linear, rule Epsilon"),
        ]
    )
    seed = lrpfx.ledger(explain_model, x, 0).seed
    (told,) = [float(value.replace("−", "-")) for label, value in found if label.startswith("output, output")]
    assert told == pytest.approx(seed, rel=1e-3)
    assert len(all_of(browser, ".band .line")) - len(all_of(browser, ".legend .line")) == 6


@pytest.fixture(scope="module")
def page_modules(tmp_path_factory):
    """The source of the page, with the packages that it is built and checked with."""
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    folder = tmp_path_factory.mktemp("page") / "page"
    shutil.copytree(ROOT / "page", folder, ignore=shutil.ignore_patterns("node_modules"))
    command = ["npm", "ci", "--no-fund", "--no-audit", "--ignore-scripts"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@needs_chromium
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=str)
@pytest.mark.parametrize("kind", ["photographs", "text"])
def test_axe_finds_nothing(browser, folder, page_modules, two_composites, kind, size):
    """Roles, names, contrasts and landmarks, by axe-core, in both themes."""
    if kind == "photographs":
        path = two_composites[0]
    else:
        path = lrpfx.report(report_pictures.of_a_sentence(), folder / "accessible.html")
    with window(browser, size):
        opened(browser, path)
        browser.execute_script((page_modules / "node_modules" / "axe-core" / "axe.min.js").read_text())
        states = {
            "start": "",
            "node": "document.querySelector('[data-id^=\"n:\"]').dispatchEvent(new MouseEvent('click', {bubbles: true}))",
            "search": "const i = document.querySelector('[role=combobox]'); i.value = 'a'; i.focus()",
            "hint": "document.querySelector('.term').focus()",
            "dark": "document.querySelector('.theme').click()",
            "ledger": "document.getElementById('tab-ledger').click()",
            "compilation": "document.getElementById('tab-compilation').click()",
            "light": "document.querySelector('.theme').click()",
        }
        for state, script in states.items():
            browser.execute_script(script)
            found = browser.execute_async_script(
                "const done = arguments[arguments.length - 1];"
                "axe.run().then(r => done([r.passes.length, r.violations.map(v => [v.id, v.nodes.map(n => n.html)])]))"
            )
            assert found[0] > 10 and not found[1], (state, found[1])


def test_the_script_is_that_of_its_source(page_modules, tmp_path):
    """What is in the package is what page/ builds; `make report-page` brings it up to date."""
    for command in (["npm", "run", "lint"], ["npm", "run", "build", "--", str(tmp_path)]):
        run = subprocess.run(command, cwd=page_modules, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr
    assert sorted(os.listdir(tmp_path)) == ["LICENCES.txt", "page.css", "page.js"]
    for name in os.listdir(tmp_path):
        assert (tmp_path / name).read_text() == (ROOT / "lrpfx" / "reports" / "pages" / name).read_text(), name
