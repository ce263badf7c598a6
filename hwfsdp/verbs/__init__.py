"""Verbs of the command, each in a room of its own: `add_<verb>(verbs)` adds its parser, which names what to run.

None of them imports torch before it runs, so that `hwfsdp --help` answers at once.
"""
