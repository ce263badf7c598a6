"""`hwfsdp explain`: show how ranks would share a model's parameters, without ranks and without memory."""

from __future__ import annotations

import argparse

from hwfsdp.cli.options import answer
from hwfsdp.layout.blueprint import Blueprint, explain_on_paper
from hwfsdp.train.builders import find_builder


def explain(args: argparse.Namespace) -> int:
    """Print the table. With `--png`, draw it, too."""
    found = explain_on_paper(find_builder(args.model), args.ranks, args.rank, args.wrap)
    if args.png is not None:
        from hwfsdp.plot.parameters import plot_parameters

        plot_parameters(found.explanation).savefig(args.png, format="png")
    about = {"model": args.model, "ranks": args.ranks, "rank": args.rank, "wrapped": found.wrapped}
    return answer(args, {**about, **found.explanation.as_dict()}, _report(found, args))


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
