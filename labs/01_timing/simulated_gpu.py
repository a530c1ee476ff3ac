"""A GPU in simulated time, to learn timing on: it works behind the host's back, as a real one does.

Given: read it, play with it, leave it as it is. Nothing in it waits for real, so a benchmark of a
minute takes no time at all and gives the same figures on every machine. The tests time on it too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

LINE_BYTES = 128  # what a cache loads and drops at a time
MISS_US, HIT_US = 0.010, 0.002  # to read one line from memory, and from the cache


class SimulatedGpu:
    """A host and a device with a queue between them.

    The host asks for kernels and goes on at once. The device runs them one after the other, in the
    order asked for. Only `synchronize` makes the host wait.

    Args:
        launch_us: microseconds that the host spends on asking for one kernel.
        pace: pace(n) is the factor by which kernel number n takes longer than at full speed; n
            counts from 0 over the device's life. `lambda n: 1 + 0.01 * n` is a device that slows
            down by 1% with each kernel, as one that gets hot.
        cache_bytes: what the L2 cache holds; 0 for no cache.

    Attributes:
        now: the host's time, in seconds.
        free_at: when the device will have run all that it was asked for, in seconds.
        kernels: how many kernels it was asked for.
        hits, misses: lines of the last `read` that were in the cache, and that were not.
        log: (who, what, from, to) in seconds, who "host" or "device", for pictures.
    """

    def __init__(
        self,
        launch_us: float = 5.0,
        pace: Callable[[int], float] = lambda n: 1.0,
        cache_bytes: int = 0,
    ):
        self.launch_us = launch_us
        self.pace = pace
        self.cache_lines = cache_bytes // LINE_BYTES
        self.now = self.free_at = 1000.0  # clocks do not start at 0
        self.kernels = self.hits = self.misses = 0
        self.log: list[tuple[str, str, float, float]] = []
        self._cache: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def clock(self) -> float:
        """The host's time in seconds, as time.perf_counter gives it; reading it takes no time."""
        self.log.append(("host", "clock", self.now, self.now))
        return self.now

    def synchronize(self) -> None:
        """The host waits until the device has run all that it was asked for."""
        done = max(self.now, self.free_at)
        self.log.append(("host", "wait", self.now, done))
        self.now = done

    def work_on_host(self, ms: float) -> None:
        """The host computes something itself, for `ms` milliseconds."""
        self.now += 1e-3 * ms

    def launch(self, ms: float) -> None:
        """Asks for a kernel that takes `ms` milliseconds at full speed."""
        asked = self.now
        self.now += 1e-6 * self.launch_us
        start = max(self.now, self.free_at)  # behind what is in the queue already
        self.free_at = start + 1e-3 * ms * self.pace(self.kernels)
        self.kernels += 1
        self.log.append(("host", "launch", asked, self.now))
        self.log.append(("device", "kernel", start, self.free_at))

    def read(self, lines: Iterable[int]) -> None:
        """Asks for a kernel that reads lines of memory, by number, in the order given.

        A line in the cache takes HIT_US, another one MISS_US. The cache keeps the lines that were
        read last (LRU: the least recently used one makes room).
        """
        self.hits = self.misses = 0
        for line in lines:
            if line in self._cache:
                self.hits += 1
                self._cache.move_to_end(line)
                continue
            self.misses += 1
            self._cache[line] = None
            if len(self._cache) > self.cache_lines:
                self._cache.popitem(last=False)
        self.launch(1e-3 * (self.hits * HIT_US + self.misses * MISS_US))
