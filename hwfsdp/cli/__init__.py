"""The command `hwfsdp`.

    terminal   what every verb needs: arguments that are refused in one line, the answer as text or JSON
    verbs      the verbs and their options
    training   demo, train
    doctor     check whether this machine can do what the package needs
    predict    explain, simulate: shards and steps on ranks and GPUs that you do not have
    trace      record a run; show, compare or export its log
    swap       run a program that uses torch's FSDP2 on hwfsdp
    command    run a verb, and return its exit status

The other verbs are functions of `course` and `checkpoint.convert`. A verb's module is imported only when the verb runs. Nothing
imports torch before, so `hwfsdp --help` answers at once.
"""

from hwfsdp.cli.command import main as main
from hwfsdp.cli.verbs import build_parser as build_parser
