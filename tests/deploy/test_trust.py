"""What a file says of itself: tolerances, versions, weights, and who signed it."""

import copy
import json
import re
import traceback

import numpy as np
import onnx
import pytest
import torch
from command_line.commands import run_program
from crafted_files import signed
from helpers import small_net
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlusFlat
from lrpfx.deploy import archive, artefact, manifest
from lrpfx.deploy.program_facts import MANIFEST
from lrpfx.images.stored_preprocessing import StoredPreprocessing

pytestmark = pytest.mark.programs


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return small_net().float()


@pytest.fixture(scope="module")
def program(model):
    torch.set_default_dtype(torch.float32)
    return lrpfx.lower(lrpfx.transform(model, EpsilonPlusFlat()), torch.rand(2, 3, 8, 8))


@pytest.fixture(scope="module")
def exported(program, tmp_path_factory):
    stored = StoredPreprocessing((0.5,) * 3, (0.5,) * 3, (8, 8))
    return lrpfx.save(program, tmp_path_factory.mktemp("trusted") / "model.pt2", preprocess=stored)


@pytest.fixture(scope="module")
def onnx_file(program, tmp_path_factory):
    return lrpfx.save(program, tmp_path_factory.mktemp("trusted") / "model.onnx")


def changed(path, target, **changes):
    """A copy of an archive with another manifest."""
    target.write_bytes(archive.archive_of(signed(archive.read_archive(path.read_bytes()), **changes)))
    return target


# --- tolerances -------------------------------------------------------------------------------------------------------------


def test_the_tolerance_of_a_file_has_a_ceiling(exported, tmp_path):
    for claimed in (0.999, 30.0):
        runner = lrpfx.load(changed(exported, tmp_path / "model.pt2", tolerance=claimed))
        assert runner.manifest["tolerance"] == manifest.MOST_TOLERATED
    expected = runner.self_test.arrays["out.relevance"]
    expected += 0.2 * np.linalg.norm(expected) / expected.size**0.5
    with pytest.raises(lrpfx.ArtefactError, match=r"relevance differs .* more than 1e-01"):
        runner.verify()
    assert 0.1 < runner.verify(tolerance=0.5) < 0.5
    for claimed in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(lrpfx.ArtefactError, match="valid tolerance"):
            lrpfx.load(changed(exported, tmp_path / "model.pt2", tolerance=claimed))


def test_the_tolerance_of_a_verification(exported):
    runner = lrpfx.load(exported)
    runner.self_test.arrays["out.relevance"] *= 1 + 1e-6
    assert runner.verify() < 1e-5
    with pytest.raises(lrpfx.ArtefactError, match="more than 1e-08"):
        runner.verify(tolerance=1e-8)
    for value in (-1, float("nan"), float("inf"), "much"):
        with pytest.raises(lrpfx.InputError, match="tolerance"):
            runner.verify(tolerance=value)
    assert run_program("verify", exported, "--tolerance", "1e-30")[0] == 1


@pytest.mark.parametrize("measured", [0.033, 0.30, 20.0])
def test_undetermined_relevance_is_said(measured, program, tmp_path):
    facts = program.graph_module.meta[MANIFEST]
    before = facts["tolerance"]
    facts["tolerance"] = measured
    try:
        with pytest.warns(lrpfx.LrpfxWarning, match="is numerically undetermined"):
            path = lrpfx.save(program, tmp_path / "model.pt2")
    finally:
        facts["tolerance"] = before
    assert lrpfx.load(path).manifest["tolerance"] == min(measured, manifest.MOST_TOLERATED)


def test_results_of_another_shape_or_name(exported):
    runner = lrpfx.load(exported)
    results = {name: torch.zeros(1) for name in runner.manifest["results"]}
    runner.function = lambda *arguments: results
    with pytest.raises(lrpfx.ArtefactError, match="has shape"):
        runner.verify()
    results["other"] = torch.zeros(1)
    with pytest.raises(lrpfx.ArtefactError, match="its manifest says"):
        runner.verify()


# --- versions and weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("was, is_newer", [("99.0.1", True), ("2.0.0", False), (None, False)])
def test_a_file_of_a_newer_runtime(was, is_newer, exported, tmp_path, recwarn):
    runtimes = {} if was is None else {"torch": was}
    lrpfx.load(changed(exported, tmp_path / "model.pt2", runtimes=runtimes))
    found = [one for one in recwarn if issubclass(one.category, lrpfx.LrpfxWarning)]
    assert ["written with torch 99.0.1" in str(one.message) for one in found] == ([True] if is_newer else [])
    assert lrpfx.load(exported).manifest["runtimes"] == {"torch": torch.__version__}


def test_a_file_of_an_older_format_is_read(exported, model, tmp_path):
    entries = archive.read_archive(exported.read_bytes())
    older = json.loads(entries[archive.MANIFEST])
    del older["weights"], older["runtimes"], older["buffers"], older["explained"]
    whole = {**entries, archive.MANIFEST: json.dumps(older).encode()}
    (tmp_path / "model.pt2").write_bytes(archive.archive_of(signed(whole, format=9)))
    runner = lrpfx.load(tmp_path / "model.pt2")
    assert runner.verify() < 1e-5
    with pytest.raises(lrpfx.ArtefactError, match="fingerprint of the weights"):
        runner.matches(model)


def test_a_runner_knows_its_model(exported, onnx_file, model):
    stored = StoredPreprocessing((0.5,) * 3, (0.5,) * 3, (8, 8))
    other = StoredPreprocessing((0.4,) * 3, (0.5,) * 3, (8, 8))
    runner = lrpfx.load(exported)
    assert runner.matches(model) and runner.matches(model, stored) and not runner.matches(model, other)
    assert runner.matches(lrpfx.transform(model, EpsilonPlusFlat()))
    assert lrpfx.load(onnx_file).matches(model)
    assert not lrpfx.load(onnx_file).matches(model, stored)  # it holds none
    changed_model = small_net().float()
    assert not runner.matches(changed_model) and not runner.matches(nn.Linear(2, 2))
    with pytest.raises(lrpfx.errors.InputTypeError, match="not a str"):
        runner.matches("x")


class Masked(nn.Module):
    """A layer whose input is multiplied by two buffers, one of which is not saved with the model, and by a constant."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("mask", torch.ones(8), persistent=False)

    def forward(self, x):
        return self.layer(x * self.mask * self.scale * torch.tensor(0.5))


@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_a_runner_knows_buffers_that_are_not_saved(capture, tmp_path):
    model, x = Masked().eval(), torch.rand(2, 8)
    explain_model = lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x, capture=capture)
    path = lrpfx.save(lrpfx.lower(explain_model, x), tmp_path / "model.pt2")
    runner = lrpfx.load(path)
    others = [lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x, capture=one) for one in ("symbolic", "export")]
    assert all(runner.matches(one) for one in (model, explain_model, *others))
    changed_model = copy.deepcopy(model)
    changed_model.mask[0] = 0
    assert not runner.matches(changed_model)
    entries = archive.read_archive(path.read_bytes())
    older = json.loads(entries[archive.MANIFEST])
    del older["buffers"], older["explained"]
    whole = {**entries, archive.MANIFEST: json.dumps(older).encode()}
    path.write_bytes(archive.archive_of(signed(whole, format=10)))
    assert lrpfx.load(path).matches(model) and lrpfx.load(path).matches(changed_model)  # it cannot tell
    changed_model.scale[0] = 0
    assert not lrpfx.load(path).matches(changed_model)


def test_options_that_replace_what_the_file_holds(exported, tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "images").mkdir()
    image.new("RGB", (8, 8)).save(tmp_path / "images" / "black.png")
    given = (exported, tmp_path / "images")
    status, printed = run_program("run", *given, tmp_path / "same", "--mean", "0.5", "--std", "0.5")
    assert status == 0 and "warning" not in printed
    status, printed = run_program("run", *given, tmp_path / "other", "--mean", "0.4", "--std", "0.5")
    message = r"warning: .*replace the preprocessing that .*model.pt2 holds, .*mean 0.5.* by .*mean 0.4"
    assert status == 0 and re.search(message, " ".join(printed.split())), printed


# --- native code, and nothing loaded ------------------------------------------------------------------------------------------


def test_native_code_is_refused_before_it_is_loaded(exported, tmp_path, monkeypatch):
    from lrpfx.deploy.backends import compiled

    loaded = []
    monkeypatch.setattr(compiled, "load_compiled", lambda path: loaded.append(path) or dict)
    entries = archive.read_archive(exported.read_bytes())
    starts = ("archive_", "byteorder", ".data", "lrpfx")
    kept = {name: value for name, value in entries.items() if name.startswith(starts)}
    native = {**kept, "data/aotinductor/model/x.wrapper.so": b"\x7fELF"}
    path = tmp_path / "native.pt2"
    path.write_bytes(archive.archive_of(signed(native, kind="compiled")))
    assert artefact.manifest_in(path)["kind"] == "compiled"
    assert run_program("inspect", path)[0] == 0
    with pytest.raises(lrpfx.ArtefactError, match="native code"):
        lrpfx.load(path, allow_native=False)
    assert not loaded
    lrpfx.load(path)
    assert loaded
    assert lrpfx.load(exported, allow_native=False).verify() < 1e-5


def test_inspecting_loads_no_program(exported, onnx_file, monkeypatch):
    import onnxruntime

    from lrpfx.deploy.backends import exported as exported_backend

    def fails(*arguments, **options):
        raise AssertionError("a program was loaded")

    monkeypatch.setattr(exported_backend, "read_program", fails)
    monkeypatch.setattr(onnxruntime, "InferenceSession", fails)
    assert artefact.manifest_in(exported)["kind"] == "exported"
    assert artefact.manifest_in(onnx_file)["kind"] == "onnx"


# --- signatures -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys():
    """A private key and its public one, and the public key of others."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    def public(key):
        return key.public_key().public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)

    own, others = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    private = own.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    return private, public(own), public(others)


@pytest.mark.parametrize("kind", ["pt2", "onnx"])
def test_signed_files(kind, exported, onnx_file, keys, tmp_path):
    private, public, others = keys
    path = tmp_path / f"model.{kind}"
    content = (exported if kind == "pt2" else onnx_file).read_bytes()
    path.write_bytes(content)
    with pytest.raises(lrpfx.ArtefactError, match="it is not signed"):
        lrpfx.load(path, signed_by=public)
    assert lrpfx.sign(path, private) == path and path.read_bytes() == content
    assert lrpfx.load(path, signed_by=public).verify() < 1e-5
    with pytest.raises(lrpfx.ArtefactError, match="signature is not one of this key"):
        lrpfx.load(path, signed_by=others)
    lrpfx.sign(path, tolerance=1e-4)  # other content, with the right hash
    assert lrpfx.load(path).manifest["tolerance"] == 1e-4
    with pytest.raises(lrpfx.ArtefactError, match="signature is not one of this key"):
        lrpfx.load(path, signed_by=public)
    (tmp_path / f"model.{kind}.sig").write_text("none")
    with pytest.raises(lrpfx.ArtefactError, match="signature is not one of this key"):
        lrpfx.load(path, signed_by=public)
    for key in (b"none", public):
        with pytest.raises(lrpfx.InputError, match="not an Ed25519 private key"):
            lrpfx.sign(path, key)
    with pytest.raises(lrpfx.ArtefactError, match="cannot be read"):
        lrpfx.sign(path, tmp_path / "missing.pem")


@pytest.mark.parametrize("lines", [slice(None), slice(1, 2)], ids=["text", "base64"])
def test_no_error_repeats_a_private_key(lines, exported, keys):
    private = "\n".join(keys[0].decode().splitlines()[lines])
    for use in (lambda: lrpfx.sign(exported, private), lambda: lrpfx.load(exported, signed_by=private)):
        with pytest.raises(lrpfx.LrpfxError) as found:
            use()
        shown = "".join(traceback.format_exception(found.value))
        assert "key" in shown and keys[0].decode().splitlines()[1] not in shown


def test_the_command_line_signs(exported, keys, tmp_path):
    path = tmp_path / "model.pt2"
    path.write_bytes(exported.read_bytes())
    for name, key in zip(("private", "public", "others"), keys, strict=True):
        (tmp_path / f"{name}.pem").write_bytes(key)
    assert run_program("sign", path, "--key", tmp_path / "private.pem")[0] == 0
    assert run_program("verify", path, "--signed-by", tmp_path / "public.pem")[0] == 0
    assert run_program("verify", path, "--signed-by", tmp_path / "others.pem")[0] == 1
    status, printed = run_program("verify", path, "--signed-by", tmp_path / "private.pem")[:2]
    assert status and "Ed25519 public key" in printed


def test_a_file_that_an_optimizer_changed(onnx_file, tmp_path):
    model = onnx.load(onnx_file)
    model.graph.node[0].doc_string = "optimized"
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    with pytest.raises(lrpfx.ArtefactError, match=r"another hash|has no hash"):
        lrpfx.load(path)
    lrpfx.sign(path)
    assert lrpfx.load(path).verify() < 1e-5
    model.graph.initializer[0].raw_data = bytes(len(model.graph.initializer[0].raw_data))
    onnx.save(model, path)
    content = path.read_bytes()
    with pytest.raises(lrpfx.ArtefactError, match=r"differs from the program's result|fails"):
        lrpfx.sign(path)
    assert path.read_bytes() == content
    del model.metadata_props[:]
    onnx.save(model, path)
    with pytest.raises(lrpfx.ArtefactError, match="removed its manifest"):
        lrpfx.sign(path)
