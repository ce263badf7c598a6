"""Collectives between ranks, and reports on ranks that hang or diverge.

    ring                all-gather and reduce-scatter from send and receive
    shared_blocks       memory that one rank writes and others read
    group_identity      the parameter groups of the ranks that belong together
    flight_recorder     the last collectives of each rank
    shared_memory       collectives between ranks of one machine
    users_collectives   the user's own collectives, for the flight recorder
    desync_report       the first collective in which ranks differ
    transport           kinds of all-gather and reduce-scatter, named and recorded

If all ranks of a group are on one machine, they can move bytes through shared memory. All other groups use `torch.distributed`.
"""
