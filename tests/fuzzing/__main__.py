"""`python tests/fuzzing --networks 5000 --seed 0` examines random networks and prints a small one for each kind of failure."""

import argparse
import collections
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch
import torchvision_cpu  # noqa: F401

from fuzzing.checks import examined, report, shrunk
from fuzzing.composites import random_composite
from fuzzing.features import PENDING, generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first network; the others follow")
    parser.add_argument("--with", dest="pending", nargs="*", default=[], help=f"pending features: {', '.join(PENDING)}, or all")
    parser.add_argument("--only", nargs="*", default=[], help="groups or names of features to draw from")
    parser.add_argument("--shares", type=float, default=1.0, help="multiplies the shares of the slow checks")
    parser.add_argument("--composite", default="", help="the composite of all networks, instead of random ones")
    parser.add_argument("--examples", type=int, default=1, help="how many failures of a kind are shown")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pending = list(PENDING) if "all" in options.pending else options.pending
    kinds: collections.Counter[tuple[str, str]] = collections.Counter()
    undetermined: list[str] = []
    start = time.perf_counter()
    for seed in range(options.seed, options.seed + options.networks):
        network = generate(seed, pending, options.only)
        composite = options.composite or random_composite(seed)
        failure = examined(network, composite, options.shares, undetermined=undetermined)
        if failure is not None:
            kinds[failure.kind] += 1
            if kinds[failure.kind] <= options.examples:
                print(f"\n{'-' * 100}\n{report(*shrunk(network, composite, failure))}", flush=True)
    seconds = time.perf_counter() - start
    print(f"\n{options.networks} networks in {seconds:.0f} s: {kinds.total()} failures")
    explained = dict(collections.Counter(undetermined))
    print(f"{len(undetermined)} differences that rounding explains, or outputs that are not finite: {explained}")
    for (check, error), count in kinds.most_common():
        print(f"{count:6d}  {check}: {error}")
    sys.exit(bool(kinds))


if __name__ == "__main__":
    main()
