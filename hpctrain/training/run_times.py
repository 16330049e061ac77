"""The clocks of a run: its wall time, and the times and bytes of its engine."""

from __future__ import annotations

from time import perf_counter

from hpctrain.engines import Engine


class RunTimes:
    """Times since the start of the clocks, over all engines that a call of fit has had."""

    def __init__(self, engine: Engine, earlier: RunTimes | None = None):
        """`earlier`: times of the engine before a rank loss."""
        self._engine = engine
        self._earlier_s = earlier.of_engine() if earlier else {}
        self._earlier_bytes = earlier.bytes_sent if earlier else 0
        self.begin()

    def begin(self, elapsed_s: float = 0.0) -> None:
        """Start the clocks, `elapsed_s` before now; engines may train repeatedly."""
        self._start_s = perf_counter() - elapsed_s
        self._offsets_s = {
            name: s - self._earlier_s.get(name, 0.0) for name, s in vars(self._engine.times).items()
        }

    @property
    def wall_s(self) -> float:
        """Seconds since the start."""
        return perf_counter() - self._start_s

    def of_engine(self) -> dict[str, float]:
        """Return the seconds of each activity of this rank, see `engines.engine.Times`."""
        return {name: s - self._offsets_s[name] for name, s in vars(self._engine.times).items()}

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent."""
        return self._earlier_bytes + self._engine.bytes_sent
