"""`lrpfx explain`: photographs in, pictures of relevance and a table out."""

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from PIL import Image

from lrpfx.command_line.image_files import ImageFile, Masks, images_in, masks_of
from lrpfx.command_line.models import NamedModel, model_named
from lrpfx.command_line.number_files import (
    NumberExplainers,
    NumberOptions,
    are_of_numbers,
    explain_numbers,
    files_of,
    read_files,
)
from lrpfx.command_line.options import (
    ALLOW_NATIVE,
    BOX,
    IMAGES,
    MASK,
    MODEL,
    REFERENCE,
    CompositeOptions,
    ModelOptions,
    boxes_of,
    check_mask,
    classes_of,
    invalid,
    numbers_of,
)
from lrpfx.command_line.results import ResultFolder, Results, results_in
from lrpfx.command_line.terminal import Stages, say, say_data, say_table, stages
from lrpfx.errors import InputError
from lrpfx.explanation.answers import Category
from lrpfx.explanation.explainer import Explainer
from lrpfx.explanation.explanation import Explanation
from lrpfx.images.opening import opened_in_depth
from lrpfx.images.stored_preprocessing import MOST_PIXELS
from lrpfx.request.regions import Region
from lrpfx.support.files import check_place

OVERLAY, SHEET, COMPARE = ".overlay.png", ".sheet.png", ".compare.png"
COLUMNS = ("predicted", "explained", "relevance", "model", "composite")
_COMMAND = "lrpfx explain"
#: Rows of the table on the terminal.
_SHOWN = 40


def explain(
    model: MODEL,
    photographs: IMAGES,
    *,
    rules: CompositeOptions,
    options: ModelOptions,
    numbers: NumberOptions,
    output_folder: Annotated[Path, typer.Option("--output", "-o", help="The folder for pictures and explanations.csv.")] = Path(
        "explanations"
    ),
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="The class to explain, by name or index; by default the predicted one. Repeat it to compare classes."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many predictions the table has for each photograph.")] = 3,
    mask: MASK = None,
    box: BOX = None,
    reference: REFERENCE = None,
    batch_size: Annotated[int, typer.Option(min=1, help="How many photographs run together.")] = 8,
    allow_native: ALLOW_NATIVE = False,
) -> None:
    """Explain photographs: an overlay and a sheet for each, and a table of predictions and explained classes.

    Tables (.csv), arrays (.npy), sounds (.wav), volumes (.nii, .nii.gz), and graphs and several inputs (.npz) have a sheet, and
    a file with their relevance.

    What was explained already with the same model, settings and file is kept, so a stopped run resumes. A photograph that
    cannot be read is in the table with its reason, and the exit status is 2.
    """
    options.check(target or ())
    rules.check()
    compared = rules.compared_with(reference)
    photographs = files_of(photographs)
    if are_of_numbers(photographs):
        if box:
            raise invalid("--box is for photographs")
        files = read_files(photographs, options, target or (), mask)
        check_place(output_folder, is_folder=True)
        with stages(f"loading {model}") as shown:
            given = model_named(model, options.weights, options.metadata, options.device, allow_native=allow_native)
            known = given.names_of_classes(options.categories)
            settings: dict[str, Any] = {"composite": rules.chosen(None), "categories": known, "reference": compared}
            explainers = NumberExplainers(given.model, numbers, settings)
            say_all = explain_numbers(explainers, files, target or (), output_folder, shown)
        say_all()
        return
    numbers.check_unused()
    check_mask(mask, target, box)
    boxes_of(box or (), ())
    images = images_in(photographs)
    masks = masks_of(mask, images)
    several = len(box or target or ()) > 1
    endings = (OVERLAY, SHEET, COMPARE) if several else (OVERLAY, SHEET)
    place = ResultFolder(output_folder, "explain.json", "explanations.csv", COLUMNS, endings, () if several else (COMPARE,))
    place.check(_COMMAND)
    with stages(f"loading {model}"):
        given = model_named(model, options.weights, options.metadata, options.device, allow_native=allow_native)
        preprocess = given.required_preprocessing(options)
        known = given.names_of_classes(options.categories)
        chosen = rules.chosen(preprocess)
        if known is not None:
            classes_of(target or (), known)
        source = given.model
    explainer = Explainer(
        source,
        composite=chosen,
        preprocess=preprocess,
        categories=known,
        batch_size=batch_size,
        reference=compared,
    )
    classes = classes_of(target or [], explainer.categories)
    targets = boxes_of(box, classes) if box else classes
    settings = {
        "model": model,
        "fingerprint": given.fingerprint,
        "composite": rules.composite,
        "settings": rules.setting or [],
        "preprocessing": str(numbers_of(preprocess) or preprocess),
        "categories": None if explainer.categories is None else list(explainer.categories),
        "targets": classes,
        "top": top,
        **({} if compared is None else {"reference": compared}),
        **({} if mask is None else {"mask": str(mask)}),
        **({} if not box else {"boxes": box}),
    }
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    with results_in(place, settings, images, _COMMAND, one_program=False) as results:
        work = _Work(given, explainer, targets, top, digest, results, masks)
        pending = [image for image in results.images if not results.has(image, work.version_of(image))]
        with stages("preparing photographs", len(images)) as shown:
            shown.advance(len(images) - len(pending))
            work.explain(pending, shown)
    _show(results, work, len(images) - len(pending))
    say_data(_data(results, work))
    results.raise_problems("these photographs could not be explained")


class _Work:
    """Explains photographs, and adds their pictures and rows to the results."""

    def __init__(
        self,
        given: NamedModel,
        explainer: Explainer,
        targets: Sequence[Any],
        top: int,
        digest: str,
        results: Results,
        masks: Masks | None,
    ) -> None:
        self.given = given
        self.explainer = explainer
        self.targets = targets
        self.top = top
        self.digest = digest
        self.results = results
        self.masks = masks
        self.rows: dict[str, list[str]] = {}

    def version_of(self, image: ImageFile) -> str:
        """A text that changes with the file and with the settings."""
        mask = "" if self.masks is None else f"-{self.masks.version_for(image)}"
        return f"{image.version}{mask}-{self.digest}"

    def explain(self, images: Sequence[ImageFile], shown: Stages) -> None:
        """Explain photographs. What fails for one of them is its problem, what fails for the first ones alike is an error."""
        for batch in self._batches(images, shown):
            found = self._explained(list(batch.items()))
            errors = [one for one in found if isinstance(one, InputError)]
            if len(errors) == len(batch) and not self.rows:
                raise errors[0]
            for image, one in zip(batch, found, strict=True):
                if isinstance(one, InputError):
                    self.results.add_problem(image, one)
                else:
                    self._write(image, one)
            shown.advance(len(batch))

    def _explained(self, files: Sequence[tuple[ImageFile, Image.Image]]) -> list[Explanation | InputError]:
        """The explanation of each photograph, or why there is none."""
        photographs = [photograph for _, photograph in files]
        try:
            if self.masks is None:
                return list(self.explainer(photographs, targets=self.targets or None))
            masks = [self.masks.for_photograph(image, photograph.size) for image, photograph in files]
            return list(self.explainer(photographs, [Region(self.targets[0], mask) for mask in masks]))
        except InputError as error:
            return [error] if len(files) == 1 else [self._explained([one])[0] for one in files]

    def _batches(self, images: Sequence[ImageFile], shown: Stages) -> Iterator[dict[ImageFile, Image.Image]]:
        """Photographs that are open together: no more than run together, and no more pixels than one may have."""
        batch: dict[ImageFile, Image.Image] = {}
        pixels = 0
        for image in images:
            try:
                photograph = opened_in_depth(image.path).convert("RGB")
            except Exception as error:  # decoders raise errors of all kinds
                self.results.add_problem(image, error)
                shown.advance()
                continue
            size = photograph.width * photograph.height
            if batch and (len(batch) == self.explainer.batch_size or pixels + size > MOST_PIXELS):
                yield batch
                batch, pixels = {}, 0
            batch[image] = photograph
            pixels += size
        if batch:
            yield batch

    def _write(self, image: ImageFile, explanation: Explanation) -> None:
        explanation = explanation.renamed(image.shown)
        drawn = [explanation.overlay(), explanation.sheet()]
        if len(self.targets) > 1:
            drawn.append(explanation.compare(self.targets))
        values = [
            _joined(map(_class, explanation.top(self.top))),
            _joined(_class(answer.category) for answer in explanation.answers),
            _joined(f"{answer.balance.inputs:.6g}" for answer in explanation.answers),
            self.given.name,
            explanation.rules,
        ]
        self.rows[image.shown] = values
        self.results.add(image, self.version_of(image), values, [picture.save for picture in drawn])


def _class(category: Category) -> str:
    share = f"{category.score:.4g}" if category.probability is None else f"{category.probability:.1%}"
    return f"{category.name} {share}"


def _joined(entries: Iterable[str]) -> str:
    """The entries of a cell, separated by semicolons. One that contains a semicolon or a quote is in quotes, as in CSV."""
    return "; ".join(_quoted(entry) for entry in entries)


def _quoted(entry: str) -> str:
    text = io.StringIO()
    csv.writer(text, delimiter=";", lineterminator="").writerow([entry])
    return text.getvalue()


def _entries(cell: str) -> list[str]:
    """The entries that `_joined` joined."""
    return next(csv.reader([cell], delimiter=";", skipinitialspace=True))


def _data(results: Results, work: _Work) -> dict[str, Any]:
    """What `_show` prints, as plain data."""
    known = {name: row[2:-2] for name, row in results.before.items()} | work.rows
    problems = {row[0]: row[-1] for row in results.problems}
    photographs = []
    for image in results.images:
        if image.shown in problems or image.shown not in known:
            photographs.append({"file": image.shown, "problem": problems.get(image.shown)})
            continue
        predicted, explained, relevance, model, composite = known[image.shown]
        photographs.append(
            {
                "file": image.shown,
                "predicted": list(map(_scored, _entries(predicted))),
                "explained": list(map(_scored, _entries(explained))),
                "relevance": list(map(float, _entries(relevance))),
                "model": model,
                "composite": composite,
                "pictures": results.folder.pictures_of(image),
            }
        )
    return {"folder": results.folder.path, "photographs": photographs}


def _scored(entry: str) -> dict[str, Any]:
    """The class of an entry of `_class`, with its probability or output."""
    name, _, score = entry.rpartition(" ")
    if score.endswith("%"):
        return {"class": name, "probability": round(float(score[:-1]) / 100, 3)}
    return {"class": name, "output": float(score)}


def _show(results: Results, work: _Work, before: int) -> None:
    """Print the table of predictions and classes, and where the pictures are."""
    known = {name: row[2:-2] for name, row in results.before.items()} | work.rows
    problems = {row[0] for row in results.problems}
    images = results.images
    rows = [(image.shown, *known[image.shown]) for image in images if image.shown in known and image.shown not in problems]
    if rows:
        cells = [(name, *("\n".join(_entries(cell)) for cell in values[:3])) for name, *values in rows[:_SHOWN]]
        say_table(("photograph", "predicted", "explained", "relevance"), cells)
        say(f"rules: {rows[-1][-1]}")
    rest = f" ({len(rows) - _SHOWN} more in explanations.csv)" if len(rows) > _SHOWN else ""
    kept = f", {before} of them from before" if before else ""
    say(f"{len(rows)} of {len(images)} explained{kept}: {results.folder.path}/{rest}")
