"""The processes of Ray, and what kills them while something runs."""

import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager, suppress

from data_sets import LAYERS
from torch.utils.data import Dataset

import lrpfx
import lrpfx.datasets

SETTINGS = {"record": LAYERS, "batch_size": 8, "block_size": 16, "dtype": "float16"}


class Slowly(Dataset):
    """Samples that take their time."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, number):
        time.sleep(0.01)
        return self.dataset[number]


def actors(kind="Worker"):
    """The process numbers of Ray's actors."""
    found = subprocess.run(["pgrep", "-f", f"^ray::{kind}"], capture_output=True, text=True)
    return [int(number) for number in found.stdout.split()]


def send(number, processes):
    """Send a signal to processes, which may have ended. Returns whether one of them had not."""
    is_sent = False
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
            is_sent = True
    return is_sent


def kill(processes):
    return send(signal.SIGKILL, processes)


def there(path):
    """How many samples are in a store, which may be about to be made."""
    try:
        return int(lrpfx.datasets.open(path).done.sum())
    except lrpfx.LrpfxError:
        return 0


@contextmanager
def killing(kill_some, times=1, interval=0.05):
    """A context in which a function is called again and again, in a thread, until it says so many times that it killed some.

    The value is a list with True for each such time, which is full of False after an error of the function.
    """
    stopped, killed = threading.Event(), []

    def run():
        try:
            while len(killed) < times and not stopped.wait(interval):
                if kill_some():
                    killed.append(True)
        except Exception:
            killed.extend([False] * times)
            raise

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield killed
    finally:
        stopped.set()
        thread.join()
