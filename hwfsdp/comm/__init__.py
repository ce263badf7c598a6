"""Collectives between ranks, and reports on ranks that hang or diverge.

    ring           all-gather and reduce-scatter from send and receive
    blocks         memory that one rank writes and others read
    pairing        the parameter groups of the ranks that belong together
    shared_memory  collectives between ranks of one machine
    history        the last collectives of each rank
    users_calls    the user's own collectives, for the history
    divergence     the first collective in which ranks differ

If all ranks of a group are on one machine, they can move bytes through shared memory. All other groups use `torch.distributed`.
"""
