"""Peak memory of one attribution above the memory in use before it, with each contender in a separate process."""

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from contenders import COMPOSITES, PLAIN, RANGE, gradient_of, lrpfx_of, merged, network, zennit_of

import lrpfx


def _status(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def _resident() -> float:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _status("VmRSS")


def peak_of(run: Callable[[], Any]) -> float:
    """The peak of a call above the memory in use before it, in MiB."""
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    run()
    return _status("VmHWM") - before


def answer_of(script: str, *arguments: str) -> Any:
    """What a script of this folder prints last, in a process of its own, as JSON."""
    # Freed blocks are returned to the system at once, so a peak counts only memory in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}
    command = [sys.executable, script, *arguments]
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(printed.splitlines()[-1])


def _peak(name: str, composite: str, contender: str) -> dict[str, float]:
    """Peak memory of one attribution of four images, and the memory that the module holds permanently, in MiB."""
    torch.set_num_threads(2)
    images = torch.rand(4, 3, 224, 224)
    model = network(name)
    if contender == PLAIN:
        model = merged(model)
        run = gradient_of(model)
    elif contender == "Zennit":
        run = zennit_of(model, composite)
    else:
        model = lrpfx.transform(model, COMPOSITES[composite].lrpfx, input_range=RANGE)
        run = lrpfx_of(model)
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    run(images[:1, :, :64, :64])  # one-time setup
    return {"peak": peak_of(lambda: run(images)), "held": sum(tensors.values()) / 2**20}


def measure(networks: list[str], composites: list[str]) -> list[dict[str, Any]]:
    """One record for each network, composite and contender. Linux only."""
    records = []
    for name in networks:
        for composite in composites:
            contenders = (PLAIN, "Zennit", "lrpfx")
            peaks = {contender: answer_of(__file__, name, composite, contender) for contender in contenders}
            for contender, peak in peaks.items():
                shares = {
                    "to_gradient": peak["peak"] / peaks[PLAIN]["peak"],
                    "to_zennit": peak["peak"] / peaks["Zennit"]["peak"],
                }
                records.append({"network": name, "composite": composite, "contender": contender, **peak, **shares})
                print(records[-1], flush=True)
    return records


if __name__ == "__main__":
    print(json.dumps(_peak(*sys.argv[1:])))
