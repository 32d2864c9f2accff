"""The examples in other languages, on the digits: built, run, and compared with `lrpfx.attribute`."""

import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch
from browsers import chromium, needs_chromium
from helpers import ROOT, assert_close, needs_compiler
from torch import nn

import lrpfx
from lrpfx.composites import AttnLRP, EpsilonGammaBox
from lrpfx.demo import digits

pytestmark = pytest.mark.examples

SCREENSHOT = ROOT / "docs" / "images" / "draw_a_digit.png"


@pytest.fixture(scope="module")
def trained():
    """The digits held out, an explainable network that reads them, and its program."""
    torch.set_default_dtype(torch.float32)
    train, held_out = digits.load()
    explain_model = lrpfx.transform(digits.train(train), EpsilonGammaBox(low=0.0, high=1.0))
    return held_out, explain_model, lrpfx.lower(explain_model, held_out.images[:2])


@needs_compiler
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
def test_cpp(trained, tmp_path):
    held_out, explain_model, program = trained
    package = lrpfx.package(program, tmp_path / "digits.pt2")
    build = tmp_path / "build"
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    source = ROOT / "examples" / "cpp"
    for command in (["-S", source, "-B", build, "-DCMAKE_BUILD_TYPE=Release", prefix], ["--build", build]):
        subprocess.run(["cmake", *map(str, command)], check=True, capture_output=True)
    image = held_out.images[:1]
    pixels = (image * 16).round().to(torch.uint8).flatten().tolist()
    (tmp_path / "digit.pgm").write_bytes(b"P5\n8 8\n16\n" + bytes(pixels))
    for target in ([], ["7"]):
        command = [build / "explain", package, tmp_path / "digit.pgm", *target]
        printed = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout.splitlines()
        expected = lrpfx.attribute(explain_model, image, int(target[0]) if target else None)
        assert printed[0] == f"prediction {int(expected.output.argmax())}"
        relevance = torch.tensor([[float(number) for number in line.split()] for line in printed[4:]], dtype=torch.float32)
        assert_close(relevance, expected.relevance[0, 0], 1e-5)
    (tmp_path / "text.pgm").write_text("no image")
    for arguments, message in [
        (["none.pt2", "digit.pgm"], "error:"),
        ([package, tmp_path / "text.pgm"], "not a binary PGM file"),
    ]:
        run = subprocess.run(list(map(str, [build / "explain", *arguments])), capture_output=True, text=True)
        assert run.returncode == 1 and message in run.stderr


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


def _install(folder, *options):
    """The examples in JavaScript in a folder, with the packages that they need."""
    shutil.copytree(ROOT / "examples" / "javascript", folder, ignore=shutil.ignore_patterns("node_modules"))
    install = ["npm", "ci", "--no-fund", "--no-audit", "--ignore-scripts", *options]
    subprocess.run(install, cwd=folder, check=True, capture_output=True)


@pytest.fixture
def address(trained, tmp_path):
    """A server of the page, its packages and the model, as the checkout holds them."""
    _install(tmp_path / "examples" / "javascript", "--omit=optional")
    (tmp_path / "demo").mkdir()
    lrpfx.save(trained[2], tmp_path / "demo" / "digits.onnx")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=tmp_path))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/examples/javascript/"
    server.shutdown()


@pytest.fixture
def browser():
    with chromium("1180,680") as driver:
        yield driver


def _draw(browser, points):
    from selenium.webdriver.common.action_chains import ActionChains

    (x, y), *others = points
    strokes = ActionChains(browser, duration=20).move_to_element_with_offset(browser.find_element("id", "drawing"), x, y)
    strokes.click_and_hold()
    for left, top in others:
        strokes.move_by_offset(left - x, top - y)
        x, y = left, top
    strokes.release().perform()


def _shown(browser, until):
    """What the page shows as soon as `until` holds of it."""
    from selenium.webdriver.support.ui import WebDriverWait

    def results(browser):
        text = browser.execute_script("return document.body.dataset.results ?? null")
        found = None if text is None else json.loads(text)
        return found if found is not None and until(found) else None

    return WebDriverWait(browser, 60).until(results)


@needs_chromium
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_javascript(trained, address, browser):
    """A three is drawn; what the page shows is what `lrpfx.attribute` gives for the pixels that the page made of it."""
    explain_model = trained[1]
    browser.get(address)
    _shown(browser, lambda found: True)
    _draw(browser, [(-50, -70), (0, -90), (50, -60), (30, -10), (0, 0), (50, 30), (40, 80), (0, 95), (-55, 75)])
    found = _shown(browser, lambda found: found["prediction"] == 3 and found["explained"] == 3)
    assert browser.find_element("id", "status").text == "the network reads 3"
    if os.environ.get("LRPFX_SCREENSHOTS"):
        browser.save_screenshot(str(SCREENSHOT))
    _compare(explain_model, found)
    browser.find_elements("css selector", "#outputs button")[8].click()
    _compare(explain_model, _shown(browser, lambda found: found["explained"] == 8))
    browser.find_element("id", "clear").click()
    assert max(_shown(browser, lambda found: not any(found["image"]))["image"]) == 0.0
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    browser.get(f"{address}?model=nothing.onnx")
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 60).until(lambda browser: "cannot be loaded" in browser.find_element("id", "status").text)


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_checks_in_javascript(trained, tmp_path):
    """The runtimes of Node and of browsers give what the file holds; with another weight, they give something else."""
    import onnx
    from onnx import numpy_helper

    _install(tmp_path / "javascript")
    program = lrpfx.lower(trained[1], trained[0].images[:3], balance=True)
    file = lrpfx.save(program, tmp_path / "digits.onnx")
    model = onnx.load(file)
    weight = max(model.graph.initializer, key=lambda one: one.ByteSize())
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * 1.01, weight.name))
    onnx.save(model, tmp_path / "changed.onnx")
    for runtime in ("onnxruntime-web", "onnxruntime-node"):
        runs = [
            subprocess.run(
                ["node", "check.js", str(path), runtime], cwd=tmp_path / "javascript", capture_output=True, text=True
            )
            for path in (file, tmp_path / "changed.onnx")
        ]
        assert [run.returncode for run in runs] == [0, 1], [run.stderr for run in runs]
        right, wrong = (dict(line.split(": ") for line in run.stdout.splitlines()) for run in runs)
        assert list(right) == list(wrong) == ["output", "relevance", "balance"]
        assert max(map(float, right.values())) < 1e-5 and float(wrong["output"]) > 1e-4


@pytest.mark.parametrize("form, largest, tolerance", [("float16", 0.75, 1e-2), ("int8", 0.9, 0.1)])
def test_smaller_files(form, largest, tolerance, tmp_path):
    """They are smaller, give nearly the same, and are files of lrpfx once they are signed."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 256), nn.GELU(), nn.Linear(256, 10)
    ).eval()
    explain_model, images = lrpfx.transform(model, AttnLRP()), torch.rand(3, 1, 8, 8)
    file, smaller = lrpfx.save(lrpfx.lower(explain_model, images), tmp_path / "model.onnx"), tmp_path / "small.onnx"
    command = [sys.executable, ROOT / "examples" / "shrink.py", file, smaller, form]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    assert smaller.stat().st_size < largest * file.stat().st_size
    with pytest.raises(lrpfx.ArtefactError):
        lrpfx.load(smaller)
    runner = lrpfx.load(lrpfx.sign(smaller, tolerance=tolerance))
    assert 1e-5 < runner.verify() < tolerance
    expected = lrpfx.attribute(explain_model, images, [4, 2, 0]).relevance
    assert_close(runner(images, torch.tensor([4, 2, 0]))["relevance"], expected, tolerance)


def _compare(explain_model, found):
    image = torch.tensor(found["image"], dtype=torch.float32).reshape(1, 1, 8, 8)
    expected = lrpfx.attribute(explain_model, image, found["explained"])
    assert_close(torch.tensor(found["outputs"]), expected.output[0], 1e-5)
    assert_close(torch.tensor(found["relevance"]), expected.relevance.flatten(), 1e-4)
