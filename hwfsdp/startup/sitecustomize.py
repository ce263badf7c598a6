"""Python runs this file when it starts, if its folder is in PYTHONPATH: `hwfsdp.install()` in every process of a program.

`hwfsdp swap` puts it there for the processes that its script starts. A `sitecustomize` that stands behind it runs, too.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

# hwfsdp may lie in the folder that the caller stood in
sys.path.append(str(Path(__file__).resolve().parents[2]))
try:
    import hwfsdp

    hwfsdp.install()
except Exception as error:  # Python would print an error of this file, and go on with torch's names
    print(f"hwfsdp swap: {error}", file=sys.stderr)
    raise SystemExit(1) from error

_behind = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
_spec = PathFinder.find_spec("sitecustomize", _behind)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(module_from_spec(_spec))
