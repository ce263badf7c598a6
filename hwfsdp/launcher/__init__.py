"""Processes to run on: ranks of one machine, forked from a server that has imported torch.

    preload      the modules that the process imports from which ranks are forked
    fork_server  this process; it starts before it is needed
    messages     the messages from ranks to their caller
    pickling     functions and values for another process
    script       the caller's own functions and classes on a rank
    arguments    the arguments of launch: checked and pickled
    worker       the process of each rank
    caller       the ranks of one call, as their caller sees them
    ranks        the public function: launch
    capture      your script on each rank, as torchrun would run it, with some of its steps recorded

The folder is not called launch, because `hwfsdp.launch` is a function.
"""
