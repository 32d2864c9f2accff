"""The example of a photograph."""

import re
import subprocess
import sys

import pytest
from helpers import ROOT
from PIL import Image

EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.examples


def test_the_script(tmp_path):
    run = subprocess.run([sys.executable, EXAMPLES / "photo.py"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0 and not run.stderr, run.stderr
    assert re.search(r"39\.\d%  tiger cat", run.stdout) and Image.open(tmp_path / "explanation.png").width > 1000
