"""Processes to run on: ranks of one machine, forked from a server that has imported torch.

    fork_server  the process from which ranks are forked; it starts before it is needed
    preload      the modules that this process imports
    pickling     functions and values for another process, and the caller's script there
    worker       the process of each rank
    supervisor   the ranks of one call, as their caller sees them
    launch       the public function

The folder is not called launch, because `hwfsdp.launch` is a function.
"""
