"""Real collectives between ranks, and which rank is late.

    ring           all-gather and reduce-scatter from send and receive
    shared_memory  collectives between ranks of one machine
    history        what each rank called last
    divergence     the first collective in which ranks differ

A rank of one machine moves bytes through shared memory; every other rank uses `torch.distributed`.
"""
