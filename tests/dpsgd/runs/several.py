"""Processes of a run as threads of one, which talk by a store like that of JAX."""

import threading
from concurrent.futures import ThreadPoolExecutor

from dpsgd.runs.processes import Processes


class Store:
    """What JAX's client of a distributed run offers, of which `Processes` calls these."""

    def __init__(self):
        self.values = {}
        self.changed = threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            if key in self.values and not allow_overwrite:
                raise RuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_dir_get(self, folder):
        with self.changed:
            return [(key, value) for key, value in self.values.items() if key.startswith(folder)]

    def key_value_delete(self, key):
        with self.changed:
            for known in [k for k in self.values if k == key or k.startswith(key)]:
                del self.values[known]


def together(count, work, store=None):
    """Calls `work(processes)` for each of so many; returns what each returned, or raised."""
    store = store or Store()

    def one(index):
        try:
            return work(Processes(index, count, store))
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
