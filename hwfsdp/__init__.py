"""Fully sharded data parallel training, written by hand to be read.

    from hwfsdp import fully_shard

is a drop-in for `torch.distributed.fsdp.fully_shard`. To read how it works, take the modules as the chapters of
a book, in this order; each imports only from those before it.

    I    Arithmetic
         doors         names of a package, loaded when first asked for
         errors        what can go wrong, and how it is said
         sharding      which rows belong to which rank: integers only
         compat        the corners of torch that have no public door
         nested        tensors inside whatever a forward takes or returns
         precision     which dtype for what: policies and casts
         events        what happened, when, on which stream
    II   One parameter
         mesh          who takes part
         placement     which DTensor a parameter becomes
         storage       memory that comes and goes under a tensor that stays
         extensions    parameters that travel in a form of their own
         param         one parameter, sharded and whole
    III  Moving bytes
         history       what each rank called last
         divergence    where ranks part
         streams       several things at once, the same on every device
         ring          all-gather and reduce-scatter from send and receive
         shared_memory  collectives between ranks of one machine
         collectives   many tensors, one collective
    IV   The schedule
         prefetch      what to gather next
         advice        mistakes that run, but do not train
         group         parameters that are gathered, freed and reduced together
         watch         where autograd calls
         hooks         when: around forward and backward
         claim         what a call of fully_shard claims, and whether it may
         module        what every sharded module also is
         wrap          the public door
    V    Instruments
         accounting    what a step costs, before it is run: bytes in closed form
         layout        placements of a DTensor and the part that a rank holds, strided and uneven ones too
         fields        values that a file says, checked before use
         about         what a log says of the run it is of
         lifetimes     when each parameter group was sharded, gathered, whole, freed
         clocks        whose time a log is in, and one axis for several
         order         what is certain to be over before what, and where it is not: races
         perfetto      an event log as a file that ui.perfetto.dev opens
         eventlog      a finished recording: questions about it, and its file
         memory        what is alive, by kind, read from the storages themselves
         functional    functional collectives, seen at their operators
         recording     puts the instruments in place, takes them away again
         onlooker      tells a recording of modules that have no instruments
         inspection    a model's parameters as a table
         filling       the same weights whatever the number of ranks
    VI   Checkpoints
         checkpoint    state dicts that are moved, compared, saved
    VII  Workbench
         optim         torch's optimizers, their steps over local parts
         models        a byte-level GPT and Llama, to shard
         blueprint     a model sharded on paper
         data          text to train it on
         server        what ranks are forked from
         nursery       what it does before it forks
         messages      what they say to their caller
         worker        what runs on each rank
         ranks         processes to run on
         implementations  hwfsdp, FSDP2, none, or a file of yours: one way to call them
         snapshots     what a run needs to go on where it was
         train         the loop
    VIII Ranks you do not have
         virtual       a step on GPUs that are not there, in virtual time
    IX   Pictures
         plot          figures of a log
         trace         a run recorded, held against closed forms, compared
         demo          three times the same run: hwfsdp, FSDP2, unsharded
         lesson        what notebooks need
    X    Classroom
         learn         the course, and what grades it
         verbs         those of the command that have a room of their own
         cli           the command `hwfsdp`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwfsdp.doors import lazy_door

if TYPE_CHECKING:
    from hwfsdp.errors import CheckpointError as CheckpointError
    from hwfsdp.errors import CollectiveError as CollectiveError
    from hwfsdp.errors import FSDPError as FSDPError
    from hwfsdp.errors import RankError as RankError
    from hwfsdp.errors import StateError as StateError
    from hwfsdp.errors import UnsupportedError as UnsupportedError
    from hwfsdp.errors import UsageError as UsageError
    from hwfsdp.eventlog import EventLog as EventLog
    from hwfsdp.events import Event as Event
    from hwfsdp.filling import init_shards as init_shards
    from hwfsdp.group import FSDPCommContext as FSDPCommContext
    from hwfsdp.inspection import explain as explain
    from hwfsdp.mesh import DataParallelMeshDims as DataParallelMeshDims
    from hwfsdp.module import FSDPModule as FSDPModule
    from hwfsdp.module import UnshardHandle as UnshardHandle
    from hwfsdp.module import register_fsdp_forward_method as register_fsdp_forward_method
    from hwfsdp.module import share_comm_ctx as share_comm_ctx
    from hwfsdp.precision import CPUOffloadPolicy as CPUOffloadPolicy
    from hwfsdp.precision import MixedPrecisionPolicy as MixedPrecisionPolicy
    from hwfsdp.precision import OffloadPolicy as OffloadPolicy
    from hwfsdp.ranks import launch as launch
    from hwfsdp.recording import record as record
    from hwfsdp.wrap import fully_shard as fully_shard

__version__ = "0.1.0"

_HOME = {  # public name → the module it is defined in; imported when first asked for, as that imports torch
    "CPUOffloadPolicy": "precision",
    "CheckpointError": "errors",
    "CollectiveError": "errors",
    "DataParallelMeshDims": "mesh",
    "Event": "events",
    "EventLog": "eventlog",
    "FSDPCommContext": "group",
    "FSDPError": "errors",
    "FSDPModule": "module",
    "MixedPrecisionPolicy": "precision",
    "OffloadPolicy": "precision",
    "RankError": "errors",
    "StateError": "errors",
    "UnshardHandle": "module",
    "UnsupportedError": "errors",
    "UsageError": "errors",
    "explain": "inspection",
    "fully_shard": "wrap",
    "init_shards": "filling",
    "launch": "ranks",
    "record": "recording",
    "register_fsdp_forward_method": "module",
    "share_comm_ctx": "module",
}

__all__ = sorted(_HOME)

__getattr__, __dir__ = lazy_door(__name__, _HOME)
