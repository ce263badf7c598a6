"""State dicts that are moved, compared, saved.

    traverse      what a state dict is: leaves at paths, in containers that keep their types
    state_dict    gathered, offloaded, copied, compared
    distribute    whole tensors into shards, on every rank or from one

Nothing is imported here: a process that only reads a checkpoint need not know how to gather one.
"""
