"""The launcher's part of a command line (torchrun, deepspeed, srun) and a hostfile: how many ranks, and where."""

import re
from collections.abc import Sequence
from math import prod
from shlex import quote

from megalite.convert.adopt.account import Account, KeyAnswer, Outcome
from megalite.convert.adopt.shell.expand import as_source, is_known
from megalite.convert.adopt.sources import Source
from megalite.launcher.hosts.hostfile import read_hostfile

_RANKS = {
    "nproc_per_node": "slots",
    "num_gpus": "slots",
    "ntasks_per_node": "slots",
    "gpus_per_node": "slots",
}
_RANKS |= {"nnodes": "hosts", "num_nodes": "hosts", "nodes": "hosts", "N": "hosts"}
_SBATCH = re.compile(r"^#SBATCH[ \t]+(--?([A-Za-z][\w-]*))(?:[= ][ \t]*(\S+))?", re.MULTILINE)
_KEPT = {
    "hostfile": "--hostfile",
    "H": "--hostfile",
    "include": "--include",
    "i": "--include",
    "exclude": "--exclude",
}
_KEPT |= {"e": "--exclude", "master_addr": "--master", "master_port": "--port"}
_HOST_LINE = re.compile(r"^\s*[\w.\-]+\s+slots\s*=\s*\d+", re.MULTILINE)
_LAUNCHERS = ("torchrun", "deepspeed", "mpirun", "mpiexec", "srun", "python", "python3", "accelerate", "ds")
_SWITCHES = (
    "standalone",
    "no_python",
    "no_ssh",
    "force_multi",
    "no_local_rank",
    "module",
    "use_env",
    "exclusive",
)
_HERE = ("localhost", "127.0.0.1")


def is_hostfile(source: Source) -> bool:
    return bool(_HOST_LINE.search(source.text)) and "--" not in source.text


def batch_variables(script: str) -> dict[str, str]:
    """Return the variables that SLURM sets for the #SBATCH lines of a script."""
    options = {name.replace("-", "_"): value for _, name, value in _SBATCH.findall(script)}
    nodes = options.get("nodes", options.get("N", ""))
    return dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), nodes) if nodes.isdecimal() else {}


def answer_launcher(
    account: Account, words: Sequence[str], hostfiles: Sequence[Source], script: str = ""
) -> None:
    """Answer each #SBATCH line of the script and each word of the launcher; set the number of ranks if it is known."""
    sizes: dict[str, int] = {}
    for written, name, value in _SBATCH.findall(script):
        _answer_word(account, sizes, ("#SBATCH", written, name.replace("-", "_")), value)
    rest = list(words)
    programs = [word.rpartition("/")[2] for word in rest]
    launcher = next((name for name in _LAUNCHERS if name in programs), "launcher")
    while rest:
        word = rest.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-"):
            continue
        takes = not equals and rest and not rest[0].startswith("-") and name not in _SWITCHES
        value = rest.pop(0) if takes else value
        _answer_word(account, sizes, (launcher, word.partition("=")[0], name.replace("-", "_")), value)
    for source in hostfiles:
        hosts = read_hostfile(source.path)
        sizes = {
            "hosts": 1,
            "slots": sum(len(host.slots) for host in hosts),
        }
        account.launch[:] = [f"--hostfile {quote(str(source.path))}"]
        answer = KeyAnswer(
            str(source.path), None, Outcome.TAKEN, {}, f"{len(hosts)} hosts, {sizes['slots']} slots"
        )
        account.add(answer)
    if not hostfiles:
        account.launch += [f"--{name} {size}" for name, size in sizes.items() if name == "slots" or size > 1]
    if {"slots", "hosts"} <= set(sizes) or (launcher in ("deepspeed", "torchrun") and "slots" in sizes):
        account.ranks = sizes["slots"] * sizes.get("hosts", 1)


def _answer_word(account: Account, sizes: dict[str, int], names: tuple[str, str, str], value: str) -> None:
    launcher, written, name = names
    key, shown = f"{launcher} {written}", as_source(value) or None
    if name in _RANKS and value.isdecimal() and int(value):
        sizes[_RANKS[name]] = int(value)
        account.add(KeyAnswer(key, shown, Outcome.TAKEN, {}, f"megalite launch --{_RANKS[name]}"))
    elif name in _RANKS:
        reason = "known only in a run: the number of ranks stays open"
        account.add(KeyAnswer(key, shown, Outcome.CHANGED, {"parallel.data": "auto"}, reason))
    elif name in _KEPT and value and is_known(value) and value not in _HERE:
        if name != "master_port":
            account.launch.append(f"{_KEPT[name]} {quote(value)}")
        account.add(KeyAnswer(key, shown, Outcome.TAKEN, {}, f"megalite launch {_KEPT[name]}"))
    else:
        account.add(KeyAnswer(key, shown, Outcome.NO_EFFECT, {}, "megalite launch starts the ranks"))


def set_data_parallel_size(account: Account) -> None:
    """Set parallel.data from the ranks and the sizes of the other axes, where they are known."""
    names = [
        name
        for name in ("tensor", "context", "pipeline")
        if name != "context" or f"parallel.{name}" in account.settings
    ]
    replica = prod(account.settings.get(f"parallel.{name}", 1) for name in names)
    product = f"{' * '.join(names)} = {replica}"
    if account.ranks is None:
        return
    if account.ranks % replica:
        account.note(f"{account.ranks} ranks are no multiple of {product}: parallel.data stays open")
        return
    reason = f"{account.ranks} ranks / ({product})"
    account.default("parallel.data", account.ranks // replica, reason)
