"""The command `hwfsdp`: a table of verbs and their options, `verbs.toml`, and a module for each verb that has work to do here.

    options    options, read from the rows of the table; the answer as text or JSON
    training   code that all training verbs share
    demo       the same run three times, compared, and drawn
    health     the checks of doctor
    doctor     whether this machine can do what the package needs
    course     the lab
    explain    how ranks would share a model's parameters
    simulate   a step on GPUs that you do not have
    trace      record a run; show, compare or export its log
    train      the training loop
    swap       run a program that uses torch's FSDP2 on hwfsdp
    greeting   the command without a verb: what to do next
    command    the parser of the table, and the exit status

The other verbs are functions of `course` and `checkpoint.commands`, which the table names. A verb's module is imported
only when the verb runs. Nothing imports torch before, so `hwfsdp --help` answers at once.
"""

from hwfsdp.cli.command import build_parser as build_parser
from hwfsdp.cli.command import main as main
