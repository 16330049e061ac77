"""Records of the last calls of each rank, readable by the others, and the end of a hung job.

Every rank keeps a *record*, pages of memory that the ranks of its node share: rank, host,
heartbeat, the main thread's line, and per thread the last 64 Link calls. It costs no system call to
write and outlives even a killed rank. A daemon thread, the *watch*, beats once a second; when a
call of its own rank has waited too long it reads all records and reports. See node_file.py.
"""

from hpctrain.watch.code_lines import code_location
from hpctrain.watch.deadline import Watch
from hpctrain.watch.inside import frameless, unrecorded
from hpctrain.watch.layout import MAX_CALLS, MAX_ENTRIES, RECORD_BYTES, Call, Snapshot
from hpctrain.watch.node_file import FACTS_NAME, REPORT_NAME, read_records
from hpctrain.watch.record import Entry, WatchRecord
from hpctrain.watch.report import HungReport, dump_stacks, interval_s, make_report, write_report

__all__ = [
    "FACTS_NAME",
    "MAX_CALLS",
    "MAX_ENTRIES",
    "RECORD_BYTES",
    "REPORT_NAME",
    "Call",
    "Entry",
    "HungReport",
    "Snapshot",
    "Watch",
    "WatchRecord",
    "code_location",
    "dump_stacks",
    "frameless",
    "interval_s",
    "make_report",
    "read_records",
    "unrecorded",
    "write_report",
]
