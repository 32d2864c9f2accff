"""Programs in .pte files, which ExecuTorch runs."""

import json
import subprocess
import sys
import textwrap
import threading

import executorch.runtime as runtime
import pytest
import torch
from command_line.commands import run_program
from helpers import assert_agrees, assert_close
from PIL import Image
from small_families import small_family
from torch import nn
from torch.nn import functional

import lrpfx
from lrpfx.composites import AttnLRP, EpsilonPlusFlat
from lrpfx.core import Hook
from lrpfx.deploy.archive import MANIFEST, archive_of, read_archive, signed_entries
from lrpfx.deploy.artefact import manifest_in
from lrpfx.deploy.backends.executorch import PROGRAM, _entries, _length_of_program


@pytest.fixture(scope="module")
def explained():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(72, 10)
    return lrpfx.transform(nn.Sequential(*layers).eval().float(), EpsilonPlusFlat()), torch.rand(2, 3, 8, 8).float()


@pytest.fixture(scope="module")
def file(explained, tmp_path_factory):
    return lrpfx.save(lrpfx.lower(*explained, dynamic_batch=False), tmp_path_factory.mktemp("executorch") / "model.pte")


@pytest.fixture
def without_executorch(monkeypatch):
    monkeypatch.setitem(sys.modules, "executorch.runtime", None)
    monkeypatch.setitem(sys.modules, "executorch.exir", None)


@pytest.mark.parametrize(
    ("name", "composite", "write"),
    [
        ("resnet", EpsilonPlusFlat, lrpfx.save),
        ("resnet", EpsilonPlusFlat, lrpfx.package),
        ("densenet", EpsilonPlusFlat, lrpfx.save),
        ("vit", AttnLRP, lrpfx.save),
        ("vit", AttnLRP, lrpfx.package),
        ("swin", AttnLRP, lrpfx.save),
    ],
)
@pytest.mark.sampled(8)
def test_networks(name, composite, write, tmp_path):
    model, images = small_family(name)
    model, images = model.float(), images.float()
    explain_model = lrpfx.transform(model, composite(), images)
    program = lrpfx.lower(explain_model, images, dynamic_batch=False)
    runner = lrpfx.load(write(program, tmp_path / "model.pte"))
    assert runner.manifest["kind"] == ("executorch" if write is lrpfx.save else "xnnpack")
    assert_close(program.module()(images, torch.tensor([0, 2]))["output"], explain_model(images), 1e-6)  # is as it was
    images = images.flip(0) * 0.7
    assert_agrees(runner, explain_model, images, torch.tensor([3, 1]), tolerance=1e-5)


class _Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("one", torch.tensor(1.5))

    def forward(self, x):
        return torch.add(self.one, self.layer(x), alpha=0.25) - torch.sub(self.one, self.layer(x * 2), alpha=3.0)


def test_factors_of_sums_reach_the_second_operand(tmp_path):
    torch.manual_seed(0)
    explain_model = lrpfx.transform(_Sums().eval().float(), EpsilonPlusFlat())
    x = torch.randn(3, 6).float()
    runner = lrpfx.load(lrpfx.save(lrpfx.lower(explain_model, x, dynamic_batch=False), tmp_path / "model.pte"))
    assert_agrees(runner, explain_model, -x, torch.tensor([3, 1, 0]), tolerance=1e-6)


class _Padded(nn.Module):
    """Padding, whose relevance is cut, beside parameters that do not lie in the order of their dimensions."""

    def __init__(self):
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Linear(7 * 7 * 8, 5)
        self.register_buffer("bias", torch.rand(4, 7).t()[:, None])

    def forward(self, x):
        padded = functional.pad(self.convolution(x).permute(0, 2, 3, 1), (0, 0, 0, 1, -1, 2))
        return self.head(torch.cat([padded, padded + self.bias], -1).flatten(1))


@pytest.mark.parametrize("write", [lrpfx.save, lrpfx.package])
def test_padding_and_the_order_of_stored_tensors(write, tmp_path):
    torch.manual_seed(0)
    x = torch.rand(2, 3, 8, 8).float()
    explain_model = lrpfx.transform(_Padded().eval().float(), EpsilonPlusFlat(), x)
    runner = lrpfx.load(write(lrpfx.lower(explain_model, x, dynamic_batch=False), tmp_path / "model.pte"))
    assert_agrees(runner, explain_model, x.flip(0), torch.tensor([3, 1]), tolerance=1e-5)


def test_the_runtime_alone_reads_the_file(explained, file):
    explain_model, images = explained
    program = runtime.Runtime.get().load_program(file)
    output, relevance = program.load_method("forward").execute([images, torch.tensor([4, 2])])
    expected = lrpfx.attribute(explain_model, images, [4, 2])
    assert_close(output, expected.output, 1e-6)
    assert_close(relevance, expected.relevance, 1e-6)


PROCESS = """
    import logging
    import sys
    import torch
    import lrpfx
    from lrpfx.composites import EpsilonPlus

    before = list(logging.root.handlers), logging.root.level
    explain_model = lrpfx.transform(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval(), EpsilonPlus())
    program = lrpfx.lower(explain_model, torch.rand(2, 4), dynamic_batch=False)
    for write in (lrpfx.save, lrpfx.package):
        lrpfx.load(write(program, sys.argv[1])).verify()
    assert (list(logging.root.handlers), logging.root.level) == before
    logging.getLogger("application").info("unexpected")
"""


@pytest.mark.programs
def test_logging_stays_as_it_is(tmp_path):
    """In a process of its own: modules of ExecuTorch configure it once, when they are imported."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROCESS), str(tmp_path / "model.pte")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "INFO" not in run.stdout + run.stderr and "unexpected" not in run.stderr


def test_calls_of_several_threads(explained, file):
    explain_model, images = explained
    runner, wrong = lrpfx.load(file), []

    def call(target):
        expected = lrpfx.attribute(explain_model, images, [target, target]).relevance
        for _ in range(20):
            relevance = runner(images, torch.tensor([target, target]))["relevance"]
            wrong.extend([target] if (relevance - expected).norm() > 1e-5 * expected.norm() else [])

    threads = [threading.Thread(target=call, args=(target,)) for target in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_commands_load_native_code_only_if_it_is_allowed(file, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.png")
    commands = [["verify", file], ["run", file, tmp_path / "photo.png", tmp_path / "maps", "--raw"]]
    commands.append(["explain", file, tmp_path / "photo.png", "--output", tmp_path / "pictures", "--raw"])
    for command in commands:
        status, printed = run_program(*command)
        assert status and "such files are loaded with --allow-native alone" in " ".join(printed.split())
        status, printed = run_program(*command, "--allow-native")
        assert not status, printed


def test_manifest_without_the_runtime(file, without_executorch):
    manifest = manifest_in(file)
    assert manifest["kind"] == "executorch" and manifest["arguments"]["input"]["shape"] == [2, 3, 8, 8]
    assert any(stage.startswith("legalize legalize_for_executorch: ") for stage in manifest["stages"])
    with pytest.raises(lrpfx.ArtefactError, match=r"lrpfx\[executorch\]") as raised:
        lrpfx.load(file)
    assert raised.value.topic == "missing-package"


def test_saving_without_the_compiler(explained, tmp_path, without_executorch):
    program = lrpfx.lower(*explained, dynamic_batch=False)
    with pytest.raises(lrpfx.ArtefactError, match=r"lrpfx\[executorch\]"):
        lrpfx.save(program, tmp_path / "model.pte")
    assert not list(tmp_path.iterdir())


def test_files_from_strangers(file):
    with pytest.raises(lrpfx.ArtefactError, match="allow_native=False"):
        lrpfx.load(file, allow_native=False)


def _flipped(content, place):
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def _with_entry(content):
    entries = _entries(content)
    manifest, test = read_archive(content[_length_of_program(content) :])[MANIFEST], entries["lrpfx/self_test.npz"]
    signed = signed_entries({PROGRAM: entries[PROGRAM], "other.pkl": b"anything"}, json.loads(manifest), test)
    return signed.pop(PROGRAM) + archive_of(signed)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: _flipped(content, 100),
        lambda content: _flipped(content, _length_of_program(content) - 1),
        lambda content: _flipped(content, content.index(b'"kind"') + 3),
        lambda content: _flipped(content, 8),  # the mark of the header
        lambda content: _flipped(content, 16),  # the length of the program
        lambda content: content[: _length_of_program(content)],
        lambda content: content[:-1],
        lambda content: content[:20],
        _with_entry,
    ],
)
def test_damaged_files(change, file, tmp_path, without_executorch):
    """They are refused before the runtime, which is missing here, would see them."""
    (tmp_path / "damaged.pte").write_bytes(change(file.read_bytes()))
    with pytest.raises(lrpfx.ArtefactError) as raised:
        lrpfx.load(tmp_path / "damaged.pte")
    assert raised.value.topic == lrpfx.ArtefactError("").topic


def test_signed_anew(file, tmp_path):
    copy = tmp_path / "model.pte"
    copy.write_bytes(file.read_bytes())
    lrpfx.sign(copy, tolerance=1e-3)
    runner = lrpfx.load(copy)
    assert runner.manifest["tolerance"] == 1e-3 and runner.verify() < 1e-6


def test_a_program_without_weights(tmp_path):
    """ExecuTorch writes no header for it, which would give its length."""
    x = torch.randn(2, 4).float()
    program = lrpfx.lower(lrpfx.transform(nn.Sequential(nn.ReLU()).eval(), EpsilonPlusFlat()), x, dynamic_batch=False)
    path = lrpfx.save(program, tmp_path / "model.pte")
    assert lrpfx.load(path).verify() <= 1e-6
    content = path.read_bytes()
    for changed in (content[:-1], content[:100], content.replace(b"PK\5\6", b"PK\5\7"), content[:-6] + b"\xff" * 6):
        path.write_bytes(changed)
        with pytest.raises(lrpfx.ArtefactError, match="is not loaded"):
            lrpfx.load(path)


@pytest.mark.parametrize(
    ("model", "x", "open_batch", "message"),
    [
        (
            nn.Sequential(nn.Conv3d(1, 2, 2), nn.Flatten()).float(),
            torch.rand(2, 1, 3, 3, 3),
            False,
            "no kernel of convolutions in three dimensions",
        ),
        (nn.Linear(4, 3).float(), torch.rand(2, 4), True, "dynamic_batch=False"),
        (nn.Linear(4, 3).double(), torch.rand(2, 4), False, "float64"),
    ],
)
def test_programs_that_executorch_does_not_take(model, x, open_batch, message, tmp_path):
    x = x.to(next(model.parameters()).dtype)
    program = lrpfx.lower(lrpfx.transform(model.eval(), EpsilonPlusFlat()), x, dynamic_batch=open_batch)
    with pytest.raises(lrpfx.LoweringError, match=message):
        lrpfx.save(program, tmp_path / "model.pte")


class _Bounded(Hook):
    def propagate(self, call, relevance):
        bound = relevance.abs().flatten(1).median(1).values.view(-1, 1, 1, 1)
        return (relevance.clamp(-bound, bound),)


@pytest.mark.parametrize("write", [lrpfx.save, lrpfx.package])
@pytest.mark.sampled(2)
def test_operators_without_a_kernel(write, explained, tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)).eval().float()
    bounded = lrpfx.transform(model, EpsilonPlusFlat(layer_map=[(nn.ReLU, _Bounded())]))
    program = lrpfx.lower(bounded, explained[1], dynamic_batch=False)
    with pytest.raises(lrpfx.LoweringError, match=r"aten\.median\.dim, from 1: _Bounded\(\)") as raised:
        write(program, tmp_path / "model.pte")
    assert raised.value.topic == "formats-of-programs" and not list(tmp_path.iterdir())
