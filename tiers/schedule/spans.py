"""Spans of time for a Chrome trace (chrome://tracing, Perfetto): one lane per link, compute and the optimizer."""

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path

STEP = "step"
"""The lane whose spans are whole optimizer steps, "step 1" and so on."""


@dataclass(kw_only=True)
class Spans:
    """Collects spans when ``enabled``; costs one comparison when not. Times are ``time.perf_counter`` seconds."""

    enabled: bool = False
    _spans: list[tuple[str, str, float, float]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, lane: str, name: str, began: float, ended: float) -> None:
        if self.enabled:
            with self._lock:
                self._spans.append((lane, name, began, ended))

    def chrome_events(self) -> list[dict[str, object]]:
        """Complete events in microseconds since the first span, and a name for each lane."""
        with self._lock:
            spans = sorted(self._spans, key=lambda span: span[2])
        if not spans:
            return []
        origin = spans[0][2]
        lanes = {lane: number for number, lane in enumerate(dict.fromkeys(span[0] for span in spans))}
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": lane}}
            for lane, number in lanes.items()
        ]
        events += [
            {
                "ph": "X",
                "name": name,
                "pid": 0,
                "tid": lanes[lane],
                "ts": round((began - origin) * 1e6, 3),
                "dur": round((ended - began) * 1e6, 3),
            }
            for lane, name, began, ended in spans
        ]
        return events

    def write(self, path: str | Path) -> None:
        """Write the Chrome-trace JSON; raises OSError with the path when that fails."""
        Path(path).write_text(json.dumps({"traceEvents": self.chrome_events(), "displayTimeUnit": "ms"}))
