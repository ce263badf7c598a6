"""The command `hwfsdp`: a module for each verb, which adds its parser and names what to run.

    options         options that verbs share
    demo            the same run three times, compared, and drawn
    health          what doctor looks at
    doctor          whether this machine can do what the package needs
    course          a folder with the course to work in
    student         list, check, hint, status, watch, reset, catchup
    lab             the broken lab
    explain         how a model's parameters would lie over ranks
    simulate        a step on GPUs that are not there
    trace_commands  record a run, show, compare, export
    trace           the verbs that call these
    train           the training loop
    swap            a program of torch's FSDP2, on hwfsdp
    checkpoint      look at checkpoints, verify them, convert them
    grade           one submission, or a class of them
    release         the student's edition
    greeting        the command without a verb: what to do next
    command         the table of verbs, and the exit status

None of them imports torch before it runs, so that `hwfsdp --help` answers at once.
"""

from hwfsdp.cli.command import build_parser as build_parser
from hwfsdp.cli.command import main as main
