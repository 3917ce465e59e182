"""What a rank runs that outlives a test: it carries out one request after another, until the test hangs up.

Any launcher may start it, ``python -m contract.rank_server``, as one rank of several. SOCKET_VARIABLE names the Unix
socket at which `contract.served_ranks` listens, OUTPUT_VARIABLE the file to which all the ranks write.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import warnings
from multiprocessing.connection import Client, Connection

from contract.rank_requests import carry_out
from renkei.communicators.job import join

SOCKET_VARIABLE = "RANK_SERVER_SOCKET"
OUTPUT_VARIABLE = "RANK_SERVER_OUTPUT"
TELL_WHERE = signal.SIGUSR2  # lets a rank write where each of its threads is


def main() -> None:
    output = os.open(os.environ[OUTPUT_VARIABLE], os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(output, standard)
    look_up_names_in_files()
    faulthandler.register(TELL_WHERE, all_threads=True)
    warnings.simplefilter("error")  # as in the tests themselves
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    job = join()
    with Client(os.environ[SOCKET_VARIABLE], family="AF_UNIX") as connection:
        connection.send_bytes(pickle.dumps((job.rank, os.getpid())))
        serve(connection)


def look_up_names_in_files() -> None:
    """Ask no name server: torch asks for the name of whoever connects, and waits 5 s for an answer that gets lost."""
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)  # glibc has it
    if configure is not None:
        configure(b"hosts", b"files")


def serve(connection: Connection) -> None:
    """Answer until the other end is closed."""
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        connection.send_bytes(carry_out(request))


if __name__ == "__main__":
    main()
