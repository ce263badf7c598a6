"""Training: models, text, the loop, and the demo's three runs.

    models           a byte-level GPT and Llama, to shard
    builders         which model: by name, or a function of yours
    data             text to train on
    implementations  hwfsdp, FSDP2, none, or a file of yours: one way to call them
    snapshots        the saved state from which a run continues
    loop             the training loop
    traced_run       a run on ranks of its own, some of its steps recorded
    demo             the same run three times: hwfsdp, FSDP2, unsharded

All of it takes any implementation of FSDP, so that implementations can be compared.
"""
