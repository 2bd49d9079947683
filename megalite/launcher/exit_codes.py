"""The exit codes of ranks and jobs that a signal ends, and the time within which two signals are one."""

import signal

STOPPED = 75  # stopped in an orderly way, to be resumed: every step of this start is saved
NOT_BEGUN = 76  # stopped before the end of the first step of this start: nothing to save
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM

# A terminal and the program that started this one may both pass on one Ctrl-C.
SAME_PRESS_SECONDS = 0.3
