"""Stand in for one rank under mpirun: send the launcher of this host what mpirun has set, and end as the rank does.

Started as `python -I -S stand_in.py` where mpirun would start the rank; imports nothing but the standard library.
"""

import json
import os
import signal
import socket

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is the launcher that ends ranks: mpirun would after a second
    with socket.socket(socket.AF_UNIX) as launcher:
        launcher.connect(os.environ.pop("SMPKIT_LAUNCHER"))
        launcher.sendall(json.dumps(dict(os.environ)).encode() + b"\n")
        code = launcher.makefile().readline()
    os._exit(int(code or 1))
