"""How the ranks of a job meet, watch each other and end: coordinator, members, reports and verdicts.

Ranks that a launcher started meet before torch is imported, over TCP connections with one JSON object a line.
The `Coordinator` is a thread of rank 0 at MASTER_ADDR:MASTER_PORT; under torchrun, whose agent owns that port,
it has a free port that the agent's store tells; under `megalite launch` it is the launching process
(`MEGALITE_COORDINATOR`). Each rank is a `Member`.

1. Hello (rank, host, pid, job); all are present within `launch.rendezvous_seconds`.
2. Settings and software are compared; rank 0 prepares the inputs, and every host compares files. A difference
   ends all ranks with the key, the values and the hosts.
3. Rank 0 serves torch's store at a free port; the process group is made.

A failing rank sends its report. A closed connection is a lost rank; the kernel notices a host that does not
answer (TCP_USER_TIMEOUT, `launch.heartbeat_seconds`), so a process that computes without Python is not taken
for lost. The coordinator waits 0.3 s for an earlier cause and then tells all ranks the verdict; `RankEnd` shows
it once and ends the process by `os._exit`. Ranks that `megalite train` forks have their parent instead
(`launcher/local.py`).
"""
