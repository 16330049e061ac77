"""What each rank is doing, where the others can read it, and the end of a job that hangs.

Every rank keeps a *record*, one small mapped file: who it is, a heartbeat, the main thread's line,
and per thread the last Link call. It costs no system call to write and outlives even a killed rank.
A daemon thread, the *watch*, beats once a second; when a call of its own rank has waited too long
it reads all records and reports. In DIR: rank-00000, ... (removed at a clean end), hung-report.txt.
"""

from hpctrain.watch.deadline import Watch
from hpctrain.watch.inside import About, noticed, unnoted
from hpctrain.watch.record import ENTRIES, Call, Entry, Record, Snapshot, read, record_path, where
from hpctrain.watch.report import REPORT, dump_stacks, interval_s, report, write_report

__all__ = [
    "ENTRIES",
    "REPORT",
    "About",
    "Call",
    "Entry",
    "Record",
    "Snapshot",
    "Watch",
    "dump_stacks",
    "interval_s",
    "noticed",
    "read",
    "record_path",
    "report",
    "unnoted",
    "where",
    "write_report",
]
