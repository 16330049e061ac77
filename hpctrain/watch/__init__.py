"""Records of the current call of each rank, readable by the others, and the end of a hung job.

Every rank keeps a *record*, one small mapped file: rank, host, heartbeat, the main thread's line,
and per thread the last Link call. It costs no system call to write and outlives even a killed rank.
A daemon thread, the *watch*, beats once a second; when a call of its own rank has waited too long
it reads all records and reports. In DIR: rank-00000, ... (removed at a clean end), hung-report.txt.
"""

from hpctrain.watch.deadline import Watch
from hpctrain.watch.inside import call_unrecorded
from hpctrain.watch.record import (
    MAX_ENTRIES,
    RECORD_BYTES,
    REPORT_NAME,
    Call,
    Entry,
    Snapshot,
    WatchRecord,
    code_location,
    read_record,
    record_path,
)
from hpctrain.watch.report import dump_stacks, interval_s, make_report, write_report

__all__ = [
    "MAX_ENTRIES",
    "RECORD_BYTES",
    "REPORT_NAME",
    "Call",
    "Entry",
    "WatchRecord",
    "Snapshot",
    "Watch",
    "call_unrecorded",
    "code_location",
    "dump_stacks",
    "interval_s",
    "read_record",
    "record_path",
    "make_report",
    "write_report",
]
