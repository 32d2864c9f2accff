"""`lrpfx inspect`, `verify` and `sign`: what a file holds, whether it still computes the same, and who says so."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from lrpfx.command_line.options import ALLOW_NATIVE, ARTEFACT
from lrpfx.command_line.terminal import in_options, say, say_data, say_table
from lrpfx.deploy.artefact import load, manifest_in
from lrpfx.deploy.artefact import sign as sign_file
from lrpfx.errors import LrpfxError
from lrpfx.images.stored_preprocessing import preprocessing_in


def inspect(artefact: ARTEFACT) -> None:
    """Show the contents of a file: its origin, preprocessing, arguments and results, and the rule of every node.

    The file is checked, but its program is not loaded.
    """
    manifest = manifest_in(artefact)
    categories, explained = manifest.get("categories"), manifest["explained"]
    facts = {
        "program": f"{manifest['kind']}, of {manifest['title']}",
        "composite": manifest["composite"],
        "canonizers": ", ".join(manifest["canonizers"]) or "none",
        "target": manifest["target"] if explained is None else f"none: it explains {explained['target']}",
        "conditions": ", ".join(_conditions(manifest)) or "none",
        "relevance": manifest["reduce"] or "as it is",
        "preprocessing": str(preprocessing_in(manifest) or "none"),
        "categories": "none" if categories is None else f"{len(categories)}: {', '.join(categories[:3])}, ...",
        "tolerance": f"{manifest['tolerance']:.0e}",
        "made with": f"lrpfx {manifest['lrpfx']}, torch {manifest['torch']}",
    }
    say_data(manifest)
    say_table(("", ""), list(facts.items()), header=False)
    shapes = [
        (role, name, "×".join("batch" if size is None else str(size) for size in one["shape"]), one["dtype"])
        for role in ("arguments", "results")
        for name, one in manifest[role].items()
    ]
    say_table(("", "name", "shape", "dtype"), shapes)
    merged = manifest["merged"]
    rules = [(name, rule, ", ".join(merged.get(name, ()))) for name, rule in manifest["rules"].items()]
    say_table(("node", "rule", "merged"), rules)


def _conditions(manifest: Mapping[str, Any]) -> Iterator[str]:
    """The masks of conditions, each with its place."""
    for name, place in manifest.get("conditions", {}).items():
        yield f"{name} at {place if isinstance(place, str) else ' -> '.join(place)}"


def verify(
    artefacts: Annotated[list[Path], typer.Argument(help="Files to verify.")],
    tolerance: Annotated[
        float | None, typer.Option(help="The largest allowed difference of a result; by default that of the file.")
    ] = None,
    allow_native: ALLOW_NATIVE = False,
    signed_by: Annotated[Path | None, typer.Option(help="A public key: all files must be signed by its owner.")] = None,
) -> None:
    """Run the self-tests of files; the exit status is 1 if any fails."""
    rows, failed = [], False
    for path in artefacts:
        try:
            runner = load(path, allow_native=allow_native, signed_by=signed_by)
            rows.append((str(path), "passed", f"differs by {runner.verify(tolerance=tolerance):.1e}"))
        except LrpfxError as error:
            failed = True
            rows.append((str(path), "FAILED", in_options(str(error))))
    say_table(("file", "self-test", ""), rows)
    say_data([{"file": path, "passed": result == "passed", "details": details} for path, result, details in rows])
    if failed:
        raise typer.Exit(1)


def sign(
    artefact: ARTEFACT,
    key: Annotated[Path | None, typer.Option(help="A private key of Ed25519, in PEM format; without one, only hashes.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="The largest difference that its self-test allows; by default that of the file.")
    ] = None,
) -> None:
    """Write the hashes of a file anew, after another program changed it, and sign it. Its self-test must pass."""
    sign_file(artefact, key, tolerance=tolerance)
    say(f"{artefact} has passed its self-test" + (f" and is signed: {artefact}.sig" if key is not None else ""))
    say_data({"file": artefact, "signed": key is not None})
