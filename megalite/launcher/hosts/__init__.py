"""The job as its starting process sees it: hosts, each backend's commands, the preflight, attempts and restarts."""
