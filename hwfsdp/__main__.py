"""`python -m hwfsdp`, which is also what torchrun takes: `torchrun --nproc-per-node 2 -m hwfsdp train`."""

import sys

from hwfsdp.cli import main

if __name__ == "__main__":
    sys.exit(main())
