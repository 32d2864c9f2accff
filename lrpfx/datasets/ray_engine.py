"""Data sets on the processes and machines of Ray: some actors load blocks of samples, others explain and write them."""

import pickle
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from operator import attrgetter
from typing import Any

import numpy as np

from lrpfx.datasets import ray_cluster
from lrpfx.datasets.block_explainer import BlockExplainer
from lrpfx.datasets.engines import EmbeddedEngine, Engine, Step, Work
from lrpfx.datasets.locations import Location
from lrpfx.datasets.ray_cluster import Row
from lrpfx.datasets.store import BlockWriter, Manifest, done_of, read_manifest
from lrpfx.errors import ArtefactError, InputError
from lrpfx.samples.plan import BlockPlan, DoneBlocks
from lrpfx.samples.preparation import SampleBatch
from lrpfx.samples.sources import IndexedSource, SampleSource, StreamSource
from lrpfx.support.numbers import whole_number


@dataclass(frozen=True)
class RayEngine(Engine):
    """Runs `lrpfx.datasets.attribute` on Ray Data: `engine=RayEngine(...)`, or `engine="ray"` for the defaults.

    It uses the cluster that `ray.init` was called for or whose address is in the environment variable RAY_ADDRESS, and starts
    Ray on this machine, for the time of the call, where there is none. Actors load and preprocess samples, at most `workers=`
    of them; others have an explainer each, explain blocks and write them, so all machines must see the path of the store. The
    data set and the model are sent to them; what these import must be installed there. A block whose process or machine is lost
    is tried again, three times. Needs `pip install 'lrpfx[ray]'`.

    `explainers`: how many actors explain; by default one for each GPU that is free, or, without any, for each `cpus` of the
    free CPUs, of which one is left for loading. `cpus`: CPUs, and threads, of each. `gpus`: GPUs of each; by default one if the
    cluster has any.
    """

    explainers: int | None = None
    cpus: int = 1
    gpus: float | None = None

    @property
    def wanted(self) -> ray_cluster.ActorNumbers:
        """The actors to have.

        Errors: `InputError`: `explainers` or `cpus` is not a positive number, or `gpus` is negative.
        """
        for name, value in (("explainers", self.explainers), ("cpus", self.cpus)):
            if value is not None:
                whole_number(value, f"{name} of a RayEngine is a number", 1, "ray")
        gpus = self.gpus
        if gpus is not None and (isinstance(gpus, bool) or not isinstance(gpus, (int, float)) or not 0 <= gpus < np.inf):
            raise InputError(f"gpus of a RayEngine is a number from 0, not {gpus!r}", topic="ray")
        ray_cluster.packages()
        return ray_cluster.ActorNumbers(self.explainers, self.cpus, gpus)

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
        pending = _blocks_of(work)
        if pending is not None and not pending:
            return
        with ray_cluster.running(self.wanted) as pool:
            plan = replace(
                work.plan, done=DoneBlocks(work.plan.done.counts, np.zeros)
            )  # digests are read where they are needed
            store = _Store(work.writer.location, work.writer.manifest)
            coordinator = ray_cluster.new_coordinator(
                (work.explainer, store), _ForLoaders(work.source, plan, store, _probe_of(work.source))
            )
            yield from _steps_in(
                ray_cluster.rows_in(_explained(coordinator, pending, pool, getattr(work.source, "workers", 0)))
            )

    def mapped(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Generator[Any]:
        """The results of a function, in any order. An error of the function is raised here, and those of `steps`.

        `function`: what each actor computes. `items`: what it takes.
        """
        if items:
            yield from ray_cluster.mapped(self.wanted, function, items)


def engine_named(engine: Any) -> Engine:
    """The engine that a name means. `InputError` for others."""
    named: dict[Any, type[Engine]] = {"embedded": EmbeddedEngine, "ray": RayEngine}
    if isinstance(engine, Engine):
        return engine
    if not isinstance(engine, str) or engine not in named:
        raise InputError(f'engine is "embedded", "ray" or an lrpfx.datasets.RayEngine, not {engine!r}', topic="ray")
    return named[engine]()


@dataclass(frozen=True)
class _ForLoaders:
    """What those get that load. `probe`: the number of a sample, and its digest."""

    source: SampleSource
    plan: BlockPlan
    store: "_Store"
    probe: tuple[int, int] | None

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


def _probe_of(source: SampleSource) -> tuple[int, int] | None:
    """The first sample that can be loaded, if it is among some."""
    found = next((sample for sample in islice(source.in_order(), _PROBES) if sample.problem is None), None)
    return None if found is None else (found.number, found.digest)


#: Samples among which one that can be loaded is looked for.
_PROBES = 32
#: What the coordinator has: for those that explain, and for those that load.
_FOR_EXPLAINERS, _FOR_LOADERS = 0, 1


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


def _blocks_of(work: Work) -> list[int] | None:
    """The blocks to explain; None if they are not known before the samples are read."""
    if not isinstance(work.source, IndexedSource):
        return None
    work.source.check_done(work.plan)
    return work.plan.pending(work.source.length)


def _explained(coordinator: Any, pending: list[int] | None, pool: ray_cluster.Pool, workers: int) -> Any:
    """The dataset of Ray whose rows are the blocks that were explained and written."""
    _, data = ray_cluster.packages()
    most = pool.explainers
    if pending is None:
        loaded = ray_cluster.dataset_of(lambda: _rows_of_stream(coordinator), 1)
    else:
        most = min(most, len(pending))
        loaded = ray_cluster.dataset_of(lambda: ({"block": block} for block in pending), 0).map_batches(
            _Loader,
            fn_constructor_args=(coordinator,),
            batch_size=1,
            compute=data.ActorPoolStrategy(min_size=1, max_size=min(workers or pool.loaders, pool.loaders, len(pending))),
            num_cpus=1,
        )
    return loaded.map_batches(
        _Explainer,
        fn_constructor_args=(coordinator, pool.cpus),
        batch_size=1,
        # two calls at once for each, of which one writes while the other explains
        compute=data.ActorPoolStrategy(size=most, max_concurrent_calls_per_actor=2, enable_true_multi_threading=True),
        num_cpus=pool.cpus,
        num_gpus=pool.gpus or None,
    )


def _steps_in(rows: Iterable[Mapping[str, Any]]) -> Iterator[Step]:
    """The blocks that were written, as steps. A problem of the data set is raised once all that precede it are."""
    problem: BaseException | None = None
    for row in rows:
        found = pickle.loads(row["problem"]) if row["problem"] else None
        if found is not None and row["block"] >= 0:
            raise found
        problem = problem or found
        yield Step(int(row["samples"]), row["objection"] or None)
    if problem is not None:
        raise problem


def _loaded_row(block: int, batches: list[SampleBatch], problem: BaseException | None = None) -> Row:
    return {
        "block": block,
        "batches": ray_cluster.packed(batches),
        "problem": b"" if problem is None else ray_cluster.packed_problem(problem),
    }


class _Loader:
    """An actor that loads blocks of samples."""

    def __init__(self, coordinator: Any) -> None:
        self.coordinator = coordinator
        self._found: _ForLoaders | None = None

    def __call__(self, rows: Mapping[str, Any]) -> Row:
        block = int(rows["block"][0])
        try:
            if self._found is None:
                self._found = ray_cluster.received(self.coordinator, _FOR_LOADERS, 1)
                self._found.check()
            ray_cluster.count_attempt(self.coordinator, "load block", block)
            source = self._found.source
            assert isinstance(source, IndexedSource)
            found = _loaded_row(block, source.block(self._found.plan, block))
        except Exception as error:
            found = _loaded_row(block, [], error)
        return {name: [value] for name, value in found.items()}


def _rows_of_stream(coordinator: Any) -> Iterator[Row]:
    """The blocks of a stream that are not done, and at the end its problem, if it has one, as that of block -1.

    A process that takes the place of another gives the same rows, whatever is done by then: Ray counts them.
    """
    ray_cluster.count_attempt(coordinator, "read the data set, in turn", 0)
    try:
        found: _ForLoaders = ray_cluster.received(coordinator, _FOR_LOADERS, 1)
        found.check()
        writer = found.store.writer()
        now = done_of(found.store.location, found.store.manifest, writer.arrays)
        plan = replace(found.plan, done=replace(now, counts=found.plan.done.counts))
        for block, batches in groupby(found.source.batches(plan), attrgetter("block")):
            loaded = _loaded_row(block, list(batches))  # an error comes before a block that is not whole is out
            writer.make_room(block)
            yield loaded
    except Exception as error:
        yield _loaded_row(-1, [], error)


class _Explainer:
    """An actor that explains blocks, and writes them."""

    def __init__(self, coordinator: Any, threads: int) -> None:
        self.coordinator = coordinator
        self.threads = threads
        self._alone = threading.Lock()
        self._found: BlockExplainer | None = None

    def __call__(self, rows: Mapping[str, Any]) -> Row:
        block, samples, objection, problem = int(rows["block"][0]), 0, None, bytes(rows["problem"][0])
        try:
            if not problem:
                batches = ray_cluster.unpacked(rows["batches"][0])
                ray_cluster.count_attempt(self.coordinator, "explain block", block)
                with self._alone:
                    explainer = self._ready()
                    written = [filled for _, filled in explainer.blocks(batches) if filled is not None]
                    objection, explainer.objection = explainer.objection, None
                for filled in written:
                    explainer.writer.write(filled.block, filled.arrays)
                    samples += filled.count
        except Exception as error:
            problem = ray_cluster.packed_problem(error)
        found = {"block": block, "samples": samples, "objection": objection or "", "problem": problem}
        return {name: [value] for name, value in found.items()}

    def _ready(self) -> BlockExplainer:
        if self._found is None:
            explainer, store = ray_cluster.received(self.coordinator, _FOR_EXPLAINERS, self.threads)
            self._found = BlockExplainer(explainer, store.writer())
        return self._found
