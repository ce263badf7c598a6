"""The verbs of `hwfsdp` and their options, in the order of its help."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hwfsdp import __version__
from hwfsdp.cli.terminal import MOST_GPUS, VerbParser, names, positive, reshard, sweep, whole

_PACKAGE = Path(__file__).parents[1]

Add = Callable[..., object]  # `add_argument` of a parser or of a group of options


class Verbs:
    """The parsers of the verbs, and the list of verbs in the help of `hwfsdp`."""

    def __init__(self, parser: VerbParser) -> None:
        self._to: Any = parser.add_subparsers(
            dest="verb", metavar="VERB", prog="hwfsdp", help=argparse.SUPPRESS
        )
        self.lines: list[str] = []

    def heading(self, text: str) -> None:
        self.lines.append(f"  {text}:")

    def add(self, name: str, help: str, more: str = "", about: str = "", **texts: Any) -> Add:
        """Add a verb. Its own help says `about`, by default `help` and `more`."""
        lines = textwrap.wrap(help, 62, break_on_hyphens=False)
        self.lines += [f"    {name:<14}{lines[0]}", *(" " * 18 + line for line in lines[1:])]
        return _add_parser(self._to, name, help, more, about, **texts)

    def add_with_actions(self, name: str, help: str) -> Any:
        """Add a verb that is followed by the name of an action."""
        self.add(name, help)
        return self._to.choices[name].add_subparsers(dest="action", required=True, metavar="ACTION")

    def group(self, verb: str, title: str, about: str | None = None) -> Add:
        """Add a group of options to a verb."""
        add: Add = self._to.choices[verb].add_argument_group(title, about).add_argument
        return add

    def alternatives(self, verb: str) -> Add:
        """Add options to a verb of which only one may be given."""
        add: Add = self._to.choices[verb].add_mutually_exclusive_group().add_argument
        return add


def _add_parser(to: Any, name: str, help: str, more: str = "", about: str = "", **texts: Any) -> Add:
    about = about or f"{help[0].upper()}{help[1:]}. {more}".strip()
    parser: VerbParser = to.add_parser(name, help=help, description=about, **texts)
    parser.set_defaults(parser=parser)
    return parser.add_argument


def build_parser() -> VerbParser:
    """Build the parser of all verbs and their options."""
    parser = VerbParser(
        prog="hwfsdp",
        usage="hwfsdp [VERB [options]] [--help | --version]",
        description="A small, readable implementation of FSDP, and a drop-in for PyTorch's\n"
        "fully_shard. Without a verb, hwfsdp says what to do next.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hwfsdp {__version__}")
    verbs = Verbs(parser)
    verbs.heading("begin")
    _demo_and_doctor(verbs)
    verbs.heading("learn")
    _course(verbs)
    verbs.heading("see")
    _explain(verbs)
    _simulate(verbs)
    _trace(verbs)
    verbs.heading("train")
    _train_and_swap(verbs)
    _checkpoint(verbs)
    verbs.heading("teach")
    _teach(verbs)
    lines = ["verbs:", *verbs.lines, "", "hwfsdp VERB --help shows the options of a verb."]
    parser.epilog = "\n".join(lines)
    return parser


def _json(add: Add) -> None:
    add("--json", action="store_true", dest="as_json", help="print JSON instead of text")


def _training(add: Add, steps: int) -> None:
    """Add the options of all verbs that train."""
    add("--steps", type=whole(1), default=steps, help=f"optimizer steps (default {steps})")
    add("--batch", type=whole(1), default=8, help="sequences per rank and step (default 8)")
    add("--seq-len", type=whole(1), default=128, help="bytes per sequence (default 128)")
    add("--layers", type=whole(1), default=4, help="transformer blocks (default 4)")
    add("--dim", type=whole(1), default=128, help="width of the model (default 128)")
    add("--lr", type=positive, default=1e-3, help="learning rate of AdamW (default 0.001)")
    add("--seed", type=int, default=0, help="seed of weights and batches (default 0)")
    add("--text", metavar="FILE", help="train on this text file (default: Python's help topics)")
    _json(add)


def _timeout(add: Add) -> None:
    help = "time limit of a step with your own file (default 60), otherwise of a collective (default 300)"
    add("--timeout", metavar="SECONDS", type=positive, help=help)


def _demo_and_doctor(verbs: Verbs) -> None:
    add = verbs.add(
        "demo",
        "train a small GPT with hwfsdp, with FSDP2 and unsharded; compare; draw",
        about="Train the same byte-level GPT three times on the CPU: with hwfsdp, with torch's FSDP2, and unsharded. "
        "Compare losses, bytes and memory, and draw pictures.",
    )
    add("--ranks", type=whole(1), default=2, help="processes to shard over (default 2)")
    out = Path("runs/demo")
    add("--out", type=Path, default=out, help="folder for results (default runs/demo)")
    own = "compare hwfsdp, or your own Python file (default hwfsdp)"
    add("--implementation", metavar="NAME|FILE.py", default="hwfsdp", help=own)
    _timeout(add)
    _training(add, steps=80)
    add = verbs.add(
        "doctor",
        "check whether this machine can train",
        about="Check Python, torch, the network, ranks and GPUs, and say what to do if something is missing.",
        epilog="Each line is ok, note (something optional is missing), or broken. "
        "Exit status: 1 if training does not work, else 0.",
    )
    add("--ranks", metavar="N", type=whole(1, 8), default=2, help="processes to start, 1 to 8 (default 2)")
    _json(add)


def _course(verbs: Verbs) -> None:
    about = "Write the exercises, the homework and the lab to a new folder. A checkout has them in exercises/ already."
    add = verbs.add("course", "write the course to a folder to work in", about=about)
    add("out", metavar="DIR", type=Path, help="a new folder")
    _json(add)
    _json(verbs.add("list", "list the exercises, the homework and the lab"))
    more = "It runs your file on real ranks, shows the evidence for each check that fails, and asks one question."
    add = verbs.add("check", "check one exercise, and say what is wrong", more)
    number = "number or folder of the exercise, or homework"
    add("number", metavar="N", help=number)
    folder = "folder to grade (default: exercises/ of the course)"
    add("--submission", metavar="DIR", type=Path, help=folder)
    add("--seed", type=whole(0), help="seed of the inputs (default: a new one each time)")
    _json(add)
    more = "There are three: a question, a direction, and numbered steps."
    add = verbs.add("hint", "show one more hint for an exercise", more)
    add("number", metavar="N", help=number)
    _json(add)
    _json(verbs.add("status", "show your points, and what to do next"))
    add = verbs.add("watch", "check again whenever you save a file", "Press Ctrl-C to end.")
    add("number", metavar="N", nargs="?", help="number or folder of the exercise (default: all)")
    _json(add)
    more = "All stations share one file, my_fsdp.py, and are reset together."
    add = verbs.add("reset", "write a starter again, and keep a copy of your file", more)
    add("number", metavar="N", help=number)
    _json(add)
    more = (
        "It writes my_fsdp.py as it should be before station N. You give up the points of the stations that it "
        "writes."
    )
    add = verbs.add("catchup", "write the earlier stations for you, and keep a copy of your file", more)
    add("number", metavar="N", help="number or folder of a station, from 02 on")
    _json(add)
    _lab(verbs)


def _lab(verbs: Verbs) -> None:
    add = verbs.add(
        "lab",
        "find the cause and the fix of real bugs, with evidence",
        about="Find out why scripts train wrongly. hwfsdp lab lists the scripts. hwfsdp lab N shows one. hwfsdp lab N --run runs "
        "it under the recorder. hwfsdp lab check N judges your answers in exercises/lab/answers.toml.",
        usage="hwfsdp lab [N [--run] | check [N] [--submission DIR]] [options]",
        epilog="Exit status of a check: 0 if every answer is right, 1 if not, 2 if the file cannot be used.",
    )
    which = "number or folder of a script; or check, to judge answers"
    add("what", metavar="N|check", nargs="?", help=which)
    which = "after check: number or folder of the script (default: all)"
    add("number", metavar="N", nargs="?", help=which)
    run = "run the script under the recorder, and write its trace, a player of it, and pictures"
    add("--run", action="store_true", help=run)
    out = "folder for trace, player and pictures (default runs/lab/NN_name)"
    add("--out", metavar="DIR", type=Path, help=out)
    folder = "folder with lab/answers.toml (default: exercises/ of the course)"
    add("--submission", metavar="DIR", type=Path, help=folder)
    _json(add)


def _explain(verbs: Verbs) -> None:
    about = (
        "Print the parameters, their groups, rows and padding. This starts no ranks and allocates no weights."
    )
    add = verbs.add("explain", "show how the parameters of a model would be sharded", about=about)
    model = (
        "a model's name, such as llama3-8b (an unknown name lists all names), or module:function: your own "
        "function that returns a model"
    )
    add("model", metavar="MODEL", help=model)
    add("--ranks", metavar="N", type=whole(1, 1 << 20), default=8, help="number of ranks (default 8)")
    add("--rank", metavar="R", type=whole(0, 1 << 20), default=0, help="show this rank's rows (default 0)")
    wrap = "shard each module of these classes by itself (default: each layer of a list of equal layers)"
    add("--wrap", metavar="CLASS", nargs="+", help=wrap)
    add("--all", action="store_true", help="list every group, even if groups are equal")
    _json(add)


def _simulate(verbs: Verbs) -> None:
    add = verbs.add(
        "simulate",
        "predict a training step on virtual GPUs: speed, memory, communication",
        about="Predict one sharded training step on virtual GPUs: its time, memory and communication. No values are computed.",
        epilog="Exit status: 0 if the step fits into the GPUs' memory (in a sweep: if any step does), else 1.",
    )
    model = (
        "a model's name (default llama3-8b; an unknown name lists all names), or module:function: your own "
        "function that returns a model or a step"
    )
    add("--model", metavar="NAME", default="llama3-8b", help=model)
    gpus = whole(1, MOST_GPUS)
    add("--gpus", metavar="N", type=gpus, default=8, help="number of GPUs (default 8)")
    device = "name of the GPU (default h100; an unknown name lists all names)"
    add("--device", metavar="NAME", default="h100", help=device)
    add("--batch", metavar="B", type=gpus, default=1, help="sequences per GPU (default 1)")
    length = "tokens per sequence (default: the model's)"
    add("--seq", metavar="S", type=whole(1, 1 << 24), help=length)
    kinds, help = ["none", "selective", "full"], "activation checkpointing (default none)"
    add("--checkpoint", choices=kinds, default="none", help=help)
    free = (
        "free parameters after the forward, or keep them cut over N ranks (default: yes, except for the last "
        "block and the root)"
    )
    add("--reshard-after-forward", metavar="yes|no|N", type=reshard, help=free)
    add("--hsdp", action="store_true", help="shard within a node, replicate across nodes")
    wrap = "shard each module of these classes by itself (default: the blocks)"
    add("--wrap", metavar="CLASS[,CLASS]", type=names, default=(), help=wrap)
    dtypes = ["bfloat16", "float16", "float32"]
    help = "dtype of the computation (default bfloat16)"
    add("--dtype", choices=dtypes, help=help)
    one_of = verbs.alternatives("simulate")
    one_of("--nodes", metavar="M", type=gpus, help="number of machines (default: as few as possible)")
    one_of("--sweep", metavar="gpus=A..B", type=sweep, help="simulate A, 2A, 4A … B GPUs")
    add("--trace", metavar="FILE", type=Path, help="write the event log (.json or .json.gz)")
    add("--png", metavar="FILE", type=Path, help="draw the streams, or a sweep's curve")
    _json(add)


def _trace(verbs: Verbs) -> None:
    to = verbs.add_with_actions("trace", "record a training run, show what it moved, compare two runs")
    _trace_run(to)
    a_trace = {"type": Path, "help": "a trace: .json or .json.gz"}
    add = _add_parser(to, "show", "show what a trace measured, beside closed forms")
    add("file", metavar="FILE", **a_trace)
    _json(add)
    add = _add_parser(to, "diff", "compare two traces; exit status 1 if counts or bytes differ")
    add("a", metavar="A", type=Path, help="a trace")
    add("b", metavar="B", type=Path, help="the trace to compare it with")
    _json(add)
    add = _add_parser(to, "export", "write a trace in another format")
    files = "a trace: .json or .json.gz; two traces for a page that compares them"
    add("files", metavar="FILE", nargs="+", type=Path, help=files)
    formats = ["html", "perfetto", "csv", "png", "svg"]
    to_help = "html (a page that plays the step in any browser), perfetto, csv, png or svg"
    add("--to", choices=formats, required=True, metavar="FORMAT", help=to_help)
    pictures = ["timeline", "memory"]
    help = "for png and svg: timeline (default) or memory"
    add("--picture", choices=pictures, metavar="PICTURE", help=help)
    rank = "show only this rank (default: all; for memory: the first)"
    add("--rank", metavar="R", type=int, help=rank)
    step = "show only this step: its number in the run, as trace show prints it"
    add("--step", metavar="S", type=int, help=step)
    out = "file to write (default: FILE with another ending)"
    add("--out", metavar="TARGET", type=Path, help=out)
    _json(add)


def _trace_run(to: Any) -> None:
    add = _add_parser(
        to,
        "run",
        "run a script on several ranks and record some of its steps",
        usage="hwfsdp trace run SCRIPT|demo [options] [-- SCRIPT'S ARGUMENTS]",
        epilog="The script needs no change: it runs as torchrun would run it.",
    )
    add("target", metavar="SCRIPT", help="a script that trains with fully_shard, or demo: a small GPT")
    add("--ranks", metavar="N", type=whole(1, 1024), default=2, help="processes to run it on (default 2)")
    steps = (
        "record N optimizer steps after the first two (default 2), or steps A to B (A..: to the end), counted "
        "from 0"
    )
    add("--steps", metavar="N|A..B|A..", default="", help=steps)
    _device(add)
    limit = "time limit of a collective (default: the script's, or 300)"
    add("--timeout", metavar="SECONDS", type=positive, help=limit)
    own = "for the demo: hwfsdp (default), fsdp2, none, or your own Python file"
    add("--implementation", metavar="NAME|FILE.py", help=own)
    free = "for the demo: free parameters after the forward (default: yes, except for the root)"
    add("--reshard-after-forward", choices=["yes", "no"], help=free)
    out = "file of the trace (default trace.json); .json.gz is smaller"
    add("--out", metavar="FILE", type=Path, default=Path("trace.json"), help=out)
    _json(add)


def _device(add: Add) -> None:
    add("--device", choices=["cpu", "cuda"], help="default: cuda if each rank has a GPU, else cpu")


def _train_and_swap(verbs: Verbs) -> None:
    add = verbs.add(
        "train",
        "train a byte-level GPT with hwfsdp, with FSDP2 or with your own file",
        about="Train a byte-level GPT on several ranks. The command starts the ranks, unless torchrun has. It prints the loss, "
        "averaged over all ranks, and the L2 norm of all gradients.",
    )
    ranks = "processes to shard over (default 2; under torchrun: all of its processes)"
    add("--ranks", type=whole(1), help=ranks)
    own = "hwfsdp (default), fsdp2, none (every rank has the whole model), or a Python file with its own fully_shard"
    add("--implementation", metavar="NAME|FILE.py", default="hwfsdp", help=own)
    _timeout(add)
    _device(add)
    add("--heads", type=whole(1), help="attention heads (default: width / 32)")
    dtypes = ["float32", "bfloat16", "float16"]
    help = "dtype of gathers and compute (default float32)"
    add("--param-dtype", choices=dtypes, default="float32", help=help)
    free = "free parameters after the forward (default: yes, except for the root)"
    add("--reshard-after-forward", choices=["yes", "no"], help=free)
    _training(add, steps=100)
    _saving(verbs.group("train", "saving", "With any of these options, SIGTERM saves and ends the run."))
    add = verbs.add(
        "swap",
        "run a program that uses torch's FSDP2 on hwfsdp, unchanged",
        about="Run a script unchanged. When it imports FSDP2 from torch, it gets hwfsdp instead. So do the processes that it "
        "starts. Under torchrun: torchrun OPTIONS -m hwfsdp swap train.py ARGS",
        epilog=f"If another program starts your script, set PYTHONPATH={_PACKAGE / 'startup'}. "
        "This swaps FSDP2 in every process.",
    )
    add("-m", action="store_true", help="SCRIPT is the name of a module")
    add("script", metavar="SCRIPT", help="a Python file, or with -m a module")
    add("args", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments of the script")


def _saving(add: Add) -> None:
    add("--save-every", metavar="N", type=whole(1), help="save every N steps, and at the end")
    add("--resume", action="store_true", help="continue from the last save, if there is one")
    add("--keep", metavar="N", type=whole(1), help="how many saves to keep (default 2)")
    folder = "folder for saves (default runs/train/checkpoint)"
    add("--checkpoint", metavar="DIR", type=Path, help=folder)
    add("--wait-for-saves", action="store_true", help="stop training while a save is written")


def _checkpoint(verbs: Verbs) -> None:
    to = verbs.add_with_actions("checkpoint", "inspect, verify and convert checkpoints")
    add = _add_parser(to, "inspect", "list the contents of a checkpoint, and its other saves")
    a_save = {"type": Path, "help": "a checkpoint, or one save in it"}
    add("path", metavar="PATH", **a_save)
    _json(add)
    about = "read all bytes of a checkpoint, and compare them with their checksums"
    add = _add_parser(to, "verify", about)
    add("path", metavar="PATH", **a_save)
    _json(add)
    add = _add_parser(to, "convert", "write a checkpoint in another format")
    add("source", metavar="SOURCE", **a_save)
    add("target", metavar="TARGET", type=Path, help="where to write it")
    formats = ["dcp", "part", "safetensors", "store"]
    add("--to", choices=formats, required=True, help="format of TARGET")
    key = "write only what is under this key of SOURCE, such as model"
    add("--key", metavar="KEY", help=key)
    add("--overwrite", action="store_true", help="replace TARGET if it exists")
    _json(add)


def _teach(verbs: Verbs) -> None:
    add = verbs.add(
        "grade",
        "grade a submission or a class, and write a gradebook",
        about="Grade submissions: folders, zip and tar archives. If DIR contains exercises, it is one submission. Otherwise each "
        "entry of DIR is one. Each submission is a run of pytest on exercises/.",
        epilog="Exit status: 0 if the grader made no mistake, whatever students' points are; 1 if it did, in a test or a "
        "run; 2 for options that cannot be used.",
    )
    folder = "a submission, or a folder of submissions"
    add("submission", metavar="DIR", nargs="*", type=Path, help=folder)
    add("--single", action="store_true", help="each DIR is one submission, whatever it contains")
    _json(add)
    _grading(verbs.group("grade", "grading"))
    _gradebook(verbs.group("grade", "gradebook"))
    about = (
        "Write the student's edition of this course to a new folder: the files that git tracks, without "
        "solutions, tests and teachers' pages, and a wheel of the package."
    )
    add = verbs.add("release", "write the student's edition, without the answers", about=about)
    add("out", metavar="OUT", type=Path, help="a new folder")
    add("--upto", metavar="N", help="leave out the exercises after N")
    _json(add)


def _grading(add: Add) -> None:
    jobs = "number of submissions to grade at once (default: one for each core)"
    add("--jobs", metavar="N", type=whole(1), default=os.cpu_count() or 1, help=jobs)
    seed = "seed of models, sizes and inputs (default: a new one each time)"
    add("--seed", type=whole(0), help=seed)
    secret = "make seeds and sizes from the secret in this file; students then read no values"
    add("--secret", metavar="FILE", type=Path, help=secret)
    add("--upto", metavar="N", type=whole(0), help="leave out the exercises after N")
    only = "only these exercises, such as 03,homework (default: all)"
    add("--only", metavar="A,B", type=names, default=(), help=only)
    limit = "time limit of one submission; what is left after it counts nothing (default: 10)"
    add("--minutes", metavar="M", type=float, default=10.0, help=limit)
    tests = "the folder with the tests (default: exercises/ of this course)"
    add("--exercises", metavar="DIR", type=Path, help=tests)


def _gradebook(add: Add) -> None:
    folder = "folder of the gradebook (default: grades)"
    add("--out", metavar="FOLDER", type=Path, default=Path("grades"), help=folder)
    formats = "of csv, json, html, gradescope, classroom50, prairielearn (default: csv,html)"
    add("--format", metavar="A,B", default="csv,html", help=formats)
    again = "continue a stopped run; grade only what is new or has changed"
    add("--resume", action="store_true", help=again)
