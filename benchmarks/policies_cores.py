"""How idle the machine's cores are while runs of benchmarks/policies.py go on: whether cores or schedules are what they wait for."""

from __future__ import annotations

import threading
import time

import psutil


class Cores:
    """Samples how idle the machine's cores are, to be asked for the share of any window of time."""

    def __init__(self, period: float = 1.0) -> None:
        self._samples: list[tuple[float, float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, args=(period,), daemon=True)
        self._thread.start()

    def _sample(self, period: float) -> None:
        while not self._over.wait(period):
            now = psutil.cpu_times()
            self._samples.append((time.time(), now.idle + now.iowait, sum(now[:8])))

    def idle(self, start: float, end: float) -> float:
        """Share of the cores' time between two clocks that nobody used."""
        inside = [s for s in self._samples if start <= s[0] <= end]
        if len(inside) < 2:
            return float("nan")
        return (inside[-1][1] - inside[0][1]) / (inside[-1][2] - inside[0][2])

    def close(self) -> None:
        self._over.set()
        self._thread.join()
