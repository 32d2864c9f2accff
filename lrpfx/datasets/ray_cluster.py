"""Ray: the cluster that is there, or one that is started here, and its processes, which share parts of work."""

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
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import islice
from operator import length_hint
from typing import Any

import torch

from lrpfx.errors import InputError, first_lines
from lrpfx.support.optional_packages import optional_package

#: How often a part is tried again if the process that had it ended.
RETRIES = 3
_PATIENCE = 5.0  # seconds until what ended actors had is free
_INTERVAL = 0.2  # seconds between two questions of the driver, and between two reports of a worker
_REPORTS = 500  # a second, of all workers
_GRACE = 1.0  # seconds for parts that are almost done
_TOGETHER = 16  # parts that are handed out together, at most
_VERSIONS = {"lrpfx": version("lrpfx"), "torch": torch.__version__}
_OBJECT_STORE_BYTES = 1 << 30  # of a Ray that is started here
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(frozen=True)
class Pool:
    """The actors that explain. `cpus`, `gpus`: of each. `loaders`: the CPUs that are left, for processes that load."""

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


@contextmanager
def running(wanted: ActorNumbers) -> Iterator[Pool]:
    """A context in which Ray runs. What it changes in this process is undone. `InputError` if Ray itself gives up."""
    ray = package()
    is_ours = not ray.is_initialized()
    with _unchanged_process():
        try:
            if is_ours:
                _start(ray, wanted)
            yield pool_of(ray, wanted)
        except ray.exceptions.RayError as error:
            raise InputError(
                f"Ray gave up: {first_lines(error)}; what was done is kept, and another run goes on", topic="ray"
            ) from error
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


# --- parts of work -----------------------------------------------------------------------------------------------------------


class Coordinator:
    """An actor that hands out parts of work, and gives what a worker had that ended to another.

    Parts are numbers, or pairs of a number and what it stands for, of something to iterate over. The next are made while
    workers have others.
    """

    def __init__(self, parts: bytes, workers: int) -> None:
        """`parts`: packed. `workers`: how many take them."""
        self._workers = workers
        self._held: dict[int, dict[int, Any]] = {}  # what each worker has
        self._returned: deque[Any] = deque()
        self._attempts: Counter[int] = Counter()
        self._results: list[tuple[int | None, Any]] = []
        self._problem = b""
        self._thread = ThreadPoolExecutor(1)
        self._ahead: Future[list[Any]] | None = self._thread.submit(self._first, parts)

    def _first(self, parts: bytes) -> list[Any]:
        self._parts = iter(received(parts))
        return self._more()

    def _more(self) -> list[Any]:
        """The parts that are handed out together next: few at the end, so that workers end together."""
        count = min(_TOGETHER, length_hint(self._parts) // (2 * self._workers))
        return list(islice(self._parts, max(1, count)))

    def take(self, worker: int) -> tuple[list[Any], bool]:
        """Parts for a worker, none if there are no more, and whether it is one that a worker had that ended."""
        found, is_again = [], bool(self._returned)
        if is_again:
            found = [self._returned.popleft()]
        elif self._ahead is not None:
            try:
                found = self._ahead.result()
            except Exception as error:
                self._problem = packed_problem(error)
            self._ahead = self._thread.submit(self._more) if found else None
        self._held.setdefault(worker, {}).update((_number(part), part) for part in found)
        return found, is_again

    def report(self, worker: int, results: Sequence[tuple[int | None, Any]]) -> None:
        """Note what a worker has done: numbers of parts, or None, with results. Workers that were given up are not heard."""
        held = self._held.get(worker, {})
        self._results += [one for one in results if one[0] is None or held.pop(one[0], None) is not None]

    def lose(self, worker: int) -> int | None:
        """Take back what a worker had. Returns a part that ended all that had it, if there is one."""
        lost = self._held.pop(worker, {})
        self._returned.extend(lost.values())
        self._attempts.update(lost.keys())
        return next((number for number in lost if self._attempts[number] > RETRIES), None)

    def progress(self) -> tuple[list[tuple[int | None, Any]], bool, bytes]:
        """The results since the last time, whether there is nothing more to do, and why parts could not be made, packed."""
        results, self._results = self._results, []
        return results, self._ahead is None and not self._returned and not any(self._held.values()), self._problem


def _number(part: Any) -> int:
    number: int = part[0] if isinstance(part, tuple) else part
    return number


class Share:
    """What a worker takes of all parts, one by one. `worker`: its number. `count`: how many workers there are."""

    def __init__(self, coordinator: Any, worker: int, count: int) -> None:
        self._coordinator = coordinator
        self._worker = worker
        self._count = count
        self._results: deque[tuple[int | None, Any]] = deque()
        self._interval = max(_INTERVAL, count / _REPORTS)
        self._last = time.monotonic()
        self._taken = self._done = 0

    def __iter__(self) -> Iterator[Any]:
        ray = package()
        while True:
            self.send(at_once=True)
            found, is_again = ray.get(self._coordinator.take.remote(self._worker))
            if is_again:
                self._finish()
            if not found:
                return
            self._taken += len(found)
            yield from found

    def _finish(self) -> None:
        """Wait until other parts are done: the next may end this process, and these are not to be blamed."""
        end = time.monotonic() + _GRACE
        while self._done < self._taken and time.monotonic() < end:
            time.sleep(0.01)
        self.send(at_once=True)

    def of(self, total: int) -> int:
        """The part of a number that is for this worker, so that all have that number together."""
        return total // self._count + (self._worker % self._count < total % self._count)

    def add(self, number: int | None, result: Any) -> None:
        """Add the result of a part, which is reported with others. Any thread may do so, and one may send."""
        self._results.append((number, result))
        self._done += number is not None

    def send(self, at_once: bool = False) -> None:
        """Report results, unless others were reported a moment ago."""
        if self._results and (at_once or time.monotonic() - self._last >= self._interval):
            results = [self._results.popleft() for _ in range(len(self._results))]
            self._coordinator.report.remote(self._worker, results)
            self._last = time.monotonic()


class Worker:
    """An actor that works on its share of the parts."""

    def work(self, coordinator: Any, worker: int, count: int, threads: int, function: bytes, *values: bytes) -> bytes:
        """Call a function of its share, and of values, all packed. Returns its problem, packed, or nothing.

        Tensors of the function are on the GPU of this process, if it has one.
        """
        ray = package()
        torch.set_num_threads(threads)
        try:
            share = Share(coordinator, worker, count)
            received(function, "cuda" if ray.get_gpu_ids() else "cpu")(share, *map(received, values))
            share.send(at_once=True)
            ray.get(coordinator.report.remote(worker, []))  # what was sent is there
        except ray.exceptions.RayError:  # as if this process had ended
            raise
        except Exception as error:
            return packed_problem(error)
        return b""


class CoordinatorLostError(Exception):
    """The coordinator ended before the work was done."""


def results_of(
    pool: Pool, parts: Iterable[Any], what: str, function: Callable[..., None], *values: Any, cpus: int = 0
) -> Generator[list[tuple[int | None, Any]]]:
    """What the workers of a pool report, in any order, as often as there is something new.

    `parts`: of the work, see `Coordinator`, which has `cpus` to make them. `what`: is done with one. `function`, `values`: see
    `Worker.work`.

    Errors: those of the function, and of the parts once all that precede are done; `InputError` if a part ended all workers
    that had it; `CoordinatorLostError`.
    """
    ray = package()
    contents = [ray.put(packed((_VERSIONS, value))) for value in (parts, function, *values)]
    coordinator = ray.remote(num_cpus=cpus)(Coordinator).remote(contents[0], pool.explainers)
    kind = ray.remote(num_cpus=pool.cpus, num_gpus=pool.gpus or None)(Worker)
    running: dict[Any, tuple[int, Any]] = {}
    unsuccessful = 0  # workers that ended since there was a result

    def start(worker: int) -> None:
        actor = kind.remote()
        running[actor.work.remote(coordinator, worker, pool.explainers, pool.cpus, *contents[1:])] = worker, actor

    def asked(call: Any) -> Any:
        try:
            return ray.get(call)
        except ray.exceptions.RayActorError as error:
            raise CoordinatorLostError(first_lines(error)) from error

    try:
        for worker in range(pool.explainers):
            start(worker)
        while running:
            for call in ray.wait([*running], timeout=_INTERVAL)[0]:
                worker, actor = running.pop(call)
                try:
                    problem = ray.get(call)
                except ray.exceptions.RayError as error:
                    ray.kill(actor)
                    unsuccessful += 1
                    part = asked(coordinator.lose.remote(worker))
                    if part is not None:
                        raise ended(RETRIES + 1, f"{what} {part}", error) from error
                    if unsuccessful > RETRIES + pool.explainers:
                        raise ended(unsuccessful, "start", error) from error
                    if not _has_room_for_one(ray, pool):
                        raise
                    start(worker + pool.explainers)
                else:
                    if problem:
                        raise pickle.loads(problem)
            results, is_finished, problem = asked(coordinator.progress.remote())
            if results:
                unsuccessful = 0
                yield results
            if is_finished and problem:
                raise pickle.loads(problem)
            if is_finished:
                return
    finally:
        for _, actor in running.values():
            ray.kill(actor)
        ray.kill(coordinator)
        if running:
            ray.wait([*running], num_returns=len(running), timeout=_PATIENCE)  # until they have ended


def ended(attempts: int, what: str, error: BaseException) -> InputError:
    return InputError(
        f"{attempts} processes of Ray that were to {what} ended: perhaps a sample of it crashes them, or their machines do not "
        f"have enough memory; a smaller batch_size= or block_size= needs less. The last one: {first_lines(error)}",
        topic="ray",
    )


def _has_room_for_one(ray: Any, pool: Pool) -> bool:
    """Whether the cluster, of which machines may be lost, can have a worker."""
    cpus, gpus = _cpus_and_gpus(ray.cluster_resources())
    return cpus >= pool.cpus and gpus >= pool.gpus


def mapped(wanted: ActorNumbers, function: Callable[[Any], Any], items: Sequence[Any]) -> Generator[Any]:
    """The results of a function for these items, in any order. It is sent to each worker, once.

    Errors: those of the function; `InputError` if Ray gave an item up, or cannot have what is asked.
    """
    with running(wanted) as pool:
        pool = replace(pool, explainers=min(pool.explainers, len(items)))
        try:
            for found in results_of(pool, list(enumerate(items)), "work on part", _Calls(function)):
                yield from (unpacked(result) for _, result in found)
        except CoordinatorLostError as error:
            raise ended(1, "hand out parts", error) from error


@dataclass(frozen=True)
class _Calls:
    """Calls a function for items."""

    function: Callable[[Any], Any]

    def __call__(self, share: Share) -> None:
        for number, item in share:
            share.add(number, packed(self.function(item)))
            share.send()


def packed(value: Any) -> bytes:
    """Objects as bytes, with functions and classes of the user's script. `InputError` if they cannot be sent."""
    content = io.BytesIO()
    try:
        torch.save(value, content, pickle_module=package().cloudpickle)
    except Exception as error:
        raise InputError(
            f"the model and the data set go to other processes, and cannot be pickled for that: {first_lines(error)}",
            topic="ray",
        ) from error
    return content.getvalue()


def unpacked(content: bytes, device: str = "cpu") -> Any:
    return torch.load(io.BytesIO(content), map_location=device, weights_only=False)


def received(content: bytes, device: str = "cpu") -> Any:
    """What a process of Ray was sent, with tensors on a device.

    Errors: `InputError` if it needs what is not installed here, or if another release of lrpfx or torch is.
    """
    try:
        versions, found = unpacked(content, device)
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
