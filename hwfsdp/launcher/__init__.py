"""Processes to run on: ranks of one machine, forked from a server that has imported torch.

    preload      the modules that the process imports from which ranks are forked
    fork_server  this process; it starts before it is needed
    pickling     functions and values for another process, and the caller's script there
    worker       the process of each rank
    supervisor   the ranks of one call, as their caller sees them
    launch       the public function
    capture      your script on each rank, as torchrun would run it, with some of its steps recorded

The folder is not called launch, because `hwfsdp.launch` is a function.
"""
