"""Let mpirun start ranks on other hosts: ssh with keys that are made for one job and never leave its hosts.

Every host makes a host key, the first one a client key; the public halves are exchanged when the hosts meet. So nothing
is baked into an image, nobody else can log in, and no host is trusted at first sight.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from smpkit.errors import LaunchError

__all__ = ["client_environment", "make_key", "server_command"]

_HINT = "install `openssh-server`, or use `torch_distributed` instead of `mpi`: it needs no ssh"


def make_key(folder: Path, name: str) -> str:
    """Make a key pair in `folder`; return its public half, without the comment that names this machine.

    Raises:
        LaunchError: ssh is not installed or does not work.
    """
    key = folder / name
    command = [_program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"no ssh key could be made: {error}", hint=_HINT) from None
    return key.with_suffix(".pub").read_text(encoding="ascii").strip()


def server_command(folder: Path, host_key: str, client_key: str, port: int) -> list[str]:
    """Return the command of a server that lets in the owner of `client_key`, and only with it.

    Args:
        folder: one that only this user can read; holds the private half of `host_key`, by file name.
    """
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, parents=True, exist_ok=True)  # sshd runs in it until the login
    authorized = folder / "authorized_keys"
    authorized.write_text(f"restrict {client_key}\n", encoding="ascii")
    config = folder / "sshd_config"
    config.write_text(
        "\n".join(
            [
                f"Port {port}",
                f"HostKey {folder / host_key}",
                f"AuthorizedKeysFile {authorized}",
                "AuthenticationMethods publickey",
                "PermitRootLogin prohibit-password",
                "PasswordAuthentication no",
                "KbdInteractiveAuthentication no",
                "UsePAM no",
                "StrictModes no",  # it would refuse a folder below /tmp, though only this user can enter ours
                "PidFile none",
                "PrintMotd no",
                "MaxStartups 1000",
                "",
            ]
        ),
        encoding="ascii",
    )
    return [_program("sshd"), "-D", "-e", "-f", str(config)]


def client_environment(folder: Path, client_key: str, host_keys: Mapping[str, str], port: int) -> dict[str, str]:
    """Return the variables that make mpirun (Open MPI 4 and 5) log in with `client_key` to hosts with `host_keys`.

    Args:
        folder: one that only this user can read; holds the private half of `client_key`, by file name.
        host_keys: the public keys of the hosts, by name.
    """
    known = folder / "known_hosts"
    known.write_text("".join(f"[{host}]:{port} {key}\n" for host, key in host_keys.items()), encoding="ascii")
    config = folder / "ssh_config"
    config.write_text(
        "\n".join(
            [
                "Host *",
                f"Port {port}",
                f"IdentityFile {folder / client_key}",
                "IdentitiesOnly yes",
                f"UserKnownHostsFile {known}",
                "GlobalKnownHostsFile /dev/null",
                "StrictHostKeyChecking yes",
                "BatchMode yes",
                "LogLevel ERROR",
                "ConnectionAttempts 60",  # one a second: the other host's server is only just starting
                "ConnectTimeout 30",
                "ServerAliveInterval 10",
                "",
            ]
        ),
        encoding="ascii",
    )
    agent = f"{_program('ssh')} -F {config}"
    return {"OMPI_MCA_plm_rsh_agent": agent, "PRTE_MCA_plm_ssh_agent": agent}


def _program(name: str) -> str:
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    found = shutil.which(name, path=path)
    if found is None:
        raise LaunchError(f"`{name}` was not found, and MPI over several hosts needs ssh", hint=_HINT)
    return found
