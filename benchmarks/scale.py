"""How long explanations of data sets take on many machines: a simulation with measured rates, which writes docs/scale.md."""

import argparse
import heapq
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from documents import write_between

DOCUMENT = Path(__file__).parent.parent / "docs" / "scale.md"
DAY, HOUR = 86_400.0, 3_600.0
MOST = 200_000
WORKERS = (1, 10, 100, 1_000)
#: Assumed: bytes of a digit where it is read, and how much faster a worker with a GPU is than a core.
DIGIT_BYTES, FASTER = 300.0, 20
LARGER = 8  # times the default of photographs


@dataclass(frozen=True)
class Setting:
    """What is explained, and what was measured of it.

    `explain`: seconds for each sample on one worker, `load`: to read and preprocess it on one core. `stored`, `read`: bytes of
    a sample in the store and in the data set. `block`: samples that are written together. `arrays`: objects of a block.
    """

    name: str
    explain: float
    load: float
    stored: float
    read: float
    block: int
    arrays: int


@dataclass(frozen=True)
class Cluster:
    """The machines. Rates are those of one bucket and of one coordinator, which all workers share.

    `start`: seconds until a worker runs, also after it was lost. `lost`: workers lost, for each and hour. `spread`: of the
    seconds of blocks, as the standard deviation of their logarithm. `loaders`: cores that load, for each worker. `bandwidth`:
    bytes a second of a worker, `shared`: of all together, to the store and from the data. `latency`: seconds of a request, of
    which a worker has `parallel` under way. `requests`: objects written a second by all. `coordinator`: blocks a second that
    one process hands out.
    """

    start: float = 20.0
    lost: float = 0.01
    spread: float = 0.1
    loaders: int = 1
    bandwidth: float = 250e6
    shared: float = 12.5e9
    latency: float = 0.05
    parallel: int = 10
    requests: float = 3_500.0
    coordinator: float = 1_000.0


@dataclass(frozen=True)
class Outcome:
    """A simulated run. `limit`: what was busy for the largest share of the time."""

    seconds: float
    requests: int
    bytes: float
    lost: int
    efficiency: float
    limit: str


def simulate(samples: int, workers: int, setting: Setting, cluster: Cluster, seed: int = 0) -> Outcome:
    """A run, event by event: each worker takes a block, loads, explains and writes it.

    A worker explains one block while the next is loaded and the last is written, so a block takes it as long as the longest of
    the three; the first waits for its loading. The coordinator hands out blocks one after the other, and the store and the
    network take what all workers send one after the other, at their rates. A worker is lost at random; its block is begun anew
    once it has started again. After `MOST` blocks the run goes on at the rate of the second half of them.
    """
    chance = random.Random(seed)
    blocks = math.ceil(samples / setting.block)
    takes = {
        "the coordinator": 1 / cluster.coordinator,
        "requests to the store": setting.arrays / cluster.requests,
        "the network": setting.block * (setting.stored + setting.read) / cluster.shared,
    }
    of_worker = {
        "explaining": setting.block * setting.explain,
        "loading": setting.block * max(setting.load / cluster.loaders, setting.read / cluster.bandwidth),
        "writing": max(setting.block * setting.stored / cluster.bandwidth, setting.arrays * cluster.latency / cluster.parallel),
    }
    each = max(of_worker.values())
    workers_used = min(workers, blocks)
    free = [cluster.start + of_worker["loading"]] * workers_used
    until = dict.fromkeys(takes, 0.0)
    lost, ends = 0, []
    for _ in range(min(blocks, MOST)):
        now = heapq.heappop(free)
        until["the coordinator"] = begin = max(until["the coordinator"], now) + takes["the coordinator"]
        seconds = each * chance.lognormvariate(-(cluster.spread**2) / 2, cluster.spread)
        while chance.random() < 1 - math.exp(-cluster.lost * seconds / HOUR):
            begin += chance.random() * seconds + cluster.start
            lost += 1
        done = begin + seconds
        for name in ("requests to the store", "the network"):
            until[name] = max(until[name], begin) + takes[name]
            done = max(done, until[name])
        heapq.heappush(free, done)
        ends.append(done)
    ends.sort()
    simulated, half, most = len(ends), len(ends) // 2, len(ends) * 9 // 10  # without the last, of which some are late
    rest = (blocks - simulated) * (ends[most] - ends[half]) / max(1, most - half)
    total = ends[-1] + rest + of_worker["writing"]
    busy = {name: blocks * one for name, one in takes.items()}
    busy |= {name: blocks * one / workers_used for name, one in of_worker.items()} | {"the start": cluster.start}
    return Outcome(
        total,
        blocks * setting.arrays + 2 * setting.arrays,
        samples * setting.stored,
        round(lost * blocks / simulated),
        blocks * of_worker["explaining"] / workers / total,
        max(busy, key=lambda name: busy[name]),
    )


def shown_time(seconds: float) -> str:
    """A duration in the unit that suits it."""
    for unit, size in (("days", DAY), ("h", HOUR), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} s"


def shown_bytes(count: float) -> str:
    """A size in the unit that suits it."""
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"


def table(samples: int, workers: Sequence[int], setting: Setting, cluster: Cluster) -> list[str]:
    """A table of Markdown: a row for each number of workers."""
    lines = ["| workers | time | efficiency | workers lost | limited by |", "|---:|---:|---:|---:|---|"]
    for count in workers:
        found = simulate(samples, count, setting, cluster)
        lines.append(f"| {count:,} | {shown_time(found.seconds)} | {found.efficiency:.0%} | {found.lost:,} | {found.limit} |")
    return lines


def settings_of(measured: Mapping[str, Any]) -> dict[str, Setting]:
    """The settings of the document, of what was measured."""
    digits, crops = measured["digits"], measured["crops"]
    photographs = Setting(
        "photographs, one core",
        crops["run"] / crops["samples"],
        measured["decoding"]["seconds"],
        crops["bytes"],
        measured["decoding"]["bytes"],
        crops["block"],
        crops["objects"],
    )
    fast = replace(photographs, name=f"photographs, {FASTER} times as fast", explain=photographs.explain / FASTER)
    return {
        "digits": Setting(
            "digits, one core",
            1 / measured["one"]["rate"],
            digits["load"],
            digits["bytes"],
            DIGIT_BYTES,
            4096,
            digits["objects"],
        ),
        "photographs": photographs,
        "fast": fast,
        "larger blocks": replace(fast, name=f"{fast.name}, larger blocks", block=LARGER * fast.block),
    }


def main() -> None:
    """Simulate with the figures in a file, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, default=Path(__file__).with_name("data_sets.json"))
    options = parser.parse_args()
    measured = json.loads(options.measured.read_text())
    for name, lines in tables(measured).items():
        write_between(DOCUMENT, name, "\n".join(lines))


def tables(measured: Mapping[str, Any]) -> dict[str, list[str]]:
    """All tables of the document, by name."""
    settings = settings_of(measured)
    cluster = Cluster(start=measured["two"]["start"], coordinator=measured["handing out"])
    many = replace(cluster, loaders=FASTER, bandwidth=1.25e9)
    found = {"measured": _measured(measured), "settings": _rows(list(settings.values())), "cluster": _rows([cluster])}
    photographs = settings["photographs"]
    for samples, name in ((1_281_167, "imagenet"), (1_000_000_000, "billion")):
        one = simulate(samples, 1, photographs, cluster)
        found[name] = [f"{shown_bytes(one.bytes)} in {one.requests:,} objects.", ""]
        found[name] += [f"Workers of {photographs.name}:", "", *table(samples, WORKERS, photographs, cluster), ""]
        for kind in ("fast", "larger blocks"):
            found[name] += [f"Workers of {settings[kind].name}:", "", *table(samples, WORKERS, settings[kind], many), ""]
    return found


def _rows(items: Sequence[Any]) -> list[str]:
    """Dataclasses as columns of a table."""
    columns = [asdict(one) for one in items]
    names = [str(one.get("name", "value")) for one in columns]
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for field in columns[0]:
        if field != "name":
            lines.append(f"| {field} | " + " | ".join(f"{one[field]:,.6g}" for one in columns) + " |")
    return lines


def _measured(measured: Mapping[str, Any]) -> list[str]:
    lines = ["| | samples/s | |", "|---|---:|---|"]
    for name in ("digits", "crops"):
        found = measured[name]
        lines.append(f"| {name}, plain loop | {found['samples'] / found['loop']:,.1f} | |")
        lines.append(f"| {name}, `attribute` | {found['samples'] / found['run']:,.1f} | {found['ratio']:.0%} of the loop |")
    for name, kind in (("digits", ""), ("crops", " of crops")):
        one, two = measured["one" + kind], measured["two" + kind]
        efficiency = two["rate"] / one["rate"] / 2
        lines.append(f"| {name}, one explaining process of Ray | {one['rate']:,.1f} | {one['start']:.0f} s to start |")
        lines.append(f"| {name}, two of them | {two['rate']:,.1f} | {efficiency:.0%} efficiency |")
    small = measured["small blocks"]
    driver = f"{small['driver']:.1%} of a core for the calling process"
    lines.append(f"| digits in blocks of 4, two of them | {small['rate']:,.1f} | {driver} |")
    memory = measured["memory"]
    lines += ["", f"Peak memory: {memory['1000']:.0f} MiB for 1,000 digits, {memory['10000']:.0f} MiB for 10,000."]
    return lines


if __name__ == "__main__":
    main()
