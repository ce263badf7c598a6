"""Give two collectives of an older torch the names that torch 2.13 gave them.

Python runs this file when it starts, if the folder of this file is in PYTHONPATH.

hwfsdp supports torch 2.13 and later. A machine with a GPU may have an older torch, and no registry to install another one. A
measurement there is better than none, and the page names its version of torch.
"""

import torch.distributed as dist

for name, before in {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}.items():
    for module in (dist, dist.distributed_c10d):
        if not hasattr(module, name):
            setattr(module, name, getattr(module, before))
