"""Ray: the cluster that is there, or one that is started here, and what goes to its processes and comes back."""

import faulthandler
import io
import logging
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from lrpfx.errors import InputError, LrpfxError, first_lines
from lrpfx.support.optional_packages import optional_package

#: How often a part is tried again if the process that had it ended: for ever, were it left to Ray.
RETRIES = 3
_PATIENCE = 5.0  # seconds until what ended actors had is free
_VERSIONS = {"lrpfx": version("lrpfx"), "torch": torch.__version__}
_OBJECT_STORE_BYTES = 1 << 30  # of a Ray that is started here
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


#: A row of what goes through Ray: columns with one entry each.
Row = dict[str, Any]


@dataclass(frozen=True)
class Pool:
    """The actors that explain, and the most that load. `cpus`, `gpus`: of each that explains."""

    explainers: int
    loaders: int
    cpus: int
    gpus: float


@dataclass(frozen=True)
class ActorNumbers:
    """The actors that are asked for; None: as many as there is room for. See `RayEngine`."""

    explainers: int | None
    cpus: int
    gpus: float | None


def packages() -> tuple[Any, Any]:
    """The packages ray and ray.data. `InputError` if they are not installed."""
    with _unchanged_process():
        return optional_package("ray", 'engine="ray"', "ray"), optional_package("ray.data", 'engine="ray"', "ray")


@contextmanager
def _unchanged_process() -> Iterator[None]:
    """A context after which this process is as it was: Ray sets hooks, variables, paths and filters."""
    hook, variables, path = sys.excepthook, set(os.environ), list(sys.path)
    is_traced, handler = faulthandler.is_enabled(), signal.getsignal(signal.SIGTERM)
    levels = {name: logging.getLogger(name).level for name in ("ray", "ray.data")}
    try:
        with warnings.catch_warnings():
            yield
    finally:
        sys.excepthook, sys.path[:] = hook, path
        for name in set(os.environ) - variables:
            del os.environ[name]
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if faulthandler.is_enabled() and not is_traced:
            faulthandler.disable()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def running(wanted: ActorNumbers) -> Iterator[Pool]:
    """A context in which Ray runs, with settings of Ray Data for blocks. What it changes in this process is undone."""
    ray, data = packages()
    is_ours = not ray.is_initialized()
    with _unchanged_process():
        try:
            if is_ours:
                _start(ray, wanted)
            pool = pool_of(ray, wanted)
            context = data.DataContext.get_current().copy()
            context.enable_progress_bars = False
            context.target_max_block_size = context.target_min_block_size = 1  # one block of the store is one of Ray Data
            logging.getLogger("ray.data").setLevel(logging.ERROR)
            with data.DataContext.current(context):
                yield pool
        finally:
            if is_ours:
                ray.shutdown()


def _start(ray: Any, wanted: ActorNumbers) -> None:
    """Join the cluster that the environment names, or start Ray here."""
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not os.environ.get("RAY_ADDRESS"):
        explainers = wanted.explainers or max(1, (_cpus_here() - 1) // wanted.cpus)
        settings |= {"address": "local", "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
        settings["runtime_env"] = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
        settings["num_cpus"] = max(_cpus_here(), explainers * wanted.cpus + 1)  # numbers for Ray's planning, not cores
    changed = {name: value for name, value in _QUIET.items() if name not in os.environ}
    os.environ.update(changed)
    try:
        ray.init(**settings)
    except Exception as error:
        raise InputError(f"Ray cannot be started or joined: {first_lines(error)}", topic="ray") from error
    finally:
        for name in changed:
            del os.environ[name]


def _cpus_here() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pool_of(ray: Any, wanted: ActorNumbers, patience: float = _PATIENCE) -> Pool:
    """The actors that the cluster has room for. `InputError` if it has none for those that are asked for.

    What others hold is not counted. What an actor that ended had is free a little later, which is waited for.
    """
    has = ray.cluster_resources()
    _planned(wanted, has, has)
    end = time.monotonic() + patience
    while True:
        free = ray.available_resources()
        is_all = _cpus_and_gpus(free) == _cpus_and_gpus(has)
        is_enough = wanted.explainers is not None and _is_room(_counts(wanted, has, free), free)
        if is_all or is_enough or time.monotonic() >= end:
            return _planned(wanted, has, free)
        time.sleep(0.05)


def _counts(wanted: ActorNumbers, has: Mapping[str, float], free: Mapping[str, float]) -> Pool:
    """The actors to have of what is free, whether there is room for them or not."""
    cpus, gpus = _cpus_and_gpus(free)
    each = wanted.gpus if wanted.gpus is not None else float(_cpus_and_gpus(has)[1] >= 1)
    by_cpus = (cpus - 1) // wanted.cpus
    explainers = wanted.explainers or max(1, min(by_cpus, int(gpus // each)) if each else by_cpus)
    return Pool(explainers, cpus - explainers * wanted.cpus, wanted.cpus, each)


def _is_room(pool: Pool, free: Mapping[str, float]) -> bool:
    return pool.loaders >= 1 and pool.explainers * pool.gpus <= _cpus_and_gpus(free)[1]


def _cpus_and_gpus(resources: Mapping[str, float]) -> tuple[int, float]:
    return int(resources.get("CPU", 0)), resources.get("GPU", 0.0)


def _planned(wanted: ActorNumbers, has: Mapping[str, float], free: Mapping[str, float]) -> Pool:
    """The actors to have of what is free. `InputError` if there is no room for them."""
    pool = _counts(wanted, has, free)
    if not _is_room(pool, free):
        (cpus, gpus), (free_cpus, free_gpus) = _cpus_and_gpus(has), _cpus_and_gpus(free)
        raise InputError(
            f"the cluster has {cpus} CPUs and {gpus:g} GPUs, of which {free_cpus} and {free_gpus:g} are free: "
            f"{pool.explainers} explainers of {pool.cpus} CPUs and {pool.gpus:g} GPUs, and one CPU for loading, would wait for "
            "ever; ask for fewer by RayEngine(explainers=, cpus=, gpus=), or wait for others to end",
            topic="ray",
        )
    return pool


def dataset_of(rows: Callable[[], Iterator[Row]], cpus: float) -> Any:
    """A dataset of Ray with these rows, which one task makes one after the other, as fast as they are taken."""
    _, data = packages()
    datasource: Any = data.Datasource

    def tables() -> Iterator[Any]:
        pyarrow = optional_package("pyarrow", 'engine="ray"', "ray")
        for row in rows():
            yield pyarrow.table({name: [value] for name, value in row.items()})

    class OneTask(datasource):
        def get_read_tasks(self, parallelism: int, per_task_row_limit: Any = None, data_context: Any = None) -> list[Any]:
            metadata = data.block.BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None)
            return [data.ReadTask(tables, metadata)]

        def estimate_inmemory_data_size(self) -> int | None:
            return None

    return data.read_datasource(OneTask(), override_num_blocks=1, num_cpus=cpus)


def rows_in(dataset: Any) -> Generator[Row]:
    """The rows of a dataset of Ray, as they are made. `InputError` if Ray gave one up."""
    ray, _ = packages()
    try:
        yield from dataset.iter_rows()
    except LrpfxError:
        raise
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "ray" and not isinstance(error, ray.exceptions.RayError):
            raise
        raise InputError(
            f"Ray gave up: {first_lines(error)}; what was done is kept, and another run goes on", topic="ray"
        ) from error


def mapped(wanted: ActorNumbers, function: Callable[[Any], Any], items: Sequence[Any]) -> Generator[Any]:
    """The results of a function for these items, in any order. It is sent to each actor that explains, once.

    Errors: those of the function; `InputError` if Ray gave an item up, or cannot have what is asked.
    """
    _, data = packages()
    with running(wanted) as pool:
        coordinator = new_coordinator(function)
        content = [packed(item) for item in items]
        rows = dataset_of(lambda: ({"number": number, "item": item} for number, item in enumerate(content)), 0)
        done = rows.map_batches(
            _Caller,
            fn_constructor_args=(coordinator, pool.cpus),
            batch_size=1,
            compute=data.ActorPoolStrategy(size=min(pool.explainers, len(items))),
            num_cpus=pool.cpus,
            num_gpus=pool.gpus or None,
        )
        for row in rows_in(done):
            if row["problem"]:
                raise pickle.loads(row["problem"])
            yield unpacked(row["result"])


class _Caller:
    """An actor that calls the function for items."""

    def __init__(self, coordinator: Any, threads: int) -> None:
        self.coordinator = coordinator
        self.threads = threads
        self._function: Callable[[Any], Any] | None = None

    def __call__(self, rows: Mapping[str, Any]) -> Row:
        result = problem = b""
        try:
            if self._function is None:
                self._function = received(self.coordinator, 0, self.threads)
            count_attempt(self.coordinator, "work on part", int(rows["number"][0]))
            result = packed(self._function(unpacked(rows["item"][0])))
        except Exception as error:
            problem = packed_problem(error)
        return {"result": [result], "problem": [problem]}


def packed(value: Any) -> bytes:
    """Objects as bytes, with functions and classes of the user's script. `InputError` if they cannot be sent."""
    ray, _ = packages()
    content = io.BytesIO()
    try:
        torch.save(value, content, pickle_module=ray.cloudpickle)
    except Exception as error:
        raise InputError(
            f"the model and the data set go to other processes, and cannot be pickled for that: {first_lines(error)}",
            topic="ray",
        ) from error
    return content.getvalue()


def unpacked(content: bytes, device: str = "cpu") -> Any:
    return torch.load(io.BytesIO(content), map_location=device, weights_only=False)


def new_coordinator(*values: Any) -> Any:
    """An actor that all others know. It has what they need, and counts how often each part was begun.

    Errors: `InputError` if a value cannot be sent.
    """
    ray, _ = packages()

    class Coordinator:  # inside a function, so that its process need not import torch
        def __init__(self, content: list[Any]) -> None:
            self._content = content
            self._attempts: dict[tuple[str, int], int] = {}

        def content(self, place: int) -> Any:
            return self._content[place]

        def attempt(self, what: str, number: int) -> int:
            self._attempts[what, number] = self._attempts.get((what, number), 0) + 1
            return self._attempts[what, number]

    return ray.remote(num_cpus=0)(Coordinator).remote([ray.put(packed((_VERSIONS, value))) for value in values])


def received(coordinator: Any, place: int, threads: int) -> Any:
    """One of the values that the coordinator has, with tensors on the GPU of this process, if it has one.

    Errors: `InputError` if it needs what is not installed here, or if another release of lrpfx or torch is.
    """
    ray, _ = packages()
    torch.set_num_threads(threads)
    try:
        content = ray.get(ray.get(coordinator.content.remote(place)))
        versions, found = unpacked(content, "cuda" if ray.get_gpu_ids() else "cpu")
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"a process of Ray cannot load the model or the data set: {first_lines(error)}; install on all machines what they "
            "import, or send it with ray.init(runtime_env=...)",
            topic="ray",
        ) from error
    different = [f"{name} {_VERSIONS[name]}, not {versions[name]}" for name in _VERSIONS if _VERSIONS[name] != versions[name]]
    if different:
        raise InputError(f"a machine of Ray has {' and '.join(different)}", topic="ray")
    return found


def count_attempt(coordinator: Any, what: str, number: int) -> None:
    """Raise `InputError` if a part ended the processes that had it. `what`: what they were to do with it."""
    ray, _ = packages()
    attempts = ray.get(coordinator.attempt.remote(what, number))
    if attempts > RETRIES + 1:
        raise InputError(
            f"{attempts - 1} processes of Ray that were to {what} {number} ended: perhaps a sample of it crashes them, or "
            "their machines do not have enough memory; a smaller batch_size= or block_size= needs less",
            topic="ray",
        )


def packed_problem(error: BaseException) -> bytes:
    """An exception as bytes, with where it came from."""
    note = "in a process of Ray:\n" + "".join(traceback.format_exception(error))
    try:
        error.add_note(note)
        content = pickle.dumps(error)
        pickle.loads(content)
    except Exception:  # exceptions of others may not be made for it
        return pickle.dumps(RuntimeError(f"{first_lines(error)}\n{note}"))
    return content
