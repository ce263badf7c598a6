"""Fully sharded data parallel training, written by hand to be read.

    from hwfsdp import fully_shard

is a drop-in for `torch.distributed.fsdp.fully_shard`. To read how it works, open `core`: FSDP itself, fourteen hundred lines that
import torch and nothing else. `features` is what FSDP2 can do beyond, joined to the heart at six seams. Around them stand the
wings; each imports only from those before it.

    I    The heart
         doors         names of a package, loaded when first asked for
         core          FSDP over one mesh axis: start here
    II   On the wire
         errors        what can go wrong, and how it is said
         compat        the corners of torch that have no public door
         events        what happened, when, on which stream
         history       what each rank called last
         divergence    where ranks part
         ring          all-gather and reduce-scatter from send and receive
         shared_memory  collectives between ranks of one machine
         collectives   how bytes really move, with names and notes
         streams       for schedules that are written outside of the package
    III  Beyond
         features      what FSDP2 can do beyond the heart, and the door that users call
    IV   Instruments
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
         stream_clocks  what time it is on a stream
         instrument    what a recording hears from the heart
         recording     puts the instruments in place, takes them away again
         onlooker      tells a recording of modules that have no instruments
         inspection    a model's parameters as a table
         filling       the same weights whatever the number of ranks
    V    Checkpoints
         checkpoint    state dicts that are moved, compared, saved
    VI   Workbench
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
    VII  Ranks you do not have
         virtual       a step on GPUs that are not there, in virtual time
    VIII Pictures
         plot          figures of a log
         trace         a run recorded, held against closed forms, compared
         demo          three times the same run: hwfsdp, FSDP2, unsharded
         lesson        what notebooks need
    IX   Classroom
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
    from hwfsdp.core.context import FSDPCommContext as FSDPCommContext
    from hwfsdp.inspection import explain as explain
    from hwfsdp.features.hybrid_sharding import DataParallelMeshDims as DataParallelMeshDims
    from hwfsdp.features.steering import FSDPModule as FSDPModule
    from hwfsdp.features.steering import UnshardHandle as UnshardHandle
    from hwfsdp.features.steering import register_fsdp_forward_method as register_fsdp_forward_method
    from hwfsdp.features.steering import share_comm_ctx as share_comm_ctx
    from hwfsdp.features.offload import CPUOffloadPolicy as CPUOffloadPolicy
    from hwfsdp.core.precision import MixedPrecisionPolicy as MixedPrecisionPolicy
    from hwfsdp.features.offload import OffloadPolicy as OffloadPolicy
    from hwfsdp.ranks import launch as launch
    from hwfsdp.recording import record as record
    from hwfsdp.features.door import fully_shard as fully_shard

__version__ = "0.1.0"

_HOME = {  # public name → the module it is defined in; imported when first asked for, as that imports torch
    "CPUOffloadPolicy": "features.offload",
    "CheckpointError": "errors",
    "CollectiveError": "errors",
    "DataParallelMeshDims": "features.hybrid_sharding",
    "Event": "events",
    "EventLog": "eventlog",
    "FSDPCommContext": "core.context",
    "FSDPError": "errors",
    "FSDPModule": "features.steering",
    "MixedPrecisionPolicy": "core.precision",
    "OffloadPolicy": "features.offload",
    "RankError": "errors",
    "StateError": "errors",
    "UnshardHandle": "features.steering",
    "UnsupportedError": "errors",
    "UsageError": "errors",
    "explain": "inspection",
    "fully_shard": "features.door",
    "init_shards": "filling",
    "launch": "ranks",
    "record": "recording",
    "register_fsdp_forward_method": "features.steering",
    "share_comm_ctx": "features.steering",
}

__all__ = sorted(_HOME)

__getattr__, __dir__ = lazy_door(__name__, _HOME)
