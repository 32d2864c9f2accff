"""Running commands in this process, and the small model that they get."""

import contextlib
import csv
import functools
import importlib.util
import io
import os
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from lrpfx.command_line import application
from lrpfx.errors import InputError

MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))

number = 3
ready = make()
"""


def run(*arguments):
    """The command's exit status and what it printed; errors of lrpfx are raised."""
    result = CliRunner().invoke(application.app_of(), [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def exported(name, *options):
    return run("export", "small_model:make", name, "--shape", "1,3,8,8", "--weights", "weights.pt", "--raw", *options)


@functools.cache
def model_file():
    """The file that an export without options writes."""
    exported("model.pt2")
    return Path("model.pt2").read_bytes()


def exported_before():
    """What `exported("model.pt2")` does, once for all tests."""
    Path("model.pt2").write_bytes(model_file())


def refused(message, command, *arguments, **settings):
    """`run` or another function of a command ends with an error that says so."""
    with pytest.raises(InputError, match=message):
        command(*arguments, **settings)


def rows_of(folder="results", table="outputs.csv"):
    with open(f"{folder}/{table}", newline="") as file:
        return {row["file"]: row for row in csv.DictReader(file)}


def write_postscript(folder, path, monkeypatch):
    """Write a picture for which Pillow would start Ghostscript; where something does, the folder has a file "started"."""
    (folder / "bin").mkdir()
    (folder / "bin" / "gs").write_text(f"#!/bin/sh\ntouch {folder}/started\nexit 1\n")
    (folder / "bin" / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")


def run_program(*arguments):
    """Exit status and output of the installed command, in this process: another one takes seconds to import torch."""
    printed = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["lrpfx", *map(str, arguments)]),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        warnings.catch_warnings(),
        pytest.raises(SystemExit) as caught,
    ):
        application.main()
    return caught.value.code, printed.getvalue()


def the_model():
    """The model of `folder`, the current folder, with random weights."""
    spec = importlib.util.spec_from_file_location("small_model_again", "small_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make().eval()
