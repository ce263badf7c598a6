"""Training: models, text, the loop, and the demo's three runs.

    models           a byte-level GPT and Llama, to shard
    data             text to train on
    implementations  one way to call hwfsdp, FSDP2, no sharding, or your own file
    snapshots        the saved state from which a run continues
    loop             the training loop
    traced_run       your script on ranks, as torchrun would run it, or the demo; some of its steps recorded
    compared_runs    the same run three times: hwfsdp, FSDP2, unsharded

These modules work with any implementation of FSDP, so you can compare implementations.
"""
