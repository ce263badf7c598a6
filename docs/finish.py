"""Add to the pages of the site: dark pictures, links into the glossary, and a footer that leads to the repository and the license.

A picture that has a twin for dark pages (papers.py) is shown in the light theme, and its twin in the dark one. It may have twins for
phones, too.

A page links the first use of each term of docs/glossary.md. The link shows the definition under the pointer. The address of the
repository is the remote `origin` of the checkout in which the site is built, so a fork's site leads to the fork.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes

ROOT = Path(__file__).parent.parent
GLOSSARY = "glossary"
WITHOUT_LINKS = re.compile(r"(glossary|reference|index|copyright|genindex|book/.*)$")
# terms that pages use in their everyday meaning, too
EVERYDAY = {"event", "group", "hole", "host", "race", "root", "station", "unit"}
ENDS = ("", "_dark", "_phone", "_phone_dark")  # of the names of a picture and its twins
AS_THEY_ARE = (nodes.title, nodes.reference, nodes.literal, nodes.table, nodes.Admonition, nodes.raw)


def add_dark_pictures(app: Any, doctree: nodes.document) -> None:
    """Put the dark twin of each picture behind it, and its twins for phones (`_phone`). Each is shown in its theme and on its screens only."""
    folder = Path(app.env.doc2path(app.env.docname)).parent
    for picture in list(doctree.findall(nodes.image)):
        uri, parent = Path(picture["uri"]), picture.parent
        twins = {end: uri.with_name(f"{uri.stem}{end}{uri.suffix}") for end in ENDS}
        has = {end for end, twin in twins.items() if (folder / twin).is_file()}
        if "_dark" in has:
            copies = []
            for end in (end for end in ENDS if end in has):
                copies.append(picture.deepcopy())
                copies[-1]["uri"] = twins[end].as_posix()
                copies[-1]["classes"].append("only-dark" if end.endswith("_dark") else "only-light")
                if "_phone" in has:
                    copies[-1]["classes"].append("phone" if end.startswith("_phone") else "wide")
            parent.replace(picture, copies)
            if isinstance(parent, nodes.paragraph):
                parent["classes"].append("picture")  # site.css keeps its letters large enough


class Term(NamedTuple):
    """A term of the glossary: its place in the page, and its definition as plain text."""

    anchor: str
    definition: str


def read_terms(app: Any) -> dict[str, Term]:
    """Return all terms by name, in lower case; an empty dict if the site has no glossary."""
    terms: dict[str, Term] = {}
    if GLOSSARY not in app.env.found_docs:
        return terms
    for item in app.env.get_doctree(GLOSSARY).findall(nodes.definition_list_item):
        definition = " ".join(item[-1].astext().split())
        for heading in item.findall(nodes.term):
            for name in heading.astext().split(", "):
                terms[name.lower()] = Term(heading["ids"][0], definition)
    return terms


def link_terms(app: Any, doctree: nodes.document, name: str) -> None:
    """Link the first use of each term on a page to the glossary."""
    if WITHOUT_LINKS.match(name):
        return
    terms = {term: place for term, place in read_terms(app).items() if term not in EVERYDAY}
    if not terms:
        return
    names = "|".join(re.escape(term) for term in sorted(terms, key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w-])({names})(?:e?s)?(?![\w-])", re.IGNORECASE)
    page = app.builder.get_relative_uri(name, GLOSSARY)
    for text in [text for text in doctree.findall(nodes.Text) if _is_prose(text)]:
        pieces = list(_linked(str(text), pattern, terms, page))
        if len(pieces) > 1:
            text.parent.replace(text, pieces)


def _is_prose(text: nodes.Text) -> bool:
    parent, in_paragraph = text.parent, False
    while parent is not None:
        if isinstance(parent, AS_THEY_ARE):
            return False
        in_paragraph = in_paragraph or isinstance(parent, nodes.paragraph)
        parent = parent.parent
    return in_paragraph


def _linked(text: str, pattern: re.Pattern[str], terms: dict[str, Term], page: str) -> Iterator[nodes.Node]:
    """Cut the text at the first use of each term, and yield the pieces with the links. Remove these terms from `terms`."""
    begin = 0
    for found in pattern.finditer(text):
        term = terms.pop(found[1].lower(), None)
        if term is None:
            continue
        yield nodes.Text(text[begin : found.start()])
        link = nodes.reference(
            "", found[0], refuri=f"{page}#{term.anchor}", reftitle=term.definition, classes=["term"]
        )
        link["internal"] = True
        yield link
        begin = found.end()
    yield nodes.Text(text[begin:])


def repository() -> str:
    """Return the web address of the repository; "" if git knows none."""

    def asked(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
        return done.stdout.strip()

    # a student's edition may lie inside another checkout, which has another address
    if not (top := asked("rev-parse", "--show-toplevel")) or Path(top).resolve() != ROOT.resolve():
        return ""
    return web_address(asked("config", "--get", "remote.origin.url"))


def web_address(remote: str) -> str:
    """Return the web page of a remote, without user, password and `.git`; "" if the remote is not on the web.

    >>> web_address("git@github.com:ada/hwfsdp.git")
    'https://github.com/ada/hwfsdp'
    """
    found = re.fullmatch(
        r"(?:https?://(?:[^/@]*@)?|ssh://(?:[^/@]*@)?|[\w-]+@)([\w.-]+\.\w+)(?::\d+)?[:/]/?(.+?)(?:\.git)?/?",
        remote,
    )
    return f"https://{found[1]}/{found[2]}" if found else ""


def fill_footer(app: Any, name: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Give the templates the address of the repository."""
    context["repository"] = app.config.repository or repository()


def setup(app: Any) -> dict[str, Any]:
    """Register the hooks. Sphinx calls this function."""
    app.add_config_value("repository", "", "html", str)
    app.connect("doctree-read", add_dark_pictures, priority=400)  # before Sphinx collects the pictures
    app.connect("doctree-resolved", link_terms)
    app.connect("html-page-context", fill_footer)
    return {"parallel_read_safe": True}
