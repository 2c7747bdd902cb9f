"""Prepares a process for scripts of SMP v1's time: Python imports the first module of this name when it starts."""

import contextlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

with contextlib.suppress(ModuleNotFoundError):  # another interpreter that the script starts may have no smpkit
    from smpkit.drop_in import after_import

    after_import.install()

# Run the module of this name that this one hides, such as that of the operating system.
_here = Path(__file__).resolve().parent
_path = [folder for folder in sys.path if Path(folder).resolve() != _here]
_hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", _path)
if _hidden is not None and _hidden.loader is not None:
    _hidden.loader.exec_module(importlib.util.module_from_spec(_hidden))
