"""Data sets on the processes and machines of Ray: some actors load blocks of samples, others explain and write them."""

import io
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lrpfx.datasets.engines import Engine, Step, Work
from lrpfx.datasets.explaining import Explaining
from lrpfx.datasets.filling import BlockExplainer
from lrpfx.datasets.places import Place
from lrpfx.datasets.preparing import Batch
from lrpfx.datasets.sources import Indexed, Plan, Source, Streamed
from lrpfx.datasets.store import BlockWriter, Done, Manifest, done_of, read_manifest
from lrpfx.errors import ArtefactError, InputError, LrpfxError, first_lines
from lrpfx.support.optional_packages import optional_package
from lrpfx.version import __version__

#: How often a block is tried again if the process that had it ended: for ever, were it left to Ray.
RETRIES = 3
_OBJECT_STORE_BYTES = 1 << 30  # of a Ray that is started here
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

#: A row of what goes through Ray: columns with one entry each.
Row = dict[str, Any]


@dataclass(frozen=True)
class RayEngine(Engine):
    """Runs `lrpfx.datasets.attribute` on Ray Data: `engine=RayEngine(...)`, or `engine="ray"` for the defaults.

    It uses the cluster that `ray.init` was called for or whose address is in the environment variable RAY_ADDRESS, and starts
    Ray on this machine, for the time of the call, where there is none. Actors load and preprocess samples, at most `workers=`
    of them; others have an explainer each, explain blocks and write them, so all machines must see the path of the store. The
    data set and the model are sent to them; what these import must be installed there. A block whose process or machine is lost
    is tried again, three times. Needs `pip install 'lrpfx[ray]'`.

    `explainers`: how many actors explain; by default one for each GPU, or, without any, for each `cpus` of the CPUs, of which
    one is left for loading. `cpus`: CPUs, and threads, of each. `gpus`: GPUs of each; by default one if the cluster has any.
    """

    explainers: int | None = None
    cpus: int = 1
    gpus: float | None = None

    def check(self, source: Source) -> None:
        for name, value in (("explainers", self.explainers), ("cpus", self.cpus)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InputError(f"{name} of a RayEngine is a positive number, not {value!r}")
        gpus = self.gpus
        if gpus is not None and (isinstance(gpus, bool) or not isinstance(gpus, (int, float)) or not 0 <= gpus < np.inf):
            raise InputError(f"gpus of a RayEngine is a number from 0, not {gpus!r}")
        if isinstance(source, Streamed) and source.is_read_once:
            raise InputError(
                "an iterator can be read only once, and only here: for Ray pass what it was made of, such as an IterableDataset"
            )
        _packages()

    def steps(self, work: Work) -> Generator[Step]:
        """As for any engine. Errors: those of the blocks; `InputError` if Ray gave a block up, or cannot have what is asked."""
        pending = _blocks_of(work)
        if pending is not None and not pending:
            return
        ray, data = _packages()
        with _running(ray, data, self) as pool:
            plan = replace(work.plan, done=Done.nothing())  # each process sees for itself
            content = _packed(_Sent(work.source, plan, work.explaining, work.writer.place, work.writer.manifest))
            desk = _desk(ray).remote([ray.put(content)])
            explained = _explained(data, desk, pending, pool, getattr(work.source, "workers", 0))
            try:
                yield from _steps_in(explained.iter_rows())
            except LrpfxError:
                raise
            except Exception as error:
                if type(error).__module__.partition(".")[0] != "ray" and not isinstance(error, ray.exceptions.RayError):
                    raise
                raise InputError(
                    f"Ray gave up: {first_lines(error)}; what was explained is in the store, and another run goes on"
                ) from error


@dataclass(frozen=True)
class _Sent:
    """What the actors get."""

    source: Source
    plan: Plan
    explaining: Explaining
    place: Place
    manifest: Manifest


@dataclass(frozen=True)
class _Pool:
    """The actors that explain, and the most that load."""

    explainers: int
    loaders: int
    cpus: int
    gpus: float


def _packages() -> tuple[Any, Any]:
    """The packages ray and ray.data. `InputError` if they are not installed."""
    hook = sys.excepthook
    try:
        return optional_package("ray", 'engine="ray"', "ray"), optional_package("ray.data", 'engine="ray"', "ray")
    finally:
        sys.excepthook = hook  # Ray has one of its own


def _blocks_of(work: Work) -> list[int] | None:
    """The blocks to explain; None if they are not known before the samples are read."""
    if not isinstance(work.source, Indexed):
        return None
    work.source.check_done(work.plan)
    return work.plan.pending(work.source.length)


# --- Ray ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def _running(ray: Any, data: Any, engine: RayEngine) -> Iterator[_Pool]:
    """A context in which Ray runs, with settings of Ray Data for blocks. What it changes in this process is undone."""
    is_ours = not ray.is_initialized()
    handler = signal.getsignal(signal.SIGTERM)
    levels = {name: logging.getLogger(name).level for name in ("ray", "ray.data")}
    variables = {name for name in os.environ if name.startswith("RAY_")}
    try:
        if is_ours:
            _start(ray, engine)
        pool = _pool(ray, engine)
        context = data.DataContext.get_current().copy()
        context.enable_progress_bars = False
        context.target_max_block_size = context.target_min_block_size = 1  # one block of the store is one of Ray Data
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        with data.DataContext.current(context):
            yield pool
    finally:
        if is_ours:
            ray.shutdown()
            for name in {name for name in os.environ if name.startswith("RAY_")} - variables:
                del os.environ[name]
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _start(ray: Any, engine: RayEngine) -> None:
    """Join the cluster that the environment names, or start Ray here."""
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not os.environ.get("RAY_ADDRESS"):
        explainers = engine.explainers or max(1, (_cpus_here() - 1) // engine.cpus)
        settings |= {"address": "local", "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
        settings["runtime_env"] = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
        settings["num_cpus"] = max(_cpus_here(), explainers * engine.cpus + 1)  # numbers for Ray's planning, not cores
    changed = {name: value for name, value in _QUIET.items() if name not in os.environ}
    os.environ.update(changed)
    try:
        ray.init(**settings)
    except Exception as error:
        raise InputError(f"Ray cannot be started or joined: {first_lines(error)}") from error
    finally:
        for name in changed:
            del os.environ[name]


def _cpus_here() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pool(ray: Any, engine: RayEngine) -> _Pool:
    """The actors that the cluster has room for. `InputError` if it has none for those that are asked for."""
    has = ray.cluster_resources()
    cpus, gpus = int(has.get("CPU", 0)), has.get("GPU", 0.0)
    each = engine.gpus if engine.gpus is not None else float(gpus >= 1)
    by_gpus = int(gpus // each) if each else None
    by_cpus = (cpus - 1) // engine.cpus
    explainers = engine.explainers or max(1, by_cpus if by_gpus is None else min(by_cpus, by_gpus))
    left = cpus - explainers * engine.cpus
    if left < 1 or explainers * each > gpus:
        raise InputError(
            f"the cluster has {cpus} CPUs and {gpus:g} GPUs: {explainers} explainers of {engine.cpus} CPUs and {each:g} GPUs, "
            "and one CPU for loading, would wait for ever; ask for fewer by RayEngine(explainers=, cpus=, gpus=)"
        )
    return _Pool(explainers, left, engine.cpus, each)


def _explained(data: Any, desk: Any, pending: list[int] | None, pool: _Pool, workers: int) -> Any:
    """The dataset of Ray whose rows are the blocks that were explained and written."""
    most = pool.explainers
    if pending is None:
        loaded = _dataset(data, lambda: _rows_of_stream(desk), 1)
    else:
        most = min(most, len(pending))
        loaded = _dataset(data, lambda: ({"block": block} for block in pending), 0).map_batches(
            _Loader,
            fn_constructor_args=(desk,),
            batch_size=1,
            compute=data.ActorPoolStrategy(min_size=1, max_size=min(workers or pool.loaders, pool.loaders, len(pending))),
            num_cpus=1,
        )
    return loaded.map_batches(
        _Explainer,
        fn_constructor_args=(desk, pool.cpus),
        batch_size=1,
        # two calls at once for each, of which one writes while the other explains
        compute=data.ActorPoolStrategy(size=most, max_concurrent_calls_per_actor=2, enable_true_multi_threading=True),
        num_cpus=pool.cpus,
        num_gpus=pool.gpus or None,
    )


def _dataset(data: Any, rows: Callable[[], Iterator[Row]], cpus: float) -> Any:
    """A dataset of Ray with these rows, which one task makes one after the other, as fast as they are taken."""

    def tables() -> Iterator[Any]:
        pyarrow = optional_package("pyarrow", 'engine="ray"', "ray")
        for row in rows():
            yield pyarrow.table({name: [value] for name, value in row.items()})

    class Rows(data.Datasource):
        def get_read_tasks(self, parallelism: int, per_task_row_limit: Any = None, data_context: Any = None) -> list[Any]:
            metadata = data.block.BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None)
            return [data.ReadTask(tables, metadata)]

        def estimate_inmemory_data_size(self) -> int | None:
            return None

    return data.read_datasource(Rows(), override_num_blocks=1, num_cpus=cpus)


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


# --- what goes to other processes and back -----------------------------------------------------------------------------------


def _packed(value: Any) -> bytes:
    """Objects as bytes, with functions and classes of the user's script. `InputError` if they cannot be sent."""
    ray, _ = _packages()
    content = io.BytesIO()
    try:
        torch.save(value, content, pickle_module=ray.cloudpickle)
    except Exception as error:
        raise InputError(
            f"the model and the data set go to other processes, and cannot be pickled for that: {first_lines(error)}"
        ) from error
    return content.getvalue()


def _unpacked(content: bytes, device: str = "cpu") -> Any:
    return torch.load(io.BytesIO(content), map_location=device, weights_only=False)


def _received(desk: Any, device: str) -> _Sent:
    """What was sent. `InputError` if it needs what is not installed here, or if another release is."""
    ray, _ = _packages()
    try:
        found: _Sent = _unpacked(ray.get(ray.get(desk.content.remote())), device)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"a process of Ray cannot load the model or the data set: {first_lines(error)}; install on all machines what they "
            "import, or send it with ray.init(runtime_env=...)"
        ) from error
    ours = {"lrpfx": __version__, "torch": torch.__version__}
    theirs = found.manifest.facts["versions"]
    different = [f"{name} {ours[name]} (the store: {theirs.get(name)})" for name in ours if ours[name] != theirs.get(name)]
    if different:
        raise InputError(f"a machine of Ray has another release of {' and '.join(different)}")
    return found


def _desk(ray: Any) -> Any:
    """The class of an actor that all others know. It has what they need, and counts how often each block was begun."""

    class Desk:  # inside a function, so that its process need not import torch
        def __init__(self, content: list[Any]) -> None:
            self._content = content
            self._attempts: dict[tuple[str, int], int] = {}

        def content(self) -> Any:
            return self._content[0]

        def attempt(self, what: str, block: int) -> int:
            self._attempts[what, block] = self._attempts.get((what, block), 0) + 1
            return self._attempts[what, block]

    return ray.remote(num_cpus=0)(Desk)


def _count_attempt(desk: Any, what: str, block: int) -> None:
    """Raise `InputError` if a block ended the processes that were to load or explain it."""
    ray, _ = _packages()
    attempts = ray.get(desk.attempt.remote(what, block))
    if attempts > RETRIES + 1:
        raise InputError(
            f"{attempts - 1} processes of Ray that were to {what} block {block} ended: perhaps a sample of it crashes them, or "
            "their machines have not enough memory; a smaller batch_size= or block_size= needs less"
        )


def _problem(error: BaseException) -> bytes:
    """An exception as bytes."""
    note = "in a process of Ray:\n" + "".join(traceback.format_exception(error))
    try:
        error.add_note(note)
        content = pickle.dumps(error)
        pickle.loads(content)
    except Exception:  # exceptions of others may not be made for it
        return pickle.dumps(RuntimeError(f"{first_lines(error)}\n{note}"))
    return content


def _loaded_row(block: int, batches: list[Batch], problem: BaseException | None = None) -> Row:
    return {"block": block, "batches": _packed(batches), "problem": b"" if problem is None else _problem(problem)}


class _Loader:
    """An actor that loads blocks of samples."""

    def __init__(self, desk: Any) -> None:
        self.desk = desk
        self._found: _Sent | None = None

    def __call__(self, rows: Mapping[str, Any]) -> Row:
        block = int(rows["block"][0])
        try:
            if self._found is None:
                torch.set_num_threads(1)
                self._found = _received(self.desk, "cpu")
            _count_attempt(self.desk, "load", block)
            source = self._found.source
            assert isinstance(source, Indexed)
            found = _loaded_row(block, source.block(self._found.plan, block))
        except Exception as error:
            found = _loaded_row(block, [], error)
        return {name: [value] for name, value in found.items()}


def _rows_of_stream(desk: Any) -> Iterator[Row]:
    """The blocks of a stream that are not done, and at the end its problem, if it has one, as that of block -1."""
    batches: list[Batch] = []
    try:
        torch.set_num_threads(1)
        found = _received(desk, "cpu")
        writer = _writer(found)
        plan = Plan(found.plan.block, found.plan.batch_size, done_of(found.place, found.manifest, writer.arrays))
        for batch in found.source.batches(plan):
            if batches and batches[0].block != batch.block:
                writer.make_room(batches[0].block)
                yield _loaded_row(batches[0].block, batches)
                batches = []
            batches.append(batch)
    except Exception as error:  # the block that was begun is not whole
        yield _loaded_row(-1, [], error)
    else:
        if batches:
            yield _loaded_row(batches[0].block, batches)


def _writer(found: _Sent) -> BlockWriter:
    """The store, as it is seen from here."""
    try:
        manifest = read_manifest(found.place)
    except ArtefactError as error:
        raise ArtefactError(
            f"a process of Ray does not see the store: {error}; give a folder that all machines share, or a path such as s3://"
        ) from error
    if manifest.facts != found.manifest.facts:
        raise ArtefactError(f"a process of Ray sees another store at {found.place}; give a folder that all machines share")
    return BlockWriter(found.place, found.manifest)


class _Explainer:
    """An actor that explains blocks, and writes them."""

    def __init__(self, desk: Any, threads: int) -> None:
        self.desk = desk
        self.threads = threads
        self._alone = threading.Lock()
        self._found: BlockExplainer | None = None

    def __call__(self, rows: Mapping[str, Any]) -> Row:
        block, samples, objection, problem = int(rows["block"][0]), 0, None, bytes(rows["problem"][0])
        try:
            if not problem:
                batches = _unpacked(rows["batches"][0])
                _count_attempt(self.desk, "explain", block)
                with self._alone:
                    explainer = self._ready()
                    written = [filled for _, filled in explainer.blocks(batches) if filled is not None]
                    objection, explainer.objection = explainer.objection, None
                for filled in written:
                    explainer.writer.write(filled.block, filled.arrays, filled.digest)
                    samples += filled.count
        except Exception as error:
            problem = _problem(error)
        found = {"block": block, "samples": samples, "objection": objection or "", "problem": problem}
        return {name: [value] for name, value in found.items()}

    def _ready(self) -> BlockExplainer:
        if self._found is None:
            ray, _ = _packages()
            torch.set_num_threads(self.threads)
            found = _received(self.desk, "cuda" if ray.get_gpu_ids() else "cpu")
            self._found = BlockExplainer(found.explaining, _writer(found))
        return self._found
