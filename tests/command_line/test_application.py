"""How commands end: results of files, messages for mistakes, interrupts."""

import contextlib
import importlib
import json
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line.commands import MODEL, exported, exported_before, run, run_program
from typer.testing import CliRunner

import lrpfx
from lrpfx.command_line import application, export, options, terminal
from lrpfx.command_line import draw as draw_command
from lrpfx.command_line import explain as explain_command
from lrpfx.composites import COMPOSITES, AttnLRP, EpsilonGammaBox, composite_class
from lrpfx.deploy.lowering import TARGETS
from lrpfx.errors import LrpfxWarning, address
from lrpfx.images.stored_preprocessing import INTERPOLATIONS
from lrpfx.passes.stages import Stage
from lrpfx.request.reduction import ALL

pytestmark = pytest.mark.programs

OTHER = "--composite", "epsilon_plus_flat"


def test_inspect_and_verify(folder):
    exported("model.pt2", "--balance", "--record", "0")
    _, printed = run("inspect", "model.pt2")
    for expected in ("EpsilonPlusFlat()", "batch×3×8×8", "Flat(stabilizer=1e-06)", "Epsilon(epsilon=1e-06)", "balance"):
        assert expected in printed
    assert run("verify", "model.pt2")[0] == 0
    (folder / "broken.pt2").write_bytes((folder / "model.pt2").read_bytes()[:-1])
    status, printed = run("verify", "model.pt2", "broken.pt2")
    assert status == 1 and "passed" in printed and "FAILED" in printed


def test_a_terminal_shows_what_an_export_does(folder, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    status, shown = run_program("export", "small_model:make", "model.pt2", "--shape", "1,3,8,8", "--target", "max")
    assert status == 0, shown
    assert any(step in shown for step in ("tracing a batch", "comparing a batch", "for its self-test")), shown
    assert "self-test passed" in " ".join(shown.split())


def test_stages_that_take_long_leave_a_line(capsys):
    with terminal.stages("one") as shown:
        shown.began -= 2.5
        logging.getLogger("lrpfx.deploy").info("two [bold]")
        shown.began -= 1.5
        shown.begin("three")
    assert re.fullmatch(r"one: 2\.5 s\ntwo \[bold\]: 1\.5 s\n", capsys.readouterr().err)
    with pytest.raises(KeyboardInterrupt), terminal.stages("one") as shown:
        shown.began -= 5
        raise KeyboardInterrupt
    assert not capsys.readouterr().err
    assert not any(isinstance(one, terminal.Stages) for one in logging.getLogger("lrpfx").handlers)


def test_version():
    status, printed = run("--version")
    versions = f"lrpfx {lrpfx.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    assert status == 0 and printed == f"{versions}\n"


def test_composites_are_listed_and_found_by_both_names():
    status, printed = run("composites")
    for name, composite in COMPOSITES.items():
        assert status == 0 and f"{name}, {composite.__name__}(" in printed
        assert composite_class(name) is composite_class(composite.__name__) is composite
    assert "epsilon_gamma_box, EpsilonGammaBox(low, high, epsilon=1e-06, gamma=0.25" in printed


def test_bounds_of_the_input_come_from_the_preprocessing(folder):
    exported("model.pt2", "--composite", "epsilon_gamma_box")
    assert "ZBox(low=Tensor(1, 3, 1, 1), high=Tensor(1, 3, 1, 1)" in run("inspect", "model.pt2")[1].replace("\n", " ")
    runner = lrpfx.load("model.pt2")
    model = importlib.import_module("small_model").make().eval()
    model.load_state_dict(torch.load("weights.pt", weights_only=True))
    image = torch.rand(2, 3, 8, 8)
    expected = lrpfx.attribute(lrpfx.transform(model, EpsilonGammaBox(low=0.0, high=1.0)), image, 1)
    torch.testing.assert_close(runner(image, torch.tensor([1, 1]))["relevance"], expected.relevance, rtol=1e-4, atol=1e-6)


def test_settings_are_values_of_python_or_words():
    assert isinstance(options.composite_of("AttnLRP", ["epsilon=0.5", "gates=signal", "gamma=None"], None), AttnLRP)
    with pytest.raises(lrpfx.InputError, match="gates is 'half' or 'signal', not 'both'"):
        options.composite_of("AttnLRP", ["gates=both"], None)
    with pytest.raises(lrpfx.InputError, match="Did you mean 'gates'"):
        options.composite_of("AttnLRP", ["gate=half"], None)


def test_interpolations_and_kinds_of_target_are_all_there():
    assert {one.value for one in options.Interpolation} == set(INTERPOLATIONS)
    assert {one.value for one in export.TargetKind} == set(TARGETS)
    assert {one.value for one in export.Reduction} == set(ALL) - {None}


def test_completion(monkeypatch, folder):
    exported_before()
    for words, number, expected in (
        ("lrpfx export x y --composite epsilon_g", 5, "epsilon_gamma_box"),
        ("lrpfx export x y --composite EpsilonG", 5, "EpsilonGammaBox"),
        ("lrpfx export x y --reduce ab", 5, "absolute"),
        ("lrpfx explain tor", 2, "torchvision:"),
        ("lrpfx explain mod", 2, "model.pt2"),
    ):
        environment = {"_LRPFX_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(number)}
        result = CliRunner().invoke(application.app_of(), [], env=environment, prog_name="lrpfx")
        assert expected in result.output.split()


BROKEN = """
import torch
from torch import nn

def raises():
    raise OSError("no such disk")

def wants(size):
    return nn.Linear(size, size)

def other():
    return nn.Sequential(*[nn.Linear(2, 2) for _ in range(80)])

1 / 0 if __name__ == "broken_module" else None
"""


def test_mistakes_are_short_messages(folder):
    (folder / "broken.py").write_text(BROKEN)
    (folder / "broken_module.py").write_text(BROKEN)
    shape = ["--shape", "1,3,8,8"]
    for arguments, message in [
        (["export", "small_model:make", "m.pt2", *shape, "--composite", "epsilon_gamma_box"], "needs the settings low, high"),
        (["export", "small_model:make", "m.pt2", *shape, "--composite", "epsilon_plas"], "Did you mean 'epsilon_plus'"),
        (["export", "small_model:make", "m.pt2", *shape, "--setting", "epsilom=1"], "Did you mean 'epsilon'"),
        (["export", "small_model:make", "m.pt2", "--shape", "1,4,8,8"], "cannot run on an input of shape 1,4,8,8"),
        (["export", "small_model:make", "m.pt2", "--shape", "3,8"], "cannot run on an input of shape"),
        (["export", "small_model:maek", "m.pt2", *shape], "Did you mean 'make'"),
        (["export", "broken:raises", "m.pt2", *shape], "OSError: no such disk"),
        (["export", "broken:wants", "m.pt2", *shape], "Give a function that takes none"),
        (["export", "broken_module:other", "m.pt2", *shape], "ZeroDivisionError"),
        (["export", "broken:other", "m.pt2", "--shape", "1,2", "--weights", "weights.pt"], "it lacks 156 of them"),
        (["export", "small_model:make", "m.pt2", *shape, "--target", "indx"], "'index'"),
        (["export", "small_model:make", "absent/m.pt2", *shape], "there is no folder"),
        (["inspekt", "m.pt2"], "inspekt"),
        (["run", "m.pt2", "images", "results"], "cannot be read"),
    ]:
        status, printed = run_program(*arguments)
        assert status == 2 and message in " ".join(printed.split()), printed
        assert "Traceback" not in printed and len(printed.splitlines()) < 12, printed


def test_messages_speak_of_options(folder):
    exported_before()
    (folder / "two.txt").write_text("cat\ndog\n")
    raw = ["--raw", "--size", "8"]
    exported("largest.pt2", "--target", "max")
    for arguments, message in [
        (["explain", "small_model:make", "images", *raw, "--target", "cat"], "pass --categories"),
        (["explain", "small_model:make", "images", *raw, "--categories", "two.txt"], "--categories has 2 names"),
        (["explain", "model.pt2", "images", *raw, "--composite", "epsilon_plus"], "--composite is for a model"),
        (["explain", "largest.pt2", "images", *raw, "--target", "1"], "export it with lrpfx export --target index"),
        (["explain", "model.pt2", "images", "--size", "9"], "makes 3×9×9"),
        (["run", "model.pt2", "images", "results", "--size", "9"], "makes 3×9×9"),
        (["run", "model.pt2", "images", "results", "--categories", "two.txt"], "--categories is for a --target"),
        (["explain", "small_model:make", "https://a.b/c.jpg", *raw], "https://a.b/c.jpg is an address"),
        (["run", "model.pt2", "s3://a/b", "results"], "s3://a/b is an address"),
        (["explain", "small_model:make", "images", "--weights", "DEFAULT"], "--weights DEFAULT is for models of libraries"),
        (["explain", "small_model:make", "images", "--weights", "none"], "--weights none is for models of libraries"),
        (["check", "small_model:make", "--weights", "none"], "--weights none is for models of libraries"),
        (["run", "model.pt2", "images", "results", "--interpolation", "box", "--raw"], ""),
        (["explain", "small_model:make", "images", "--raw", "--interpolation", "box"], "--interpolation is for a resize"),
        (["explain", "small_model:make", "images", *raw, "--target", "1", "--target", "1"], "names a class twice: 1, 1"),
        (
            ["check", "small_model:make", "--composite", "epsilon_plus", "--set", "epsilon=1", "--set", "epsilon=2"],
            "is given twice",
        ),
    ]:
        status, printed = run_program(*arguments)
        assert message in " ".join(printed.split()) and (status == 2) == bool(message), (arguments, printed)
        assert not re.search(r"\w+=(?!=)|Error:", printed.partition("error")[2]), printed


def test_options_take_the_place_of_arguments_but_not_in_calls(folder):
    status, printed = run_program("check", "small_model:make")
    assert status == 0 and "pass --shape: " in printed
    status, printed = run_program("check", "small_model:make", "--shape", "1,3,8,8")
    assert status == 0 and "lrpfx.transform(model, composite, example_inputs=...)" in printed


def test_a_file_of_weights_is_never_run(folder):
    """Nor does a message advise to do so."""
    torch.save({"0.weight": Mistake()}, "pickled.pt")
    (folder / "empty.pt").write_bytes(b"")
    for path in ("pickled.pt", "empty.pt", "small_model.py", "images/0.png", "images/notes.txt", "notes.safetensors"):
        (folder / "notes.safetensors").write_text("notes")
        status, printed = run_program("check", "small_model:make", "--weights", path)
        assert status == 2 and f"{path} holds no weights that can be read without running code" in printed
        assert "weights_only" not in printed and "\\x1b" not in printed


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no device that is full")
@pytest.mark.parametrize(
    "command", [["composites"], ["--version"], ["explain", "small_model:make", "images", "--raw", "--size", "8"]]
)
def test_an_output_that_cannot_be_written(folder, command, monkeypatch, capfd):
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # closing it fails
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "argv", ["lrpfx", *command])
        with pytest.raises(SystemExit) as caught, warnings.catch_warnings():
            application.main()
    assert caught.value.code == 2
    assert "error: the standard output cannot be written to: No space left on device" in capfd.readouterr().err


def test_tables_in_a_pipe_are_whole(folder, monkeypatch):
    name = "a very long name of a photograph " * 5 + ":cat:.png"
    (folder / "images" / name).write_bytes((folder / "images" / "0.png").read_bytes())
    _, printed = run("explain", "small_model:make", f"images/{name}", "--raw", "--size", "8")
    assert name in printed and "…" not in printed
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "60")
    (folder / "images" / ("x" * 90 + ".png")).write_bytes((folder / "images" / "0.png").read_bytes())
    _, printed = run("explain", "small_model:make", f"images/{'x' * 90}.png", "--raw", "--size", "8")
    assert "x" * 20 in printed and "x…" not in printed and printed.count("x") - printed.count("ex") >= 90


def test_numbers_of_things(folder):
    exported_before()
    status, printed = run("run", "model.pt2", "images/0.png", "results")
    assert status == 0 and printed.startswith("1 heatmap and outputs.csv")


def test_stages_have_plain_names(folder, caplog, monkeypatch):
    begun = []
    monkeypatch.setattr(terminal.Stages, "begin", lambda self, stage: begun.append(stage))
    run("explain", "small_model:make", "images", "--raw", "--size", "8")
    exported("model.onnx")
    run("explain", "model.onnx", "images")
    assert "tracing the model" in begun and not any(re.match("[A-Z]+ ", stage) for stage in begun)
    assert set(terminal.STAGES) == {"capture", *(stage.value for stage in Stage)}
    titles = []
    monkeypatch.setattr(explain_command, "stages", lambda title, *_: titles.append(title) or terminal.stages(title))
    run("explain", "model.onnx", "images", "--output", "others")
    assert titles == ["loading model.onnx", "preparing photographs"]


def test_stages_are_printed_in_their_order(folder, monkeypatch):
    monkeypatch.setattr(terminal, "_LONG", 0.0)
    status, printed = run_program("explain", "small_model:make", "images", "--raw", "--size", "8")
    lines = [found[1] for found in re.finditer(r"(?m)^(.+): [\d.]+ s$", printed)]
    assert status == 0
    assert lines[0] == "loading small_model:make" and lines[-1].startswith("explaining with GammaByDepth")
    names = ["preparing photographs", *terminal.STAGES.values()]
    stages = [line for line in lines if line in names]
    assert stages == [name for name in names if name in stages] and {names[1], names[2], names[7]} < set(stages)


def test_nothing_but_results_is_on_the_standard_output(folder):
    talking = """
print("imported")

class Talking(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = make()

    def forward(self, x):
        print("called")
        return self.inner(x)
"""
    (folder / "talking.py").write_text(MODEL + talking)
    explaining = ("explain", "talking:Talking", "images", "--raw", "--size", "8")
    for arguments in (explaining, ("export", "talking:Talking", "talking.pt2", "--shape", "1,3,8,8")):
        found = CliRunner().invoke(application.app_of(), list(arguments))
        assert found.exit_code == 0 and "imported" in found.stderr and "called" in found.stderr
        assert "imported" not in found.stdout and "called" not in found.stdout
        sys.modules.pop("talking", None)


@pytest.mark.programs
def test_nothing_but_results_leaves_the_process(folder):
    """Compiled code that prints by itself, the end of the process, and warnings of libraries."""
    talking = """
import atexit, os, warnings
atexit.register(print, "ended")

def loud():
    os.write(1, b"compiled")
    warnings.warn("of a library")
    return make()
"""
    (folder / "talking.py").write_text(MODEL + talking)
    options = ["talking:loud", "images/0.png", "--raw", "--size", "8", "--json"]
    found = subprocess.run([sys.executable, "-m", "lrpfx", "explain", *options], capture_output=True, text=True)
    assert found.returncode == 0 and json.loads(found.stdout)["photographs"][0]["file"] == "0.png", found
    assert "compiled" in found.stderr and "ended" in found.stderr and "of a library" not in found.stderr


def test_warnings_are_messages(folder, monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    exported_before()
    with warnings.catch_warnings():
        warnings.simplefilter("default", LrpfxWarning)
        status, printed = run_program("run", "model.pt2", "images", "results", "--interpolation", "box")
    assert status == 0 and "\nwarning: the options replace" in f"\n{printed}" and ".py:" not in printed
    assert "#models-by-name" in printed


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (("explain", "small_model:make", "images", "--raw", "--size", "8"), {"folder": "explanations"}),
        (("report", "small_model:make", "images", "--raw", "--size", "8"), {"file": "report.html"}),
        (("check", "small_model:make", "--shape", "1,3,8,8"), {"ok": True}),
        (("draw", "small_model:make", "--shape", "1,3,8,8"), {"file": "graph.svg"}),
        (("export", "small_model:make", "made.pt2", "--shape", "1,3,8,8"), {"file": "made.pt2", "preprocessing": None}),
        (("run", "model.pt2", "images", "heatmaps"), {"explained": 3, "problems": {}}),
        (("inspect", "model.pt2"), {"target": "index"}),
        (("sign", "model.pt2"), {"signed": False}),
        (
            ("compare", "small_model:make", "images/0.png", "--raw", "--size", "8", "--composite", "epsilon_plus", *OTHER),
            {"titles": ["EpsilonPlus()", "EpsilonPlusFlat()"]},
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_results_as_json(arguments, values, folder):
    exported_before()
    found = CliRunner().invoke(application.app_of(), [*arguments, "--json"])
    data = json.loads(found.stdout)
    assert found.exit_code == 0 and {name: data[name] for name in values} == values
    if arguments[0] == "explain":
        assert [one["file"] for one in data["photographs"]] == ["0.png", "1.png", "2.png"]
        one = data["photographs"][0]
        assert one["predicted"][0] == one["explained"][0] and 0 < one["predicted"][0]["probability"] <= 1
        assert all(Path(path).exists() for path in one["pictures"])


def test_lists_as_json(folder):
    exported_before()
    assert json.loads(run("composites", "--json")[1])[0].keys() == {"name", "class", "settings", "description"}
    (row,) = json.loads(run("verify", "model.pt2", "--json")[1])
    assert row["file"] == "model.pt2" and row["passed"] is True


def test_numbers_that_are_not_finite_are_null_in_json(capsys):
    with terminal.results_alone(as_json=True):
        terminal.say_data({"a": float("nan"), "b": np.float32(2.0), "c": [Path("x")], 3: None})
        terminal.say("nothing")
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": 2.0, "c": ["x"], "3": None}
    terminal.say_data({})
    assert capsys.readouterr().out == ""


def test_threads_that_wait_sleep_unless_the_user_decides():
    code = """
import os, sys, types
application = sys.modules["lrpfx.command_line.application"] = types.ModuleType("application")
application.main = lambda: print(os.environ["OMP_WAIT_POLICY"], "torch" in sys.modules)
from lrpfx.__main__ import main
main()
"""
    for given, expected in (({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")):
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
        found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert found.stdout.split() == [expected, "False"], found.stderr


def test_missing_packages_are_found_first(folder, monkeypatch):
    loaded = []
    for command in (export, draw_command):
        monkeypatch.setattr(command, "model_named", lambda *arguments, **_: loaded.append(arguments))
    for name in ("onnxscript", "pygraphviz"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("lrpfx.reports.drawing.shutil.which", lambda name: None)
    monkeypatch.setattr("lrpfx.deploy.backends.compiled.problem_of_cpp_compiler", lambda: "there is none")
    for arguments, message in (
        (["export", "small_model:make", "m.onnx"], "onnxscript"),
        (["export", "small_model:make", "m.pt2", "--compile"], "needs a C\\+\\+ compiler: there is none"),
        (["export", "small_model:make", "m.onnx", "--compile"], "suffix must be .pt2"),
        (["export", "small_model:make", "absent/m.pt2"], "there is no folder"),
        (["draw", "small_model:make"], "needs Graphviz"),
    ):
        with pytest.raises(lrpfx.LrpfxError, match=message):
            run(*arguments)
    assert not loaded


@pytest.mark.parametrize("delay", [0.05, 0.3, 1.0, 2.0])
def test_interrupts_are_messages(delay, folder):
    process = subprocess.Popen(
        [sys.executable, "-m", "lrpfx", "inspect", "absent.pt2"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    printed = "".join(process.communicate(timeout=60))
    if "lrpfx/__main__.py" not in printed and "Traceback" in printed:
        return  # Python was not yet in main
    assert "Traceback" not in printed and process.returncode in (130, 2), printed


#: A program that replaces the command line, since the interrupt is to come at a certain moment.
INTERRUPTED = """
import atexit, os, signal, sys, types
import lrpfx.__main__
interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)
application = sys.modules["lrpfx.command_line.application"] = types.ModuleType("application")
sys.modules["lrpfx.command_line"] = types.ModuleType("command_line")
sys.modules["lrpfx.command_line"].__path__ = []
sys.argv = ["lrpfx", *sys.argv[2:]]
%s
lrpfx.__main__.main()
"""
AT_IMPORT = """
def swallowed(name):
    try:
        interrupt()
    except KeyboardInterrupt:
        return lambda: print("went on")
del sys.modules["lrpfx.command_line.application"]
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "lrpfx.command_line.application":
            from importlib.machinery import ModuleSpec
            return ModuleSpec(name, Finder)
    create_module = lambda spec: None
    def exec_module(module):
        module.main = swallowed("main")
sys.meta_path.insert(0, Finder)
"""
AT_WORK = """
application.main = interrupt
"""
IN_A_FINALIZER = """
import time
class Finalized:
    def __del__(self):
        interrupt()
def main():
    Finalized()
    time.sleep(20)
    print("went on")
application.main = main
"""
AT_EXIT = """
class Slow:
    def __del__(self, interrupt=interrupt):
        interrupt()
sys.slow = Slow()
def main():
    atexit.register(interrupt)
    print("done", flush=True)
    sys.exit(0)
application.main = main
"""


@pytest.mark.parametrize(
    "moment, command, status, printed",
    [
        (AT_IMPORT, "explain", 130, "interrupted. What was written stays; the same command goes on from there\n"),
        (AT_WORK, "run", 130, "interrupted. What was written stays; the same command goes on from there\n"),
        (AT_WORK, "export", 130, "interrupted\n"),
        (IN_A_FINALIZER, "export", 130, "interrupted\n"),
        (AT_EXIT, "export", 0, "done\n"),
    ],
)
def test_an_interrupt_at_any_moment_ends_in_order(moment, command, status, printed):
    program = [sys.executable, "-c", INTERRUPTED % moment, "lrpfx", command]
    process = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stdout + process.stderr) == (status, printed)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["export", "small_model", "m.pt2", "--shape", "1,3,8,8"], "module:callable"),
        (["export", "small_model:absent", "m.pt2", "--shape", "1,3,8,8"], "cannot be imported"),
        (["export", "absent:make", "m.pt2", "--shape", "1,3,8,8"], "cannot be imported"),
        (["export", "small_model:number", "m.pt2", "--shape", "1,3,8,8"], "an object of type int"),
        (["export", "small_model:ready", "m.pt2", "--shape", "1,3,x"], "not a comma-separated list of numbers"),
        (["export", "small_model:ready", "m.pt2", "--shape", "0,3,8,8"], "positive sizes"),
        (["export", "small_model:ready", "m.zip", "--shape", "1,3,8,8"], "suffix"),
        (["export", "small_model:ready", "m.pt2", "--shape", "1,3,8,8", "--composite", "best"], "no composite named"),
        (["export", "small_model:ready", "m.pt2", "--shape", "1,3,8,8", "--setting", "low"], "name=value"),
        (["export", "small_model:ready", "m.pt2", "--shape", "1,3,8,8", "--setting", "low=x y"], "the value of low"),
        (["export", "small_model:ready", "m.pt2", "--shape", "1,3,8,8", "--weights", "absent.pt"], "cannot be read"),
        (["export", "small_model:ready", "m.pt2", "--shape", "1,3,8,8", "--weights", "small_model.py"], "holds no weights"),
        (["export", "small_model:ready", "m.pt2", "--shape", "1,3,8,8", "--weights", "pickled.pt"], "holds no weights"),
        (["run", "absent.pt2", "images", "results"], "cannot be read"),
        (["run", "model.pt2", "absent", "results"], "no file or folder absent"),
        (["run", "model.pt2", "results", "results"], "no images"),
        (["run", "model.pt2", "images", "results", "--std", "0"], "std is positive"),
        (["run", "model.pt2", "images", "results", "--mean", "1,2"], "one for each of 3 channels"),
        (["run", "model.pt2", "images", "results", "--target", "9"], "out of range"),
        (["run", "weights.pt2", "images", "results"], "relevance of the output that is given"),
        (["inspect", "small_model.py"], "damaged"),
    ],
)
def test_mistakes(folder, arguments, message):
    torch.save({"0.weight": Mistake()}, "pickled.pt")
    os.mkdir("results")
    if arguments[:2] == ["run", "model.pt2"]:
        exported_before()
    if arguments[1] == "weights.pt2":
        exported("weights.pt2", "--target", "weights")
    with pytest.raises(lrpfx.LrpfxError, match=message):
        run(*arguments)
    assert not os.listdir("results") and not os.path.exists("m.pt2")


class Mistake:
    """What a pickle could run."""


def test_as_a_program(folder):
    """Errors are messages without a traceback."""
    command = [sys.executable, "-m", "lrpfx", "inspect", "absent.pt2"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 2 and "error: absent.pt2 cannot be read" in process.stderr
    assert process.stderr.splitlines()[-1] == f"See {address('files-and-folders')}"
    assert "Traceback" not in process.stderr


def test_a_command_imports_what_it_needs():
    code = """
import sys
from lrpfx.command_line.application import app_of
app_of(["explain"])
print(*sorted({"networkx", "torchvision", "zarr", "fastapi", "starlette", "matplotlib"} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0 and not found.stdout.strip(), found.stdout + found.stderr
