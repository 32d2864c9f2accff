"""The commands of `lrpfx`, from a model to explanations, files and a server."""

import importlib

for _package in ("typer", "rich"):
    try:
        importlib.import_module(_package)
    except ImportError as error:
        raise SystemExit(
            f"the command line needs packages that are not installed: pip install 'lrpfx[cli]' ({error})"
        ) from error
