"""The CPU: what is measured there, how long a call takes, and what the machine does at best."""

import memory
import roofline
from cases import CPU, MODES, Case, near_roofline, targets
from machine import use_threads
from measure import Clock, host_clock

CASES = (
    # from tiny to large
    Case("float32", 2, d=3, e=4, targets=targets((2, 5), (1.5, 3))),
    Case("float32", 16, d=16),
    Case("float32", 64),
    Case("float32", 256, targets=targets((3.5, 3), (3, 3))),
    Case("float32", 1024, targets=near_roofline(targets((3.5, 2.8), (3.5, 3.3)))),
    Case("float32", 2048, targets=near_roofline(), modes=MODES),
    Case("float32", 4096, targets=near_roofline(targets((7.5, 4.5), (5, 4)))),
    Case("float32", 8192, targets=near_roofline(scratch=0.03)),
    # narrow and wide
    Case("float32", 2048, d=1),
    Case("float32", 2048, d=16, targets=targets((8, 5), (6, 5))),
    Case("float32", 2048, d=256, targets=targets((2.5, 2.3), (2.3, 2.2))),
    Case("float32", 1024, d=512),
    Case("float32", 1024, d=32, e=128),
    Case("float32", 1023, d=63, e=65),
    # one query, tall, wide
    Case("float32", 4096, m=1),
    Case("float32", 128, m=8192),
    Case("float32", 8192, m=128),
    # heads
    Case("float32", 512, batch=8),
    Case("float32", 128, batch=16),
    Case("float32", 2, d=3, batch=1000),
    # the other dtypes
    Case("float64", 2, d=3, e=4),
    Case("float64", 256),
    Case("float64", 2048, targets=targets((3, 3), (3, 3))),
    Case("bfloat16", 256),
    Case("bfloat16", 2048, targets=targets((2.5, 2.5), (2.2, 2.2)), modes=MODES),
    Case("bfloat16", 512, batch=8),
    Case("float16", 256),
    Case("float16", 2048),
)  # fmt: skip


class Device:
    """What is timed on the CPU, and how."""

    cases = CASES
    SECONDS = 3.0  # of a row

    def __init__(self, threads: int) -> None:
        self.threads = threads
        use_threads(threads)

    def clock(self, case: Case) -> Clock:
        return host_clock(self.threads, CPU)

    def more(self, case: Case, mode: str) -> list[str]:
        return []

    def about(self) -> dict:
        return {}

    def peaks(self) -> roofline.Peaks:
        return roofline.measure(self.threads)

    def scratch(self, case: Case, mode: str, contender: str) -> int:
        return memory.peak(case, mode, contender, self.threads)
