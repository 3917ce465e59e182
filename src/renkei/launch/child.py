"""What a rank started by Renkei runs first: it ends with its launcher, and its failure reaches it.

python -m renkei.launch.child script SCRIPT [ARGUMENT ...]
python -m renkei.launch.child module MODULE [ARGUMENT ...]
python -m renkei.launch.child function
"""

from __future__ import annotations

import ctypes
import os
import pickle
import runpy
import signal
import sys
from pathlib import Path
from types import TracebackType

from renkei.failures.first_cause import FAILED, JOB_VARIABLE, report

LAUNCHER_VARIABLE = "RENKEI_LAUNCHER_PID"  # the process that must be this one's parent
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends, however that ends; only Linux can."""
    launcher = os.environ.pop(LAUNCHER_VARIABLE, None)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if launcher is not None and os.getppid() != int(launcher):  # it ended while this process began
        sys.exit("renkei: the launcher has gone")


def run_script(path: str) -> None:
    """Run a file as ``python FILE`` would."""
    sys.path[0] = str(Path(path).resolve().parent)
    runpy.run_path(path, run_name="__main__")


def run_module(name: str) -> None:
    """Run a module as ``python -m MODULE`` would."""
    sys.path[0] = os.getcwd()
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_function() -> None:
    """Call the function that `renkei.run` has left in the job's folder, and leave its result there."""
    import cloudpickle

    job, rank = Path(os.environ[JOB_VARIABLE]), os.environ["RANK"]
    sys.path[:], function = pickle.loads((job / "function.pkl").read_bytes())
    fn, args = cloudpickle.loads(function)
    result = cloudpickle.dumps(fn(*args))
    (job / f"result-{rank}.pkl").write_bytes(result)


def without_launcher(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the user's first line on."""
    own = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    return trace


def main() -> None:
    """Run what the command line says; on failure, report it and exit."""
    die_with_parent()
    kind, *rest = sys.argv[1:]
    sys.argv = rest
    try:
        if kind == "script":
            run_script(rest[0])
        elif kind == "module":
            run_module(rest[0])
        else:
            run_function()
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            FAILED.set()
        raise
    except Exception as error:
        sys.exit(report(error.with_traceback(without_launcher(error.__traceback__))))


if __name__ == "__main__":
    main()
