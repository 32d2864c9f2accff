"""`lrpfx spray`: clusters of the relevance in a store, as tables and pictures, and as a project for ViRelAy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import lrpfx
from lrpfx.command_line.options import invalid, numbers
from lrpfx.command_line.results import write_rows
from lrpfx.command_line.terminal import say, say_data, stages
from lrpfx.datasets.clusters import Spray
from lrpfx.datasets.images_of_samples import ImagesOfSamples
from lrpfx.datasets.spray_analysis import CLUSTERS
from lrpfx.datasets.spray_analysis import spray as spray_of
from lrpfx.datasets.view import Attributions, open_store
from lrpfx.errors import InputError, os_errors
from lrpfx.explanation.saving import save_picture
from lrpfx.support.files import check_place

#: The tables.
_CLUSTERS, _SAMPLES = "clusters.csv", "samples.csv"


@dataclass(frozen=True)
class ClusterOptions:
    """How the photographs of each class are clustered."""

    virelay: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write a project for ViRelAy: photographs, relevance and clusters."),
    ] = None
    neighbors: Annotated[int, typer.Option(min=1, help="Of a photograph in the graph whose clusters are found.")] = 10
    clusters: Annotated[
        str, typer.Option(help="The numbers of clusters to try, besides 1; the largest gap of eigenvalues chooses.")
    ] = ",".join(map(str, CLUSTERS))

    def check(self, photographs: Path | None, output: Path | None, store: str | Path) -> None:
        """Raise `InputError` if the results would become photographs that are to be explained, or a part of the store."""
        for folder in filter(None, (output, self.virelay)):
            check_place(folder, is_folder=True)
            if photographs is not None and folder.resolve().is_relative_to(photographs.resolve()):
                raise invalid(f"{folder} is in the folder {photographs}, whose photographs would be others then")
            if folder.resolve().is_relative_to(Path(store).resolve()):
                raise invalid(f"{folder} is in the store {store}: give another folder")


def spray(
    store: Annotated[str, typer.Argument(help="A store that `lrpfx dataset` or lrpfx.datasets.attribute wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write tables and pictures to.")],
    *,
    options: ClusterOptions,
    photographs: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The photographs that were explained, over which relevance is drawn."),
    ] = None,
) -> None:
    """Cluster the photographs of each class by their relevance: a group for itself may be classified for a reason of its own.

    Writes clusters.csv, samples.csv with the cluster of each photograph, and a picture of the clusters of each class.
    """
    if options.virelay is not None and photographs is None:
        raise invalid("--virelay shows photographs: pass --photographs too")
    options.check(photographs, output, store)
    say_data(write_clusters(open_store(store), photographs, output, options).to_dicts())


def write_clusters(
    view: Attributions,
    photographs: Path | None,
    output: Path | None,
    options: ClusterOptions,
    preprocess: Callable[..., Any] | None = None,
    model: str = "model",
) -> Spray:
    """Write what was asked for about the clusters in a store. `preprocess`: by default that of the store."""
    with stages("finding clusters") as shown:
        embeddings = () if options.virelay is None else ("tsne",)
        found = spray_of(view, neighbors=options.neighbors, clusters=numbers(options.clusters, int), embeddings=embeddings)
        if output is not None:
            shown.begin("drawing clusters")
            _write(found, view, photographs, output, preprocess)
        if options.virelay is not None:
            shown.begin("writing the project")
            project = lrpfx.adapters.virelay.export(
                view, options.virelay, photographs, analyses=found, preprocess=preprocess, model=model
            )
    say(str(found))
    if output is not None:
        say(f"clusters: {output / _CLUSTERS}, {output / _SAMPLES}")
    if options.virelay is not None:
        say(f"project: virelay {project}")
    return found


def _write(
    found: Spray, view: Attributions, photographs: Path | None, output: Path, preprocess: Callable[..., Any] | None
) -> None:
    """Write the tables and the pictures."""
    names, keys = view.manifest.get("categories"), view.keys
    with os_errors(InputError, output, "written to"):
        output.mkdir(parents=True, exist_ok=True)
        rows = []
        for row in found.to_dicts():
            label, typical = row.pop("class"), row.pop("typical").split()
            named = {"class": label, "name": "" if names is None else names[label]}
            rows.append({**named, **row, "typical": "; ".join(keys[int(number)] or number for number in typical)})
        write_rows(output / _CLUSTERS, _with_header(rows))
        samples = [
            {"sample": number, "key": keys[number], "class": analysis.label, "cluster": cluster}
            for analysis in found
            for number, cluster in zip(analysis.samples.tolist(), analysis.clustering().assignment.tolist(), strict=True)
        ]
        write_rows(output / _SAMPLES, _with_header(samples))
        if view.relevance.ndim > 2:
            images = None if photographs is None else ImagesOfSamples(view, photographs, preprocess)
            for label in found.analyses:
                picture = found.picture(label, view, images=images)
                save_picture(picture, output / f"class-{label}.png")


def _with_header(rows: Sequence[Mapping[str, Any]]) -> list[Sequence[Any]]:
    return [list(rows[0]), *(list(row.values()) for row in rows)]
