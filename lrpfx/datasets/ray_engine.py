"""Data sets on the processes and machines of Ray: actors that take blocks of samples, explain and write them."""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from operator import attrgetter
from typing import Any

import numpy as np

from lrpfx.datasets import ray_cluster
from lrpfx.datasets.engines import EmbeddedEngine, Engine, Step, Work, written
from lrpfx.datasets.locations import Location
from lrpfx.datasets.ray_cluster import Part, Worker, numbered, packed, results_of, unpacked
from lrpfx.datasets.sample_explainer import SampleExplainer
from lrpfx.datasets.store import BlockWriter, Manifest, done_of, read_manifest
from lrpfx.errors import ArtefactError, InputError
from lrpfx.samples.plan import BlockPlan, DoneBlocks
from lrpfx.samples.preparation import SampleBatch
from lrpfx.samples.sources import IndexedSource, SampleSource, StreamSource
from lrpfx.support.numbers import whole_number

_PROBES = 32  # samples among which one that can be loaded is looked for


@dataclass(frozen=True)
class RayEngine(Engine):
    """Runs `lrpfx.datasets.attribute` on Ray: `engine=RayEngine(...)`, or `engine="ray"` for the defaults.

    It uses the cluster that `ray.init` was called for or whose address is in the environment variable RAY_ADDRESS, and starts
    Ray on this machine, for the time of the call, where there is none. Actors load, explain and write blocks of samples, so all
    machines must see the path of the store. `workers=` processes load for them, which they share; without, each loads its own
    samples. A stream is read by one actor for all. The data set and the model are sent to them; what these import must be
    installed there. A block whose process or machine is lost is tried again, three times. Needs `pip install 'lrpfx[ray]'`.

    `explainers`: how many actors explain; by default one for each GPU that is free, or, without any, for each `cpus` of the
    free CPUs, of which one is left for loading. `cpus`: CPUs, and threads, of each. `gpus`: GPUs of each; by default one if the
    cluster has any.
    """

    explainers: int | None = None
    cpus: int = 1
    gpus: float | None = None

    @property
    def wanted(self) -> tuple[int | None, int, float | None]:
        """`explainers`, `cpus` and `gpus`.

        Errors: `InputError`: `explainers` or `cpus` is not a positive number, or `gpus` is negative.
        """
        for name, value in (("explainers", self.explainers), ("cpus", self.cpus)):
            if value is not None:
                whole_number(value, f"{name} of a RayEngine is a number", 1, "ray")
        gpus = self.gpus
        if gpus is not None and (isinstance(gpus, bool) or not isinstance(gpus, (int, float)) or not 0 <= gpus < np.inf):
            raise InputError(f"gpus of a RayEngine is a number from 0, not {gpus!r}", topic="ray")
        _ = ray_cluster.package()
        return self.explainers, self.cpus, gpus

    def check(self, source: SampleSource) -> None:
        """Check the numbers of actors, and the source of samples.

        `source`: where samples come from. Errors: `InputError`: a number is wrong, the source is an iterator, which can be read
        only once, or its samples are loaded by processes that a function of a DataLoader prepares.
        """
        _ = self.wanted
        if isinstance(source, StreamSource) and source.is_read_once:
            raise InputError(
                "an iterator can be read only once, and only here: for Ray pass what it was made of, such as an "
                "IterableDataset",
                topic="ray",
            )
        if isinstance(source, IndexedSource) and source.loaded_by.are_prepared:
            raise InputError(
                "the processes of Ray do not call the worker_init_fn= of a DataLoader: have the dataset do it where it first "
                "loads a sample",
                topic="ray",
            )

    def steps(self, work: Work) -> Generator[Step]:
        """The steps of the work, as of any engine. An error of a block is raised here.

        `work`: what to explain, and where to. Errors: `InputError`: Ray gave a block up, or cannot have what is asked.
        """
        source, plan, store = work.source, work.plan, _Store(work.writer.location, work.writer.manifest)
        samples = _Samples(source, replace(plan, done=DoneBlocks([], np.zeros)), store, _probe_of(source))
        parts: Callable[[set[int]], Iterable[Part]]
        if isinstance(source, IndexedSource):
            source.check_done(plan)
            if not plan.pending(source.length):
                return
            parts, loaded_there, cpus = numbered(range(-(-source.length // plan.block))), packed(samples), 0
        else:
            parts, loaded_there, cpus = lambda done: replace(samples, done=done), None, 1
        function = partial(_explain, work.explainer, store, loaded_there)
        for results in results_of(self.wanted, parts, "explain block", function, done=plan.done.blocks, cpus=cpus):
            steps = [step for _, step in results]
            objections = (step.objection for step in steps if step.objection is not None)
            yield Step(sum(step.samples for step in steps), next(objections, None))

    def mapped(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Generator[Any]:
        """The results of a function, in any order. An error of the function is raised here, and those of `steps`.

        `function`: what each actor computes; it is sent to each, once. `items`: what it takes.
        """
        if items:
            for results in results_of(self.wanted, numbered(items), "work on part", partial(_call, function)):
                yield from (unpacked(result) for _, result in results)


def engine_named(engine: Any) -> Engine:
    """The engine that a name means. `InputError` for others."""
    named: dict[Any, type[Engine]] = {"embedded": EmbeddedEngine, "ray": RayEngine}
    if isinstance(engine, Engine):
        return engine
    if not isinstance(engine, str) or engine not in named:
        raise InputError(f'engine is "embedded", "ray" or an lrpfx.datasets.RayEngine, not {engine!r}', topic="ray")
    return named[engine]()


def _call(function: Callable[[Any], Any], worker: Worker) -> None:
    for number, item in worker.parts():
        worker.report(number, packed(function(item)))


@dataclass(frozen=True)
class _Store:
    """The store, which each process opens for itself."""

    location: Location
    manifest: Manifest

    def writer(self) -> BlockWriter:
        """The store, as it is seen from here."""
        try:
            manifest = read_manifest(self.location)
        except ArtefactError as error:
            raise ArtefactError(
                f"a process of Ray does not see the store: {error}; give a folder that all machines share, or a path such as "
                "s3://",
                topic="ray",
            ) from error
        if manifest.facts != self.manifest.facts:
            raise ArtefactError(
                f"a process of Ray sees another store at {self.location}; give a folder that all machines share", topic="ray"
            )
        return BlockWriter(self.location, self.manifest)


@dataclass(frozen=True)
class _Samples:
    """The samples of a data set, in the process that loads them.

    `probe`: the number of a sample, and its digest. `done`: the blocks of a stream that are.
    """

    source: SampleSource
    plan: BlockPlan
    store: _Store
    probe: tuple[int, int] | None
    done: Collection[int] = ()

    def check(self) -> None:
        """Raise `InputError` unless the probe is here what it is where the run was started: files may be missing here."""
        if self.probe is None:
            return
        number, digest = self.probe
        sample = next(islice(self.source.in_order(), number, None), None)
        if sample is None or sample.problem is not None:
            problem = "there is no such sample" if sample is None else sample.problem
            raise InputError(
                f"a process of Ray cannot load sample {number}, which the process that calls it can: {problem}", topic="ray"
            )
        if sample.digest != digest:
            raise InputError(
                f"sample {number} is another one in a process of Ray: its file differs, or its preprocessing is random",
                topic="ray",
            )

    def of(self, worker: Worker) -> Generator[SampleBatch]:
        """The batches of the blocks of a worker."""
        self.check()
        source = self.source
        assert isinstance(source, IndexedSource)
        source.loaded_by = replace(source.loaded_by, count=worker.share_of(source.workers))
        return source.batches_of((block for block, _ in worker.parts()), self.plan)

    def __iter__(self) -> Iterator[Part]:
        """The blocks of a stream that are not done, with their batches."""
        self.check()
        writer = self.store.writer()
        there = done_of(self.store.location, self.store.manifest, writer.arrays)  # with the digests of what is done
        counts = [count if block in self.done else 0 for block, count in enumerate(there.counts)]
        plan = replace(self.plan, done=replace(there, counts=counts))
        for block, batches in groupby(self.source.batches(plan), attrgetter("block")):
            content = list(batches)  # an error comes before a block that is not whole is out
            writer.make_room(block)
            yield block, ray_cluster.package().put(packed(content))


def _probe_of(source: SampleSource) -> tuple[int, int] | None:
    """The number and the digest of the first sample that can be loaded, if it is among some."""
    found = next((sample for sample in islice(source.in_order(), _PROBES) if sample.problem is None), None)
    return None if found is None else (found.number, found.digest)


def _explain(explainer: SampleExplainer, store: _Store, samples: bytes | None, worker: Worker) -> None:
    """Explain the blocks of a worker. `samples`: that it loads, packed to stay on the CPU; None if it is given them."""
    batches = _given(worker) if samples is None else unpacked(samples).of(worker)
    for step in written(batches, explainer, store.writer(), lambda block, count: worker.report(block, Step(count))):
        if step.objection is not None:
            worker.report(None, Step(0, step.objection))


def _given(worker: Worker) -> Generator[SampleBatch]:
    for _, content in worker.parts():
        yield from unpacked(ray_cluster.package().get(content))
