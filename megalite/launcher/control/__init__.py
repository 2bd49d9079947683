"""How the ranks of a job meet, watch each other and end: coordinator, members, reports and verdicts."""
