"""The benchmarks are scripts of one folder."""

import sys

from helpers import ROOT

sys.path.append(str(ROOT / "benchmarks"))
