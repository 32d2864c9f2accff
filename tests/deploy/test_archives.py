"""Files made to do harm: nothing in them runs, and saving touches no file of others."""

import contextlib
import copy
import functools
import hashlib
import io
import json
import operator
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from command_line.commands import run_program
from crafted_files import (
    FAR,
    IN_FILES,
    IN_MODELS,
    MODEL,
    RUNS_IN_TORCH,
    UNCHECKED,
    aten,
    calling,
    program_that_calls,
    resigned,
    saved,
    signed,
)
from helpers import assert_close, small_net
from tools import operator_fuzz
from torch.utils._python_dispatch import TorchDispatchMode

import lrpfx
from lrpfx.composites import EpsilonPlusFlat
from lrpfx.deploy import archive, torch_operators
from lrpfx.deploy import artefact as artefacts
from lrpfx.deploy.backends import onnx as onnx_backend
from lrpfx.support import files

pytestmark = pytest.mark.programs


@pytest.fixture(scope="module")
def program():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    return lrpfx.lower(lrpfx.transform(small_net().float(), EpsilonPlusFlat()), torch.rand(2, 3, 8, 8))


@pytest.fixture(scope="module")
def artefact(program, tmp_path_factory):
    return lrpfx.save(program, tmp_path_factory.mktemp("attacked") / "model.pt2")


@pytest.fixture(scope="module")
def entries(artefact):
    return archive.read_archive(artefact.read_bytes())


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "marker"


def must_refuse(path, marker, message=""):
    with pytest.raises(lrpfx.ArtefactError, match=message):
        lrpfx.load(path)
    assert not marker.exists()


# --- code in a file -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IN_FILES)
def test_nothing_in_an_archive_runs(name, entries, marker, tmp_path):
    content = archive.archive_of(signed({**entries, **IN_FILES[name](entries, marker)}))
    (tmp_path / "signed.pt2").write_bytes(content)
    must_refuse(tmp_path / "signed.pt2", marker, "signed.pt2 is not loaded: (?!torch )")  # before torch reads it
    if name in RUNS_IN_TORCH:
        with contextlib.suppress(Exception):
            torch.export.load(tmp_path / "signed.pt2")
        assert marker.exists(), "the attack is none"


def test_what_is_signed_alike_is_loaded(entries, tmp_path):
    (tmp_path / "signed.pt2").write_bytes(archive.archive_of(signed(entries)))
    assert lrpfx.load(tmp_path / "signed.pt2").verify() <= 1e-5


@pytest.mark.parametrize("name", UNCHECKED)
def test_programs_call_no_operator_that_reads_unchecked(name, entries, marker, tmp_path):
    (tmp_path / "crafted.pt2").write_bytes(program_that_calls(entries, *UNCHECKED[name]))
    assert (tmp_path / "crafted.pt2").stat().st_size < 20_000
    must_refuse(tmp_path / "crafted.pt2", marker, "which does not belong there")
    with pytest.raises(lrpfx.ArtefactError, match="which does not belong there"):
        artefacts.manifest_in(tmp_path / "crafted.pt2")


def test_such_a_program_ends_the_process_in_torch(entries, tmp_path):
    (tmp_path / "crafted.pt2").write_bytes(program_that_calls(entries, *UNCHECKED["pooling"]))
    code = """if True:
        import sys, torch
        torch.export.load(sys.argv[1]).module()(torch.rand(2, 3, 8, 8), torch.tensor([0, 1]))
    """
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "crafted.pt2"], capture_output=True).returncode < 0


#: An input of four channels, and weights, biases, means and variances of which one has other lengths.
OTHER_CHANNELS = [
    (torch.ones(2, 4, 3), *(torch.ones(shape if place == other else 4) for place in range(4)))
    for other in range(4)
    for shape in (1, 3, (2, 2))
]


@pytest.mark.parametrize(
    "call",
    [
        (aten._fft_r2c.default, torch.rand(4, 8), [2**62], 0, True),
        (aten._fft_c2r.default, torch.rand(4, 5).to(torch.complex64), [1], 0, 2**40),
        (aten.upsample_nearest2d.default, torch.rand(1, 1, 4, 4), [8, 8], 1e-300, 1e-300),
        (aten._adaptive_avg_pool2d_backward.default, torch.rand(2, 3, 3), torch.rand(2, 0, 3)),
        (aten.reflection_pad2d_backward.default, torch.rand(0, 4, 4), torch.rand(1, 3, 3), [0, 1, 0, 1]),
        (aten.gather.default, torch.rand(4), 0, torch.tensor([FAR])),
        (aten.scatter_add.default, torch.rand(4), 0, torch.tensor([FAR]), torch.rand(1)),
        (aten.index_put.default, torch.rand(4), [torch.tensor([FAR])], torch.rand(1)),
        (aten.reflection_pad3d_backward.default, torch.ones(2, 4, 1, 9, 11), torch.ones(2, 4, 1, 8, 8), [1, 2, 1, 0, -1, 1]),
        (aten.replication_pad1d_backward.default, torch.ones(1, 4, 3), torch.ones(1, 4, 3), [-5, 5]),
        (aten.replication_pad3d.default, torch.ones(2, 4, 1, 8, 8), [2**63 - 1, 2**63 - 1, -1, 0, 0, 0]),
        (aten.avg_pool2d_backward.default, torch.ones(3, 4, 5, 5), torch.ones(2, 4, 10, 10), [2], [2], [0], False, True, None),
        (aten.avg_pool3d.default, torch.ones(2, 1, 5, 8, 8), [64, -(2**62), 2**31 - 1], [1]),
        (aten.col2im.default, torch.ones(2, 4, 16), [5, 5], [2, 2], [1, 1], [0, 2**31], [1, 1]),
        (aten.gelu_backward.default, torch.ones(2, 4, 8, 8), torch.ones(4, 8, 8)),
        *((aten._native_batch_norm_legit_no_training.default, *channels, 0.1, 1e-5) for channels in OTHER_CHANNELS),
        (aten.div.Tensor_mode, torch.tensor([-(2**63)]), torch.tensor([-1]), "trunc"),
        (aten.div.Tensor_mode, torch.tensor([-(2**31)], dtype=torch.int32), torch.tensor(-1, dtype=torch.int8), "trunc"),
        (aten.div.Tensor_mode, torch.tensor([-(2**31)], dtype=torch.int32), torch.tensor(2**32 - 1), "trunc"),
        (aten.div.Scalar_mode, torch.tensor([7, -(2**63)]), -1, "trunc"),
        (aten.arange.start_step, 0, -(2**63), -1),
        (aten.unfold_backward.default, torch.ones(1, 1), [2000], 0, 1000, 1),
        (aten.unfold_backward.default, torch.ones(1, 2), [4000], -1, 2, 1),
        (aten.unfold_backward.default, torch.ones(2, 3, 2), [3, 6], 1, 2, 2),
    ],
    ids=lambda call: str(call[0]),
)
def test_a_call_with_arguments_out_of_range_is_an_error(call):
    operator, *arguments = call
    keywords = {"rounding_mode": arguments.pop()} if arguments[-1] == "trunc" else {}
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        torch_operators.guarded(operator)(*arguments, **keywords)


def test_a_call_with_arguments_in_range_is_not_an_error():
    x = torch.randn(2, 3, 7)
    batch_norm = torch_operators.guarded(aten._native_batch_norm_legit_no_training.default)
    statistics = torch.randn(3), torch.rand(3) + 1
    expected = (x - statistics[0][:, None]) / (statistics[1][:, None] + 1e-5).sqrt()
    assert_close(batch_norm(x, None, torch.zeros(3), *statistics, 0.1, 1e-5)[0], expected, 1e-5)
    lowest = torch.tensor([-(2**63), -7, 7])
    divide = torch_operators.guarded(aten.div.Tensor_mode)
    assert divide(lowest, torch.tensor([2, -1, 2]), rounding_mode="trunc").tolist() == [-(2**62), 7, 3]
    assert divide(lowest.float(), torch.tensor(-1.0), rounding_mode="trunc").tolist() == [2.0**63, 7, -7]
    windows = x.unfold(-1, 3, 2)
    assert torch_operators.guarded(aten.unfold_backward.default)(torch.ones_like(windows), [2, 3, 7], -1, 3, 2).sum() == 54
    assert torch_operators.guarded(aten.arange.start_step)(6, 0, -2).tolist() == [6, 4, 2]


def test_the_checks_are_in_what_is_loaded(entries, tmp_path):
    content = program_that_calls(entries, aten.upsample_nearest2d.default, torch.rand(1, 1, 4, 4), [8, 8], 2.0, 2.0)
    inner = archive.read_archive(content)
    changed = inner[MODEL].replace(b'"as_float": 2.0', b'"as_float": 1e-300')
    assert changed != inner[MODEL]
    (tmp_path / "crafted.pt2").write_bytes(archive.archive_of(signed({**inner, MODEL: changed})))
    runner = lrpfx.load(tmp_path / "crafted.pt2")
    with pytest.raises(lrpfx.ArtefactError, match="does not take these arguments"):
        runner(torch.rand(2, 3, 8, 8, dtype=torch.float32), torch.tensor([0, 1]))


def test_loading_computes_nothing(artefact):
    called = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(str(func.overloadpacket))
            return func(*args, **(kwargs or {}))

    with Recorder():
        runner = lrpfx.load(artefact)
    assert set(called) <= {"aten.detach", "aten.alias", "aten.empty", "aten.empty_strided", "aten.set_", "aten.as_strided"}
    assert runner.verify() <= 1e-5


def test_a_dtype_is_not_a_number(entries, marker, tmp_path):
    content = program_that_calls(entries, aten.sum.dim_IntList, torch.rand(3), [0])
    inner = archive.read_archive(content)
    model = json.loads(inner[MODEL])
    (node,) = (node for node in model["graph_module"]["graph"]["nodes"] if "sum" in node["target"])
    node["inputs"].append({"name": "dtype", "arg": {"as_int": 1000}, "kind": 2})
    (tmp_path / "crafted.pt2").write_bytes(archive.archive_of(signed({**inner, MODEL: json.dumps(model).encode()})))
    must_refuse(tmp_path / "crafted.pt2", marker, "1000 as dtype")


@pytest.mark.parametrize(("calls", "seed"), [(1000, 0), pytest.param(20_000, 1, marks=pytest.mark.slow)])
def test_calls_with_arguments_out_of_range_end_no_process(calls, seed):
    ran, ended = operator_fuzz.examine(calls, seed)
    assert ran > 0.3 * calls and not [one for one in ended if one[2] != "SIGALRM"]


def test_numbers_beyond_sizes_are_not_computed():
    power, product = torch_operators.bounded(operator.pow), torch_operators.bounded(operator.mul)
    assert power(3, 4) == 81 and product(2**40, 3) == 3 * 2**40 and torch_operators.bounded(operator.not_)(False)
    for function, numbers in ((power, (9, 10**9)), (product, ("a", 10**11)), (product, ([1], 10**9)), (product, (2**63, 2))):
        with pytest.raises(ValueError, match="does not take these arguments"):
            function(*numbers)


@pytest.mark.parametrize("within", ["", "program/"])
@pytest.mark.parametrize("format", [True, False])
def test_the_older_form_is_not_read(within, format, entries, marker, tmp_path):
    old = dict.fromkeys(("serialized_state_dict.pt", "serialized_constants.pt", "serialized_example_inputs.pt"), saved(marker))
    old |= {"version": b"8.20", "serialized_exported_program.json": entries[MODEL]}
    kept = {name: value for name, value in entries.items() if name.startswith("lrpfx") or format}
    with zipfile.ZipFile(tmp_path / "old.pt2", "w") as file:
        for name, value in {**signed({**kept, **old})}.items():
            file.writestr(within + name, value)
    must_refuse(tmp_path / "old.pt2", marker)


@pytest.mark.parametrize("command", ["inspect", "verify", "run"])
def test_the_command_line_runs_nothing(command, entries, marker, tmp_path):
    content = archive.archive_of(signed({**entries, **IN_FILES["pickled inputs"](entries, marker)}))
    (tmp_path / "signed.pt2").write_bytes(content)
    arguments = [str(tmp_path), "--output", str(tmp_path / "out")] if command == "run" else []
    status, printed = run_program(command, tmp_path / "signed.pt2", *arguments)
    assert status == 2 - (command == "verify") and "Traceback" not in printed
    assert not marker.exists()


# --- what is read is what the hash is of --------------------------------------------------------------------------------------


def written(path, entries, repeated=()):
    with zipfile.ZipFile(path, "w") as file:
        for name, content in [*entries.items(), *repeated]:
            file.writestr(f"program/{name}", content)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("first", [True, False])
def test_names_that_stand_twice(first, entries, marker, tmp_path):
    name = next(name for name in entries if "weight_" in name)
    other = (name, bytes(len(entries[name])))
    whole = signed(entries)
    if first:
        whole, other = {name: other[1], **{key: value for key, value in whole.items() if key != name}}, (name, whole[name])
    written(tmp_path / "twice.pt2", whole, [other])
    must_refuse(tmp_path / "twice.pt2", marker, "twice")


def test_small_files_that_ask_for_much_memory(entries, marker, tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.pt2", "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in signed({**entries, "data/weights/weight_99": bytes(50_000_000)}).items():
            file.writestr(f"program/{name}", content)
    assert (tmp_path / "bomb.pt2").stat().st_size < 1_000_000
    must_refuse(tmp_path / "bomb.pt2", marker, "compressed")
    for shape in ("(1000000000000,)", "(3, 1000000)", "(-1,)"):
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
        array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(4)
        inner = io.BytesIO()
        with zipfile.ZipFile(inner, "w") as file:
            file.writestr("in.input.npy", array)
        (tmp_path / "array.pt2").write_bytes(archive.archive_of(signed({**entries, archive.SELF_TEST: inner.getvalue()})))
        must_refuse(tmp_path / "array.pt2", marker)


def test_entries_that_share_their_bytes(entries, marker, tmp_path):
    """A file of overlapping entries is smaller than what they hold."""
    written(tmp_path / "whole.pt2", signed(entries))
    content = bytearray((tmp_path / "whole.pt2").read_bytes())
    with zipfile.ZipFile(tmp_path / "whole.pt2") as file:
        largest = max(file.infolist(), key=lambda info: info.file_size)
        start = file.start_dir
        record = content.index(largest.filename.encode(), start) - 46
    length = 46 + len(largest.filename)
    end = content.index(b"PK\x05\x06", start)
    count = int.from_bytes(content[end + 10 : end + 12], "little")
    copies = bytearray()
    for number in range(100):
        copy = bytearray(content[record : record + length])
        copy[-3:] = f"{number:03d}".encode()
        copies += copy
    content[end:end] = copies
    end += len(copies)
    content[end + 8 : end + 12] = (count + 100).to_bytes(2, "little") * 2
    content[end + 12 : end + 16] = (end - start).to_bytes(4, "little")
    (tmp_path / "overlapping.pt2").write_bytes(content)
    must_refuse(tmp_path / "overlapping.pt2", marker, "larger than the file|Overlapped|differ")


@pytest.mark.parametrize(
    "key", ["kind", "title", "target", "arguments", "results", "tolerance", "rules", "canonizers", "format"]
)
@pytest.mark.parametrize("value", [None, 70, [], {"x": {"shape": [1], "dtype": "int7"}}])
def test_manifests_that_lack_something(key, value, entries, marker, tmp_path):
    (tmp_path / "signed.pt2").write_bytes(archive.archive_of(signed(entries, **{key: value})))
    if (key, value) == ("canonizers", []) or (key == "rules" and isinstance(value, dict)):
        return
    must_refuse(tmp_path / "signed.pt2", marker)


@pytest.mark.parametrize("text", [b"[]", b"{", b"[" * 100_000, b"null", b'{"format": ' + b"9" * 10_000 + b"}", b"\xff"])
def test_manifests_that_are_none(text, entries, marker, tmp_path):
    changed = {**entries, archive.MANIFEST: text}
    changed[archive.MANIFEST_HASH] = hashlib.sha256(text).hexdigest().encode()
    (tmp_path / "signed.pt2").write_bytes(archive.archive_of(changed))
    must_refuse(tmp_path / "signed.pt2", marker)


# --- ONNX ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def onnx_artefact(program, tmp_path_factory):
    return lrpfx.save(program, tmp_path_factory.mktemp("attacked") / "model.onnx")


def outside(tensor, location):
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", str(location)


@pytest.mark.parametrize("place", ["initializer", "constant", "subgraph"])
@pytest.mark.parametrize("location", ["/etc/passwd", "../other", "beside", "model.onnx.0123456789abcdef.data"])
def test_onnx_files_read_no_other_file(place, location, onnx_artefact, marker, tmp_path):
    model = onnx.load(onnx_artefact)
    (tmp_path / "beside").write_bytes(bytes(4096))
    if place == "initializer":
        outside(model.graph.initializer[0], location)
    else:
        tensor = onnx.helper.make_tensor("value", onnx.TensorProto.FLOAT, [4], bytes(16), raw=True)
        outside(tensor, location)
        node = onnx.helper.make_node("Constant", [], ["attacked"], value=tensor)
        if place == "subgraph":
            graph = onnx.helper.make_graph([node], "inner", [], [onnx.helper.make_tensor_value_info("attacked", 1, [4])])
            node = onnx.helper.make_node("If", ["condition"], ["outer"], then_branch=graph, else_branch=graph)
        model.graph.node.append(node)
    (tmp_path / "model.onnx").write_bytes(resigned(model))
    must_refuse(tmp_path / "model.onnx", marker, "reads another file")


@pytest.mark.parametrize("name", IN_MODELS)
def test_onnx_files_ask_for_little(name, onnx_artefact, marker, tmp_path, monkeypatch):
    """They are refused before a runtime reads them."""
    import onnxruntime

    model = onnx.load(onnx_artefact)
    change, message = IN_MODELS[name]
    change(model)
    (tmp_path / "model.onnx").write_bytes(resigned(model))
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *arguments, **options: marker.touch())
    must_refuse(tmp_path / "model.onnx", marker, message)


def test_large_results_of_large_arguments_are_computed(onnx_artefact, tmp_path):
    model = onnx.load(onnx_artefact)
    calling(("ConstantOfShape", ["size"], ["a"], {}), values={"size": [2**20]})(model)
    (tmp_path / "model.onnx").write_bytes(resigned(model))
    assert lrpfx.load(tmp_path / "model.onnx").verify() <= 1e-5


def test_divisions_that_are_safe_are_computed(onnx_artefact, tmp_path):
    model = onnx.load(onnx_artefact)
    calling(
        *(("Div", ["least", "two"], ["a"], {}), ("Max", ["least", "limit"], ["b"], {}), ("Div", ["b", "other"], ["c"], {})),
        *(("Shape", ["input"], ["d"], {}), ("Max", ["limit", "d"], ["e"], {}), ("Mod", ["e", "d"], ["f"], {})),
        values={"least": [-(2**63)], "two": 2, "limit": -(2**63) + 1, "other": [3, -1]},
    )(model)
    (tmp_path / "model.onnx").write_bytes(resigned(model))
    assert lrpfx.load(tmp_path / "model.onnx").verify() <= 1e-5


def test_onnx_files_with_two_manifests(onnx_artefact, marker, tmp_path):
    model = onnx.load(onnx_artefact)
    model.metadata_props.add().key = "lrpfx"
    (tmp_path / "model.onnx").write_bytes(resigned(model))
    must_refuse(tmp_path / "model.onnx", marker, "metadata")


def test_data_are_hashed_before_a_session_opens_them(program, marker, tmp_path, monkeypatch):
    import onnxruntime

    monkeypatch.setattr(onnx_backend, "EXTERNAL_DATA_FROM", 0)
    path = lrpfx.save(program, tmp_path / "model.onnx")
    (data,) = tmp_path.glob("*.data")
    data.write_bytes(bytes(data.stat().st_size))
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *arguments, **options: marker.touch())
    must_refuse(path, marker, "has another hash")
    data.unlink()
    data.symlink_to("/etc/hostname")
    must_refuse(path, marker, "is missing")


def test_what_was_verified_runs_though_the_files_change_meanwhile(program, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_backend, "EXTERNAL_DATA_FROM", 0)
    path = lrpfx.save(program, tmp_path / "model.onnx")
    (data,) = tmp_path.glob("*.data")
    parameters_in = onnx_backend._parameters_in

    def read_and_replaced(data, digest, content):
        found = parameters_in(data, digest, content)
        data.write_bytes(bytes(data.stat().st_size))
        path.write_bytes(b"other")
        return found

    monkeypatch.setattr(onnx_backend, "_parameters_in", read_and_replaced)
    runner = lrpfx.load(path)
    assert path.read_bytes() == b"other" and not any(data.read_bytes())
    assert runner.verify() <= 1e-5


def test_only_parameters_are_in_the_other_file(program, marker, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_backend, "EXTERNAL_DATA_FROM", 0)
    path = lrpfx.save(program, tmp_path / "model.onnx")
    model = onnx.load(path, load_external_data=False)
    moved = next(tensor for tensor in model.graph.initializer if tensor.external_data)
    model.graph.node.add(op_type="Constant", output=["inside"]).attribute.append(onnx.helper.make_attribute("value", moved))
    path.write_bytes(resigned(model))
    must_refuse(path, marker, "no parameter of its graph")


# --- saving ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def translated_once(monkeypatch):
    """torch.onnx takes seconds for the same program each time."""
    onnx_model = onnx_backend.onnx_model
    monkeypatch.setattr(artefacts, "legalized", functools.cache(artefacts.legalized))
    translate = functools.cache(lambda program, arguments, results: onnx_model(program, list(arguments), list(results)))
    monkeypatch.setattr(
        onnx_backend,
        "onnx_model",
        lambda program, arguments, results: copy.deepcopy(translate(program, tuple(arguments), tuple(results))),
    )


def test_saving_deletes_nothing_of_others(program, tmp_path, monkeypatch, translated_once):
    monkeypatch.setattr(onnx_backend, "EXTERNAL_DATA_FROM", 0)
    names = ["net1.onnx", "net[1].onnx", "net*.onnx", "netx.onnx", "a.onnx", "a.onnx.b.onnx"]
    for name in names:
        lrpfx.save(program, tmp_path / name)
    strangers = [tmp_path / f"{names[1]}.mine.data", tmp_path / f"{names[1]}.{'0' * 16}.data"]
    for stranger in strangers:
        stranger.write_text("mine")
    for name in names:
        lrpfx.save(program, tmp_path / name)
    for name in names:
        assert lrpfx.load(tmp_path / name).verify() <= 1e-5
    assert all(stranger.read_text() == "mine" for stranger in strangers)
    assert len(list(tmp_path.iterdir())) == 2 * len(names) + len(strangers)
    monkeypatch.setattr(onnx_backend, "EXTERNAL_DATA_FROM", 2**40)
    lrpfx.save(program, tmp_path / names[1])
    assert all(stranger.exists() for stranger in strangers)
    assert len(list(tmp_path.iterdir())) == 2 * len(names) + len(strangers) - 1


def test_modes_and_links_stay(program, tmp_path, monkeypatch, translated_once):
    monkeypatch.setattr(onnx_backend, "EXTERNAL_DATA_FROM", 0)
    before = os.umask(0o027)
    try:
        for name in ("model.onnx", "model.pt2"):
            path = lrpfx.save(program, tmp_path / name)
            assert {stat.S_IMODE(one.stat().st_mode) for one in tmp_path.iterdir()} == {0o640}
            path.chmod(0o604)
            lrpfx.save(program, path)
            assert stat.S_IMODE(path.stat().st_mode) == 0o604
            link = tmp_path / f"link{path.suffix}"
            link.symlink_to(path.name)
            assert lrpfx.save(program, link) == link
            assert link.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o604
            assert lrpfx.load(link).verify() <= 1e-5
            for one in list(tmp_path.iterdir()):
                one.unlink()
    finally:
        os.umask(before)


def test_what_killed_writers_left_goes(program, tmp_path):
    path = tmp_path / "model.pt2"
    code = f"""
import os, signal
from pathlib import Path
from lrpfx.support.files import whole_file
with whole_file(Path({str(path)!r}), ".pt2") as temporary:
    temporary.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code])
    assert len(os.listdir(tmp_path)) == 1 and not path.exists()
    whole = functools.partial(files.whole_file, path, ".pt2")
    with whole() as temporary, whole() as other:  # two at once leave one another alone
        temporary.write_bytes(b"one")
        other.write_bytes(b"other")
    assert os.listdir(tmp_path) == ["model.pt2"] and path.read_bytes() == b"one"


def test_targets_that_cannot_be_written(program, tmp_path, monkeypatch):
    (tmp_path / "folder.pt2").mkdir()
    os.mkfifo(tmp_path / "pipe.pt2")
    for name, message in [
        ("folder.pt2", "is not a file"),
        ("pipe.pt2", "is not a file"),
        ("none/model.pt2", "there is no folder"),
        ("x" * 300 + ".pt2", "cannot be written: File name too long"),
    ]:
        with pytest.raises(lrpfx.ArtefactError, match=message):
            lrpfx.save(program, tmp_path / name)
        with pytest.raises(lrpfx.ArtefactError):
            lrpfx.load(tmp_path / name)
    long = tmp_path / ("x" * 251 + ".pt2")
    assert lrpfx.load(lrpfx.save(program, long)).verify() <= 1e-5
    long.unlink()

    def full(self, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    for name in ("model.pt2", "model.onnx"):
        with pytest.raises(lrpfx.ArtefactError, match="cannot be written: No space left on device"):
            lrpfx.save(program, tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["folder.pt2", "pipe.pt2"]


# --- what a runner is given --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pt2", "onnx"])
def test_arguments_of_all_kinds(kind, artefact, onnx_artefact):
    runner = lrpfx.load(artefact if kind == "pt2" else onnx_artefact)
    x, index = torch.rand(2, 3, 8, 8, dtype=torch.float32), torch.tensor([0, 1])
    expected = runner(x, index)["relevance"]
    big_endian = x.numpy().astype(">f4")
    assert (torch.from_numpy(runner(big_endian, index.numpy().astype(">i8"))["relevance"]) == expected).all()
    reversed_twice = x.numpy()[::-1].copy()[::-1]
    assert (torch.from_numpy(runner(reversed_twice, index.numpy())["relevance"]) == expected).all()
    negative = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert negative.is_neg() and (runner(negative, index)["relevance"] == expected).all()
    for surrounding in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.enable_grad()):
        with surrounding:
            assert (runner(x, index)["relevance"] == expected).all()
    strange = [np.array(["a"]), np.array([object()]), np.zeros(2, [("a", "f4")]), np.zeros((2, 3, 8, 8), "c8"), None, 3.0]
    strange += [x.to("meta"), x.to_sparse(), torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), x.to(torch.complex64)]
    for value in strange:
        with pytest.raises(lrpfx.InputTypeError, match="input"):
            runner(value, index)
    with pytest.raises(lrpfx.InputError, match="given twice: input"):
        runner(x, index, input=x)
    runner.function = lambda *tensors: torch.zeros(2**48)
    with pytest.raises(MemoryError):
        runner(x, index)
    runner.function = lambda *tensors: 1 / 0
    with pytest.raises(lrpfx.ArtefactError, match="ZeroDivisionError"):
        runner(x, index)
