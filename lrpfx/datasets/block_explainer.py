"""The rows of blocks, filled batch by batch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lrpfx.attribution.computation import Computation
from lrpfx.datasets.layout import DIGEST, ERROR, EXPLAINED, FAILED, KEY, LABEL, STATUS, Array
from lrpfx.datasets.sample_explainer import ExplainedRows, SampleExplainer
from lrpfx.datasets.store import BlockWriter
from lrpfx.samples.items import as_text
from lrpfx.samples.plan import NO_LABEL
from lrpfx.samples.preparation import Sample, SampleBatch

#: Bytes that are reserved and freed at the beginning.
_HEAP = 31 << 20


@dataclass
class BlockExplainer:
    """Explains the batches of blocks. `objection`: to the first of its maps, if they are implausible."""

    explainer: SampleExplainer
    writer: BlockWriter
    objection: str | None = None
    _is_looked_at: bool = field(default=False, repr=False)

    def blocks(self, batches: Iterable[SampleBatch]) -> Iterator[tuple[int, "BlockRows | None"]]:
        """For each batch, its number of samples, and with the last of a block its rows.

        They come at once, since what follows may fail. The last block of something of unknown length comes with no samples.
        """
        # Once glibc has seen a large block freed, it keeps freed memory for the next batch. Else it would give it back to the
        # system after each backward pass of a small network, and get it again page by page: a tenth of the time.
        torch.empty(_HEAP, dtype=torch.uint8)
        rows: BlockRows | None = None
        for batch in batches:
            if rows is not None and rows.block != batch.block:
                yield 0, rows
                rows = None
            rows = rows or BlockRows(batch.block, self.writer.empty(batch.block))
            rows.add(batch, self._explained(batch))
            yield len(batch.samples), rows if rows.is_full else None
            rows = None if rows.is_full else rows
        if rows is not None:
            yield 0, rows

    def _explained(self, batch: SampleBatch) -> Iterator[ExplainedRows]:
        for group in batch.groups:
            yield from self.explainer.explained(group, batch.samples, self._look_at)

    def _look_at(self, found: Computation) -> None:
        if not self._is_looked_at:
            self._is_looked_at = True
            self.objection = found.objection()


class BlockRows:
    """The rows of a block, which fill up."""

    def __init__(self, block: int, arrays: dict[str, Array]) -> None:
        self.block = block
        self.arrays = arrays
        self.count = 0

    def add(self, batch: SampleBatch, explained: Iterator[ExplainedRows]) -> None:
        """Add a batch, whose samples follow those before."""
        first = self.count
        problems = {place: sample.problem for place, sample in enumerate(batch.samples) if sample.problem is not None}
        for found in explained:
            problems |= found.problems
            if not found.places:
                continue
            wrong = self._misfit(found.rows)
            if wrong is not None:
                problems |= dict.fromkeys(found.places, wrong)
                continue
            whole = found.places == list(range(len(batch.samples)))
            places = slice(first, first + len(batch.samples)) if whole else first + np.array(found.places)
            for name, values in found.rows.items():
                self.arrays[name][places] = values
        self._describe(batch.samples, problems)

    @property
    def is_full(self) -> bool:
        """Whether all samples of the block are there."""
        return self.count == len(self.arrays[STATUS])

    def _misfit(self, rows: Mapping[str, Array]) -> str | None:
        """Why rows do not fit into the store, or None."""
        for name, array in self.arrays.items():
            if name in rows and rows[name].shape[1:] != array.shape[1:]:
                return (
                    f"{name} has the shape {rows[name].shape[1:]}, and {array.shape[1:]} in the store: all samples have one "
                    "shape, so pad texts to one length, and bring images to one size or reduce their relevance"
                )
        new = next((name for name in rows if name not in self.arrays), None)
        return None if new is None else f"the sample has {new}, and the first one had none"

    def _describe(self, samples: Sequence[Sample], problems: Mapping[int, str]) -> None:
        part = slice(self.count, self.count + len(samples))
        self.count += len(samples)
        self.arrays[STATUS][part] = EXPLAINED
        self.arrays[STATUS][[part.start + place for place in problems]] = FAILED
        self.arrays[LABEL][part] = [NO_LABEL if sample.label is None else sample.label for sample in samples]
        self.arrays[DIGEST][part] = [sample.digest for sample in samples]
        self.arrays[KEY][part] = [sample.key or "" for sample in samples]
        self.arrays[ERROR][part] = [as_text(problems.get(place, "")) for place in range(len(samples))]
