"""The course's plugin in small: markers, options, one way to run a student's file, and the outcome file."""

import hashlib
import json
import multiprocessing
import runpy
from pathlib import Path

import pytest

OUTCOMES = pytest.StashKey()


class Finding(Exception):
    """Why a file fails: a misconception, and a sentence."""


def pytest_addoption(parser):
    for name in ("--submission", "--outcomes", "--secret", "--unread"):
        parser.addoption(name, type=Path)
    parser.addoption("--seed", type=int, default=0)


def pytest_configure(config):
    config.addinivalue_line("markers", "exercise(number, title, file): the exercise that a module judges")
    config.addinivalue_line("markers", "points(n, ask): what a test is worth")
    config.stash[OUTCOMES] = {}


def pytest_collection_modifyitems(config, items):
    for item in items:
        name = f"{item.get_closest_marker('exercise').args[0]}.{item.name.removeprefix('test_')}"
        about = {
            "test": name,
            "sentence": item.function.__doc__,
            "points": item.get_closest_marker("points").args[0],
        }
        config.stash[OUTCOMES][item.nodeid] = {
            **about,
            "status": "not run",
            "misconception": None,
            "message": None,
            "seconds": 0.0,
        }


@pytest.fixture
def path(request):
    found = request.config.option.submission / request.node.get_closest_marker("exercise").kwargs["file"]
    if not found.exists():
        raise Finding("missing", f"there is no {found.name}")
    return found


@pytest.fixture
def run(path):
    """Run the student's file in a process of its own, and return its exit status."""

    def start():
        process = multiprocessing.get_context("forkserver").Process(target=runpy.run_path, args=(str(path),))
        process.start()
        process.join()
        return process.exitcode

    return start


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    outcome = item.config.stash[OUTCOMES][item.nodeid]
    if call.excinfo is None:
        outcome["status"] = "passed" if call.when == "call" else outcome["status"]
    elif isinstance(call.excinfo.value, Finding):
        outcome["status"], (outcome["misconception"], outcome["message"]) = "failed", call.excinfo.value.args
    elif issubclass(call.excinfo.type, Exception):
        outcome["status"] = "error"
    write(item.config)
    return report


def write(config):
    option = config.option
    if option.outcomes:
        files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in option.submission.rglob("*.py")}
        found = {
            "seed": 1234 if option.secret else option.seed,
            "file": files,
            "tests": list(config.stash[OUTCOMES].values()),
        }
        draft = option.outcomes.with_suffix(".new")
        draft.write_text(json.dumps(found))
        draft.replace(option.outcomes)
