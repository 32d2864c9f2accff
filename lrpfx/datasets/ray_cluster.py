"""Ray: the cluster that is there, or one that is started here, and actors on it that share the parts of some work."""

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
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from operator import length_hint
from typing import Any, TypeAlias

import torch

from lrpfx.errors import InputError, add_note, first_lines
from lrpfx.support.optional_packages import optional_package

_RETRIES = 3  # of a part if the process that had it ended, and of a run if the coordinator did
_PATIENCE = 5.0  # seconds until what ended actors had is free
_INTERVAL = 0.2  # seconds between two questions of the driver
_GRACE = 1.0  # seconds for parts that are almost done
_VERSIONS = {"lrpfx": version("lrpfx"), "torch": torch.__version__}
_OBJECT_STORE_BYTES = 1 << 30  # of a Ray that is started here
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

Part: TypeAlias = tuple[int, Any]  # its number, and what it stands for
Result: TypeAlias = tuple[int | None, Any]  # of the part with a number, or of none


def package() -> Any:
    """The package ray. `InputError` if it is not installed."""
    with _unchanged_process():
        return optional_package("ray", 'engine="ray"', "ray")


@contextmanager
def _unchanged_process() -> Iterator[None]:
    """A context after which this process is as it was: Ray sets hooks, variables, paths and filters."""
    hook, variables, path = sys.excepthook, set(os.environ), list(sys.path)
    is_traced, handler = faulthandler.is_enabled(), signal.getsignal(signal.SIGTERM)
    level = logging.getLogger("ray").level
    try:
        with warnings.catch_warnings():
            yield
    finally:
        sys.excepthook, sys.path[:] = hook, path
        for name in set(os.environ) - variables:
            del os.environ[name]
        logging.getLogger("ray").setLevel(level)
        if faulthandler.is_enabled() and not is_traced:
            faulthandler.disable()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


# --- actors and their room ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pool:
    """So many actors that work, with CPUs and GPUs of each."""

    workers: int
    cpus: int
    gpus: float


@contextmanager
def _running(workers: int | None, cpus: int, gpus: float | None) -> Iterator[Pool]:
    """A context in which Ray runs. What it changes in this process is undone. `InputError` if Ray itself gives up.

    `workers`, `cpus`, `gpus`: as for `pool_of`.
    """
    ray = package()
    is_ours = not ray.is_initialized()
    with _unchanged_process():
        try:
            if is_ours:
                _start(ray, (workers or 1) * cpus)
            yield pool_of(ray, workers, cpus, gpus)
        except ray.exceptions.RayError as error:
            raise InputError(
                f"Ray gave up: {first_lines(error)}; what was done is kept, and another run goes on", topic="ray"
            ) from error
        finally:
            if is_ours:
                ray.shutdown()


def _start(ray: Any, cpus: int) -> None:
    """Join the cluster that the environment names, or start Ray here, with so many CPUs and one more at least."""
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not os.environ.get("RAY_ADDRESS"):
        here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        settings |= {"address": "local", "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
        settings["runtime_env"] = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
        settings["num_cpus"] = max(here, cpus + 1)  # numbers for Ray's planning, not cores
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        ray.init(**settings)
    except Exception as error:
        raise InputError(f"Ray cannot be started or joined: {first_lines(error)}", topic="ray") from error


def pool_of(ray: Any, workers: int | None, cpus: int, gpus: float | None, patience: float = _PATIENCE) -> Pool:
    """The actors to have. `InputError` if there is no room for them.

    `workers`: None for as many as there is room for. `cpus`, `gpus`: of each; None for one GPU if the cluster has any. What
    others hold is not counted. What an actor that ended had is free a little later, which is waited for.
    """
    has = _cpus_and_gpus(ray.cluster_resources())
    each = float(has[1] >= 1) if gpus is None else gpus
    end = time.monotonic() + patience
    while True:
        free = _cpus_and_gpus(ray.available_resources())
        room = _room(free, cpus, each)
        is_settled = free == has or (workers is not None and workers <= room)
        if is_settled or time.monotonic() >= end:
            break
        time.sleep(0.05)
    if room < (workers or 1):
        raise InputError(
            f"the cluster has {has[0]} CPUs and {has[1]:g} GPUs, of which {free[0]} and {free[1]:g} are free: "
            f"{workers or 1} explainers of {cpus} CPUs and {each:g} GPUs, and one CPU for loading, would wait for ever; ask "
            "for fewer by RayEngine(explainers=, cpus=, gpus=), or wait for others to end",
            topic="ray",
        )
    return Pool(workers or room, cpus, each)


def _cpus_and_gpus(resources: Mapping[str, float]) -> tuple[int, float]:
    return int(resources.get("CPU", 0)), resources.get("GPU", 0.0)


def _room(resources: tuple[int, float], cpus: int, gpus: float) -> int:
    """How many actors with so many CPUs and GPUs fit, if one CPU is left for loading."""
    by_cpus = (resources[0] - 1) // cpus
    return min(by_cpus, int(round(resources[1] / gpus, 4))) if gpus else by_cpus


# --- the actors --------------------------------------------------------------------------------------------------------------


class Coordinator:
    """An actor that hands out parts of work, and gives what a worker had that ended to another.

    The next part is made while workers have others.
    """

    def __init__(self, parts: bytes) -> None:
        """`parts`: to iterate over, packed."""
        self._held: defaultdict[int, dict[int, Part]] = defaultdict(dict)  # what each worker has
        self._returned: deque[Part] = deque()
        self._attempts: Counter[int] = Counter()
        self._results: list[Result] = []
        self._problem: Exception | None = None
        self._thread = ThreadPoolExecutor(1)
        self._parts = _each(parts)
        self._ahead: Future[Part | None] | None = self._thread.submit(next, self._parts, None)

    def take(self, worker: int) -> tuple[Part | None, bool]:
        """A part for a worker, None if there are no more, and whether a worker had it that ended."""
        part, is_again = None, bool(self._returned)
        if is_again:
            part = self._returned.popleft()
        elif self._ahead is not None:
            try:
                part = self._ahead.result()
            except Exception as error:
                self._problem = portable(error)
            self._ahead = None if part is None else self._thread.submit(next, self._parts, None)
        if part is not None:
            self._held[worker][part[0]] = part
        return part, is_again

    def report(self, worker: int, number: int | None, result: Any) -> None:
        """Note the result of a part, or one of none. Workers that were given up are not heard."""
        if number is None or self._held[worker].pop(number, None) is not None:
            self._results.append((number, result))

    def lose(self, worker: int) -> int | None:
        """Take back what a worker had. Returns a part that ended all that had it, if there is one."""
        lost = self._held.pop(worker, {})
        self._returned.extend(lost.values())
        self._attempts.update(lost.keys())
        return next((number for number in lost if self._attempts[number] > _RETRIES), None)

    def progress(self) -> tuple[list[Result], bool, Exception | None]:
        """The results since the last time, whether there is nothing more to do, and why parts could not be made."""
        results, self._results = self._results, []
        return results, self._ahead is None and not self._returned and not any(self._held.values()), self._problem


def _each(parts: bytes) -> Iterator[Part]:
    yield from unpacked(parts)


class Worker:
    """An actor that takes parts, does something with each, and reports the results."""

    def __init__(self, coordinator: Any, number: int, count: int) -> None:
        """`number`: of this worker. `count`: how many there are."""
        self._coordinator = coordinator
        self._number = number
        self._count = count
        self._unfinished: set[int | None] = set()
        self._last_report: list[Any] = []

    def work(self, function: bytes, threads: int) -> Exception | None:
        """Call a function, packed, of this worker. Returns its error.

        Tensors of the function are on the GPU of this process, if it has one.
        """
        ray = package()
        torch.set_num_threads(threads)
        try:
            unpacked(function, "cuda" if ray.get_gpu_ids() else "cpu")(self)
            ray.get(self._last_report)
        except ray.exceptions.RayError:  # as if this process had ended
            raise
        except Exception as error:
            return portable(error)
        return None

    def parts(self) -> Iterator[Part]:
        """The parts for this worker, taken one after the other."""
        ray = package()
        while True:
            part, is_again = ray.get(self._coordinator.take.remote(self._number))
            if part is None:
                return
            if is_again:  # it may end this process, and others are not to be blamed: wait until they are done
                end = time.monotonic() + _GRACE
                while self._unfinished and time.monotonic() < end:
                    time.sleep(0.01)
                ray.get(self._last_report)
            self._unfinished.add(part[0])
            yield part

    def share_of(self, total: int) -> int:
        """The part of a number that is for this worker, so that all have that number together."""
        return total // self._count + (self._number % self._count < total % self._count)

    def report(self, number: int | None, result: Any) -> None:
        """Report the result of a part, or one of none. Any thread may do so."""
        self._last_report = [self._coordinator.report.remote(self._number, number, result)]
        self._unfinished.discard(number)


# --- the driver --------------------------------------------------------------------------------------------------------------


def numbered(items: Sequence[Any]) -> Callable[[set[int]], list[Part]]:
    """What gives the items whose numbers are not among some, with their numbers."""
    return lambda done: [part for part in enumerate(items) if part[0] not in done]


def results_of(
    wanted: tuple[int | None, int, float | None],
    parts: Callable[[set[int]], Iterable[Part]],
    what: str,
    function: Callable[[Worker], None],
    *,
    done: Iterable[int] = (),
    cpus: int = 0,
) -> Generator[list[Result]]:
    """What workers report, in any order, as often as there is something new.

    `wanted`: their number, and the CPUs and GPUs of each, as for `pool_of`. `parts`: gives those whose numbers are not among
    those that are done, at first `done`; the coordinator iterates over them, with `cpus`. `what`: is done with one. `function`:
    see `Worker.work`.

    Errors: those of the function, and of the parts once all that precede are done; `InputError` if a part ended all workers
    that had it, or Ray cannot have what is asked.
    """
    ray, finished, losses = package(), set(done), 0
    with _running(*wanted) as pool:
        while True:
            try:
                for results in _reported(pool, parts(finished), what, function, cpus):
                    finished.update(number for number, _ in results if number is not None)
                    losses = 0
                    yield results
                return
            except ray.exceptions.RayActorError as error:
                losses += 1
                if losses > _RETRIES:
                    raise _ended(losses, "hand out parts", error) from error
                if not _has_room(pool):
                    raise


def _reported(
    pool: Pool, parts: Iterable[Part], what: str, function: Callable[[Worker], None], cpus: int
) -> Generator[list[Result]]:
    """What workers report while the coordinator lives. See `results_of`. `RayActorError` if it ended."""
    ray = package()
    count = max(1, min(pool.workers, length_hint(parts, pool.workers)))
    sent = ray.put(packed(function))
    coordinator = ray.remote(num_cpus=cpus)(Coordinator).remote(packed(parts))
    kind = ray.remote(num_cpus=pool.cpus, num_gpus=pool.gpus or None)(Worker)
    running: dict[Any, tuple[int, Any]] = {}
    unsuccessful = 0  # workers that ended since there was a result

    def start(number: int) -> None:
        actor = kind.remote(coordinator, number, count)
        running[actor.work.remote(sent, pool.cpus)] = number, actor

    try:
        for number in range(count):
            start(number)
        while running:
            for call in ray.wait([*running], timeout=_INTERVAL)[0]:
                number, actor = running.pop(call)
                try:
                    problem = ray.get(call)
                except ray.exceptions.RayError as error:
                    ray.kill(actor)
                    unsuccessful += 1
                    part = ray.get(coordinator.lose.remote(number))
                    if part is not None:
                        raise _ended(_RETRIES + 1, f"{what} {part}", error) from error
                    if unsuccessful > _RETRIES + count:
                        raise _ended(unsuccessful, "start", error) from error
                    if not _has_room(pool):
                        raise
                    start(number + count)
                else:
                    if problem is not None:
                        raise problem
            results, is_finished, problem = ray.get(coordinator.progress.remote())
            if results:
                unsuccessful = 0
                yield results
            if is_finished and problem is not None:
                raise problem
            if is_finished:
                return
    finally:
        for _, actor in running.values():
            ray.kill(actor)
        ray.kill(coordinator)
        if running:
            ray.wait([*running], num_returns=len(running), timeout=_PATIENCE)  # until they have ended


def _has_room(pool: Pool) -> bool:
    """Whether the cluster, of which machines may be lost, can have a worker."""
    return _room(_cpus_and_gpus(package().cluster_resources()), pool.cpus, pool.gpus) >= 1


def _ended(attempts: int, what: str, error: BaseException) -> InputError:
    return InputError(
        f"{attempts} processes of Ray that were to {what} ended: perhaps a sample of it crashes them, or their machines do not "
        f"have enough memory; a smaller batch_size= or block_size= needs less. The last one: {first_lines(error)}",
        topic="ray",
    )


# --- what is sent ------------------------------------------------------------------------------------------------------------


def packed(value: Any) -> bytes:
    """Objects as bytes, with functions and classes of the user's script. `InputError` if they cannot be sent."""
    content = io.BytesIO()
    try:
        torch.save((_VERSIONS, value), content, pickle_module=package().cloudpickle)
    except Exception as error:
        raise InputError(
            f"the model and the data set go to other processes, and cannot be pickled for that: {first_lines(error)}",
            topic="ray",
        ) from error
    return content.getvalue()


def unpacked(content: bytes, device: str = "cpu") -> Any:
    """Objects that another process packed, with tensors on a device.

    Errors: `InputError` if they need what is not installed here, or if another release of lrpfx or torch is.
    """
    try:
        versions, value = torch.load(io.BytesIO(content), map_location=device, weights_only=False)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"a process of Ray cannot load the model or the data set: {first_lines(error)}; install on all machines what they "
            "import, or send it with ray.init(runtime_env=...)",
            topic="ray",
        ) from error
    different = [f"{name} {_VERSIONS[name]}, not {versions[name]}" for name in _VERSIONS if _VERSIONS[name] != versions[name]]
    if different:
        raise InputError(f"a machine of Ray has {' and '.join(different)}", topic="ray")
    return value


def portable(error: Exception) -> Exception:
    """An error that other processes can load, with where it came from."""
    note = "in a process of Ray:\n" + "".join(traceback.format_exception(error))
    try:
        add_note(error, note)
        pickle.loads(pickle.dumps(error))
    except Exception:  # exceptions of others may not be made for it
        return RuntimeError(f"{first_lines(error)}\n{note}")
    return error
