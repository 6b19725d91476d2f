"""The machine that this process runs on: its memory and its cores, and who else uses them."""

import os
import time


def allowed_cores() -> int:
    """Cores that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        if quota != "max":
            allowed = min(allowed, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no cgroup limit to read
    return allowed


def memory() -> int:
    """Bytes of memory of this machine or container (what is free may differ when a run is resumed)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            limit = file.read().strip()
    except OSError:
        return total  # no cgroup limit to read
    return min(total, int(limit)) if limit.isdecimal() else total


def free_cores() -> int:
    """Cores that this process may use and that others leave free, measured for 0.2 s; at least 1.

    Threads beyond that make a step many times slower: each parallel region waits for the slowest.
    """
    allowed = allowed_cores()
    if not os.path.exists("/proc/stat"):
        return allowed
    before = _busy_seconds()
    time.sleep(0.2)
    busy = (_busy_seconds() - before) / 0.2
    return max(1, min(allowed, round((os.cpu_count() or 1) - busy)))


def cpu_threads() -> int:
    """CPU threads for this process: the free cores, shared among the processes of this machine."""
    return max(1, free_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def _busy_seconds() -> float:
    with open("/proc/stat") as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
