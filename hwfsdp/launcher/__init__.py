"""Processes to run on: ranks of one machine, forked from a server that has imported torch.

    fork_server  the process that ranks are forked from, started ahead of need
    preload      what it imports before it forks
    messages     what ranks say to their caller
    worker       what runs on each rank
    caller       the ranks of one call, as their caller sees them
    ranks        the public function: launch
    capture      a script of yours on each rank, as torchrun would run it; which of its steps are recorded

The folder is not called launch: `hwfsdp.launch` is a function.
"""
