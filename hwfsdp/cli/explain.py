"""`hwfsdp explain`: show how ranks would share a model's parameters, without ranks and without memory."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwfsdp.cli.options import whole

if TYPE_CHECKING:
    from hwfsdp.layout.blueprint import Blueprint


def add_explain(verbs: Any) -> None:
    """Add the verb `explain`."""
    explain: argparse.ArgumentParser = verbs.add_parser(
        "explain",
        help="show how the parameters of a model would be sharded",
        description="Print a table of the model's parameters, their groups, rows and padding. This starts no ranks and allocates no "
        "weights.",
    )
    explain.set_defaults(run=_explain)
    add = explain.add_argument
    add(
        "model",
        metavar="MODEL",
        help="a model's name, such as llama3-8b, or module:function: your own function that returns a model",
    )
    count, number = whole(1, 1 << 20), whole(0, 1 << 20)
    add("--ranks", type=count, default=8, metavar="N", help="number of ranks (default 8)")
    add("--rank", type=number, default=0, metavar="R", help="show this rank's rows (default 0)")
    add(
        "--wrap",
        nargs="+",
        metavar="CLASS",
        help="shard each module of these classes by itself (default: each layer of a list of equal layers)",
    )
    add("--all", action="store_true", help="list every group, even if groups are equal")
    add("--json", action="store_true", help="print JSON instead of text")
    add("--png", type=Path, metavar="FILE", help="also draw the table")


def _explain(args: argparse.Namespace) -> int:
    from hwfsdp.layout.blueprint import explain_on_paper
    from hwfsdp.train.builders import find_builder

    found = explain_on_paper(find_builder(args.model), args.ranks, args.rank, args.wrap)
    if args.png is not None:
        from hwfsdp.plot.parameters import plot_parameters

        plot_parameters(found.explanation).savefig(args.png, format="png")
    if args.json:
        about = {"model": args.model, "ranks": args.ranks, "rank": args.rank, "wrapped": found.wrapped}
        print(json.dumps({**about, **found.explanation.as_dict()}, indent=2))
    else:
        print(_report(found, args))
    return 0


def _report(found: Blueprint, args: argparse.Namespace) -> str:
    ranks = f"{args.ranks} rank{'s' if args.ranks > 1 else ''}"
    explanation = found.explanation
    head = f"{args.model} over {ranks}, as rank {args.rank} has it; {_groups(found.wrapped)}"
    table = str(explanation) if args.all else explanation.folded_text()
    return "\n".join([head, "", table, *([f"Picture: {args.png}"] if args.png else [])])


def _groups(wrapped: list[str]) -> str:
    if not wrapped:
        return "one group, the root (name classes to shard one by one with --wrap)"
    return f"{len(wrapped)} group{'s' if len(wrapped) > 1 else ''} and the root"
